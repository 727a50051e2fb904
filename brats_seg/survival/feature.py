"""One number about a case, and its name: `wt_ml`, `t1c_et_skew`, `latent0_017`."""

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One number about a case."""

    name: str
    """With its unit, where it has one."""
    value: float
    """NaN where the case has no such thing, as the shape of an enhancing tumour that is not there."""
