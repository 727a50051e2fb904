"""Test lesion-wise scores and lists of lesions; T1-T13, G1-G10 and `MATCHED` are output of the challenges' programs."""

from collections import namedtuple
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from scipy import ndimage

from brats_seg.evaluation import lesions
from brats_seg.evaluation.metrics import Spacing, count_regions, dice, hausdorff95
from brats_seg.evaluation.protocols import MatchingRules, ScoringProtocol, protocol_named
from brats_seg.labels import BRATS2024, LabelMap
from brats_seg.voxels.box import Mask
from brats_seg.voxels.shapes import Lesions

LesionScores = namedtuple(
    "LesionScores", "dice hd95 nsd_half_mm nsd_one_mm n_lesions n_false_positive n_false_negative"
)
Box = tuple[tuple[int, int, int], tuple[int, int, int]]
MM = (1.0, 1.0, 1.0)

K: Box = ((10, 10, 10), (10, 10, 10))
FAR: Box = ((10, 10, 40), (10, 10, 10))
FIFTY: Box = ((10, 10, 10), (5, 5, 2))
ONE_MORE: Box = ((10, 10, 12), (1, 1, 1))
BAR: Box = ((14, 14, 20), (2, 2, 20))


def cubes(*boxes: Box, n: int = 64) -> Mask:
    mask = np.zeros((n, n, n), dtype=bool)
    for origin, size in boxes:
        mask[tuple(slice(o, o + s) for o, s in zip(origin, size, strict=True))] = True
    return mask


def painted(*boxes: tuple[int, Box]) -> LabelMap:
    label_map = np.zeros((64, 64, 64), dtype=np.uint8)
    for value, box in boxes:
        label_map[cubes(box)] = value
    return label_map


def scored(
    reference: LabelMap,
    prediction: LabelMap,
    protocol: ScoringProtocol,
    spacing_mm: Spacing = MM,
    **options: bool,
) -> dict[str, LesionScores]:
    penalty_mm = protocol.hd95_penalty(reference.shape, spacing_mm)
    scale = lesions.Scale(spacing_mm=spacing_mm, penalty_mm=penalty_mm, **options)
    true, found = (
        np.stack([np.isin(side, region.values(BRATS2024)) for region in protocol.regions])
        for side in (reference, prediction)
    )
    grouped = lesions.group_lesions(true, protocol)
    rows = lesions.score_lesions(grouped, found, protocol, scale).itertuples(index=False)
    names = [region.name for region in protocol.regions]
    return dict(zip(names, map(LesionScores._make, rows), strict=True))


def dice_of(reference: Mask, prediction: Mask) -> float:
    return float(dice(count_regions(prediction[None], reference[None], "T"))[0])


def scored_2023(reference: list[Box], prediction: list[Box], **options: bool) -> LesionScores:
    maps = (painted(*((2, box) for box in boxes)) for boxes in (reference, prediction))
    return scored(*maps, protocol_named("lesionwise2023", "GLI"), **options)["wt"]


VECTORS_2023 = {
    # name: (reference, prediction, lesion-wise Dice and HD95, lesions, false positives,
    #        Dice and HD95 of the whole region)
    "T1": ([], [], 1, 0, 0, 0, 1, 0),
    "T2": ([], [((5, 5, 5), (1, 1, 1))], 0, 374, 0, 1, 0, np.inf),
    "T3": ([FIFTY], [], 1, 0, 0, 0, 0, np.inf),
    "T4": ([FIFTY, ONE_MORE], [], 0, 374, 1, 0, 0, np.inf),
    "T5": ([K], [K], 1, 0, 1, 0, 1, 0),
    "T6": ([K], [K, ((50, 50, 50), (1, 1, 1))], 0.5, 187, 1, 1, 0.9995, 0),
    "T7": ([K, FAR], [K], 0.5, 187, 2, 0, 0.6667, 30),
    "T8": ([K, ((10, 10, 24), (10, 10, 10))], [K], 0.6667, 14, 1, 0, 0.6667, 14),
    "T9": ([K, ((10, 10, 26), (10, 10, 10))], [K], 0.6667, 16, 1, 0, 0.6667, 16),
    "T10": ([K, ((10, 10, 27), (10, 10, 10))], [K], 0.5, 187, 2, 0, 0.6667, 17),
    "T11": ([FIFTY], [FIFTY], 1, 0, 0, 0, 1, 0),
    "T12": ([K], [((12, 10, 10), (10, 10, 10))], 0.8, 2, 1, 0, 0.8, 2),
    "T13": ([K, FAR], [K, FAR, ((14, 14, 10), (2, 2, 40))], 0.6494, 30, 2, 0, 0.9804, 5),
}


