"""Tell whether predicted quality sorts cases: the risk-coverage curve.

Cases are accepted one after another, those of the best predicted quality first. The coverage is the share
of cases that are accepted, and the risk the mean of 1 - Dice over them. A quality that sorts well keeps
the risk low until the last cases; one that says nothing has the same risk at every coverage. The area
under the curve is between that of the best order, by the true Dice, and that of a random order.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.stats import spearmanr

from brats_seg.errors import UsageError, some_of
from brats_seg.evaluation.scores import Score
from brats_seg.labels import REGIONS
from brats_seg.quality.expected_dice import PREDICTED_COLUMNS
from brats_seg.tables import BETWEEN_TEXTS, read_table

Values = npt.NDArray[np.float64]

FEWEST_CASES = 3
"""Cases from which an order can be judged."""
_N_ORDERS = 10_000
"""Random orders that an area is compared with."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RiskCoverage:
    """Risk of the cases that are accepted, by their share."""

    source: str
    """Quality that the cases were sorted by: `predicted Dice` or `number of warnings`."""
    coverage: Values
    """Shares (n,) of the cases, from 1 / n to 1."""
    risk: Values
    """Mean (n,) of 1 - Dice over the accepted cases."""
    best: Values
    """The same where the cases are sorted by their Dice."""
    correlation: float
    """Spearman's rank correlation of quality and Dice; NaN where all cases have one quality."""
    p_value: float
    """Share of random orders whose area is as small."""

    @property
    def area(self) -> float:
        """Area under the curve: the mean risk over all coverages."""
        return float(self.risk.mean())

    @property
    def best_area(self) -> float:
        """Area of the best order."""
        return float(self.best.mean())

    @property
    def random_area(self) -> float:
        """Area of a random order, the mean risk of all cases."""
        return float(self.risk[-1])


def risk_of_folder(scores: Sequence[Score], predictions: Path) -> RiskCoverage:
    """Sort scored cases by what `predict` said of them.

    It is the mean predicted Dice of the regions, or where the model tells none, the number of warnings.

    Args:
        scores: Scores of the cases.
        predictions: Folder of the predictions with its table `volumes.csv`, or that table.

    Raises:
        UsageError: A scored case is not in the table, or there are fewer than three cases.
    """
    source, qualities = read_qualities(predictions)
    dices: dict[str, list[float]] = {}
    for score in scores:
        if score.region in REGIONS:
            dices.setdefault(score.case_id, []).append(score.dice)
    if missing := sorted(dices.keys() - qualities.keys()):
        msg = (
            f"{predictions} has no row for {some_of(missing)}; expected a row for each scored case. Give "
            "the folder of the predictions that were scored."
        )
        raise UsageError(msg)
    ids = sorted(dices)
    return risk_coverage(
        np.array([np.mean(dices[case_id]) for case_id in ids]),
        np.array([qualities[case_id] for case_id in ids]),
        source,
    )


def risk_coverage(dice: Values, quality: Values, source: str) -> RiskCoverage:
    """Return the curve of cases that are sorted by a quality; among equals, any order is as likely.

    Args:
        dice: Dice (n,) of each case.
        quality: Predicted quality (n,): higher is better.
        source: What the quality is.

    Raises:
        UsageError: There are fewer than three cases.
    """
    if len(dice) < FEWEST_CASES:
        msg = f"a risk-coverage curve needs {FEWEST_CASES} cases or more; found {len(dice)}"
        raise UsageError(msg)
    risk = _risks(dice, quality)
    rng = np.random.default_rng(0)
    areas = [_risks(rng.permutation(dice), quality).mean() for _ in range(_N_ORDERS)]
    # rounding must not separate equal areas
    n_as_small = np.count_nonzero(np.array(areas) <= risk.mean() + 1e-12)
    is_sorted = np.ptp(quality) > 0 and np.ptp(dice) > 0
    return RiskCoverage(
        source=source,
        coverage=np.arange(1, len(dice) + 1) / len(dice),
        risk=risk,
        best=_risks(dice, dice),
        correlation=float(spearmanr(quality, dice).statistic) if is_sorted else float("nan"),
        p_value=float((1 + n_as_small) / (1 + _N_ORDERS)),
    )


def read_qualities(predictions: Path) -> tuple[str, Mapping[str, float]]:
    """Return what the quality of predictions is, and its value for each case.

    Args:
        predictions: Folder with the table `volumes.csv`, or that table.

    Raises:
        UsageError: There is no such table.
    """
    path = predictions / "volumes.csv" if predictions.is_dir() else predictions
    table = read_table(path, required=("case_id", "warnings"))
    columns = [name for name in PREDICTED_COLUMNS[::3] if name in table]
    rows = {str(row["case_id"]): row for row in table.to_dict("records")}
    if columns:
        told = {name: [float(row[c]) for c in columns if row[c]] for name, row in rows.items()}
        # a case without any predicted region is the least sure
        return "predicted Dice", {name: float(np.mean(v)) if v else 0.0 for name, v in told.items()}
    counts = {
        name: -len(str(row["warnings"]).split(BETWEEN_TEXTS)) if row["warnings"] else 0
        for name, row in rows.items()
    }
    return "number of warnings", {name: float(count) for name, count in counts.items()}


def _risks(dice: Values, quality: Values) -> Values:
    """Return the mean risk (n,) of the first cases; equal ones count as their mean."""
    _, group = np.unique(-quality, return_inverse=True)
    mean_of_group = np.bincount(group, weights=1 - dice) / np.bincount(group)
    risks = mean_of_group[np.sort(group)]
    return np.asarray(np.cumsum(risks) / np.arange(1, len(dice) + 1))
