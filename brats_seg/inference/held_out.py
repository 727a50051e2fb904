"""The cases that a run has never seen: what the settings of its predictions are fitted on."""

from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.folds import SPLIT_NAME, Split, read_split
from brats_seg.data.fold import FoldData, open_split
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.exported import MODEL_NAME
from brats_seg.inference.model import BEST_NAME, fingerprint_of
from brats_seg.models.trained import ModelIdentity, TrainedModel, load_trained, require_task


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOut:
    """A run, and the prepared cases that were held out of it."""

    run: Path
    trained: TrainedModel
    """With the identity that it has now; `untuned` is the one that training gave it."""
    data: FoldData

    @property
    def checkpoint_path(self) -> Path:
        """Where weights and identity lie."""
        return self.run / BEST_NAME

    @property
    def untuned(self) -> TrainedModel:
        """The network as training left it."""
        return replace(self.trained, identity=untuned(self.trained.identity))

    @property
    def key(self) -> str:
        """Changes with the weights and the training set, and not with what is fitted."""
        return fingerprint_of([self.untuned])


def untuned(identity: ModelIdentity) -> ModelIdentity:
    """Return an identity without what was fitted."""
    own = ("conventions", "patch", "fingerprint", "modalities", "regions", "normalisation")
    return ModelIdentity(
        **{name: getattr(identity, name) for name in own}, spacing_mm=identity.spacing_mm
    )


def open_held_out(run: Path, prepared: Path) -> HeldOut:
    """Find the cases that a run has never seen among the prepared ones.

    The fingerprint that training left vouches for cases, contents and split.

    Raises:
        UsageError: It is no run, or the prepared cases are not those that it was trained on.
        FoldError: The run does not say what was held out.
        ResumeError: Its checkpoint is damaged.
    """
    if (run / MODEL_NAME).exists():
        msg = (
            f"{run} is an exported model, which does not say what it has never seen. Give the runs "
            "that it was made of, and export them again."
        )
        raise UsageError(msg)
    if not (run / BEST_NAME).is_file():
        msg = f"{run} has no {BEST_NAME}: give the folder of a run, trained to its first validation"
        raise UsageError(msg)
    trained = load_trained(run / BEST_NAME)
    require_task(trained, "segmentation", run)
    data = _opened(prepared, read_split(run / SPLIT_NAME))
    if data is not None and data.fingerprint == trained.identity.fingerprint:
        return HeldOut(run=run, trained=trained, data=data)
    found = "other cases" if data is None else f"cases of the fingerprint {data.fingerprint}"
    msg = (
        f"{run} was not trained on what is prepared in {prepared}: found {found}, expected "
        f"{trained.identity.fingerprint}. Give --data or --prepared as in its training."
    )
    raise UsageError(msg)


def _opened(prepared: Path, split: Split) -> FoldData | None:
    """Return the prepared cases of a split, or None if one is not there."""
    try:
        return open_split(prepared, split)
    except CaseError:
        return None
