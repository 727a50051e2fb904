"""The functions of this wing that the rest of the package calls, by way of `wings.judges`."""

from collections.abc import Sequence
from dataclasses import replace

from brats_seg.cases.nifti import Volume, oriented
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES
from brats_seg.quality.expected_dice import (
    PREDICTED_COLUMNS,
    dice_lines,
    mean_probabilities,
    notes_of_held_out,
)
from brats_seg.quality.label_map import (
    judge_group,
    judge_labels,
    judge_sample,
    outermost_of_outline,
)
from brats_seg.quality.near_copies import fingerprint_of, with_near_copies
from brats_seg.quality.profile import (
    has_profile,
    measures_of,
    notes_of_training,
    unlike_training,
)
from brats_seg.quality.result import judge_result
from brats_seg.quality.scan import (
    MIXED_UP,
    check_all_different,
    check_are_scans,
    has_skull,
    sample_brain,
    scan_remarks,
)
from brats_seg.wings import NO_JUDGEMENT, Judgement

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


def judge_scan(
    case_id: str,
    volumes: Sequence[Volume],
    label: Volume | None,
    modalities: Sequence[str] = MODALITIES,
) -> Judgement:
    """Return whether the modalities are what they are called, and the label map is of the scan.

    Args:
        case_id: Id of the case.
        volumes: Volumes on one grid, finite and not constant, as stored.
        label: The label map, as stored; None without one.
        modalities: Modality of each volume.
    """
    turned = [oriented(volume) for volume in volumes]
    turned_label = label and oriented(label)
    sample = sample_brain(turned, turned_label)
    if sample is None:
        return NO_JUDGEMENT
    try:
        check_are_scans(case_id, turned, sample)
        check_all_different(case_id, turned, sample, modalities)
    except CaseError as error:
        return Judgement(refusal=error)
    remarks = tuple(scan_remarks(volumes[0].geometry, sample))
    # in other modalities than it is told to be, a tumour does not look like itself
    if turned_label is None or any(remark.startswith(MIXED_UP) for remark in remarks):
        return Judgement(warnings=remarks)
    labels = judge_sample(case_id, turned, turned_label, sample)
    return replace(labels, warnings=(*remarks, *labels.warnings))
