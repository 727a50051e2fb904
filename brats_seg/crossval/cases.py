"""The held-out cases of several runs, as they lie on disk: scans to predict, label maps to score with."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.evaluation.pairs import Pair, Pairing
from brats_seg.inference.held_out import HeldOut
from brats_seg.inference.inputs import CaseInput


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCases:
    """What one run has never seen."""

    run: Path
    inputs: tuple[CaseInput, ...]


def held_out_cases(held_out: Sequence[HeldOut], index: CaseIndex) -> tuple[HeldOutCases, ...]:
    """Find the scans of held-out cases in the index of their data folder."""
    by_id: dict[str, Case] = {case.case_id: case for case in index.cases}
    root = index.root.absolute()
    return tuple(
        HeldOutCases(
            run=own.run,
            inputs=tuple(
                CaseInput(root=root, case=by_id[case_id]) for case_id in own.data.split.validation
            ),
        )
        for own in held_out
    )


def reference_pairs(cases: Sequence[HeldOutCases], predictions: Path) -> Pairing:
    """Pair the label map of every held-out case with its prediction, if there is one."""
    pairs = []
    for one in (one for part in cases for one in part.inputs):
        case_id, label = one.case.case_id, one.case.label
        prediction = predictions / f"{case_id}.nii.gz"
        if label is not None:
            pairs.append(
                Pair(
                    case_id=case_id,
                    reference=one.root / label.path,
                    prediction=prediction if prediction.exists() else None,
                )
            )
    return Pairing(pairs=tuple(sorted(pairs, key=lambda pair: pair.case_id)), without_reference=())
