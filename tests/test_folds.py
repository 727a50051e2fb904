"""The fold table: schemes, leaks, files."""

import warnings
from collections import Counter

import numpy as np
import pandas as pd
import pytest
from sklearn.model_selection import StratifiedKFold

from brats_seg.cases import folds
from brats_seg.cases.case import Case
from brats_seg.config import FoldConfig
from brats_seg.errors import FoldError
from tests.builders import make_case


def make_table(*rows: tuple[str, str, int | None]) -> folds.FoldTable:
    made = (folds.FoldRow(case_id=c, patient_id=p, fold=f) for c, p, f in rows)
    return folds.FoldTable(rows=tuple(made))


TABLE_ROWS = (("B", "b", 1), ("A1", "a", 0), ("A2", "a", 0), ("C", "c", 2), ("D", "d", None))
TABLE = make_table(*TABLE_ROWS)
NOTEBOOK = FoldConfig(scheme="notebook")
ONE_PATIENT = "cases A1, C are scans of one patient, .* folds 0, 2"


def test_a_split_holds_one_fold_out():
    """A case without a fold is neither trained on nor validated, and does not leak."""
    splits = [TABLE.split(fold) for fold in range(3)]
    assert [split.validation for split in splits] == [("A1", "A2"), ("B",), ("C",)]
    assert [split.train for split in splits] == [("B", "C"), ("A1", "A2", "C"), ("A1", "A2", "B")]
    table = make_table(("A1", "a", 0), ("A2", "a", None), ("B", "b", 1))
    assert table.split(0).validation == ("A1",)


@pytest.mark.parametrize(
    ("rows", "fold", "match"),
    [
        *((TABLE_ROWS, n, rf"fold {n} is not .* which has folds 0, 1, 2$") for n in (3, -1)),
        ([("A", "a", 0), ("B", "b", 0)], 0, "only fold 0; expected another one"),
        ([("A1", "a", 2), ("B", "b", 1), ("A2", "a", 0)], 0, "patient a lies in folds 0, 2"),
        ([("A", "a", 0), ("A", "a", 0)], 0, "more than one row for case A; expected one"),
    ],
)
def test_a_fold_that_cannot_be_held_out_a_leak_and_a_repeated_case_are_refused(rows, fold, match):
    with pytest.raises(FoldError, match=match):
        make_table(*rows).split(fold)


def test_a_written_table_is_read_back(tmp_path):
    path = tmp_path / "runs" / "folds.csv"
    folds.write_folds(TABLE, path)
    assert folds.read_folds(path) == TABLE
    assert path.read_text().splitlines()[:2] == ["case_id,patient_id,fold", "B,b,1"]
    assert [file.name for file in path.parent.iterdir()] == ["folds.csv"]


def test_the_name_of_a_table_tells_its_settings(tmp_path):
    """A table of an earlier version is used where it has the number of folds."""
    stratified = [FoldConfig(n_folds=n) for n in (2, 3, 4)]
    # the scheme of the notebook has seven folds, whatever the settings say
    notebook = FoldConfig(scheme="notebook", n_folds=3)
    configs = [*stratified, FoldConfig(n_folds=3, seed=7), notebook]

    def names() -> list[str]:
        return [folds.fold_table_path(tmp_path, config).name for config in configs]

    later = ["folds-3-seed7.csv", "folds-notebook.csv"]
    assert names() == ["folds-2-seed55.csv", "folds-3-seed55.csv", "folds-4-seed55.csv", *later]
    folds.write_folds(TABLE, tmp_path / "folds.csv")
    of_three = "folds.csv", "folds-4-seed55.csv", "folds.csv"
    assert names() == ["folds-2-seed55.csv", *of_three, "folds-notebook.csv"]