@pytest.mark.parametrize("name", VECTORS_2023)
def test_reproduces_the_program_of_2023(name: str) -> None:
    reference, prediction, lw_dice, lw_hd95, *counts, whole_dice, whole_hd95 = VECTORS_2023[name]
    scores = scored_2023(reference, prediction)
    assert scores.dice == pytest.approx(lw_dice, abs=5e-5)
    assert scores.hd95 == pytest.approx(lw_hd95)
    assert [scores.n_lesions, scores.n_false_positive] == counts
    assert dice_of(cubes(*reference), cubes(*prediction)) == pytest.approx(whole_dice, abs=5e-5)
    assert hausdorff95(cubes(*reference), cubes(*prediction), MM) == pytest.approx(whole_hd95)
    assert scored_2023(reference, prediction, with_distances=False).dice == scores.dice


ALL_WELL = (1, 0, 1, 1)
HALF = (0.5, 168.5, 0.5, 0.5)
MISSED = (0, 337, 0, 0)
ROD_10: Box = ((50, 50, 50), (10, 1, 1))
ROD_11: Box = ((50, 50, 50), (11, 1, 1))
ROD_21: Box = ((50, 50, 40), (1, 1, 21))
CAVITY: Box = ((40, 40, 40), (10, 10, 10))
SHIFTED: Box = ((11, 10, 10), (10, 10, 10))
RING = [(2, ((10, 10, 10), (16, 16, 16))), (3, ((14, 14, 14), (8, 8, 8)))]
SHORT_BY_A_CUBE = (0.6835, 10.392, 0.7691, 0.7691)


def of_all(scores: tuple[float, ...]) -> dict[str, tuple[float, ...]]:
    return dict.fromkeys(("wt", "tc", "et"), scores)


VECTORS_2024 = {
    # name: (reference, prediction, what is not all well by region, lesions and false positives)
    "G1": ([], [], {}, {"et": (0, 0)}),
    "G2": ([(3, K)], [], of_all(MISSED), {"et": (1, 0)}),
    "G3": ([(3, K)], [(3, K), (3, ROD_10)], {}, {"et": (1, 0)}),
    "G4": ([(3, K)], [(3, K), (3, ROD_11)], {"et": HALF}, {"et": (1, 1), "wt": (1, 0)}),
    "G5": ([(3, K)], [(3, K), (3, ROD_21)], of_all(HALF), {"et": (1, 1), "wt": (1, 1)}),
    "G6": (RING, RING, {}, {"snfh": (1, 0), "et": (1, 0), "rc": (0, 0)}),
    "G7": ([(3, K)], [(3, SHIFTED)], of_all((0.9, 1.0, 0.6639, 1.0)), {"et": (1, 0)}),
    "G8": ([(3, K), (4, CAVITY)], [(3, K)], {"rc": MISSED}, {"rc": (1, 0), "wt": (1, 0)}),
    "G9": ([(3, K), (3, FAR)], [(3, K)], of_all(HALF), {"et": (2, 0)}),
    "G10": (
        [(3, K), (3, FAR), (1, BAR)],
        [(3, K), (1, BAR)],
        {"et": (0.6667, 30, 0.75, 0.75), "wt": SHORT_BY_A_CUBE, "tc": SHORT_BY_A_CUBE},
        {"et": (1, 0), "wt": (1, 0), "netc": (1, 0)},
    ),
}


