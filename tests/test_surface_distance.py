"""Test HD95 and surface Dice against pairwise distances, other programs and values by hand."""

import itertools

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from brats_seg.evaluation.surface_distance import (
    Mask,
    Spacing,
    hausdorff95,
    surface_dice,
    voxel_surface_distances,
)
from brats_seg.voxels.shapes import cell_areas, cell_codes

MM: Spacing = (1.0, 1.0, 1.0)
SPACINGS: tuple[Spacing, ...] = (MM, (1.0, 1.5, 3.0))
EMPTY = np.zeros((6, 5, 4), dtype=bool)


def boxes(seed: int, side: int) -> Mask:
    """A mask with holes, corners and parts at the edge of the volume."""
    rng = np.random.default_rng([seed, side])
    mask = np.zeros((14, 12, 10), dtype=bool)
    for _ in range(8):
        origin, size = rng.integers(0, 9, 3), rng.integers(1, 5, 3)
        mask[tuple(slice(o, o + s) for o, s in zip(origin, size, strict=True))] ^= True
    return mask


def rod(*places: int) -> Mask:
    mask = np.zeros((20, 3, 3), dtype=bool)
    mask[list(places), 1, 1] = True
    return mask


def slow_hausdorff95(one: Mask, other: Mask, spacing_mm: Spacing) -> float:
    sides = []
    for mask in (one, other):
        codes = cell_codes(mask)
        on_surface = (codes > 0) & (codes < 255)
        sides.append(
            (np.argwhere(on_surface) * spacing_mm, cell_areas(spacing_mm)[codes[on_surface]])
        )
    distances = cdist(sides[0][0], sides[1][0])
    reached = []
    for nearest, areas in ((distances.min(1), sides[0][1]), (distances.min(0), sides[1][1])):
        covered = 0.0
        for distance, area in sorted(zip(nearest, areas, strict=True)):
            covered += area
            if covered / areas.sum() >= 0.95:
                reached.append(distance)
                break
    return float(max(reached))


def slow_surface(mask: Mask) -> np.ndarray:
    padded = np.pad(mask, 1)
    steps = [step for step in itertools.product((-1, 0, 1), repeat=3) if np.abs(step).sum() == 1]
    return np.array(
        [
            voxel
            for voxel in np.argwhere(mask).tolist()
            if not all(padded[tuple(np.add(voxel, step) + 1)] for step in steps)
        ]
    )


@pytest.mark.parametrize("spacing_mm", SPACINGS)
@pytest.mark.parametrize("seed", range(10))
def test_hd95_equals_pairwise_distances(seed: int, spacing_mm: Spacing) -> None:
    one, other = boxes(seed, 0), boxes(seed, 1)

    assert hausdorff95(one, other, spacing_mm) == pytest.approx(
        slow_hausdorff95(one, other, spacing_mm)
    )


@pytest.mark.parametrize(
    ("seed", "cubic", "flat"),
    [
        (0, 4.358899, 6.708204),
        (1, 4.123106, 6.78233),
        (2, 3.316625, 5.5),
        (3, 4.0, 6.0),
        (4, 4.582576, 6.873864),
        (5, 4.582576, 9.0),
    ],
)
def test_hd95_equals_that_of_surface_distance(seed: int, cubic: float, flat: float) -> None:
    """Values of Surface-Distance-Based-Measures 0.1 on the same masks."""
    one, other = boxes(seed, 0), boxes(seed, 1)

    assert hausdorff95(one, other, SPACINGS[0]) == pytest.approx(cubic, abs=1e-6)
    assert hausdorff95(one, other, SPACINGS[1]) == pytest.approx(flat, abs=1e-6)


@pytest.mark.parametrize("seed", range(3))
def test_both_sides_are_alike(seed: int) -> None:
    one, other = boxes(seed, 0), boxes(seed, 1)

    assert hausdorff95(one, other, MM) == hausdorff95(other, one, MM)
    assert surface_dice(one, other, MM, (1.0,)) == surface_dice(other, one, MM, (1.0,))


