"""Study survival from a table of features, and write the results to a folder.

predictions.csv   predictions for every case: days by family, hazard ratio of the Cox model
summary.json      figures with intervals, verdict, remarks
survival.png      predicted over reported days
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
import pandas as pd
from pydantic_core import to_jsonable_python
from scipy.stats import rankdata

from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS
from brats_seg.cases.folds import read_folds
from brats_seg.errors import counted
from brats_seg.evaluation.significance import CONFIDENCE, bootstrap_interval, permutation_p_value
from brats_seg.figures.charts import survival_figure
from brats_seg.figures.sections import write_figure
from brats_seg.files import alone_at, check_writable, write_json
from brats_seg.progress import Track, untracked
from brats_seg.survival import study as models
from brats_seg.survival.study import BASELINE, COX, SELECTED, Plan, Predictions, Study
from brats_seg.survival.table import AGE, read_features, read_outcomes, seen_remarks
from brats_seg.tables import write_table

Days = npt.NDArray[np.float64]

SIGNIFICANT = 1 - CONFIDENCE
"""Level below which a p value is significant."""
FEWEST_SIGNIFICANT_DEATHS = 20
"""Number of deaths below which no result is significant, because intervals are unreliable."""
_N_CONCORDANCE_RESAMPLES = 1000
"""Fewer bootstrap resamples than elsewhere: lifelines computes them one by one, 1 ms each."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Estimate:
    """One figure with its bootstrap interval over patients."""

    value: float
    low: float
    """Lower end of the interval."""
    high: float


Figures: TypeAlias = dict[str, dict[str, Estimate]]
"""Scores on held-out patients, by family and by name: over deaths, and the concordance index where
lifelines is installed."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Test of the selected models against chance and against age alone."""

    n_died: int
    spearman: Estimate
    p_ranks: float
    """P value of the rank correlation, by permutation."""
    gain_days: float
    """Mean absolute error of age alone less that of the selected models."""
    p_gain: float
    """P value of the gain, by permutation."""

    @property
    def is_significant(self) -> bool:
        """Whether the predictions are more than chance."""
        enough = self.n_died >= FEWEST_SIGNIFICANT_DEATHS
        return enough and self.p_ranks < SIGNIFICANT and self.spearman.low > 0

    @property
    def beats_age(self) -> bool:
        """Whether the predictions are better than those of age alone."""
        return self.is_significant and self.p_gain < SIGNIFICANT

    @property
    def heading(self) -> str:
        """The verdict in a few words."""
        if not self.is_significant:
            return "NOT SIGNIFICANT"
        return f"more than chance, {'' if self.beats_age else 'NOT '}better than age alone"

    def __str__(self) -> str:
        rank, gain = self.spearman, abs(self.gain_days)
        text = (
            f"{self.heading}: rank correlation {rank.value:.2f} [{rank.low:.2f}, {rank.high:.2f}] on "
            f"{counted(self.n_died, 'death')}, p {self.p_ranks:.2g}"
        )
        if self.is_significant:
            change = "smaller" if self.gain_days > 0 else "larger"
            return f"{text}; mean error {gain:.0f} days {change} than by age alone, p {self.p_gain:.2g}"
        few = f" Fewer than {FEWEST_SIGNIFICANT_DEATHS} deaths prove nothing."
        text += ". These predictions may be due to chance."
        return text + few if self.n_died < FEWEST_SIGNIFICANT_DEATHS else text


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SurvivalStudy:
    """A finished study of survival: predictions for every case, and their scores as a whole."""

    study: Study
    predictions: Predictions
    figures: Figures
    verdict: Verdict
    remarks: tuple[str, ...]


