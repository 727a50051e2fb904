"""Test surfaces of masks: closed, facing outwards, and in the right place."""

import numpy as np
import pytest

from brats_seg.figures.mesh import Mesh, surface_of

ONE_MM = (1.0, 1.0, 1.0)


def ball(radius: float, n: int = 32) -> np.ndarray:
    return ((np.indices((n, n, n)) - n / 2) ** 2).sum(axis=0) < radius**2


def enclosed_mm3(mesh: Mesh) -> float:
    """The volume by the theorem of Gauss: positive if the quadrilaterals face outwards."""
    a, b, c, d = mesh.vertices_mm[mesh.quads].transpose(1, 0, 2)
    parts = [np.einsum("ij,ij->i", p, np.cross(q, r)).sum() for p, q, r in ((a, b, c), (a, c, d))]
    return float(sum(parts) / 6)


def test_every_edge_joins_two_quadrilaterals_in_opposite_directions() -> None:
    quads = surface_of(ball(9.3), ONE_MM).quads

    edges = np.stack([quads.ravel(), np.roll(quads, -1, axis=1).ravel()], axis=1)
    there = sorted(map(tuple, edges.tolist()))
    back = sorted(map(tuple, edges[:, ::-1].tolist()))
    assert there == back


@pytest.mark.parametrize("radius", [5.0, 9.3, 14.0])
def test_a_ball_has_the_volume_of_its_voxels(radius: float) -> None:
    mesh = surface_of(ball(radius), ONE_MM)

    assert enclosed_mm3(mesh) == pytest.approx(np.count_nonzero(ball(radius)), rel=0.05)


def test_its_surface_is_smooth() -> None:
    """A staircase of voxels has half as much area again as the ball."""
    mesh = surface_of(ball(14.0), ONE_MM)
    corners = mesh.vertices_mm[mesh.quads]
    twice = np.cross(corners[:, 2] - corners[:, 0], corners[:, 3] - corners[:, 1])

    area = np.linalg.norm(twice, axis=1).sum() / 2
    assert area == pytest.approx(4 * np.pi * 14.0**2, rel=0.06)


def test_normals_point_outwards_and_have_length_one() -> None:
    mesh = surface_of(ball(9.3), ONE_MM)
    outwards = mesh.vertices_mm[mesh.quads].mean(axis=1) - 16

    assert (np.einsum("ij,ij->i", mesh.normals, outwards) > 0).all()
    np.testing.assert_allclose(np.linalg.norm(mesh.normals, axis=1), 1)


def test_one_voxel_has_a_surface_around_it() -> None:
    mask = np.zeros((5, 6, 7), bool)
    mask[0, 5, 3] = True

    mesh = surface_of(mask, (1.0, 2.0, 3.0))

    assert len(mesh.quads) == 6
    np.testing.assert_allclose(mesh.vertices_mm.mean(axis=0), [0, 10, 9], atol=1e-9)
    assert enclosed_mm3(mesh) > 0


def test_vertices_stay_within_half_a_voxel_of_the_border() -> None:
    """A plate of one voxel is not smoothed away."""
    mask = np.zeros((20, 20, 9), bool)
    mask[2:18, 2:18, 4] = True

    z = surface_of(mask, ONE_MM).vertices_mm[:, 2]

    assert 3 <= z.min() <= z.max() <= 5
    assert np.ptp(z) > 0


def test_a_mask_without_voxels_has_no_surface() -> None:
    mesh = surface_of(np.zeros((4, 4, 4), bool), ONE_MM)

    assert mesh.quads.shape == (*mesh.normals.shape[:1], 4) == (0, 4)
