"""The functions of this wing that the rest of the package calls, by way of `wings.judges`."""

from brats_seg.quality.expected_dice import (
    PREDICTED_COLUMNS,
    dice_lines,
    mean_probabilities,
    notes_of_held_out,
)
from brats_seg.quality.label_map import judge_group, judge_labels, outermost_of_outline
from brats_seg.quality.near_copies import fingerprint_of, with_near_copies
from brats_seg.quality.profile import (
    has_profile,
    measures_of,
    notes_of_training,
)
from brats_seg.quality.result import judge_result
from brats_seg.quality.scan_check import has_skull, judge_scan, unlike_training

__all__ = [
    "PREDICTED_COLUMNS",
    "dice_lines",
    "fingerprint_of",
    "has_profile",
    "has_skull",
    "judge_group",
    "judge_labels",
    "judge_result",
    "judge_scan",
    "mean_probabilities",
    "measures_of",
    "notes_of_held_out",
    "notes_of_training",
    "outermost_of_outline",
    "unlike_training",
    "with_near_copies",
]
