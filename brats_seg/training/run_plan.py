"""Decide, once and before the first step, what a run is trained on, and read it batch by batch.

`plan_run` is the last to read the settings as a whole: what trains, validates and saves is given the plan.
`read_batches` reads its patches. A `Batch` holds those of one step on the host, as the loader made them,
and cuts them into micro-batches; the device holds one micro-batch at a time.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import chain, islice
from math import ceil, prod

import torch

from brats_seg.config import Config, Size
from brats_seg.cpu_threads import available_cpus
from brats_seg.data import loader
from brats_seg.data.fold import FoldData
from brats_seg.data.intensities import RandIntensitiesd, Transform, drop_modalities
from brats_seg.data.loader import PatchKey, Sample
from brats_seg.data.store import read_case_manifest
from brats_seg.data.transforms import training_transforms, transform_named
from brats_seg.labels import MODALITY_SUBSETS
from brats_seg.models.build import default_window, padded_size, size_multiple
from brats_seg.progress import part
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.runtime.windows import Window, n_windows
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import Criterion, Task, build_task

VALIDATION_SHARE = 0.25
"""Largest cost of the validations of `validation.every: auto`, as a share of that of the training. The
validation after the last epoch, which every run has, comes on top."""
LEAST_WATCHED = 8
"""Least number of held-out patches whose loss the schedule watches."""
TRAINING_PASSES = 3
"""Cost of a voxel in training, where a voxel of a window in validation costs 1: the backward pass
computes two convolutions for one of the forward pass."""
MAX_AUTO_WORKERS = 8
"""Largest automatic number of workers: eight make patches faster than one GPU trains on them."""
_LARGEST_CROP = (160, 192, 160)
"""Voxels of a large brain crop, for the memory of patches that are whole crops."""
_BYTES_PER_VOXEL = 11
"""Bytes of a voxel of a patch in shared memory: four modalities in float16, three regions in uint8."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunPlan:
    """Everything that is fixed before the first step of a run."""

    config: Config
    data: FoldData
    device: Device
    patch: Size
    """Voxels that the network is built for."""
    multiple: Size
    """Numbers that the size of an input must be a multiple of."""
    task: Task
    window_size: Size | None
    """Window in which cases are validated, that of prediction; None is the whole brain crop."""
    validate_every: int = 1
    """Epochs from one validation on whole cases to the next."""
    validation_cost: float = 0.0
    """Cost of such a validation, in epochs of training."""

    @property
    def identity(self) -> ModelIdentity:
        """Data that the network is trained on."""
        return ModelIdentity(
            conventions=self.data.conventions,
            patch=self.patch,
            fingerprint=self.data.fingerprint,
            spacing_mm=self.data.spacing_mm,
            subsets=MODALITY_SUBSETS if self.config.training.modality_dropout > 0 else (),
        )

    @property
    def n_patches(self) -> int:
        """Patches of an epoch."""
        return self.config.patch.per_case * len(self.data.split.train)

    def keys(self, epoch: int) -> tuple[tuple[PatchKey, ...], ...]:
        """Return the keys of the patches of each optimizer step of an epoch.

        They are a pure function of settings, cases and epoch. The last batch may hold fewer patches.
        """
        config = self.config
        case_ids, size = self.data.split.train, config.training.effective_batch_at(epoch)
        keys = loader.epoch_patches(case_ids, epoch, config.patch.per_case, config.training.seed)
        return tuple(tuple(keys[start : start + size]) for start in range(0, len(keys), size))

    def n_steps(self, n_epochs: int) -> int:
        """Return the number of optimizer steps of a number of epochs."""
        training = self.config.training
        sizes = map(training.effective_batch_at, range(n_epochs))
        return sum(ceil(self.n_patches / size) for size in sizes)

    def is_validated(self, epoch: int, n_epochs: int | None) -> bool:
        """Return whether an epoch ends with a validation on whole cases.

        The last epoch always does, and so does the first one of a run whose number of epochs is not
        known before that.
        """
        return n_epochs is None or epoch + 1 == n_epochs or (epoch + 1) % self.validate_every == 0

    @property
    def watched_patches(self) -> tuple[PatchKey, ...]:
        """Keys of the held-out patches whose loss the schedule watches; the same after each epoch.

        There are none where whole cases are validated each time, or where no loss is watched.
        """
        if self.config.schedule.name != "plateau" or self.validate_every == 1:
            return ()
        case_ids = self.data.split.validation
        is_whole = self.config.patch.size == "whole"
        draws = range(1 if is_whole else ceil(LEAST_WATCHED / len(case_ids)))
        return tuple(
            PatchKey(epoch=0, case_id=case_id, draw=draw) for case_id in case_ids for draw in draws
        )

    def window(self, shape: Size) -> Size:
        """Return the window in which a case of that shape is validated: that of prediction."""
        window = Window(size=self.window_size, overlap=self.config.validation.overlap)
        return window.fit(shape, self.patch, self.multiple)


