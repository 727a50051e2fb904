"""Test what is fixed before the first step, and the batches that are read: each patch once."""

from collections import Counter
from collections.abc import Callable
from math import ceil, prod
from pathlib import Path

import pytest
import torch

from brats_seg.cases.folds import Split
from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData, open_split
from brats_seg.data.intensities import Item
from brats_seg.data.loader import PatchDataset, PatchKey, Sample, whole_case
from brats_seg.labels import MODALITY_SUBSETS
from brats_seg.runtime.windows import predict_logits
from brats_seg.training import run_plan
from brats_seg.training.run_plan import Batch, RunPlan, plan_run, read_batches
from tests.inference_builders import CASES
from tests.training_builders import tiny_settings


def settings(*changes: str) -> Config:
    return tiny_settings("training.effective_batch=2", "validation.every=auto", *changes)


def window_voxels(plan: RunPlan) -> int:
    seen = []
    for case_id in plan.data.split.validation:
        image = whole_case(plan.data.folder, case_id).image.float()
        predict_logits(
            lambda window: seen.append(window[0, 0].numel()) or window[:, :3],
            image,
            window=plan.window(image.shape[1:]),
            overlap=plan.config.validation.overlap,
            device=plan.device,
        )
    return sum(seen)


@pytest.mark.parametrize("overlap", [0, 0.5])
@pytest.mark.parametrize("per_case", [1, 5, 200])
def test_validations_cost_at_most_a_share(data: FoldData, overlap: float, per_case: int) -> None:
    config = settings(f"validation.overlap={overlap}", f"patch.per_case={per_case}")
    trained = 3 * len(data.split.train) * per_case * prod(config.patch.size)
    plan = plan_run(config, data)
    assert plan.validation_cost == window_voxels(plan) / trained
    assert plan.validate_every == ceil(plan.validation_cost / run_plan.VALIDATION_SHARE)
    if per_case == 1:
        assert plan.validate_every > 1
    # of whole crops, four cases are learnt from at three passes each, two are held out
    assert plan_run(settings("patch.size=whole"), data).validate_every == 1
    assert plan_run(settings("patch.size=whole", "validation.every=7"), data).validate_every == 7
    foreign = plan_run(settings("patch.size=whole", "model.name=torch.nn.Conv3d"), data)
    assert all(n % 32 == 0 for n in foreign.patch)


def test_the_steps_of_a_run_are_counted_and_hold_every_patch_once(data: FoldData) -> None:
    plan = plan_run(settings("training.effective_batch={0: 4, 1: 9}", "patch.per_case=3"), data)
    assert plan.n_patches == 12
    assert [plan.n_steps(n) for n in range(4)] == [0, 3, 5, 7]
    for epoch, sizes in ((0, [4, 4, 4]), (1, [9, 3])):
        keys = plan.keys(epoch)
        assert [len(batch) for batch in keys] == sizes
        assert len({key for batch in keys for key in batch}) == 12
        assert keys == plan.keys(epoch)


def test_epochs_that_are_validated_and_patches_that_are_watched_in_the_others(data):
    cosine, plateau, each_time, whole = (
        plan_run(settings(f"validation.every={every}", f"schedule.name={name}", *more), data)
        for every, name, *more in (
            (3, "cosine"),
            (3, "plateau"),
            (1, "plateau"),
            (3, "plateau", "patch.size=whole"),
        )
    )
    assert [cosine.is_validated(epoch, 5) for epoch in range(5)] == [0, 0, 1, 0, 1]
    assert cosine.is_validated(0, None)
    assert cosine.watched_patches == each_time.watched_patches == ()
    for plan, n_each in ((plateau, 4), (whole, 1)):
        watched = Counter(key.case_id for key in plan.watched_patches)
        assert watched == dict.fromkeys(data.split.validation, n_each)
    assert cosine.identity.subsets == ()
    dropping = plan_run(settings("training.modality_dropout=0.1"), data)
    assert dropping.identity.subsets == MODALITY_SUBSETS


@pytest.fixture
def four(tiny_prepared: Path) -> FoldData:
    return open_split(tiny_prepared, Split(train=CASES[:3], validation=CASES[3:4]))