def test_empty_masks() -> None:
    full = ~EMPTY

    assert hausdorff95(EMPTY, EMPTY, MM) == 0
    assert hausdorff95(EMPTY, full, MM) == hausdorff95(full, EMPTY, MM) == np.inf
    assert surface_dice(EMPTY, EMPTY, MM, (0.5, 1.0)) == (1, 1)
    assert surface_dice(EMPTY, full, MM, (0.5, 1.0)) == (0, 0)
    assert surface_dice(full, EMPTY, MM, (0.5, 1.0)) == (0, 0)


def test_a_mask_at_the_edge_of_the_volume_has_its_surface_there() -> None:
    full = ~EMPTY

    assert hausdorff95(full, full, MM) == 0
    assert hausdorff95(full, np.pad(full, 2)[2:-2, 2:-2, 2:-2], MM) == 0
    assert len(voxel_surface_distances(full, full, MM)[0]) == 6 * 5 * 4 - 4 * 3 * 2


def test_the_room_around_masks_changes_nothing() -> None:
    one, other = boxes(0, 0), boxes(0, 1)
    room = ((3, 9), (0, 7), (5, 0))

    assert hausdorff95(np.pad(one, room), np.pad(other, room), MM) == hausdorff95(one, other, MM)


def test_distances_are_in_mm() -> None:
    # two voxels seven steps of 2.5 mm apart
    assert hausdorff95(rod(2), rod(9), (2.5, 1.0, 1.0)) == pytest.approx(17.5)


@pytest.mark.parametrize("spacing_mm", SPACINGS)
@pytest.mark.parametrize("seed", range(5))
def test_surface_dice_equals_pairwise_distances(seed: int, spacing_mm: Spacing) -> None:
    one, other = boxes(seed, 0), boxes(seed, 1)
    tolerances = (0.5, 1.0, 2.0)
    distances = cdist(slow_surface(one) * spacing_mm, slow_surface(other) * spacing_mm)

    expected = [
        ((distances.min(1) <= t).mean() + (distances.min(0) <= t).mean()) / 2 for t in tolerances
    ]
    assert surface_dice(one, other, spacing_mm, tolerances) == pytest.approx(expected)


def test_surface_dice_averages_the_shares_of_the_two_sides() -> None:
    """One of one voxel is within 1 mm of three, and two of three are within 1 mm of one."""
    assert surface_dice(rod(5), rod(5, 6, 9), MM, (0.5, 1.0)) == pytest.approx(
        [(1 + 1 / 3) / 2, (1 + 2 / 3) / 2]
    )


# MONAI 1.6 calls itself with an argument that it has given up
@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")
@pytest.mark.parametrize("seed", range(5))
def test_distances_of_surface_voxels_equal_those_of_monai(seed: int) -> None:
    import torch
    from monai.metrics import compute_hausdorff_distance

    one, other = boxes(seed, 0), boxes(seed, 1)

    sides = voxel_surface_distances(one, other, MM)

    tensors = (torch.from_numpy(mask)[None, None].float() for mask in (one, other))
    expected = compute_hausdorff_distance(*tensors, percentile=95).item()
    assert max(np.percentile(side, 95) for side in sides) == pytest.approx(expected)


@pytest.mark.filterwarnings("ignore:.*always_return_as_numpy:FutureWarning")
@pytest.mark.parametrize("spacing_mm", SPACINGS)
@pytest.mark.parametrize("seed", range(3))
def test_the_pooled_surface_dice_equals_that_of_monai(seed: int, spacing_mm: Spacing) -> None:
    """MONAI pools the surface voxels of both sides; ours is the mean of the sides' shares."""
    import torch
    from monai.metrics import compute_surface_dice

    one, other = boxes(seed, 0), boxes(seed, 1)
    sides = voxel_surface_distances(one, other, spacing_mm)
    pooled = np.concatenate(sides) <= 1.5

    tensors = (torch.from_numpy(mask)[None, None].float() for mask in (one, other))
    expected = compute_surface_dice(
        *tensors, [1.5], include_background=True, spacing=spacing_mm
    ).item()

    assert pooled.mean() == pytest.approx(expected)
