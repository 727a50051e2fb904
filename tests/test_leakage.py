"""Test whether a network was trained on a patient."""

import logging
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import ClinicalTable, read_clinical_files
from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.cases.layouts import parse_case_id
from brats_seg.survival.leakage import Leakage, People, TrainingCases, least_leakage

NO, UNKNOWN, YES = Leakage.NO, Leakage.UNKNOWN, Leakage.YES


@pytest.mark.parametrize(
    ("answers", "expected"),
    [
        ([NO], ((0,), NO)),
        ([YES, NO, YES, NO], ((1, 3), NO)),
        ([YES, UNKNOWN, YES], ((1,), UNKNOWN)),
        ([YES, YES], ((0, 1), YES)),
        ([UNKNOWN, NO], ((1,), NO)),
    ],
)
def test_those_that_know_it_least_are_taken(answers, expected):
    assert least_leakage(answers) == expected


NOBODY = People(clinical=ClinicalTable(rows={}))


def make_case(case_id: str, patient_id: str) -> Case:
    return Case(case_id=case_id, patient_id=patient_id, release="brats2023-gli")


def trained_on(tmp_path: Path, *train: str, people: People = NOBODY, cases=()) -> TrainingCases:
    write_split(Split(train=train, validation=("held",)), tmp_path / SPLIT_NAME)
    return TrainingCases.of_run(tmp_path, people, cases)


def test_a_training_case_leaks(tmp_path):
    training = trained_on(tmp_path, "A", "B")

    assert training.leakage(NOBODY.keys("A", "A")) == Leakage.YES
    assert training.leakage(NOBODY.keys("held", "held")) == Leakage.NO


def test_another_time_point_of_a_training_patient_leaks(tmp_path):
    training = trained_on(tmp_path, "BraTS-GLI-00005-000")

    for case_id, seen in (
        ("BraTS-GLI-00005-001", Leakage.YES),
        ("BraTS-GLI-00006-000", Leakage.NO),
    ):
        assert training.leakage(NOBODY.keys(case_id, parse_case_id(case_id).patient_id)) == seen


def test_the_patient_that_the_index_knows_counts(tmp_path):
    """The index joins cases of one person whose ids have nothing in common."""
    cases = [make_case("A", "person"), make_case("B", "person")]

    training = trained_on(tmp_path, "A", cases=cases)

    assert training.leakage(NOBODY.keys("B", "person")) == Leakage.YES


def test_a_training_patient_leaks_under_the_id_of_another_year(tmp_path):
    mapping = tmp_path / "name_mapping.csv"
    mapping.write_text(
        "BraTS_2018_subject_ID,BraTS_2020_subject_ID\nBrats18_X_1,BraTS20_Training_001\n"
    )
    people = People(clinical=read_clinical_files([mapping]))

    training = trained_on(tmp_path, "Brats18_X_1", people=people)

    assert training.leakage(people.keys("BraTS20_Training_001", "another")) == Leakage.YES
    assert training.leakage(NOBODY.keys("BraTS20_Training_001", "another")) == Leakage.NO


def test_the_leakage_of_a_run_without_a_split_is_unknown(tmp_path, caplog):
    with caplog.at_level(logging.WARNING):
        training = TrainingCases.of_run(tmp_path, NOBODY, ())

    assert training.leakage(NOBODY.keys("A", "A")) == Leakage.UNKNOWN
    assert f"{tmp_path} has no split.csv" in caplog.text


@pytest.mark.parametrize("name", ["best.pt", "last.pt"])
def test_a_checkpoint_is_of_the_run_that_it_lies_in(tmp_path, name):
    trained_on(tmp_path, "A")
    (tmp_path / name).touch()

    training = TrainingCases.of_run(tmp_path / name, NOBODY, ())

    assert training.leakage(NOBODY.keys("A", "A")) == Leakage.YES