def study_survival(
    features: Path,
    clinical: Sequence[Path],
    output: Path,
    *,
    folds: Path | None = None,
    n_repeats: int = 3,
    track: Track = untracked,
) -> SurvivalStudy:
    """Predict survival by nested cross-validation, test against chance, and write the results.

    No case is predicted by a model that was trained on it or on its patient. Where lifelines is
    installed, a Cox model learns from censored cases as well.

    Args:
        features: Table that `features_of_folder` wrote.
        clinical: Table of survival, of any BraTS release. If the features have ids of another year,
            tables `name_mapping.csv` follow it; those in its folder are found.
        output: Folder to write to.
        folds: Fold table of the project; without it, five new folds.
        n_repeats: Number of cross-validations to average.
        track: Shows progress.

    Raises:
        UsageError: A table cannot be read or does not fit the others, or has too few deaths.
        FoldError: The fold table lacks a case, divides a patient, or leaves too few deaths to learn from.
        EnvironmentalError: The folder cannot be written to.

    Example:
        >>> paths = Path("features.csv"), [Path("survival_info.csv")], Path("survival")
        >>> study_survival(*paths).verdict.heading  # doctest: +SKIP
        'more than chance, better than age alone'
    """
    check_writable(output)
    cases = read_features(features)
    outcomes = read_outcomes(cases, clinical)
    study = Study.of(cases.assign(patient_id=outcomes["patient_id"]), outcomes)
    plan = Plan(n_repeats=n_repeats)
    if find_spec("lifelines") is not None:
        plan = replace(plan, families=(*plan.families, COX))
    predictions = models.cross_validate(study, plan, read_folds(folds) if folds else None, track)
    result = summarise(study, predictions, plan.seed)
    with alone_at(output, is_folder=True, wait=True):
        write_predictions(study, predictions, output / "predictions.csv")
        write_summary(result, plan, output / "summary.json")
        shown = outcomes.assign(predicted=predictions.days[SELECTED])[outcomes["known"]]
        title = f"Held-out cases: {result.verdict.heading}"
        figure = survival_figure(shown["days"], shown["predicted"], ~shown["died"], title=title)
        write_figure(figure, output / "survival.png")
    return result


def accuracy(reported: Days, predicted: Days) -> Days:
    """Return the share of cases in the right class of short, mid or long survivors."""
    short, long = SURVIVAL_CLASS_DAYS
    # mid survivors have both borders
    classes = ((days >= short).astype(int) + (days > long) for days in (reported, predicted))
    return np.equal(*classes).mean(axis=-1)


def spearman(reported: Days, predicted: Days) -> Days:
    """Return the rank correlation; 0 where one side is constant and has no order."""
    true, found = _ranks(reported), _ranks(predicted)
    scale = np.sqrt((true**2).sum(axis=-1) * (found**2).sum(axis=-1))
    return (true * found).sum(axis=-1) / np.where(scale == 0, 1, scale)


def _ranks(days: Days) -> Days:
    """Return the ranks (..., n), centred on 0."""
    return rankdata(days, axis=-1) - (days.shape[-1] + 1) / 2


def days_figures(reported: Days, predicted: Days) -> dict[str, Days]:
    """Return the figures (...) of reported and predicted days (..., n): those of the challenge first."""
    errors = np.abs(predicted - reported)
    return {
        "accuracy": accuracy(reported, predicted),
        "mse_days2": np.mean(errors**2, axis=-1),
        "median_se_days2": np.median(errors**2, axis=-1),
        "std_se_days2": np.std(errors**2, axis=-1),
        "spearman": spearman(reported, predicted),
        "mae_days": np.mean(errors, axis=-1),
    }


def concordance_figure(*values: Days) -> dict[str, Days]:
    """Return the concordance index (...) of days, deaths and predicted days (..., n)."""
    return {"concordance": np.vectorize(models.concordance, signature="(n),(n),(n)->()")(*values)}


def estimates(
    figures: Callable[..., dict[str, Days]],
    values: Sequence[Days],
    patients: npt.NDArray[np.object_],
    rng: np.random.Generator,
    **options: int,
) -> dict[str, Estimate]:
    """Return every figure of values `(n,)`, with intervals over patients by `bootstrap_interval`."""

    def compute(*values: Days) -> Days:
        return np.stack(list(figures(*values).values()))

    ends = bootstrap_interval(compute, values, rng, groups=patients.tolist(), **options)
    numbers = zip(figures(*values).items(), *ends, strict=True)
    return {
        name: Estimate(value=float(value), low=float(low), high=float(high))
        for (name, value), low, high in numbers
    }


