"""Test the batches of an epoch: their patches, read once and cut into micro-batches."""

from collections.abc import Callable

import pytest
import torch

from brats_seg.cases.folds import Split
from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData, open_split
from brats_seg.data.intensities import Item
from brats_seg.data.loader import PatchDataset, PatchKey, Sample
from brats_seg.training.batches import Batch, held_out_patches, read_batches
from brats_seg.training.run_plan import plan_run
from tests.prepared import write_prepared


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    """Three cases to train on, one held out."""
    folder = write_prepared(tmp_path_factory.mktemp("data"), n_cases=4)
    ids = [f"BraTS2021_{number:05d}" for number in range(4)]
    return open_split(folder, Split(train=tuple(ids[:3]), validation=(ids[3],)))


def settings(*assignments: str) -> Config:
    fixed = ["patch.size=[12, 12, 12]", "patch.per_case=3", "model.name=notebook"]
    return load_config(
        assignments=[*fixed, "training.device=cpu", "training.effective_batch=4", *assignments]
    )


def samples(n: int) -> tuple[Sample, ...]:
    return tuple(
        Sample(
            image=torch.full((4, 2, 2, 2), float(number), dtype=torch.float16),
            target=torch.full((3, 2, 2, 2), number, dtype=torch.uint8),
            case_id=str(number),
        )
        for number in range(n)
    )


@pytest.mark.parametrize("size", [1, 2, 3, 5, 8])
def test_micro_batches_hold_every_patch_once_and_in_order(size: int) -> None:
    parts = list(Batch(samples=samples(5)).micro_batches(size))

    assert [len(part.image) for part in parts[:-1]] == [size] * (len(parts) - 1)
    assert torch.cat([part.image for part in parts])[:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    assert torch.cat([part.target for part in parts])[:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
    # a rank may have no patches
    assert list(Batch(samples=()).micro_batches(size)) == []


def test_the_host_holds_patches_as_they_were_read() -> None:
    """A micro-batch of one is a view; half of the bytes of float32, a quarter for targets."""
    batch = Batch(samples=samples(2))

    for sample, part in zip(batch.samples, batch.micro_batches(1), strict=True):
        assert part.image.dtype == torch.float16
        assert part.target.dtype == torch.uint8
        assert part.image.data_ptr() == sample.image.data_ptr()
        assert part.target.data_ptr() == sample.target.data_ptr()


@pytest.mark.parametrize("n_workers", [0, 2])
def test_batches_hold_the_patches_of_their_keys(data: FoldData, n_workers: int) -> None:
    config = settings(f"training.n_workers={n_workers}", "training.augment=full")
    keys = plan_run(config, data).keys(0)

    batches = list(read_batches(plan_run(config, data), keys))

    assert [len(batch.samples) for batch in batches] == [4, 4, 1]
    expected = [tuple(key.case_id for key in batch) for batch in keys]
    assert [batch.case_ids for batch in batches] == expected


def test_every_patch_is_made_once(data: FoldData, monkeypatch: pytest.MonkeyPatch) -> None:
    """This also holds for a loss of two passes: the second pass uses the batch on the host."""
    made: list[PatchKey] = []
    make = PatchDataset.__getitem__

    def counted(dataset: PatchDataset, key: PatchKey) -> Sample:
        made.append(key)
        return make(dataset, key)

    monkeypatch.setattr(PatchDataset, "__getitem__", counted)
    config = settings("training.n_workers=0")
    keys = plan_run(config, data).keys(0)

    for n_batches, batch in enumerate(read_batches(plan_run(config, data), keys), start=1):
        for _ in range(2):
            list(batch.micro_batches(2))
        # a run that stops after some batches has not read the next ones
        assert made == [key for batch_keys in keys[:n_batches] for key in batch_keys]


@pytest.mark.parametrize("augment", ["none", "full"])
def test_modality_dropout_empties_whole_channels_and_leaves_place_and_labels(
    data: FoldData, augment: str
) -> None:
    """Dropped channels are empty even if noise was added before; without dropout nothing changes."""
    keys = [[PatchKey(epoch=0, case_id=data.split.train[0], draw=draw) for draw in range(12)]]
    plain, dropped, again = (
        next(
            read_batches(plan_run(settings(f"training.augment={augment}", *more), data), keys)
        ).samples
        for more in ([], ["training.modality_dropout=1"], ["training.modality_dropout=1"])
    )

    n_kept = set()
    for before, after, same in zip(plain, dropped, again, strict=True):
        assert after.target.equal(before.target)
        assert after.image.dtype == before.image.dtype
        assert after.image.equal(same.image)
        empty = [not channel.any() for channel in after.image]
        for channel, of_all, is_empty in zip(after.image, before.image, empty, strict=True):
            assert is_empty or channel.equal(of_all)
        n_kept.add(4 - sum(empty))
    assert n_kept == {1, 2, 3}


def brighten() -> Callable[[Item], Item]:
    """Return a transform of one's own that leaves no channel empty."""
    return lambda data: {**data, "image": data["image"] + 1}


def test_modality_dropout_comes_after_transforms_of_ones_own(data: FoldData) -> None:
    keys = [[PatchKey(epoch=0, case_id=data.split.train[0], draw=draw) for draw in range(3)]]
    own = f"training.transforms=[{__name__}.brighten]"

    (batch,) = read_batches(plan_run(settings(own, "training.modality_dropout=1"), data), keys)
    (plain,) = read_batches(plan_run(settings(own), data), keys)

    for sample, before in zip(batch.samples, plain.samples, strict=True):
        same = [c.equal(b) for c, b in zip(sample.image, before.image, strict=True)]
        empty = [not channel.any() for channel in sample.image]
        assert any(empty)
        assert same == [not one for one in empty]


def test_held_out_patches_keep_all_modalities(data: FoldData) -> None:
    keys = [PatchKey(epoch=0, case_id=data.split.validation[0], draw=draw) for draw in range(3)]

    dropped, plain = (
        list(held_out_patches(plan_run(settings(f"training.modality_dropout={prob}"), data), keys))
        for prob in (1, 0)
    )

    for one, other in zip(dropped, plain, strict=True):
        assert one.image.equal(other.image)
