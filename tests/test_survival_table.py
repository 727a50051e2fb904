"""Test writing and reading the table of features."""

from math import nan
from pathlib import Path

import numpy as np
import pytest

from brats_seg.errors import UsageError
from brats_seg.survival.table import feature_columns, read_features, write_features

HEADER = "case_id,patient_id,labels_from,labels_seen,resection"


def make_row(case_id: str = "A", **values: str | float) -> dict[str, str | float]:
    texts = {"case_id": case_id, "patient_id": f"patient of {case_id}", "labels_from": "reference"}
    rest = {"labels_seen": "", "resection": "GTR", "latent0_seen": "no"}
    return texts | rest | {"wt_ml": 12.3456789, "n": 3, "et_x": nan} | values


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "features.csv"
    write_features([make_row(), make_row("B", labels_seen="unknown")], path)

    table = read_features(path)

    assert path.read_text().splitlines()[1] == "A,patient of A,reference,,GTR,no,12.34568,3,"
    assert table["labels_seen"].tolist() == ["", "unknown"]
    assert feature_columns(table) == ["wt_ml", "n", "et_x"]
    assert table[["wt_ml", "n", "et_x"]].iloc[1].tolist() == pytest.approx(
        [12.34568, 3, nan], nan_ok=True
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"absent.csv does not exist. .*`brats-seg features"),
        ("", "is not a CSV table: No columns to parse from file. Make a table of features"),
        (
            "id,days\nA,3\n",
            "has no column case_id, patient_id, .*; found the columns id, days. Make a table",
        ),
        (f"{HEADER},x\n", "has no rows; expected one for each case. Make a table"),
        (f"{HEADER},x\nA,A,,,,7\nA,A,,,,8\n", "more than one row for A; expected one each"),
        (f"{HEADER},x\nA,A,,,,many\n", "case A: found 'many' in column x; expected a number"),
        (f"{HEADER},x\nA,A,,true,,1\n", "has 'true' in column labels_seen; expected no, unknown"),
        (f"{HEADER},latent0_seen\nA,A,,,,\n", "has '' in column latent0_seen; expected no"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "absent.csv"
    if text is not None:
        path.write_text(text)

    with pytest.raises(UsageError, match=message):
        read_features(path)


@pytest.mark.parametrize("text", ["", " ", "nan", "NaN", "inf", "-inf"])
def test_what_is_not_finite_is_unknown(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.csv").write_text(f"{HEADER},x,y\nA,A,,,,{text},2\n")

    table = read_features(tmp_path / "a.csv")

    assert np.isnan(table["x"][0])
    assert table["y"][0] == 2


def test_a_table_without_cases_is_still_written(tmp_path: Path) -> None:
    write_features([], tmp_path / "features.csv")

    assert (tmp_path / "features.csv").read_text() == f"{HEADER}\n"
