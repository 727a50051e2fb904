"""How a patch is changed before a network learns from it: which changes, how often, how much.

Chances and ranges are those of nnU-Net v2 (Isensee et al. 2021). Its elastic deformation is off by
default and left out.
"""

from dataclasses import dataclass

Range = tuple[float, float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """The chance of every change; what is left out never happens."""

    mirror: float = 0
    """Per axis."""
    rotation: float = 0
    scaling: float = 0
    noise: float = 0
    blur: float = 0
    brightness: float = 0
    contrast: float = 0
    low_resolution: float = 0
    inverted_gamma: float = 0
    gamma: float = 0


NONE = Augmentation()
LIGHT = Augmentation(mirror=0.5, noise=0.1, brightness=0.15, contrast=0.15)
"""What costs little: several times the patches a second of the full list."""
FULL = Augmentation(
    mirror=0.5,
    rotation=0.2,
    scaling=0.2,
    noise=0.1,
    blur=0.2,
    brightness=0.15,
    contrast=0.15,
    low_resolution=0.25,
    inverted_gamma=0.1,
    gamma=0.3,
)
AUGMENTATIONS = {"none": NONE, "light": LIGHT, "full": FULL}
"""By the name in the settings."""
