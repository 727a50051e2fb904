"""Draw charts: scores, distributions of a cohort, predicted survival, and the history of a run.

A history is a table with a row for each epoch and columns `train_<name>` and `val_<name>`.
"""

import math
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS, ClinicalTable
from brats_seg.errors import UsageError, counted
from brats_seg.evaluation.scores import score_columns, score_title
from brats_seg.figures import sections
from brats_seg.figures.sections import FIRST_COLOUR, REGION_COLOURS, SECOND_COLOUR
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.progress import Item, tracked

Values = npt.NDArray[np.float64]

_COLOURS = dict(zip(REGIONS, REGION_COLOURS, strict=True))
_OTHER_COLOUR = "lightgrey"
"""Colour of the tissues and regions that only some protocols score."""
_SHARES = ("dice", "jaccard", "sensitivity", "specificity", "nsd", "f1")
"""Parts of the names of scores that lie between 0 and 1."""
_OUTCOMES = ("died", "alive at last contact")
_OUTCOME_COLOURS = (FIRST_COLOUR, SECOND_COLOUR)
_FEW_POINTS = 200
"""Points of a region that are drawn in full size; thousands would hide the box."""
_TITLE_SIZE = 12.0
_AXES_SHARE = 0.85
"""Width of the axes as a share of the figure."""

Row = Mapping[str, float]
HISTORY_NAME = "history.csv"
PHASES = {"train": "training", "val": "validation"}
"""Phases of an epoch, by their prefix in columns."""
_PHASE_COLOURS = {"train": "tab:blue", "val": "tab:orange"}
_STYLES = ("--", "-.", ":", (0, (1, 4)))
"""Line styles of the parts of a curve, as many as there are modalities."""


def score_figure(scores: pd.DataFrame, *, column: str = "dice") -> Figure:
    """Draw a score of every case as a point, and a box for each region: median and quartiles.

    Raises:
        UsageError: There are no scores, or they have no such column.
    """
    by_region = _by_region(scores, column)
    figure = sections.light_figure(1.6 + 1.4 * len(by_region), 4.8)
    axes = figure.subplots()
    # between infinite distances quartiles are not known
    with np.errstate(invalid="ignore"):
        boxes = axes.boxplot(
            list(by_region.values()),
            tick_labels=[
                f"{region.upper()}\nmedian {np.median(values):.3g}\nmean {values.mean():.3g}"
                for region, values in by_region.items()
            ],
            widths=0.5,
            showfliers=False,  # every case is drawn
            patch_artist=True,
            medianprops={"color": "black"},
        )
    for x, (region, values) in enumerate(by_region.items(), start=1):
        boxes["boxes"][x - 1].set_facecolor(_COLOURS.get(region, _OTHER_COLOUR))
        size = min(4.0, 4 * math.sqrt(_FEW_POINTS / len(values)))
        # equal values are apart, in the same way at every call
        apart = x + np.random.default_rng(0).uniform(-0.15, 0.15, len(values))
        axes.plot(apart, values, "o", color="black", mec="white", mew=size / 8, ms=size)
    n_cases = max(map(len, by_region.values()))
    _set_title(axes, f"{score_title(column)}, {counted(n_cases, 'case')}")
    axes.set_ylabel(score_title(column))
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    is_share = any(word in column for word in _SHARES)
    axes.set_ylim(*((-0.02, 1.05) if is_share else (0, None)))
    return figure


def dice_figure(dice: npt.ArrayLike) -> Figure:
    """Draw the Dice `(cases, 3)` of every case by region, as `score_figure` does."""
    rows = np.asarray(dice, float)
    return score_figure(pd.DataFrame({"region": [*REGIONS] * len(rows), "dice": rows.ravel()}))


