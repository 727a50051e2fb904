"""Axes of volumes: every order and direction comes to that of BraTS and back."""

from itertools import permutations, product

import nibabel as nib
import numpy as np
import pytest

from brats_seg.cases.nifti import Geometry, Volume, oriented
from brats_seg.voxels.grids import AXES, turn_of, turned, turned_back

ARRAY = np.arange(24).reshape(2, 3, 4)
ORDERS = list(product(permutations(range(3)), product((1.0, -1.0), repeat=3)))


def affine_of(order: tuple[int, int, int], signs: tuple[float, float, float]) -> np.ndarray:
    affine = np.eye(4)
    affine[:3, :3] = np.diag(signs)[:, list(order)] * [1.0, 2.0, 3.0]
    affine[:3, 3] = [5.0, 6.0, 7.0]
    return affine


@pytest.mark.parametrize(("order", "signs"), ORDERS)
def test_every_voxel_stays_where_it_is_in_the_patient(order, signs):
    affine = affine_of(order, signs)
    geometry = Geometry(shape=(2, 3, 4), affine=affine, qform=affine, qform_code=1, sform_code=1)

    volume = oriented(Volume(array=ARRAY, geometry=geometry, file="scan"))

    assert nib.aff2axcodes(volume.geometry.affine) == AXES
    assert volume.array.shape == volume.geometry.shape
    for value in ARRAY.ravel():
        stored, found = (np.argwhere(array == value)[0] for array in (ARRAY, volume.array))
        np.testing.assert_allclose(
            volume.geometry.affine @ [*found, 1], affine @ [*stored, 1], atol=1e-12
        )


@pytest.mark.parametrize(("order", "signs"), ORDERS)
def test_turning_back_undoes_turning(order, signs):
    turn = turn_of(affine_of(order, signs))

    assert np.array_equal(turned_back(turned(ARRAY, turn), turn), ARRAY)


def test_a_scan_of_brats_is_left_alone():
    affine = np.diag([-1.0, -1.0, 1.0, 1.0])

    assert np.array_equal(turned(ARRAY, turn_of(affine)), ARRAY)
