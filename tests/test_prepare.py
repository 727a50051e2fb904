import errno
import os
import signal
import subprocess
import sys
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from brats_seg.cases.case import CaseIndex
from brats_seg.cases.index import index_cases
from brats_seg.cases.nifti import read_label_map
from brats_seg.config import StoreConfig
from brats_seg.data import prepare as prepare_module
from brats_seg.data.manifest import verify_cases
from brats_seg.data.prepare import (
    FOREGROUND_VOXELS,
    LARGEST_BRAIN_MM3,
    prepare_cases,
    required_bytes,
    select_foreground,
)
from brats_seg.data.store import open_case
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.files import locked, reading
from brats_seg.labels import BRATS2017, BRATS2024, regions_of
from brats_seg.voxels.box import Box
from tests.builders import write_case, write_nifti
from tests.prepared import prepare, prepare_index

IDS = ("BraTS2021_00000", "BraTS2021_00001", "BraTS2021_00002")

# prepares three cases, and is killed at the n-th time that something is to reach the disk
KILLED = """
import os, signal, sys
from pathlib import Path

n_left = int(sys.argv[3])
fsync = os.fsync

def fsync_or_die(descriptor):
    global n_left
    n_left -= 1
    if n_left == 0:
        os.kill(os.getpid(), signal.SIGKILL)
    fsync(descriptor)

os.fsync = fsync_or_die

from tests.prepared import prepare
prepare(Path(sys.argv[1]), Path(sys.argv[2]))
"""
COARSE = StoreConfig(spacing_mm=(2.0, 2.0, 2.0))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for seed, case_id in enumerate(IDS):
        write_case(tmp_path / "scans", case_id, seed=seed)
    return tmp_path / "scans"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return tmp_path / "prepared"


def stamps(folder: Path) -> dict[str, tuple[int, int]]:
    """Return inode and time of change of each image, which differ if it is written again."""
    status = {case_id: next((folder / case_id).glob("image.*")).stat() for case_id in IDS}
    return {case_id: (found.st_ino, found.st_mtime_ns) for case_id, found in status.items()}


def voxels(folder: Path, case_id: str) -> tuple[np.ndarray, np.ndarray]:
    case = open_case(folder, case_id)
    whole = Box.at((0, 0, 0), case.shape)
    return case.read_image(whole), case.read_labels(whole)


def touch(path: Path) -> None:
    status = path.stat()
    os.utime(path, ns=(status.st_atime_ns, status.st_mtime_ns + 10**9))


def change_voxel(path: Path) -> None:
    labels = read_label_map(path, case_id="").array.copy()
    labels[12, 12, 8] = 2 if labels[12, 12, 8] != 2 else 1
    write_nifti(path, labels)


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


def test_a_touched_scan_is_compared_once_and_kept(root: Path, folder: Path) -> None:
    prepare(root, folder)
    before, manifest = stamps(folder), folder / IDS[1] / "case.json"
    prepare(root, folder)
    times = [manifest.stat().st_mtime_ns]
    touch(root / IDS[1] / f"{IDS[1]}_t1ce.nii.gz")
    for _ in range(2):
        prepare(root, folder)
        times.append(manifest.stat().st_mtime_ns)

    assert stamps(folder) == before
    assert times[0] < times[1] == times[2]


@pytest.mark.parametrize(
    "change",
    [
        lambda root: change_voxel(root / IDS[1] / f"{IDS[1]}_seg.nii.gz"),
        # two files of equal size and time change places
        lambda root: swap_alike(root / IDS[1] / f"{IDS[1]}_t1.nii.gz"),
    ],
    ids=["voxel", "swap"],
)
def test_a_changed_case_is_prepared_again_and_nothing_else(
    root: Path, folder: Path, change: Callable[[Path], None]
) -> None:
    prepare(root, folder)
    before, voxels_before = stamps(folder), voxels(folder, IDS[1])
    change(root)

    prepare(root, folder)

    after = stamps(folder)
    assert [case_id for case_id in IDS if after[case_id] != before[case_id]] == [IDS[1]]
    pairs = zip(voxels(folder, IDS[1]), voxels_before, strict=True)
    assert not all(np.array_equal(new, old) for new, old in pairs)


def swap_alike(path: Path) -> None:
    other = path.with_name(path.name.replace("_t1", "_t2"))
    spare = path.with_name("spare")
    path.rename(spare)
    other.rename(path)
    spare.rename(other)


def test_another_spacing_or_convention_prepares_again(root: Path, folder: Path) -> None:
    prepare(root, folder)
    cases, before = index_cases(root).cases, stamps(folder)
    prepare_cases(cases, folder, COARSE)
    coarse = stamps(folder)

    assert open_case(folder, IDS[0]).spacing_mm == COARSE.spacing_mm
    prepare_cases([replace(case, convention="brats2024") for case in cases], folder, COARSE)
    assert open_case(folder, IDS[0]).convention == BRATS2024
    stages = (before, coarse, stamps(folder))
    assert len({stamp for stage in stages for stamp in stage.values()}) == 9


