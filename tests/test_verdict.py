"""Test the figures, verdict and remarks on predicted survival."""

import numpy as np
import pytest

from brats_seg.survival.cross_validation import Predictions, Study, cross_validate
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.scores import Estimate
from brats_seg.survival.verdict import Verdict, figures_of, judge, remarks_on
from tests.survival_builders import make_feature_table, make_outcomes, make_plan, make_study

NO, YES, UNKNOWN = Leakage.NO, Leakage.YES, Leakage.UNKNOWN


def verdict_on(study: Study) -> Verdict:
    predictions = cross_validate(study, make_plan())
    rng = np.random.default_rng(0)
    return judge(study, predictions, figures_of(study, predictions, rng), rng)


def make_verdict(
    *, n_died: int = 50, low: float = 0.2, p_ranks: float = 0.01, p_gain: float = 0.01
) -> Verdict:
    spearman = Estimate(name="spearman", value=0.4, low=low, high=0.6)
    return Verdict(n_died=n_died, spearman=spearman, p_ranks=p_ranks, gain_days=12.0, p_gain=p_gain)


def test_an_effect_is_believed():
    verdict = verdict_on(make_study(effect=0.95))

    assert verdict.is_significant
    assert verdict.beats_age
    assert "More than chance" in str(verdict)
    assert "Better than age alone" in str(verdict)


@pytest.mark.parametrize("seed", range(4))
def test_no_effect_is_not_believed(seed):
    """The negative control."""
    verdict = verdict_on(make_study(seed, effect=0.0))

    assert not verdict.is_significant
    assert str(verdict).startswith("NOT SIGNIFICANT: rank correlation")


@pytest.mark.parametrize(
    ("verdict", "significant", "beats_age", "words"),
    [
        (make_verdict(), True, True, "Better than age alone: mean error 12 days smaller"),
        (make_verdict(p_gain=0.2), True, False, "But NOT better than age alone"),
        (make_verdict(p_ranks=0.06), False, False, "NOT SIGNIFICANT"),
        (make_verdict(low=-0.01), False, False, "NOT SIGNIFICANT"),
        (make_verdict(n_died=19), False, False, "Fewer than 20 deaths prove nothing"),
        (make_verdict(low=-0.01), False, False, r"0.40 \[-0.01, 0.60\] on 50 deaths, p 0.01"),
    ],
)
def test_each_verdict_has_its_words(verdict, significant, beats_age, words):
    import re

    assert verdict.is_significant == significant
    assert verdict.beats_age == beats_age
    assert re.search(words, str(verdict))


def test_a_censored_case_counts_only_when_it_is_predicted_to_die_too_early():
    study = Study.of(
        make_feature_table(np.arange(5)[:, None]),
        make_outcomes([100, 200, 300, 500, 500], censored=[False, False, False, True, True]),
    )
    days = np.array([[100.0, 200, 300, 499, 501]])

    def figures(predicted):
        predictions = Predictions(names=("age",), days=predicted, folds=(0,) * 5, chosen=())
        return figures_of(study, predictions, np.random.default_rng(0))[0]

    assert figures(days).n_contradicted == 1
    assert figures(days).of("mae_days").value == 0
    wild = np.array([[100.0, 200, 300, 9e9, 9e9]])
    assert figures(wild).estimates == figures(days).estimates


def test_cases_that_no_fold_holds_are_not_scored():
    study = Study.of(make_feature_table(np.arange(3)[:, None]), make_outcomes([100, 200, 300]))
    days = np.array([[100.0, 200, 9999]])
    predictions = Predictions(names=("age",), days=days, folds=(0, 1, None), chosen=())

    found = figures_of(study, predictions, np.random.default_rng(0))[0]

    assert found.of("mae_days").value == 0


def test_the_remarks_describe_the_data():
    study = Study.of(
        make_feature_table(
            [[1.0, 7], [2, 7], [3, 7], [4, 7]],
            latent_leakage=[(YES, NO), (YES, YES), (UNKNOWN, YES), (YES, YES)],
            labels_leakage=[None, YES, UNKNOWN, NO],
        ),
        make_outcomes(
            [100, 200, 300, np.nan],
            censored=[False, True, False, False],
            ages=[50, np.nan, 60, np.nan],
        ),
    )

    remarks = "\n".join(remarks_on(study, with_cox=False))

    assert "4 cases: 2 deaths to learn from; 1 censored" in remarks
    assert "1 of unknown outcome" in remarks
    assert "age unknown in 1 of 3 cases with an outcome" in remarks
    assert "3 features empty or equal in all cases, left out: resection_gtr" in remarks
    assert (
        "NOT OUT-OF-FOLD: the latent vector of 2 of 4 cases is of networks that were trained"
        in remarks
    )
    assert "the latent vector of 1 of 4 cases is of networks without a record" in remarks
    assert "the label map of 1 of 4 cases is of networks that were trained" in remarks


def test_out_of_fold_networks_need_no_remark():
    study = Study.of(
        make_feature_table(
            [[1.0], [2]], latent_leakage=[(YES, NO), (NO, YES)], labels_leakage=[None, NO]
        ),
        make_outcomes([100, 200]),
    )

    assert "OUT-OF-FOLD" not in "\n".join(remarks_on(study, with_cox=False))


@pytest.mark.parametrize(
    ("verdict", "heading"),
    [
        (make_verdict(), "more than chance, better than age alone"),
        (make_verdict(p_gain=0.2), "more than chance, NOT better than age alone"),
        (make_verdict(p_ranks=0.06), "NOT SIGNIFICANT"),
    ],
)
def test_the_heading_of_the_picture_claims_no_more(verdict, heading):
    assert verdict.heading == heading