def test_a_fold_is_checked_against_the_settings_until_there_is_a_table(tmp_path):
    folds.check_fold(4, tmp_path, FoldConfig())
    folds.check_fold(6, tmp_path, NOTEBOOK)
    for fold in (5, -1):
        with pytest.raises(FoldError, match=rf"there is no fold {fold}: .* 5 folds, 0 to 4"):
            folds.check_fold(fold, tmp_path, FoldConfig())
    folds.write_folds(make_table(("A", "a", 1), ("B", "b", 5)), tmp_path / "folds-5-seed55.csv")
    folds.check_fold(5, tmp_path, FoldConfig())
    with pytest.raises(FoldError, match="fold 0 is not in the fold table, which has folds 1, 5"):
        folds.check_fold(0, tmp_path, FoldConfig())


@pytest.mark.parametrize(
    ("content", "match"),
    [
        (b"", "is not a CSV table: .* expected the columns case_id, patient_id, fold"),
        (b"case_id,patient_id,fold\n", "has no rows"),
        (b"case_id,fold\nA,0\n", "has no column patient_id; .* expected the columns case_id, pat"),
        (b"case_id,patient_id,fold\n\nA,a\n", "the row of 'A' has fewer cells than the header"),
        (b"case_id,patient_id,fold\nA,a,first\n", "case A has fold 'first'; expected a number"),
        (b"case_id,patient_id,fold\nA,a,-1\n", "case A has fold '-1'"),
        (b"case_id,patient_id,fold\nA,a,1.0\n", r"case A has fold '1\.0'"),
        (b"case_id,patient_id,fold\nA,a,1000000000\n", "case A has fold '1000000000'"),
        (None, r"no fold table: .*folds\.csv does not exist.* Correct it, or remove it"),
        # a manual edit may separate the scans of a patient
        (b"case_id,patient_id,fold\nA,P3,1\nC,P3,2\nB,b,0", r"folds\.csv: patient P3 lies in"),
    ],
)
def test_a_file_that_is_no_fold_table_is_refused(tmp_path, content, match):
    path = tmp_path / "folds.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(FoldError, match=match):
        folds.read_folds(path)


def test_a_table_that_went_through_a_spreadsheet_is_read(tmp_path):
    path = tmp_path / "folds.csv"
    path.write_bytes(b"\xef\xbb\xbffold,case_id,x,patient_id\r\n0,A,,a\r\n1,B,x,b\r\n,C,,c\r\n")
    assert folds.read_folds(path) == make_table(("A", "a", 0), ("B", "b", 1), ("C", "c", None))


@pytest.mark.parametrize(
    ("case_ids", "values", "match"),
    [
        (["A1", "X"], {}, "no row for case X. Give each a row, with an empty fold to leave it out"),
        ([f"X{n}" for n in range(9)], {}, "no row for cases X0, X1, X2, X3, X4 and 4 more"),
        # a mapping of ids, or a duplicate of a scan, was added after the table was written
        (["A1", "C", "D"], {"patient_id": "a"}, ONE_PATIENT),
    ],
)
def test_a_table_must_cover_its_cases_without_a_leak(case_ids, values, match):
    # a table may hold more cases
    folds.check_covers(TABLE, [make_case(case_id) for case_id in ("A1", "B", "D")])
    with pytest.raises(FoldError, match=match):
        folds.check_covers(TABLE, [make_case(case_id, **values) for case_id in case_ids])


def test_the_split_of_a_run_is_read_as_it_was_written_and_nothing_else(tmp_path):
    path = tmp_path / "split.csv"
    with pytest.raises(FoldError, match=r"no split of a run: .*split\.csv does not exist"):
        folds.read_split(path)
    folds.write_split(TABLE.split(0), path)
    assert folds.read_split(path) == TABLE.split(0)
    header, *lines = path.read_text().splitlines()
    assert header == "case_id,role"
    path.write_text("\n".join([header, *lines[::-1]]))
    assert folds.read_split(path) == TABLE.split(0)
    for text, match in (
        ("", "no split of a run: .* expected the columns case_id, role"),
        ("case_id,fold\nA,0\n", "no split of a run: .* has no column role"),
        (
            "case_id,role\nB,train\nA,test\n",
            r"split\.csv: found a role that is not train or validation",
        ),
    ):
        path.write_text(text)
        with pytest.raises(FoldError, match=match):
            folds.read_split(path)


