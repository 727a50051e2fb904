"""Draw charts over many cases: scores, distributions of a cohort, predicted survival."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, MaxNLocator

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS, ClinicalTable
from brats_seg.errors import UsageError, counted
from brats_seg.evaluation.scores import Score, title_of
from brats_seg.figures.style import (
    FIRST_COLOUR,
    REGION_COLOURS,
    SECOND_COLOUR,
    fitting_size,
    light_figure,
)
from brats_seg.labels import REGIONS

_COLOUR_OF = dict(zip(REGIONS, REGION_COLOURS, strict=True))
_OTHER_COLOUR = "lightgrey"
"""Colour of the tissues and regions that only some protocols score."""
_SHARES = ("dice", "jaccard", "sensitivity", "specificity", "nsd")
"""Parts of the names of scores that lie between 0 and 1."""
_BARS = ("dice", "jaccard")
"""Scores in a bar chart."""
FEWEST_SCORED = 2
"""Cases with scores from which pages draw their distribution."""
_FEW_POINTS = 200
"""Points of a region that are drawn in full size."""
_TITLE_SIZE = 12.0
"""Size of a title, in points."""
_AXES_SHARE = 0.85
"""Width of the axes as a share of the figure."""
_FEWEST_BINS, _MOST_BINS = 4, 25
"""Bounds of the number of bins of a histogram."""
_MOST_TICKS = 8
"""Edges of bins that are numbered, about."""


def score_figure(scores: Sequence[Score], *, column: str = "dice") -> Figure:
    """Draw a score of every case as a point, and a box for each region: median and quartiles.

    Raises:
        UsageError: There are no scores, or they have no such column.
    """
    return _box_figure(_by_region(scores, column), column)


def dice_figure(dice: npt.ArrayLike) -> Figure:
    """Draw the Dice of every case as a point, and a box for each region, as `score_figure` does.

    Args:
        dice: Scores `(cases, 3)` in the order of `REGIONS`, of at least one case.
    """
    return _box_figure(dict(zip(REGIONS, np.asarray(dice, float).T, strict=True)), "dice")


def bar_figure(scores: Sequence[Score]) -> Figure:
    """Draw the mean Dice and Jaccard of each region as bars, in per cent.

    Raises:
        UsageError: There are no scores.
    """
    means = {column: _by_region(scores, column) for column in _BARS}
    regions = list(means[_BARS[0]])
    figure = light_figure(1.6 + 1.4 * len(regions), 4.8)
    axes = figure.subplots()
    for offset, column, colour in zip(
        (-0.2, 0.2), _BARS, (FIRST_COLOUR, SECOND_COLOUR), strict=True
    ):
        heights = [values.mean() for values in means[column].values()]
        places = np.arange(len(regions)) + offset
        bars = axes.bar(places, heights, width=0.38, color=colour, label=title_of(column))
        axes.bar_label(bars, [f"{100 * height:.1f} %" for height in heights], fontsize="small")
    axes.set_xticks(range(len(regions)), [region.upper() for region in regions])
    _add_title(axes, f"mean over {counted(_n_cases(scores), 'case')}")
    figure.legend(loc="outside upper center", ncols=len(_BARS))
    _finish(axes, "dice")
    axes.set_ylabel("score")  # of two kinds, which the legend names
    return figure


def cohort_figure(cases: Sequence[Case], table: ClinicalTable) -> Figure:
    """Draw `distributions_figure` for indexed cases and their clinical table.

    Raises:
        UsageError: Nothing is known of any case.
    """
    rows = [table.row(case.case_id) for case in cases]
    return distributions_figure(
        age_years=[_or_nan(case.age_years) for case in cases],
        survival_days=[_or_nan(row.survival_days if row else None) for row in rows],
        censored=[row is not None and row.survival_censored for row in rows],
        tumour_ml=[_or_nan(case.tumour_ml) for case in cases],
    )


def distributions_figure(
    *,
    age_years: npt.ArrayLike,
    survival_days: npt.ArrayLike,
    censored: npt.ArrayLike,
    tumour_ml: npt.ArrayLike,
) -> Figure:
    """Draw histograms of age, survival and tumour volume, with the number of known values.

    Args:
        age_years: Ages `(n,)`; NaN where unknown.
        survival_days: Days `(n,)` to death, or to the last contact; NaN where unknown.
        censored: Booleans `(n,)`: whether the patient was alive then. They are stacked separately.
        tumour_ml: Volumes `(n,)` of the whole tumour; NaN where unknown.

    Raises:
        UsageError: Nothing is known of any case.
    """
    ages, days, ml = (np.asarray(v, float) for v in (age_years, survival_days, tumour_ml))
    if not np.isfinite(np.concatenate([ages, days, ml])).any():
        msg = (
            f"of {counted(len(ages), 'case')} neither age, survival nor label map is known; expected "
            "survival_*.csv or name_mapping*.csv beside the scans, or label maps"
        )
        raise UsageError(msg)
    alive = np.asarray(censored, bool)
    figure = light_figure(12, 3.8)
    of_age, of_days, of_ml = figure.subplots(1, 3)
    _histogram(of_age, [_Part(ages, FIRST_COLOUR)])
    _label_axes(of_age, "age (years)", ages)
    died = _Part(days[~alive], FIRST_COLOUR, "died")
    _histogram(of_days, [died, _Part(days[alive], SECOND_COLOUR, "alive at last contact")])
    _label_axes(of_days, "survival (days)", days)
    if np.isfinite(days).any():
        of_days.legend(fontsize="small")
    _histogram(of_ml, [_Part(ml, REGION_COLOURS[0])])
    _label_axes(of_ml, "whole tumour (ml)", ml)
    of_age.set_ylabel("cases")
    return figure


def volume_figure(volumes_ml: Mapping[str, npt.ArrayLike]) -> Figure:
    """Draw a histogram of the volume of each region over cases.

    Args:
        volumes_ml: Volumes `(n,)` by region.
    """
    figure = light_figure(4 * len(volumes_ml), 3.4)
    panels = figure.subplots(1, len(volumes_ml), squeeze=False)[0]
    for axes, (region, ml) in zip(panels, volumes_ml.items(), strict=True):
        values = np.asarray(ml, float)
        _histogram(axes, [_Part(values, _COLOUR_OF.get(region, _OTHER_COLOUR))])
        _label_axes(axes, f"{region.upper()} (ml)", values)
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
    alive = np.asarray(censored, bool)
    figure = light_figure(5.6, 5.6)
    axes = figure.subplots()
    marks = (
        (~alive, "o", FIRST_COLOUR, "died"),
        (alive, ">", SECOND_COLOUR, "alive at last contact"),
    )
    for chosen, mark, colour, words in marks:
        if not chosen.any():
            continue
        axes.scatter(
            reported[chosen],
            predicted[chosen],
            marker=mark,
            color=colour,
            edgecolors="black",
            linewidths=0.5,
            alpha=0.8,
            label=f"{words} ({np.count_nonzero(chosen)})",
        )
    finite = np.concatenate([reported, predicted])
    end = 1.05 * float(np.max(finite[np.isfinite(finite)], initial=365))
    axes.plot([0, end], [0, end], color="black", linewidth=1, label="perfect")
    for days in SURVIVAL_CLASS_DAYS:
        axes.axvline(days, color="grey", linewidth=0.7, linestyle=":")
        axes.axhline(days, color="grey", linewidth=0.7, linestyle=":")
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal")
    _add_title(axes, title)
    axes.set(xlabel="reported survival (days)", ylabel="predicted survival (days)")
    axes.legend(fontsize="small")
    return figure


def _by_region(scores: Sequence[Score], column: str) -> dict[str, npt.NDArray[np.float64]]:
    if not scores:
        msg = "there are no scores to draw; expected a row for each case and region"
        raise UsageError(msg)
    if column not in scores[0].columns:
        msg = f"scores have no column {column!r}; there are {', '.join(scores[0].columns)}"
        raise UsageError(msg)
    regions = dict.fromkeys(score.region for score in scores)
    return {
        region: np.array([s.value(column) for s in scores if s.region == region])
        for region in regions
    }


def _apart(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return sideways offsets that separate equal values; the same at every call."""
    return np.random.default_rng(0).uniform(-0.15, 0.15, len(values))