def test_labels_outside_the_convention_are_a_failure(root: Path, folder: Path) -> None:
    index = index_cases(root)
    case = replace(index.cases[0], convention="brats2023")

    [failure] = prepare_index(CaseIndex(root=root, cases=(case,)), folder)

    assert f"{IDS[0]}_seg.nii.gz: found label values [4]; expected those of" in failure.message


@pytest.mark.parametrize("name", ["image.npy", "labels.npy", "foreground.npy", "case.json"])
def test_damaged_cases_are_prepared_again_when_asked_for(
    root: Path, folder: Path, name: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A damaged manifest is as good as none: the case is prepared again without being asked."""
    prepare(root, folder)
    damaged = folder / IDS[1] / name
    content = damaged.read_bytes()
    damaged.write_bytes(content[:-20] + b"\x01" * 20)
    before = stamps(folder)

    prepare(root, folder)
    assert (stamps(folder) == before) == (name != "case.json")

    assert prepare_cases(index_cases(root).cases, folder, StoreConfig(), repair=True) == ()
    assert damaged.read_bytes() == content
    assert verify_cases(IDS, folder) == ()
    after = stamps(folder)
    assert [case_id for case_id in IDS if after[case_id] != before[case_id]] == [IDS[1]]
    assert ("the file is damaged" in caplog.text) == (name != "case.json")


def test_a_touched_scan_does_not_hide_damage(root: Path, folder: Path) -> None:
    """The manifest is written again, with the check sums of the files as they were prepared."""
    prepare(root, folder)
    damaged = folder / IDS[1] / "labels.npy"
    damaged.write_bytes(damaged.read_bytes()[:-1] + b"\x07")
    for repair, found in ((False, [IDS[1]]), (True, [])):
        touch(root / IDS[1] / f"{IDS[1]}_t1ce.nii.gz")
        prepare_cases(index_cases(root).cases, folder, StoreConfig(), repair=repair)

        assert [error.case_id for error in verify_cases(IDS, folder)] == found


@pytest.mark.parametrize("n_workers", [0, 2])
def test_bad_cases_are_reported_in_order_and_the_others_finished(
    root: Path, folder: Path, n_workers: int
) -> None:
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


def test_too_little_space_is_refused_before_anything_is_written(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(prepare_module, "free_bytes", lambda _: 10**5)

    with pytest.raises(EnvironmentalError, match="preparing 3 cases needs about"):
        prepare(root, folder)

    assert [path for path in folder.iterdir() if path.is_dir()] == []


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_full_disk_ends_the_work_with_advice_and_leaves_whole_cases(
    root: Path, folder: Path, monkeypatch: pytest.MonkeyPatch, n_workers: int
) -> None:
    prepare(root, folder)
    before = voxels(folder, IDS[1])
    change_voxel(root / IDS[1] / f"{IDS[1]}_seg.nii.gz")

    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, "full disk (simulated)")

    with monkeypatch.context() as full:
        full.setattr(os, "fsync", refuse)
        advice = rf"the disk is full: .*{IDS[1]} could not .* larger disk"
        with pytest.raises(EnvironmentalError, match=advice):
            prepare(root, folder, n_workers=n_workers)

    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(IDS)
    for now, then in zip(voxels(folder, IDS[1]), before, strict=True):
        np.testing.assert_array_equal(now, then)


@pytest.mark.parametrize("nth_sync", [1, 4, 7, 20])
def test_a_killed_preparation_leaves_whole_cases_and_the_next_one_the_rest(
    root: Path, folder: Path, tmp_path: Path, nth_sync: int
) -> None:
    script = tmp_path / "killed.py"
    script.write_text(KILLED)
    environment = {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}
    killed = subprocess.run(
        [sys.executable, script, root, folder, str(nth_sync)], env=environment, check=False
    )
    assert killed.returncode == -signal.SIGKILL

    prepare(root, tmp_path / "undisturbed")
    there = [path.name for path in folder.iterdir() if path.is_dir() and path.name in IDS]
    assert len(there) < len(IDS)
    for case_id in there:
        open_case(folder, case_id)

    assert prepare(root, folder) == ()
    assert {path.name for path in folder.iterdir() if path.is_dir()} == set(IDS)
    for case_id in IDS:
        pairs = zip(voxels(folder, case_id), voxels(tmp_path / "undisturbed", case_id), strict=True)
        assert all(np.array_equal(one, other) for one, other in pairs)


def test_a_second_process_waits_for_the_first(
    root: Path, folder: Path, caplog: pytest.LogCaptureFixture
) -> None:
    folder.mkdir()
    caplog.set_level("INFO")
    second = threading.Thread(target=prepare, args=(root, folder))
    with locked(folder / prepare_module._LOCK_NAME):
        second.start()
        second.join(timeout=0.3)
        waits = second.is_alive()
    second.join()

    assert waits
    assert "waiting for another process" in caplog.text
    open_case(folder, IDS[0])


def test_large_regions_are_thinned_evenly() -> None:
    labels = np.zeros((30, 30, 30), dtype=np.uint8)
    labels[5:25, 5:25, 5:25] = 2
    labels[6, 7, 8] = 4
    rows = select_foreground(labels, BRATS2017)

    wt, tc, et = (rows[rows[:, 0] == region, 1:] for region in range(3))
    assert len(wt) == FOREGROUND_VOXELS
    assert len({tuple(voxel) for voxel in wt.tolist()}) == FOREGROUND_VOXELS
    assert regions_of(labels, BRATS2017)[0][tuple(wt.T)].all()
    np.testing.assert_allclose(wt.mean(axis=0), 14.5, atol=0.1)
    assert tc.tolist() == et.tolist() == [[6, 7, 8]]


def test_scans_stored_in_another_orientation_are_prepared_alike(tmp_path: Path) -> None:
    """The same scan in another orientation gives the same crop."""
    as_brats = write_case(tmp_path / "scans", "BraTS2021_00000")
    turned = tmp_path / "scans" / "BraTS2021_00001"
    for path in as_brats.iterdir():
        image = nib.load(path)
        image = image.as_reoriented(nib.orientations.axcodes2ornt("RAS")[[1, 0, 2]])
        turned.mkdir(exist_ok=True)
        nib.save(image, turned / path.name.replace("00000", "00001"))
    index = index_cases(tmp_path / "scans")

    failures = prepare_cases(index.cases, tmp_path / "ready", StoreConfig(), n_workers=0)

    assert not failures
    one, other = (open_case(tmp_path / "ready", case.case_id) for case in index.cases)
    box = Box.at((0, 0, 0), one.shape)
    assert one.shape == other.shape
    assert np.array_equal(one.read_image(box), other.read_image(box))
    assert np.array_equal(one.read_labels(box), other.read_labels(box))


def required(index: CaseIndex, folder: Path, config: StoreConfig | None = None) -> int:
    return required_bytes(index.cases, folder, config and config.spacing_mm)


@pytest.mark.parametrize(("spacing_mm", "n_voxels"), [(1, LARGEST_BRAIN_MM3), (2, 200**3)])
def test_of_large_volumes_a_brain_is_counted(
    tmp_path: Path, spacing_mm: float, n_voxels: int
) -> None:
    """A cube of 200 or 400 mm is larger than a brain."""
    write_case(tmp_path / "scans")
    index = index_cases(tmp_path / "scans")
    # an empty volume packs well: only its header is read
    header_only = np.zeros((200, 200, 200), dtype=np.uint8)
    affine = np.diag([spacing_mm, spacing_mm, spacing_mm, 1.0])
    write_nifti(tmp_path / "scans" / index.cases[0].images[0].path, header_only, affine)

    expected = min(n_voxels, LARGEST_BRAIN_MM3 / spacing_mm**3) * 9 + 2**18

    assert required(index, tmp_path) == int(expected)


@pytest.mark.parametrize("spacing_mm", [0.5, 1.0, 2.0])
def test_the_estimate_is_that_of_the_resampled_grid(tmp_path: Path, spacing_mm: float) -> None:
    write_case(tmp_path / "scans", shape=(48, 48, 32))
    index = index_cases(tmp_path / "scans")
    config = StoreConfig(spacing_mm=(spacing_mm,) * 3)
    needed = required(index, tmp_path / "prepared", config)
    prepare_cases(index.cases, tmp_path / "prepared", config)

    files = (tmp_path / "prepared" / index.cases[0].case_id).iterdir()
    written = sum(path.stat().st_size for path in files)

    assert needed == round(48 * 48 * 32 / spacing_mm**3) * 9 + 2**18
    assert 0.2 * needed < written <= needed
    # what is replaced needs no more space, nor does a scan that cannot be read
    assert required(index, tmp_path / "prepared", config) == needed - written
    (index.root / index.cases[0].images[0].path).write_text("not a scan")
    assert required(index, tmp_path) == 0


def test_cases_that_are_trained_on_are_not_replaced(root: Path, folder: Path) -> None:
    """Else a training would go on with the labels or the spacing of other settings."""
    cases = index_cases(root).cases
    prepare_cases(cases, folder, StoreConfig())
    before = stamps(folder)

    with reading(folder):
        # nothing is to be replaced
        prepare_cases(cases, folder, StoreConfig())
        in_use = r"a run is being trained on the cases in .* --prepared"
        with pytest.raises(UsageError, match=in_use):
            prepare_cases(cases, folder, COARSE)

    assert stamps(folder) == before
    assert prepare_cases(cases, folder, COARSE) == ()


def test_scans_are_not_replaced_by_prepared_cases(root: Path, folder: Path) -> None:
    """The folder of a case would be replaced as a whole."""
    before = {path: path.read_bytes() for path in root.rglob("*.nii.gz")}

    with pytest.raises(UsageError, match=rf"would replace .*{IDS[0]} and .* --prepared"):
        prepare_cases(index_cases(root).cases, root, StoreConfig())

    assert {path: path.read_bytes() for path in root.rglob("*.nii.gz")} == before
    (folder / IDS[0]).mkdir(parents=True)
    assert prepare(root, folder) == ()
