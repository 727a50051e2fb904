"""Test that labels look like the tissues that they stand for, or the label map is refused."""

from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest

from brats_seg import labels as conventions
from brats_seg.cases.releases import resolve_convention
from brats_seg.errors import LabelError
from brats_seg.labels import BRATS2017, BRATS2023, MODALITIES, LabelConvention, LabelMap, regions_of
from brats_seg.quality import label_map as quality
from brats_seg.wings import NO_JUDGEMENT, Judgement, ShownLabels
from tests import check_builders as builders
from tests.check_builders import phantom, renumbered, sample_of

NUMBERINGS = (BRATS2017, BRATS2023, conventions.MSD, conventions.BRATS2024_PED)
RELEASES = ["brats2018", "brats2021", "brats2023-gli", "brats2024-gli", "brats-ped"]
RELEASES += ["msd", "unknown"]


def shown(
    outermost: int | None = None,
    enhancing: int | None = None,
    values: Iterable[int] = (0, 1, 2, 3),
    **fields: Any,
) -> ShownLabels:
    labels = {"outermost": outermost, "enhancing": enhancing, "values": frozenset(values)}
    return ShownLabels(case_id="a", file="seg.nii", **labels, **fields)


def shown_by(images: npt.NDArray[np.generic], label_map: LabelMap) -> ShownLabels:
    return shown(
        *quality.find_tissues(sample_of(images, label_map)), values=np.unique(label_map).tolist()
    )


def placed(images: npt.NDArray[np.generic], label_map: LabelMap) -> Judgement:
    label_map = np.ascontiguousarray(label_map)
    sample = sample_of(images, label_map)
    return quality.judge_sample(
        "a", builders.volumes_of(images), builders.label_volume(label_map), sample
    )


def outcomes(truth: LabelMap, labels: ShownLabels, numbering: LabelConvention) -> dict[str, str]:
    """Return what happens to a label map in a numbering that lies there as any release."""
    label_map, found = renumbered(truth, numbering), {}
    for release in RELEASES:
        convention, _ = resolve_convention(release, labels.values)
        if (
            labels.values - convention.values
            or quality.judge_group([labels], convention)[0].refusal
        ):
            result = "refused"
        elif (regions_of(label_map, convention) == regions_of(truth, BRATS2017)).all():
            result = "right"
        else:
            result = "wrong"
        found[release] = result if convention != numbering else f"own {result}"
    return found


@pytest.mark.parametrize("numbering", NUMBERINGS, ids=lambda numbering: numbering.name)
def test_another_numbering_is_read_right_or_refused(numbering: LabelConvention) -> None:
    # in the scans of seeds 0, 2 and 4 the outermost label cannot be told, and has a warning instead
    images, truth = phantom(1)
    labels = shown_by(images, renumbered(truth, numbering))
    oedema, _, enhancing = numbering.painted
    assert (labels.outermost, labels.enhancing) == (oedema, enhancing)
    assert {*outcomes(truth, labels, numbering).values()} <= {"own right", "right", "refused"}


@pytest.mark.parametrize("seed", range(0, 8, 2))
def test_phantoms_are_no_false_alarm(seed: int) -> None:
    images, truth = phantom(seed, with_et=seed != 6)
    judgement = placed(images, truth)
    assert (judgement.refusal, judgement.remarks) == (None, ())
    assert quality.judge_group([shown_by(images, truth)], BRATS2017) == (NO_JUDGEMENT,)


def test_the_numbering_that_fits_is_named() -> None:
    """A person who named the convention gets a remark instead; other advice can be given."""
    labels = shown(outermost=1, enhancing=3)
    (judgement,) = quality.judge_group([labels], BRATS2023)
    (named,) = quality.judge_group([labels], BRATS2023, is_named=True)
    (advised,) = quality.judge_group([labels], BRATS2023, next_step="Renumber it.")
    assert isinstance(judgement.refusal, LabelError)
    assert "label 1 surrounds the others, but oedema is 2" in str(judgement.refusal)
    assert "msd fits. Name the right one, such as --convention" in str(judgement.refusal)
    assert str(advised.refusal).endswith("Renumber it.")
    assert named.refusal is None
    assert named.remarks[0].endswith("oedema is 2; msd fits")


