"""Define the tasks of a network, segmentation and reconstruction, by their losses and scores.

A loss is any callable that takes the output of a network and a target; `Reduction` says how it declares
how the losses of patches combine to that of the batch, which decides how its gradient is computed.

N patches, R regions, L levels of deep supervision, C modalities, X Y Z voxels. Networks give logits,
never probabilities; targets are 0 or 1.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar, Literal, Protocol, TypeAlias, cast, get_args, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.config import Config, LossConfig
from brats_seg.errors import ConfigError
from brats_seg.evaluation.metrics import dice, jaccard, region_counts
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models.build import build_by_name
from brats_seg.models.interface import TrainingOutput, as_output

Output: TypeAlias = Tensor | TrainingOutput | tuple[Any, ...] | list[Any] | dict[str, Any]
"""Output of a network, which a loss gets unchanged; see `models.interface`."""
Criterion: TypeAlias = Callable[[Output, Tensor], Tensor]
Measure: TypeAlias = Callable[[Output, Tensor], Tensor]
"""Maps output and target of a micro-batch to a tensor with a row for each patch."""
Reduction: TypeAlias = Literal["patches", "sums", "outputs"]
"""Attribute `reduces` of a loss.

- `patches`: the loss returns one number for each patch, `(N,)`; that of the batch is their mean.
- `sums`: the loss is a function of sums over patches, such as batch Dice, see `SumsLoss`.
- `outputs`, or no such attribute: nothing is assumed. The loss is called once with all outputs and
  targets of the batch and returns a scalar, as the losses of torch and MONAI do.

A loss of each kind may have parameters, if it is an `nn.Module`, and may read the weights of the network:
their gradients are those of the whole batch too.
"""

SMOOTH_VOXELS = 1.0
"""Added to both sides of the Dice ratio, so that it is defined where a region is empty."""
BACKGROUND_WEIGHT = 0.1
"""Weight of the squared error of a voxel outside the brain; a voxel inside has weight 1."""
_VOXELS = (2, 3, 4)
"""Axes of the voxels of patches `(N, R, X, Y, Z)`."""


@runtime_checkable
class SumsLoss(Protocol):
    """A loss that is a function of sums over all patches, such as batch Dice."""

    def sums(self, output: Output, target: Tensor) -> Tensor:
        """Return the sums over the given patches, in any shape."""

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        """Return the loss of the batch, a scalar."""


def reduction_of(criterion: object) -> Reduction:
    """Return how a loss declares that it reduces over patches, "outputs" if it declares nothing."""
    declared: Reduction = getattr(criterion, "reduces", "outputs")
    name = _criterion_name(criterion)
    if declared not in get_args(Reduction):
        msg = f"the loss {name} declares reduces = {declared!r}; expected 'patches' or 'sums'"
        raise ConfigError(msg)
    if declared == "sums" and not isinstance(criterion, SumsLoss):
        methods = "sums(output, target) and of_sums(sums, n_patches)"
        msg = f"the loss {name} declares reduces = 'sums' and lacks the methods for it: {methods}"
        raise ConfigError(msg)
    return declared


def as_sums_loss(criterion: object) -> SumsLoss | None:
    """Return a loss that declares `reduces = "sums"`, and None for any other."""
    return cast("SumsLoss", criterion) if reduction_of(criterion) == "sums" else None


def whole_loss(criterion: Criterion, output: Output, target: Tensor) -> Tensor:
    """Return the loss of patches that are all in one batch, as a scalar."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return by_sums.of_sums(by_sums.sums(output, target), len(target))
    loss = criterion(output, target)
    return loss.mean() if reduction_of(criterion) == "patches" else check_scalar(loss, criterion)


def check_scalar(loss: Tensor, criterion: object) -> Tensor:
    """Return the loss of all patches together, as a tensor without axes."""
    if loss.numel() != 1:
        problem = f"the loss {_criterion_name(criterion)} returned the shape {tuple(loss.shape)}"
        msg = f"{problem}; expected a scalar, for example by loss.arguments {{reduction: mean}}"
        raise ConfigError(msg)
    return loss.reshape(())