def cohort_figure(cases: Sequence[Case], table: ClinicalTable) -> Figure:
    """Draw histograms of age, survival and tumour volume, with the number of known values.

    Patients who were alive at the last contact are stacked on those who died.

    Raises:
        UsageError: Nothing is known of any case.
    """
    rows = [table.row(case.case_id) for case in cases]
    ages = np.array([case.facts.age_years for case in cases], float)
    days = np.array([row.survival_days if row else None for row in rows], float)
    is_alive = np.array([row is not None and row.survival_censored for row in rows], bool)
    ml = np.array([case.facts.tumour_ml for case in cases], float)
    if not np.isfinite([ages, days, ml]).any():
        msg = f"of {counted(len(ages), 'case')} neither age, survival nor label map is known; expected one of them"
        raise UsageError(msg)
    figure = sections.light_figure(12, 3.8)
    of_age, of_days, of_ml = figure.subplots(1, 3)
    _draw_histogram(of_age, "age (years)", [ages], [FIRST_COLOUR])
    by_outcome = [np.where(is_alive, np.nan, days), np.where(is_alive, days, np.nan)]
    _draw_histogram(of_days, "survival (days)", by_outcome, _OUTCOME_COLOURS)
    _draw_histogram(of_ml, "whole tumour (ml)", [ml], [REGION_COLOURS[0]])
    of_age.set_ylabel("cases")
    return figure


def volume_figure(volumes_ml: Mapping[str, npt.ArrayLike]) -> Figure:
    """Draw a histogram of the volumes `(n,)` of each region over cases."""
    figure = sections.light_figure(4 * len(volumes_ml), 3.4)
    panels = figure.subplots(1, len(volumes_ml), squeeze=False)[0]
    for axes, (region, ml) in zip(panels, volumes_ml.items(), strict=True):
        _draw_histogram(axes, f"{region.upper()} (ml)", [np.asarray(ml, float)], [_COLOURS[region]])
    panels[0].set_ylabel("cases")
    return figure


def survival_figure(
    reported_days: npt.ArrayLike,
    predicted_days: npt.ArrayLike,
    censored: npt.ArrayLike,
    *,
    title: str,
) -> Figure:
    """Draw predicted against reported survival, a point for each case.

    A censored case, whose patient was alive at the last contact, is a triangle that points to the
    right: the true value is larger. The diagonal is a perfect prediction; the thin lines separate
    short, mid and long survivors, at 10 and 15 months.

    Args:
        reported_days: Days `(n,)` to death, or to the last contact.
        predicted_days: Days `(n,)`.
        censored: Booleans `(n,)`.
        title: Title of the figure.
    """
    reported, predicted = np.asarray(reported_days, float), np.asarray(predicted_days, float)
    is_alive = np.asarray(censored, bool)
    figure = sections.light_figure(5.6, 5.6)
    axes = figure.subplots()
    look: dict[str, Any] = {"edgecolors": "black", "linewidths": 0.5, "alpha": 0.8}
    marks = zip((~is_alive, is_alive), "o>", _OUTCOME_COLOURS, _OUTCOMES, strict=True)
    for chosen, mark, colour, name in marks:
        if chosen.any():
            label = f"{name} ({np.count_nonzero(chosen)})"
            points = reported[chosen], predicted[chosen]
            axes.scatter(*points, marker=mark, color=colour, label=label, **look)
    finite = np.concatenate([reported, predicted])
    end = 1.05 * float(np.max(finite[np.isfinite(finite)], initial=365))
    axes.plot([0, end], [0, end], color="black", linewidth=1, label="perfect")
    for days in SURVIVAL_CLASS_DAYS:
        axes.axvline(days, color="grey", linewidth=0.7, linestyle=":")
        axes.axhline(days, color="grey", linewidth=0.7, linestyle=":")
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    _set_title(axes, title)
    axes.set(xlabel="reported survival (days)", ylabel="predicted survival (days)")
    axes.legend(fontsize="small")
    return figure


def _by_region(scores: pd.DataFrame, column: str) -> dict[str, Values]:
    if column not in score_columns(scores):
        msg = f"scores have no column {column!r}; there are {', '.join(score_columns(scores))}"
        raise UsageError(msg)
    # some protocols give no score to a region that both sides lack
    known = scores.dropna(subset=[column])
    if known.empty:
        msg = f"no case has a score {column!r}; expected one of a case, or another --column"
        raise UsageError(msg)
    by_region = known.groupby("region", sort=False)[column]
    return {str(region): values.to_numpy(np.float64) for region, values in by_region}


