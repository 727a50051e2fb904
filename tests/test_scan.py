"""Test that each image of a case is the modality that its name says, and that damage is noticed."""

from collections.abc import Callable
from dataclasses import replace
from itertools import permutations
from math import inf
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from scipy.ndimage import binary_dilation, gaussian_filter, zoom

from brats_seg import find_cases, load_case
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES
from brats_seg.quality import scan
from tests.builders import make_label_map, write_case, write_nifti
from tests.check_builders import affine_of, images_of, phantom, real_cases, sample_of, volumes_of

Images = npt.NDArray[Any]
Change = Callable[[Images], Images]
ORDERS = [order for order in permutations(range(4)) if order != (0, 1, 2, 3)]


def remarks_on(images: Images, spacing_mm: float = 0, angle: float = 0) -> list[str]:
    """Return the remarks on scans in the axes of BraTS that are turned about the vertical one."""
    affine = np.diag([-spacing_mm, -spacing_mm, spacing_mm, 1.0])
    affine = affine if spacing_mm else affine_of(images).copy()
    turn = [[np.cos(angle), -np.sin(angle)], [np.sin(angle), np.cos(angle)]]
    affine[:2, :2] = turn @ affine[:2, :2]
    return list(scan.scan_remarks(named(images, affine), sample_of(images, affine=affine)))


def named(images: Images, affine: npt.NDArray[np.float64] | None = None) -> dict[str, Volume]:
    return dict(zip(MODALITIES, volumes_of(images, affine), strict=False))


def check(images: Images) -> None:
    scan.check_modalities("a", named(images), sample_of(images))


def in_brain(change: Change, *places: int) -> Change:
    """Return a change of some modalities, or of all, that leaves the background."""

    def damage(images: Images) -> Images:
        brain, changed = (images != 0).any(axis=0), images.astype(np.float32)
        for place in places or range(len(images)):
            changed[place] = change(changed[place]) * brain
        return changed

    return damage


def with_shell(images: Images, width_mm: int) -> Images:
    images = np.pad(images, ((0, 0), *[(width_mm, width_mm)] * 3))
    brain = (images != 0).any(axis=0)
    shell = binary_dilation(brain, iterations=width_mm) & ~brain
    for image in images:
        bright = np.percentile(image[brain], 90)
        image[shell] = bright * np.random.default_rng(0).normal(1, 0.15, np.count_nonzero(shell))
    return images


def without_agent(images: Images, scale: float, noise: float) -> Images:
    t1n, rng = images[0], np.random.default_rng(0)
    t1c = np.where(t1n > 0, scale * t1n + rng.normal(0, noise, t1n.shape), 0)
    return np.stack([t1n, t1c.astype(t1n.dtype), *images[2:]])


def ranked(image: Images) -> Images:
    return np.argsort(np.argsort(image, axis=None)).reshape(image.shape) + 1.0


def noisy(image: Images) -> Images:
    return image + np.random.default_rng(0).normal(0, 0.5 * image[image > 0].std(), image.shape)


DAMAGES: dict[str, Change] = {
    "modalities may be mixed up: t1n looks like t2f, t2f": lambda images: images[[3, 1, 2, 0]],
    "t1c shows no contrast agent": lambda images: without_agent(images, 1.2, 60),
    "the scalp does not seem stripped": lambda images: with_shell(images, 5),
    "the skull does not seem stripped": lambda images: zoom(images, (1, 4, 4, 4), order=0),
    "t2f may be shifted": lambda images: np.stack([*images[:3], np.roll(images[3], 8, 1)]),
    "t1n and t1c and t2w and t2f may be blurred": in_brain(lambda one: gaussian_filter(one, 2)),
    "t1c may be blurred": in_brain(lambda one: gaussian_filter(one, 2), 1),
    "t2w may be noisy": in_brain(noisy, 2),
    "the intensities may have been changed": in_brain(ranked),
}
"""Damage of a phantom, by the beginning of the remark on it."""
SHAPES: dict[str, Change] = {
    "the brain has an unusual size": lambda images: images[:, ::2, ::2, ::2],
    "the brain has an unusual shape": lambda images: images[..., ::2],
    "a part of the brain seems to be cut off": lambda images: images[..., :45],
    "the scan may be stored front to back": lambda images: images[:, :, ::-1],
    "the scan may be stored upside down": lambda images: images[..., ::-1],
}
"""The same of an egg of the size and the shape of a brain."""


def egg() -> Images:
    """Return noise (1, X, Y, Z) in 3 mm voxels, wider behind and above than in front and below."""
    x, y, z = np.ogrid[-1.2:1.2:56j, -1.2:1.2:66j, -1.2:1.2:56j]
    brain = x**2 / ((1 + 0.3 * y) * (1 + 0.3 * z)) + y**2 + z**2 < 1
    return (brain * np.random.default_rng(0).uniform(1, 2, brain.shape))[None]


@pytest.mark.parametrize("seed", range(4))
def test_a_phantom_is_usual_in_any_unit(seed: int) -> None:
    images, _ = phantom(seed)
    check(images)
    said = remarks_on(images)
    assert said == remarks_on(1000 * images.astype(np.float32))
    assert not any(one.startswith(tuple(DAMAGES)) for one in said), said
    # a small cube of it, and a few slices, are no head in its scalp
    for part in (np.s_[:, 20:28, 20:28, 20:28], np.s_[..., 30:33]):
        assert not any(one.startswith("the scalp") for one in remarks_on(images[part], 2.5))


