"""Indexing a data folder: inspection, label conventions, duplicates, and the table of cases."""

import logging
import os
import re
import shutil
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
import pytest

import brats_seg.cases.index as index_module
from brats_seg.cases.case import Case, CaseIndex, ScanFile, load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.index import (
    _COLUMNS,
    index_cases,
    inspect_case,
    read_index,
    summarise,
    with_conventions,
    without_duplicates,
    write_index,
)
from brats_seg.cases.layouts import LABEL
from brats_seg.cases.nifti import read_label_map
from brats_seg.cases.releases import parse_case_id
from brats_seg.errors import ConfigError, UsageError
from brats_seg.labels import BRATS2024_PED, MODALITIES, MSD, LabelConvention
from tests import builders
from tests.check_builders import PHANTOM_AFFINE, renumbered, write_clear_phantoms
from tests.training_builders import Recorder

CASE_ID = "BraTS2021_00000"


@pytest.fixture
def inspections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    ids: list[str] = []

    def inspect_and_note(case: Case) -> Case:
        ids.append(case.case_id)
        return inspect_case(case)

    monkeypatch.setattr(index_module, "inspect_case", inspect_and_note)
    return ids


def test_a_folder_of_scans_becomes_a_table_of_cases(tiny_scans: Path) -> None:
    index = index_cases(tiny_scans)
    assert (index.root, len(index.trainable)) == (tiny_scans, 6)
    first, *_, last = index.cases
    assert (first.release, first.convention) == ("brats2021", "brats2017")
    assert str(first.files["t2f"]) == "BraTS2021_00000/BraTS2021_00000_flair.nii.gz"
    assert (first.label_values, last.label_values) == ((0, 1, 2, 4), (0, 1, 2))
    assert first.facts.tumour_ml == np.count_nonzero(builders.make_label_map(seed=0)) / 1000
    assert len({case.facts.voxel_hash for case in index.cases}) == 6


def test_copies_of_a_release_are_taken_once(brats_root: Path) -> None:
    shutil.copytree(brats_root / "BraTS2021_00001", brats_root / "z" / "BraTS2021_00001")
    cases = index_cases(brats_root).cases
    assert len(cases) == 6
    ignored = "the same scan is in z/BraTS2021_00001/, which was ignored"
    assert [case.remarks for case in cases] == [(), (ignored,), *[()] * 4]


def test_threads_change_nothing_and_progress_counts_cases(tiny_scans: Path) -> None:
    track = Recorder()
    assert index_cases(tiny_scans, n_workers=3, track=track) == index_cases(tiny_scans, n_workers=1)
    assert track.works == [("index", 6)]
    with pytest.raises(ConfigError, match="label convention 'brats1999' is unknown"):
        index_cases(tiny_scans / "nowhere", labels="brats1999")


def test_changed_cases_are_reread(brats_root: Path, tmp_path: Path, inspections: list[str]) -> None:
    (brats_root / "BraTS2021_00002" / "BraTS2021_00002_t2.nii.gz").write_bytes(b"")
    first = index_cases(brats_root)
    write_index(first, tmp_path / "cases.csv")
    previous = read_index(tmp_path / "cases.csv", brats_root)
    inspections.clear()
    assert index_cases(brats_root, previous=previous) == first
    assert inspections == ["BraTS2021_00002"]
    inspections.clear()
    label_path = brats_root / "BraTS2021_00004" / "BraTS2021_00004_seg.nii.gz"
    builders.write_nifti(label_path, builders.make_label_map(seed=77))
    builders.write_case(brats_root, "BraTS2021_00009", seed=9)
    later = index_cases(brats_root, previous=previous)
    assert inspections == ["BraTS2021_00002", "BraTS2021_00004", "BraTS2021_00009"]
    assert later == index_cases(brats_root)
    shutil.rmtree(brats_root / "BraTS2021_00000")
    assert len(index_cases(brats_root, previous=previous).cases) == 6