def _set_title(axes: Any, text: str) -> None:
    """Write a title above a chart, smaller if it is wider than that."""
    width_inches = _AXES_SHARE * axes.figure.get_figwidth()
    axes.set_title(text, fontsize=sections.fitting_size(text, width_inches, _TITLE_SIZE))


def _draw_histogram(axes: Any, title: str, parts: Sequence[Values], colours: Sequence[str]) -> None:
    """Draw the known values of parts (n,), stacked; what is unknown, or in another part, is NaN.

    Two parts are those who died and those who were alive.
    """
    known = [part[np.isfinite(part)] for part in parts]
    values = np.concatenate(known)
    median = f", median {np.median(values):.3g}" if values.size else ""
    axes.set_title(f"known for {values.size} of {parts[0].size} cases{median}", fontsize="medium")
    axes.set_xlabel(title)
    if not values.size:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color="grey")
        return
    # a label that begins with "_" has no entry in the legend
    axes.hist(
        known,
        bins=np.histogram_bin_edges(values, "rice" if np.ptp(values) else 1),
        stacked=True,
        color=list(colours),
        label=[name if part.size else "_" for name, part in zip(_OUTCOMES, known, strict=False)],
        edgecolor="white",
        linewidth=0.5,
    )
    axes.yaxis.get_major_locator().set_params(integer=True)
    if len(parts) > 1:
        axes.legend(fontsize="small")


@dataclass(frozen=True, kw_only=True, slots=True)
class Curve:
    """A value that is computed in both phases of every epoch."""

    name: str
    """Name in the columns of the history: `train_<name>`, `val_<name>`, and `val_<name>_<part>` for each part."""
    title: str
    """Title in figures."""
    parts: tuple[str, ...] = ()
    """Names of the parts whose mean the value is."""
    limits: tuple[float, float] | None = None
    """Limits of the axis; None fits them to the values."""
    digits: int = 3
    """Digits after the point, in the line that is logged."""
    shows_parts: bool = False
    """Whether that line shows the parts too."""


CURVES = (
    Curve(name="loss", title="loss", digits=4),
    Curve(name="dice", title="Dice", parts=REGIONS, limits=(0, 1), shows_parts=True),
    Curve(name="jaccard", title="Jaccard", parts=REGIONS, limits=(0, 1)),
    Curve(name="rmse", title="RMSE in the brain", parts=MODALITIES, shows_parts=True),
)
"""All curves; a history has those of its task."""


def select_curves(columns: Collection[str]) -> tuple[Curve, ...]:
    """Return the curves that a history with those columns has."""
    return tuple(curve for curve in CURVES if f"train_{curve.name}" in columns)


def read_history(run_path: Path) -> pd.DataFrame:
    """Read `history.csv` of a run, which may be given itself."""
    path = run_path if run_path.name == HISTORY_NAME else run_path / HISTORY_NAME
    if not path.is_file():
        msg = f"{path} does not exist; expected the folder of a run with a finished epoch"
        raise UsageError(msg)
    try:
        table = pd.read_csv(path).apply(pd.to_numeric)
    except ValueError:
        table = pd.DataFrame()
    if table.empty or not {"epoch", "train_loss", "val_loss"} <= {*table.columns}:
        msg = f"{path} holds no epochs to read; the run writes it again after its next epoch"
        raise UsageError(msg)
    return table


