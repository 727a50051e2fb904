"""Grade, age and survival from the tables of the challenge."""

from pathlib import Path

import pytest

from brats_seg.cases import clinical
from brats_seg.errors import CaseError, UsageError
from tests.builders import make_case

MAPPING_2020 = (
    "Grade,BraTS_2017_subject_ID,BraTS_2018_subject_ID,TCGA_TCIA_subject_ID,"
    "BraTS_2019_subject_ID,BraTS_2020_subject_ID\n"
    "HGG,Brats17_AAA_1,Brats18_AAA_1,NA,BraTS19_AAA_1,BraTS20_Training_001\n"
    "LGG,Brats17_TCIA_606_1,Brats18_TCIA02_606_1,TCGA-06-5417,BraTS19_TCIA02_606_1,"
    "BraTS20_Training_002\n"
    "HGG,NA,NA,NA,NA,BraTS20_Training_003\n"
)


def write(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding="utf-8")
    return path


def read(root: Path, **tables: str) -> clinical.ClinicalTable:
    for number, (name, text) in enumerate(tables.items()):
        write(root / f"part {number}" / f"{name}.csv", text)
    return clinical.read_clinical_tables(root)


@pytest.mark.parametrize(
    ("header", "case_id"),
    [
        ("Brats17ID,Age,Survival,ResectionStatus", "Brats17_AAA_1"),
        ("BraTS18ID,Age,Survival,ResectionStatus", "Brats18_AAA_1"),
        ("BraTS19ID,Age,Survival_days,ResectionStatus", "BraTS19_AAA_1"),
        ("Brats20ID,Age,Survival days,Extent_of_Resection", "BraTS20_Training_001"),
        ("\ufeffBRATS20ID,AGE,Survival_days,Extent_of_Resection", "BraTS20_Training_001"),
        ("case_id,Age,Survival_days,Extent_of_Resection", "scan 7"),
    ],
)
def test_the_columns_of_every_year_are_understood(tmp_path, header, case_id):
    table = read(tmp_path, survival_info=f"{header}\n{case_id},60.46301369863014,289,GTR\n")
    row = table.row(case_id)
    assert row == table.row(case_id.lower())
    assert (row.ids, row.age_years, row.grade) == ((case_id,), 60.46301369863014, "")
    assert (row.survival_days, row.survival_censored, row.resection) == (289, False, "GTR")


@pytest.mark.parametrize("missing", ["NA", "", "nan", " NA "])
def test_missing_values_are_none_rows_without_id_ignored_and_survivors_censored(tmp_path, missing):
    header = "BraTS19ID,Age,Survival,ResectionStatus"
    rows = f"A,{missing},{missing},{missing}\n,old,lost,\nB,63.07,ALIVE (361 days later),GTR"
    table = read(tmp_path, survival_data=f"{header}\n{rows}\n")
    row, survivor = table.row("A"), table.row("B")
    assert (row.age_years, row.survival_days, row.survival_censored) == (None, None, False)
    assert row.resection == ""
    assert (survivor.survival_days, survivor.survival_censored) == (361, True)


def test_any_id_of_a_patient_finds_what_is_known_under_another(tmp_path):
    survival = "BraTS19ID,Age,Survival,ResectionStatus\nBraTS19_TCIA02_606_1,45.4,NA,NA\n"
    table = read(tmp_path, name_mapping=MAPPING_2020, survival_data=survival)
    for case_id in MAPPING_2020.splitlines()[2].split(",")[1:]:
        row = table.row(case_id)
        assert (row.grade, row.age_years, row.survival_days) == ("LGG", 45.4, None)
        assert row.ids[0] == "Brats17_TCIA_606_1"


def test_patients_without_older_ids_stay_apart(tmp_path):
    mapping = "Grade,BraTS_2018_subject_ID,BraTS_2019_subject_ID\nHGG,NA,A\nLGG,NA,B\n"
    table = read(tmp_path, name_mapping=mapping)
    assert (table.row("A").grade, table.row("B").grade) == ("HGG", "LGG")
    assert table.row("NA") is table.row("BraTS2021_00000") is None


def test_mappings_of_two_years_are_joined(tmp_path):
    older = "Grade,BraTS_2017_subject_ID,BraTS_2019_subject_ID\nHGG,Brats17_AAA_1,BraTS19_AAA_1\n"
    newer = "Grade,BraTS_2019_subject_ID,BraTS_2020_subject_ID\nHGG,BraTS19_AAA_1,BraTS20_A\n"
    tables = {"name_mapping": older, "name_mapping_new": newer}
    table = read(tmp_path, **tables, survival_data="Brats17ID,Age\nBrats17_AAA_1,33\n")
    assert table.row("BraTS20_A").age_years == 33


@pytest.mark.parametrize(
    "content",
    [b"", b"\n", b"patient,days\nA,5\n", bytes(range(256)) * 8, b'"unclosed\n', b"\xff\xfe\x00"],
)
def test_a_file_that_is_no_table_of_brats_is_passed_over(tmp_path, content):
    (tmp_path / "survival_predictions.csv").write_bytes(content)
    assert clinical.read_clinical_tables(tmp_path).rows == {}


