"""Predicted survival against what was reported."""

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS
from brats_seg.drawing.look import FIRST_COLOUR, SECOND_COLOUR, light_figure


def survival_figure(
    reported_days: npt.ArrayLike,
    predicted_days: npt.ArrayLike,
    censored: npt.ArrayLike,
    *,
    title: str,
) -> Figure:
    """Draw predicted over reported days, a point for each case.

    A censored case, whose patient was alive when last heard of, is a triangle to the right: the
    truth lies somewhere beyond it. The diagonal is a perfect prediction; the thin lines are the
    borders of short, mid and long survivors, at 10 and 15 months.

    Args:
        reported_days: (n,) to death, or to the last news.
        predicted_days: (n,)
        censored: (n,) booleans.
        title: What was predicted by what.
    """
    reported, predicted = np.asarray(reported_days, float), np.asarray(predicted_days, float)
    alive = np.asarray(censored, bool)
    figure = light_figure(5.6, 5.6)
    axes = figure.subplots()
    marks = (
        (~alive, "o", FIRST_COLOUR, "died then"),
        (alive, ">", SECOND_COLOUR, "alive when last heard of"),
    )
    for chosen, mark, colour, words in marks:
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
    axes.set(xlim=(0, end), ylim=(0, end), aspect="equal", title=title)
    axes.set(xlabel="reported survival (days)", ylabel="predicted survival (days)")
    axes.legend(fontsize="small")
    return figure
