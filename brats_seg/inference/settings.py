"""Combine the settings of prediction: those of the user, those fitted to a model, and defaults."""

from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import (
    SerializerFunctionWrapHandler,
    ValidationError,
    field_validator,
    model_serializer,
    model_validator,
)

from brats_seg.config import OVERLAP, Section, Size
from brats_seg.config_text import words_of
from brats_seg.errors import ConfigError
from brats_seg.labels import convention_named
from brats_seg.models.build import size_words
from brats_seg.runtime.weights import Decoding, FittedPrediction, Overlap

ResultLayout = Literal["plain", "bids"]
ONE_PASS = ("whole", "centre")
"""Values of `windows` that take the brain crop in one pass."""


class PredictionSettings(Section):
    """Settings of a prediction.

    Window, overlap and decoding that are not given here are those stored with the model (see `over`), and
    the defaults where nothing was fitted. Written to JSON, the settings of `decoding` stand beside
    the others, null where they are not given.

    Example:
        >>> settings = PredictionSettings(tta=True, decoding=Decoding(thresholds=(0.4, 0.5, 0.5)))
        >>> fitted = FittedPrediction(decoding=Decoding(smallest_et_mm3=50))
        >>> settings.over(fitted).decoding
        Decoding(thresholds=(0.4, 0.5, 0.5), smallest_mm3=(0.0, 0.0, 0.0), smallest_et_mm3=50.0)
    """

    device: str = "auto"
    """`auto` takes the GPU when there is one; else `cpu`, `cuda`, `cuda:1`, `mps`."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto` takes what the device computes natively: bf16, else fp16 on a GPU, else fp32."""
    windows: Literal["auto", "whole", "centre", "sliding"] = "auto"
    """`whole` takes the brain crop in one pass, `centre` too, with the statistics of its centre in the norms
    of the network, and `sliding` many windows; `auto`: what was fitted, else the default."""
    window: Size | None = None
    """Voxels of a sliding window."""
    overlap: Overlap | None = None
    """Share that neighbouring windows have in common; null takes the one fitted with the window, else
    0.5."""
    tta: bool = False
    """Whether the mean is taken over all eight mirror images: eight times the work."""
    decoding: Decoding = Decoding()
    """Thresholds and smallest volumes, which turn probabilities into a label map."""
    labels: str | None = None
    """Label convention to write; null takes that of the scan's release."""
    probabilities: bool = False
    """Whether the probability of each region is written as well."""
    uncertainty: bool = False
    """Whether a map of the entropy over models and mirror images is written as well."""
    preview: bool = True
    """Whether a picture of each case is written as well."""
    report: bool = False
    """Whether a page of each case is written as well, in HTML, to the folder `reports`."""
    layout: ResultLayout = "plain"
    """Names of the files that are written: `plain`, CASE.nii.gz, or `bids`, a BIDS derivative."""

    def over(self, fitted: FittedPrediction) -> Self:
        """Return these settings, completed by what was fitted to a network."""
        given = self.decoding.model_dump(exclude_unset=True)
        decoding = Decoding(**{**fitted.decoding.model_dump(), **given})
        windows, window = self.windows, self.window or fitted.window
        if isinstance(window, str):
            windows, window = window if windows == "auto" else windows, None
        if windows in ONE_PASS:
            window = None
        overlap = self.overlap
        if overlap is None and self.window is None:
            # fitted together with the window, and to no other
            overlap = fitted.overlap
        completed = {"windows": windows, "window": window, "overlap": overlap}
        return self.model_copy(update={**completed, "decoding": decoding})

    @property
    def least_overlap(self) -> float:
        """Overlap to use: the one given or fitted, else the default."""
        return OVERLAP if self.overlap is None else self.overlap

    def window_words(self) -> str:
        """Return window and overlap as words, of settings that are complete."""
        if self.window is not None:
            return f"{size_words(self.window)} voxels, overlap {self.least_overlap:g}"
        centred = ", with the statistics of its centre" * (self.windows == "centre")
        return f"the whole brain in one pass{centred}"

    def changed_text(self) -> str:
        """Return the settings that a label map depends on and that are not the defaults, as words."""
        default = PredictionSettings().model_dump(mode="json")
        given = self.model_dump(mode="json", exclude={"preview", "report", "layout"})
        changed = [f"{key}: {value}" for key, value in given.items() if value != default[key]]
        return ", ".join(changed) or "the defaults"

    def __eq__(self, other: object) -> bool:
        # a given threshold of 0.5 differs from a default one: it overrides the fitted threshold
        return isinstance(other, PredictionSettings) and self.model_dump() == other.model_dump()

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @model_validator(mode="before")
    @classmethod
    def _gather_decoding(cls, given: Any) -> Any:
        if not isinstance(given, Mapping):
            return given
        flat = {name: given[name] for name in Decoding.model_fields if given.get(name) is not None}
        rest = {name: value for name, value in given.items() if name not in Decoding.model_fields}
        return {**rest, "decoding": flat} if flat else rest

    @model_validator(mode="after")
    def _whole_has_no_window(self) -> Self:
        if self.windows in ONE_PASS and self.window is not None:
            msg = f"windows is {self.windows!r} and a window is given; expected one of the two"
            raise ValueError(msg)
        return self

    @field_validator("labels")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None:
            convention_named(value)
        return value

    @model_serializer(mode="wrap")
    def _spread_decoding(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        flat: dict[str, Any] = {}
        for name, value in handler(self).items():
            if name == "decoding":
                given = self.decoding.model_fields_set
                flat.update({key: below if key in given else None for key, below in value.items()})
            else:
                flat[name] = value
        return flat


DEFAULT_SETTINGS = PredictionSettings()


def prediction_settings(given: Mapping[str, Any]) -> PredictionSettings:
    """Validate settings, those of `Decoding` beside the others; None counts as not given.

    Raises:
        ConfigError: A setting is unknown or out of range; the message names it, what was got and
            what is allowed.

    Example:
        >>> prediction_settings({"tta": True, "overlap": None, "smallest_et_mm3": 50}).tta
        True
    """
    try:
        return PredictionSettings.model_validate(
            {key: value for key, value in given.items() if value is not None}
        )
    except ValidationError as error:
        raise ConfigError("\n".join(map(_explained, error.errors()))) from None


def _explained(problem: Mapping[str, Any]) -> str:
    name = ".".join(str(part) for part in problem["loc"] if part != "decoding") or "windows"
    return f"setting {name}: {words_of(problem)} (got {problem['input']!r})"
