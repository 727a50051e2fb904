"""Axes and spacings of volumes: every voxel stays where it is in the patient, and comes back."""

from itertools import permutations, product

import nibabel as nib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.ndimage import affine_transform

from brats_seg.cases.nifti import Geometry, Volume, oriented, resampled
from brats_seg.voxels import grids
from brats_seg.voxels.box import Box, bounding_box, triple
from brats_seg.voxels.grids import AXES, SPACING_TOLERANCE, Resampling, reorient

MM = (1.0, 1.0, 1.0)
ARRAY = np.arange(24).reshape(2, 3, 4)
ORDERS = st.sampled_from(list(product(permutations(range(3)), product((1.0, -1.0), repeat=3))))
SHAPES = st.tuples(*[st.integers(1, 9)] * 3)
EDGES = st.tuples(*[st.floats(0.3, 6)] * 3)


def volume_of(array: np.ndarray, affine: np.ndarray) -> Volume:
    return Volume(array=array, geometry=Geometry.at(affine, array.shape), file="scan")


def make_volume(array: np.ndarray, spacing: tuple[float, float, float]) -> Volume:
    affine = np.diag([*spacing, 1.0])
    affine[:3, 3] = [10.0, 20.0, 30.0]
    return volume_of(array, affine)


def needed_for(volume: Volume) -> Resampling | None:
    return Resampling.needed(volume.geometry.shape, volume.geometry.spacing_mm, MM)


@given(order=ORDERS, edges=EDGES)
def test_every_voxel_stays_where_it_is_in_the_patient_and_comes_back(order, edges):
    axes, signs = order
    affine = np.eye(4)
    affine[:3, :3] = np.diag(signs)[:, list(axes)] * edges
    affine[:3, 3] = [5.0, 6.0, 7.0]
    volume = oriented(volume_of(ARRAY, affine))
    assert nib.aff2axcodes(volume.geometry.affine) == AXES
    assert volume.array.shape == volume.geometry.shape
    for value in (0, 5, 23):
        stored, found = (np.argwhere(array == value)[0] for array in (ARRAY, volume.array))
        np.testing.assert_allclose(volume.geometry.affine @ [*found, 1], affine @ [*stored, 1])
    orientation = grids.find_orientation(affine)
    assert np.array_equal(grids.reorient_back(reorient(ARRAY, orientation), orientation), ARRAY)


def test_a_scan_of_brats_is_left_alone():
    assert np.array_equal(
        reorient(ARRAY, grids.find_orientation(np.diag([-1.0, -1.0, 1.0, 1.0]))), ARRAY
    )


@given(edges=EDGES, shape=st.tuples(*[st.integers(1, 12)] * 3))
def test_the_borders_of_the_volume_stay_where_they_are(edges, shape):
    volume = make_volume(np.full(shape, -7.0), edges)
    resampling = needed_for(volume)
    if resampling is None:
        assert np.abs(np.array(edges) - 1).max() <= SPACING_TOLERANCE + 1e-9
        return
    result = resampled(volume, resampling)
    # a constant background stays exactly constant
    assert (result.array == -7).all()
    for g, h in [(volume.geometry, result.geometry)]:
        for corner in (np.zeros(3), np.ones(3)):
            one, other = (x.affine @ [*(corner * x.shape - 0.5), 1] for x in (g, h))
            np.testing.assert_allclose(one, other, atol=1e-9)


def test_voxels_of_half_a_millimetre_are_averaged_in_pairs():
    """By hand: along X the middle of each new voxel lies between two old ones."""
    volume = make_volume(np.array([1.0, 3.0, 10.0, 20.0]).reshape(4, 1, 1), (0.5, 1.0, 1.0))
    result = resampled(volume, needed_for(volume))
    assert result.array.ravel().tolist() == [2.0, 15.0]
    assert result.geometry.spacing_mm == pytest.approx(MM)
    # the middle of the first new voxel, between those of the first two old ones
    assert result.geometry.affine[0, 3] == pytest.approx(10.25)


@pytest.mark.parametrize("shape", [(9, 5, 12), (4, 7, 3), (1, 8, 20)])
def test_resampling_is_linear_as_by_scipy(rng: np.random.Generator, shape: tuple[int, ...]) -> None:
    array = rng.normal(size=(6, 8, 5))
    scale = np.divide(array.shape, shape)
    options = {"offset": (scale - 1) / 2, "output_shape": shape, "order": 1, "mode": "nearest"}
    expected = affine_transform(array, scale, **options)
    resampling = Resampling(before=array.shape, after=shape)
    np.testing.assert_allclose(resampling.forward(array), expected, atol=1e-6)
    turned_over = array[::-1].transpose(2, 0, 1)
    resampling = Resampling(before=(5, 6, 8), after=(5, 6, 8))
    whole = Box.at((0, 0, 0), (5, 6, 8))
    assert np.array_equal(resampling.back(turned_over, whole), turned_over.astype(np.float32))


@given(data=st.data(), before=SHAPES, after=SHAPES)
def test_a_box_comes_back_as_from_the_whole_volume(data, before, after) -> None:
    """Voxels of the scan that are not in the result take nothing of the box."""
    start = triple(data.draw(st.integers(0, n - 1)) for n in after)
    stop = triple(data.draw(st.integers(a + 1, n)) for a, n in zip(start, after, strict=True))
    box, resampling = Box(start=start, stop=stop), Resampling(before=before, after=after)
    array = np.random.default_rng(0).uniform(1, 2, size=box.shape).astype(np.float32)
    whole = resampling.back(box.placed(array, after), Box.at((0, 0, 0), after))
    part = resampling.box_before(box)
    assert np.array_equal(part.placed(resampling.back(array, box), before), whole)
    # and they are no more than needed, but for a border at the very centre of a voxel
    if (taken := bounding_box(whole > 1e-6)) is not None:
        assert taken.grown(1).joined(part) == taken.grown(1)
