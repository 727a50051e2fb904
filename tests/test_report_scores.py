"""Pictures of scores: every case is a point, every region a box."""

import pytest

from brats_seg.errors import UsageError
from brats_seg.evaluation.scores import Score
from brats_seg.report.charts import bar_figure, score_figure


def make_score(case_id: str, region: str, dice: float) -> Score:
    return Score(
        case_id=case_id,
        region=region,
        dice=dice,
        jaccard=dice / (2 - dice),
        hd95=12.0,
        sensitivity=dice,
        specificity=1.0,
        reference_ml=5.0,
        prediction_ml=6.0,
    )


def make_scores(n_cases: int = 4) -> list[Score]:
    return [
        make_score(f"case{k}", region, (k + 1) / 10)
        for k in range(n_cases)
        for region in ("wt", "tc", "et")
    ]


def test_every_case_is_drawn_at_its_score() -> None:
    (axes,) = score_figure(make_scores()).axes

    points = [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert points == [[0.1, 0.2, 0.3, 0.4]] * 3
    # by hand: median and mean of 0.1, 0.2, 0.3, 0.4
    assert next(t.get_text() for t in axes.get_xticklabels()) == "WT\nmedian 0.25\nmean 0.25"
    assert axes.get_title() == "Dice, 4 cases"


@pytest.mark.parametrize(
    ("column", "words"),
    [("hd95", "HD95 (mm)"), ("reference_ml", "reference volume (ml)"), ("jaccard", "Jaccard")],
)
def test_any_column_of_the_table_can_be_drawn(column: str, words: str) -> None:
    (axes,) = score_figure(make_scores(), column=column).axes

    assert axes.get_ylabel() == words


def test_bars_say_the_mean_in_per_cent() -> None:
    """By hand: Dice 0.1 to 0.4; Jaccard 1/19, 2/18, 3/17, 4/16."""
    (axes,) = bar_figure(make_scores()).axes

    words = [text.get_text() for text in axes.texts]
    assert words == ["25.0 %"] * 3 + ["14.8 %"] * 3


def test_one_case_can_be_drawn() -> None:
    score_figure(make_scores(1)).canvas.draw()


def test_a_column_that_is_not_there_is_named() -> None:
    with pytest.raises(UsageError, match="no column 'dyce'; there are dice, jaccard"):
        score_figure(make_scores(), column="dyce")


@pytest.mark.parametrize("draw", [score_figure, bar_figure])
def test_no_scores_are_an_error(draw) -> None:
    with pytest.raises(UsageError, match="no scores to draw"):
        draw([])
