from collections import Counter

import numpy as np
import pytest

from brats_seg.data.patches import (
    PatchKey,
    choose_box,
    epoch_patches,
    patch_seed,
    stable_seed,
    whole_box,
)
from brats_seg.voxels.box import Box

SHAPE, SIZE = (20, 30, 10), (8, 8, 8)
DRAW = PatchKey(epoch=3, case_id="a", draw=1)
NONE = (np.empty((0, 3), dtype=np.int32),) * 3


def boxes(n: int, *, fraction: float, foreground=NONE, shape=SHAPE, size=SIZE) -> list[Box]:
    rng = np.random.default_rng(0)
    return [
        choose_box(rng, shape=shape, size=size, foreground_fraction=fraction, foreground=foreground)
        for _ in range(n)
    ]


def test_a_seed_never_changes() -> None:
    """Otherwise resumed runs would be trained on other patches."""
    assert stable_seed(55, 0, "BraTS2021_00000") == 7657059870038276205


@pytest.mark.parametrize(
    ("one", "other"),
    [((1, 2), (2, 1)), ((1, "2"), (1, 2)), (("ab", "c"), ("a", "bc")), ((12,), (1, 2))],
)
def test_a_seed_depends_on_every_part(one: tuple, other: tuple) -> None:
    assert stable_seed(*one) != stable_seed(*other)
    assert 0 <= stable_seed(*one) < 2**63


def test_a_draw_has_randomness_of_its_own_for_every_purpose() -> None:
    def first(seed: int, key: PatchKey, purpose: str) -> float:
        return np.random.default_rng(patch_seed(seed, key, purpose)).random()

    others = [
        first(56, DRAW, "place"),
        first(55, DRAW, "augment"),
        first(55, PatchKey(epoch=4, case_id="a", draw=1), "place"),
        first(55, PatchKey(epoch=3, case_id="b", draw=1), "place"),
        first(55, PatchKey(epoch=3, case_id="a", draw=0), "place"),
    ]

    assert first(55, DRAW, "place") == first(55, DRAW, "place")
    assert len({first(55, DRAW, "place"), *others}) == 6


def test_an_epoch_has_every_case_equally_often_in_random_order() -> None:
    ids = [f"case{number}" for number in range(20)]
    keys = epoch_patches(ids, 2, 3, 55)

    assert Counter(key.case_id for key in keys) == dict.fromkeys(ids, 3)
    assert len(set(keys)) == 60
    assert {key.draw for key in keys} == {0, 1, 2}
    assert list(keys) != sorted(keys, key=lambda patch: (patch.case_id, patch.draw))


def test_the_order_of_an_epoch_is_a_function_of_seed_and_epoch_alone() -> None:
    ids = [f"case{number}" for number in range(20)]

    assert epoch_patches(ids, 2, 3, 55) == epoch_patches(ids[::-1], 2, 3, 55)
    orders = {
        tuple(key.case_id for key in epoch_patches(ids, epoch, 3, seed))
        for epoch, seed in ((2, 55), (3, 55), (2, 56))
    }
    assert len(orders) == 3


def test_patches_lie_anywhere_inside_the_case() -> None:
    found = boxes(2000, fraction=0)

    starts = np.array([box.start for box in found])
    assert {box.shape for box in found} == {SIZE}
    assert starts.min(axis=0).tolist() == [0, 0, 0]
    assert starts.max(axis=0).tolist() == [12, 22, 2]
    # every place is as likely: along the last axis a third each
    assert np.bincount(starts[:, 2]) == pytest.approx([667, 667, 667], abs=70)


def test_foreground_patches_are_centred_on_the_voxel() -> None:
    voxels = np.array([[10, 15, 5]], dtype=np.int32)
    found = boxes(1, fraction=1, foreground=(voxels, *NONE[:2]))

    assert found == [Box(start=(6, 11, 1), stop=(14, 19, 9))]


@pytest.mark.parametrize(("voxel", "start"), [((0, 0, 0), (0, 0, 0)), ((19, 29, 9), (12, 22, 2))])
def test_foreground_patches_stay_inside_the_case(
    voxel: tuple[int, int, int], start: tuple[int, int, int]
) -> None:
    found = boxes(1, fraction=1, foreground=(np.array([voxel], dtype=np.int32), *NONE[:2]))

    assert found == [Box.at(start, SIZE)]


def test_regions_that_are_there_are_as_likely_whatever_their_size() -> None:
    many = np.tile(np.array([[5, 5, 5]], dtype=np.int32), (1000, 1))
    one = np.array([[15, 5, 5]], dtype=np.int32)

    starts = [box.start[0] for box in boxes(1000, fraction=1, foreground=(many, NONE[0], one))]

    assert Counter(starts) == {1: pytest.approx(500, abs=60), 11: pytest.approx(500, abs=60)}


@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 1.0])
def test_the_share_of_foreground_patches_is_as_set(fraction: float) -> None:
    corner = np.array([[0, 0, 0]], dtype=np.int32)
    found = boxes(3000, fraction=fraction, foreground=(corner,) * 3, shape=(300, 300, 300))

    n_on_tumour = sum(box.start == (0, 0, 0) for box in found)

    assert n_on_tumour == pytest.approx(3000 * fraction, abs=100 if 0 < fraction < 1 else 0)


def test_a_case_without_tumour_has_patches_anywhere() -> None:
    assert len(set(boxes(100, fraction=1))) > 50


@pytest.mark.parametrize("fraction", [0, 1])
def test_a_patch_larger_than_the_case_reaches_beyond_it_on_both_sides(fraction: float) -> None:
    voxels = (np.array([[3, 3, 3]], dtype=np.int32),) * 3
    found = boxes(5, fraction=fraction, foreground=voxels, shape=(4, 7, 8))

    assert set(found) == {Box(start=(-2, -1, 0), stop=(6, 7, 8))}


def test_a_whole_case_is_rounded_up() -> None:
    assert whole_box((143, 180, 128), (16, 8, 32)) == Box.at((0, 0, 0), (144, 184, 128))