def _box_figure(by_region: Mapping[str, npt.NDArray[np.float64]], column: str) -> Figure:
    figure = light_figure(1.6 + 1.4 * len(by_region), 4.8)
    axes = figure.subplots()
    boxes = axes.boxplot(
        list(by_region.values()),
        tick_labels=[_label(region, values) for region, values in by_region.items()],
        widths=0.5,
        showfliers=False,  # every case is drawn
        patch_artist=True,
        medianprops={"color": "black"},
    )
    for place, (region, values) in enumerate(by_region.items(), start=1):
        boxes["boxes"][place - 1].set_facecolor(_COLOUR_OF.get(region, _OTHER_COLOUR))
        size = _point_size(len(values))
        x = place + _apart(values)
        axes.plot(x, values, "o", color="black", mec="white", mew=size / 8, ms=size)
    n_cases = max(map(len, by_region.values()))
    _add_title(axes, f"{title_of(column)}, {counted(n_cases, 'case')}")
    _finish(axes, column)
    return figure


def _point_size(n_points: int) -> float:
    """Return the size in points at which thousands of points do not hide the box."""
    return min(4.0, 4 * math.sqrt(_FEW_POINTS / max(n_points, 1)))


def _label(region: str, values: npt.NDArray[np.float64]) -> str:
    return f"{region.upper()}\nmedian {np.median(values):.3g}\nmean {values.mean():.3g}"


