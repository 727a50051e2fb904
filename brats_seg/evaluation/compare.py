"""Compare sets of predictions case by case, and rank them.

The ranking is that of the BraTS challenges: sets are ranked within every case, region and score,
the ranks are averaged over all of them, and a permutation test gives the p value of each lead
(Bakas et al. 2018, arXiv 1811.02629). Which scores are ranked depends on the year.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path

import numpy as np
import pandas as pd
from scipy import stats

from brats_seg.errors import LayoutError, UsageError
from brats_seg.evaluation.evaluate import Evaluation, evaluate_pairs, find_pairs
from brats_seg.evaluation.protocols import ScoringProtocol
from brats_seg.evaluation.scores import LARGE_DISTANCE, LOWER_IS_BETTER, PROTOCOL, check_output
from brats_seg.evaluation.significance import Values, permutation_p_value, signed_rank_p_value
from brats_seg.progress import Track, untracked
from brats_seg.tables import write_table

_RANKED = (
    ("lesionwise_dice", "lesionwise_nsd", "small_f1"),
    ("dice", "nsd"),
    ("lesionwise_dice", "lesionwise_hd95"),
    ("dice", "hd95"),
)
"""Scores that are ranked: of metastases since 2025, of other tasks since 2025, of 2023 and 2024, and
before. The first that a table has are taken."""
_TESTED = (
    *("dice", "hd95", "nsd", "lesionwise_dice", "lesionwise_hd95"),
    *("lesionwise_nsd_0.5", "lesionwise_nsd_1.0", "lesionwise_nsd", "f1", "small_f1"),
)

# shape legend: S sets, C cases, R regions, K columns


@dataclass(frozen=True, kw_only=True, slots=True)
class PairedTest:
    """Test of two sets of predictions on one score of one region."""

    region: str
    column: str
    """Name of the score."""
    mean_first: float
    mean_second: float
    n_first_better: int
    """Cases in which the first set is better; the rest are ties or better in the second."""
    n_second_better: int
    p_value: float
    """P value of the two-sided Wilcoxon signed-rank test without ties, for this test alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Standing:
    """The rank of one set of predictions."""

    name: str
    mean_rank: float
    """Mean over cases, regions and scores; 1 is first in all of them."""
    p_value: float | None
    """P value of the lead over the next set, by a permutation test; None for the last set."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """Comparison of two sets of predictions of the same cases."""

    n_cases: int
    tests: tuple[PairedTest, ...]
    """One per region and score."""
    ranking: tuple[Standing, ...]
    """The better set first."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ComparedFolders:
    """Comparison of two folders of predictions, and the scores of each."""

    first: Evaluation
    second: Evaluation
    comparison: Comparison


def compare_folders(
    reference: Path,
    predictions: tuple[Path, Path],
    protocol: ScoringProtocol,
    *,
    output: Path | None = None,
    only_predicted: bool = False,
    n_workers: int = 0,
    track: Track = untracked,
) -> ComparedFolders:
    """Score two folders of predictions against the same references, and compare them.

    Args:
        reference: A folder of `<case>.nii.gz` or of case folders.
        predictions: The two folders of predictions.
        protocol: Regions and rules of the scores.
        output: Table of the tests to write, a `.csv`.
        only_predicted: Whether references are left out that one of the sets does not predict.
            Otherwise a missing prediction gets the worst scores.
        n_workers: Processes; 0 works in this one.
        track: Shows the progress.

    Raises:
        UsageError: No case could be scored in both sets, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in all that are compared.
        EnvironmentalError: A process was killed, or the table cannot be written.
    """
    if output is not None:
        check_output(output, reference, *predictions)
    pairings = [find_pairs(reference, path) for path in predictions]
    names = str(predictions[0]), str(predictions[1])
    if only_predicted:
        shared = pairings[0].predicted & pairings[1].predicted
        if not shared:
            msg = f"{' and '.join(names)} predict no case in common; expected the same cases"
            raise LayoutError(msg)
        pairings = [pairing.only(shared) for pairing in pairings]
    first, second = (
        evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track) for pairing in pairings
    )
    # a case that failed in one set is compared in neither
    scored = {*first.case_ids} & {*second.case_ids}
    sets = [one.scores[one.scores["case_id"].isin(scored)] for one in (first, second)]
    if not scored:
        failure = (*first.failures, *second.failures)[0]
        msg = f"no case could be scored in both {' and '.join(names)}; the first error: {failure.message}"
        raise UsageError(msg)
    comparison = compare_scores(names, sets, np.random.default_rng(0))
    if output is not None:
        table = pd.DataFrame(comparison.tests).assign(**{PROTOCOL: protocol.title})
        write_table(output, list(table.columns), table.itertuples(index=False))
    return ComparedFolders(first=first, second=second, comparison=comparison)


