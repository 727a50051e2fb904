import gzip
import json
import logging
import os
import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

import brats_seg.cases.index as index_module
from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.case_table import read_index, summarise, write_index
from brats_seg.cases.index import Inspection, index_cases, inspect_case
from brats_seg.cases.nifti import read_volume
from brats_seg.errors import ConfigError, LayoutError
from brats_seg.labels import BRATS2023, BRATS2024, BRATS2024_PED, MSD
from tests.builders import make_label_map, make_volumes, write_case, write_nifti


def by_id(index: CaseIndex) -> dict[str, Case]:
    assert [case.case_id for case in index.cases] == sorted(case.case_id for case in index.cases)
    return {case.case_id: case for case in index.cases}


def count_inspections(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note the ids of the cases that are opened from now on."""
    opened: list[str] = []

    def inspect_and_note(case: Case) -> Inspection:
        opened.append(case.case_id)
        return inspect_case(case)

    monkeypatch.setattr(index_module, "inspect_case", inspect_and_note)
    return opened


def test_a_folder_of_scans_becomes_a_table_of_cases(brats_root: Path) -> None:
    index = index_cases(brats_root)

    assert index.root == brats_root
    assert len(index.trainable) == 6
    first, *_, last = index.cases
    assert (first.release, first.label_convention) == ("brats2021", "brats2017")
    assert str(first.t2f) == "BraTS2021_00000/BraTS2021_00000_flair.nii.gz"
    assert first.label_values == (0, 1, 2, 4)
    assert last.label_values == (0, 1, 2)
    assert first.tumour_ml == np.count_nonzero(make_label_map(seed=0)) / 1000
    assert len({case.voxel_hash for case in index.cases}) == 6


def test_every_release_gets_its_own_convention(tmp_path: Path) -> None:
    write_case(tmp_path / "HGG", "Brats18_TCIA01_201_1")
    write_case(tmp_path / "2020", "BraTS20_Training_001", suffix=".nii")
    write_case(tmp_path / "2023", "BraTS-GLI-00000-000", convention=BRATS2023, seed=1)
    write_case(tmp_path / "2023", "BraTS-MEN-00000-000", convention=BRATS2023, seed=2)
    write_case(tmp_path / "2024", "BraTS-GLI-00000-100", convention=BRATS2024, seed=3)
    write_case(tmp_path / "2024", "BraTS-PED-00000-000", convention=BRATS2024_PED, seed=4)
    write_case(tmp_path / "val", "BraTS-SSA-00000-000", labelled=False, seed=5)

    found = by_id(index_cases(tmp_path))

    assert {case_id: case.label_convention for case_id, case in found.items()} == {
        "Brats18_TCIA01_201_1": "brats2017",
        "BraTS20_Training_001": "brats2017",
        "BraTS-GLI-00000-000": "brats2023",
        "BraTS-MEN-00000-000": "brats2023",
        "BraTS-GLI-00000-100": "brats2024",
        "BraTS-PED-00000-000": "brats2024-ped",
        "BraTS-SSA-00000-000": "",
    }
    assert all(case.usable for case in found.values())
    assert found["Brats18_TCIA01_201_1"].grade == "HGG"


def test_the_decathlon_is_read_from_4d_files(tmp_path: Path) -> None:
    root = tmp_path / "Task01_BrainTumour"
    t1n, t1c, t2w, t2f = make_volumes().astype(np.float32)
    image = np.stack([t2f, t1n, t1c, t2w], axis=-1)
    write_nifti(root / "imagesTr" / "BRATS_001.nii.gz", image)
    write_nifti(root / "labelsTr" / "BRATS_001.nii.gz", make_label_map(convention=MSD))
    description = {
        "modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"},
        "labels": {"0": "background", "1": "edema", "2": "non-enhancing", "3": "enhancing"},
    }
    (root / "dataset.json").write_text(json.dumps(description))
    # the same scan in 3-D files, for comparison
    write_case(tmp_path, "BraTS2021_00000")

    found = by_id(index_cases(tmp_path))

    case, same = found["BRATS_001"], found["BraTS2021_00000"]
    assert case.usable
    assert (case.release, case.label_convention) == ("msd", "msd")
    assert case.voxel_hash == same.voxel_hash
    assert case.tumour_ml == same.tumour_ml
    for scan, expected in zip(case.images, make_volumes(), strict=True):
        volume = read_volume(tmp_path / scan.path, case_id="BRATS_001", volume=scan.volume)
        np.testing.assert_array_equal(volume.array, expected)


def test_float_label_maps_are_read(tmp_path: Path) -> None:
    folder = write_case(tmp_path)
    write_nifti(folder / "BraTS2021_00000_seg.nii.gz", make_label_map().astype(np.float64))

    assert index_cases(tmp_path).cases[0].label_values == (0, 1, 2, 4)


def test_case_355_is_trainable(tmp_path: Path) -> None:
    folder = write_case(tmp_path, "BraTS20_Training_355", suffix=".nii")
    seg = folder / "BraTS20_Training_355_seg.nii"
    seg.rename(folder / "W39_1998.09.19_Segm.nii")

    index = index_cases(tmp_path)

    [case] = index.trainable
    assert case.label_values == (0, 1, 2, 4)
    assert any("W39_1998.09.19_Segm.nii was taken" in line for line in summarise(index))


def test_one_bad_case_does_not_stop_the_others(brats_root: Path) -> None:
    path = brats_root / "BraTS2021_00003" / "BraTS2021_00003_t1.nii.gz"
    path.write_bytes(path.read_bytes()[:1000])

    index = index_cases(brats_root)

    assert len(index.cases) == 6
    assert len(index.usable) == 5
    assert by_id(index)["BraTS2021_00003"].problems == (
        "case BraTS2021_00003, file BraTS2021_00003_t1.nii.gz: found a gzip file that is cut off "
        "or damaged; expected a whole one. Copy or download the file again.",
    )


def test_a_label_value_outside_the_convention_is_a_problem(brats_root: Path) -> None:
    labels = make_label_map(seed=2)
    labels[0, 0, 0] = 9
    write_nifti(brats_root / "BraTS2021_00002" / "BraTS2021_00002_seg.nii.gz", labels)

    [bad] = [case for case in index_cases(brats_root).cases if not case.usable]

    assert bad.case_id == "BraTS2021_00002"
    assert "[9]" in bad.problems[0]


def test_a_named_convention_is_used(brats_root: Path) -> None:
    found = index_cases(brats_root, labels="brats2024-ped").cases

    assert {case.label_convention for case in found} == {"brats2024-ped"}
    with pytest.raises(ConfigError, match="label convention 'brats1999' is unknown"):
        index_cases(brats_root, labels="brats1999")


def test_copies_of_a_release_are_taken_once(brats_root: Path) -> None:
    shutil.copytree(brats_root / "BraTS2021_00001", brats_root / "z" / "BraTS2021_00001")

    found = by_id(index_cases(brats_root))

    assert len(found) == 6
    assert found["BraTS2021_00001"].remarks == (
        "the same scan is in z/BraTS2021_00001/, which was ignored",
    )


def test_another_scan_under_a_known_id_is_a_problem_of_both(brats_root: Path) -> None:
    write_case(brats_root / "z", "BraTS2021_00001", seed=99)

    bad = [case for case in index_cases(brats_root).cases if not case.usable]

    assert [case.case_id for case in bad] == ["BraTS2021_00001", "BraTS2021_00001"]


def test_the_same_scan_under_two_ids_has_one_hash(brats_root: Path) -> None:
    write_case(brats_root, "BraTS-GLI-00007-000", convention=BRATS2023, seed=3, suffix=".nii")

    found = by_id(index_cases(brats_root))

    assert found["BraTS-GLI-00007-000"].voxel_hash == found["BraTS2021_00003"].voxel_hash


@pytest.mark.parametrize("n_workers", [1, 3])
def test_threads_change_nothing(brats_root: Path, n_workers: int) -> None:
    assert index_cases(brats_root, n_workers=n_workers) == index_cases(brats_root)


def test_progress_counts_cases(brats_root: Path) -> None:
    seen = []

    def track(items: Iterable[Inspection], *, what: str, total: int) -> Iterable[Inspection]:
        seen.append((what, total))
        return items

    index_cases(brats_root, track=track)

    assert seen == [("index", 6)]


def test_an_error_in_a_thread_is_not_lost(
    brats_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(case: Case) -> Inspection:
        raise MemoryError(case.case_id)

    monkeypatch.setattr(index_module, "inspect_case", fail)

    with pytest.raises(MemoryError, match="BraTS2021_00000"):
        index_cases(brats_root, n_workers=2)


def test_only_changed_cases_are_opened_again(
    brats_root: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = index_cases(brats_root)
    write_index(first, tmp_path / "cases.csv")
    previous = read_index(tmp_path / "cases.csv", brats_root)
    opened = count_inspections(monkeypatch)

    assert index_cases(brats_root, previous=previous) == first
    assert opened == []

    write_nifti(
        brats_root / "BraTS2021_00004" / "BraTS2021_00004_seg.nii.gz", make_label_map(seed=77)
    )
    write_case(brats_root, "BraTS2021_00009", seed=9)
    later = index_cases(brats_root, previous=previous)

    assert opened == ["BraTS2021_00004", "BraTS2021_00009"]
    assert later == index_cases(brats_root)


def test_a_case_with_problems_is_opened_again(
    brats_root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (brats_root / "BraTS2021_00004" / "BraTS2021_00004_t2.nii.gz").write_bytes(b"")
    previous = index_cases(brats_root)
    opened = count_inspections(monkeypatch)

    assert index_cases(brats_root, previous=previous) == previous
    assert opened == ["BraTS2021_00004"]


def test_a_case_that_is_gone_is_forgotten(brats_root: Path) -> None:
    previous = index_cases(brats_root)
    shutil.rmtree(brats_root / "BraTS2021_00000")

    assert len(index_cases(brats_root, previous=previous).cases) == 5


def test_another_convention_reaches_known_cases(brats_root: Path) -> None:
    previous = index_cases(brats_root, labels="brats2024-ped")

    assert index_cases(brats_root, previous=previous) == index_cases(brats_root)


def test_listing_order_changes_nothing(brats_root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    expected = index_cases(brats_root)
    scandir = os.scandir
    monkeypatch.setattr(os, "scandir", lambda path: reversed(list(scandir(path))))

    assert index_cases(brats_root) == expected


def test_what_is_passed_over_is_logged(brats_root: Path, caplog: pytest.LogCaptureFixture) -> None:
    (brats_root / "BraTS2021_00495.tar").touch()
    write_nifti(brats_root / "predictions" / "BraTS2021_00000.nii.gz", make_label_map())

    with caplog.at_level(logging.WARNING):
        index = index_cases(brats_root)

    assert len(index.cases) == 6
    assert len(caplog.messages) == 2
    assert "archives are not read, such as BraTS2021_00495.tar" in caplog.text
    assert "such as predictions/BraTS2021_00000.nii.gz (1 in all)" in caplog.text


def test_names_that_are_no_utf_8_are_kept(tmp_path: Path) -> None:
    root = tmp_path / os.fsdecode(b"M\xfcller")
    write_case(root / "inside")
    shutil.move(root, tmp_path / "data" / root.name)

    index = index_cases(tmp_path / "data")
    write_index(index, tmp_path / "cases.csv")

    assert read_index(tmp_path / "cases.csv", tmp_path / "data") == index


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="holds no cases"):
        index_cases(tmp_path)


def test_every_kind_of_bad_file_is_named_with_its_case(tmp_path: Path) -> None:
    bad = {
        "t1.nii.gz": b"",
        "t1ce.nii.gz": b"this is a text file, not a scan" * 30,
        "t2.nii.gz": gzip.compress(bytes(2000))[:20],
    }
    folder = write_case(tmp_path)
    for name, content in bad.items():
        (folder / f"BraTS2021_00000_{name}").write_bytes(content)
    (folder / "BraTS2021_00000_flair.nii.gz").unlink()

    [case] = index_cases(tmp_path).cases

    assert len(case.problems) == 4
    assert all(problem.startswith("case BraTS2021_00000, file ") for problem in case.problems)
    assert [problem.split(": ")[0].split()[-1] for problem in case.problems] == [
        "BraTS2021_00000/",
        *(f"BraTS2021_00000_{name}" for name in bad),
    ]


@pytest.mark.real
def test_the_whole_of_the_real_data_is_indexed(
    real_data: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        index = index_cases(real_data, n_workers=2)

    found = by_id(index)
    assert len(index.cases) == 15
    assert len(index.trainable) == 12
    assert {case.label_convention for case in index.trainable} == {"brats2017"}
    assert sorted(case.case_id for case in index.cases if case.label is None) == [
        "BraTS-GLI-00001-000",
        "TCGA-FG-6692_atlas",
        "TCGA-FG-6692_native",
    ]
    # 224 voxels of enhancing tumour in one, none in the other
    assert found["BraTS2021_01476"].label_values == (0, 1, 2, 4)
    assert found["BraTS2021_01480"].label_values == (0, 1, 2)
    assert [case.case_id for case in index.cases if case.grade == "LGG"] == [
        "Brats18_TCIA10_637_1",
        "Brats18_TCIA13_623_1",
    ]
    assert found["TCGA-FG-6692_atlas"].usable
    # predictions and label maps of others are no cases
    assert len(caplog.messages) == 1
    assert "(12 in all)" in caplog.text


@pytest.mark.real
def test_a_scan_as_it_was_taken_is_refused_with_the_reason(real_data: Path) -> None:
    [case] = index_cases(real_data / "unlabelled" / "TCGA-FG-6692_native").cases

    [problem] = case.problems
    assert problem.startswith("case TCGA-FG-6692_native, file ")
    for part in ("224x256x26 voxels", "208x256x26 voxels", "256x224x26 voxels", "Register"):
        assert part in problem


@pytest.mark.real
def test_the_table_of_the_real_data_is_read_back(real_data: Path, tmp_path: Path) -> None:
    index = index_cases(real_data, n_workers=2)
    write_index(index, tmp_path / "cases.csv")

    previous = read_index(tmp_path / "cases.csv", real_data)

    assert previous == index
    assert index_cases(real_data, previous=previous) == index
