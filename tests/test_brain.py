from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest

from brats_seg.cases.nifti import Geometry, Volume, read_volume
from brats_seg.data.brain import extract_brain
from brats_seg.errors import CaseError
from brats_seg.voxels.box import Box
from brats_seg.voxels.brain import background_of, brain_mask

GEOMETRY = Geometry(shape=(6, 6, 6), affine=np.eye(4), qform=np.eye(4), qform_code=1, sform_code=1)


def volume(array: npt.NDArray[np.generic], file: str = "t1.nii") -> Volume:
    return Volume(array=array, geometry=GEOMETRY, file=file)


def modalities(
    rng: np.random.Generator, *, background: float = 0, dtype: str = "int16"
) -> list[Volume]:
    """Four volumes of 6x6x6 with a brain of 2x3x2 at (2, 1, 3)."""
    volumes = []
    for number in range(4):
        array = np.full((6, 6, 6), background, dtype=dtype, order="F")
        array[2:4, 1:4, 3:5] = rng.integers(100, 900, size=(2, 3, 2))
        volumes.append(volume(array, f"{number}.nii"))
    return volumes


@pytest.mark.parametrize("background", [0, -45, 7])
@pytest.mark.parametrize("dtype", ["int16", "float32", "float64"])
def test_the_crop_is_the_brain_whatever_the_background(
    rng: np.random.Generator, background: float, dtype: str
) -> None:
    brain = extract_brain("a", modalities(rng, background=background, dtype=dtype), None)

    assert brain.box == Box(start=(2, 1, 3), stop=(4, 4, 5))
    assert brain.image.shape == (4, 2, 3, 2)
    assert brain.image.dtype == np.float32
    assert brain.labels is None


def test_each_modality_has_mean_0_and_deviation_1_inside_and_0_around(
    rng: np.random.Generator,
) -> None:
    volumes = modalities(rng)
    # a voxel of the box that is background in all modalities, and one that is in only one
    for item in volumes:
        item.array[2, 1, 3] = 0
    volumes[0].array[3, 3, 4] = 0

    brain = extract_brain("a", volumes, None)

    inside = brain_mask([item.array for item in volumes])[brain.box.slices]
    assert np.count_nonzero(~inside) == 1
    for modality, item, mean, std in zip(
        brain.image, volumes, brain.means, brain.stds, strict=True
    ):
        values = item.array[brain.box.slices]
        np.testing.assert_allclose(modality[inside].mean(), 0, atol=1e-6)
        np.testing.assert_allclose(modality[inside].std(), 1, rtol=1e-6)
        assert (modality[~inside] == 0).all()
        assert mean == pytest.approx(values[inside].mean())
        assert std == pytest.approx(values[inside].std())
        np.testing.assert_allclose(modality[inside], (values[inside] - mean) / std, atol=1e-6)


def test_the_brain_is_the_union_of_the_modalities(rng: np.random.Generator) -> None:
    volumes = modalities(rng)
    volumes[2].array[5, 5, 5] = 300

    assert extract_brain("a", volumes, None).box == Box(start=(2, 1, 3), stop=(6, 6, 6))


def test_labels_are_cropped_alike_and_widen_the_box(rng: np.random.Generator) -> None:
    labels = np.zeros((6, 6, 6), dtype=np.uint8)
    labels[2, 1, 3] = 2
    labels[0, 5, 3] = 4

    brain = extract_brain("a", modalities(rng), volume(labels, "seg.nii"))

    assert brain.box == Box(start=(0, 1, 3), stop=(4, 6, 5))
    assert brain.labels is not None
    np.testing.assert_array_equal(brain.box.placed(brain.labels, (6, 6, 6)), labels)


def test_an_empty_label_map_leaves_the_box(rng: np.random.Generator) -> None:
    labels = volume(np.zeros((6, 6, 6), dtype=np.uint8), "seg.nii")

    assert extract_brain("a", modalities(rng), labels).box == Box(start=(2, 1, 3), stop=(4, 4, 5))


def test_values_below_the_background_are_brain(rng: np.random.Generator) -> None:
    volumes = modalities(rng)
    volumes[0].array[4, 4, 4] = -3

    assert brain_mask([item.array for item in volumes])[4, 4, 4]


def test_the_background_is_what_most_of_the_edges_hold() -> None:
    array = np.full((6, 6, 6), 9.0)
    array[1:5, 1:5, 1:5] = 3

    assert background_of(array) == 9


def test_a_head_that_reaches_the_edges_has_background_0(rng: np.random.Generator) -> None:
    assert background_of(rng.integers(1, 500, size=(6, 6, 6))) == 0


def test_a_volume_of_one_plane_has_a_background() -> None:
    assert background_of(np.zeros((5, 4, 1))) == 0


def test_a_modality_without_contrast_in_the_brain_is_refused(rng: np.random.Generator) -> None:
    volumes = modalities(rng)
    volumes[1] = volume((volumes[1].array > 0).astype(np.int16), "mask.nii")

    with pytest.raises(
        CaseError, match=r"case a, file mask.nii: found the value 1 in the whole brain"
    ):
        extract_brain("a", volumes, None)


def test_a_case_without_brain_is_refused() -> None:
    blank = [volume(np.zeros((6, 6, 6), dtype=np.int16), f"{n}.nii") for n in range(4)]

    with pytest.raises(CaseError, match=r"file 0.nii: found no voxel that differs"):
        extract_brain("a", blank, None)


@pytest.mark.real
def test_a_scan_with_negative_voxels_is_cropped_to_its_brain(real_data: Path) -> None:
    folder = real_data / "unlabelled" / "TCGA-FG-6692_atlas"
    volumes = [read_volume(path, case_id="atlas") for path in sorted(folder.glob("*.nii.gz"))]

    brain = extract_brain("atlas", volumes, None)

    assert brain.box.shape == (145, 171, 130)
    assert min(item.array.min() for item in volumes) < 0