def _n_cases(scores: Sequence[Score]) -> int:
    return len({score.case_id for score in scores})


def _add_title(axes: Any, words: str) -> None:
    """Write a title above a chart, smaller if it is wider than that."""
    width_inches = _AXES_SHARE * axes.figure.get_figwidth()
    axes.set_title(words, fontsize=fitting_size(words, width_inches, _TITLE_SIZE))


def _finish(axes: Any, column: str) -> None:
    axes.set_ylabel(title_of(column))
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if any(word in column for word in _SHARES):
        axes.set_ylim(-0.02, 1.05)
    else:
        axes.set_ylim(bottom=0)


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


class _Part(NamedTuple):
    """Values of a histogram that have one colour."""

    values: npt.NDArray[np.float64]
    """Values (n,); NaN where unknown."""
    colour: str
    words: str = ""
    """Entry in the legend."""


def _histogram(axes: Any, parts: Sequence[_Part]) -> None:
    """Draw the known values of parts, stacked; a part without any is left out."""
    known = [part._replace(values=part.values[np.isfinite(part.values)]) for part in parts]
    known = [part for part in known if len(part.values)]
    if not known:
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color="grey")
        return
    edges = _bin_edges(np.concatenate([part.values for part in known]))
    axes.hist(
        [part.values for part in known],
        bins=edges,
        stacked=True,
        color=[part.colour for part in known],
        label=[part.words or None for part in known],
        edgecolor="white",
        linewidth=0.5,
    )
    axes.xaxis.set_major_locator(FixedLocator(edges.tolist(), nbins=_MOST_TICKS))
    axes.yaxis.get_major_locator().set_params(integer=True)


def _bin_edges(values: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return round numbers as edges of about two bins for the cube root of the cases (Rice rule)."""
    low, high = float(values.min()), float(values.max())
    if low == high:
        return np.array([low - 0.5, low + 0.5])
    n_bins = int(np.clip(np.ceil(2 * np.cbrt(len(values))), _FEWEST_BINS, _MOST_BINS))
    locator = MaxNLocator(n_bins, steps=[1, 2, 2.5, 5, 10], min_n_ticks=1)
    return np.asarray(locator.tick_values(low, high))


def _label_axes(axes: Any, words: str, values: npt.NDArray[np.float64]) -> None:
    known = values[np.isfinite(values)]
    median = f", median {np.median(known):.3g}" if len(known) else ""
    axes.set_xlabel(words)
    axes.set_title(f"known for {len(known)} of {len(values)} cases{median}", fontsize="medium")
