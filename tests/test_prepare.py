import os
import shutil
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.case import CaseIndex
from brats_seg.cases.index import index_cases
from brats_seg.cases.nifti import read_label_map
from brats_seg.config import StoreConfig
from brats_seg.data import prepare as prepare_module
from brats_seg.data.store import open_case, read_case_manifest, verify_cases
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.files import locked, reading
from brats_seg.labels import BRATS2017, BRATS2024, regions_of
from brats_seg.voxels.box import Box
from tests.builders import write_case, write_nifti
from tests.prepared import prepare, prepare_index
from tests.test_files import wait_for

IDS = ("BraTS2021_00000", "BraTS2021_00001", "BraTS2021_00002")

COARSE = StoreConfig(spacing_mm=(2.0, 2.0, 2.0))


@pytest.fixture
def root(tmp_path: Path, tiny_scans: Path) -> Path:
    for case_id in IDS:
        shutil.copytree(tiny_scans / case_id, tmp_path / "scans" / case_id)
    return tmp_path / "scans"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def stamps(folder: Path) -> list[tuple[int, int]]:
    """Return inode and time of change of each image, which differ if it is written again."""
    found = [next((folder / case_id).glob("image.*")).stat() for case_id in IDS]
    return [(status.st_ino, status.st_mtime_ns) for status in found]


def rewritten(folder: Path, before: list[tuple[int, int]]) -> list[str]:
    pairs = zip(IDS, before, stamps(folder), strict=True)
    return [case_id for case_id, old, new in pairs if old != new]


def voxels(folder: Path, case_id: str) -> tuple[np.ndarray, np.ndarray]:
    case = open_case(folder, case_id)
    whole = Box.at((0, 0, 0), case.shape)
    return whole.read(case.image), whole.read(case.labels)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def change_voxel(root: Path) -> None:
    path = root / IDS[1] / f"{IDS[1]}_seg.nii.gz"
    labels = read_label_map(path, case_id="").array.copy()
    labels[12, 12, 8] = 2 if labels[12, 12, 8] != 2 else 1
    write_nifti(path, labels)


def swap_alike(root: Path) -> None:
    one, other = (root / IDS[1] / f"{IDS[1]}_{name}.nii.gz" for name in ("t1", "t2"))
    spare = one.rename(one.with_name("spare"))
    other.rename(one)
    spare.rename(other)


def test_processes_and_order_change_nothing(root: Path, tmp_path: Path) -> None:
    prepare(root, tmp_path / "one")
    index = index_cases(root)
    turned = CaseIndex(root=root, cases=index.cases[::-1])
    prepare_index(turned, tmp_path / "two", n_workers=2)
    written = {"image.npy", "labels.npy", "foreground.npy", "case.json"}
    for case_id in IDS:
        assert {path.name for path in (tmp_path / "one" / case_id).iterdir()} == written
        for name in written:
            one, two = (tmp_path / store / case_id / name for store in ("one", "two"))
            assert one.read_bytes() == two.read_bytes()


def test_a_touched_scan_is_compared_once_and_kept(root, folder, monkeypatch):
    """Also while a run is trained on the cases, and where no space is left."""
    times = []
    for _ in range(4):
        with reading(folder):
            assert prepare(root, folder) == ()
        times.append((folder / IDS[1] / "case.json").stat().st_mtime_ns)
        if len(times) == 2:
            before = stamps(folder)
            touch(root / IDS[1] / f"{IDS[1]}_t1ce.nii.gz")
            monkeypatch.setattr(prepare_module, "free_bytes", lambda _: 0)
    assert rewritten(folder, before) == []
    assert times[0] == times[1] < times[2] == times[3]


@pytest.mark.parametrize("change", [change_voxel, swap_alike])
def test_changes_are_prepared(root: Path, folder: Path, change: Callable[[Path], None]) -> None:
    prepare(root, folder)
    before, voxels_before = stamps(folder), voxels(folder, IDS[1])
    change(root)
    prepare(root, folder)
    assert rewritten(folder, before) == [IDS[1]]
    assert not all(map(np.array_equal, voxels(folder, IDS[1]), voxels_before))


def test_another_spacing_or_convention_prepares_again(root: Path, folder: Path) -> None:
    cases, stages = index_cases(root).cases, []
    of_2024 = [replace(case, convention="brats2024") for case in cases]
    for some, config in ((cases, StoreConfig()), (cases, COARSE), (of_2024, COARSE)):
        prepare_module.prepare_cases(some, folder, config)
        stages += stamps(folder)
        spacing_mm = read_case_manifest(folder, IDS[0]).spacing_mm
        assert spacing_mm == (config.spacing_mm or (1.0, 1.0, 1.0))
    assert open_case(folder, IDS[0]).convention == BRATS2024
    assert len(set(stages)) == 9


@pytest.mark.parametrize("name", ["image.npy", "labels.npy", "foreground.npy", "case.json"])
def test_damaged_cases_are_prepared_again_when_asked_for(root, folder, name, caplog):
    """A damaged manifest is as good as none: the case is prepared again without being asked."""
    prepare(root, folder)
    damaged = folder / IDS[1] / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-20] + b"\x01" * 20)
    before = stamps(folder)
    prepare(root, folder)
    assert rewritten(folder, before) == ([IDS[1]] if name == "case.json" else [])
    cases = index_cases(root).cases
    assert prepare_module.prepare_cases(cases, folder, StoreConfig(), repair=True) == ()
    assert damaged.read_bytes() == content
    assert verify_cases(IDS, folder) == ()
    assert rewritten(folder, before) == [IDS[1]]
    assert ("the file is damaged" in caplog.text) == (name != "case.json")


