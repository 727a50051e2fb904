"""Settings of a prediction. They are validated without torch, so that a mistake is answered at once."""

from collections.abc import Mapping
from typing import Any, Literal

from pydantic import ValidationError, field_validator

from brats_seg import config
from brats_seg.errors import ConfigError, unknown_name
from brats_seg.presets import ConventionName

ResultLayout = Literal["plain", "bids"]


class PredictionSettings(config.Section):
    """Settings of a prediction.

    Thresholds and smallest volumes that are not given are those stored with the model, or the
    defaults where nothing was fitted; see `inference.model.resolve`.

    Example:
        >>> PredictionSettings(tta=True, window="whole").changed_text()
        'window: whole, tta: True'
    """

    device: str = "auto"
    """`auto` takes the GPU when there is one; else `cpu`, `cuda`, `cuda:1`, `mps`."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto` takes what the device computes natively: bf16, else fp16 on a GPU, else fp32."""
    window: Literal["auto", "whole"] | config.Size = "auto"
    """Voxels of a sliding window; `whole` takes the brain crop in one pass, `auto` the window of the
    network."""
    overlap: config.Overlap | None = None
    """Share that neighbouring windows have in common; null takes 0.5, or that of another program."""
    tta: bool = False
    """Whether the mean is taken over all eight mirror images: eight times the work."""
    thresholds: tuple[config.Threshold, config.Threshold, config.Threshold] | None = None
    """Probability above which a voxel belongs to WT, TC, ET; null takes those of the model."""
    smallest_mm3: (
        tuple[config.CubicMillimetres, config.CubicMillimetres, config.CubicMillimetres] | None
    ) = None
    """Volume below which a component of WT, TC, ET is removed; null takes those of the model."""
    smallest_et_mm3: config.CubicMillimetres | None = None
    """Volume of all ET together below which it becomes necrosis; null takes that of the model."""
    surest_et: config.Fraction | None = None
    """Probability of ET that some voxel must reach, or all ET becomes necrosis; null takes that of the model."""
    labels: ConventionName | None = None
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

    @property
    def result_text(self) -> str:
        """The settings that the files of a case depend on, as JSON."""
        return self.model_dump_json(exclude={"device", "report"})

    def changed_text(self) -> str:
        """Return the settings that are not the defaults as words, without those that no label map depends on."""
        about_files = {"preview", "report", "layout"}
        given = self.model_dump(mode="json", exclude_defaults=True, exclude=about_files)
        return ", ".join(f"{name}: {value}" for name, value in given.items()) or "the defaults"

    @field_validator("window", mode="before")
    @classmethod
    def _parse_window(cls, value: object) -> object:
        return value if value == "auto" else config.parse_size(value)


DEFAULT_SETTINGS = PredictionSettings()


def prediction_settings(given: Mapping[str, Any]) -> PredictionSettings:
    """Validate settings; None counts as not given.

    Raises:
        ConfigError: A setting is unknown or out of range; the message names it, what was got and
            what is allowed.

    Example:
        >>> prediction_settings({"tta": True, "overlap": None, "smallest_et_mm3": 50}).tta
        True
    """
    values = {name: value for name, value in given.items() if value is not None}
    if unknown := values.keys() - PredictionSettings.model_fields.keys():
        name = min(unknown)
        raise ConfigError(unknown_name(f"setting {name}", name, PredictionSettings.model_fields))
    try:
        return PredictionSettings.model_validate(values)
    except ValidationError as error:
        lines = [f"setting {line}" for line in config.validation_problems(error)]
        raise ConfigError("\n".join(lines)) from None