def history_figure(
    table: pd.DataFrame, *, best_epoch: int | None = None, with_rate: bool = False
) -> Figure:
    """Draw every curve of a history over its epochs, in both phases; the best epoch and the rate by choice."""
    curves = select_curves(table.columns)
    n_panels = len(curves) + with_rate
    # margins are fixed: computing them takes as long as the rest of the drawing
    figure = Figure(figsize=(8, 3 * n_panels))
    figure.subplots_adjust(left=0.09, right=0.98, top=0.98, bottom=0.24 / n_panels, hspace=0.08)
    (column,) = figure.subplots(n_panels, 1, sharex=True, squeeze=False).T
    for axes, curve in zip(column, curves, strict=False):
        _draw_curve(axes, table, curve)
    if with_rate:
        column[-1].plot(table["epoch"], table["lr"], color="tab:green", marker=".", label="rate")
        column[-1].set_ylabel("learning rate")
        # 0.00028 would leave no space for the name of the axis
        column[-1].ticklabel_format(axis="y", style="sci", scilimits=(0, 0))
        column[-1].grid(visible=True, alpha=0.3)
    if best_epoch is not None:
        for axes in column:
            axes.axvline(best_epoch, color="tab:red", linestyle=":")
        side = "left" if best_epoch < table["epoch"].mean() else "right"
        style = {"s": f" best: epoch {best_epoch} ", "ha": side, "color": "tab:red"}
        column[0].text(best_epoch, 0.5, **style, transform=column[0].get_xaxis_transform())
    column[-1].set_xlabel("epoch")
    column[-1].xaxis.get_major_locator().set_params(integer=True)
    if len(table) == 1:
        column[-1].set_xlim(table["epoch"].iloc[0] - 1, table["epoch"].iloc[0] + 1)
    figure.text(0.98, 0.01, sections.RESEARCH_USE, fontsize="x-small", color="grey", ha="right")
    return figure


def _draw_curve(axes: Any, table: pd.DataFrame, curve: Curve) -> None:
    """Draw the known values of a curve; a line without any has no entry in the legend."""
    lines: dict[str, dict[str, Any]] = {
        f"{phase}_{curve.name}": {"color": _PHASE_COLOURS[phase], "marker": ".", "label": name}
        for phase, name in PHASES.items()
    }
    for part, style in zip(curve.parts, _STYLES, strict=False):
        label = f"validation {sections.MODALITY_NAMES.get(part, part.upper())}"
        look = {"color": _PHASE_COLOURS["val"], "linestyle": style, "linewidth": 1, "label": label}
        lines[f"val_{curve.name}_{part}"] = look
    for column, look in lines.items():
        values = table.reindex(columns=["epoch", column]).dropna()
        if len(values) == 1:
            look["marker"] = "."  # a line of one epoch would not be seen
        if len(values):
            axes.plot(*values.to_numpy().T, **look)
    if curve.limits is not None:
        axes.set_ylim(curve.limits)
    axes.set_ylabel(curve.title)
    axes.grid(visible=True, alpha=0.3)
    if axes.lines:
        # looking for the best position takes long with many points: scores rise, losses fall
        position = {"loc": "lower right"} if curve.limits else {"loc": "upper right", "ncols": 3}
        axes.legend(fontsize="small", **position)


@dataclass(kw_only=True, slots=True)
class LiveHistory:
    """Show `history.png` of a run in a notebook, updated after every epoch, with progress bars.

    It is given to a trainer as `track`, and called at the start of each phase of an epoch; call
    `show` for the last epoch. In a text console it shows the progress bars alone.

        Trainer(data=data, config=config, run_path=run_path).run(track=LiveHistory(run_path=run_path))
    """

    run_path: Path
    """Folder of the run."""
    _shown_ns: int = field(default=0, init=False)
    _display: Any = field(default=None, init=False)

    def __call__(self, items: Iterable[Item], *, what: str, total: int) -> Iterable[Item]:
        """Update the picture, and pass items through unchanged below a progress bar."""
        self.show()
        return tracked(items, what=what, total=total)

    def show(self) -> None:
        """Show the picture if it has changed."""
        path = self.run_path / "history.png"
        if not path.exists() or path.stat().st_mtime_ns == self._shown_ns:
            return
        # IPython is installed wherever a notebook runs, and needed nowhere else
        from IPython.display import Image, display

        self._shown_ns = path.stat().st_mtime_ns
        picture = Image(data=path.read_bytes())
        if self._display is None:
            self._display = display(picture, display_id=True)
        else:
            self._display.update(picture)