def parameters_of(criterion: object) -> list[nn.Parameter]:
    """Return the parameters of a loss that are learnt with the network; only a module has any."""
    return list(criterion.parameters()) if isinstance(criterion, nn.Module) else []


def measure_nothing(output: Output, target: Tensor) -> Tensor:
    """Return a row without columns for each patch."""
    return target.new_empty((len(target), 0))


def build_criterion(config: LossConfig) -> Criterion:
    """Return the segmentation loss of the settings, or any loss by its dotted name.

    A loss that declares `reduces` is called with the output of the network. Any other is
    called with logits and targets `(N, R, X, Y, Z)` in float32, see `LogitsLoss`.
    """
    if config.name is not None:
        return loss_of_logits(build_by_name(config.name, config.arguments, "loss"))
    if config.arguments:
        msg = f"loss.arguments is {config.arguments} without loss.name; expected a dotted name too, or loss.arguments={{}}"
        raise ConfigError(msg)
    return BatchDiceBce(config) if config.batch_dice else DiceBce(config)


def loss_of_logits(criterion: Criterion) -> Criterion:
    """Return a loss that takes the output of any network; one that declares nothing takes plain logits."""
    return criterion if reduction_of(criterion) != "outputs" else LogitsLoss(criterion)


class LogitsLoss(nn.Module):
    """Apply a loss of plain logits to the output of any network.

    With deep supervision the loss of each level is weighted as in `DiceBce`.

    Example:
        >>> loss = LogitsLoss(nn.BCEWithLogitsLoss())
        >>> round(float(loss(torch.zeros(1, 3, 2, 2, 2), torch.ones(1, 3, 2, 2, 2))), 3)
        0.693
    """

    def __init__(self, loss: Criterion) -> None:
        super().__init__()
        self.loss = loss

    def forward(self, output: Output, target: Tensor) -> Tensor:
        """Return the loss of all patches together, a scalar."""
        with torch.autocast(target.device.type, enabled=False):
            losses = _by_level(self._scalar_loss, output, target)
            return torch.tensordot(_level_weights(losses), losses, dims=1)

    def _scalar_loss(self, logits: Tensor, target: Tensor) -> Tensor:
        return check_scalar(self.loss(logits, target), self.loss)