def test_tables_are_found_below_the_mounts_of_kaggle(tmp_path):
    folder = tmp_path / "input/set/BraTS2020_TrainingData/MICCAI_BraTS2020_TrainingData"
    path = write(folder / "name_mapping.csv", MAPPING_2020)
    assert clinical.read_clinical_tables(tmp_path).row("BraTS20_Training_001").grade == "HGG"
    assert (clinical.mapping_files(tmp_path), clinical.mapping_files(folder)) == ((), (path,))
    # as scans are: behind links, and not in the copies that Jupyter keeps of the files it opened
    write(folder / ".ipynb_checkpoints/name_mapping.csv", MAPPING_2020.replace("HGG", "LGG"))
    linked = tmp_path / "linked"
    linked.mkdir()
    (linked / "set").symlink_to(folder)
    assert clinical.read_clinical_tables(linked).row("BraTS20_Training_001").grade == "HGG"


@pytest.mark.parametrize(
    ("cells", "match"),
    [
        ('"60,5",1', r"case A, file part 0/survival_data\.csv: found age '60,5'; .* decimal point"),
        ("-3,1", "age '-3'"),
        ("inf,1", "age 'inf'"),
        ("60,alive", r"survival 'alive'; expected days, ALIVE \(n days later\), or NA\. Correct"),
    ],
)
def test_an_unreadable_value_is_refused_with_case_file_and_value(tmp_path, cells, match):
    with pytest.raises(CaseError, match=match):
        read(tmp_path, survival_data=f"BraTS19ID,Age,Survival\nA,{cells}\n")


def test_cases_get_grade_age_and_patient(tmp_path):
    """A folder with two years of BraTS would leak between folds, were its patients not one."""
    survival = "Brats20ID,Age\nBraTS20_Training_001,60.5\n"
    table = read(tmp_path, name_mapping=MAPPING_2020, survival_info=survival)
    known = make_case("Brats18_AAA_1", grade="LGG", age_years=0.0)
    ids = [*(f"BraTS20_Training_00{n}" for n in (3, 1, 2, 9)), "Brats18_TCIA02_606_1"]
    cases = clinical.with_clinical([*map(make_case, ids), known], table)
    assert [(c.case_id, c.patient_id, c.facts.grade, c.facts.age_years) for c in cases] == [
        (ids[0], ids[0], "HGG", None),
        (ids[1], ids[1], "HGG", 60.5),
        (ids[2], ids[2], "LGG", None),
        (ids[3], ids[3], "", None),
        (ids[4], ids[2], "LGG", None),
        ("Brats18_AAA_1", ids[1], "LGG", 60.5),  # the grade of its folder, the age of this table
    ]


def test_a_scan_under_two_ids_is_of_one_patient():
    """The copies of a scan that is left out are copies of each other."""
    others = [make_case(name, patient_id=name[0]) for name in ("X2", "Y2", "x3", "Z")]
    for same in ({"voxel_hash": "h"}, {"near_copies": ("unlabelled",)}):
        double = [make_case(name, patient_id=name[0], **same) for name in ("X1", "Y1")]
        cases = clinical.with_clinical([*double, *others], clinical.ClinicalTable(rows={}))
        assert [case.patient_id for case in cases] == ["X"] * 5 + ["Z"]


def test_named_tables_count_before_those_of_the_folder(tmp_path):
    write(tmp_path / "data" / "survival_info.csv", "case_id,Age\nX,60\nY,70\n")
    named = write(tmp_path / "named.csv", "case_id,Age\nX,50\n")
    table = clinical.read_clinical_tables(tmp_path / "data", [named])
    assert (table.row("x").age_years, table.row("y").age_years) == (50, 70)
    assert clinical.read_clinical_files([named]).row("x").age_years == 50
    with pytest.raises(UsageError, match="has no column of ids"):
        clinical.read_clinical_tables(tmp_path, [write(named, "Age\n50\n")])


@pytest.mark.real
def test_the_official_tables_are_read_whole(real_data):
    """Counts taken from the files with grep."""
    table = clinical.read_clinical_tables(real_data)
    rows = [row for case_id, row in table.rows.items() if case_id.startswith("brats19_")]
    assert (len(rows), sum(row.grade == "HGG" for row in rows)) == (335, 259)
    assert sum(row.age_years is not None for row in rows) == 240
    assert sorted(row.survival_days for row in rows if row.survival_censored) == [361, 1029]
    assert table.row("Brats17_TCIA_606_1").age_years == 45.40273973
    folders = sorted((real_data / "BraTS2018").glob("*GG/*/"))
    filled = clinical.with_clinical([make_case(path.name) for path in folders], table)
    assert [case.facts.grade for case in filled] == [path.parent.name for path in folders]
    assert len(folders) == 9
