"""Build tables of features, outcomes and tumours for tests."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
import pandas as pd
from sklearn.linear_model import Ridge

from brats_seg.labels import BRATS2017, LabelMap
from brats_seg.survival.models import days_family
from brats_seg.survival.radiomics import Tumour
from brats_seg.survival.study import Plan, Study
from brats_seg.survival.table import AGE, LABELS_SEEN, LATENT_SEEN, RESECTION

RIDGE = days_family("ridge", Ridge(alpha=10.0), (3,))
"""Quick to fit."""


def make_feature_table(
    values: npt.ArrayLike,
    columns: Sequence[str] | None = None,
    *,
    case_ids: Sequence[str] | None = None,
    patient_ids: Sequence[str] | None = None,
    latent_seen: Sequence[str] | None = None,
    labels_seen: Sequence[str] | None = None,
    resections: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return a table of values (cases, features), called `f0`, `f1`, ... by default."""
    values = np.asarray(values, dtype=np.float64)
    n_cases, n_columns = values.shape
    ids = list(case_ids or (f"case{number:03d}" for number in range(n_cases)))
    texts = {
        "case_id": ids,
        "patient_id": list(patient_ids or ids),
        "labels_from": ["prediction" if seen else "reference" for seen in labels_seen or ids],
        LABELS_SEEN: list(labels_seen or [""] * n_cases),
        RESECTION: list(resections or [""] * n_cases),
    }
    if latent_seen:
        texts[LATENT_SEEN] = list(latent_seen)
    names = columns or [f"f{number}" for number in range(n_columns)]
    return pd.DataFrame(texts, dtype=object).join(pd.DataFrame(values, columns=list(names)))


def make_outcomes(
    days: npt.ArrayLike,
    censored: Sequence[bool] | None = None,
    ages: npt.ArrayLike | None = None,
    resections: Sequence[str] | None = None,
) -> pd.DataFrame:
    """Return outcomes of patients who by default all died, aged 60."""
    days = np.asarray(days, dtype=np.float64)
    known, lived = np.isfinite(days), np.array(censored or [False] * len(days))
    return pd.DataFrame(
        {
            "days": days,
            "known": known,
            "died": known & ~lived,
            "lived": known & lived,
            AGE: np.full(len(days), 60.0) if ages is None else np.asarray(ages, dtype=np.float64),
            RESECTION: list(resections or [""] * len(days)),
        }
    )


def make_study(seed: int = 0, *, n_cases: int = 40, effect: float = 0.0) -> Study:
    """Return a study of ten features, the first of which explains survival to a given degree."""
    rng = np.random.default_rng([seed, 2])
    values = rng.normal(size=(n_cases, 10))
    noise = rng.normal(size=n_cases)
    days = np.exp(6 + 0.7 * (effect * values[:, 0] + (1 - effect**2) ** 0.5 * noise))
    outcomes = make_outcomes(days, ages=rng.normal(60, 10, n_cases))
    return Study.of(make_feature_table(values), outcomes)


def make_plan(*, n_folds: int = 4, n_repeats: int = 1, seed: int = 0, with_cox=False) -> Plan:
    """Return a plan with one quick family."""
    return Plan(
        n_folds=n_folds, n_repeats=n_repeats, seed=seed, families=(RIDGE,), with_cox=with_cox
    )


def make_tumour(
    label_map: LabelMap,
    image: npt.NDArray[np.float32] | None = None,
    spacing_mm: tuple[float, float, float] = (1.0, 1.0, 1.0),
) -> Tumour:
    """Return a tumour in the convention of BraTS 2017, in a brain of ones that fills everything."""
    ones = np.ones((4, *label_map.shape), dtype=np.float32)
    return Tumour(
        image=ones if image is None else image,
        label_map=label_map,
        convention=BRATS2017,
        spacing_mm=spacing_mm,
    )
