"""The fold table: schemes, leaks, files."""

import warnings
from collections import Counter
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import StratifiedKFold

from brats_seg.cases.case import Case
from brats_seg.cases.folds import (
    FoldRow,
    FoldTable,
    check_covers,
    check_fold,
    fold_table_path,
    make_folds,
    read_folds,
    read_split,
    write_folds,
    write_split,
)
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError
from tests.builders import make_case


def make_table(*rows: tuple[str, str, int | None]) -> FoldTable:
    return FoldTable(rows=tuple(FoldRow(case_id=c, patient_id=p, fold=f) for c, p, f in rows))


TABLE = make_table(("B", "b", 1), ("A1", "a", 0), ("A2", "a", 0), ("C", "c", 2), ("D", "d", None))


def write(path: Path, *lines: str) -> Path:
    path.write_text("\n".join(["case_id,patient_id,fold", *lines, ""]))
    return path


@pytest.mark.parametrize(
    ("fold", "train", "validation"),
    [(0, ("B", "C"), ("A1", "A2")), (1, ("A1", "A2", "C"), ("B",)), (2, ("A1", "A2", "B"), ("C",))],
)
def test_a_split_holds_one_fold_out(fold, train, validation):
    """A case without a fold is neither trained on nor validated."""
    split = TABLE.split(fold)

    assert split.train == train
    assert split.validation == validation


@pytest.mark.parametrize(
    ("table", "fold", "match"),
    [
        *((TABLE, fold, rf"fold {fold} is not .* which has folds 0, 1, 2$") for fold in (3, -1)),
        (make_table(("A", "a", 0), ("B", "b", 0)), 0, "only fold 0; expected another one"),
    ],
)
def test_a_fold_that_cannot_be_held_out_is_refused(table, fold, match):
    with pytest.raises(FoldError, match=match):
        table.split(fold)


@pytest.mark.parametrize(
    ("rows", "match"),
    [
        ([("A1", "a", 2), ("B", "b", 1), ("A2", "a", 0)], "patient a lies in folds 0, 2"),
        ([("A", "a", 0), ("A", "a", 0)], "more than one row for case A; expected one"),
    ],
)
def test_a_table_that_leaks_or_repeats_a_case_is_refused(rows, match):
    with pytest.raises(FoldError, match=match):
        make_table(*rows)


def test_a_patient_with_a_case_left_out_does_not_leak():
    table = make_table(("A1", "a", 0), ("A2", "a", None), ("B", "b", 1))

    assert table.split(0).validation == ("A1",)


def test_a_written_table_is_read_back(tmp_path):
    path = tmp_path / "runs" / "folds.csv"

    write_folds(TABLE, path)

    assert read_folds(path) == TABLE
    assert path.read_text().splitlines()[:2] == ["case_id,patient_id,fold", "B,b,1"]
    assert [file.name for file in path.parent.iterdir()] == ["folds.csv"]


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        (FoldConfig(), "folds-5-seed55.csv"),
        (FoldConfig(n_folds=3, seed=7), "folds-3-seed7.csv"),
        (FoldConfig(n_folds=3, scheme="notebook"), "folds-notebook.csv"),
    ],
)
def test_the_name_of_a_table_tells_its_settings(tmp_path, config, expected):
    assert fold_table_path(tmp_path, config) == tmp_path / expected


def test_a_table_of_an_earlier_version_is_used_where_it_has_the_number_of_folds(tmp_path):
    write_folds(TABLE, tmp_path / "folds.csv")
    names = [fold_table_path(tmp_path, FoldConfig(n_folds=n)).name for n in (2, 3, 4)]

    assert names == ["folds-2-seed55.csv", "folds.csv", "folds-4-seed55.csv"]


def test_a_fold_is_checked_against_the_settings_until_there_is_a_table(tmp_path):
    path = tmp_path / "folds-5-seed55.csv"
    check_fold(4, path, FoldConfig())
    check_fold(6, path, FoldConfig(scheme="notebook"))
    for fold in (5, -1):
        with pytest.raises(
            FoldError, match=rf"there is no fold {fold}: .* 5 folds, 0 to 4\. Choose"
        ):
            check_fold(fold, path, FoldConfig())

    write_folds(make_table(("A", "a", 1), ("B", "b", 5)), path)

    check_fold(5, path, FoldConfig())
    with pytest.raises(FoldError, match="fold 0 is not in the fold table, which has folds 1, 5"):
        check_fold(0, path, FoldConfig())


def test_a_leak_in_a_file_is_refused_with_file_patient_and_folds(tmp_path):
    """A manual edit may separate the scans of a patient."""
    path = write(tmp_path / "folds.csv", "P3-0,P3,1", "P3-1,P3,2", "B,b,0")

    with pytest.raises(FoldError, match=r"folds\.csv: patient P3 lies in folds 1, 2:.*Correct it"):
        read_folds(path)


