"""Groups of items that share a key."""

import itertools

import numpy as np
import pytest

from brats_seg.voxels.shapes import first_of_group


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        ([], ()),
        (["a", "b", "c"], (0, 1, 2)),
        (["a", "b", "a"], (0, 1, 0)),
        # a chain: 0 and 2 share nothing, but both share something with 1
        (["a", "ab", "b"], (0, 0, 0)),
        # a late item joins two groups that were apart
        (["a", "b", "c", "ab"], (0, 0, 2, 0)),
        (["", "", "a"], (0, 1, 2)),
    ],
)
def test_items_that_share_keys_are_one_group(keys, expected):
    assert first_of_group(keys) == expected


@pytest.mark.parametrize("seed", range(10))
def test_groups_equal_those_of_repeated_merging(seed):
    rng = np.random.default_rng(seed)
    keys = [set(rng.integers(0, 30, size=rng.integers(0, 4)).tolist()) for _ in range(25)]

    groups = [{item} for item in range(len(keys))]
    merged = True
    while merged:
        merged = False
        for one, other in itertools.combinations(groups, 2):
            if any(keys[i] & keys[j] for i in one for j in other):
                groups.remove(other)
                one |= other
                merged = True
                break
    first = {item: min(group) for group in groups for item in group}

    assert first_of_group(keys) == tuple(first[item] for item in range(len(keys)))
