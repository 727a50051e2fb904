"""The table of scores as a file."""

from pathlib import Path

import pandas as pd
import pytest

from brats_seg.errors import UsageError
from brats_seg.evaluation.lesionwise import LesionScores
from brats_seg.evaluation.scores import (
    LESION_COLUMNS,
    REGION_COLUMNS,
    Score,
    read_scores,
    write_scores,
)

PLAIN = Score(
    case_id="a",
    region="wt",
    dice=2 / 3,
    jaccard=0.5,
    hd95=373.12866,
    sensitivity=1.0,
    specificity=0.99,
    reference_ml=1.25,
    prediction_ml=0.0,
)
LESIONS = LesionScores(
    dice=0.25, hd95=187.0, nsd=(0.1, 0.2), n_lesions=3, n_false_positive=1, n_false_negative=2
)
LESIONWISE = Score(
    **{column: PLAIN.value(column) for column in REGION_COLUMNS},
    case_id="a",
    region="wt",
    lesions=LESIONS,
)


def test_the_table_has_a_row_per_case_and_region(tmp_path: Path) -> None:
    write_scores([PLAIN], tmp_path / "scores.csv")

    assert (tmp_path / "scores.csv").read_text() == (
        "case_id,region,dice,jaccard,hd95,sensitivity,specificity,reference_ml,prediction_ml\n"
        "a,wt,0.666667,0.500000,373.128660,1.000000,0.990000,1.250000,0.000000\n"
    )


def test_lesionwise_protocols_add_their_columns(tmp_path: Path) -> None:
    write_scores([LESIONWISE], tmp_path / "scores.csv")

    [row] = pd.read_csv(tmp_path / "scores.csv").to_dict("records")
    assert list(row) == ["case_id", "region", *REGION_COLUMNS, *LESION_COLUMNS]
    assert [row[column] for column in LESION_COLUMNS] == [0.25, 187, 0.1, 0.2, 3, 1, 2]


def test_a_value_is_found_by_its_column() -> None:
    assert LESIONWISE.value("reference_ml") == 1.25
    assert LESIONWISE.value("lesionwise_nsd_1.0") == 0.2
    assert LESIONWISE.value("n_false_negative") == 2
    with pytest.raises(ValueError, match="not in tuple"):
        PLAIN.value("n_lesions")


def test_a_table_without_rows_has_a_head(tmp_path: Path) -> None:
    write_scores([], tmp_path / "new" / "scores.csv")

    assert pd.read_csv(tmp_path / "new" / "scores.csv").empty


@pytest.mark.parametrize("score", [PLAIN, LESIONWISE], ids=["plain", "lesionwise"])
def test_what_was_written_is_read_back(tmp_path: Path, score: Score) -> None:
    write_scores([score], tmp_path / "scores.csv")

    (back,) = read_scores(tmp_path / "scores.csv")

    assert (back.case_id, back.region, back.columns) == ("a", "wt", score.columns)
    assert back.values == pytest.approx(score.values, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("a,b\n1,2\n", "has no column case_id, region, dice.*; found the columns a, b"),
        (
            "case_id,region,dice,jaccard,hd95,sensitivity,specificity,reference_ml,prediction_ml\n"
            "a,wt,high,1,1,1,1,1,1\n",
            "not a table of scores, .*'high'",
        ),
    ],
)
def test_another_table_is_refused(tmp_path: Path, text: str, expected: str) -> None:
    (tmp_path / "a.csv").write_text(text)

    with pytest.raises(UsageError, match=expected):
        read_scores(tmp_path / "a.csv")


def test_a_table_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.csv does not exist"):
        read_scores(tmp_path / "absent.csv")