@pytest.mark.parametrize("name", VECTORS_2024)
def test_reproduces_the_program_of_2024(name: str) -> None:
    reference, prediction, not_well, counts = VECTORS_2024[name]
    scores = scored(
        painted(*reference), painted(*prediction), protocol_named("lesionwise2024", "GLI")
    )
    assert list(scores) == ["wt", "tc", "netc", "snfh", "et", "rc"]
    for region, found in scores.items():
        lw_dice, lw_hd95, *nsd = not_well.get(region, ALL_WELL)
        assert found.dice == pytest.approx(lw_dice, abs=5e-5), region
        assert found.hd95 == pytest.approx(lw_hd95, abs=5e-4), region
        assert (found.nsd_half_mm, found.nsd_one_mm) == pytest.approx(nsd, abs=5e-5), region
    for region, expected in counts.items():
        assert (scores[region].n_lesions, scores[region].n_false_positive) == expected


MATCHED = pd.read_csv(Path(__file__).parent / "golden" / "matched_lesions.csv")
"""Output of brats-evaluation 0.0.10 for voxels of 1 x 1.5 x 2 mm; that of 2026 with its options.

Dice, HD95 and NSD of the region and of its lesions; lesions, false positives, missed ones, F1; of
metastases also large ones found and missed, their F1, and small ones.
"""


def random_maps(seed: int) -> tuple[LabelMap, LabelMap]:
    """Return as many boxes as the seed says, and a copy that is moved, cut off and has one more."""
    rng = np.random.default_rng(seed)
    reference = np.zeros((14, 12, 10), np.uint8)
    for _ in range(seed):
        origin, size = rng.integers(0, 10, 3), rng.integers(1, 6, 3)
        box = tuple(slice(o, o + s) for o, s in zip(origin, size, strict=True))
        reference[box] = rng.integers(1, 5)
    prediction = np.roll(reference, rng.integers(-1, 2, 3), axis=(0, 1, 2))
    prediction[:, int(rng.integers(4, 12)) :] = 0
    prediction[9:11, 9:11, :4] = 3
    return reference, prediction


def matched_table(pair: tuple[LabelMap, LabelMap], protocol: ScoringProtocol) -> pd.DataFrame:
    scale = lesions.Scale(spacing_mm=(1.0, 1.5, 2.0), penalty_mm=373.0)
    labels = protocol.labels or BRATS2024
    sides = (
        np.stack([np.isin(side, region.values(labels)) for region in protocol.regions])
        for side in pair
    )
    return lesions.match_lesions(*sides, protocol.matching, scale).set_axis(
        [region.name for region in protocol.regions]
    )


def differing() -> list[str]:
    different = []
    for row in MATCHED.itertuples():
        table = matched_table(random_maps(row.seed), protocol_named(row.protocol, row.task))
        expected = [float(value) for value in row.expected.split()]
        if table.loc[row.region].tolist() != pytest.approx(expected, abs=1e-6, nan_ok=True):
            different.append(f"{row.task} {row.region} {row.seed}")
    return different


def test_reproduces_the_program_of_2025_and_2026() -> None:
    assert differing() == []


@pytest.mark.parametrize(
    ("name", "rule"),
    [
        ("number_components", lambda mask: ndimage.label(mask)[0].astype(np.int32)),
        ("_LEAST_OVERLAP", 0.3),
        ("min", max),
    ],
)
def test_other_rules_are_noticed(monkeypatch: pytest.MonkeyPatch, name: str, rule: object) -> None:
    """Faces alone that connect, a match by more than an overlap, and a larger tolerance."""
    monkeypatch.setattr(lesions, name, rule, raising=False)
    assert differing()