def compare_scores(
    names: Sequence[str], sets: Sequence[pd.DataFrame], rng: np.random.Generator
) -> Comparison:
    """Compare two named sets of predictions of the same cases and regions, case by case."""
    columns = [column for column in _TESTED if column in sets[0]]
    table = _table(sets, columns)
    first, second = _losses(table, columns)
    gains = second - first
    tests = [
        _test_pairs(str(region), column, table[:, :, r, k], gains[:, r, k])
        for r, region in enumerate(sets[0]["region"].unique())
        for k, column in enumerate(columns)
    ]
    ranking = rank_sets(names, sets, rng)
    return Comparison(n_cases=table.shape[1], tests=tuple(tests), ranking=ranking)


def rank_sets(
    names: Sequence[str], sets: Sequence[pd.DataFrame], rng: np.random.Generator
) -> tuple[Standing, ...]:
    """Rank sets of predictions of the same cases and regions as the challenges do, best first.

    Ties keep the order given.
    """
    columns = next(ranked for ranked in _RANKED if {*ranked} <= {*sets[0]})
    ranks = stats.rankdata(_losses(_table(sets, columns), columns), axis=0)
    # sums of half ranks are exact: means of equal sets and leads would differ in their last bits
    sums = ranks.sum(axis=(2, 3))
    order = np.argsort(sums.sum(axis=1), kind="stable").tolist()
    # the share of exchanges of two sets within cases that give as large a lead
    total = partial(np.sum, axis=-1)
    leads = [
        permutation_p_value(total, sums[behind] - sums[ahead], rng, permutation_type="samples")
        for ahead, behind in pairwise(order)
    ]
    return tuple(
        Standing(name=names[index], mean_rank=float(ranks[index].mean()), p_value=p_value)
        for index, p_value in zip(order, [*leads, None], strict=True)
    )


def _table(sets: Sequence[pd.DataFrame], columns: Sequence[str]) -> Values:
    """Return the values (S, C, R, K) of sets that hold the same cases and regions."""
    cases, regions = sorted(sets[0]["case_id"].unique()), sets[0]["region"].unique()
    cells = pd.MultiIndex.from_product([cases, regions])
    indexed = (scores.set_index(["case_id", "region"]) for scores in sets)
    tables = [scores.loc[cells, list(columns)].to_numpy() for scores in indexed]
    return np.stack(tables).reshape(len(sets), len(cases), len(regions), len(columns))


def _losses(table: Values, columns: Sequence[str]) -> Values:
    """Return values (..., K) of which less is better; what is neither there nor predicted is best."""
    signs = np.array([1 if column in LOWER_IS_BETTER else -1 for column in columns])
    losses = np.where(np.isnan(table), np.minimum(signs, 0), table * signs)
    return np.minimum(losses, LARGE_DISTANCE)


def _test_pairs(region: str, column: str, values: Values, gains: Values) -> PairedTest:
    """Test the gains (C,) of the first of two sets with the values (2, C)."""
    mean_first, mean_second = pd.DataFrame(values.T).mean()
    return PairedTest(
        region=region,
        column=column,
        mean_first=float(mean_first),
        mean_second=float(mean_second),
        n_first_better=int((gains > 0).sum()),
        n_second_better=int((gains < 0).sum()),
        p_value=signed_rank_p_value(gains),
    )
