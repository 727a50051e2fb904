"""Who is held out with whom: the schemes behind `make_folds`."""

import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import StratifiedKFold

from brats_seg.cases.case import Case
from brats_seg.cases.folds import FoldTable, make_folds
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError

NOTEBOOK = FoldConfig(scheme="notebook")


def make_case(case_id: str, **values: object) -> Case:
    return Case(**{"case_id": case_id, "patient_id": case_id, "release": "brats2020"} | values)


def make_cases(n_cases: int, **values: object) -> list[Case]:
    return [make_case(f"C{number:03d}", **values) for number in range(n_cases)]


def fold_of(table: FoldTable) -> dict[str, int | None]:
    return {row.case_id: row.fold for row in table.rows}


def sizes(table: FoldTable) -> list[int]:
    counts = Counter(row.fold for row in table.rows)
    return [counts[fold] for fold in table.folds]


def make_cohort(seed: int) -> list[Case]:
    """200 patients, some with several scans, a fifth of low grade, half of known age."""
    rng = np.random.default_rng(seed)
    cases = []
    for patient in range(200):
        grade = "LGG" if patient % 5 == 0 else "HGG"
        age = float(rng.uniform(20, 80)) if patient % 2 else None
        cases += [
            make_case(
                f"P{patient:03d}-{scan}", patient_id=f"P{patient:03d}", grade=grade, age_years=age
            )
            for scan in range(rng.integers(1, 4))
        ]
    return cases


@pytest.mark.parametrize("seed", range(5))
def test_each_case_is_held_out_once_and_no_patient_is_parted(seed):
    cases = make_cohort(seed)

    table = make_folds(cases, FoldConfig(seed=seed))

    assert [row.case_id for row in table.rows] == sorted(case.case_id for case in cases)
    assert table.folds == (0, 1, 2, 3, 4)
    patients = Counter((row.patient_id, row.fold) for row in table.rows)
    assert len(patients) == 200


@pytest.mark.parametrize("seed", range(5))
def test_grades_and_decades_of_age_are_spread_evenly(seed):
    """Each fold holds a fifth of every kind of patient, give or take a few scans."""
    cases = make_cohort(seed)
    fold = fold_of(make_folds(cases, FoldConfig()))

    for kind in (("HGG",), ("LGG",), ("HGG", "LGG")):
        counts = Counter(fold[case.case_id] for case in cases if case.grade in kind)
        assert max(counts.values()) - min(counts.values()) <= 3
    old = Counter(fold[c.case_id] for c in cases if c.age_years is not None and c.age_years >= 60)
    assert max(old.values()) - min(old.values()) <= 4


def test_a_patient_with_many_scans_does_not_drive_a_kind_of_patient_out_of_its_fold():
    often = [make_case(f"A-{scan:02d}", patient_id="A", grade="HGG") for scan in range(30)]
    cases = [*often, *make_cases(10, grade="LGG")]

    fold = fold_of(make_folds(cases, FoldConfig()))

    assert sorted(fold[case.case_id] for case in cases if case.grade == "LGG") == [
        0, 0, 1, 1, 2, 2, 3, 3, 4, 4
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(10))
def test_the_order_of_the_cases_changes_nothing(seed):
    cases = make_cohort(seed=0)
    shuffled = [cases[i] for i in np.random.default_rng(seed).permutation(len(cases))]

    assert make_folds(shuffled, FoldConfig()) == make_folds(cases, FoldConfig())


def test_another_seed_gives_other_folds():
    cases = make_cohort(seed=0)

    assert make_folds(cases, FoldConfig(seed=1)) != make_folds(cases, FoldConfig(seed=2))


def test_without_grade_and_age_the_volume_of_the_tumour_is_spread():
    """Each fold gets one of every five neighbours in volume."""
    cases = [make_case(f"C{n:03d}", tumour_ml=float((n * 37) % 100)) for n in range(100)]

    fold = fold_of(make_folds(cases, FoldConfig()))

    by_volume = sorted(cases, key=lambda case: case.tumour_ml)
    for start in range(0, 100, 5):
        neighbours = by_volume[start : start + 5]
        assert sorted(fold[case.case_id] for case in neighbours) == [0, 1, 2, 3, 4]


def test_cases_of_unknown_volume_are_shared_out_as_well():
    assert sizes(make_folds(make_cases(12), FoldConfig())) == [3, 3, 2, 2, 2]


@pytest.mark.parametrize("n_folds", [2, 3, 5, 9])
@pytest.mark.parametrize(
    "values",
    [{}, {"grade": "HGG"}, {"age_years": 50.0}, {"tumour_ml": 3.0}],
    ids=["nothing known", "grade", "age", "volume"],
)
def test_few_patients_fill_every_fold(n_folds, values):
    table = make_folds(make_cases(9, **values), FoldConfig(n_folds=n_folds))

    assert len(table.folds) == n_folds
    assert max(sizes(table)) - min(sizes(table)) <= 1