def test_another_convention_reaches_known_cases(tiny_scans: Path) -> None:
    previous = index_cases(tiny_scans, labels="brats2024-ped")
    assert {case.convention for case in previous.cases} == {"brats2024-ped"}
    assert index_cases(tiny_scans, previous=previous) == index_cases(tiny_scans)


@pytest.mark.parametrize(("convention", "n_cases"), [(MSD, 2), (BRATS2024_PED, 4)])
def test_wrong_numbering_refused(tmp_path: Path, convention: LabelConvention, n_cases: int) -> None:
    write_clear_phantoms(tmp_path, n_cases)
    for path in tmp_path.glob("*/*_seg.nii.gz"):
        label_map = read_label_map(path, case_id="").array
        builders.write_nifti(path, renumbered(label_map, convention), PHANTOM_AFFINE)
    for case in (cases := index_cases(tmp_path).cases):
        [problem] = case.problems
        assert f"{convention.name} fits. Name the right one, such as --convention" in problem
    assert len(cases) == n_cases
    # a numbering that a person named is no problem
    for name in ("msd", "brats2023") if convention is MSD else ("brats2024-ped",):
        cases = index_cases(tmp_path, labels=name).cases
        remarks = [remark for case in cases for remark in case.remarks]
        assert all(case.usable for case in cases)
        is_doubted = any("the labels do not look like brats2023" in text for text in remarks)
        assert is_doubted == (name == "brats2023")


def test_a_mix_up_of_modalities_is_a_remark_that_is_kept(tmp_path: Path) -> None:
    write_clear_phantoms(tmp_path / "data", 1)
    folder = tmp_path / "data" / CASE_ID
    t1, flair = folder / f"{CASE_ID}_t1.nii.gz", folder / f"{CASE_ID}_flair.nii.gz"
    t1.rename(folder / "t1")
    flair.rename(t1)
    (folder / "t1").rename(flair)
    index = index_cases(tmp_path / "data")
    [case] = index.cases
    assert case.remarks[0] == "modalities may be mixed up: t1n looks like t2f, t2f looks like t1n"
    write_index(index, tmp_path / "cases.csv")
    previous = read_index(tmp_path / "cases.csv", tmp_path / "data")
    assert index_cases(tmp_path / "data", previous=previous) == index
    assert any("may be mixed up" in line for line in summarise(index))
    assert load_case(case).case.remarks == case.remarks


def inspected(root: Path) -> Case:
    [case] = find_cases(root).cases
    return inspect_case(case)


def replaced(root: Path, suffix: str, array: npt.NDArray[np.generic]) -> Path:
    return builders.write_nifti(root / CASE_ID / f"{CASE_ID}_{suffix}.nii.gz", array)


@pytest.mark.parametrize(
    ("labels", "litres"),
    # the resection cavity of 2024 is no tumour, unlike the fourth tissue of the children's task
    [("brats2017", 7), ("brats2023", 6), ("brats2024", 6), ("brats2024-ped", 10)],
)
def test_the_tumour_volume_is_that_of_the_whole_tumour(labels: str, litres: int) -> None:
    [case] = with_conventions([listed(values=(0, 1, 2, 3, 4))], labels)
    assert case.facts.tumour_ml == litres * 1000
    assert (case.convention, case.label_values) == (labels, (0, 1, 2, 3, 4))


def test_a_scan_has_one_hash_however_it_is_stored_and_others_another(tmp_path: Path) -> None:
    builders.write_case(tmp_path, CASE_ID)
    array = builders.make_volumes()[0]

    def hash_of(array: npt.NDArray[np.generic]) -> str:
        replaced(tmp_path, "t1", np.ascontiguousarray(array))
        return inspected(tmp_path).facts.voxel_hash

    changed = array.copy()
    changed[12, 12, 8] += 1
    # the same bytes along other axes
    turned = array.reshape((16, 24, 24), order="F")
    hashes = {hash_of(one) for one in (changed, array * 200.0, array[::-1], turned)}
    assert len(hashes) == 4
    types = ("f4", "f8", "i4", ">i2")
    for whole, dtypes in (
        (array, types),
        (array * np.float32(100), types[:3]),
        (array / np.float32(7), types[:2]),
    ):
        # negative zeros too
        stored = [np.where(whole == 0, -0.0, whole).astype(dtype) for dtype in dtypes]
        [same] = {hash_of(one) for one in (whole, *stored)}
        assert same not in hashes
        hashes.add(same)


