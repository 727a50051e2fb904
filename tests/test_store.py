import errno
import hashlib
import json
import os
import pickle
import shutil
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg.cases.case import Case, ScanFile, read_case_files
from brats_seg.cases.nifti import Geometry
from brats_seg.data.manifest import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    StoredFile,
    read_manifest,
    sources_of,
)
from brats_seg.data.store import (
    Buffers,
    array_name,
    check_compression,
    open_array,
    open_case,
    write_array,
)
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.labels import BRATS2017, regions_of
from brats_seg.voxels.box import Box
from tests.builders import make_label_map, make_volumes, write_nifti
from tests.prepared import write_prepared

CASE = "BraTS2021_00000"
GRID = Geometry(
    shape=(240, 240, 155),
    affine=np.diag([-1, -1, 1 / 3, 1]),
    qform=np.diag([-1, -1, 0.1 + 0.2, 1]),
    qform_code=1,
    sform_code=2,
)
MANIFEST = Manifest(
    version=FORMAT_VERSION,
    compressed=False,
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


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_prepared(tmp_path, compressed=request.param)


def test_a_case_knows_its_crop_and_its_scan(folder: Path) -> None:
    case = open_case(folder, CASE)

    brain = (make_volumes() != 0).any(axis=0)
    low, high = (f(np.argwhere(brain), axis=0) for f in (np.min, np.max))
    assert case.box == Box(start=tuple(low.tolist()), stop=tuple((high + 1).tolist()))
    assert case.shape == case.box.shape == case.image.shape[1:]
    assert case.geometry.shape == brain.shape
    assert case.convention == BRATS2017


def test_the_store_is_normalised_and_its_background_is_0(folder: Path) -> None:
    case = open_case(folder, CASE)

    image = case.read_image(Box.at((0, 0, 0), case.shape))
    inside = (make_volumes() != 0).any(axis=0)[case.box.slices]
    assert image.dtype == np.float16
    assert (image[:, ~inside] == 0).all()
    values = image[:, inside].astype(np.float64)
    np.testing.assert_allclose(values.mean(axis=1), 0, atol=1e-3)
    np.testing.assert_allclose(values.std(axis=1), 1, atol=1e-3)


def test_labels_placed_back_are_those_of_the_scan(folder: Path) -> None:
    case = open_case(folder, CASE)
    labels = case.read_labels(Box.at((0, 0, 0), case.shape))

    np.testing.assert_array_equal(case.box.placed(labels, case.geometry.shape), make_label_map())


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
def test_a_box_is_read_with_0_beyond_the_crop(folder: Path, box: Box) -> None:
    case = open_case(folder, CASE)
    whole = Box.at((0, 0, 0), case.shape)
    margin = 120
    padded = np.pad(case.read_image(whole), [(0, 0), *[(margin, margin)] * 3])
    padded_labels = np.pad(case.read_labels(whole), margin)
    there = box.seen_from((-margin, -margin, -margin)).slices

    np.testing.assert_array_equal(case.read_image(box), padded[(slice(None), *there)])
    np.testing.assert_array_equal(case.read_labels(box), padded_labels[there])


def test_reading_into_a_used_array_leaves_nothing_of_it(folder: Path) -> None:
    case, box = open_case(folder, CASE), Box.at((-3, 0, 2), (8, 8, 8))
    image = np.full((4, 8, 8, 8), np.nan, dtype=np.float16)
    labels = np.full((8, 8, 8), 77, dtype=np.uint8)

    assert case.read_image(box, image) is image
    assert case.read_labels(box, labels) is labels
    np.testing.assert_array_equal(image, case.read_image(box))
    np.testing.assert_array_equal(labels, case.read_labels(box))


def test_reading_into_a_turned_view_mirrors(folder: Path) -> None:
    case, box = open_case(folder, CASE), Box.at((1, 2, 3), (8, 8, 8))
    image = np.empty((4, 8, 8, 8), dtype=np.float16)
    case.read_image(box, image[:, ::-1, :, ::-1])

    np.testing.assert_array_equal(image, case.read_image(box)[:, ::-1, :, ::-1])


def test_foreground_voxels_lie_in_their_regions(folder: Path) -> None:
    case = open_case(folder, CASE)
    masks = regions_of(case.read_labels(Box.at((0, 0, 0), case.shape)), BRATS2017)

    for voxels, mask in zip(case.foreground, masks, strict=True):
        assert mask[tuple(voxels.T)].all()
        # a region this small is kept whole
        assert len({tuple(voxel) for voxel in voxels.tolist()}) == mask.sum()


def test_regions_follow_the_convention_of_the_case(folder: Path) -> None:
    labels = np.array([[[0, 1, 2, 4]]], dtype=np.uint8)

    assert open_case(folder, CASE).regions_of(labels)[:, 0, 0].tolist() == [
        [False, True, True, True],
        [False, True, False, True],
        [False, False, False, True],
    ]


def test_a_case_without_label_map_has_none_to_read(tmp_path: Path) -> None:
    case = open_case(write_prepared(tmp_path, labelled=False), CASE)

    assert case.convention is None
    assert [len(voxels) for voxels in case.foreground] == [0, 0, 0]
    message = f"case {CASE}, file case.json: found no label map"
    with pytest.raises(CaseError, match=message):
        case.read_labels(Box.at((0, 0, 0), (2, 2, 2)))
    with pytest.raises(CaseError, match=message):
        case.regions_of(np.zeros((2, 2, 2), dtype=np.uint8))


def test_a_case_that_was_not_prepared_is_named(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"case a, .*found no prepared case .* Prepare the cases"):
        open_case(tmp_path, "a")


def test_a_lack_of_memory_is_no_damage_of_the_case(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("brats_seg.data.store.open_array", refuse)

    with pytest.raises(MemoryError, match="Cannot allocate memory"):
        open_case(folder, CASE)


@pytest.mark.parametrize("stem", ["image", "labels", "foreground"])
def test_a_damaged_case_is_named(folder: Path, stem: str) -> None:
    [path] = (folder / CASE).glob(f"{stem}.*")
    path.write_bytes(path.read_bytes()[:100])

    with pytest.raises(CaseError, match=rf"{path.name}: found a file that cannot be read .*again"):
        open_case(folder, CASE)


def test_an_array_of_another_case_is_refused(folder: Path) -> None:
    manifest = read_manifest(folder / CASE)
    assert manifest is not None
    other = replace(manifest, box=replace(manifest.box, stop=(99, 99, 99)))
    (folder / CASE / MANIFEST_NAME).write_text(other.to_json())

    with pytest.raises(CaseError, match=r"found an array of shape .*; expected shape"):
        open_case(folder, CASE)


def test_a_compressed_case_needs_blosc2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_prepared(tmp_path, compressed=True)
    monkeypatch.setitem(sys.modules, "blosc2", None)

    with pytest.raises(EnvironmentalError, match="need the package blosc2"):
        open_case(folder, CASE)


def case_of(root: Path, *scans: ScanFile, label: ScanFile | None = None) -> Case:
    modalities = dict(zip(("t1n", "t1c", "t2w", "t2f"), scans, strict=True))
    return Case(
        case_id="a", patient_id="a", release="unknown", root=root, label=label, **modalities
    )


def four(root: Path) -> list[ScanFile]:
    scans = [ScanFile(path=Path(f"{name}.nii")) for name in "abcd"]
    for scan in scans:
        (root / scan.path).write_text(scan.path.name)
    return scans


def test_reading_gives_what_was_written_to_the_last_bit(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(MANIFEST.to_json())

    assert read_manifest(tmp_path) == MANIFEST


def test_there_may_be_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', "\x00"])
def test_a_damaged_manifest_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)

    assert read_manifest(tmp_path) is None


def test_a_manifest_of_another_version_counts_as_none(tmp_path: Path) -> None:
    values = json.loads(MANIFEST.to_json()) | {"version": FORMAT_VERSION + 1}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(values))

    assert read_manifest(tmp_path) is None


def test_the_key_changes_with_contents_and_convention_but_not_with_files_or_storage() -> None:
    same = replace(MANIFEST, sources=(), compressed=True)

    assert same.key == MANIFEST.key
    assert replace(MANIFEST, contents=("abd#2",)).key != MANIFEST.key
    assert replace(MANIFEST, convention="brats2023").key != MANIFEST.key
    assert replace(MANIFEST, spacing_mm=(2.0, 2.0, 2.0)).key != MANIFEST.key
    assert replace(MANIFEST, scan=replace(GRID, shape=(120, 120, 155))).key != MANIFEST.key


def test_the_key_of_cases_of_1_mm_is_that_of_earlier_versions() -> None:
    """So that runs which were begun with an earlier version can be resumed and tuned."""
    expected = hashlib.sha256(b"2\nbrats2017\nabc#2").hexdigest()

    assert MANIFEST.key == expected


@pytest.mark.parametrize("seed", range(3))
def test_a_flipped_bit_in_a_manifest_is_found_or_changes_nothing(tmp_path: Path, seed: int) -> None:
    rng, content = np.random.default_rng(seed), bytearray(MANIFEST.to_json().encode())
    for _ in range(100):
        damaged, place = bytearray(content), rng.integers(len(content))
        damaged[place] ^= 1 << rng.integers(8)
        (tmp_path / MANIFEST_NAME).write_bytes(damaged)

        assert read_manifest(tmp_path) in (None, MANIFEST)


def test_sources_are_the_modalities_in_order_and_then_the_label_map(tmp_path: Path) -> None:
    scans, label = four(tmp_path), ScanFile(path=Path("seg.nii"))
    (tmp_path / "seg.nii").write_text("labels")

    for case, expected in (
        (case_of(tmp_path, *scans), [*scans]),
        (case_of(tmp_path, *scans, label=label), [*scans, label]),
    ):
        assert [source.name for source in sources_of(case)] == list(map(str, expected))


def test_sources_have_name_size_and_time(tmp_path: Path) -> None:
    scans = four(tmp_path)
    sources = sources_of(case_of(tmp_path, *scans))

    status = (tmp_path / "a.nii").stat()
    assert sources[0] == SourceFile(name="a.nii", n_bytes=5, mtime_ns=status.st_mtime_ns)
    assert [source.name for source in sources] == ["a.nii", "b.nii", "c.nii", "d.nii"]


def test_contents_distinguish_files_and_volumes(tmp_path: Path) -> None:
    write_nifti(tmp_path / "four.nii", np.zeros((2, 2, 2, 2), np.int16))
    shutil.copy(tmp_path / "four.nii", tmp_path / "copy.nii")
    write_nifti(tmp_path / "other.nii", np.ones((2, 2, 2, 2), np.int16))
    in_one = [ScanFile(path=Path("four.nii"), volume=n) for n in range(2)]
    alone, copy, other = (ScanFile(path=Path(f"{name}.nii")) for name in ("four", "copy", "other"))

    contents = read_case_files(case_of(tmp_path, *in_one, alone, copy, label=other)).contents

    assert contents[2] == contents[3]
    assert len(set(contents)) == 4


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(4, 70, 33, 20), (4, 3, 2, 1), (40, 65, 5)])
def test_what_was_written_is_read_also_in_parts(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...], *, compressed: bool
) -> None:
    array = rng.normal(size=shape).astype(np.float16)
    path = tmp_path / array_name("image", compressed=compressed)

    write_array(path, array)
    stored = open_array(path)

    assert tuple(stored.shape) == shape
    part = (*(slice(None) for _ in shape[:-3]), slice(1, 3), slice(0, 2), slice(0, 1))
    np.testing.assert_array_equal(stored[part], array[part])
    np.testing.assert_array_equal(stored[(slice(None),) * len(shape)], array)


