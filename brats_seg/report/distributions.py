"""How age, survival and the size of the tumour are distributed over cases."""

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib.figure import Figure

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import ClinicalTable
from brats_seg.drawing.look import FIRST_COLOUR, REGION_COLOURS, SECOND_COLOUR, light_figure
from brats_seg.errors import UsageError

_N_BINS = 20


def cohort_figure(cases: Sequence[Case], table: ClinicalTable) -> Figure:
    """Draw `distributions_figure` of an index and the clinical tables beside it.

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
    """Draw three histograms; each says of how many cases the value is known.

    Args:
        age_years: (n,) with NaN where unknown.
        survival_days: (n,) to death, or to the last news; NaN where unknown.
        censored: (n,) whether the patient was alive then: a part of the bar of its own.
        tumour_ml: (n,) volume of the whole tumour; NaN where unknown.

    Raises:
        UsageError: Nothing is known of any case.
    """
    ages, days, ml = (np.asarray(v, float) for v in (age_years, survival_days, tumour_ml))
    if not np.isfinite(np.concatenate([ages, days, ml])).any():
        msg = (
            f"of {len(ages)} cases neither age, survival nor label map is known; expected "
            "survival_*.csv or name_mapping*.csv beside the scans, or label maps"
        )
        raise UsageError(msg)
    alive = np.asarray(censored, bool)
    figure = light_figure(12, 3.8)
    of_age, of_days, of_ml = figure.subplots(1, 3)
    _histogram(of_age, [ages], [FIRST_COLOUR])
    _name(of_age, "age (years)", ages)
    _histogram(of_days, [days[~alive], days[alive]], [FIRST_COLOUR, SECOND_COLOUR])
    _name(of_days, "survival (days)", days)
    if np.isfinite(days).any():
        of_days.legend(["died then", "alive when last heard of"], fontsize="small")
    _histogram(of_ml, [ml], [REGION_COLOURS[0]])
    _name(of_ml, "whole tumour (ml)", ml)
    of_age.set_ylabel("cases")
    return figure


def _or_nan(value: float | None) -> float:
    return float("nan") if value is None else value


def _histogram(axes: Any, parts: list[npt.NDArray[np.float64]], colours: list[str]) -> None:
    known = [part[np.isfinite(part)] for part in parts]
    if not any(len(part) for part in known):
        axes.set(xticks=[], yticks=[])
        axes.text(0.5, 0.5, "not known", transform=axes.transAxes, ha="center", color="grey")
        return
    axes.hist(known, bins=_N_BINS, stacked=True, color=colours, edgecolor="white", linewidth=0.5)
    axes.yaxis.get_major_locator().set_params(integer=True)


def _name(axes: Any, words: str, values: npt.NDArray[np.float64]) -> None:
    known = values[np.isfinite(values)]
    median = f", median {np.median(known):.3g}" if len(known) else ""
    axes.set_xlabel(words)
    axes.set_title(f"known for {len(known)} of {len(values)} cases{median}", fontsize="medium")
