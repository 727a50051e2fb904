"""Predicted over reported survival: the censored look different."""

from brats_seg.report.charts import survival_figure


def test_each_case_is_a_point_and_the_censored_have_another_mark() -> None:
    figure = survival_figure([100, 400, 900], [200, 300, 500], [False, True, False], title="ridge")

    (axes,) = figure.axes
    died, alive = axes.collections
    assert died.get_offsets().tolist() == [[100, 200], [900, 500]]
    assert alive.get_offsets().tolist() == [[400, 300]]
    assert died.get_paths()[0].vertices.shape != alive.get_paths()[0].vertices.shape
    assert [text.get_text() for text in axes.get_legend().get_texts()] == [
        "died then (2)",
        "alive when last heard of (1)",
        "perfect",
    ]
    assert axes.get_title() == "ridge"


def test_both_axes_reach_as_far_as_any_case() -> None:
    (axes,) = survival_figure([100, 2000], [150, 300], [False, False], title="").axes

    assert axes.get_xlim() == axes.get_ylim() == (0, 2100)


def test_nobody_censored_and_nobody_at_all_can_be_drawn() -> None:
    survival_figure([100.0], [100.0], [False], title="").canvas.draw()
    survival_figure([], [], [], title="").canvas.draw()
