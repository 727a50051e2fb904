from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg.config import PatchConfig
from brats_seg.data.loader import PatchDataset, Sample, whole_case
from brats_seg.data.patches import PatchKey, epoch_patches
from brats_seg.data.store import open_case
from brats_seg.errors import CaseError
from brats_seg.labels import BRATS2017, regions_of
from brats_seg.voxels.box import Box
from tests.builders import make_label_map
from tests.prepared import write_prepared

IDS = ("BraTS2021_00000", "BraTS2021_00001")
AUGMENTS = ("none", "light", "full")


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two prepared cases of some 45 voxels an edge."""
    return write_prepared(tmp_path_factory.mktemp("data"), n_cases=2, shape=(48, 48, 48))


def make_dataset(
    folder: Path, augment: str = "none", *, size=(16, 24, 8), foreground: float = 0.5, seed: int = 1
) -> PatchDataset:
    patch = PatchConfig(size=size, foreground=foreground)
    return PatchDataset(folder, patch=patch, multiple=(16, 16, 32), augment=augment, seed=seed)


def keys(n: int) -> list[PatchKey]:
    return [PatchKey(epoch=0, case_id=IDS[number % 2], draw=number) for number in range(n)]


def equal(one: Sample, other: Sample) -> bool:
    return (
        one.case_id == other.case_id
        and torch.equal(one.image, other.image)
        and torch.equal(one.target, other.target)
    )


@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_patch_is_an_image_and_a_target_of_one_size(folder: Path, augment: str) -> None:
    dataset = make_dataset(folder, augment)
    for draw in keys(20):
        sample = dataset[draw]

        assert sample.case_id == draw.case_id
        assert sample.image.shape == (4, 16, 24, 8)
        assert sample.target.shape == (3, 16, 24, 8)
        assert sample.image.dtype == torch.float16
        assert sample.target.dtype == torch.uint8
        assert sample.image.isfinite().all()
        # ET lies in TC, TC in WT
        wt, tc, et = sample.target
        assert (et <= tc).all()
        assert (tc <= wt).all()


def test_without_augmentation_a_patch_is_a_box_of_the_case(folder: Path) -> None:
    sample = make_dataset(folder, size=(60, 60, 60))[keys(1)[0]]

    case = open_case(folder, IDS[0])
    start = tuple((n - 60) // 2 for n in case.shape)
    np.testing.assert_array_equal(sample.image, case.read_image(Box.at(start, (60, 60, 60))))
    labels = case.read_labels(Box.at(start, (60, 60, 60)))
    np.testing.assert_array_equal(sample.target, regions_of(labels, BRATS2017))


@pytest.mark.parametrize("augment", AUGMENTS)
def test_the_same_draw_is_the_same_patch_in_any_order(folder: Path, augment: str) -> None:
    dataset, other = make_dataset(folder, augment), make_dataset(folder, augment)
    samples = {draw: dataset[draw] for draw in keys(12)}

    assert all(equal(other[draw], samples[draw]) for draw in reversed(keys(12)))


@pytest.mark.parametrize("augment", AUGMENTS)
def test_threads_change_no_bit(folder: Path, augment: str) -> None:
    dataset = make_dataset(folder, augment, size=(48, 48, 48))
    alone = [dataset[draw] for draw in keys(12)]
    before = torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        together = [dataset[draw] for draw in keys(12)]
        assert torch.get_num_threads() == 3
    finally:
        torch.set_num_threads(before)

    assert all(map(equal, alone, together))


def test_other_seeds_epochs_cases_and_draws_are_other_patches(folder: Path) -> None:
    draw = PatchKey(epoch=0, case_id=IDS[0], draw=0)
    others = [
        make_dataset(folder)[PatchKey(epoch=1, case_id=IDS[0], draw=0)],
        make_dataset(folder)[PatchKey(epoch=0, case_id=IDS[1], draw=0)],
        make_dataset(folder)[PatchKey(epoch=0, case_id=IDS[0], draw=1)],
        make_dataset(folder, seed=2)[draw],
    ]

    assert not any(equal(make_dataset(folder)[draw], other) for other in others)


def test_augmentation_leaves_the_place_of_a_patch(folder: Path) -> None:
    """With and without it a case is seen at the same places: only what is seen changes."""
    plain, light = (make_dataset(folder, augment) for augment in ("none", "light"))
    for draw in keys(10):
        n_tumour = [int(dataset[draw].target[0].sum()) for dataset in (plain, light)]

        assert n_tumour[0] == n_tumour[1]


@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_sample_that_is_held_does_not_change(folder: Path, augment: str) -> None:
    dataset = make_dataset(folder, augment)
    held = [dataset[draw] for draw in keys(8)]
    copies = [(sample.image.clone(), sample.target.clone()) for sample in held]
    for draw in keys(8):
        dataset[draw].image.fill_(9)

    for sample, (image, target) in zip(held, copies, strict=True):
        assert torch.equal(sample.image, image)
        assert torch.equal(sample.target, target)


def test_memory_is_used_again_when_a_sample_is_dropped(folder: Path) -> None:
    dataset = make_dataset(folder)
    addresses = {dataset[draw].image.data_ptr() for draw in keys(6)}

    assert len(addresses) == 1


def test_patches_on_tumour_hold_tumour(folder: Path) -> None:
    dataset = make_dataset(folder, foreground=1.0)

    assert all(dataset[draw].target[0].any() for draw in keys(10))


def test_a_whole_case_is_a_patch_of_a_size_that_the_network_takes(folder: Path) -> None:
    sample = make_dataset(folder, size="whole")[keys(1)[0]]

    case = open_case(folder, IDS[0])
    x, y, z = case.shape
    assert all(32 < n < 48 for n in case.shape)
    assert sample.image.shape == (4, 48, 48, 64)
    np.testing.assert_array_equal(
        sample.image[:, :x, :y, :z], case.read_image(Box.at((0, 0, 0), case.shape))
    )
    assert not sample.image[:, x:].any()
    assert not sample.image[..., z:].any()


def test_a_held_out_case_is_its_brain_crop(folder: Path) -> None:
    sample = whole_case(folder, IDS[0])

    case = open_case(folder, IDS[0])
    assert sample.case_id == IDS[0]
    assert sample.image.dtype == torch.float16
    np.testing.assert_array_equal(sample.image, case.read_image(Box.at((0, 0, 0), case.shape)))
    labels = make_label_map((48, 48, 48), seed=0)[case.box.slices]
    np.testing.assert_array_equal(sample.target, regions_of(labels, BRATS2017))


def test_an_absent_case_is_named(folder: Path) -> None:
    with pytest.raises(CaseError, match=r"case b, .*found no prepared case"):
        make_dataset(folder)[PatchKey(epoch=0, case_id="b", draw=0)]
    with pytest.raises(CaseError, match=r"case b, .*found no prepared case"):
        whole_case(folder, "b")


def test_a_case_without_label_map_is_named(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, labelled=False)

    for augment in AUGMENTS:
        with pytest.raises(CaseError, match=f"case {IDS[0]}, .*found no label map"):
            make_dataset(folder, augment)[keys(1)[0]]
    with pytest.raises(CaseError, match=f"case {IDS[0]}, .*found no label map"):
        whole_case(folder, IDS[0])


def test_compressed_cases_give_the_same_patches(folder: Path, tmp_path: Path) -> None:
    packed = write_prepared(tmp_path, n_cases=2, shape=(48, 48, 48), compressed=True)

    for draw in epoch_patches(IDS, 0, 3, 1):
        assert equal(make_dataset(packed, "full")[draw], make_dataset(folder, "full")[draw])
