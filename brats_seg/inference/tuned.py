"""What tuning found, as a value and on disk: the identity with the weights, the account beside them."""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import TypeAdapter, ValidationError

from brats_seg.files import whole_file
from brats_seg.inference.choice import Gain
from brats_seg.inference.held_out import HeldOut
from brats_seg.models.trained import ModelIdentity, store_identity

TUNING_NAME = "tuning.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Fit:
    """One setting: what was tried, and what became of it."""

    setting: str
    default: str
    chosen: str
    """The default where nothing else was surely better."""
    best: str
    """What gained most, surely or not; equal to the default if nothing gained."""
    gain: Gain
    """Of the best over the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """What was fitted, on what, and what it brought there."""

    key: str
    """Changes with weights, cases, metric and candidates: to what this belongs."""
    metric: str
    n_cases: int
    runs: tuple[str, ...]
    fits: tuple[Fit, ...]
    before: tuple[float, float, float]
    """Mean score of WT, TC, ET with the training patch and the defaults."""
    after: tuple[float, float, float]
    """The same with what was chosen, on the cases that it was chosen on: more than new ones give."""
    identities: tuple[ModelIdentity, ...]
    """As stored with the weights of each run."""


def store_tuning(tuning: Tuning, held_out: Sequence[HeldOut]) -> None:
    """Store with each run's weights what was chosen for it, and beside them how it came about.

    Raises:
        EnvironmentalError: A file cannot be written.
    """
    content = TypeAdapter(Tuning).dump_json(tuning, indent=1) + b"\n"
    for own, identity in zip(held_out, tuning.identities, strict=True):
        if own.trained.identity != identity:
            store_identity(own.checkpoint_path, identity)
        with whole_file(own.run / TUNING_NAME) as beside:
            beside.write_bytes(content)


def stored_tuning(held_out: Sequence[HeldOut], key: str) -> Tuning | None:
    """Return what an earlier tuning with that key stored, if all of it is still there."""
    found = None
    for place, own in enumerate(held_out):
        try:
            content = (own.run / TUNING_NAME).read_bytes()
            found = TypeAdapter(Tuning).validate_json(content)
        except (FileNotFoundError, ValidationError):
            # none, or one of another version
            return None
        if found.key != key or found.identities[place] != own.trained.identity:
            return None
    return found
