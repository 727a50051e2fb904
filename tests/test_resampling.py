"""Volumes at another spacing: the same places, and nothing lost on the way there and back."""

import numpy as np
import pytest

from brats_seg.cases.nifti import Geometry, Volume, resampled
from brats_seg.voxels.grids import Resampling

MM = (1.0, 1.0, 1.0)


def make_volume(array: np.ndarray, spacing: tuple[float, float, float]) -> Volume:
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = [10.0, 20.0, 30.0]
    geometry = Geometry(shape=array.shape, affine=affine, qform=affine, qform_code=1, sform_code=1)
    return Volume(array=array, geometry=geometry, file="scan")


def needed_for(volume: Volume) -> Resampling | None:
    return Resampling.needed(volume.geometry.shape, volume.geometry.spacing_mm, MM)


@pytest.mark.parametrize("spacing", [MM, (0.98, 1.04, 1.0)])
def test_a_spacing_near_that_of_training_is_kept(spacing):
    volume = make_volume(np.zeros((4, 4, 4)), spacing)

    assert needed_for(volume) is None


def test_voxels_of_half_a_millimetre_are_averaged_in_pairs():
    """By hand: along X the middle of each new voxel lies between two old ones."""
    volume = make_volume(np.array([1.0, 3.0, 10.0, 20.0]).reshape(4, 1, 1), (0.5, 1.0, 1.0))

    resampling = needed_for(volume)
    result = resampled(volume, resampling)

    assert result.array.ravel().tolist() == [2.0, 15.0]
    assert result.geometry.spacing_mm == pytest.approx(MM)
    # the middle of the first new voxel, between those of the first two old ones
    assert result.geometry.affine[0, 3] == pytest.approx(10.25)


def test_the_borders_of_the_volume_stay_where_they_are():
    volume = make_volume(np.zeros((7, 5, 3)), (0.7, 1.3, 5.0))

    result = resampled(volume, needed_for(volume))

    for geometry in (volume.geometry, result.geometry):
        corner = geometry.affine @ [-0.5, -0.5, -0.5, 1]
        np.testing.assert_allclose(corner[:3], [9.65, 19.35, 27.5], atol=1e-9)
    far = [g.affine @ [*np.subtract(g.shape, 0.5), 1] for g in (volume.geometry, result.geometry)]
    np.testing.assert_allclose(far[0], far[1], atol=1e-9)


@pytest.mark.parametrize("spacing", [(0.5, 0.5, 0.5), (1.0, 1.0, 3.0), (2.0, 0.8, 1.2)])
def test_a_smooth_field_survives_the_way_there_and_back(spacing):
    x, y, z = np.meshgrid(*(np.linspace(0, np.pi, 24),) * 3, indexing="ij")
    volume = make_volume(np.sin(x) * np.sin(y) * np.sin(z), spacing)

    resampling = needed_for(volume)
    back = resampling.back(resampling.forward(volume.array))

    assert back.shape == volume.array.shape
    assert np.abs(back - volume.array).max() < 0.07


def test_a_constant_background_stays_exactly_constant():
    array = np.full((8, 8, 8), -7.0)
    array[3:5, 3:5, 3:5] = 100

    volume = make_volume(array, (1.5, 1.5, 1.5))
    result = resampled(volume, needed_for(volume))

    assert result.array[0, 0, 0] == -7.0
    assert result.array.min() == -7.0