def numbered_cases(n_cases: int, **values: object) -> list[Case]:
    return [make_case(f"C{number:03d}", **values) for number in range(n_cases)]


def fold_of(table: folds.FoldTable) -> dict[str, int | None]:
    return {row.case_id: row.fold for row in table.rows}


def make_cohort(seed: int) -> list[Case]:
    """200 patients, some with several scans, a fifth of low grade, half of known age."""
    rng = np.random.default_rng(seed)
    cases = []
    for number in range(200):
        patient = {
            "patient_id": f"P{number:03d}",
            "grade": "HGG" if number % 5 else "LGG",
            "age_years": float(rng.uniform(20, 80)) if number % 2 else None,
        }
        n_scans = rng.integers(1, 4)
        cases += [make_case(f"P{number:03d}-{scan}", **patient) for scan in range(n_scans)]
    return cases


@pytest.mark.parametrize("seed", range(2))
def test_each_case_is_held_out_once_and_kinds_of_patients_are_spread_evenly(seed):
    cases = make_cohort(seed)
    shuffled = [cases[i] for i in np.random.default_rng(seed).permutation(len(cases))]
    table = folds.make_folds(cases, FoldConfig())
    assert [row.case_id for row in table.rows] == sorted(case.case_id for case in cases)
    assert table.folds == (0, 1, 2, 3, 4)
    assert len({(row.patient_id, row.fold) for row in table.rows}) == 200
    assert folds.make_folds(shuffled, FoldConfig()) == table
    assert folds.make_folds(cases, FoldConfig(seed=1)) != table
    fold = fold_of(table)
    grades = [[c for c in cases if c.facts.grade in kind] for kind in (("HGG",), ("LGG",))]
    for kind, difference in (
        *((grade, 3) for grade in (*grades, cases)),
        ([case for case in cases if (case.facts.age_years or 0) >= 60], 4),
    ):
        counts = Counter(fold[case.case_id] for case in kind)
        assert max(counts.values()) - min(counts.values()) <= difference


def test_a_patient_with_many_scans_does_not_drive_a_kind_of_patient_out_of_its_fold():
    often = [make_case(f"A-{scan:02d}", patient_id="A", grade="HGG") for scan in range(30)]
    cases = numbered_cases(10, grade="LGG")
    fold = fold_of(folds.make_folds([*often, *cases], FoldConfig()))
    assert Counter(fold[case.case_id] for case in cases) == dict.fromkeys(range(5), 2)
    # and of its own kind, those with few scans fill the other folds
    cases = [*often[:4], *numbered_cases(4, grade="HGG")]
    assert Counter(fold_of(folds.make_folds(cases, FoldConfig(n_folds=2))).values()) == {0: 4, 1: 4}


def test_the_grade_of_a_patient_may_be_known_of_one_scan_alone():
    first = [make_case(f"C{n}-1", patient_id=f"C{n}") for n in range(10)]
    graded = [make_case(f"C{n}-2", patient_id=f"C{n}", grade="HL"[n % 2] + "GG") for n in range(10)]
    fold = fold_of(folds.make_folds([*first, *graded], FoldConfig()))
    for of_grade in (graded[::2], graded[1::2]):
        assert sorted(fold[case.case_id] for case in of_grade) == [0, 1, 2, 3, 4]


def test_without_grade_and_age_the_volume_of_the_tumour_is_spread():
    """Of a scan without a label map the volume is not known."""
    cases = [make_case(f"C{n:03d}", tumour_ml=float((n * 37) % 100)) for n in range(100)]
    others = [make_case(f"{case.case_id}-2", patient_id=case.patient_id) for case in cases]
    fold = fold_of(folds.make_folds([*cases, *others], FoldConfig()))
    by_volume = sorted(cases, key=lambda case: case.facts.tumour_ml)
    for start in range(0, 100, 5):
        neighbours = by_volume[start : start + 5]
        assert sorted(fold[case.case_id] for case in neighbours) == [0, 1, 2, 3, 4]


