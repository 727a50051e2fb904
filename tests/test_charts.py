"""Test charts over many cases."""

from types import SimpleNamespace

import pandas as pd
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from brats_seg.errors import UsageError
from brats_seg.evaluation.scores import join_scores
from brats_seg.figures.charts import cohort_figure, score_figure, survival_figure
from brats_seg.labels import REGIONS
from tests.builders import make_case
from tests.test_scores import score_row


def make_scores() -> pd.DataFrame:
    return pd.DataFrame(
        score_row(f"case{k}", (k + 1) / 10, region) for k in range(4) for region in REGIONS
    )


def test_every_case_is_drawn_at_its_score() -> None:
    (axes,) = score_figure(make_scores()).axes
    points = [line.get_ydata().tolist() for line in axes.lines if line.get_marker() == "o"]
    assert points == [[0.1, 0.2, 0.3, 0.4]] * 3
    # by hand: median and mean of 0.1, 0.2, 0.3, 0.4
    assert next(t.get_text() for t in axes.get_xticklabels()) == "WT\nmedian 0.25\nmean 0.25"
    assert axes.get_title() == "Dice, 4 cases"
    assert score_figure(make_scores(), column="hd95").axes[0].get_ylabel() == "HD95 (mm)"


def test_unknown_scores_are_not_counted_and_infinite_ones_give_no_warning() -> None:
    scores = make_scores().assign(hd95=[float("inf")] * 6 + [2.0] * 6)
    scores.loc[scores.index[2], "dice"] = None
    scores.loc[scores["region"] == "tc", "dice"] = None
    (axes,) = score_figure(scores).axes
    words = [text.get_text() for text in axes.get_xticklabels()]
    assert words == ["WT\nmedian 0.25\nmean 0.25", "ET\nmedian 0.3\nmean 0.3"]
    (axes,) = score_figure(scores, column="hd95").axes
    assert axes.get_xticklabels()[0].get_text() == "WT\nmedian inf\nmean inf"
    with pytest.raises(UsageError, match="no case has a score 'dice'"):
        score_figure(scores.assign(dice=None))


def test_no_scores_and_unknown_ones_are_an_error() -> None:
    with pytest.raises(UsageError, match="no case has a score 'dice'"):
        score_figure(join_scores(()))
    with pytest.raises(UsageError, match="no column 'dyce'; there are dice, jaccard"):
        score_figure(make_scores(), column="dyce")


def cohort_of(*patients: tuple[int | None, int | None, bool, int | None]) -> Figure:
    cases, rows = [], []
    for age, days, alive, ml in patients:
        cases.append(make_case(str(len(cases)), age_years=age, tumour_ml=ml))
        rows.append(SimpleNamespace(survival_days=days, survival_censored=alive))
    return cohort_figure(cases, SimpleNamespace(row=lambda case_id: rows[int(case_id)]))


def heights(axes: Axes) -> float:
    return sum(bar.get_height() for bar in axes.patches)


def test_each_histogram_says_how_many_are_known() -> None:
    figure = cohort_of((60, 100, False, 10), (70, None, False, 20), (None, 300, True, 60))
    age, survival, volume = figure.axes
    assert age.get_title() == "known for 2 of 3 cases, median 65"
    assert survival.get_title() == "known for 2 of 3 cases, median 200"
    assert [heights(axes) for axes in (age, survival, volume)] == [2, 2, 3]
    words = [text.get_text() for text in survival.get_legend().get_texts()]
    assert words == ["died", "alive at last contact"]


def test_what_is_equal_or_not_known_is_drawn_and_said() -> None:
    age, survival, volume = cohort_of(*[(5, None, False, 0)] * 3).axes
    assert heights(age) == heights(volume) == 3
    assert [text.get_text() for text in survival.texts] == ["not known"]
    FigureCanvasAgg(age.figure).draw()
    days = cohort_of((60, 100, False, 1), (70, 300, False, 2)).axes[1]
    # nobody was alive at last contact
    assert [text.get_text() for text in days.get_legend().get_texts()] == ["died"]
    with pytest.raises(UsageError, match="of 1 case neither age, survival nor label map"):
        cohort_of((None, None, False, None))


def test_each_case_is_a_point_and_the_censored_have_another_mark() -> None:
    figure = survival_figure([100, 400, 900], [200, 300, 500], [False, True, False], title="ridge")
    (axes,) = figure.axes
    died, alive = axes.collections
    assert died.get_offsets().tolist() == [[100, 200], [900, 500]]
    assert alive.get_offsets().tolist() == [[400, 300]]
    assert died.get_paths()[0].vertices.shape != alive.get_paths()[0].vertices.shape
    words = [text.get_text() for text in axes.get_legend().get_texts()]
    assert words == ["died (2)", "alive at last contact (1)", "perfect"]
    # both axes reach as far as any case
    assert axes.get_xlim() == axes.get_ylim() == (0, 945)
    FigureCanvasAgg(survival_figure([], [], [], title="")).draw()