def patch_plan(data: FoldData, *assignments: str) -> RunPlan:
    fixed = ["patch.size=[12, 12, 12]", "patch.per_case=3", "model.name=notebook"]
    fixed += ["training.device=cpu", "training.effective_batch=4"]
    return plan_run(load_config(assignments=[*fixed, *assignments]), data)


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
    batch = Batch(samples=samples(5))
    parts = list(batch.micro_batches(size))
    assert [len(part.image) for part in parts[:-1]] == [size] * (len(parts) - 1)
    for name, dtype in (("image", torch.float16), ("target", torch.uint8)):
        tensors = [getattr(part, name) for part in parts]
        assert torch.cat(tensors)[:, 0, 0, 0, 0].tolist() == [0, 1, 2, 3, 4]
        assert {tensor.dtype for tensor in tensors} == {dtype}
        if size == 1:
            for tensor, sample in zip(tensors, batch.samples, strict=True):
                assert tensor.data_ptr() == getattr(sample, name).data_ptr()
    # a rank may have no patches
    assert list(Batch(samples=()).micro_batches(size)) == []


def test_every_patch_is_made_once(four: FoldData, monkeypatch: pytest.MonkeyPatch) -> None:
    made: list[PatchKey] = []
    make = PatchDataset.__getitem__

    def counted(dataset: PatchDataset, key: PatchKey) -> Sample:
        made.append(key)
        return make(dataset, key)

    monkeypatch.setattr(PatchDataset, "__getitem__", counted)
    plan = patch_plan(four, "training.n_workers=0", "training.augment=full")
    keys = plan.keys(0)
    batches = []
    for n_batches, batch in enumerate(read_batches(plan, keys), start=1):
        batches.append(batch.case_ids)
        for _ in range(2):
            list(batch.micro_batches(2))
        # a run that stops after some batches has not read the next ones
        assert made == [key for batch_keys in keys[:n_batches] for key in batch_keys]
    assert list(map(len, batches)) == [4, 4, 1]
    assert batches == [tuple(key.case_id for key in batch) for batch in keys]
    by_workers = read_batches(patch_plan(four, "training.n_workers=2"), keys)
    assert [batch.case_ids for batch in by_workers] == batches


@pytest.mark.parametrize("augment", ["none", "full"])
def test_modality_dropout_empties_whole_channels_alone(four: FoldData, augment: str) -> None:
    """Dropped channels are empty even if noise was added before; without dropout nothing changes."""
    keys = [PatchKey(epoch=0, case_id=four.split.train[0], draw=draw) for draw in range(12)]
    plain_plan, dropping = (
        patch_plan(four, f"training.augment={augment}", f"training.modality_dropout={chance}")
        for chance in (0, 1)
    )
    plans = plain_plan, dropping, dropping
    plain, dropped, again = (next(read_batches(plan, [keys])).samples for plan in plans)
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
    # held-out patches keep all modalities, and are not augmented
    keys = [PatchKey(epoch=0, case_id=four.split.validation[0], draw=draw) for draw in range(3)]
    plans = patch_plan(four, "training.augment=none"), dropping
    held_out = (run_plan.held_out_patches(plan, keys) for plan in plans)
    assert all(one.image.equal(other.image) for one, other in zip(*held_out, strict=True))


def brighten() -> Callable[[Item], Item]:
    return lambda data: {**data, "image": data["image"] + 1}


def test_modality_dropout_comes_after_transforms_of_ones_own(four: FoldData) -> None:
    keys = [[PatchKey(epoch=0, case_id=four.split.train[0], draw=draw) for draw in range(3)]]
    own = f"training.transforms=[{__name__}.brighten]"
    (batch,) = read_batches(patch_plan(four, own, "training.modality_dropout=1"), keys)
    (plain,) = read_batches(patch_plan(four, own), keys)
    for sample, before in zip(batch.samples, plain.samples, strict=True):
        same = [c.equal(b) for c, b in zip(sample.image, before.image, strict=True)]
        empty = [not channel.any() for channel in sample.image]
        assert any(empty)
        assert same == [not one for one in empty]