def test_plain_arrays_are_those_of_numpy(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_array(tmp_path / "labels.npy", array[:, ::-1])

    np.testing.assert_array_equal(np.load(tmp_path / "labels.npy"), array[:, ::-1])


def test_compression_makes_smooth_images_smaller(tmp_path: Path) -> None:
    x, y, z = np.ogrid[:64, :64, :64]
    image = np.sin(x / 9 + y / 7 + z / 8).round(2).astype(np.float16)[None]
    for name in ("image.npy", "image.b2nd"):
        write_array(tmp_path / name, image)

    plain, packed = ((tmp_path / name).stat().st_size for name in ("image.npy", "image.b2nd"))

    assert packed < 0.5 * plain


def test_a_full_disk_is_recognisable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(OSError, match="No space left") as caught:
        write_array(tmp_path / "image.npy", np.zeros((2, 2, 2), dtype=np.float16))

    assert caught.value.errno == errno.ENOSPC


def test_compression_without_blosc2_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)

    with pytest.raises(EnvironmentalError, match=r"pip install brats_seg\[compressed\]"):
        check_compression()
    with pytest.raises(EnvironmentalError, match=r"set store\.compressed to false"):
        open_array(tmp_path / "image.b2nd")


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_arrays_have_the_shape_and_type_asked_for() -> None:
    array = Buffers().take((3, 5, 2), np.float16)
    array[...] = 1

    assert array.shape == (3, 5, 2)
    assert array.dtype == np.float16
    assert array.flags.c_contiguous


def test_memory_is_used_again_once_it_is_free() -> None:
    buffers = Buffers()
    first = address(buffers.take((10, 10), np.float32))

    assert address(buffers.take((10, 10), np.float32)) == first
    # of the same power of two
    assert address(buffers.take((9, 13), np.float32)) == first


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
def test_memory_that_anything_refers_to_is_not_handed_out(hold) -> None:
    buffers = Buffers()
    held = hold(buffers.take((10, 10), np.float32))
    held[...] = 3
    before = held.tolist()

    other = buffers.take((10, 10), np.float32)
    other[...] = 7

    assert held.tolist() == before


def test_several_may_be_held_at_once() -> None:
    buffers = Buffers()
    arrays = [buffers.take((4, 4), np.uint8) for _ in range(5)]
    for value, array in enumerate(arrays):
        array[...] = value

    assert [array.max() for array in arrays] == [0, 1, 2, 3, 4]


def test_no_memory_goes_to_another_process() -> None:
    buffers = Buffers()
    buffers.take((1000, 1000), np.float32)[...] = 1

    packed = pickle.dumps(buffers)

    assert len(packed) < 200
    assert pickle.loads(packed).take((2, 2), np.uint8).shape == (2, 2)