def plan_run(
    config: Config, data: FoldData, *, criterion: Criterion | None = None, is_given: bool = False
) -> RunPlan:
    """Return the plan of a run; a network that is given in Python may take its patch only."""
    task, size = build_task(config), config.patch.size
    patch = padded_size(config.model, data.largest_shape) if size == "whole" else size
    window = default_window(config, patch)
    plan = RunPlan(
        config=config,
        data=data,
        device=choose_device(config.training.device, config.training.precision),
        patch=patch,
        multiple=size_multiple(config.model, patch),
        task=task if criterion is None else replace(task, criterion=criterion),
        window_size=patch if is_given and window else window,
    )
    cost, every = _validation_cost(plan), config.validation.every
    cheap = max(1, ceil(cost / VALIDATION_SHARE))
    return replace(plan, validate_every=cheap if every == "auto" else every, validation_cost=cost)


def _validation_cost(plan: RunPlan) -> float:
    """Return the cost of a validation, in epochs of training: a ratio of numbers of voxels."""
    config, split = plan.config, plan.data.split
    is_whole = config.patch.size == "whole"

    def n_voxels(case_id: str) -> int:
        shape = read_case_manifest(plan.data.folder, case_id).box.shape
        window = plan.window(shape)
        return n_windows(shape, window, config.validation.overlap) * prod(window)

    n_trained = sum(map(n_voxels, split.train)) if is_whole else prod(plan.patch) * len(split.train)
    passes = TRAINING_PASSES * config.patch.per_case
    return sum(map(n_voxels, split.validation)) / (passes * n_trained)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Batch:
    """The patches of one effective batch, held on the host in the types in which they were read.

    With a float16 image and uint8 regions a patch of 128x128x128 takes 23 MB.
    """

    samples: tuple[Sample, ...]

    @property
    def case_ids(self) -> tuple[str, ...]:
        """The case of each patch."""
        return tuple(sample.case_id for sample in self.samples)

    def micro_batches(self, size: int) -> Iterator[MicroBatch]:
        """Yield the patches in their order, `size` at a time; the last micro-batch may be smaller.

        A micro-batch of one patch is a view of it; one of several patches is a copy. They are counted
        as a part of the work that is shown.
        """
        starts = range(0, len(self.samples), size)
        with part("micro-batches of the step", len(starts)) as after_micro_batch:
            for start in starts:
                group = self.samples[start : start + size]
                yield MicroBatch(
                    _stack([sample.image for sample in group]),
                    _stack([sample.target for sample in group]),
                )
                after_micro_batch()


def read_batches(plan: RunPlan, batches: Sequence[Sequence[PatchKey]]) -> Iterator[Batch]:
    """Yield the batch of each group of keys; every patch is read once."""
    training = plan.config.training
    transforms = tuple(map(transform_named, training.transforms))
    if training.modality_dropout > 0:
        # after all others: noise, or a transform of the user, would fill the empty channels
        changes = [(drop_modalities, training.modality_dropout)]
        transforms += (RandIntensitiesd("image", changes),)
    samples = _patches(plan, chain.from_iterable(batches), training.augment, transforms)
    for batch in batches:
        yield Batch(samples=tuple(islice(samples, len(batch))))


def held_out_patches(plan: RunPlan, keys: Iterable[PatchKey]) -> Iterator[Sample]:
    """Yield the patches of those keys in their order, without augmentation."""
    return _patches(plan, keys, "none", ())


def shared_memory_needed(config: Config, *, on_gpu: bool) -> int:
    """Return the bytes of shared memory that the patches of the worker processes take."""
    n_workers, batch = _n_workers(config, on_gpu=on_gpu), config.training.effective_batch
    size = _LARGEST_CROP if config.patch.size == "whole" else config.patch.size
    largest = batch if isinstance(batch, int) else max(batch.values())
    # the batch that is trained on, the one that is read meanwhile, and what the workers prepare after it
    n_patches = 2 * largest + n_workers * loader.PATCHES_AHEAD if n_workers else 0
    return n_patches * prod(size) * _BYTES_PER_VOXEL


def _stack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    return tensors[0][None] if len(tensors) == 1 else torch.stack(tuple(tensors))


def _patches(
    plan: RunPlan, keys: Iterable[PatchKey], augment: str, transforms: Sequence[Transform]
) -> Iterator[Sample]:
    pipeline = training_transforms(
        plan.data.folder,
        patch=plan.config.patch,
        multiple=plan.multiple,
        augment=augment,
        extra=transforms,
    )
    seed, target_key = plan.config.training.seed, plan.task.target_key
    dataset = loader.PatchDataset(pipeline, seed=seed, target_key=target_key)
    on_gpu = plan.device.torch_device.type != "cpu"
    return loader.patch_loader(dataset, keys, _n_workers(plan.config, on_gpu=on_gpu))


def _n_workers(config: Config, *, on_gpu: bool) -> int:
    if config.training.n_workers != "auto":
        return config.training.n_workers
    # on a machine without a GPU, training itself keeps the processors busy
    return min(MAX_AUTO_WORKERS, available_cpus()) if on_gpu else 0