@pytest.mark.parametrize(
    ("labels", "convention", "others"),
    [
        (shown(outermost=2, enhancing=3), BRATS2023, ""),
        (shown(outermost=2), BRATS2023, ""),
        (shown(enhancing=4, values=(0, 1, 2, 4)), BRATS2017, ""),
        # without oedema, another label may be outermost
        (shown(outermost=2, values=(0, 2, 3)), conventions.BRATS2024_PED, ""),
        (shown(enhancing=3, values=(0, 2, 3, 4)), conventions.BRATS2024, ""),
        (shown(), BRATS2023, "msd or brats2024-ped"),
        (shown(enhancing=3), BRATS2023, "msd"),
        (shown(values=(0, 1, 2, 4)), BRATS2017, "brats2024-ped"),
    ],
)
def test_what_a_convention_explains_is_no_contradiction(labels, convention, others) -> None:
    """Others may explain it as well; several label maps of one origin are judged together."""
    (judgement,) = quality.judge_group([labels], convention)
    warning = f"numbering is {convention.name} or {others}: "
    assert [warning in text for text in judgement.remarks] == [True] * bool(others)
    assert judgement.refusal is None
    assert quality.judge_group([labels], convention, is_named=True) == (NO_JUDGEMENT,)
    assert quality.judge_group([labels, labels], convention) == (NO_JUDGEMENT, NO_JUDGEMENT)


@pytest.mark.parametrize(
    ("group", "is_refused"),
    [
        ([shown(1, 3), shown(values=(0, 1, 2))], [True, True]),
        # as many are right
        ([shown(1, 3), shown(2, 3)], [True, False]),
        ([shown(values=(0, 1, 2))], [False]),
        # label 3 is enhancing tumour in both
        ([shown(1, 3), shown(values=(0, 3))], [True, False]),
        # an outline alone is weak evidence, unless most agree with it
        ([shown(1, is_on_scan=False), shown(1, is_on_scan=False)], [True, True]),
        ([shown(1, is_on_scan=False), shown(2, 3), shown(2, 3)], [False, False, False]),
    ],
)
def test_clear_label_maps_decide_for_all(group: list[ShownLabels], is_refused: list[bool]) -> None:
    judgements = quality.judge_group(group, BRATS2023)
    assert [judgement.refusal is not None for judgement in judgements] == is_refused
    assert all("msd fits" in str(one.refusal) for one in judgements if one.refusal)


def test_a_ring_has_an_outline_that_shows_oedema() -> None:
    x = np.abs(np.arange(-20, 21))
    distance = np.maximum(np.maximum(x[:, None, None], x[:, None]), x)
    labels = np.select([distance < 8, distance < 12, distance < 18], [1, 3, 2]).astype(np.uint8)
    assert quality.outermost_of_outline(labels[2:-2, 2:-2, 2:-2], (1, 1, 1)) == 2
    assert quality.outermost_of_outline(np.where(labels == 2, labels, 0), (1, 1, 1)) is None
    # too small to be judged
    assert quality.outermost_of_outline(labels[::5, ::5, ::5], (1, 1, 1)) is None


def moved(label_map: LabelMap) -> LabelMap:
    centre = np.argwhere(label_map > 0).mean(axis=0)
    return np.roll(label_map, 20 if centre[1] < label_map.shape[1] / 2 else -20, axis=1)


MISPLACED: dict[str, Callable[[LabelMap], LabelMap]] = {
    "mirrored": lambda label_map: label_map[::-1],
    "front to back": lambda label_map: label_map[:, ::-1],
    "upside down": lambda label_map: label_map[:, :, ::-1],
    "shifted": moved,
    "all ones": np.ones_like,
}


@pytest.mark.parametrize("fault", MISPLACED)
def test_a_label_map_that_is_not_on_the_tumour_is_refused(fault: str) -> None:
    images, truth = phantom(0)
    refusal = placed(images, MISPLACED[fault](truth)).refusal
    assert isinstance(refusal, LabelError)
    assert ("fit if it were mirrored left to right" in str(refusal)) == (fault == "mirrored")
    # less than 50 ml are no brain: its labels may be anything
    part = (slice(20, 40), slice(20, 40), slice(20, 40))
    assert placed(images[:, *part], MISPLACED[fault](truth)[part]) == NO_JUDGEMENT


@pytest.mark.parametrize("kept", [1, 3])
def test_a_label_map_beside_fewer_than_four_modalities_is_not_judged(kept: int) -> None:
    images, truth = phantom(0)
    label = builders.label_volume(truth[::-1])
    volumes = dict(zip(MODALITIES, builders.volumes_of(images[:kept]), strict=False))
    judgement = quality.judge_scan("a", volumes, label)
    assert (judgement.refusal, judgement.outermost) == (None, None)


@pytest.mark.real
@pytest.mark.slow
def test_real_cases_in_every_numbering_are_right_or_refused(real_data: Path) -> None:
    """One case has weak contrast: its 4 may be resection cavity, if it stands alone."""
    real = builders.real_cases(real_data, "BraTS2018", "BraTS2021")
    cases = [
        (builders.images_of(case), np.asarray(case.label.array)) for case in real if case.label
    ]
    found = Counter[str]()
    for images, truth in cases:
        for numbering in NUMBERINGS:
            labels = shown_by(images, renumbered(truth, numbering))
            found.update(outcomes(truth, labels, numbering).values())
    assert len(cases) == 12
    assert (found["wrong"] + found["own wrong"], found["own refused"]) == (1, 0)
