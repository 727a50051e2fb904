import hashlib
import json
import shutil
from collections.abc import Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.case import Case, ScanFile, read_case_files
from brats_seg.cases.layouts import LABEL
from brats_seg.cases.nifti import Geometry
from brats_seg.data.loader import whole_case
from brats_seg.data.store import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    StoredFile,
    prepared_ids,
    raise_damage,
    read_manifest,
    sources_of,
    verify_case,
    verify_cases,
)
from brats_seg.errors import CaseError, UsageError
from brats_seg.labels import MODALITIES
from brats_seg.voxels.box import Box
from tests.builders import write_nifti
from tests.prepared import write_prepared
from tests.training_builders import open_six, tiny_settings, train

CASE = "BraTS2021_00000"
NAMES = ("image.npy", "labels.npy", "foreground.npy", MANIFEST_NAME)
GRID = Geometry(
    shape=(240, 240, 155),
    affine=np.diag([-1, -1, 1 / 3, 1]),
    qform=np.diag([-1, -1, 0.1 + 0.2, 1]),
    qform_code=1,
    sform_code=2,
)
MANIFEST = Manifest(
    convention="brats2017",
    sources=(SourceFile(name="a/b.nii.gz#2", n_bytes=7, mtime_ns=1234567890123456789),),
    contents=("abc#2",),
    spacing_mm=(1.0, 1.0, 1.0),
    scan=GRID,
    geometry=GRID,
    box=Box(start=(1, 2, 3), stop=(4, 5, 6)),
    means=(1.5, 2.0, 3.0, 4.0),
    stds=(1 / 3, 2.0, 3.0, 4.0),
    files=(StoredFile(name="image.npy", n_bytes=8, crc32=2**32 - 1),),
)


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"), n_cases=4)


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A copy of prepared cases, in which files may be changed."""
    return Path(shutil.copytree(whole, tmp_path / "prepared"))


def flip_bit(path: Path, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def case_of(root: Path, *scans: ScanFile, label: ScanFile | None = None) -> Case:
    files = dict(zip(MODALITIES, scans, strict=True))
    if label is not None:
        files[LABEL] = label
    return Case(case_id="a", patient_id="a", release="unknown", root=root, files=files)


OTHER_VERSION = json.dumps(json.loads(MANIFEST.to_json()) | {"version": FORMAT_VERSION + 1})


def test_reading_gives_what_was_written_and_nothing_of_a_damaged_file_or_another_version(
    tmp_path: Path, rng: np.random.Generator
) -> None:
    path = tmp_path / MANIFEST_NAME
    assert read_manifest(tmp_path) is None
    path.write_text(MANIFEST.to_json())
    assert read_manifest(tmp_path) == MANIFEST
    for text in ("", "{", "[]", "{}", '{"version": 1}', "\x00", OTHER_VERSION):
        path.write_text(text)
        assert read_manifest(tmp_path) is None, text
    for _ in range(300):
        path.write_text(MANIFEST.to_json())
        flip_bit(path, rng)
        assert read_manifest(tmp_path) in (None, MANIFEST)


def test_the_key_changes_with_contents_convention_and_spacing_but_not_with_names() -> None:
    assert replace(MANIFEST, sources=()).key == MANIFEST.key
    for change in (
        {"contents": ("abd#2",)},
        {"convention": "brats2023"},
        {"spacing_mm": (2.0, 2.0, 2.0)},
        {"scan": replace(GRID, shape=(120, 120, 155))},
    ):
        assert replace(MANIFEST, **change).key != MANIFEST.key
    # runs are resumed only on cases of the same key
    assert MANIFEST.key == hashlib.sha256(b"2\nbrats2017\nabc#2").hexdigest()


def test_sources_are_the_modalities_in_order_and_then_the_label_map(tmp_path: Path) -> None:
    scans = [ScanFile(path=Path(f"{name}.nii")) for name in "abcd"]
    for scan in (*scans, label := ScanFile(path=Path("seg.nii"))):
        (tmp_path / scan.path).write_text(scan.path.name)

    sources = sources_of(case_of(tmp_path, *scans, label=label))

    assert [source.name for source in sources] == ["a.nii", "b.nii", "c.nii", "d.nii", "seg.nii"]
    changed_ns = (tmp_path / "a.nii").stat().st_mtime_ns
    assert sources[0] == SourceFile(name="a.nii", n_bytes=5, mtime_ns=changed_ns)
    # contents distinguish files and volumes
    for name, value in {"a": 0, "b": 0, "seg": 1}.items():
        write_nifti(tmp_path / f"{name}.nii", np.full((2, 2, 2, 2), value, np.int16))
    in_one = [replace(scans[0], volume=n) for n in range(2)]
    contents = read_case_files(case_of(tmp_path, *in_one, *scans[:2], label=label)).hashes
    assert contents[2] == contents[3]
    assert len(set(contents)) == 4


@pytest.mark.parametrize("name", NAMES)
def test_every_flipped_bit_and_another_length_is_found(folder: Path, name: str) -> None:
    """Spaces between the entries of the manifest may change: they mean nothing."""
    path, rng = folder / CASE / name, np.random.default_rng(0)
    content = path.read_bytes()
    damages = [partial(flip_bit, path, rng)] * 20
    damages += [partial(path.write_bytes, other) for other in (content[:-1], content + b"\0")]
    for damage in [*damages, path.unlink]:
        damage()
        same = path.exists() and path.read_bytes().split() == content.split()
        if name != MANIFEST_NAME or not same:
            with pytest.raises(CaseError, match=f"case {CASE}, file .*{name}: found"):
                verify_case(folder, CASE)
        path.write_bytes(content)


def test_arrays_of_another_case_are_found_and_the_message_says_what_to_do(folder: Path) -> None:
    shutil.copy(folder / "BraTS2021_00001" / "image.npy", folder / CASE / "image.npy")

    other = (
        r"image.npy: found the check sum .*: the file is damaged; .*`brats-seg prepare --repair`"
    )
    with pytest.raises(CaseError, match=other):
        verify_case(folder, CASE)
    with pytest.raises(CaseError, match="image"):  # a held-out case is verified when it is read
        whole_case(folder, CASE)


def test_all_damaged_cases_are_returned_in_order_and_counted(folder: Path) -> None:
    case_ids, seen = prepared_ids(folder), []
    assert verify_cases(case_ids, folder) == ()
    for case_id in (case_ids[3], case_ids[1]):
        flip_bit(folder / case_id / "labels.npy", np.random.default_rng(0))

    def track(items: Iterable[object], *, what: str, total: int) -> Iterable[object]:
        seen.append((what, total))
        return items

    errors = verify_cases(case_ids, folder, track=track)

    assert [error.case_id for error in errors] == [case_ids[1], case_ids[3]]
    assert seen == [("verifying prepared cases", 4)]
    with pytest.raises(CaseError, match=rf"case {case_ids[1]}, .*damaged too: {case_ids[3]}"):
        raise_damage(errors)


def test_cases_are_found_however_damaged_and_other_folders_are_not(folder: Path) -> None:
    expected = prepared_ids(folder)
    (folder / "another").mkdir()
    (folder / CASE / MANIFEST_NAME).unlink()

    assert prepared_ids(folder) == expected
    with pytest.raises(UsageError, match="holds no prepared cases"):
        prepared_ids(folder / "absent")


def test_a_damaged_case_ends_a_run_before_it_begins_and_when_it_resumes(
    tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    config = tiny_settings("training.n_epochs=1")
    data = open_six(tmp_path_factory, config)
    damaged = data.folder / data.split.train[0] / "image.npy"
    content = damaged.read_bytes()

    for resumes in (False, True):
        flip_bit(damaged, np.random.default_rng(0))
        with pytest.raises(CaseError, match=r"image.npy: found .* the file is damaged"):
            train(data, tmp_path / "run", config)
        assert (tmp_path / "run").exists() == resumes
        damaged.write_bytes(content)
        if not resumes:
            train(data, tmp_path / "run", config)