def test_all_problems_of_a_case_are_reported_together(tmp_path: Path) -> None:
    folder = builders.write_case(tmp_path, CASE_ID)
    for suffix in ("t1", "t1ce"):
        (folder / f"{CASE_ID}_{suffix}.nii.gz").write_bytes(b"")
    replaced(tmp_path, "flair", builders.make_volumes()[3][:10])
    replaced(tmp_path, "seg", builders.make_label_map() * 0.5)
    found = inspected(tmp_path)
    names = [problem.split(".nii")[0].split("_")[-1] for problem in found.problems]
    assert names == ["t1", "t1ce", "seg", "flair"]
    assert (found.facts.voxel_hash, found.label_values) == ("", ())


def listed(
    case_id: str = CASE_ID, values: Sequence[int] = (), folder: str = "data", **known: object
) -> Case:
    """Return an inspected case in which each label value takes as many litres as the value."""
    release, patient_id = parse_case_id(case_id)
    kinds = (*MODALITIES, LABEL) if values or "tumour_ml" in known else MODALITIES
    files = {kind: ScanFile(path=Path(folder, f"{kind}.nii.gz")) for kind in kinds}
    usual = {"patient_id": patient_id, "release": release, "voxel_mm3": 1e6, "voxel_hash": "aaaa"}
    usual |= {"files": files, "label_voxels": tuple((value, value) for value in values)}
    return builders.make_case(case_id, **usual | known)


def explained(*cases: Case) -> tuple[Case, ...]:
    return tuple(with_conventions(cases, ""))


def test_cases_of_a_release_share_their_convention() -> None:
    cases = explained(
        listed("BraTS-GLI-00000-100", (0, 1, 2)),
        listed("BraTS-GLI-00001-100", (0, 2, 4)),
        listed("BraTS-GLI-00002-101", (0, 1, 2, 3)),
        # scans of unknown releases share one with those of their folder
        listed("smith", (0, 1, 2, 3), "one/smith"),
        listed("jones", (0, 1, 2, 4), "two/jones"),
        listed("BraTS-PED-00000-000", (0, 1, 2, 4)),
        listed("BraTS-SSA-00000-000"),
        *(listed(f"sub-0{n}", (0, 1, 2, n), f"sub-0{n}") for n in (3, 4)),
        listed("x", (0, 1, 2, 3), "a/imagesTr", release="msd", convention="msd"),
        listed("y", (0, 1, 2, 4), "b/imagesTr", release="msd", convention="brats2017"),
    )
    # the second alone would be read as of 2017, with the cavity for enhancing tumour
    expected = [*["brats2024"] * 3, "brats2023", "brats2017", "brats2024-ped", ""]
    expected += ["brats2023", "brats2017", "msd", "brats2017"]
    assert [case.convention for case in cases] == expected
    assert cases[1].facts.tumour_ml == 2000


def test_a_value_outside_the_convention_is_a_problem_of_its_case() -> None:
    good, bad = explained(listed(values=(0, 1, 2, 4)), listed("BraTS2021_00001", (0, 1, 2, 4, 7)))
    assert good.usable
    assert re.match("case BraTS2021_00001, .* label values .7.; .* --convention", bad.problems[0])


def test_a_named_convention_goes_before_all_others() -> None:
    declared = listed("BRATS_001", (0, 1, 2, 3), convention="brats2023")
    cases = [listed(values=(0, 1, 2, 3)), listed("BraTS2021_00001", (0, 1, 2, 4)), declared]
    named = with_conventions(cases, "msd")
    assert [case.convention for case in named] == ["msd"] * 3
    assert [case.usable for case in named] == [True, False, True]


