"""What can be said of predicted survival, and what cannot: the figures, and whether they are chance."""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from brats_seg.survival.cross_validation import SELECTED, Predictions, Study
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.models import BASELINE
from brats_seg.survival.outcomes import Outcomes
from brats_seg.survival.scores import (
    CONFIDENCE,
    Estimate,
    chance_of_gain,
    chance_of_ranks,
    estimates,
    mean_absolute_error,
)

SIGNIFICANT = 1 - CONFIDENCE
"""Share of chance below which a result is called one."""
FEWEST_DEATHS = 20
"""Below it nothing is called a result: the interval itself is chance."""


@dataclass(frozen=True, kw_only=True, slots=True)
class FamilyFigures:
    """How well one family did on held-out deaths."""

    name: str
    estimates: tuple[Estimate, ...]
    n_contradicted: int
    """Censored cases that it predicted to die before a day on which they lived."""

    def of(self, figure: str) -> Estimate:
        """Return one of the figures."""
        return next(estimate for estimate in self.estimates if estimate.name == figure)


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the selected models predict survival at all, and better than age alone."""

    n_died: int
    spearman: Estimate
    p_ranks: float
    """Share of shuffled predictions that agree as well with the order of deaths."""
    gain_days: float
    """By how much the mean absolute error is smaller than that of age alone."""
    p_gain: float
    """Share of chance that gains as much."""

    @property
    def is_significant(self) -> bool:
        """Whether the predictions are more than chance."""
        enough = self.n_died >= FEWEST_DEATHS
        return enough and self.p_ranks < SIGNIFICANT and self.spearman.low > 0

    @property
    def beats_age(self) -> bool:
        """Whether they are better than age alone."""
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
            f"{self.n_died} deaths, p {self.p_ranks:.2g}"
        )
        if not self.is_significant:
            few = f" Fewer than {FEWEST_DEATHS} deaths prove nothing, whatever the figures say."
            return (
                f"NOT SIGNIFICANT: {found}. These predictions cannot be told from chance: none of "
                "the figures above shows that survival was learnt."
                f"{few if self.n_died < FEWEST_DEATHS else ''}"
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
    """Score every family on held-out deaths; a censored case is only ever counted."""
    outcomes, patients = study.outcomes, np.array(study.table.patient_ids)
    died, lived = outcomes.died & predictions.held_out, outcomes.lived & predictions.held_out
    return tuple(
        FamilyFigures(
            name=name,
            estimates=estimates(outcomes.days[died], days[died], patients[died].tolist(), rng),
            n_contradicted=int((days[lived] < outcomes.days[lived]).sum()),
        )
        for name, days in zip(predictions.names, predictions.days, strict=True)
    )


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


def remarks_on(study: Study) -> tuple[str, ...]:
    """Say what the figures rest on: censored cases, unknown ages, networks that knew the cases."""
    return tuple(_remarks(study))


def _remarks(study: Study) -> Iterator[str]:
    table, outcomes = study.table, study.outcomes
    n_cases, known = len(table.case_ids), outcomes.known
    yield _census(outcomes)
    unknown_ages = int(np.isnan(outcomes.ages[known]).sum())
    if unknown_ages:
        yield f"age unknown in {unknown_ages} of {known.sum()} cases with an outcome"
    if study.dropped:
        named = ", ".join(study.dropped[:5]) + (", ..." if len(study.dropped) > 5 else "")
        yield f"{len(study.dropped)} features empty or equal in all cases, left out: {named}"
    for what, answers in (
        ("the latent vector", [_least(seen) for seen in table.latent_seen if seen]),
        ("the label map", [seen for seen in table.labels_seen if seen]),
    ):
        for answer, words in _NOT_HELD_OUT.items():
            n_such = answers.count(answer)
            if n_such:
                yield f"NOT OUT-OF-FOLD: {what} of {n_such} of {n_cases} cases is of {words}"


_NOT_HELD_OUT = {
    Leakage.YES: "networks that learnt on their patients, so the figures may be too good",
    Leakage.UNKNOWN: "networks that do not say whom they learnt on",
}


def _least(answers: tuple[Leakage, ...]) -> Leakage:
    return min(answers, key=list(Leakage).index)


def _census(outcomes: Outcomes) -> str:
    n_died, n_lived = int(outcomes.died.sum()), int(outcomes.lived.sum())
    return (
        f"{len(outcomes.days)} cases: {n_died} deaths, which are learnt from; {n_lived} censored "
        "(alive when last heard of), predicted but never learnt from or scored; "
        f"{len(outcomes.days) - n_died - n_lived} of unknown outcome, predicted only"
    )
