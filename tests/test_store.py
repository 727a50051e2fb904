"""Prepared cases on disk: their arrays, manifest, verification and buffers."""

import errno
import hashlib
import json
import pickle
import shutil
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg.cases.case import ScanFile, read_case_files
from brats_seg.cases.layouts import LABEL
from brats_seg.cases.nifti import Geometry
from brats_seg.data import store
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import whole_case
from brats_seg.data.store import (
    MANIFEST_NAME,
    Manifest,
    open_case,
    read_case_manifest,
    read_manifest,
)
from brats_seg.errors import CaseError, UsageError
from brats_seg.labels import BRATS2017, MODALITIES, regions_of
from brats_seg.voxels.box import Box
from tests.builders import make_case, make_label_map, make_volumes, write_nifti
from tests.training_builders import Recorder, tiny_settings, train

CASE = "BraTS2021_00000"
NAMES = ("image.npy", "labels.npy", "foreground.npy", MANIFEST_NAME)
SFORM, QFORM = np.diag([-1, -1, 1 / 3, 1]), np.diag([-1, -1, 0.1 + 0.2, 1])
GRID = Geometry(shape=(240, 240, 155), affine=SFORM, qform=QFORM, qform_code=1, sform_code=2)
MANIFEST = Manifest(
    convention="brats2017",
    files_key="0123",
    contents=("abc#2",),
    spacing_mm=(1.0, 1.0, 1.0),
    scan=GRID,
    geometry=GRID,
    box=Box(start=(1, 2, 3), stop=(4, 5, 6)),
    files=(store.StoredFile(name="image.npy", n_bytes=8, crc32=2**32 - 1),),
)


@pytest.fixture
def folder(tiny_prepared: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(tiny_prepared, tmp_path / "prepared"))


def test_a_case_knows_its_crop_and_its_scan_and_is_normalised(tiny_prepared: Path) -> None:
    case, manifest = open_case(tiny_prepared, CASE), read_case_manifest(tiny_prepared, CASE)
    brain = (make_volumes() != 0).any(axis=0)
    low, high = (f(np.argwhere(brain), axis=0) for f in (np.min, np.max))
    assert manifest.box == Box(start=tuple(low.tolist()), stop=tuple((high + 1).tolist()))
    assert case.shape == manifest.box.shape == case.image.shape[1:]
    assert manifest.geometry.shape == brain.shape
    assert case.convention == BRATS2017
    crop = Box.at((0, 0, 0), case.shape)
    labels, image = crop.read(case.labels), crop.read(case.image)
    np.testing.assert_array_equal(manifest.box.placed(labels, brain.shape), make_label_map())
    assert image.dtype == np.float16
    np.testing.assert_array_equal((image != 0).any(axis=0), brain[manifest.box.slices])
    for voxels, mask in zip(case.foreground, regions_of(labels, case.convention), strict=True):
        assert mask[tuple(voxels.T)].all()
        # a region this small is kept whole
        assert len({tuple(voxel) for voxel in voxels.tolist()}) == mask.sum()


@pytest.mark.parametrize(
    "box",
    [
        Box.at((2, 3, 1), (8, 8, 8)),
        Box.at((-3, 0, 2), (8, 30, 8)),
        Box.at((-5, -5, -5), (40, 40, 40)),
        Box.at((100, 0, 0), (4, 4, 4)),
    ],
)
def test_a_box_is_read_with_0_beyond_the_crop(tiny_prepared: Path, box: Box) -> None:
    case = open_case(tiny_prepared, CASE)
    crop, margin = Box.at((0, 0, 0), case.shape), 120
    padded = np.pad(crop.read(case.image), [(0, 0), *[(margin, margin)] * 3])
    padded_labels = np.pad(crop.read(case.labels), margin)
    slices = box.seen_from((-margin, -margin, -margin)).slices
    # nothing may be left of what used arrays held
    image = np.full((4, *box.shape), np.nan, dtype=np.float16)
    labels = np.full(box.shape, 77, dtype=np.uint8)
    assert box.read(case.image, image) is image
    assert box.read(case.labels, labels) is labels
    for read in (image, box.read(case.image)):
        np.testing.assert_array_equal(read, padded[:, *slices])
    for read in (labels, box.read(case.labels)):
        np.testing.assert_array_equal(read, padded_labels[slices])


