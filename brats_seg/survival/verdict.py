"""Score predicted survival of every family, and test it against chance and age alone."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from brats_seg.errors import counted
from brats_seg.evaluation.significance import CONFIDENCE
from brats_seg.survival.cross_validation import SELECTED, Predictions, Study
from brats_seg.survival.leakage import Leakage, least_leakage
from brats_seg.survival.models import BASELINE
from brats_seg.survival.outcomes import Outcomes
from brats_seg.survival.scores import (
    Estimate,
    chance_of_gain,
    chance_of_ranks,
    concordance_estimate,
    estimates,
    mean_absolute_error,
)

SIGNIFICANT = 1 - CONFIDENCE
"""Level below which a p value is significant."""
FEWEST_SIGNIFICANT_DEATHS = 20
"""Number of deaths below which no result is significant, because intervals are unreliable."""
COX = "cox"
"""Name of the Cox model among the families."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFigures:
    """Scores of one family on held-out patients."""

    name: str
    estimates: tuple[Estimate, ...]
    """Figures over deaths, and the concordance index where lifelines is installed."""
    n_contradicted: int | None
    """Censored cases with fewer days than they are known to have lived; None without days."""

    def of(self, figure: str) -> Estimate:
        """Return one of the figures."""
        return next(estimate for estimate in self.estimates if estimate.name == figure)


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
        rank = self.spearman
        found = (
            f"rank correlation {rank.value:.2f} [{rank.low:.2f}, {rank.high:.2f}] on "
            f"{counted(self.n_died, 'death')}, p {self.p_ranks:.2g}"
        )
        if not self.is_significant:
            few = f" Fewer than {FEWEST_SIGNIFICANT_DEATHS} deaths prove nothing, whatever the figures say."
            return (
                f"NOT SIGNIFICANT: {found}. These predictions may be due to chance: none of the "
                "figures above shows that survival can be predicted."
                f"{few if self.n_died < FEWEST_SIGNIFICANT_DEATHS else ''}"
            )
        gain = f"mean error {abs(self.gain_days):.0f} days"
        side = "smaller" if self.gain_days > 0 else "larger"
        if not self.beats_age:
            return (
                f"More than chance: {found}. But NOT better than age alone: {gain} {side} than "
                f"that of the age, p {self.p_gain:.2g}."
            )
        return (
            f"More than chance: {found}. Better than age alone: {gain} {side}, p {self.p_gain:.2g}."
        )


def figures_of(
    study: Study, predictions: Predictions, rng: np.random.Generator
) -> tuple[FamilyFigures, ...]:
    """Score every family on held-out cases.

    Figures in days are over deaths only. With a Cox model, censored patients count as well in the
    concordance index, which every family then has, and which is the only figure of the Cox model.
    """
    outcomes, patients = study.outcomes, np.array(study.table.patient_ids)
    died, lived = outcomes.died & predictions.held_out, outcomes.lived & predictions.held_out
    # a generator of its own: the other figures are the same with and without lifelines
    concordance_rng = rng.spawn(1)[0]
    figures = [
        FamilyFigures(
            name=name,
            estimates=(
                *estimates(outcomes.days[died], days[died], patients[died].tolist(), rng),
                *_concordance(study, predictions, days, concordance_rng),
            ),
            n_contradicted=int((days[lived] < outcomes.days[lived]).sum()),
        )
        for name, days in zip(predictions.names, predictions.days, strict=True)
    ]
    if predictions.log_hazards is not None:
        found = _concordance(study, predictions, -predictions.log_hazards, concordance_rng)
        figures.append(FamilyFigures(name=COX, estimates=tuple(found), n_contradicted=None))
    return tuple(figures)


def judge(
    study: Study,
    predictions: Predictions,
    figures: tuple[FamilyFigures, ...],
    rng: np.random.Generator,
) -> Verdict:
    """Compare the selected models with chance and with age alone."""
    died = study.outcomes.died & predictions.held_out
    reported = study.outcomes.days[died]
    selected, baseline = (predictions.of(name)[died] for name in (SELECTED, BASELINE.name))
    spearman = next(one for one in figures if one.name == SELECTED).of("spearman")
    gain = mean_absolute_error(reported, baseline) - mean_absolute_error(reported, selected)
    return Verdict(
        n_died=int(died.sum()),
        spearman=spearman,
        p_ranks=chance_of_ranks(reported, selected, rng),
        gain_days=float(gain),
        p_gain=chance_of_gain(reported, selected, baseline, rng),
    )


def remarks_on(study: Study, *, with_cox: bool) -> tuple[str, ...]:
    """Describe the data behind the figures: censored cases, unknown ages, leakage of networks."""
    return tuple(_remarks(study, with_cox=with_cox))


def _concordance(
    study: Study,
    predictions: Predictions,
    times: npt.NDArray[np.float64],
    rng: np.random.Generator,
) -> Iterator[Estimate]:
    """Yield the concordance index of predicted times (cases,), if lifelines is installed."""
    if predictions.log_hazards is None:
        return
    outcomes, used = study.outcomes, study.outcomes.known & predictions.held_out
    patients = np.array(study.table.patient_ids)[used].tolist()
    yield concordance_estimate(outcomes.days[used], outcomes.died[used], times[used], patients, rng)


def _remarks(study: Study, *, with_cox: bool) -> Iterator[str]:
    table, outcomes = study.table, study.outcomes
    n_cases, known = len(table.case_ids), outcomes.known
    yield _census(outcomes, with_cox=with_cox)
    if not with_cox:
        yield (
            "lifelines is not installed: no Cox model, which would learn from censored cases, and no "
            'concordance index. Add them with `pip install "brats_seg[survival]"`.'
        )
    unknown_ages = int(np.isnan(outcomes.ages[known]).sum())
    if unknown_ages:
        yield f"age unknown in {unknown_ages} of {known.sum()} cases with an outcome"
    if study.dropped:
        named = ", ".join(study.dropped[:5]) + (", ..." if len(study.dropped) > 5 else "")
        yield f"{counted(len(study.dropped), 'feature')} empty or equal in all cases, left out: {named}"
    for what, answers in (
        ("the latent vector", [least_leakage(one)[1] for one in table.latent_leakage if one]),
        ("the label map", [one for one in table.labels_leakage if one]),
    ):
        for answer, words in _NOT_HELD_OUT.items():
            n_such = answers.count(answer)
            if n_such:
                yield f"NOT OUT-OF-FOLD: {what} of {n_such} of {n_cases} cases is of {words}"


_NOT_HELD_OUT = {
    Leakage.YES: "networks that were trained on their patients, so the figures may be too good",
    Leakage.UNKNOWN: "networks without a record of the patients they were trained on",
}


def _census(outcomes: Outcomes, *, with_cox: bool) -> str:
    n_died, n_lived = int(outcomes.died.sum()), int(outcomes.lived.sum())
    use = (
        "learnt from by the Cox model and counted in the concordance index only"
        if with_cox
        else "predicted but never learnt from or scored"
    )
    return (
        f"{counted(len(outcomes.days), 'case')}: {counted(n_died, 'death')} to learn from; {n_lived} censored "
        f"(alive at last contact), {use}; "
        f"{len(outcomes.days) - n_died - n_lived} of unknown outcome, predicted only"
    )
