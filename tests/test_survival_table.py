"""Test the table of features, and the survival that is read for it."""

from math import isnan, nan
from pathlib import Path

import pandas as pd
import pytest

from brats_seg.errors import CaseError, UsageError
from brats_seg.survival.table import feature_columns, read_features, read_outcomes, write_features
from tests.survival_builders import make_feature_table

HEADER = "case_id,patient_id,labels_from,labels_seen,resection"
CLINICAL = "BraTS20ID,Age,Survival_days,Extent_of_Resection"
IDS = ("BraTS20_Training_001", "BraTS20_Training_002", "BraTS20_Training_003")


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    texts = {"patient_id": "=P", "labels_from": "reference", "labels_seen": "", "resection": "GTR"}
    values = {"latent0_seen": "no", "wt_ml": 12.3456789, "n": 3, "et_x": nan}
    rows = [{"case_id": "A", **texts, **values}, {"case_id": "B", **texts, **values}]
    rows[1]["labels_seen"] = "unknown"
    write_features(rows, path := tmp_path / "features.csv")
    for number, cell in enumerate(("", " ", "nan", "NaN", "inf", "-inf", "-1e300")):
        with path.open("a") as stream:
            stream.write(f"{number},P,,,,no,1,3,{cell}\n")
    table = read_features(path)
    assert path.read_text().splitlines()[1] == "A,'=P,reference,,GTR,no,12.34568,3,"
    assert table["labels_seen"].tolist()[:3] == ["", "unknown", ""]
    assert table["patient_id"].tolist()[:3] == ["=P", "=P", "P"]
    assert feature_columns(table) == ["wt_ml", "n", "et_x"]
    assert table["wt_ml"][1] == 12.34568
    assert (table["n"] == 3).all()
    assert table["et_x"].isna().all()
    write_features([], path)
    assert path.read_text() == f"{HEADER}\n"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (None, r"absent.csv does not exist. .*`brats-seg features"),
        ("id,days\nA,3\n", "has no column case_id, .*Make a table of features"),
        (f"{HEADER},x\n", "has no rows"),
        (f"{HEADER},x\nA,A,,,,7\nA,A,,,,8\n", "several rows for A;"),
        (f"{HEADER},x\nA,A,,,,many\n", "case A: found 'many' in column x"),
        (f"{HEADER},x\nA,A,,true,,1\n", "has 'true' in column labels_seen; expected no, unknown"),
        (f"{HEADER},latent0_seen\nA,A,,,,\n", "has '' in column latent0_seen"),
    ],
)
def test_what_is_no_table_is_refused(tmp_path: Path, text: str | None, message: str) -> None:
    path = tmp_path / "absent.csv"
    if text is not None:
        path.write_text(text)
    with pytest.raises(UsageError, match=message):
        read_features(path)


def outcomes(folder: Path, *rows: str, header: str = CLINICAL, **texts: list[str]) -> pd.DataFrame:
    path = folder / "survival_info.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    texts = {"case_ids": IDS} | texts
    return read_outcomes(make_feature_table([[1.0]] * len(texts["case_ids"]), **texts), [path])


def test_deaths_censored_and_unknown_outcomes_are_distinguished(tmp_path: Path) -> None:
    rows = [f"{IDS[0]},60,289,GTR", f"{IDS[1]},50,ALIVE (361 days later),STR", f"{IDS[2]},NA,NA,NA"]
    table = outcomes(tmp_path, *rows)
    known = outcomes(tmp_path, *rows, columns=["age_years"], resections=["str", "", ""])
    assert table["days"][:2].tolist() == [289, 361]
    assert isnan(table["days"][2])
    assert table["died"].tolist() == [True, False, False]
    assert table["known"].tolist() == [True, True, False]
    assert table["resection"].tolist() == ["GTR", "STR", ""]
    assert table["age_years"][:2].tolist() == [60, 50]
    assert known["age_years"].tolist() == [1, 1, 1]
    assert known["resection"].tolist() == ["STR", "STR", ""]


def test_ids_of_another_year_are_found_through_the_mapping_beside_the_table(tmp_path: Path) -> None:
    row, ids = f"{IDS[0]},60,289,GTR", ["Brats18_X_1"]
    with pytest.raises(UsageError, match=rf"none of the cases .*Brats18_X_1: .*{IDS[0]}.*--clin"):
        outcomes(tmp_path, row, case_ids=ids)
    (tmp_path / "name_mapping.csv").write_text(
        f"BraTS_2018_subject_ID,BraTS_2020_subject_ID\nBrats18_X_1,{IDS[0]}\n"
    )
    assert outcomes(tmp_path, row, case_ids=ids)["days"].tolist() == [289]
    # one patient, although the features were extracted without the mapping
    both = outcomes(tmp_path, row, case_ids=[*ids, IDS[0], IDS[1]])
    assert both["patient_id"].tolist() == [IDS[0], IDS[0], IDS[1]]


@pytest.mark.parametrize(
    ("header", "row", "error", "message"),
    [
        ("name,Age,Survival", "", UsageError, "has no column of ids; found name, Age, Survival"),
        ("BraTS20ID,Age", "", UsageError, "has no column of survival; found BraTS20ID, Age"),
        ("a;b", "", UsageError, "has no column of ids and no column of survival; found a, b"),
        ("", "", UsageError, "survival_info.csv is not a CSV table"),
        (CLINICAL, f"{IDS[0]},60,a year,GTR", CaseError, f"case {IDS[0]}.*survival 'a year'"),
        (CLINICAL, f"{IDS[0]},50,ALIVE (9 days later),NA", UsageError, "no death among the 1 case"),
    ],
)
def test_a_table_without_outcomes_is_refused(tmp_path: Path, header, row, error, message) -> None:
    with pytest.raises(error, match=message):
        outcomes(tmp_path, row, header=header)
