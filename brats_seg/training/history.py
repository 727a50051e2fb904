"""What every epoch measured: rows of `history.csv` and the picture `history.png`."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from brats_seg.evaluation.overlap import RegionCounts, dice, jaccard
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS

Row = Mapping[str, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class PhaseScores:
    """Loss and overlap of one phase of an epoch."""

    loss: float
    dice: npt.NDArray[np.float64]
    """`(3,)`, mean over cases; a region empty on both sides scores 1."""
    jaccard: npt.NDArray[np.float64]
    """`(3,)`, mean over cases."""
    n_empty: npt.NDArray[np.int64]
    """`(3,)`, cases whose reference lacks the region."""

    def columns(self, phase: str) -> dict[str, float]:
        """Return the columns of `history.csv` for `train` or `val`."""
        columns = {
            f"{phase}_loss": self.loss,
            f"{phase}_dice": float(self.dice.mean()),
            f"{phase}_jaccard": float(self.jaccard.mean()),
        }
        for index, region in enumerate(REGIONS):
            columns[f"{phase}_dice_{region}"] = float(self.dice[index])
            columns[f"{phase}_jaccard_{region}"] = float(self.jaccard[index])
            columns[f"{phase}_empty_{region}"] = int(self.n_empty[index])
        return columns


def scores_of(loss: float, counts: Sequence[RegionCounts]) -> PhaseScores:
    """Take the ratios of each case once, and their mean over cases."""
    return PhaseScores(
        loss=loss,
        dice=np.mean([dice(case) for case in counts], axis=0),
        jaccard=np.mean([jaccard(case) for case in counts], axis=0),
        n_empty=np.sum([case.in_reference == 0 for case in counts], axis=0),
    )


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over patches or cases, of plain values only, so that a checkpoint can hold them."""

    seconds: float = 0.0
    """Time they have taken."""
    loss_sum: float = 0.0
    """Sum of their losses."""
    n_patches: int = 0
    counts: dict[str, list[list[int]]] = field(default_factory=dict)
    """Their voxels by case: `(4, R)` in the order of `region_counts`."""

    def add(self, case_id: str, counts: Sequence[Sequence[int]]) -> None:
        """Add the voxels of a patch to those of its case."""
        before = self.counts.get(case_id)
        summed = counts if before is None else np.add(before, counts).tolist()
        self.counts[case_id] = [list(row) for row in summed]

    def add_all(self, other: "Tally") -> None:
        """Add the patches of another tally."""
        self.loss_sum += other.loss_sum
        self.n_patches += other.n_patches
        for case_id, counts in other.counts.items():
            self.add(case_id, counts)

    def scores(self) -> PhaseScores:
        """Return loss and overlap of the patches so far, cases in the order of their ids."""
        cases = [region_counts(case_id, self.counts[case_id]) for case_id in sorted(self.counts)]
        loss = self.loss_sum / self.n_patches if self.n_patches else float("nan")
        return scores_of(loss, cases)


def region_counts(case_id: str, counts: Sequence[Sequence[int]]) -> RegionCounts:
    """Return the value that metrics are made of, from rows TP, FP, FN, TN of `R` voxel counts."""
    true_positive, false_positive, false_negative, true_negative = np.asarray(counts, np.int64)
    return RegionCounts(
        case_id=case_id,
        true_positive=true_positive,
        false_positive=false_positive,
        false_negative=false_negative,
        true_negative=true_negative,
    )


def write_history(rows: Sequence[Row], run_path: Path) -> None:
    """Write `history.csv` and `history.png` of a run."""
    table = pd.DataFrame([dict(row) for row in rows]).reindex(columns=list(COLUMNS))
    with whole_file(run_path / "history.csv") as beside:
        table.to_csv(beside, index=False)
    with whole_file(run_path / "history.png") as beside:
        draw_history(table, beside)


def row_line(row: Row, n_epochs: int) -> str:
    """Return the line on screen for an epoch."""
    parts = [f"epoch {row['epoch']}/{n_epochs}"]
    for phase, name in (("train", "training"), ("val", "validation")):
        if f"{phase}_loss" in row:
            regions = " ".join(f"{r.upper()} {row[f'{phase}_dice_{r}']:.3f}" for r in REGIONS)
            parts.append(
                f"{name} loss {row[f'{phase}_loss']:.4f} Dice {row[f'{phase}_dice']:.3f} ({regions})"
                f" Jaccard {row[f'{phase}_jaccard']:.3f}"
            )
    parts.append(f"lr {row['lr']:.2g}, {row['seconds']:.0f} s, {row['peak_memory_mb']:.0f} MB")
    return " | ".join(parts)


def _columns() -> tuple[str, ...]:
    empty = PhaseScores(
        loss=0.0, dice=np.zeros(3), jaccard=np.zeros(3), n_empty=np.zeros(3, dtype=np.int64)
    )
    phases = (*empty.columns("train"), *empty.columns("val"))
    # the six of the article first, then what it pooled, region by region
    article = [
        f"{phase}_{what}" for what in ("loss", "dice", "jaccard") for phase in ("train", "val")
    ]
    rest = [column for column in phases if column not in article]
    return ("epoch", "step", *article, *rest, "lr", "seconds", "peak_memory_mb")


COLUMNS = _columns()
"""Of `history.csv`; validation columns are empty in an epoch without validation."""


def draw_history(table: pd.DataFrame, path: Path) -> None:
    """Draw loss, Dice and Jaccard over epochs, both phases, into a PNG."""
    from matplotlib.figure import Figure

    # margins are set by hand: finding them takes as long as all the rest of the drawing
    figure = Figure(figsize=(8, 9))
    figure.subplots_adjust(left=0.09, right=0.98, top=0.98, bottom=0.08, hspace=0.08)
    for axes, what in zip(
        figure.subplots(3, 1, sharex=True), ("loss", "dice", "jaccard"), strict=True
    ):
        for phase, colour in (("train", "tab:blue"), ("val", "tab:orange")):
            values = table[["epoch", f"{phase}_{what}"]].dropna()
            axes.plot(
                values["epoch"],
                values[f"{phase}_{what}"],
                color=colour,
                marker=".",
                label={"train": "training", "val": "validation"}[phase],
            )
        if what != "loss":
            axes.set_ylim(0, 1)
            for region, style in zip(REGIONS, ("--", "-.", ":"), strict=True):
                values = table[["epoch", f"val_{what}_{region}"]].dropna()
                axes.plot(
                    values["epoch"],
                    values[f"val_{what}_{region}"],
                    color="tab:orange",
                    alpha=0.5,
                    linestyle=style,
                    linewidth=1,
                    label=f"validation {region.upper()}",
                )
        axes.set_ylabel({"loss": "loss", "dice": "Dice", "jaccard": "Jaccard"}[what])
        axes.grid(visible=True, alpha=0.3)
        axes.legend(fontsize="small")
    axes.set_xlabel("epoch")
    figure.text(0.98, 0.01, "research use only", fontsize="x-small", color="grey", ha="right")
    figure.savefig(path, dpi=80, format="png")
