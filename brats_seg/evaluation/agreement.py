"""Check that reference and prediction of a case mean the same by their labels and lie the same way.

The values of two label maps do not show whether both have the numbering of their conventions, or
whether one of them is mirrored. If the prediction would agree far better with other labels, or
mirrored, its scores say nothing about the network. A poor prediction is none of that: its labels are
held against the reference alone, and it is scored.
"""

from collections.abc import Mapping

import numpy as np
import numpy.typing as npt

from brats_seg.errors import LabelError
from brats_seg.evaluation.pairs import LabelPair, PackedLabelMap
from brats_seg.labels import CONVENTIONS, LabelConvention, LabelMap
from brats_seg.quality.label_map import (
    OTHERS_DIFFER,
    Numbering,
    differ,
    judge_numbering,
    rival_of,
)

LEAST_GAIN = 0.3
"""Gain in Dice from which another reading is reported."""
LEAST_DICE = 0.6
"""Dice that another numbering reaches at least: two label maps that hardly overlap show nothing."""
LEAST_MIRRORED_DICE = 0.75
"""Dice of the whole tumour that a mirrored prediction reaches at least: two round tumours on opposite
sides may overlap by chance."""
FEWEST_VOXELS = 100
"""Voxels of a tissue in the reference from which it is compared."""

_N_VALUES = 256


def rivals_of(
    references: Mapping[str, PackedLabelMap], conventions: Mapping[str, LabelConvention]
) -> dict[str, str]:
    """Return for each reference what most of those in its convention look like, if it is another."""
    rivals = {
        convention.name: rival_of(
            [
                (reference.roles, reference.values)
                for case_id, reference in references.items()
                if conventions[case_id] == convention
            ],
            convention,
        )
        for convention in conventions.values()
    }
    return {case_id: rivals[conventions[case_id].name] for case_id in references}


def check_numbering(
    reference: PackedLabelMap, case_id: str, convention: LabelConvention, rival: str
) -> None:
    """Raise `LabelError` if a reference is clearly not in the convention that it is read in.

    An outline without scans does not suffice; it counts if most references agree.

    Args:
        reference: The reference.
        case_id: Id of its case.
        convention: Convention that it is read in.
        rival: Convention that most references look like, of `rivals_of`.
    """
    numbering = judge_numbering(reference.roles, reference.values, convention)
    if differ(rival, convention, reference.values):
        numbering = Numbering(
            contradiction=numbering.contradiction or OTHERS_DIFFER, fitting=(rival,)
        )
    elif not reference.is_on_scan:
        return
    if numbering.fitting:
        raise LabelError(
            case_id,
            f"reference {reference.file}",
            f"labels that {convention.name} does not explain ({numbering.contradiction})",
            f"the numbering of that convention; {' or '.join(numbering.fitting)} fits",
            "Renumber the references, or name folders and files as their release does.",
        )


def check_agreement(
    pair: LabelPair, reference: LabelConvention, prediction: LabelConvention
) -> None:
    """Raise `LabelError` if the prediction would agree far better renumbered or mirrored."""
    if pair.prediction is None or pair.reference.box is None or pair.prediction.box is None:
        return
    box = pair.reference.box.joined(pair.prediction.box)
    shared = shared_voxels(pair.reference.within(box), pair.prediction.within(box))
    better = better_numbering(shared, reference, prediction)
    how = "numbered" if better else "placed"
    better = better or _better_mirrored(pair, shared)
    if better:
        raise LabelError(
            pair.case_id,
            f"prediction {pair.prediction.file}",
            f"labels that agree with the reference far better {how} as {better}",
            f"both {how} alike",
            "Find out which of the two is wrong, and correct it.",
        )


def shared_voxels(reference: LabelMap, prediction: LabelMap) -> npt.NDArray[np.int64]:
    """Return how many voxels have each value of the reference and of the prediction, (256, 256)."""
    joint = reference.astype(np.uint16) * np.uint16(_N_VALUES) + prediction
    counts = np.bincount(joint.ravel(), minlength=_N_VALUES**2)
    return counts.reshape(_N_VALUES, _N_VALUES)


def better_numbering(
    shared: npt.NDArray[np.int64], reference: LabelConvention, prediction: LabelConvention
) -> str:
    """Return in which convention the prediction agrees far better with the reference; empty if none.

    Other exchanges of labels do not count: a network that takes necrosis for enhancing tumour is poor,
    and its labels are not in another numbering.

    Args:
        shared: The result of `shared_voxels`.
        reference: Convention that the reference is read in.
        prediction: Convention that the prediction is read in.

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> truth = np.repeat(np.array([0, 1, 2, 3], dtype=np.uint8), 200)
        >>> swapped = np.repeat(np.array([0, 2, 1, 3], dtype=np.uint8), 200)
        >>> better_numbering(shared_voxels(truth, swapped), BRATS2023, BRATS2023)
        'msd (mean Dice of the tissues 1.00 instead of 0.33)'
    """
    compared = {
        tissue: value
        for tissue, value in enumerate(reference.painted)
        if shared[value].sum() >= FEWEST_VOXELS
    }
    if len(compared) < 2:
        return ""
    values = set(np.flatnonzero(shared.sum(axis=0)).tolist())
    dices = {
        other.name: _mean_dice(shared, compared, other.painted)
        for other in CONVENTIONS
        if values <= other.values
    }
    given = _mean_dice(shared, compared, prediction.painted)
    best = max(dices, key=dices.__getitem__, default="")
    if not best or dices[best] < LEAST_DICE or dices[best] - given < LEAST_GAIN:
        return ""
    return f"{best} (mean Dice of the tissues {dices[best]:.2f} instead of {given:.2f})"


def _mean_dice(
    shared: npt.NDArray[np.int64], compared: Mapping[int, int], painted: tuple[int, ...]
) -> float:
    """Return the mean Dice of the tissues if the prediction has these values for them."""
    dices = []
    for tissue, value in compared.items():
        both = shared[value].sum() + shared[:, painted[tissue]].sum()
        dices.append(2 * shared[value, painted[tissue]] / both)
    return float(np.mean(dices))


def _better_mirrored(pair: LabelPair, shared: npt.NDArray[np.int64]) -> str:
    """Return the direction in which the mirrored prediction agrees far better; empty if in none."""
    reference, prediction = pair.reference, pair.prediction
    if prediction is None or reference.box is None or prediction.box is None:
        return ""
    n_labelled = shared[1:].sum() + shared[:, 1:].sum()
    given = 2 * shared[1:, 1:].sum() / n_labelled
    if given > 1 - LEAST_GAIN:
        return ""
    for axis, name in enumerate("XYZ"):
        mirrored = prediction.mirrored(axis)
        box = reference.box.joined(mirrored.box or reference.box)
        both = (reference.within(box) > 0) & (mirrored.within(box) > 0)
        found = 2 * np.count_nonzero(both) / n_labelled
        if found >= LEAST_MIRRORED_DICE and found - given >= LEAST_GAIN:
            return f"its mirror image along {name} (Dice {found:.2f} instead of {given:.2f})"
    return ""
