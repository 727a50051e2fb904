"""Labels look like the tissues that they stand for, or the label map is refused."""

from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.conventions import resolve
from brats_seg.errors import LabelError
from brats_seg.labels import (
    BRATS2017,
    BRATS2023,
    BRATS2024,
    BRATS2024_PED,
    MSD,
    LabelConvention,
    LabelMap,
    regions_of,
)
from brats_seg.quality.label_map import (
    LabelRoles,
    check_placement,
    differ,
    judge_numbering,
    outermost_label,
    rival_of,
    roles_of,
    roles_of_outline,
)
from tests.check_builders import (
    label_volume,
    phantom,
    real_cases,
    renumbered,
    sample_of,
    volumes_of,
)

NUMBERINGS = (BRATS2017, BRATS2023, MSD, BRATS2024_PED)
RELEASES = (
    "brats2018",
    "brats2021",
    "brats2023-gli",
    "brats2024-gli",
    "brats-ped",
    "msd",
    "unknown",
)
CLEAR = 1
"""Seed of a phantom whose tumour is typical: oedema all around, a rim, necrosis."""


def values_of(label_map: LabelMap) -> set[int]:
    return set(np.unique(label_map).tolist())


def outcome(
    label_map: LabelMap, truth: LabelMap, roles: LabelRoles, convention: LabelConvention
) -> str:
    """Return what happens to a label map that is read in a convention."""
    if values_of(label_map) - convention.values:
        return "refused"
    if judge_numbering(roles, values_of(label_map), convention).fitting:
        return "refused"
    is_right = (regions_of(label_map, convention) == regions_of(truth, BRATS2017)).all()
    return "right" if is_right else "wrong"


def test_the_roles_of_labels_are_seen_in_the_scan() -> None:
    images, truth = phantom(CLEAR)

    for numbering in NUMBERINGS:
        oedema, _, enhancing = numbering.painted
        found = roles_of(sample_of(images, renumbered(truth, numbering)))
        assert found == LabelRoles(outermost=oedema, enhancing=enhancing)


@pytest.mark.parametrize("numbering", NUMBERINGS, ids=lambda numbering: numbering.name)
@pytest.mark.parametrize("release", RELEASES)
def test_another_numbering_under_any_name_is_read_right_or_refused(
    release: str, numbering: LabelConvention
) -> None:
    images, truth = phantom(CLEAR)
    label_map = renumbered(truth, numbering)
    roles = roles_of(sample_of(images, label_map))
    convention = resolve(release=release, shape=None, values=values_of(label_map)).convention

    found = outcome(label_map, truth, roles, convention)

    assert found != "wrong"
    if convention == numbering:
        assert found == "right"


@pytest.mark.parametrize("seed", range(8))
def test_phantoms_are_no_false_alarm(seed: int) -> None:
    images, truth = phantom(seed, with_et=seed % 4 != 3)
    sample = sample_of(images, truth)

    check_placement("a", volumes_of(images), label_volume(truth), sample)

    assert judge_numbering(roles_of(sample), values_of(truth), BRATS2017).contradiction == ""


def test_the_numbering_that_fits_is_named() -> None:
    verdict = judge_numbering(LabelRoles(outermost=1, enhancing=3), {0, 1, 2, 3}, BRATS2023)

    assert verdict.contradiction == "label 1 surrounds the others, but oedema is 2"
    assert verdict.fitting == ("msd",)
    refusal = str(verdict.refusal("a", "seg.nii", BRATS2023))
    assert refusal.startswith("case a, file seg.nii: found labels that brats2023 does not explain")
    assert "msd fits. Name the right one with --labels, such as --labels msd" in refusal


@pytest.mark.parametrize(
    ("roles", "values", "convention"),
    [
        (LabelRoles(), {0, 1, 2, 3}, BRATS2023),
        (LabelRoles(outermost=2, enhancing=3), {0, 1, 2, 3}, BRATS2023),
        # without oedema, another label may be outermost
        (LabelRoles(outermost=2), {0, 2, 3}, BRATS2024_PED),
        (LabelRoles(enhancing=3), {0, 2, 3, 4}, BRATS2024),
    ],
)
def test_what_a_convention_explains_is_no_contradiction(
    roles: LabelRoles, values: set[int], convention: LabelConvention
) -> None:
    assert judge_numbering(roles, values, convention).contradiction == ""


def test_the_clear_label_maps_of_a_release_decide_for_the_others() -> None:
    as_msd = (LabelRoles(outermost=1, enhancing=3), (0, 1, 2, 3))
    as_2023 = (LabelRoles(outermost=2, enhancing=3), (0, 1, 2, 3))
    unclear = (LabelRoles(), (0, 1, 2))

    assert rival_of([as_msd, unclear], BRATS2023) == "msd"
    assert rival_of([as_msd, as_2023], BRATS2023) == ""
    assert rival_of([unclear], BRATS2023) == ""
    assert differ("msd", BRATS2023, (0, 1, 2))
    # label 3 is enhancing tumour in both
    assert not differ("msd", BRATS2023, (0, 3))
    assert not differ("", BRATS2023, (0, 1, 2))


