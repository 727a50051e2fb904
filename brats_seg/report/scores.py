"""How well the regions were predicted, over all cases."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from brats_seg.drawing.look import FIRST_COLOUR, REGION_COLOURS, SECOND_COLOUR, light_figure
from brats_seg.errors import UsageError
from brats_seg.evaluation.scores import Score
from brats_seg.labels import REGIONS

_COLOUR_OF = dict(zip(REGIONS, REGION_COLOURS, strict=True))
_OTHER_COLOUR = "lightgrey"
"""Of the tissues and regions that only some protocols score."""
_SHARES = ("dice", "jaccard", "sensitivity", "specificity", "nsd")
"""Scores from 0 to 1, by the words in their names."""
_BARS = ("dice", "jaccard")
_WRITTEN = (
    ("dice", "Dice"),
    ("jaccard", "Jaccard"),
    ("hd95", "HD95 (mm)"),
    ("nsd", "NSD"),
    (" ml", " volume (ml)"),
)
"""Parts of the names of columns as people write them."""


def score_figure(scores: Sequence[Score], *, column: str = "dice") -> Figure:
    """Draw a score of every case as a point, and a box for each region: median and quartiles.

    Raises:
        UsageError: There are no scores, or they have no such column.
    """
    by_region = _by_region(scores, column)
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
        axes.plot(place + _apart(values), values, "o", color="black", mec="white", mew=0.5, ms=4)
    axes.set_title(f"{_name(column)}, {_n_cases(scores)} cases")
    _finish(axes, column)
    return figure


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
        bars = axes.bar(places, heights, width=0.38, color=colour, label=_name(column))
        axes.bar_label(bars, [f"{100 * height:.1f} %" for height in heights], fontsize="small")
    axes.set_xticks(range(len(regions)), [region.upper() for region in regions])
    axes.set_title(f"mean over {_n_cases(scores)} cases")
    figure.legend(loc="outside upper center", ncols=len(_BARS))
    _finish(axes, "dice")
    axes.set_ylabel("score")  # of two kinds, which the legend names
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
    """Return sideways offsets that part equal values: the same for the same values."""
    return np.random.default_rng(0).uniform(-0.15, 0.15, len(values))


def _label(region: str, values: npt.NDArray[np.float64]) -> str:
    return f"{region.upper()}\nmedian {np.median(values):.3g}\nmean {values.mean():.3g}"


def _n_cases(scores: Sequence[Score]) -> int:
    return len({score.case_id for score in scores})


def _name(column: str) -> str:
    words = column.replace("_", " ")
    for plain, written in _WRITTEN:
        words = words.replace(plain, written)
    return words


def _finish(axes: Any, column: str) -> None:
    axes.set_ylabel(_name(column))
    axes.grid(visible=True, axis="y", alpha=0.3)
    axes.set_axisbelow(True)
    if any(word in column for word in _SHARES):
        axes.set_ylim(-0.02, 1.05)
    else:
        axes.set_ylim(bottom=0)
