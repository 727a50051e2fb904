"""Decide, once and before the first step, everything that stays fixed while a run is trained.

`plan_run` is the last to read the settings as a whole: what trains, validates and saves is given the plan.
"""

from dataclasses import dataclass, replace
from math import ceil, prod

from brats_seg.config import Config, Size
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import PatchKey, epoch_patches
from brats_seg.data.manifest import manifest_of
from brats_seg.labels import MODALITY_SUBSETS
from brats_seg.models.build import default_window, padded_size, size_multiple
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.runtime.windows import Window, n_windows
from brats_seg.training.losses import Criterion, Task, task_of
from brats_seg.voxels.box import rounded_up

VALIDATION_SHARE = 0.25
"""Largest cost of the validations of `validation.every: auto`, as a share of that of the training. The
validation after the last epoch, which every run has, comes on top."""
TRAINING_PASSES = 3
"""Cost of a voxel in training, where a voxel of a window in validation costs 1: the backward pass
computes two convolutions for one of the forward pass."""


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
        keys = epoch_patches(case_ids, epoch, config.patch.per_case, config.training.seed)
        return tuple(tuple(keys[start : start + size]) for start in range(0, len(keys), size))

    def n_steps(self, n_epochs: int) -> int:
        """Return the number of optimizer steps of so many epochs."""
        training = self.config.training
        sizes = map(training.effective_batch_at, range(n_epochs))
        return sum(ceil(self.n_patches / size) for size in sizes)

    def is_validated(self, epoch: int, n_epochs: int | None) -> bool:
        """Return whether an epoch ends with a validation on whole cases.

        The last epoch always does, and so does the first one of a run whose number of epochs is not
        known before that.
        """
        return n_epochs is None or epoch + 1 == n_epochs or (epoch + 1) % self.validate_every == 0

    def window(self, shape: Size) -> Size:
        """Return the window in which a case of that shape is validated: that of prediction.

        A network that is trained on whole brain crops gets the crop, padded as the network needs it;
        an autoencoder of patches gets windows of the patch size.
        """
        config = self.config
        if config.patch.size == "whole":
            return rounded_up(shape, self.multiple)
        is_segmentation = config.model.task == "segmentation"
        size = default_window(config.model, self.patch) if is_segmentation else self.patch
        window = Window(size=size, overlap=config.validation.overlap)
        return window.fit(shape, self.patch, self.multiple)


def plan_run(config: Config, data: FoldData, *, criterion: Criterion | None = None) -> RunPlan:
    """Return the plan of a run."""
    task = task_of(config)
    if config.patch.size == "whole":
        patch = padded_size(config.model, data.largest_shape)
    else:
        patch = config.patch.size
    plan = RunPlan(
        config=config,
        data=data,
        device=choose_device(config.training.device, config.training.precision),
        patch=patch,
        multiple=size_multiple(config.model, patch),
        task=task if criterion is None else replace(task, criterion=criterion),
    )
    cost, every = _validation_cost(plan), config.validation.every
    cheap = max(1, ceil(cost / VALIDATION_SHARE))
    return replace(plan, validate_every=cheap if every == "auto" else every, validation_cost=cost)


def _validation_cost(plan: RunPlan) -> float:
    """Return the cost of a validation, in epochs of training: a ratio of numbers of voxels."""
    config, split = plan.config, plan.data.split
    is_whole = config.patch.size == "whole"

    def n_voxels(case_id: str) -> int:
        shape = manifest_of(plan.data.folder, case_id).box.shape
        window = plan.window(shape)
        n = 1 if is_whole else n_windows(shape, window, config.validation.overlap)
        return n * prod(window)

    n_trained = sum(map(n_voxels, split.train)) if is_whole else prod(plan.patch) * len(split.train)
    passes = TRAINING_PASSES * config.patch.per_case
    return sum(map(n_voxels, split.validation)) / (passes * n_trained)
