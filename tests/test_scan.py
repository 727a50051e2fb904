"""Test that each image of a case is the modality that its name says."""

from itertools import permutations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.ndimage import binary_dilation

from brats_seg.cases.case import load_case
from brats_seg.cases.find import find_cases
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES
from brats_seg.quality.scan import check_modalities, likeliest_order, local_contrast, scan_remarks
from tests.builders import make_label_map, write_case, write_nifti
from tests.check_builders import (
    ATLAS_AFFINE,
    geometry,
    images_of,
    phantom,
    real_cases,
    sample_of,
    volumes_of,
)

ORDERS = [order for order in permutations(range(4)) if order != (0, 1, 2, 3)]


def remarks_on(images: npt.NDArray[np.generic], affine: np.ndarray = ATLAS_AFFINE) -> list[str]:
    return list(scan_remarks(geometry(images.shape[1:], affine), sample_of(images)))


def check(images: npt.NDArray[np.generic]) -> None:
    check_modalities("a", volumes_of(images), sample_of(images))


def with_shell(images: npt.NDArray[np.generic], width_mm: int) -> npt.NDArray[np.generic]:
    """Return scans with bright tissue around the brain in all modalities."""
    images = np.pad(images, ((0, 0), *[(width_mm, width_mm)] * 3))
    brain = (images != 0).any(axis=0)
    shell = binary_dilation(brain, iterations=width_mm) & ~brain
    for image in images:
        bright = np.percentile(image[brain], 90)
        image[shell] = bright * np.random.default_rng(0).normal(1, 0.15, np.count_nonzero(shell))
    return images


def without_agent(
    images: npt.NDArray[np.generic], scale: float, noise: float
) -> npt.NDArray[np.generic]:
    """Return scans whose T1 with contrast agent is the native one, scaled and with noise."""
    t1n, rng = images[0], np.random.default_rng(0)
    t1c = np.where(t1n > 0, scale * t1n + rng.normal(0, noise, t1n.shape), 0)
    return np.stack([t1n, t1c.astype(t1n.dtype), *images[2:]])


@pytest.mark.parametrize("seed", range(4))
def test_a_phantom_is_usual(seed: int) -> None:
    images, _ = phantom(seed, with_et=seed != 3)

    check(images)

    assert remarks_on(images) == []


def test_every_mix_up_of_a_phantom_is_noticed() -> None:
    images, _ = phantom(0)
    local = local_contrast(sample_of(images))

    for order in ORDERS:
        assert likeliest_order(local[list(order)]) == tuple(MODALITIES[k] for k in order)
    (remark,) = remarks_on(images[[3, 1, 2, 0]])
    assert remark == "modalities may be mixed up: t1n looks like t2f, t2f looks like t1n"


@pytest.mark.parametrize("kept", [(0, 1, 3), (2,)])
def test_fewer_than_four_modalities_are_not_compared_but_their_grid_is_checked(
    kept: tuple[int, ...],
) -> None:
    """The order of the modalities and the contrast agent show only beside the others."""
    images, _ = phantom(0)
    swapped = images[list(kept)][::-1]

    assert sample_of(swapped).is_brain
    assert remarks_on(swapped) == []
    turned = np.eye(4)
    turned[:2, :2] = [[0.9, -0.436], [0.436, 0.9]]
    (found,) = remarks_on(swapped, turned)
    assert found.startswith("the grid is turned by 26 degrees")


def test_modalities_that_do_not_resemble_each_other_are_left_as_they_are(
    rng: np.random.Generator,
) -> None:
    noise = rng.integers(1, 900, (4, 50, 50, 50))

    check(noise)

    assert likeliest_order(local_contrast(sample_of(noise))) == MODALITIES


@pytest.mark.parametrize("scale", [1.0, 0.5, 1.3, -1.0])
def test_one_image_in_two_places_is_refused_even_if_scaled_and_rounded(scale: float) -> None:
    images, _ = phantom(0)
    images = images.astype(np.float32)
    images[1] = np.round(images[0] * scale)

    with pytest.raises(CaseError, match=r"the same (voxels|image) for t1n and t1c"):
        check(images)


def test_tissue_around_the_brain_and_a_missing_contrast_agent_are_remarks() -> None:
    images, _ = phantom(0)
    large = np.repeat(np.repeat(np.repeat(images, 3, 1), 3, 2), 3, 3)

    for changed, text in (
        (with_shell(images, 5), "scalp does not seem to be stripped"),
        (with_shell(images, 10), "scalp does not seem to be stripped"),
        (large, "ml, more than a brain: the skull does not seem"),
        (without_agent(images, 1.2, 60), "t1c shows no contrast agent"),
    ):
        assert any(text in remark for remark in remarks_on(changed))


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
        local = local_contrast(sample_of(images))
        for order in ORDERS:
            assert likeliest_order(local[list(order)]) == tuple(MODALITIES[k] for k in order)
        native = without_agent(images, 1, 0.05 * images[0][images[0] > 0].mean())
        assert any(text.startswith("t1c shows no contrast") for text in remarks_on(native))
        for width_mm in (5, 10):
            assert remarks_on(with_shell(images, width_mm))

    assert len(cases) == 14
