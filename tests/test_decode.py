"""Test decoding on examples computed by hand, and volumes of regions and tissues."""

import re

import numpy as np
import pytest

from brats_seg.inference.predict import (
    PARTS,
    Decoding,
    convention_to_write,
    decode,
    decode_regions,
    measure,
)
from brats_seg.labels import (
    BRATS2017,
    BRATS2023,
    BRATS2024,
    BRATS2024_PED,
    CONVENTIONS,
    MSD,
    REGIONS,
    regions_of,
)

NESTED = Decoding()


def fields(wt: list[float], tc: list[float], et: list[float]) -> np.ndarray:
    """Return probabilities (3, n, 1, 1) of voxels in a row."""
    return np.array([wt, tc, et], dtype=np.float32)[:, :, None, None]


def row(regions: np.ndarray) -> list[str]:
    """Return for each voxel in a row the innermost region that holds it."""
    return ["-" if not n else REGIONS[n - 1] for n in regions.sum(axis=0).ravel()]


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_regions_are_nested_in_every_convention_whatever_the_probabilities(convention):
    for seed in range(5):
        probabilities = np.random.default_rng(seed).random((3, 5, 4, 3), dtype=np.float32)

        wt, tc, et = regions_of(decode(probabilities, NESTED, convention, 1.0), convention)

        assert not (et & ~tc).any()
        assert not (tc & ~wt).any()
        assert np.array_equal(et, probabilities[2] > 0.5)


@pytest.mark.parametrize(
    ("thresholds", "probabilities", "expected"),
    [
        # an inner region takes the outer ones with it
        ((0.5, 0.5, 0.5), ([0.1, 0.1], [0.1, 0.9], [0.9, 0.1]), ["et", "tc"]),
        # a voxel at the threshold is outside, as in training, where a logit of 0 is background
        ((0.5, 0.5, 0.5), ([0.5], [0.5], [0.5]), ["-"]),
        (
            (0.2, 0.4, 0.6),
            ([0.3] * 4, [0, 0.5, 0.3, 0.5], [0, 0, 0.5, 0.7]),
            ["wt", "tc", "wt", "et"],
        ),
    ],
)
def test_regions_by_threshold(thresholds, probabilities, expected):
    decoding = Decoding(thresholds=thresholds)

    assert row(decode_regions(fields(*probabilities), decoding, 1.0)) == expected


def test_small_components_are_left_out_with_what_is_inside_them():
    """Components of 1 and 3 voxels; at 2 mm3 a voxel the smaller measures 2 mm3."""
    wt = [0.9, 0, 0.9, 0.9, 0.9]
    probabilities = fields(wt, wt, wt)

    for smallest, expected in ((2.0, "et"), (2.1, "-"), (6.0, "-")):
        decoding = Decoding(smallest_mm3=(smallest, 0, 0))
        assert row(decode_regions(probabilities, decoding, 2.0)) == [expected, "-", *["et"] * 3]
    assert row(decode_regions(probabilities, Decoding(smallest_mm3=(6.1, 0, 0)), 2.0)) == ["-"] * 5


def test_a_small_part_of_an_inner_region_stays_in_the_outer_one():
    probabilities = fields([0.9] * 5, [0.9, 0, 0.9, 0.9, 0.9], [0.9, 0, 0, 0, 0.9])

    core = decode_regions(probabilities, Decoding(smallest_mm3=(0, 2, 0)), 1.0)
    enhancing = decode_regions(probabilities, Decoding(smallest_mm3=(0, 0, 2)), 1.0)

    assert row(core) == ["wt", "wt", "tc", "tc", "et"]
    assert row(enhancing) == ["tc", "wt", "tc", "tc", "tc"]


def test_voxels_that_share_a_corner_are_one_component():
    probabilities = np.zeros((3, 2, 2, 2), dtype=np.float32)
    probabilities[0, 0, 0, 0] = probabilities[0, 1, 1, 1] = 1

    assert decode_regions(probabilities, Decoding(smallest_mm3=(2, 0, 0)), 1.0)[0].sum() == 2


def test_little_enhancing_tumour_in_all_becomes_necrosis():
    """Two voxels of ET of five: background, oedema, ET, necrosis, ET."""
    wt, tc, et = [0.1, 0.9, 0.9, 0.9, 0.9], [0.1, 0.1, 0.9, 0.9, 0.9], [0.1, 0.1, 0.9, 0.1, 0.9]
    kept, dropped = (
        decode(fields(wt, tc, et), Decoding(smallest_et_mm3=smallest), BRATS2017, voxel_mm3=1.0)
        for smallest in (2, 3)
    )

    assert kept.dtype == np.uint8
    assert kept.ravel().tolist() == [0, 2, 4, 1, 4]
    assert dropped.ravel().tolist() == [0, 2, 1, 1, 1]


def test_volumes_and_components_by_hand():
    """Six voxels of 500 mm3 in a row: necrosis, enhancing, enhancing, air, oedema, air."""
    label_map = np.array([1, 4, 4, 0, 2, 0], dtype=np.uint8).reshape(6, 1, 1)

    parts = {part.name: (part.ml, part.n_components) for part in measure(label_map, BRATS2017, 500)}

    inner = {"et": (1.0, 1), "ed": (0.5, 1), "ncr": (0.5, 1)}
    assert parts == {"wt": (2.0, 2), "tc": (1.5, 1), **inner}
    empty = measure(np.zeros((2, 2, 2), dtype=np.uint8), BRATS2024_PED, 1.0)
    assert [(part.name, part.ml, part.n_components) for part in empty] == [
        (name, 0.0, 0) for name in PARTS
    ]


@pytest.mark.parametrize(
    ("release", "trained", "expected", "reason"),
    [
        ("brats2021", ("brats2023",), BRATS2017, ""),
        ("brats2023-gli", ("brats2017",), BRATS2023, ""),
        ("brats2024-gli", ("brats2017",), BRATS2024, ""),
        ("msd", ("brats2017",), MSD, ""),
        ("unknown", ("brats2017",), BRATS2017, "show no release, and the model was trained on thi"),
        ("unknown", ("brats2017", "msd"), BRATS2023, "no release, .* trained on brats2017, msd"),
        ("brats-ped", ("brats2024-ped",), BRATS2024_PED, "brats-ped exists in several conventions"),
        ("nnunet", ("msd",), MSD, "the names of the scans show no release"),
    ],
)
def test_labels_are_in_the_convention_of_the_release_of_the_scan(
    release, trained, expected, reason
):
    written, why = convention_to_write(None, release, trained)
    asked, why_asked = convention_to_write("msd", release, trained)

    assert written == expected
    assert bool(why) == bool(reason)
    assert re.search(reason, why)
    assert asked == MSD
    assert why_asked.startswith("asked for; ") or (release, why_asked) == ("msd", "")
