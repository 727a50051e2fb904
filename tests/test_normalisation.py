import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from hypothesis.extra.numpy import arrays

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.data import normalisation
from brats_seg.errors import CaseError
from brats_seg.labels import BRATS2017, BRATS2024, regions_of
from brats_seg.voxels.box import Box, background_of, brain_mask
from brats_seg.voxels.grids import Resampling

ONE, TWO = (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)


def volume(array: npt.NDArray[np.generic], file: str = "t1.nii") -> Volume:
    return Volume(array=array, geometry=Geometry.at(np.eye(4), array.shape), file=file)


def modalities(rng: np.random.Generator) -> list[Volume]:
    """Four volumes of 6x6x6 with a brain of 2x3x2 at (2, 1, 3)."""
    volumes = []
    for number in range(4):
        array = np.zeros((6, 6, 6), dtype="int16", order="F")
        array[2:4, 1:4, 3:5] = rng.integers(100, 900, size=(2, 3, 2))
        volumes.append(volume(array, f"{number}.nii"))
    return volumes


def test_each_modality_has_mean_0_and_deviation_1_in_the_brain(rng: np.random.Generator) -> None:
    volumes = modalities(rng)
    # a voxel of the box that is background in all modalities, and one that is in only one
    for item in volumes:
        item.array[2, 1, 3] = 0
    volumes[0].array[3, 3, 4] = 0
    brain = normalisation.extract_brain("a", volumes, None)
    inside = brain_mask([item.array for item in volumes])[brain.box.slices]
    assert np.count_nonzero(~inside) == 1
    for modality, item in zip(brain.image, volumes, strict=True):
        values = item.array[brain.box.slices][inside]
        assert (modality[~inside] == 0).all()
        expected = (values - values.mean()) / values.std()
        np.testing.assert_allclose(modality[inside], expected, rtol=2**-11, atol=1e-6)


def test_the_box_holds_all_modalities_and_all_labels(rng: np.random.Generator) -> None:
    volumes, labels = modalities(rng), np.zeros((6, 6, 6), dtype=np.uint8)
    brain = normalisation.extract_brain("a", volumes, volume(labels))
    assert brain.box == Box(start=(2, 1, 3), stop=(4, 4, 5))
    volumes[2].array[4, 4, 5] = -3  # values below the background are brain
    labels[2, 1, 3], labels[0, 5, 3] = 2, 1
    brain = normalisation.extract_brain("a", volumes, volume(labels, "seg.nii"))
    assert brain.box == Box(start=(0, 1, 3), stop=(5, 6, 6))
    np.testing.assert_array_equal(brain.box.placed(brain.labels, (6, 6, 6)), labels)


def test_a_scan_without_brain_or_without_contrast_is_refused(rng: np.random.Generator) -> None:
    volumes, blank = modalities(rng), [volume(np.zeros((6, 6, 6)), f"{n}.nii") for n in range(4)]
    mask = volume((volumes[1].array > 0).astype(np.int16), "mask.nii")
    with pytest.raises(CaseError, match=r"file 0.nii: found no voxel that differs"):
        normalisation.extract_brain("a", blank, None)
    with pytest.raises(CaseError, match=r"case a, file mask.nii: found the value 1 in the whole"):
        normalisation.extract_brain("a", [volumes[0], mask, *volumes[2:]], None)
    # the background is what most of the edges hold
    array = np.full((6, 6, 6), 9.0)
    array[1:5, 1:5, 1:5] = 3
    assert (background_of(array), background_of(np.zeros((5, 4, 1)))) == (9, 0)
    # a head that reaches the edges
    assert background_of(rng.integers(1, 500, size=(6, 6, 6))) == 0


def test_a_line_says_at_which_spacing_cases_are_prepared() -> None:
    assert normalisation.spacing_line([ONE, (0.98, 1.0, 1.0)], ONE) is None
    assert normalisation.spacing_line([TWO] * 3, TWO) == "cases are prepared at 2x2x2 mm"


@pytest.mark.parametrize(
    ("spacings", "chosen"),
    [
        ([], ONE),
        ([ONE] * 3, ONE),
        ([(0.99999994, 1.0000001, 1.0)], ONE),
        ([(0.96, 1.0, 1.04)], ONE),
        ([ONE, TWO, TWO], TWO),
        ([TWO, ONE], ONE),
        ([ONE, TWO, ONE, TWO], ONE),
        ([(0.9375, 0.9375, 5.0)] * 2 + [(0.5, 0.5, 6.0)], (0.94, 0.94, 5.0)),
        ([(1000.0, 1000.0, 1000.0), TWO, TWO], TWO),
    ],
)
def test_the_spacing_is_the_median_along_each_axis(spacings, chosen) -> None:
    assert normalisation.choose_spacing(spacings) == chosen
    assert normalisation.choose_spacing(spacings[::-1]) == chosen


def test_shape_and_spacing_are_in_the_axes_of_brats() -> None:
    """X of this grid points to the head, Y to the left and Z to the back."""
    affine = np.zeros((4, 4))
    affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = 5.0, -0.9, -0.8, 1.0
    grid = normalisation.grid_of(Geometry.at(affine, (20, 30, 40)))
    assert grid == ((30, 40, 20), (0.9, 0.8, 5.0))


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 2, 2, 0), [0, 0, 2, 2, 2, 2, 0, 0]),
        ((4, 2, 0, 0), [4, 4, 2, 2, 0, 0, 0, 0]),
        ((4, 1, 2, 0), [4, 4, 1, 1, 2, 2, 0, 0]),
        # the fourth voxel lies 0.42 of the way to the tumour
        ((0, 0, 0, 2, 2), [0, 0, 0, 0, 2, 2]),
    ],
)
def test_labels_keep_their_regions(values: tuple[int, ...], expected: list[int]) -> None:
    line = volume(np.array(values, dtype=np.uint8)[:, None, None], "seg.nii")
    resampling = Resampling(before=(len(values), 1, 1), after=(len(expected), 1, 1))
    finer = normalisation.resample_labels(line, BRATS2017, resampling)
    assert finer.array[:, 0, 0].tolist() == expected


@given(
    array=arrays(np.uint8, (5, 4, 3), elements=st.integers(0, 4)),
    spacing_mm=st.tuples(*[st.floats(0.4, 2.5)] * 3),
)
def test_nested_regions(array, spacing_mm):
    resampling = Resampling.needed(array.shape, ONE, spacing_mm)
    assume(resampling is not None)
    finer = normalisation.resample_labels(volume(array), BRATS2024, resampling)
    wt, tc, et = regions_of(finer.array, BRATS2024)
    assert not ((tc & ~wt) | (et & ~tc)).any()
