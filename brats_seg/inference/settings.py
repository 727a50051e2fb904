"""How new cases are predicted: every default, and how what a user asks for becomes settings."""

from collections.abc import Mapping
from typing import Annotated, Any, Literal, Self

from pydantic import Field, ValidationError, field_validator, model_validator

from brats_seg.config import Fraction, PositiveInt, Section
from brats_seg.errors import ConfigError
from brats_seg.labels import convention_named

CubicMillimetres = Annotated[float, Field(ge=0)]


class InferenceConfig(Section):
    """Settings of a prediction; where one is null, the model says."""

    device: str = "auto"
    """`auto` takes the GPU when there is one; else `cpu`, `cuda`, `cuda:1`, `mps`."""
    precision: Literal["auto", "fp32", "fp16", "bf16"] = "auto"
    """`auto` takes what the device computes natively: bf16, else fp16 on a GPU, else fp32."""
    windows: Literal["auto", "whole", "sliding"] = "auto"
    """`whole` takes the brain crop in one pass, `sliding` many windows; `auto`: as tuned, else as learnt."""
    window: tuple[PositiveInt, PositiveInt, PositiveInt] | None = None
    """Voxels of a sliding window."""
    overlap: Annotated[float, Field(ge=0, lt=1)] = 0.5
    """Share that neighbouring windows have in common."""
    tta: bool = False
    """Whether the mean is taken over all eight mirror images: eight times the work."""
    thresholds: tuple[Fraction, Fraction, Fraction] | None = None
    """Probability above which a voxel belongs to WT, TC, ET."""
    smallest_mm3: tuple[CubicMillimetres, CubicMillimetres, CubicMillimetres] | None = None
    """Volume below which a component of WT, TC, ET is left out."""
    smallest_et_mm3: CubicMillimetres | None = None
    """Volume of all ET together below which it becomes necrosis."""
    labels: str | None = None
    """Label convention to write; null takes that of the scan's release."""
    probabilities: bool = False
    """Whether the probability of each region is written as well."""
    uncertainty: bool = False
    """Whether a map of the entropy over models and mirror images is written as well."""
    preview: bool = True
    """Whether a picture of each case is written as well."""

    @model_validator(mode="after")
    def _whole_has_no_window(self) -> Self:
        if self.windows == "whole" and self.window is not None:
            msg = "windows is 'whole' and a window is given; expected one of the two"
            raise ValueError(msg)
        return self

    @field_validator("labels")
    @classmethod
    def _is_known(cls, value: str | None) -> str | None:
        if value is not None:
            convention_named(value)
        return value


def inference_config(given: Mapping[str, Any]) -> InferenceConfig:
    """Validate settings; those that are None keep their default.

    Raises `ConfigError` naming the setting, what was got and what is allowed.
    """
    try:
        return InferenceConfig(**{key: value for key, value in given.items() if value is not None})
    except ValidationError as error:
        problems = [
            f"setting {'.'.join(map(str, p['loc'])) or 'windows'}: {p['msg']} (got {p['input']!r})"
            for p in error.errors()
        ]
        raise ConfigError("\n".join(problems)) from None