class DiceBce(nn.Module):
    """Soft Dice plus binary cross-entropy, per region, as one number for each patch.

    `(N, R, X, Y, Z)` logits, or the `TrainingOutput` of a network with deep supervision, and
    `(N, R, X, Y, Z)` targets become `(N,)` losses (soft Dice: Milletari 2016).

    Example:
        >>> logits, target = torch.full((2, 3, 4, 4, 4), -50.0), torch.zeros(2, 3, 4, 4, 4)
        >>> DiceBce()(logits, target).round(decimals=3).tolist()
        [0.0, 0.0]
    """

    reduces: ClassVar[str] = "patches"

    def __init__(self, config: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config or LossConfig()

    def forward(self, output: Output, target: Tensor) -> Tensor:
        """Return the loss of each patch."""
        return _weighted(_by_level(_terms, output, target), self.config).mean(-1)


class BatchDiceBce(nn.Module):
    """Soft Dice of regions pooled over the effective batch, plus binary cross-entropy.

    The Dice is a ratio of sums over all patches, as in nnU-Net and the winning entries of BraTS, so
    that a patch without enhancing tumour does not pull the network towards predicting one.
    """

    reduces: ClassVar[str] = "sums"

    def __init__(self, config: LossConfig | None = None) -> None:
        super().__init__()
        self.config = config or LossConfig()

    def sums(self, output: Output, target: Tensor) -> Tensor:
        """Return the sums over the given patches, `(L * R * 3,)`."""
        return _by_level(_terms, output, target).sum(1).flatten()

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        """Return the loss of the effective batch."""
        terms = sums.view(-1, len(REGIONS), 3)
        means = terms * terms.new_tensor([1.0, 1.0, 1.0 / n_patches])
        return _weighted(means, self.config).mean()


class ReconstructionLoss(nn.Module):
    """Mean squared error, weighted towards the brain, as one number for each patch.

    `(N, C, X, Y, Z)` reconstructions and images become `(N,)` losses. The background of a prepared
    case is 0 and fills about half of a crop, so an error there has the weight `BACKGROUND_WEIGHT`.
    """

    reduces: ClassVar[str] = "patches"

    def forward(self, output: Output, target: Tensor) -> Tensor:
        """Return the loss of each patch."""
        reconstruction = at_least_float32(as_output(output).logits[0])
        target = target.to(reconstruction.dtype)
        brain = foreground_mask(target).to(reconstruction.dtype)
        weights = BACKGROUND_WEIGHT + (1 - BACKGROUND_WEIGHT) * brain
        voxels = (1, 2, 3, 4)
        squares = (reconstruction - target).square().mean(1, keepdim=True)
        return (weights * squares).sum(voxels) / weights.sum(voxels)


def foreground_mask(image: Tensor) -> Tensor:
    """Return the mask `(N, 1, X, Y, Z)` of an image `(N, C, X, Y, Z)` that is not background."""
    return (image != 0).any(1, keepdim=True)


def _criterion_name(criterion: object) -> str:
    return getattr(criterion, "__name__", type(criterion).__name__)


def at_least_float32(tensor: Tensor) -> Tensor:
    """Return a tensor in float32 if it is in half precision, which cannot sum millions of voxels."""
    return tensor.float() if tensor.dtype.itemsize < 4 else tensor


def _by_level(loss: Callable[[Tensor, Tensor], Tensor], output: Output, target: Tensor) -> Tensor:
    """Return the loss of each level, or its terms, `(L, ...)`; the target is put on the grid of the level."""
    levels = map(at_least_float32, as_output(output).logits)
    return torch.stack([loss(logits, _on_grid_of(logits, target)) for logits in levels])


def _terms(logits: Tensor, target: Tensor) -> Tensor:
    """Return the terms of the loss of a level: `(N, R, X, Y, Z)` twice -> `(N, R, 3)`.

    They are the probability inside the target, probability and target together, and the mean
    cross-entropy.
    """
    probabilities = torch.sigmoid(logits)
    bce = functional.binary_cross_entropy_with_logits(logits, target, reduction="none")
    inside = (probabilities * target).sum(_VOXELS)
    either = probabilities.sum(_VOXELS) + target.sum(_VOXELS)
    return torch.stack([inside, either, bce.mean(_VOXELS)], dim=-1)


def _on_grid_of(logits: Tensor, target: Tensor) -> Tensor:
    if target.shape[2:] != logits.shape[2:]:
        target = functional.interpolate(target, size=logits.shape[2:], mode="nearest")
    return target.to(logits.dtype)


def _weighted(terms: Tensor, config: LossConfig) -> Tensor:
    """Turn terms `(L, ..., 3)` into losses `(...)`: Dice and cross-entropy, then levels."""
    inside, either, bce = terms.unbind(-1)
    dice = (2 * inside + SMOOTH_VOXELS) / (either + SMOOTH_VOXELS)
    losses = config.dice * (1 - dice) + config.bce * bce
    return torch.tensordot(_level_weights(losses), losses, dims=1)


def _level_weights(losses: Tensor) -> Tensor:
    """Return the weight of each level `(L,)` of losses `(L, ...)`; they add up to 1.

    Coarser logits are compared with the target on their own grid, and each level weighs half as much as
    the one above it (nnU-Net; Isensee 2021).
    """
    weights = 0.5 ** torch.arange(len(losses), dtype=losses.dtype, device=losses.device)
    return weights / weights.sum()


@dataclass(kw_only=True, slots=True)
class RunningSums:
    """Sums over patches or cases, of plain values only, so that a checkpoint can hold them."""

    seconds: float = 0.0
    """Time that the patches have taken."""
    loss_sum: float = 0.0
    """Sum of the losses of patches."""
    n_patches: int = 0
    counts: dict[str, list[list[float]]] = field(default_factory=dict)
    """Measurements by case, as rows that the task defines (see `Task.measure`)."""

    @property
    def loss(self) -> float:
        """Mean loss over patches, NaN without any."""
        return self.loss_sum / self.n_patches if self.n_patches else float("nan")

    def add(self, case_id: str, counts: Sequence[Sequence[float]]) -> None:
        """Add the measurements of a patch to those of its case."""
        # numbers that were read back from a checkpoint are float too
        self.counts[case_id] = np.add(self.counts.get(case_id, 0.0), counts).tolist()

    def add_all(self, other: "RunningSums") -> None:
        """Add the patches of other sums."""
        self.loss_sum += other.loss_sum
        self.n_patches += other.n_patches
        for case_id, counts in other.counts.items():
            self.add(case_id, counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Target, loss and scores of a task."""

    target_key: str
    """Key of the target in the dictionary of a patch, which has its `image` and its region masks, `label`."""
    criterion: Criterion
    """Loss of the settings."""
    measure: Measure
    """Returns rows for each patch that add up over the patches of a case."""
    scores: Callable[[RunningSums], Mapping[str, float]]
    """Turns the sums of a phase of an epoch into columns of the history."""


def build_task(config: Config) -> Task:
    """Return the task of the settings."""
    loss = config.loss
    if config.model.task == "reconstruction":
        return Task(
            target_key="image",
            criterion=build_criterion(loss) if loss.name else ReconstructionLoss(),
            measure=add_squares,
            scores=error_columns,
        )
    return Task(
        target_key="label",
        criterion=build_criterion(loss),
        measure=count_voxels,
        scores=overlap_columns,
    )


def count_voxels(output: Output, target: Tensor) -> Tensor:
    """Count voxels per patch: `(N, 4, R)`, true and false positives, false and true negatives.

    A voxel is predicted where its probability is above one half, that is, its logit above zero, or
    where an inner region is: as label maps are written.
    """
    predicted = as_output(output).logits[0] > 0
    for inner in range(predicted.shape[1] - 1, 0, -1):
        predicted[:, inner - 1].logical_or_(predicted[:, inner])
    reference = target > 0
    both = (predicted & reference).sum(_VOXELS)
    n_predicted, n_reference = predicted.sum(_VOXELS), reference.sum(_VOXELS)
    n_voxels = predicted[0, 0].numel()
    return torch.stack(
        [both, n_predicted - both, n_reference - both, n_voxels - n_predicted - n_reference + both],
        1,
    )


def overlap_columns(sums: RunningSums) -> dict[str, float]:
    """Return the loss, and the overlap as the mean over cases, in the order of their ids.

    A region that is empty in both label maps scores 1; `empty_<region>` counts the cases without it.
    """
    cases = [region_counts(case_id, counts) for case_id, counts in sorted(sums.counts.items())]
    means = {"dice": np.mean([dice(case) for case in cases], axis=0)}
    means["jaccard"] = np.mean([jaccard(case) for case in cases], axis=0)
    n_empty = np.sum([case.in_reference == 0 for case in cases], axis=0)
    columns = {"loss": sums.loss, **{name: float(mean.mean()) for name, mean in means.items()}}
    for index, region in enumerate(REGIONS):
        columns |= {f"{name}_{region}": float(mean[index]) for name, mean in means.items()}
        columns[f"empty_{region}"] = int(n_empty[index])
    return columns


def add_squares(output: Output, target: Tensor) -> Tensor:
    """Return the error per patch: `(N, 2, C)`, sum of squares in the brain, voxels of the brain."""
    difference = as_output(output).logits[0] - target
    brain = foreground_mask(target)
    squares = (difference.square() * brain).sum(_VOXELS)
    return torch.stack([squares, brain.sum(_VOXELS).to(squares.dtype).expand_as(squares)], 1)


def error_columns(sums: RunningSums) -> dict[str, float]:
    """Return the loss, and the error as the mean over cases, in the order of their ids.

    The error is in units of the normalised intensity, whose standard deviation in a brain is 1: an
    image without any contrast has an error of 1. A case whose patches held no brain has none.
    """
    cases = [counts for _, counts in sorted(sums.counts.items()) if counts[1][0] > 0]
    squares, n_voxels = np.moveaxis(np.reshape(cases, (-1, 2, len(MODALITIES))), 1, 0)
    errors = np.sqrt(squares / n_voxels)
    means = errors.mean(0) if cases else np.full(len(MODALITIES), np.nan)
    parts = {f"rmse_{name}": float(mean) for name, mean in zip(MODALITIES, means, strict=True)}
    return {"loss": sums.loss, "rmse": float(np.mean(means)), **parts}
