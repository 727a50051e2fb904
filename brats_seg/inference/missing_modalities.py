"""Decide whether a model predicts a scan without some of its modalities, and say what that costs.

A model takes the subsets of the modalities that it was trained for with `training.modality_dropout`,
and refuses every other by its name. `modality_loss`, which predicts with the model itself, measures the
loss on held-out cases.
"""

from collections.abc import Sequence
from dataclasses import replace

from brats_seg.cases.case import Case
from brats_seg.errors import CaseError
from brats_seg.evaluation.subset_scores import SubsetScores, absent_from, pooled
from brats_seg.inference.model import Model
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS


def accepted(case: Case, model: Model) -> Case:
    """Return a case as a model takes it.

    It has a problem that says what the model was trained for if that are other modalities.
    """
    refusal = subset_refusal(model, case.case_id, case.modalities, case.location)
    return case if refusal is None else replace(case, problems=(str(refusal), *case.problems))


def check_subset(model: Model, case_id: str, modalities: Sequence[str]) -> None:
    """Raise `CaseError` if a model was not trained for these modalities alone."""
    if refusal := subset_refusal(model, case_id, modalities, "(all)"):
        raise refusal


def subset_refusal(
    model: Model, case_id: str, modalities: Sequence[str], file: str
) -> CaseError | None:
    """Return the error that refuses these modalities; None if the model was trained for them."""
    if tuple(modalities) in (MODALITIES, *model.subsets):
        return None
    found = f"no {', '.join(absent_from(modalities))}"
    if not model.subsets:
        expected = f"{', '.join(MODALITIES)}, as the model was trained with all four modalities"
    elif len(model.subsets) == len(MODALITY_SUBSETS):
        expected = f"at least one of {', '.join(MODALITIES)}, in this order"
    else:
        subsets = "; ".join(", ".join(subset) for subset in model.subsets)
        expected = (
            f"all four modalities, or one of the sets that the model was trained for: {subsets}"
        )
    next_step = (
        "Add the missing files, or use a model that was trained with training.modality_dropout."
    )
    return CaseError(case_id, file, found, expected, next_step)


def scores_without(model: Model, modalities: Sequence[str]) -> SubsetScores | None:
    """Return what held-out cases lost with these modalities alone; None if it was not measured."""
    scores = pooled(one for member in model.members for one in member.subset_scores)
    return next((one for one in scores if one.modalities == tuple(modalities)), None)


def subset_warnings(modalities: Sequence[str], scores: SubsetScores | None) -> tuple[str, ...]:
    """Return a sentence that says which modalities are missing, and what to expect of the result.

    Args:
        modalities: Modalities of a scan; nothing is said of all four.
        scores: What held-out cases lost with them, as `scores_without` returns it.
    """
    if not (missing := absent_from(modalities)):
        return ()
    words = f"no {', '.join(missing)}: predicted from {' and '.join(modalities)} alone"
    if scores is not None:
        return (f"{words}; expect a lower Dice than with all four modalities: it was {scores}",)
    return (
        f"{words}; the loss of Dice to expect is not known: `brats-seg tune` measures it on the "
        "held-out cases of the runs",
    )