@pytest.mark.parametrize(
    ("text", "match"),
    [
        ("", "is not a CSV table: .* expected the columns case_id, patient_id, fold"),
        ("case_id,patient_id,fold\n", "has no rows"),
        ("case_id,fold\nA,0\n", "has no column patient_id; .* expected the columns case_id, pat"),
        ("case_id,patient_id,fold\nA,a\n", "line 2 has fewer cells than the header"),
        ("case_id,patient_id,fold\nA,a,first\n", "case A has fold 'first'; expected a number"),
        ("case_id,patient_id,fold\nA,a,-1\n", "case A has fold '-1'"),
        ("case_id,patient_id,fold\nA,a,1.0\n", r"case A has fold '1\.0'"),
        (b"\x1f\x8b\xff\xfe" * 9, r"no fold table: .*folds\.csv .*Correct it, or remove it"),
        (None, r"no fold table: .*folds\.csv does not exist"),
    ],
)
def test_a_file_that_is_no_fold_table_is_refused(tmp_path, text, match):
    path = tmp_path / "folds.csv"
    if text is not None:
        path.write_bytes(text.encode() if isinstance(text, str) else text)

    with pytest.raises(FoldError, match=match):
        read_folds(path)


def test_a_table_that_went_through_a_spreadsheet_is_read(tmp_path):
    """With a byte order mark, other line ends, columns moved and one added."""
    path = tmp_path / "folds.csv"
    path.write_bytes(
        b"\xef\xbb\xbffold,case_id,remark,patient_id\r\n0,A,,a\r\n1,B,x,b\r\n,C,,c\r\n"
    )

    assert read_folds(path) == make_table(("A", "a", 0), ("B", "b", 1), ("C", "c", None))


@pytest.mark.parametrize(
    ("cases", "match"),
    [
        (["A1", "X"], "no row for case X. Give each a row, with an empty fold to leave it out"),
        ([f"X{n}" for n in range(9)], "no row for cases X0, X1, X2, X3, X4 and 4 more"),
        # a mapping of ids, or a duplicate of a scan, was added after the table was written
        ({"patient_id": "a"}, r"cases A1, C are scans of one patient, .* folds 0, 2"),
        ({"voxel_hash": "same"}, r"cases A1, C are scans of one patient, .* folds 0, 2"),
    ],
)
def test_a_table_must_cover_its_cases_without_a_leak(cases, match):
    known = cases if isinstance(cases, dict) else {}
    case_ids = ("A1", "C", "D") if known else cases
    # a table may hold more cases
    check_covers(TABLE, [make_case(case_id) for case_id in ("A1", "B", "D")])

    with pytest.raises(FoldError, match=match):
        check_covers(TABLE, [make_case(case_id, **known) for case_id in case_ids])


def test_the_split_of_a_run_is_read_as_it_was_written(tmp_path):
    split = TABLE.split(0)

    write_split(split, tmp_path / "split.csv")

    assert read_split(tmp_path / "split.csv") == split
    assert (tmp_path / "split.csv").read_text().startswith("case_id,role\n")


@pytest.mark.parametrize(
    ("text", "match"),
    [
        (
            None,
            r"no split of a run: .*split\.csv does not exist; .* is written when the run is trained",
        ),
        ("", "no split of a run: .* expected the columns case_id, role"),
        ("case_id,fold\nA,0\n", "no split of a run: .* has no column role"),
        ("case_id,role\nA,test\n", r"split\.csv: found a role that is not train or validation"),
    ],
)
def test_what_is_no_split_is_refused(tmp_path, text, match):
    path = tmp_path / "split.csv"
    if text is not None:
        path.write_text(text)

    with pytest.raises(FoldError, match=match):
        read_split(path)


NOTEBOOK = FoldConfig(scheme="notebook")


def numbered_cases(n_cases: int, **values: object) -> list[Case]:
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


@pytest.mark.parametrize("seed", range(2))
def test_each_case_is_held_out_once_and_no_patient_is_parted(seed):
    cases = make_cohort(seed)

    table = make_folds(cases, FoldConfig(seed=seed))

    assert [row.case_id for row in table.rows] == sorted(case.case_id for case in cases)
    assert table.folds == (0, 1, 2, 3, 4)
    patients = Counter((row.patient_id, row.fold) for row in table.rows)
    assert len(patients) == 200


