"""The risk-coverage curve tells whether a quality sorts cases."""

from pathlib import Path

import numpy as np
import pytest

from brats_seg.errors import UsageError
from brats_seg.evaluation.risk_coverage import read_qualities, risk_coverage, risk_of_folder
from brats_seg.evaluation.scores import Score
from brats_seg.figures.charts import risk_figure
from brats_seg.tables import write_table

DICE = np.array([0.9, 0.5, 0.7, 0.1])


def score(case_id: str, region: str, dice: float) -> Score:
    rest = dict.fromkeys(
        ("jaccard", "hd95", "sensitivity", "specificity", "reference_ml", "prediction_ml"), 0.0
    )
    return Score(case_id=case_id, region=region, dice=dice, **rest)


def test_a_perfect_order_has_the_smallest_area() -> None:
    curve = risk_coverage(DICE, DICE, "itself")

    np.testing.assert_allclose(curve.risk, [0.1, 0.2, 0.3, 0.45])
    np.testing.assert_allclose(curve.coverage, [0.25, 0.5, 0.75, 1])
    assert curve.area == curve.best_area == pytest.approx(0.2625)
    assert curve.random_area == pytest.approx(0.45)
    assert curve.correlation == pytest.approx(1)
    # one of 24 orders
    assert curve.p_value == pytest.approx(1 / 24, abs=0.01)


def test_a_reversed_order_has_the_largest_area() -> None:
    curve = risk_coverage(DICE, -DICE, "the opposite")

    np.testing.assert_allclose(curve.risk, [0.9, 0.7, 1.7 / 3, 0.45])
    assert curve.p_value == pytest.approx(1)


def test_a_quality_that_is_the_same_for_all_says_nothing() -> None:
    curve = risk_coverage(DICE, np.zeros(4), "nothing")

    np.testing.assert_allclose(curve.risk, 0.45)
    assert np.isnan(curve.correlation)
    assert curve.p_value == 1


def test_among_equals_every_order_is_as_likely() -> None:
    """The mean over both orders of the two cases with one warning each."""
    curve = risk_coverage(DICE, np.array([0, -1, -1, -2]), "number of warnings")

    np.testing.assert_allclose(curve.risk, [0.1, (0.1 + 0.4) / 2, 0.3, 0.45])


def test_the_predicted_dice_is_taken_where_it_is_told(tmp_path: Path) -> None:
    columns = ("case_id", "wt_ml", "warnings", "wt_predicted_dice", "tc_predicted_dice")
    rows = [("a", 1, "x | y", 0.9, 0.7), ("b", 1, "", 0.5, ""), ("c", 0, "", "", "")]
    write_table(tmp_path / "volumes.csv", columns, rows)

    source, qualities = read_qualities(tmp_path)

    assert source == "predicted Dice"
    assert qualities == {"a": pytest.approx(0.8), "b": 0.5, "c": 0.0}


def test_warnings_are_counted_where_no_dice_is_told(tmp_path: Path) -> None:
    rows = [("a", "no tumour was found"), ("b", ""), ("c", "one | two")]
    write_table(tmp_path / "volumes.csv", ("case_id", "warnings"), rows)
    scores = [score(case_id, "wt", 0.5) for case_id in "abc"]

    curve = risk_of_folder(scores, tmp_path)

    assert read_qualities(tmp_path) == ("number of warnings", {"a": -1, "b": 0, "c": -2})
    assert curve.source == "number of warnings"


def test_a_scored_case_that_was_not_predicted_is_named(tmp_path: Path) -> None:
    write_table(tmp_path / "volumes.csv", ("case_id", "warnings"), [("a", "")])

    with pytest.raises(UsageError, match="has no row for b; expected a row for each scored case"):
        risk_of_folder([score("a", "wt", 1.0), score("b", "wt", 1.0)], tmp_path)


def test_two_cases_are_too_few() -> None:
    with pytest.raises(UsageError, match="needs 3 cases or more; found 2"):
        risk_coverage(DICE[:2], DICE[:2], "itself")


def test_the_figure_names_the_areas() -> None:
    figure = risk_figure(risk_coverage(DICE, DICE, "predicted Dice"))

    (axes,) = figure.axes
    texts = [text.get_text() for text in axes.get_legend().get_texts()]
    assert [text.rpartition(":")[0] for text in texts] == [
        "sorted by predicted Dice",
        "best order, by the true Dice",
        "random order",
    ]
    assert texts[2].endswith("area 0.450")
    np.testing.assert_allclose(axes.lines[0].get_xdata(), [25, 50, 75, 100])
