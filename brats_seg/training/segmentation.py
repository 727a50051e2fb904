"""How well regions are segmented: voxels counted per patch, and the scores of an epoch.

N patches, R regions, X Y Z voxels.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from brats_seg.evaluation.overlap import RegionCounts, dice, jaccard
from brats_seg.labels import REGIONS
from brats_seg.models.output import as_output
from brats_seg.training.criterion import Output
from brats_seg.training.tally import Tally


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapScores:
    """Loss and overlap of one phase of an epoch."""

    loss: float
    dice: npt.NDArray[np.float64]
    """`(R,)`, mean over cases; a region empty on both sides scores 1."""
    jaccard: npt.NDArray[np.float64]
    """`(R,)`, mean over cases."""
    n_empty: npt.NDArray[np.int64]
    """`(R,)`, cases whose reference lacks the region."""

    def columns(self) -> dict[str, float]:
        """Return what a row of the history says of them."""
        columns = {
            "loss": self.loss,
            "dice": float(self.dice.mean()),
            "jaccard": float(self.jaccard.mean()),
        }
        for index, region in enumerate(REGIONS):
            columns[f"dice_{region}"] = float(self.dice[index])
            columns[f"jaccard_{region}"] = float(self.jaccard[index])
            columns[f"empty_{region}"] = int(self.n_empty[index])
        return columns


def count_voxels(output: Output, target: Tensor) -> Tensor:
    """Return agreement per patch: `(N, 4, R)`, true positive, false positive, false negative, true negative.

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


def overlap_columns(tally: Tally) -> dict[str, float]:
    """Return loss and overlap of the patches so far, cases in the order of their ids."""
    cases = [region_counts(case_id, tally.counts[case_id]) for case_id in sorted(tally.counts)]
    return scores_of(tally.loss, cases).columns()


def scores_of(loss: float, counts: Sequence[RegionCounts]) -> OverlapScores:
    """Take the ratios of each case once, and their mean over cases."""
    return OverlapScores(
        loss=loss,
        dice=np.mean([dice(case) for case in counts], axis=0),
        jaccard=np.mean([jaccard(case) for case in counts], axis=0),
        n_empty=np.sum([case.in_reference == 0 for case in counts], axis=0),
    )


def region_counts(case_id: str, counts: Sequence[Sequence[float]]) -> RegionCounts:
    """Return the value that metrics are made of, from rows TP, FP, FN, TN of `R` voxel counts."""
    true_positive, false_positive, false_negative, true_negative = np.asarray(counts, np.int64)
    return RegionCounts(
        case_id=case_id,
        true_positive=true_positive,
        false_positive=false_positive,
        false_negative=false_negative,
        true_negative=true_negative,
    )