@pytest.mark.parametrize("seed", range(2))
def test_grades_and_decades_of_age_are_spread_evenly(seed):
    """Each fold holds a fifth of every kind of patient, give or take a few scans."""
    cases = make_cohort(seed)
    fold = fold_of(make_folds(cases, FoldConfig()))

    for kind in (("HGG",), ("LGG",), ("HGG", "LGG")):
        counts = Counter(fold[case.case_id] for case in cases if case.facts.grade in kind)
        assert max(counts.values()) - min(counts.values()) <= 3
    old = Counter(
        fold[c.case_id] for c in cases if c.facts.age_years is not None and c.facts.age_years >= 60
    )
    assert max(old.values()) - min(old.values()) <= 4


def test_a_patient_with_many_scans_does_not_drive_a_kind_of_patient_out_of_its_fold():
    often = [make_case(f"A-{scan:02d}", patient_id="A", grade="HGG") for scan in range(30)]
    cases = [*often, *numbered_cases(10, grade="LGG")]

    fold = fold_of(make_folds(cases, FoldConfig()))

    assert sorted(fold[case.case_id] for case in cases if case.facts.grade == "LGG") == [
        0, 0, 1, 1, 2, 2, 3, 3, 4, 4
    ]  # fmt: skip


@pytest.mark.parametrize("seed", range(2))
def test_the_order_of_the_cases_changes_nothing(seed):
    cases = make_cohort(seed=0)
    shuffled = [cases[i] for i in np.random.default_rng(seed).permutation(len(cases))]

    assert make_folds(shuffled, FoldConfig()) == make_folds(cases, FoldConfig())
    assert make_folds(cases, FoldConfig(seed=1)) != make_folds(cases, FoldConfig(seed=2))


def test_without_grade_and_age_the_volume_of_the_tumour_is_spread():
    """Each fold gets one of every five neighbours in volume."""
    cases = [make_case(f"C{n:03d}", tumour_ml=float((n * 37) % 100)) for n in range(100)]

    fold = fold_of(make_folds(cases, FoldConfig()))

    by_volume = sorted(cases, key=lambda case: case.facts.tumour_ml)
    for start in range(0, 100, 5):
        neighbours = by_volume[start : start + 5]
        assert sorted(fold[case.case_id] for case in neighbours) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n_folds", [2, 3, 5, 9])
@pytest.mark.parametrize(
    "values",
    [{}, {"voxel_hash": ""}, {"grade": "HGG"}, {"age_years": 50.0}, {"tumour_ml": 3.0}],
    ids=["strata of one", "nothing known", "grade", "age", "volume"],
)
def test_few_patients_fill_every_fold(n_folds, values):
    cases = numbered_cases(9, **values)
    if not values:
        # all different, so that every stratum has one patient
        cases = [make_case(f"C{n}", grade="HGG", age_years=10.0 * n) for n in range(9)]

    table = make_folds(cases, FoldConfig(n_folds=n_folds))

    assert len(table.folds) == n_folds
    assert max(sizes(table)) - min(sizes(table)) <= 1


def test_a_scan_under_two_ids_is_kept_in_one_fold_with_all_cases_of_both_patients():
    cases = [
        *numbered_cases(20),
        make_case("X1", patient_id="X", voxel_hash="same"),
        make_case("X2", patient_id="X", voxel_hash="x2"),
        make_case("Y1", patient_id="Y", voxel_hash="y1"),
        make_case("Y2", patient_id="Y", voxel_hash="same"),
    ]

    fold = fold_of(make_folds(cases, FoldConfig()))

    assert len({fold[case_id] for case_id in ("X1", "X2", "Y1", "Y2")}) == 1


@pytest.mark.parametrize(
    ("cases", "match"),
    [
        ([], "0 patients cannot fill 5 folds"),
        ([make_case("A1", patient_id="A"), make_case("A2", patient_id="A")], "1 patient cannot"),
        (
            [*numbered_cases(3), *(make_case(name, voxel_hash="h") for name in "AB")],
            r"4 patients cannot fill 5 folds \(those who share .*fewer folds: --set folds\.n_folds",
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


@pytest.mark.parametrize("seed", range(2))
def test_the_notebook_scheme_is_that_of_the_notebook(seed):
    """Reference implementation of the notebook, on a table in the order of its rows."""
    cases = make_brats2020(seed)
    frame = pd.DataFrame(
        {"id": [c.case_id for c in cases], "age": [c.facts.age_years for c in cases]}
    )
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
        (
            numbered_cases(20),
            r"only 0 of 20 cases have an age.* survival_\*\.csv .*scheme=stratified",
        ),
        (numbered_cases(6, age_years=50.0), "only 6 of 6 cases have an age, too few of one decade"),
    ],
)
def test_the_notebook_scheme_is_refused_without_ages(cases, match):
    with pytest.raises(FoldError, match=match):
        make_folds(cases, NOTEBOOK)
