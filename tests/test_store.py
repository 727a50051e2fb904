import errno
import sys
from pathlib import Path

import numpy as np
import pytest

from brats_seg.data.store import MANIFEST_NAME, open_case
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.labels import BRATS2017, regions_of
from brats_seg.voxels.box import Box
from tests.builders import make_label_map, make_volumes
from tests.prepared import write_prepared

CASE = "BraTS2021_00000"


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
    manifest = folder / CASE / MANIFEST_NAME
    text = manifest.read_text()
    case = open_case(folder, CASE)
    manifest.write_text(text.replace(f'"stop": [\n   {case.box.stop[0]}', '"stop": [\n   99'))

    with pytest.raises(CaseError, match=r"found an array of shape .*; expected one of shape"):
        open_case(folder, CASE)


def test_a_compressed_case_needs_blosc2(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = write_prepared(tmp_path, compressed=True)
    monkeypatch.setitem(sys.modules, "blosc2", None)

    with pytest.raises(EnvironmentalError, match="need the package blosc2"):
        open_case(folder, CASE)
