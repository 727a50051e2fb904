"""Build tables of features, outcomes and tumours for tests."""

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt
from sklearn.linear_model import Ridge

from brats_seg.labels import BRATS2017, LabelMap
from brats_seg.survival.cross_validation import CrossValidationPlan, Study
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.models import Family
from brats_seg.survival.outcomes import Outcomes
from brats_seg.survival.radiomics import Tumour
from brats_seg.survival.table import FeatureTable

RIDGE = Family(name="ridge", regressor=Ridge(alpha=10.0), grid={}, kept=(3,))
"""Quick to fit."""


def make_feature_table(
    values: npt.ArrayLike,
    columns: Sequence[str] | None = None,
    *,
    case_ids: Sequence[str] | None = None,
    patient_ids: Sequence[str] | None = None,
    latent_leakage: Sequence[tuple[Leakage, ...]] | None = None,
    labels_leakage: Sequence[Leakage | None] | None = None,
    resections: Sequence[str] | None = None,
) -> FeatureTable:
    """Return a table of values (cases, features), called `f0`, `f1`, ... by default."""
    values = np.asarray(values, dtype=np.float64)
    n_cases, n_columns = values.shape
    ids = tuple(case_ids or (f"case{number:03d}" for number in range(n_cases)))
    labels = tuple(labels_leakage or (None,) * n_cases)
    return FeatureTable(
        case_ids=ids,
        patient_ids=tuple(patient_ids or ids),
        labels_from=tuple("prediction" if seen else "reference" for seen in labels),
        labels_leakage=labels,
        latent_leakage=tuple(latent_leakage or ((),) * n_cases),
        resections=tuple(resections or ("",) * n_cases),
        columns=tuple(columns or (f"f{number}" for number in range(n_columns))),
        values=values,
    )


def make_outcomes(
    days: npt.ArrayLike,
    censored: Sequence[bool] | None = None,
    ages: npt.ArrayLike | None = None,
    resections: Sequence[str] | None = None,
) -> Outcomes:
    """Return outcomes of patients who by default all died, aged 60."""
    days = np.asarray(days, dtype=np.float64)
    return Outcomes(
        days=days,
        censored=np.array(censored or [False] * len(days)),
        ages=np.full(len(days), 60.0) if ages is None else np.asarray(ages, dtype=np.float64),
        resections=tuple(resections or ("",) * len(days)),
    )


def make_study(seed: int = 0, *, n_cases: int = 40, effect: float = 0.0) -> Study:
    """Return a study of ten features, the first of which explains survival to a given degree."""
    rng = np.random.default_rng([seed, 2])
    values = rng.normal(size=(n_cases, 10))
    noise = rng.normal(size=n_cases)
    days = np.exp(6 + 0.7 * (effect * values[:, 0] + (1 - effect**2) ** 0.5 * noise))
    outcomes = make_outcomes(days, ages=rng.normal(60, 10, n_cases))
    return Study.of(make_feature_table(values), outcomes)


def make_plan(*, n_folds: int = 4, n_repeats: int = 1, seed: int = 0) -> CrossValidationPlan:
    """Return a plan with one quick family."""
    return CrossValidationPlan(n_folds=n_folds, n_repeats=n_repeats, seed=seed, families=(RIDGE,))


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