def test_a_ring_has_an_outline_that_shows_oedema() -> None:
    x = np.abs(np.arange(-20, 21))
    distance = np.maximum(np.maximum(x[:, None, None], x[:, None]), x)
    labels = np.select([distance < 8, distance < 12, distance < 18], [1, 3, 2]).astype(np.uint8)

    assert outermost_label(labels, [1, 2, 3]) == 2
    assert outermost_label(labels, [2]) is None
    assert roles_of_outline(labels[2:-2, 2:-2, 2:-2], (1, 1, 1)) == LabelRoles(outermost=2)
    # too small to be judged
    assert roles_of_outline(labels[::5, ::5, ::5], (1, 1, 1)) == LabelRoles()


def shifted(label_map: LabelMap, by: int) -> LabelMap:
    """Move a label map along the axis and to the side where it stays in the volume longest."""
    centre = np.argwhere(label_map > 0).mean(axis=0)
    return np.roll(label_map, by if centre[1] < label_map.shape[1] / 2 else -by, axis=1)


def transposed(label_map: LabelMap) -> LabelMap:
    """Exchange the first two axes around the middle of the volume."""
    x, y, z = label_map.shape
    n = max(x, y)
    framed = np.zeros((n, n, z), np.uint8)
    framed[(n - x) // 2 :, (n - y) // 2 :][:x, :y] = label_map
    return framed.transpose(1, 0, 2)[(n - x) // 2 :, (n - y) // 2 :][:x, :y]


MISPLACED: dict[str, Callable[[LabelMap], LabelMap]] = {
    "mirrored": lambda label_map: label_map[::-1],
    "front to back": lambda label_map: label_map[:, ::-1],
    "upside down": lambda label_map: label_map[:, :, ::-1],
    "transposed": transposed,
    "shifted": lambda label_map: shifted(label_map, 20),
    "all ones": lambda label_map: np.ones_like(label_map),
}


@pytest.mark.parametrize("fault", [fault for fault in MISPLACED if fault != "transposed"])
def test_a_label_map_that_is_not_on_the_tumour_is_refused(fault: str) -> None:
    images, truth = phantom(CLEAR)
    label_map = np.ascontiguousarray(MISPLACED[fault](truth))

    with pytest.raises(LabelError, match="expected labels on the tumour of this scan"):
        check_placement(
            "a", volumes_of(images), label_volume(label_map), sample_of(images, label_map)
        )


def test_a_mirrored_label_map_is_called_so() -> None:
    images, truth = phantom(CLEAR)
    label_map = truth[::-1]

    with pytest.raises(LabelError, match="It would fit if it were mirrored left to right"):
        check_placement(
            "a", volumes_of(images), label_volume(label_map), sample_of(images, label_map)
        )


def test_a_small_object_is_not_judged() -> None:
    """Less than 50 ml are no brain: its labels may be anything."""
    images, truth = phantom(CLEAR)
    part = (slice(20, 40), slice(20, 40), slice(20, 40))
    label_map = np.ascontiguousarray(truth[part][::-1])
    sample = sample_of(images[:, *part], label_map)

    check_placement("a", volumes_of(images[:, *part]), label_volume(label_map), sample)

    assert roles_of(sample) == LabelRoles()


def arrays_of(cases: Sequence[object]) -> list[tuple[np.ndarray, LabelMap]]:
    return [
        (np.stack([volume.array for volume in case.volumes]), np.asarray(case.label.array))
        for case in cases
    ]


@pytest.mark.real
@pytest.mark.slow
def test_real_cases_in_every_numbering_are_right_or_refused(real_data: Path) -> None:
    """One case has weak contrast: its 4 may be resection cavity, if it stands alone."""
    cases = arrays_of(real_cases(real_data, "BraTS2018", "BraTS2021"))
    n_wrong = n_false_alarms = 0
    for images, truth in cases:
        for numbering in NUMBERINGS:
            label_map = renumbered(truth, numbering)
            roles = roles_of(sample_of(images, label_map))
            for release in RELEASES:
                values = values_of(label_map)
                convention = resolve(release=release, shape=None, values=values).convention
                found = outcome(label_map, truth, roles, convention)
                n_wrong += found == "wrong"
                n_false_alarms += found == "refused" and convention == numbering

    assert len(cases) == 12
    assert (n_wrong, n_false_alarms) == (1, 0)


@pytest.mark.real
@pytest.mark.slow
def test_real_label_maps_that_are_misplaced_are_refused_or_remarked_on(real_data: Path) -> None:
    """Eight of ten are refused."""
    n_tries = n_refused = 0
    cases = arrays_of(real_cases(real_data, "BraTS2018", "BraTS2021"))
    for number, (images, truth) in enumerate(cases):
        volumes = volumes_of(images)
        right = check_placement("a", volumes, label_volume(truth), sample_of(images, truth))
        assert right == ()
        faults = [fault(truth) for fault in MISPLACED.values()]
        faults += [cases[number - 1][1], cases[number - 2][1]]
        for label_map in map(np.ascontiguousarray, faults):
            n_tries += 1
            sample = sample_of(images, label_map)
            try:
                assert check_placement("a", volumes, label_volume(label_map), sample)
            except LabelError:
                n_refused += 1

    assert n_refused >= 0.8 * n_tries