def summarise(study: Study, predictions: Predictions, seed: int) -> SurvivalStudy:
    """Score every family on held-out cases, and test the selected models.

    Figures in days are over deaths only. With a Cox model, censored patients count as well in the
    concordance index, which every family then has, and which is the only figure of the Cox model.
    """
    rng = np.random.default_rng(seed)
    # a separate generator: the other figures are the same with and without lifelines
    cox_rng = rng.spawn(1)[0]
    scored = study.outcomes["known"].to_numpy()
    reported, died = (study.outcomes[name].to_numpy()[scored] for name in ("days", "died"))
    patients = study.table["patient_id"].to_numpy()[scored]
    times = {str(name): days.to_numpy() for name, days in predictions.days[scored].items()}
    if predictions.log_hazards is not None:
        times[COX.name] = -predictions.log_hazards[scored]
    figures: Figures = {name: {} for name in times}
    for name, days in times.items():
        if name != COX.name:
            values = reported[died], days[died]
            figures[name] |= estimates(days_figures, values, patients[died], rng)
        if COX.name in times:
            rows, n = (reported, died, days), _N_CONCORDANCE_RESAMPLES
            figures[name] |= estimates(concordance_figure, rows, patients, cox_rng, n_resamples=n)
    # several scans of a patient are one death
    of_scans = pd.DataFrame([reported, times[SELECTED], times[BASELINE.name]]).T[died]
    deaths, selected, baseline = of_scans.groupby(patients[died], sort=False).mean().to_numpy().T
    return SurvivalStudy(
        study=study,
        predictions=predictions,
        figures=figures,
        verdict=judge(deaths, selected, baseline, figures[SELECTED]["spearman"], rng),
        remarks=tuple(_remarks(study, with_cox=COX.name in times)),
    )


def judge(
    reported: Days, selected: Days, baseline: Days, rank: Estimate, rng: np.random.Generator
) -> Verdict:
    """Compare the selected models with chance and with age alone, on deaths (n,), one for each patient."""
    ranks, chosen = _ranks(reported), _ranks(selected)
    gains = np.abs(baseline - reported) - np.abs(selected - reported)
    p_ranks = permutation_p_value(lambda x: x @ ranks, chosen, rng, permutation_type="pairings")
    p_gain = permutation_p_value(lambda x: x.mean(axis=-1), gains, rng, permutation_type="samples")
    return Verdict(
        n_died=len(reported),
        spearman=rank,
        p_ranks=p_ranks,
        gain_days=float(gains.mean()),
        p_gain=p_gain,
    )


def write_predictions(study: Study, predictions: Predictions, path: Path) -> None:
    """Write a row for each case."""
    known = study.outcomes["known"]
    table = study.table[["case_id", "patient_id"]].assign(
        fold=pd.Series(predictions.folds).astype(object).where(known, None),
        reported_days=study.outcomes["days"].map("{:g}".format).where(known),
        censored=study.outcomes["died"].map({True: "no", False: "yes"}).where(known),
        **predictions.days.map("{:.1f}".format).add_suffix("_days"),
    )
    if predictions.log_hazards is not None:
        table["cox_risk"] = [f"{risk:.4g}" for risk in np.exp(predictions.log_hazards)]
    write_table(path, list(table.columns), table.astype(object).itertuples(index=False))


def write_summary(result: SurvivalStudy, plan: Plan, path: Path) -> None:
    """Write figures, verdict and settings as JSON."""
    outcomes, predictions, verdict = result.study.outcomes, result.predictions, result.verdict
    content = {
        "research_use_only": True,
        "version": version("brats_seg"),
        "n_cases": len(outcomes),
        "n_died": int(outcomes["died"].sum()),
        "n_censored": int((outcomes["known"] & ~outcomes["died"]).sum()),
        "n_repeats": plan.n_repeats,
        "seed": plan.seed,
        "times_selected": predictions.n_chosen,
        "verdict": {**asdict(verdict), "words": str(verdict)},
        "remarks": result.remarks,
        "figures": result.figures,
    }
    write_json(path, to_jsonable_python(content))


def _remarks(study: Study, *, with_cox: bool) -> Iterator[str]:
    """Describe the data behind the figures: censored cases, unknown ages, networks that saw them."""
    outcomes = study.outcomes
    died, known = outcomes["died"], outcomes["known"]
    n_died = study.table["patient_id"][died].nunique()
    yield (
        f"{counted(len(outcomes), 'case')}: {counted(n_died, 'death')} to learn from; {sum(known & ~died)} censored "
        f"(alive at last contact); {sum(~known)} of unknown outcome, predicted only"
    )
    if n_ageless := sum(outcomes[AGE][known].isna()):
        yield f"the age of {n_ageless} of {sum(known)} cases with an outcome is unknown, which makes age alone predict worse"
    if not with_cox:
        yield (
            "lifelines is not installed: no Cox model, which would learn from censored cases, and no "
            'concordance index. Add them with `pip install "brats_seg[survival]"`.'
        )
    for remark in seen_remarks(study.table):
        yield f"NOT HELD OUT: {remark}"
