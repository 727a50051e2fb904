"""Define the two tasks that a network is trained for: segmentation and reconstruction.

A task defines the target of a patch, the loss and the scores. Measurements of patches are added up
(`RunningSums`), and ratios are taken once, at the end of an epoch.

N patches, R regions, C modalities, X Y Z voxels.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from brats_seg.config import Config
from brats_seg.data.loader import TargetOf, image_target, region_target
from brats_seg.evaluation.metrics import dice, jaccard, region_counts
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models.interface import as_output
from brats_seg.training.losses import (
    Criterion,
    Measure,
    Output,
    ReconstructionLoss,
    at_least_float32,
    brain_of,
    build_criterion,
    own_criterion,
)


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
        before = self.counts.get(case_id)
        summed = counts if before is None else np.add(before, counts).tolist()
        self.counts[case_id] = [list(row) for row in summed]

    def add_all(self, other: "RunningSums") -> None:
        """Add the patches of other sums."""
        self.loss_sum += other.loss_sum
        self.n_patches += other.n_patches
        for case_id, counts in other.counts.items():
            self.add(case_id, counts)


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Target, loss and scores of a task."""

    target_of: TargetOf
    """Makes the target of a patch."""
    n_targets: int
    """Number of channels of a target."""
    criterion: Criterion
    """Loss of the settings."""
    measure: Measure
    """Returns rows for each patch that add up over the patches of a case."""
    scores: Callable[[RunningSums], Mapping[str, float]]
    """Turns the sums of a phase of an epoch into columns of the history."""


def task_of(config: Config) -> Task:
    """Return the task of the settings."""
    loss = config.loss
    if config.model.task == "reconstruction":
        named = None if loss.name is None else own_criterion(loss.name, loss.arguments)
        return Task(
            target_of=image_target,
            n_targets=len(MODALITIES),
            criterion=named or ReconstructionLoss(),
            measure=add_squares,
            scores=error_columns,
        )
    return Task(
        target_of=region_target,
        n_targets=len(REGIONS),
        criterion=build_criterion(loss),
        measure=count_voxels,
        scores=overlap_columns,
    )


def count_voxels(output: Output, target: Tensor) -> Tensor:
    """Count voxels per patch: `(N, 4, R)`, true and false positives, false and true negatives.

    A voxel is predicted where its probability is above one half, that is, its logit above zero.
    """
    predicted = as_output(output).logits[0] > 0
    reference = target > 0
    voxels = (2, 3, 4)
    both = (predicted & reference).sum(voxels)
    n_predicted, n_reference = predicted.sum(voxels), reference.sum(voxels)
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
    difference = at_least_float32(as_output(output).logits[0]) - target
    brain = brain_of(target)
    voxels = (2, 3, 4)
    squares = (difference.square() * brain).sum(voxels)
    return torch.stack([squares, brain.sum(voxels).to(squares.dtype).expand_as(squares)], 1)


def error_columns(sums: RunningSums) -> dict[str, float]:
    """Return the loss, and the error as the mean over cases, in the order of their ids.

    The error is in units of the normalised intensity, whose standard deviation in a brain is 1: an
    image without any contrast has an error of 1. A case whose patches held no brain has none.
    """
    cases = [counts for _, counts in sorted(sums.counts.items()) if counts[1][0] > 0]
    means = (
        np.mean([rmse_of(one) for one in cases], axis=0) if cases else [np.nan] * len(MODALITIES)
    )
    parts = {f"rmse_{name}": float(mean) for name, mean in zip(MODALITIES, means, strict=True)}
    return {"loss": sums.loss, "rmse": float(np.mean(means)), **parts}


def rmse_of(counts: list[list[float]]) -> list[float]:
    """Return the root of the mean square of each modality, from the rows of `add_squares`."""
    squares, n_voxels = np.asarray(counts, np.float64)
    return np.sqrt(squares / n_voxels).tolist()