def test_one_shared_voxel_makes_a_match_and_a_lesion_of_the_least_volume_is_large() -> None:
    reference, prediction = (
        cubes(((0, 0, 0), (13, 13, 13)), n=20),
        cubes(((5, 5, 5), (1, 1, 1)), n=20),
    )
    rules = MatchingRules(large_mm3=13.0**3, found_dice=2 / (13**3 + 1))
    scale = lesions.Scale(spacing_mm=MM, penalty_mm=373.0)
    (found,) = lesions.match_lesions(reference[None], prediction[None], rules, scale).to_dict(
        "records"
    )
    assert (found["n_false_positive"], found["n_false_negative"], found["f1"]) == (0, 0, 1)
    assert (found["n_large_found"], found["n_large_missed"]) == (1, 0)


def slow_scores(
    reference: Mask, prediction: Mask, dilation: int, minimum: int, *, merges: bool
) -> tuple[float, float, int, int, int]:
    """Compute the steps of the challenges one by one on whole volumes: Dice, HD95, three counts."""
    full, grow = np.ones((3, 3, 3)), ndimage.generate_binary_structure(3, 2)

    def parts(mask: Mask, *, merged: bool) -> list[Mask]:
        spread = ndimage.binary_dilation(mask, grow, dilation) if merged else mask
        numbers, n_parts = ndimage.label(spread, full)
        return [mask & (numbers == number) for number in range(1, n_parts + 1)]

    predicted = parts(prediction, merged=merges)
    if merges:
        predicted = [part for part in predicted if part.sum() > minimum]
    made_up = set(range(len(predicted)))
    dices, distances, n_missed = [], [], 0
    for lesion in parts(reference, merged=True):
        near = ndimage.binary_dilation(lesion, grow, dilation)
        found = [k for k, part in enumerate(predicted) if (part & near).any()]
        made_up -= set(found)
        if lesion.sum() <= minimum:
            continue
        union = np.any([predicted[k] for k in found], axis=0) if found else np.zeros_like(lesion)
        dices.append(2 * (union & lesion).sum() / (union.sum() + lesion.sum()))
        distances.append(hausdorff95(lesion, union, MM) if found else 374)
        n_missed += not found
    n_scored = len(dices) + len(made_up)
    if not n_scored:
        return 1.0, 0.0, 0, 0, 0
    mean_hd95 = (sum(distances) + 374 * len(made_up)) / n_scored
    return sum(dices) / n_scored, mean_hd95, len(dices), len(made_up), n_missed


def speckled(rng: np.random.Generator) -> Mask:
    noise = ndimage.uniform_filter(rng.random((22, 20, 18)), 3)
    return noise > np.quantile(noise, rng.uniform(0.9, 0.99))


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("name", ["2023 GLI", "2023 MET", "2024 SSA", "2024 MEN"])
def test_scores_equal_those_of_the_steps_one_by_one(name: str, seed: int) -> None:
    rng = np.random.default_rng([seed, 5])
    sides = speckled(rng), speckled(rng)
    protocol = protocol_named(*f"lesionwise{name}".split())
    whole, merges = protocol.regions[0], protocol.lesions.merges_predictions
    found = scored(*(2 * side.astype(np.uint8) for side in sides), protocol)["wt"]
    expected = slow_scores(*sides, whole.dilation, int(whole.minimum_mm3), merges=merges)
    assert (found.dice, found.hd95) == pytest.approx(expected[:2])
    assert (found.n_lesions, found.n_false_positive, found.n_false_negative) == expected[2:]


def test_single_rules() -> None:
    # volumes are in mm3: fifty voxels of 2 mm3 are a lesion, and of 1 mm3 too small for one
    protocol, label_map = protocol_named("lesionwise2023", "GLI"), painted((2, FIFTY))
    for n_lesions, spacing_mm in ((0, MM), (1, (2.0, 1.0, 1.0))):
        assert scored(label_map, label_map, protocol, spacing_mm)["wt"].n_lesions == n_lesions
    # made-up lesions cost nothing before radiotherapy
    true, predicted = (np.stack([cubes(*boxes)]) for boxes in ([K], [K, FAR]))
    protocol = protocol_named("lesionwise2024", "MEN-RT")
    scale = lesions.Scale(spacing_mm=MM, penalty_mm=100.0)
    found = lesions.score_lesions(lesions.group_lesions(true, protocol), predicted, protocol, scale)
    names = ["lesionwise_dice", "lesionwise_hd95", "n_false_positive"]
    assert found[names].to_numpy().tolist() == [[1, 0, 0]]