def test_lack_of_memory_is_no_damage(tiny_prepared: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("brats_seg.data.store.open_array", refuse)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        open_case(tiny_prepared, CASE)


def test_a_damaged_case_and_an_array_of_another_case_are_named(folder: Path) -> None:
    for name in NAMES[:3]:
        content = (folder / CASE / name).read_bytes()
        (folder / CASE / name).write_bytes(content[:100])
        with pytest.raises(CaseError, match=rf"{name}: found a file that cannot be read .*again"):
            open_case(folder, CASE)
        (folder / CASE / name).write_bytes(content)
    manifest = read_manifest(folder / CASE)
    assert manifest is not None
    other = replace(manifest, box=replace(manifest.box, stop=(99, 99, 99)))
    other.write(folder / CASE)
    with pytest.raises(CaseError, match=r"found an array of shape .*; expected shape"):
        open_case(folder, CASE)


@pytest.mark.parametrize("shape", [(4, 70, 33, 20), (4, 3, 2, 1), (40, 65, 5)])
def test_numpy_reads_the_stored_arrays(tmp_path, rng, shape):
    array = rng.normal(size=shape).astype(np.float16)
    store.write_array(tmp_path / "image.npy", array[:, ::-1])
    for read in (store.open_array(tmp_path / "image.npy"), np.load(tmp_path / "image.npy")):
        np.testing.assert_array_equal(read, array[:, ::-1])


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[1:, ::-1],
        lambda array: array.view(np.int32).reshape(-1)[3:],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2:5].permute(1, 0),
        lambda array: torch.from_numpy(array)[1].numpy()[2:],
    ],
    ids=["array", "view", "other type", "tensor", "tensor view", "array of tensor"],
)
def test_memory_in_use_is_not_handed_out_and_free_memory_is_used_again(hold) -> None:
    buffers = store.Buffers()
    array = buffers.take((3, 5, 2), np.float16)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((3, 5, 2), np.float16, True)
    # shapes of the same power of two
    assert len({buffers.take(shape, np.float32).ctypes.data for shape in ((10, 10), (9, 13))}) == 1
    held = hold(buffers.take((10, 10), np.float32))
    held[...] = 3
    before = held.tolist()
    others = [buffers.take((10, 10), np.float32) for _ in range(3)]
    for value, other in enumerate(others):
        other[...] = value
    assert held.tolist() == before
    assert [other.max() for other in others] == [0, 1, 2]
    # no memory goes to another process
    packed = pickle.dumps(buffers)
    assert len(packed) < 200
    assert pickle.loads(packed).take((2, 2), np.uint8).shape == (2, 2)


def flip_bit(path: Path, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def test_what_was_written_is_read_and_nothing_else(tmp_path, rng):
    path = tmp_path / MANIFEST_NAME
    assert read_manifest(tmp_path) is None
    MANIFEST.write(tmp_path)
    assert read_manifest(tmp_path) == MANIFEST
    written = path.read_text()
    later = json.dumps(json.loads(written) | {"version": store.FORMAT_VERSION + 1})
    for text in ("", "{", "[]", "{}", '{"version": 1}', "\x00", later):
        path.write_text(text)
        assert read_manifest(tmp_path) is None, text
    for _ in range(300):
        path.write_text(written)
        flip_bit(path, rng)
        assert read_manifest(tmp_path) in (None, MANIFEST)


def test_the_key_changes_with_contents_convention_and_spacing_but_not_with_names() -> None:
    assert replace(MANIFEST, files_key="").key == MANIFEST.key
    for change in (
        {"contents": ("abd#2",)},
        {"convention": "brats2023"},
        {"spacing_mm": (2.0, 2.0, 2.0)},
        {"scan": replace(GRID, shape=(120, 120, 155))},
    ):
        assert replace(MANIFEST, **change).key != MANIFEST.key
    # runs are resumed only on cases of the same key
    assert MANIFEST.key == hashlib.sha256(b"2\nbrats2017\nabc#2").hexdigest()


def test_contents_distinguish_files_and_volumes(tmp_path: Path) -> None:
    scans = {name: ScanFile(path=Path(f"{name}.nii")) for name in ("a", "b", "seg")}
    for name, value in {"a": 0, "b": 0, "seg": 1}.items():
        write_nifti(tmp_path / f"{name}.nii", np.full((2, 2, 2, 2), value, np.int16))
    in_one = [replace(scans["a"], volume=n) for n in range(2)]
    files = zip((*MODALITIES, LABEL), (*in_one, *scans.values()), strict=True)
    contents = read_case_files(make_case(root=tmp_path, files=dict(files))).hashes
    assert (contents[2], len(set(contents))) == (contents[3], 4)


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
                store.verify_case(folder, CASE)
        path.write_bytes(content)


def test_arrays_of_another_case_are_found_and_the_message_says_what_to_do(folder: Path) -> None:
    shutil.copy(folder / "BraTS2021_00001" / "image.npy", folder / CASE / "image.npy")
    other = r"image.npy: found the check sum .*: the file is damaged; .*`brats-seg prepare --repa"
    with pytest.raises(CaseError, match=other):
        store.verify_case(folder, CASE)
    with pytest.raises(CaseError, match="image"):  # a held-out case is verified when it is read
        whole_case(folder, CASE)


def test_all_damaged_cases_are_returned_in_order_and_counted(folder: Path) -> None:
    case_ids, track = store.prepared_ids(folder), Recorder()
    assert store.verify_cases(case_ids, folder) == ()
    for case_id in (case_ids[3], case_ids[1]):
        flip_bit(folder / case_id / "labels.npy", np.random.default_rng(0))
    errors = store.verify_cases(case_ids, folder, track=track)
    assert [error.case_id for error in errors] == [case_ids[1], case_ids[3]]
    assert track.works == [("verifying prepared cases", 6)]
    with pytest.raises(CaseError, match=rf"case {case_ids[1]}, .*damaged too: {case_ids[3]}"):
        store.raise_damage(errors)


def test_cases_are_found_however_damaged_and_other_folders_are_not(folder: Path) -> None:
    expected = store.prepared_ids(folder)
    (folder / "another").mkdir()
    (folder / CASE / MANIFEST_NAME).unlink()
    assert store.prepared_ids(folder) == expected
    with pytest.raises(UsageError, match="holds no prepared cases"):
        store.prepared_ids(folder / "absent")


def test_a_damaged_case_ends_a_run_when_it_begins(data: FoldData, tmp_path: Path) -> None:
    config = tiny_settings("training.n_epochs=1")
    data = replace(data, folder=shutil.copytree(data.folder, tmp_path / "prepared"))
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
