import multiprocessing
import os
import signal
from pathlib import Path

import pytest
import torch

from brats_seg.config import PatchConfig
from brats_seg.data.loader import PatchDataset, Sample, patch_loader
from brats_seg.data.patches import PatchKey, epoch_patches
from brats_seg.errors import CaseError, EnvironmentalError
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
