import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch
from monai.transforms import (
    Compose,
    MapTransform,
    RandAffined,
    RandFlipd,
    RandGaussianNoised,
    RandomizableTransform,
)
from torch import Tensor

from brats_seg.config import PatchConfig
from brats_seg.data.loader import PatchDataset, Sample, patch_loader
from brats_seg.data.patches import PatchKey, epoch_patches
from brats_seg.data.transforms import KEYS, transforms_named
from brats_seg.errors import CaseError, ConfigError, EnvironmentalError
from tests.prepared import write_prepared

IDS = ("BraTS2021_00000", "BraTS2021_00001", "BraTS2021_00002")


class DeadlyDataset(PatchDataset):
    """Ends the process that asks for the fourth draw of a case, as the system does for memory."""

    def __getitem__(self, draw: PatchKey) -> Sample:
        if draw.draw == 3:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(draw)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_prepared(tmp_path_factory.mktemp("data"), n_cases=3)


def make_dataset(folder: Path, kind: type[PatchDataset] = PatchDataset) -> PatchDataset:
    return kind(
        folder, patch=PatchConfig(size=(12, 12, 12)), multiple=(1, 1, 1), augment="full", seed=1
    )


@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_patches_come_in_the_order_of_the_draws_whoever_makes_them(
    folder: Path, n_workers: int
) -> None:
    keys, dataset = epoch_patches(IDS, 0, 5, 1), make_dataset(folder)
    samples = list(patch_loader(dataset, keys, n_workers))

    assert len(samples) == 15
    for draw, sample in zip(keys, samples, strict=True):
        assert sample.case_id == draw.case_id
        assert torch.equal(sample.image, dataset[draw].image)
        assert torch.equal(sample.target, dataset[draw].target)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_the_randomness_of_the_training_is_left_alone(folder: Path, n_workers: int) -> None:
    before = torch.get_rng_state()
    list(patch_loader(make_dataset(folder), epoch_patches(IDS, 0, 1, 1), n_workers))

    assert torch.equal(torch.get_rng_state(), before)


@pytest.mark.parametrize("n_workers", [0, 2])
def test_no_draws_are_no_patches(folder: Path, n_workers: int) -> None:
    assert list(patch_loader(make_dataset(folder), (), n_workers)) == []


def test_workers_end_with_the_epoch_also_when_it_is_cut_short(folder: Path) -> None:
    samples = patch_loader(make_dataset(folder), epoch_patches(IDS, 0, 20, 1), 2)
    next(samples)
    assert len(multiprocessing.active_children()) == 2

    samples.close()

    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_bad_case_is_named_by_its_own_error(folder: Path, n_workers: int) -> None:
    keys = [PatchKey(epoch=0, case_id=case_id, draw=0) for case_id in (IDS[0], "b")]
    samples = patch_loader(make_dataset(folder), keys, n_workers)
    assert next(samples).case_id == IDS[0]

    with pytest.raises(CaseError, match=r"case b, .*found no prepared case"):
        next(samples)


def test_a_killed_worker_is_explained(folder: Path) -> None:
    samples = patch_loader(make_dataset(folder, DeadlyDataset), epoch_patches(IDS, 0, 5, 1), 2)

    with pytest.raises(
        EnvironmentalError, match=r"worker process was killed, .*memory.*n_workers lower.*/dev/shm"
    ):
        list(samples)

    assert multiprocessing.active_children() == []


def test_too_little_shared_memory_is_explained(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: torch.Tensor) -> None:
        raise RuntimeError("unable to allocate shared memory(shm): No space left (simulated)")

    monkeypatch.setattr(torch.Tensor, "share_memory_", refuse)

    with pytest.raises(
        EnvironmentalError, match=r"no room in shared memory \(unable .*n_workers lower.*--shm-size"
    ):
        list(patch_loader(make_dataset(folder), epoch_patches(IDS, 0, 1, 1), 1))


class RandShiftOfTheirs(RandomizableTransform, MapTransform):
    """A transform as a user of MONAI writes it."""

    def __init__(self) -> None:
        MapTransform.__init__(self, "image")
        RandomizableTransform.__init__(self, prob=0.5)

    def __call__(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        self.randomize(None)
        if not self._do_transform:
            return data
        return {**data, "image": data["image"] + self.R.uniform(1, 2)}


def rotation_and_noise() -> Compose:
    """Return transforms of MONAI, as a user names them in the settings."""
    return Compose(
        [
            RandAffined(KEYS, prob=1.0, rotate_range=0.3, mode=("bilinear", "nearest")),
            RandGaussianNoised("image", prob=0.5),
        ]
    )


NAMED = ("tests.test_loader.RandShiftOfTheirs", "tests.test_loader.rotation_and_noise")


@pytest.mark.parametrize("n_workers", [0, 1, 2])
def test_transforms_of_a_user_give_the_same_patches_whoever_makes_them(
    folder: Path, n_workers: int
) -> None:
    def dataset() -> PatchDataset:
        return PatchDataset(
            folder,
            patch=PatchConfig(size=(12, 12, 12)),
            multiple=(1, 1, 1),
            augment="full",
            seed=1,
            transforms=(RandShiftOfTheirs(), rotation_and_noise()),
        )

    keys, plain = epoch_patches(IDS, 0, 4, 1), make_dataset(folder)
    samples = list(patch_loader(dataset(), keys, n_workers))
    alone = dataset()

    for draw, sample in reversed(list(zip(keys, samples, strict=True))):
        assert torch.equal(sample.image, alone[draw].image)
        assert torch.equal(sample.target, alone[draw].target)
        assert (type(sample.image), sample.image.dtype) == (Tensor, torch.float16)
        assert (type(sample.target), sample.target.dtype) == (Tensor, torch.uint8)
        assert not torch.equal(sample.image, plain[draw].image)


def test_transforms_are_named_by_classes_and_functions() -> None:
    shift, composed = transforms_named(NAMED)

    assert type(shift).__name__ == "RandShiftOfTheirs"
    assert type(composed) is Compose


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_package.transform", "No module named 'no_such_package'"),
        ("monai.transforms.NoSuch", "has no attribute 'NoSuch'"),
        ("monai.transforms.RandFlipd", "missing 1 required positional argument: 'keys'"),
        ("tests.test_loader.make_nothing", "returned None"),
    ],
)
def test_a_name_of_no_transform_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"training.transforms .*{name}.*{reason}.*[Ee]xpected"):
        transforms_named([name])


def make_nothing() -> None:
    """Return no transform."""


def test_an_error_in_a_transform_of_a_user_names_the_transform(folder: Path) -> None:
    dataset = PatchDataset(
        folder,
        patch=PatchConfig(size=(12, 12, 12)),
        multiple=(1, 1, 1),
        augment="none",
        seed=1,
        transforms=(RandFlipd("no_such_key", prob=1.0),),
    )

    with pytest.raises(RuntimeError, match=r"applying transform .*RandFlipd"):
        dataset[PatchKey(epoch=0, case_id=IDS[0], draw=0)]