def test_a_guessed_convention_and_an_empty_label_map_have_a_remark() -> None:
    values = (0, 1, 2, 3)
    cases = explained(
        *(listed(name, values) for name in ("smith", "jones")),
        *(listed(f"BraTS-PED-0000{number}-000", values) for number in range(2)),
        *(listed(f"BraTS-MEN-0000{number}-000", values) for number in range(2)),
        listed("BraTS-SSA-00000-000", values),
        listed("BRATS_001", values, "Task01/imagesTr", convention="msd"),
        listed("BraTS2021_00000", (0,)),
    )
    guess = "the label values 0 1 2 3 were read as brats2023, but the names do not confirm it"
    remarks = [remark.split(":")[0] for case in cases for remark in case.remarks or ("",)]
    alone = "the scan does not show whether the numbering is brats2023 or msd or brats2024-ped"
    assert remarks == [*[guess] * 4, "", "", alone, "", "the label map holds no tumour"]
    assert cases[7].convention == "msd"
    assert (cases[8].usable, cases[8].facts.tumour_ml) == (True, 0)


def test_of_equal_copies_the_first_is_kept_preferably_a_labelled_one() -> None:
    c, other, a, b = (listed(folder=name) for name in "cxab")
    # the same scan under two ids is a matter of folds
    other = replace(other, case_id="other")
    [kept, same] = without_duplicates([c, other, a, b])
    assert without_duplicates([b, a, other, c]) == (kept, same)
    [labelled] = without_duplicates([a, listed(folder="b", tumour_ml=1.5)])
    assert same == other
    assert (str(kept.files["t1n"]), kept.usable) == ("a/t1n.nii.gz", True)
    assert kept.remarks == ("the same scan is in b/ and c/, which was ignored",)
    assert str(labelled.label) == "b/label.nii.gz"


@pytest.mark.parametrize(
    ("first", "second", "what"),
    [
        ({"voxel_hash": "bbbb"}, {}, "another scan"),
        ({"tumour_ml": 1.5}, {"tumour_ml": 1.6}, "the scan with another label map"),
    ],
)
def test_equal_ids_refused(first: dict[str, object], second: dict[str, object], what: str) -> None:
    a, b = without_duplicates([listed(folder="b", **first), listed(folder="a", **second)])
    assert f"case {CASE_ID}, file a/: found {what} of the same id in b/; " in a.problems[0]
    assert f"file b/: found {what} of the same id in a/" in b.problems[0]
    # a broken copy stays listed beside a sound one
    cases = without_duplicates([listed(folder="b"), listed(folder="a", problems=("cut off",))])
    assert [case.problems for case in cases] == [("cut off",), ()]


def test_masks_of_the_whole_tumour_are_refused_as_label_maps(tmp_path: Path) -> None:
    """Read as three tissues, they would teach a network that all of a tumour is its core."""
    for number in range(2):
        folder = builders.write_case(tmp_path, f"smith{number}", seed=number)
        mask = np.minimum(builders.make_label_map(seed=number), 1)
        builders.write_nifti(folder / f"smith{number}_seg.nii.gz", mask)
    cases = index_cases(tmp_path).cases
    named = index_cases(tmp_path, labels="brats2023").cases
    assert "_seg.nii.gz: found label 1 alone, as in all 2 label maps" in cases[0].problems[0]
    assert all(case.usable for case in named)


COLUMNS = list(_COLUMNS)

FULL = builders.make_case(
    "BRATS_001",
    patient_id="001",
    release="msd",
    convention="msd",
    files={
        "t1n": ScanFile(path=Path("a, b/BRATS_001.nii.gz"), volume=1),
        "t1c": ScanFile(path=Path(os.fsdecode(b"no UTF-8/M\xfcller.nii"))),
        "t2w": ScanFile(path=Path("number #3/t2.nii")),
        "t2f": ScanFile(path=Path('"quoted"/flair.nii')),
        LABEL: ScanFile(path=Path("x/seg.nii.gz")),
    },
    problems=("case BRATS_001, file x: found a; expected b. Try c.", 'another, "quoted" one'),
    remarks=("one", "two\nlines"),
    scan_remarks=("one",),
    label_voxels=((0, 1), (3, 20)),
    voxel_mm3=0.1,
    outermost_label=1,
    enhancing_label=3,
    grade="HGG",
    age_years=61.123287671232876,
    tumour_ml=0.1 + 0.2,
    near_copies=("a", "b"),
    fingerprint="12e5".zfill(272),
    voxel_hash="0012",
    files_key="12e5",
)
BARE = Case(case_id="007", patient_id="007", release="unknown")