def test_as_many_patients_as_folds_are_enough():
    """All different, so that every stratum has one patient."""
    cases = [make_case(f"C{n}", grade="HGG", age_years=10.0 * n) for n in range(3)]

    assert sizes(make_folds(cases, FoldConfig(n_folds=3))) == [1, 1, 1]


def test_a_scan_under_two_ids_is_kept_in_one_fold_with_all_cases_of_both_patients():
    cases = [
        *make_cases(20),
        make_case("X1", patient_id="X", voxel_hash="same"),
        make_case("X2", patient_id="X", voxel_hash="x2"),
        make_case("Y1", patient_id="Y", voxel_hash="y1"),
        make_case("Y2", patient_id="Y", voxel_hash="same"),
    ]

    fold = fold_of(make_folds(cases, FoldConfig()))

    assert len({fold[case_id] for case_id in ("X1", "X2", "Y1", "Y2")}) == 1


def test_cases_without_a_hash_are_not_one_scan():
    table = make_folds(make_cases(10, voxel_hash=""), FoldConfig())

    assert sizes(table) == [2, 2, 2, 2, 2]


@pytest.mark.parametrize(
    ("cases", "match"),
    [
        ([], "no cases to make folds of"),
        ([make_case("A")], "all cases are of one patient, A: none is left to validate"),
        (
            [make_case("A1", patient_id="A"), make_case("A2", patient_id="A")],
            "all cases are of one patient, A",
        ),
        (
            make_cases(4),
            r"4 patients cannot fill 5 folds .*fewer folds: --set folds\.n_folds=4",
        ),
        (
            [*make_cases(3), make_case("A", voxel_hash="h"), make_case("B", voxel_hash="h")],
            r"4 patients cannot fill 5 folds \(those who share a scan count as one\)",
        ),
    ],
)
def test_too_few_patients_are_refused_with_what_to_change(cases, match):
    with pytest.raises(FoldError, match=match):
        make_folds(cases, FoldConfig())


def make_brats2020(seed: int) -> list[Case]:
    """369 cases of which 236 have an age, as in BraTS 2020; a few very young and very old."""
    rng = np.random.default_rng(seed)
    ages = np.full(369, np.nan)
    known = rng.permutation(369)[:236]
    ages[known] = rng.normal(61, 12, 236).clip(18, 86)
    return [
        make_case(f"BraTS20_Training_{number:03d}", age_years=None if np.isnan(age) else float(age))
        for number, age in enumerate(ages, start=1)
    ]


@pytest.mark.parametrize("seed", range(3))
def test_the_notebook_scheme_is_that_of_the_notebook(seed):
    """An oracle after the description of the notebook, on a table in the order of its rows."""
    cases = make_brats2020(seed)
    frame = pd.DataFrame({"id": [c.case_id for c in cases], "age": [c.age_years for c in cases]})
    frame = frame[frame["age"].notna() & (frame["id"] != "BraTS20_Training_355")]
    frame = frame.reset_index(drop=True)
    splitter = StratifiedKFold(n_splits=7, shuffle=True, random_state=55)
    expected = dict.fromkeys((case.case_id for case in cases), None)
    with warnings.catch_warnings(action="ignore"):
        splits = list(splitter.split(frame, frame["age"] // 10 * 10))
    for fold, (_, held_out) in enumerate(splits):
        expected |= dict.fromkeys(frame["id"].iloc[held_out], fold)

    table = make_folds(cases[::-1], NOTEBOOK)

    assert fold_of(table) == expected
    assert fold_of(table)["BraTS20_Training_355"] is None
    assert table.folds == tuple(range(7))


def test_the_notebook_scheme_does_not_part_a_patient():
    cases = [
        make_case(f"P{n:02d}-{scan}", patient_id=f"P{n:02d}", age_years=50.0 + n % 5)
        for n in range(30)
        for scan in range(2)
    ]

    table = make_folds(cases, NOTEBOOK)

    assert len({(row.patient_id, row.fold) for row in table.rows}) == 30
    assert len(table.folds) == 7


@pytest.mark.parametrize(
    ("cases", "match"),
    [
        (make_cases(20), r"only 0 of 20 cases have an age.* survival_\*\.csv .*scheme=stratified"),
        (make_cases(6, age_years=50.0), "only 6 of 6 cases have an age, too few of one decade"),
        ([], "only 0 of 0 cases"),
    ],
)
def test_the_notebook_scheme_is_refused_without_ages(cases, match):
    with pytest.raises(FoldError, match=match):
        make_folds(cases, NOTEBOOK)