@pytest.mark.parametrize("n_folds", [2, 3, 5, 9])
@pytest.mark.parametrize(
    "cases",
    [
        # all different, so that every stratum has one patient
        [make_case(f"C{n}", grade="HGG", age_years=10.0 * n) for n in range(9)],
        *(numbered_cases(9, **known) for known in ({"voxel_hash": ""}, {"grade": "HGG"})),
        *(numbered_cases(9, **known) for known in ({"age_years": 50.0}, {"tumour_ml": 3.0})),
    ],
    ids=["strata of one", "nothing known", "grade", "age", "volume"],
)
def test_few_patients_fill_every_fold(n_folds, cases):
    counts = Counter(row.fold for row in folds.make_folds(cases, FoldConfig(n_folds=n_folds)).rows)
    assert counts.keys() == set(range(n_folds))
    assert max(counts.values()) - min(counts.values()) <= 1


@pytest.mark.parametrize(
    ("cases", "config", "match"),
    [
        ([], FoldConfig(), "0 patients cannot fill 5 folds"),
        (numbered_cases(2, patient_id="A"), FoldConfig(), "1 patient cannot"),
        (
            [*numbered_cases(3), *numbered_cases(2, patient_id="A")],
            FoldConfig(),
            r"4 patients cannot fill 5 folds \(those who share .*fewer folds: --set folds\.n_folds",
        ),
        (numbered_cases(20), NOTEBOOK, r"only 0 of 20 cases have an age.* survival_\*\.csv"),
        (numbered_cases(6, age_years=50.0), NOTEBOOK, "only 6 of 6 .* too few of one decade"),
    ],
)
def test_too_few_patients_or_ages_are_refused_with_what_to_change(cases, config, match):
    with pytest.raises(FoldError, match=match):
        folds.make_folds(cases, config)


@pytest.mark.parametrize("seed", range(2))
def test_the_notebook_scheme_is_that_of_the_notebook(seed):
    """Reference implementation of the notebook, for 369 cases of which 236 have an age."""
    rng = np.random.default_rng(seed)
    ids = [f"BraTS20_Training_{number:03d}" for number in range(1, 370)]
    # a few very young and very old
    ages = dict(zip(rng.permutation(ids), rng.normal(61, 12, 236).clip(18, 86), strict=False))
    frame = pd.DataFrame({"id": ids, "age": [ages.get(case_id) for case_id in ids]}).dropna()
    frame = frame[frame["id"] != "BraTS20_Training_355"].reset_index(drop=True)
    splitter = StratifiedKFold(n_splits=7, shuffle=True, random_state=55)
    expected = dict.fromkeys(ids)
    with warnings.catch_warnings(action="ignore"):
        splits = list(splitter.split(frame, frame["age"] // 10 * 10))
    for fold, (_, held_out) in enumerate(splits):
        expected |= dict.fromkeys(frame["id"].iloc[held_out], fold)
    table = folds.make_folds([make_case(n, age_years=ages.get(n)) for n in ids[::-1]], NOTEBOOK)
    assert fold_of(table) == expected
    assert expected["BraTS20_Training_355"] is None
    assert table.folds == tuple(range(7))


def test_the_notebook_scheme_does_not_part_a_patient():
    cases = [
        make_case(f"P{n:02d}-{scan}", patient_id=f"P{n:02d}", age_years=50.0 + n % 5)
        for n in range(30)
        for scan in range(2)
    ]
    table = folds.make_folds(cases, NOTEBOOK)
    assert len({(row.patient_id, row.fold) for row in table.rows}) == 30
    assert len(table.folds) == 7
    # seven of one decade are enough
    assert len(folds.make_folds(numbered_cases(7, age_years=50.0), NOTEBOOK).folds) == 7