def test_what_is_written_is_read_back_and_can_be_read_by_a_person(tmp_path: Path) -> None:
    cases = tuple(replace(case, root=tmp_path) for case in (FULL, BARE))
    index = CaseIndex(root=tmp_path, cases=cases)
    write_index(index, tmp_path / "cases.csv")
    assert read_index(tmp_path / "cases.csv", tmp_path) == index
    table = pd.read_csv(tmp_path / "cases.csv", dtype=str, encoding_errors="surrogateescape")
    row = table.iloc[0]
    assert (row["t1n"], row["label"]) == ("a, b/BRATS_001.nii.gz#1", "x/seg.nii.gz")
    assert row["label_voxels"] == "0:1 3:20"


HEADER = ",".join(COLUMNS)


def bad_row(bad: str) -> bytes:
    row = ",".join("old" if name == bad else "" for name in COLUMNS)
    return f"{HEADER}\n{row}\n".encode()


@pytest.mark.parametrize(
    ("content", "found"),
    [
        (b"case_id,fold\na,1\n", "no column patient_id, release"),
        (b"", "is not a CSV table: No columns"),
        (f"{HEADER}\na,b\n".encode(), "is not a CSV table: the row of 'a' has fewer cells"),
        (f"{HEADER}\n{',' * len(COLUMNS)}x\n".encode(), "is not a CSV table: a row has more cells"),
        (bad_row("voxel_mm3"), "voxel_mm3: expected a valid number.*'old'"),
        (bad_row("fingerprint"), "fingerprint: String should match.*'old'"),
        (b"\xff\xfe\x00binary", "is not a CSV table: it holds NUL characters"),
        (None, "does not exist"),
    ],
)
def test_another_table_is_refused(tmp_path: Path, content: bytes | None, found: str) -> None:
    path = tmp_path / "cases.csv"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(UsageError, match=rf"cases\.csv .*{found}.*Expected a case table .*Move"):
        read_index(path, tmp_path)


@pytest.mark.real
@pytest.mark.slow
def test_real_data_index(real_data: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        index = index_cases(real_data, n_workers=2)
    cases = {case.case_id: case for case in index.cases}
    assert [*cases] == sorted(cases)
    assert (len(index.cases), len(index.trainable)) == (15, 12)
    assert {case.convention for case in index.trainable} == {"brats2017"}
    atlas, native = "TCGA-FG-6692_atlas", "TCGA-FG-6692_native"
    unlabelled = [case_id for case_id, case in cases.items() if case.label is None]
    assert unlabelled == ["BraTS-GLI-00001-000", atlas, native]
    # 224 voxels of enhancing tumour in one, none in the other
    assert cases["BraTS2021_01476"].label_values == (0, 1, 2, 4)
    assert cases["BraTS2021_01480"].label_values == (0, 1, 2)
    low_grade = [case_id for case_id, case in cases.items() if case.facts.grade == "LGG"]
    assert low_grade == ["Brats18_TCIA10_637_1", "Brats18_TCIA13_623_1"]
    assert cases[atlas].usable
    [problem] = cases[native].problems
    for part in ("224x256x26 voxels", "208x256x26 voxels", "256x224x26 voxels", "Register"):
        assert part in problem
    # predictions and label maps of others are no cases
    assert ["(12 in all)" in message for message in caplog.messages] == [True]
    write_index(index, tmp_path / "cases.csv")
    previous = read_index(tmp_path / "cases.csv", real_data)
    assert previous == index
    assert index_cases(real_data, previous=previous) == index
