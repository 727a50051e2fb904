"""The optional parts of the package, each of which is one folder that may be missing.

The rest of the package reaches them only by `find_wing` and through the list of commands. Here are the values
that they return to it.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType
from typing import TYPE_CHECKING, TypeAlias

from brats_seg.errors import CaseError

if TYPE_CHECKING:
    from pydantic import JsonValue

Notes: TypeAlias = "Mapping[str, JsonValue]"
"""Entries of a model card that a wing writes and reads; the core only carries them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedDice:
    """Dice that is expected of a region of a prediction."""

    region: str
    dice: float
    low: float
    """Lower end of the interval that holds the Dice of 90 % of the cases."""
    high: float
    is_low: bool = False
    """Whether it is below 0.7, and as in the worst fifth of the held-out cases of the model."""

    @property
    def columns(self) -> dict[str, float]:
        """Values by their column of the table of volumes."""
        name = f"{self.region}_predicted_dice"
        return {name: self.dice, f"{name}_low": self.low, f"{name}_high": self.high}

    def __str__(self) -> str:
        return f"{self.region.upper()} {self.dice:.2f} ({self.low:.2f} to {self.high:.2f})"


@dataclass(frozen=True, kw_only=True, slots=True)
class ShownLabels:
    """The values of a label map, and the tissues that its voxels show."""

    case_id: str
    file: str
    values: frozenset[int]
    outermost: int | None = None
    """Value that surrounds the others, as oedema does; None if that is not clear."""
    enhancing: int | None = None
    """Value that takes up contrast agent; None if that is not clear."""
    is_on_scan: bool = True
    """Whether the scan was there; an outline alone is weaker evidence."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Judgement:
    """What the checks of `quality` say about a scan, a label map or a prediction."""

    refusal: CaseError | None = None
    """Error that says why it cannot be used; None if it can."""
    remarks: tuple[str, ...] = ()
    """Lines of what to look at; what was measured follows in brackets, and is folded on pages."""
    outermost: int | None = None
    enhancing: int | None = None
    predicted_dice: tuple[PredictedDice, ...] = ()


NO_JUDGEMENT = Judgement()
"""Judgement where the wing is missing, or nothing is unusual."""


def find_wing(module: str) -> ModuleType | None:
    """Import a wing or a module of it, such as `quality.scan`; None where the folder of the wing is gone."""
    spec = find_spec(f"brats_seg.{module.partition('.')[0]}")
    # a folder that only has compiled files left is found without a source
    return None if spec is None or spec.origin is None else import_module(f"brats_seg.{module}")
