"""Build tables of features and outcomes for tests."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.linear_model import Ridge

from brats_seg.survival.study import COX, Plan, Study, days_family

RIDGE = days_family("ridge", Ridge(alpha=10.0), (3,))
"""Quick to fit."""


def make_feature_table(
    values: npt.ArrayLike,
    columns: Sequence[str] | None = None,
    *,
    case_ids: Sequence[str] | None = None,
    patient_ids: Sequence[str] | None = None,
    resections: Sequence[str] | None = None,
    **texts: Sequence[str],
) -> pd.DataFrame:
    """Return a table of values (cases, features), called `f0`, `f1`, ... by default."""
    values = np.asarray(values, dtype=np.float64)
    n_cases, n_columns = values.shape
    ids = list(case_ids or (f"case{number:03d}" for number in range(n_cases)))
    given = {
        "case_id": ids,
        "patient_id": list(patient_ids or ids),
        "labels_from": ["reference"] * n_cases,
        "labels_seen": [""] * n_cases,
        "resection": list(resections or [""] * n_cases),
        **texts,
    }
    names = list(columns or (f"f{number}" for number in range(n_columns)))
    return pd.DataFrame(given, dtype=object).join(pd.DataFrame(values, columns=names))


def make_outcomes(
    days: npt.ArrayLike,
    censored: Sequence[bool] | None = None,
    ages: npt.ArrayLike = 60.0,
    resections: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return outcomes of patients who by default all died, aged 60."""
    days = np.asarray(days, dtype=np.float64)
    known, lived = np.isfinite(days), np.array(censored or [False] * len(days))
    flags = {"known": known, "died": known & ~lived}
    frame = pd.DataFrame({"days": days, **flags, "age_years": np.asarray(ages, dtype=float)})
    return frame.assign(resection=list(resections or [""] * len(days)))


def make_study(seed: int = 0, *, n_cases: int = 40, effect: float = 0.0) -> Study:
    """Return a study of ten features, the first of which explains survival to a given degree."""
    rng = np.random.default_rng([seed, 2])
    values = rng.normal(size=(n_cases, 10))
    noise = rng.normal(size=n_cases)
    days = np.exp(6 + 0.7 * (effect * values[:, 0] + (1 - effect**2) ** 0.5 * noise))
    outcomes = make_outcomes(days, ages=rng.normal(60, 10, n_cases))
    return Study.of(make_feature_table(values), outcomes)


def make_plan(*, with_cox: bool = False, **settings: int) -> Plan:
    families = (RIDGE, COX) if with_cox else (RIDGE,)
    return Plan(**{"n_folds": 4, "n_repeats": 1, "seed": 0} | settings, families=families)
