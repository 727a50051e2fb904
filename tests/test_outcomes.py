"""Test reading the survival of the patients of a table of features."""

from math import isnan
from pathlib import Path

import pytest

from brats_seg.errors import CaseError, UsageError
from brats_seg.survival.outcomes import read_ids, read_outcomes
from tests.survival_builders import make_feature_table

HEADER = "BraTS20ID,Age,Survival_days,Extent_of_Resection"
IDS = ("BraTS20_Training_001", "BraTS20_Training_002", "BraTS20_Training_003")


def outcomes(tmp_path: Path, *rows: str, header: str = HEADER, ids=IDS, **values):
    path = tmp_path / "survival_info.csv"
    path.write_text("\n".join([header, *rows]) + "\n")
    table = make_feature_table([[1.0]] * len(ids), case_ids=ids, **values)
    return read_outcomes(table, path)


def test_deaths_censored_and_unknown_outcomes_are_distinguished(tmp_path):
    found = outcomes(
        tmp_path,
        f"{IDS[0]},60,289,GTR",
        f"{IDS[1]},50,ALIVE (361 days later),STR",
        f"{IDS[2]},NA,NA,NA",
    )

    assert found["days"][:2].tolist() == [289, 361]
    assert isnan(found["days"][2])
    assert found["died"].tolist() == [True, False, False]
    assert found["lived"].tolist() == [False, True, False]
    assert found["resection"].tolist() == ["GTR", "STR", ""]
    assert found["age_years"][:2].tolist() == [60, 50]


def test_the_table_fills_in_only_what_the_features_lack(tmp_path):
    found = outcomes(
        tmp_path,
        *(f"{case_id},60,289,GTR" for case_id in IDS),
        columns=["age_years"],
        resections=["str", "", ""],
    )

    assert found["age_years"].tolist() == [1, 1, 1]
    assert found["resection"].tolist() == ["STR", "GTR", "GTR"]


@pytest.mark.parametrize(
    "header", ["Brats17ID,Age,Survival", "BraTS18ID,Age,Survival", "case_id,age,survival_days"]
)
def test_columns_of_every_year_are_understood(tmp_path, header):
    found = outcomes(tmp_path, "X,60,289", header=header, ids=["X"])

    assert found["days"].tolist() == [289]


def test_ids_of_another_year_are_found_through_the_mapping_beside_the_table(tmp_path):
    (tmp_path / "name_mapping.csv").write_text(
        "BraTS_2018_subject_ID,BraTS_2020_subject_ID\nBrats18_X_1,BraTS20_Training_001\n"
    )

    found = outcomes(tmp_path, f"{IDS[0]},60,289,GTR", ids=["Brats18_X_1"])

    assert found["days"].tolist() == [289]


def test_a_table_of_others_is_refused_with_both_spellings(tmp_path):
    message = (
        r"has none of the 1 case of the features\. The features are of Brats18_X_1, the table has "
        r"BraTS20_Training_001\. .*--clinical"
    )

    with pytest.raises(UsageError, match=message):
        outcomes(tmp_path, f"{IDS[0]},60,289,GTR", ids=["Brats18_X_1"])


def test_a_table_without_a_death_is_refused(tmp_path):
    rows = [f"{IDS[0]},50,ALIVE (9 days later),NA", f"{IDS[1]},50,ALIVE (361 days later),NA"]

    with pytest.raises(
        UsageError, match=r"no death among the 2 cases that.*: 2 alive at the last contact"
    ):
        outcomes(tmp_path, *rows)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("name,Age,Survival", "has no column of ids; found name, Age, Survival. Expected"),
        ("BraTS20ID,Age", "has no column of survival; found BraTS20ID, Age. Expected"),
        ("a;b", "has no column of ids and no column of survival; found a;b. Expected"),
        ("", "survival_info.csv is not a CSV table: No columns to parse from file"),
    ],
)
def test_a_table_with_the_wrong_columns_is_refused(tmp_path, header, message):
    with pytest.raises(UsageError, match=message):
        outcomes(tmp_path, header=header)


def test_a_missing_table_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"absent.csv does not exist"):
        read_outcomes(make_feature_table([[1.0]]), tmp_path / "absent.csv")


def test_days_that_are_no_number_name_the_case(tmp_path):
    with pytest.raises(CaseError, match=f"case {IDS[0]}.*survival 'a year'; expected days, ALIVE"):
        outcomes(tmp_path, f"{IDS[0]},60,a year,GTR")


def test_the_ids_of_a_table_are_read_without_its_survival(tmp_path):
    (tmp_path / "survival_evaluation.csv").write_text("BraTS20ID,Age\nBraTS20_Validation_001,50\n")

    assert read_ids(tmp_path / "survival_evaluation.csv") == ("brats20_validation_001",)


def test_a_table_without_rows_names_no_cases(tmp_path):
    (tmp_path / "evaluation.csv").write_text("BraTS20ID,Age\n")

    with pytest.raises(UsageError, match=r"evaluation.csv has no rows; expected one for each case"):
        read_ids(tmp_path / "evaluation.csv")
