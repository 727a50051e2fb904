"""The table of scores: a row per case and region."""

import csv
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

from brats_seg.errors import UsageError
from brats_seg.evaluation.lesionwise import LesionScores
from brats_seg.files import whole_file

REGION_COLUMNS = (
    "dice",
    "jaccard",
    "hd95",
    "sensitivity",
    "specificity",
    "reference_ml",
    "prediction_ml",
)
"""Of the whole region."""

LESION_COLUMNS = (
    "lesionwise_dice",
    "lesionwise_hd95",
    "lesionwise_nsd_0.5",
    "lesionwise_nsd_1.0",
    "n_lesions",
    "n_false_positive",
    "n_false_negative",
)
"""Added by the lesion-wise protocols."""
_N_COUNTS = 3
"""The last of them, whole numbers."""

LOWER_IS_BETTER = frozenset({"hd95", "lesionwise_hd95"})
"""The columns in which a small value is good; in the other scores a large one is."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Score:
    """How well one region of one case was predicted."""

    case_id: str
    region: str
    dice: float
    jaccard: float
    hd95: float
    """In mm; the protocol's penalty where exactly one side is empty."""
    sensitivity: float
    """Share of the reference that the prediction holds."""
    specificity: float
    """Share of the volume outside the reference that the prediction leaves out: nearly always 1."""
    reference_ml: float
    """Volume in the reference."""
    prediction_ml: float
    """Volume in the prediction."""
    lesions: LesionScores | None = None
    """None if the protocol scores whole regions only."""

    @property
    def columns(self) -> tuple[str, ...]:
        """The names of the values, in the order of the table."""
        return REGION_COLUMNS if self.lesions is None else REGION_COLUMNS + LESION_COLUMNS

    @property
    def values(self) -> tuple[float, ...]:
        """The values, in the order of `columns`."""
        region = (
            self.dice,
            self.jaccard,
            self.hd95,
            self.sensitivity,
            self.specificity,
            self.reference_ml,
            self.prediction_ml,
        )
        if self.lesions is None:
            return region
        found = self.lesions
        counts = (found.n_lesions, found.n_false_positive, found.n_false_negative)
        return (*region, found.dice, found.hd95, *found.nsd, *counts)

    def value(self, column: str) -> float:
        """Return the value of a column."""
        return self.values[self.columns.index(column)]


def write_scores(scores: Iterable[Score], path: Path) -> None:
    """Write the table as CSV, to six decimals; a reader never sees half of it.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    rows = list(scores)
    columns = rows[0].columns if rows else REGION_COLUMNS
    with whole_file(path) as beside, beside.open("w", newline="", encoding="utf-8") as file:
        table = csv.writer(file, lineterminator="\n")
        table.writerow(("case_id", "region", *columns))
        for row in rows:
            table.writerow((row.case_id, row.region, *map(_text, row.values)))


def read_scores(path: Path) -> tuple[Score, ...]:
    """Read what `write_scores` wrote.

    Raises:
        UsageError: The file is not there, or is no table of scores.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            return tuple(_parsed(row) for row in csv.DictReader(file))
    except OSError as error:
        msg = f"the table of scores {path} cannot be read: {error.strerror}"
        raise UsageError(msg) from None
    except (KeyError, TypeError, ValueError, csv.Error) as error:
        msg = (
            f"{path} is no table of scores ({type(error).__name__}: {error}); expected the columns "
            f"{', '.join(('case_id', 'region', *REGION_COLUMNS))}, as `brats-seg evaluate` writes"
        )
        raise UsageError(msg) from None


def _parsed(row: Mapping[str, str]) -> Score:
    lesions = None
    if LESION_COLUMNS[0] in row:
        dice, hd95, *nsd = (float(row[column]) for column in LESION_COLUMNS[:-_N_COUNTS])
        n_lesions, n_false_positive, n_false_negative = (
            int(row[column]) for column in LESION_COLUMNS[-_N_COUNTS:]
        )
        lesions = LesionScores(
            dice=dice,
            hd95=hd95,
            nsd=tuple(nsd),
            n_lesions=n_lesions,
            n_false_positive=n_false_positive,
            n_false_negative=n_false_negative,
        )
    values = {column: float(row[column]) for column in REGION_COLUMNS}
    return Score(case_id=row["case_id"], region=row["region"], lesions=lesions, **values)


def _text(value: float) -> str:
    return str(value) if isinstance(value, int) else f"{value:.6f}"