def test_a_touched_scan_does_not_hide_damage(root: Path, folder: Path) -> None:
    """The manifest is written again, with the check sums of the files as they were prepared."""
    prepare(root, folder)
    damaged = folder / IDS[1] / "labels.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    for repair, found in ((False, [IDS[1]]), (True, [])):
        touch(root / IDS[1] / f"{IDS[1]}_t1ce.nii.gz")
        prepare_module.prepare_cases(index_cases(root).cases, folder, StoreConfig(), repair=repair)
        assert [error.case_id for error in verify_cases(IDS, folder)] == found


@pytest.mark.parametrize("n_workers", [0, 2])
def test_bad_cases_are_reported_in_order(root: Path, folder: Path, n_workers: int) -> None:
    index = index_cases(root)
    packed = root / IDS[0] / f"{IDS[0]}_t2.nii.gz"
    packed.write_bytes(packed.read_bytes()[:-50])
    (root / IDS[2] / f"{IDS[2]}_flair.nii.gz").unlink()
    failures = prepare_index(index, folder, n_workers=n_workers)
    assert [failure.case_id for failure in failures] == [IDS[0], IDS[2]]
    assert f"{IDS[0]}_t2.nii.gz" in failures[0].message
    assert "cannot be read (No such file or directory)" in failures[1].message
    assert not (folder / IDS[0]).exists()
    open_case(folder, IDS[1])


def test_a_full_disk_is_refused(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prepare_module, "free_bytes", lambda _: 10**5)
    with pytest.raises(EnvironmentalError, match="preparing 3 cases needs about"):
        prepare(root, folder)
    assert [path for path in folder.iterdir() if path.is_dir()] == []


def test_a_second_process_waits(root: Path, folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    folder.mkdir()
    caplog.set_level("INFO")
    second = threading.Thread(target=prepare, args=(root, folder))
    with locked(folder / prepare_module._LOCK_NAME):
        second.start()
        wait_for(lambda: "waiting for another process" in caplog.text)
        assert not (folder / IDS[0]).exists()
    second.join()
    open_case(folder, IDS[0])


def test_large_regions_are_thinned_evenly() -> None:
    labels = np.zeros((30, 30, 30), dtype=np.uint8)
    labels[5:25, 5:25, 5:25] = 2
    labels[6, 7, 8] = 4
    rows = prepare_module.select_foreground(labels, BRATS2017)
    wt, tc, et = (rows[rows[:, 0] == region, 1:] for region in range(3))
    assert len(wt) == prepare_module.FOREGROUND_VOXELS
    assert len({tuple(voxel) for voxel in wt.tolist()}) == prepare_module.FOREGROUND_VOXELS
    assert regions_of(labels, BRATS2017)[0][tuple(wt.T)].all()
    np.testing.assert_allclose(wt.mean(axis=0), 14.5, atol=0.1)
    assert tc.tolist() == et.tolist() == [[6, 7, 8]]


@pytest.mark.parametrize("spacing_mm", [1, 2])
def test_of_large_volumes_a_brain_is_counted(root: Path, folder: Path, spacing_mm: float) -> None:
    (case, *_) = index_cases(root).cases
    # an empty volume packs well: only its header is read
    affine = np.diag([spacing_mm, spacing_mm, spacing_mm, 1.0])
    write_nifti(root / case.images[0].path, np.zeros((200, 200, 200), dtype=np.uint8), affine)
    expected = prepare_module.LARGEST_BRAIN_MM3 / spacing_mm**3 * 9 + 2**18
    assert prepare_module.required_bytes([case], folder, None) == int(expected)


@pytest.mark.parametrize("spacing_mm", [0.5, 1.0, 2.0])
def test_the_estimate_is_that_of_the_resampled_grid(tmp_path: Path, spacing_mm: float) -> None:
    write_case(tmp_path / "scans", shape=(48, 48, 32))
    (case,) = index_cases(tmp_path / "scans").cases
    spacing = (spacing_mm,) * 3
    needed = prepare_module.required_bytes([case], tmp_path / "prepared", spacing)
    prepare_module.prepare_cases([case], tmp_path / "prepared", StoreConfig(spacing_mm=spacing))
    files = (tmp_path / "prepared" / case.case_id).iterdir()
    written = sum(path.stat().st_size for path in files)
    assert needed == round(48 * 48 * 32 / spacing_mm**3) * 9 + 2**18
    assert 0.2 * needed < written <= needed
    # what is replaced needs no more space, nor does a scan that cannot be read
    assert prepare_module.required_bytes([case], tmp_path / "prepared", spacing) == needed - written
    (tmp_path / "scans" / case.images[0].path).write_text("not a scan")
    assert prepare_module.required_bytes([case], tmp_path, None) == 0


def test_cases_in_use_are_kept(root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a training would go on with the labels or the spacing of other settings."""
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    cases = index_cases(root).cases
    prepare_module.prepare_cases(cases, folder, StoreConfig())
    before = stamps(folder)
    in_use = r"a run is being trained on the cases in .* --prepared"
    with reading(folder), pytest.raises(UsageError, match=in_use):
        prepare_module.prepare_cases(cases, folder, COARSE)
    assert stamps(folder) == before
    assert prepare_module.prepare_cases(cases, folder, COARSE) == ()


def test_scans_are_not_replaced_by_prepared_cases(root: Path, folder: Path) -> None:
    """The folder of a case would be replaced as a whole."""
    before = {path: path.read_bytes() for path in root.rglob("*.nii.gz")}
    with pytest.raises(UsageError, match=rf"would replace .*{IDS[0]}, .* --prepared"):
        prepare_module.prepare_cases(index_cases(root).cases, root, StoreConfig())
    assert {path: path.read_bytes() for path in root.rglob("*.nii.gz")} == before
    (folder / IDS[0]).mkdir(parents=True)
    assert prepare(root, folder) == ()