TISSUES = ("netc", "et", "rc", "snfh")


def row(text: str) -> Lesions:
    numbers = [int(letter) if letter.isdigit() else 0 for letter in text]
    return np.array(numbers, dtype=np.int32)[:, None, None]


def groups(lesions: Lesions) -> list[int]:
    numbers = lesions[:, 0, 0].tolist()
    order = list(dict.fromkeys(number for number in numbers if number))
    return [order.index(number) + 1 if number else 0 for number in numbers]


@pytest.mark.parametrize(
    ("rows", "expected"),
    [
        # lesions that touch one lesion of another tissue are one
        (
            {"et": "11..22.33", "netc": "..11....."},
            {"et": [1, 1, 0, 0, 1, 1, 0, 2, 2], "netc": [0, 0, 1, 1, 0, 0, 0, 0, 0]},
        ),
        # so are those linked by a chain of neighbours
        (
            {"et": "1.2.3.4", "netc": ".1.2..."},
            {"et": [1, 0, 1, 0, 1, 0, 2], "netc": [0, 1, 0, 1, 0, 0, 0]},
        ),
        # the cavity joins 1 and 2 of ET, which then join those of NETC that only they touch
        (
            {"netc": "1....2", "et": ".1..2.", "rc": "..11.."},
            {"et": [0, 1, 0, 0, 1, 0], "netc": [1, 0, 0, 0, 0, 1]},
        ),
        # oedema is joined but joins nothing, and other regions are left alone
        ({"et": "1.2", "snfh": ".1."}, {"et": [1, 0, 2]}),
        ({"et": ".1.", "snfh": "1.2", "wt": "1.2"}, {"snfh": [1, 0, 1], "wt": [1, 0, 2]}),
    ],
)
def test_other_tissues_join_lesions(rows: dict[str, str], expected: dict[str, list[int]]) -> None:
    empty = dict.fromkeys(TISSUES, "." * len(rows["et"]))
    joined = lesions.join_touching({name: row(text) for name, text in (empty | rows).items()})
    assert {name: groups(joined[name]) for name in expected} == expected


AFFINE = np.array([[-1.0, 0, 0, 90], [0, -2.0, 0, 100], [0, 0, 3.0, -70], [0, 0, 0, 1]])


def regions_with(*boxes: tuple[slice, slice, slice]) -> np.ndarray:
    regions = np.zeros((3, 30, 30, 20), bool)
    for box in boxes:
        regions[(slice(None), *box)] = True
    return regions


def test_lesions_are_listed_by_size_with_their_place_in_the_coordinates_of_the_file() -> None:
    small = (slice(1, 4), slice(1, 4), slice(1, 3))
    large = (slice(10, 21), slice(10, 19), slice(5, 8))
    wt, _, _ = lesions.list_lesions(regions_with(small, large), AFFINE)
    first, second = wt.lesions
    assert first.ml == pytest.approx(11 * 9 * 3 * 6 / 1000)
    assert first.centre_mm == pytest.approx((90 - 15, 100 - 2 * 14, -70 + 3 * 6))
    assert first.axial.longest_mm == pytest.approx(np.hypot(18, 10))
    assert (first.is_measurable, second.is_measurable) == (True, False)


def test_small_and_further_islands_are_counted_and_not_measured() -> None:
    for n, depth, n_listed in ((0, 0, 0), (13, 1, 1), (13, 18, lesions.MOST_LISTED)):
        boxes = [(slice(2 * i, 2 * i + 1), slice(4, 5), slice(depth)) for i in range(n)]
        wt, _, _ = lesions.list_lesions(regions_with(*boxes), AFFINE)
        assert (len(wt.lesions), wt.n_others) == (n_listed, n - n_listed)
        assert wt.others_ml == pytest.approx((n - n_listed) * depth * 0.006)
