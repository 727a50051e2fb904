"""Compare sets of predictions case by case, and rank them.

The ranking is that of the BraTS challenges: sets are ranked within every case, region and score,
the ranks are averaged over all of them, and a permutation test gives the p value of each lead
(Bakas et al. 2018, arXiv 1811.02629).
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass, fields, replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import stats

from brats_seg.errors import LayoutError, UsageError, some_of
from brats_seg.evaluation.evaluate import Evaluation, evaluate_pairs
from brats_seg.evaluation.pairs import Pairing, find_pairs
from brats_seg.evaluation.protocols import ScoringProtocol
from brats_seg.evaluation.scores import LOWER_IS_BETTER, Score
from brats_seg.evaluation.significance import permutation_p_value, signed_rank_p_value
from brats_seg.progress import Track, untracked
from brats_seg.tables import write_table

_RANKED_REGIONS = ("dice", "hd95")
_RANKED_LESIONS = ("lesionwise_dice", "lesionwise_hd95")
_TESTED = (*_RANKED_REGIONS, *_RANKED_LESIONS, "lesionwise_nsd_0.5", "lesionwise_nsd_1.0")

# shape legend: S sets, C cases, R regions, K columns
Table = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedScores:
    """The scores of one set of predictions."""

    name: str
    scores: tuple[Score, ...]


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
    predicted: Comparison | None
    """The same over the cases that both sets predict; None if both predict all or share none."""


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
        UsageError: The folders do not hold the same cases, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in all that are compared.
        EnvironmentalError: A process was killed, or the table cannot be written.
    """
    pairings = [find_pairs(reference, path) for path in predictions]
    shared = pairings[0].predicted & pairings[1].predicted
    if only_predicted:
        pairings = _only_shared(pairings, shared, predictions)
    first, second = (
        evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track) for pairing in pairings
    )
    sets = [
        NamedScores(name=str(path), scores=evaluation.scores)
        for path, evaluation in zip(predictions, (first, second), strict=True)
    ]
    comparison = compare_scores(sets[0], sets[1], np.random.default_rng(0))
    if output is not None:
        columns = [field.name for field in fields(PairedTest)]
        write_table(output, columns, map(asdict, comparison.tests))
    is_complete = not (first.missing or second.missing)
    return ComparedFolders(
        first=first,
        second=second,
        comparison=comparison,
        predicted=None if is_complete else _compared_over(shared, sets),
    )


def compare_scores(first: NamedScores, second: NamedScores, rng: np.random.Generator) -> Comparison:
    """Compare two sets of predictions case by case.

    Raises:
        UsageError: The sets do not hold the same cases and regions, or are of two protocols.
    """
    _check_alike((first, second))
    columns = [column for column in _TESTED if column in first.scores[0].columns]
    table = _table((first, second), columns)
    tests = [
        _tested(region, column, table[0, :, r, k], table[1, :, r, k])
        for r, region in enumerate(_regions(first))
        for k, column in enumerate(columns)
    ]
    return Comparison(
        n_cases=table.shape[1], tests=tuple(tests), ranking=rank_sets((first, second), rng)
    )


def rank_sets(sets: Sequence[NamedScores], rng: np.random.Generator) -> tuple[Standing, ...]:
    """Rank sets of predictions as the challenges do, best first; ties keep the order given.

    Raises:
        UsageError: The sets do not hold the same cases and regions, or are of two protocols.
    """
    _check_alike(sets)
    has_lesions = sets[0].scores[0].lesions is not None
    columns = _RANKED_LESIONS if has_lesions else _RANKED_REGIONS
    penalties = _table(sets, columns) * [1 if c in LOWER_IS_BETTER else -1 for c in columns]
    ranks = stats.rankdata(penalties, axis=0)
    mean_ranks = ranks.mean(axis=(2, 3)).mean(axis=1)
    order = np.argsort(mean_ranks, kind="stable").tolist()
    # sums of half ranks are exact: means would differ in their last bits where leads are equal
    sums = ranks.sum(axis=(2, 3))
    leads = [_chance_of_lead(sums[behind] - sums[ahead], rng) for ahead, behind in pairwise(order)]
    return tuple(
        Standing(name=sets[place].name, mean_rank=float(mean_ranks[place]), p_value=p_value)
        for place, p_value in zip(order, [*leads, None], strict=True)
    )


def _only_shared(
    pairings: Sequence[Pairing], shared: frozenset[str], predictions: tuple[Path, Path]
) -> list[Pairing]:
    """Return the pairs of the cases that both sets predict; raise `LayoutError` if there are none."""
    if not shared:
        first, second = (
            f"{path} has {some_of(sorted(pairing.predicted))}"
            for path, pairing in zip(predictions, pairings, strict=True)
        )
        msg = (
            f"no case is predicted in both sets: {first}, {second}. "
            "Give two sets of predictions of the same cases."
        )
        raise LayoutError(msg)
    return [pairing.only(shared) for pairing in pairings]


def _compared_over(shared: frozenset[str], sets: Sequence[NamedScores]) -> Comparison | None:
    """Compare two sets over some of their cases; None if there are no scores of these."""
    first, second = (
        replace(one, scores=tuple(score for score in one.scores if score.case_id in shared))
        for one in sets
    )
    return compare_scores(first, second, np.random.default_rng(0)) if first.scores else None


def _check_alike(sets: Sequence[NamedScores]) -> None:
    first = sets[0]
    if not first.scores:
        msg = f"{first.name} holds no scores"
        raise UsageError(msg)
    cells = _cells(first)
    for other in sets[1:]:
        if differing := sorted(cells ^ _cells(other)):
            names = ", ".join(" ".join(cell) for cell in differing[:3])
            msg = (
                f"{first.name} and {other.name} do not hold scores of the same cases and regions: "
                f"{len(differing)} are in one only, such as {names}. "
                "Score both against the same references, by one protocol."
            )
            raise UsageError(msg)
        if first.scores[0].columns != other.scores[0].columns:
            msg = f"{first.name} and {other.name} were scored by two protocols; expected one"
            raise UsageError(msg)


def _cells(named: NamedScores) -> set[tuple[str, str]]:
    return {(score.case_id, score.region) for score in named.scores}


def _regions(named: NamedScores) -> tuple[str, ...]:
    return tuple(dict.fromkeys(score.region for score in named.scores))


def _table(sets: Sequence[NamedScores], columns: Sequence[str]) -> Table:
    """Return the values (S, C, R, K)."""
    regions = _regions(sets[0])
    rows = []
    for named in sets:
        scores = {(score.case_id, score.region): score for score in named.scores}
        cases = sorted({case_id for case_id, _ in scores})
        rows.append([[scores[case_id, region] for region in regions] for case_id in cases])
    return np.array(
        [[[[s.value(c) for c in columns] for s in case] for case in cases] for cases in rows]
    )


def _tested(region: str, column: str, first: Table, second: Table) -> PairedTest:
    """Test the values (C,) of two sets."""
    gain = first - second if column not in LOWER_IS_BETTER else second - first
    return PairedTest(
        region=region,
        column=column,
        mean_first=float(first.mean()),
        mean_second=float(second.mean()),
        n_first_better=int((gain > 0).sum()),
        n_second_better=int((gain < 0).sum()),
        p_value=signed_rank_p_value(gain),
    )


def _chance_of_lead(lead: Table, rng: np.random.Generator) -> float:
    """Return the share of exchanges of two sets within cases (C,) that give as large a lead."""
    return permutation_p_value(
        lambda leads: leads.sum(axis=-1), lead, rng, permutation_type="samples"
    )
