import errno
import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg.data.store import (
    MANIFEST_NAME,
    Buffers,
    open_array,
    open_case,
    read_manifest,
    write_array,
)
from brats_seg.errors import CaseError
from brats_seg.labels import BRATS2017
from brats_seg.voxels.box import Box
from tests.builders import make_label_map, make_volumes
from tests.prepared import write_prepared

CASE = "BraTS2021_00000"


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"))


@pytest.fixture
def folder(whole: Path, tmp_path: Path) -> Path:
    """A prepared case whose files may be changed."""
    return Path(shutil.copytree(whole, tmp_path / "prepared"))


def test_a_case_knows_its_crop_and_its_scan_and_is_normalised(whole: Path) -> None:
    case = open_case(whole, CASE)
    brain = (make_volumes() != 0).any(axis=0)
    low, high = (f(np.argwhere(brain), axis=0) for f in (np.min, np.max))
    assert case.box == Box(start=tuple(low.tolist()), stop=tuple((high + 1).tolist()))
    assert case.shape == case.box.shape == case.image.shape[1:]
    assert case.geometry.shape == brain.shape
    assert case.convention == BRATS2017
    crop = Box.at((0, 0, 0), case.shape)
    labels, image = case.read_labels(crop), case.read_image(crop)
    np.testing.assert_array_equal(case.box.placed(labels, case.geometry.shape), make_label_map())

    inside = brain[case.box.slices]
    assert image.dtype == np.float16
    assert (image[:, ~inside] == 0).all()
    values = image[:, inside].astype(np.float64)
    np.testing.assert_allclose(values.mean(axis=1), 0, atol=1e-3)
    np.testing.assert_allclose(values.std(axis=1), 1, atol=1e-3)
    for voxels, mask in zip(case.foreground, case.regions_of(labels), strict=True):
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
    ids=["inside", "partly", "around", "outside"],
)
def test_a_box_is_read_with_0_beyond_the_crop(whole: Path, box: Box) -> None:
    case = open_case(whole, CASE)
    crop, margin = Box.at((0, 0, 0), case.shape), 120
    padded = np.pad(case.read_image(crop), [(0, 0), *[(margin, margin)] * 3])
    padded_labels = np.pad(case.read_labels(crop), margin)
    slices = box.seen_from((-margin, -margin, -margin)).slices
    # nothing may be left of what used arrays held
    image = np.full((4, *box.shape), np.nan, dtype=np.float16)
    labels = np.full(box.shape, 77, dtype=np.uint8)

    assert case.read_image(box, image) is image
    assert case.read_labels(box, labels) is labels
    for read in (image, case.read_image(box)):
        np.testing.assert_array_equal(read, padded[:, *slices])
    for read in (labels, case.read_labels(box)):
        np.testing.assert_array_equal(read, padded_labels[slices])


def test_a_case_without_label_map_has_none_to_read_and_a_lack_of_memory_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlabelled = write_prepared(tmp_path, labelled=False)
    case = open_case(unlabelled, CASE)
    assert case.convention is None
    assert [len(voxels) for voxels in case.foreground] == [0, 0, 0]
    message = f"case {CASE}, file case.json: found no label map"
    with pytest.raises(CaseError, match=message):
        case.read_labels(Box.at((0, 0, 0), (2, 2, 2)))
    with pytest.raises(CaseError, match=message):
        case.regions_of(np.zeros((2, 2, 2), dtype=np.uint8))

    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("brats_seg.data.store.open_array", refuse)
    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        open_case(unlabelled, CASE)


@pytest.mark.parametrize("name", ["image.npy", "labels.npy", "foreground.npy"])
def test_a_damaged_case_is_named(folder: Path, name: str) -> None:
    path = folder / CASE / name
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(CaseError, match=rf"{name}: found a file that cannot be read .*again"):
        open_case(folder, CASE)


def test_an_array_of_another_case_is_refused(folder: Path) -> None:
    manifest = read_manifest(folder / CASE)
    assert manifest is not None
    other = replace(manifest, box=replace(manifest.box, stop=(99, 99, 99)))
    (folder / CASE / MANIFEST_NAME).write_text(other.to_json())

    with pytest.raises(CaseError, match=r"found an array of shape .*; expected shape"):
        open_case(folder, CASE)


@pytest.mark.parametrize("shape", [(4, 70, 33, 20), (4, 3, 2, 1), (40, 65, 5)])
def test_what_was_written_is_read_by_numpy_too(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...]
) -> None:
    array = rng.normal(size=shape).astype(np.float16)

    write_array(tmp_path / "image.npy", array[:, ::-1])

    for read in (open_array(tmp_path / "image.npy"), np.load(tmp_path / "image.npy")):
        np.testing.assert_array_equal(read, array[:, ::-1])


def test_a_full_disk_is_recognisable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(OSError, match="No space left") as caught:
        write_array(tmp_path / "image.npy", np.zeros((2, 2, 2), dtype=np.float16))

    assert caught.value.errno == errno.ENOSPC


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
def test_memory_that_anything_refers_to_is_not_handed_out_and_free_memory_is_used_again(
    hold,
) -> None:
    buffers = Buffers()
    array = buffers.take((3, 5, 2), np.float16)
    assert (array.shape, array.dtype, array.flags.c_contiguous) == ((3, 5, 2), np.float16, True)
    # shapes of the same power of two
    places = {buffers.take(shape, np.float32).ctypes.data for shape in ((10, 10), (9, 13))}
    assert len(places) == 1

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
