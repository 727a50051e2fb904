"""What a network is taught: regions to find, or an image to reconstruct."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from brats_seg.config import Config
from brats_seg.data.dataset import TargetOf, image_target, region_target
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.training.criterion import Criterion, Measure
from brats_seg.training.losses import build_criterion
from brats_seg.training.reconstruction import ReconstructionLoss, add_squares, error_columns
from brats_seg.training.segmentation import count_voxels, overlap_columns
from brats_seg.training.tally import Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """All that differs between one thing to be taught and another."""

    target_of: TargetOf
    """Makes what the loss compares with."""
    n_targets: int
    """Channels of that."""
    criterion: Criterion
    """The loss of the settings."""
    measure: Measure
    """What is measured of each patch: rows that add up over the patches of a case."""
    scores: Callable[[Tally], Mapping[str, float]]
    """Turns what has added up into what the history says of a phase of an epoch."""


def task_of(config: Config) -> Task:
    """Return what the network of the settings is taught."""
    if config.model.task == "reconstruction":
        return Task(
            target_of=image_target,
            n_targets=len(MODALITIES),
            criterion=ReconstructionLoss(config.loss),
            measure=add_squares,
            scores=error_columns,
        )
    return Task(
        target_of=region_target,
        n_targets=len(REGIONS),
        criterion=build_criterion(config.loss),
        measure=count_voxels,
        scores=overlap_columns,
    )
