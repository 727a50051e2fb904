"""Test writing and reading the table of features."""

from math import isnan, nan
from pathlib import Path

import numpy as np
import pytest

from brats_seg.errors import UsageError
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.radiomics import Feature
from brats_seg.survival.table import FeatureRow, encoder_of, read_features, write_features


def make_row(case_id: str = "A", **values: object) -> FeatureRow:
    given = {
        "case_id": case_id,
        "patient_id": f"patient of {case_id}",
        "labels_from": "reference",
        "labels_leakage": None,
        "latent_leakage": (Leakage.NO, Leakage.YES),
        "resection": "GTR",
        "features": (Feature(name="wt_ml", value=12.3456789), Feature(name="et_x", value=nan)),
    }
    return FeatureRow(**given | values)


def written(tmp_path: Path, text: str) -> Path:
    path = tmp_path / "features.csv"
    path.write_text(text)
    return path


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    path = tmp_path / "features.csv"
    rows = [make_row(), make_row("B", labels_from="prediction", labels_leakage=Leakage.UNKNOWN)]

    write_features(rows, path)
    table = read_features(path)

    assert table.case_ids == ("A", "B")
    assert table.patient_ids == ("patient of A", "patient of B")
    assert table.labels_from == ("reference", "prediction")
    assert table.labels_leakage == (None, Leakage.UNKNOWN)
    assert table.latent_leakage == ((Leakage.NO, Leakage.YES),) * 2
    assert table.n_encoders == 2
    assert table.resections == ("GTR", "GTR")
    assert table.columns == ("wt_ml", "et_x")
    assert table.values[0, 0] == pytest.approx(12.34568)
    assert isnan(table.values[1, 1])


def test_a_column_that_is_not_there_is_unknown_everywhere(tmp_path: Path) -> None:
    write_features([make_row()], tmp_path / "features.csv")

    table = read_features(tmp_path / "features.csv")

    assert np.isnan(table.column("age_years")).all()
    assert table.column("wt_ml").tolist() == [pytest.approx(12.34568)]


@pytest.mark.parametrize(
    ("name", "number"),
    [("latent0_000", 0), ("latent12_511", 12), ("latent0_seen", None), ("wt_ml", None)],
)
def test_latent_columns_name_their_autoencoder(name: str, number: int | None) -> None:
    assert encoder_of(name) == number


HEADER = "case_id,patient_id,labels_from,labels_seen,resection"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "is not a CSV table: No columns to parse from file. Make a table of features"),
        (
            "id,days\nA,3\n",
            "has no column case_id, patient_id, .*; found the columns id, days. Make a table",
        ),
        (f"{HEADER},x\n", "has no rows; expected one for each case. Make a table"),
        (f"{HEADER},x\nA,A,,,,7\nA,A,,,,8\n", "more than one row for A; expected one each"),
        (f"{HEADER},x\nA,A,,,,many\n", "case A: found 'many' in column x; expected a number"),
        (f"{HEADER},latent0_seen\nA,A,,,,true\n", "'true' is not a valid Leakage; expected no"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UsageError, match=message):
        read_features(written(tmp_path, text))


def test_a_missing_file_says_how_to_make_one(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"absent.csv does not exist. .*`brats-seg features"):
        read_features(tmp_path / "absent.csv")


@pytest.mark.parametrize("text", ["", "nan", "NaN", "inf", "-inf"])
def test_what_is_not_finite_is_unknown(tmp_path: Path, text: str) -> None:
    table = read_features(written(tmp_path, f"{HEADER},x\nA,A,,,,{text}\n"))

    assert isnan(table.values[0, 0])


def test_a_table_without_cases_is_still_written(tmp_path: Path) -> None:
    write_features([], tmp_path / "features.csv")

    assert (tmp_path / "features.csv").read_text() == f"{HEADER}\n"
