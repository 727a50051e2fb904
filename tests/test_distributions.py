"""Ages, survival and volumes of a cohort, and how many of them are known."""

from pathlib import Path

import pytest

from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.index import index_cases
from brats_seg.errors import UsageError
from brats_seg.report.charts import cohort_figure, distributions_figure
from tests.builders import write_case

NAN = float("nan")


def heights(axes) -> float:
    return sum(bar.get_height() for bar in axes.patches)


def test_each_histogram_says_how_many_are_known() -> None:
    figure = distributions_figure(
        age_years=[60, 70, NAN],
        survival_days=[100, NAN, 300],
        censored=[False, False, True],
        tumour_ml=[10, 20, 60],
    )

    age, survival, volume = figure.axes
    assert age.get_title() == "known for 2 of 3 cases, median 65"
    assert survival.get_title() == "known for 2 of 3 cases, median 200"
    assert [heights(axes) for axes in (age, survival, volume)] == [2, 2, 3]
    words = [text.get_text() for text in survival.get_legend().get_texts()]
    assert words == ["died then", "alive when last heard of"]


def test_what_is_not_known_is_said() -> None:
    figure = distributions_figure(
        age_years=[NAN], survival_days=[NAN], censored=[False], tumour_ml=[3.0]
    )

    assert [text.get_text() for axes in figure.axes[:2] for text in axes.texts] == ["not known"] * 2
    figure.canvas.draw()


def test_a_cohort_of_which_nothing_is_known_is_an_error() -> None:
    with pytest.raises(UsageError, match="of 1 cases neither age, survival nor label map"):
        distributions_figure(
            age_years=[NAN], survival_days=[NAN], censored=[False], tumour_ml=[NAN]
        )


def test_the_tables_beside_the_scans_are_used(tmp_path: Path) -> None:
    for number in (1, 2):
        write_case(tmp_path, f"BraTS20_Training_{number:03d}")
    (tmp_path / "survival_info.csv").write_text(
        "Brats20ID,Age,Survival_days,Extent_of_Resection\n"
        "BraTS20_Training_001,60.5,289,GTR\n"
        "BraTS20_Training_002,52.0,ALIVE (361 days later),NA\n"
    )
    table = read_clinical_tables(tmp_path)

    figure = cohort_figure(with_clinical(index_cases(tmp_path).cases, table), table)

    titles = [axes.get_title() for axes in figure.axes]
    assert titles[0] == "known for 2 of 2 cases, median 56.2"
    assert titles[1] == "known for 2 of 2 cases, median 325"
    died, _alive = figure.axes[1].containers
    assert sum(bar.get_height() for bar in died) == 1