@pytest.mark.parametrize("remark", [*DAMAGES, *SHAPES])
def test_each_kind_of_damage_has_its_remark(remark: str) -> None:
    images, spacing_mm = (phantom(0)[0], 0) if remark in DAMAGES else (egg(), 3)
    said = remarks_on((DAMAGES | SHAPES)[remark](images), spacing_mm)
    assert any(one.startswith(remark) for one in said), said


def test_the_neighbouring_voxel_of_a_coarse_scan_is_no_displacement() -> None:
    images = phantom(0)[0]
    for n_voxels, n_said in ((1, 0), (2, 1)):
        moved = [*images[:3], np.roll(images[3], (n_voxels, n_voxels), (1, 2))]
        said = remarks_on(np.stack(moved))
        assert sum(one.startswith("t2f may be shifted") for one in said) == n_said, said


def test_an_egg_shaped_brain_has_no_remark_on_its_shape() -> None:
    usual = remarks_on(egg(), 3)
    assert not any(one.startswith(tuple(SHAPES)) for one in usual), usual


def test_brains_in_the_space_of_mni_are_pitched_and_not_upside_down() -> None:
    images, affine = egg()[..., ::-1], np.diag([-3.0, -3.0, 3.0, 1.0])
    sample = sample_of(images, affine=affine)
    for field, code, n_said in (("qform", 1, 1), ("qform", 4, 0), ("sform", 4, 0)):
        volumes = {
            name: oriented(replace(one, geometry=replace(one.geometry, **{f"{field}_code": code})))
            for name, one in named(images, affine).items()
        }
        assert sum("upside down" in one for one in scan.scan_remarks(volumes, sample)) == n_said


def test_a_remark_holds_the_measure_and_its_limits_and_unknown_values_have_none() -> None:
    limits = [
        scan.Limit("mm", 1, 2, "look at {of}"),
        scan.Limit("ml", -inf, 2, "look there"),
        scan.Limit("degrees", 3, inf, "turn it"),
    ]
    values = {"mm": {"t1n": 0.5, "t1c": 1.5, "t2w": 2.5}, "ml": {"": 2.1}, "degrees": {"": 2.0}}
    assert list(scan.remarks(limits, values)) == [
        "look at t1n and t2w [mm: 0.5, 2.5; usual 1 to 2]",
        "look there [ml: 2.1; usual at most 2]",
        "turn it [degrees: 2; usual at least 3]",
    ]
    assert list(scan.remarks(limits, {"mm": {"t1n": np.nan}})) == []


def test_every_mix_up_of_a_phantom_is_noticed() -> None:
    local = scan.local_contrast(sample_of(phantom(0)[0]))
    for order in ORDERS:
        assert scan.likeliest_order(local[list(order)]) == tuple(MODALITIES[k] for k in order)


@pytest.mark.parametrize("kept", [(0, 1, 3), (2,)])
def test_of_fewer_than_four_modalities_the_grid_is_checked(kept: tuple[int, ...]) -> None:
    """The order of the modalities and the contrast agent show only beside the others."""
    swapped = phantom(0)[0][list(kept)][::-1]
    usual = remarks_on(swapped)
    assert not any(one.startswith(tuple(DAMAGES)) for one in usual), usual
    (found,) = {*remarks_on(swapped, angle=0.45)} - {*usual}
    assert found.startswith("the scan does not seem to be registered")
    assert "body: 25.8; usual at most 10]" in found


@pytest.mark.parametrize("shape", [(240, 240, 1), (3, 160, 150)])
def test_a_few_thick_slices_are_judged_without_an_error(shape: tuple[int, ...]) -> None:
    noise = np.random.default_rng(0).uniform(1, 2, (4, *shape)) * 1e300
    begin = "a part of the brain seems to be cut"
    assert any(one.startswith(begin) for one in remarks_on(noise, 3))


@pytest.mark.parametrize("scale", [1.0, 0.5, 1.3, -1.0])
def test_one_image_in_two_places_is_refused_even_if_scaled_and_rounded(scale: float) -> None:
    images = phantom(0)[0].astype(np.float32)
    images[1] = np.round(images[0] * scale)
    same = r"the same (voxels|image) for t1n and t1c.* a different image for each"
    with pytest.raises(CaseError, match=same):
        check(images)


def test_loading_a_case_checks_its_modalities(tmp_path: Path) -> None:
    folder = write_case(tmp_path, labelled=False)
    write_nifti(folder / "BraTS2021_00000_t2.nii.gz", make_label_map())
    with pytest.raises(CaseError, match=r"_t2\.nii\.gz: found only the values 0, 1, 2, 4"):
        load_case(find_cases(tmp_path).cases[0])


@pytest.mark.real
@pytest.mark.slow
def test_real_scans_have_no_remarks_and_what_is_done_to_them_is_noticed(real_data: Path) -> None:
    unlabelled = ("unlabelled/BraTS-GLI-00001-000", "unlabelled/TCGA-FG-6692_atlas")
    cases = real_cases(real_data, "BraTS2018", "BraTS2021", *unlabelled)
    for loaded in cases:
        assert loaded.case.remarks == ()
        images = images_of(loaded)
        local = scan.local_contrast(sample_of(images))
        for order in ORDERS:
            assert scan.likeliest_order(local[list(order)]) == tuple(MODALITIES[k] for k in order)
        native = without_agent(images, 1, 0.05 * images[0][images[0] > 0].mean())
        assert any(text.startswith("t1c shows no contrast") for text in remarks_on(native))
        for width_mm in (5, 10):
            assert remarks_on(with_shell(images, width_mm))
        assert remarks_on(in_brain(lambda one: gaussian_filter(one, 1))(images))
    assert len(cases) == 14
