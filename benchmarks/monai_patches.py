"""Make patches with MONAI's dictionary transforms, as often and as strongly augmented as ours."""

import math
from collections.abc import Callable

from monai import transforms as mt

from brats_seg.cases.case import Case, CaseIndex

IMAGES = ("t1n", "t1c", "t2w", "t2f")
BOTH = ("image", "label")


def items(index: CaseIndex, *, labels: bool) -> list[dict[str, str]]:
    """Return the files of every case."""
    return [item(index, case, labels=labels) for case in index.cases]


def item(index: CaseIndex, case: Case, *, labels: bool) -> dict[str, str]:
    """Return the files of a case."""
    scans = dict(zip(IMAGES, case.images, strict=True))
    if labels:
        scans["label"] = case.label
    return {name: str(index.root / scan.path) for name, scan in scans.items()}


def loaded(*, labels: bool) -> list[Callable]:
    """Read a case and put its modalities into one array."""
    keys = (*IMAGES, "label") if labels else IMAGES
    return [
        mt.LoadImaged(keys),
        mt.EnsureChannelFirstd(keys),
        mt.ConcatItemsd(IMAGES, "image"),
        mt.DeleteItemsd(IMAGES),
    ]


def deterministic(*, labels: bool) -> list[Callable]:
    """Read a case, crop it to the brain and normalise it; a cache holds the result."""
    cropped = BOTH if labels else ("image",)
    return [
        *loaded(labels=labels),
        *([mt.ConvertToMultiChannelBasedOnBratsClassesd("label")] if labels else []),
        mt.CropForegroundd(cropped, "image", allow_smaller=True),
        mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True),
    ]


def crop(size: tuple[int, int, int]) -> list[Callable]:
    """Take a patch anywhere."""
    return [mt.RandSpatialCropd(BOTH, size, random_size=False, allow_missing_keys=True)]


CHANGES = ("noise", "blur", "brightness", "contrast", "low_resolution", "inverted_gamma", "gamma")
"""The changes of intensities, in the order of nnU-Net."""


def change(name: str, prob: float) -> Callable:
    """Return a change of intensities."""
    gamma = {"gamma": (0.7, 1.5), "retain_stats": True, "prob": prob}
    scaling = {"factors": 0.25, "channel_wise": True, "prob": prob}
    match name:
        case "noise":
            return mt.RandGaussianNoised("image", prob=prob, std=0.1)
        case "blur":
            return mt.RandGaussianSmoothd("image", (0.5, 1), (0.5, 1), (0.5, 1), prob=prob)
        case "brightness":
            return mt.RandScaleIntensityd("image", **scaling)
        case "contrast":
            return mt.RandScaleIntensityFixedMeand("image", preserve_range=True, **scaling)
        case "low_resolution":
            return mt.RandSimulateLowResolutiond("image", prob=prob)
        case "inverted_gamma":
            return mt.RandAdjustContrastd("image", invert_image=True, **gamma)
        case _:
            return mt.RandAdjustContrastd("image", **gamma)


def flips(prob: float = 0.5) -> list[Callable]:
    """Mirror each axis."""
    return [mt.RandFlipd(BOTH, prob=prob, spatial_axis=axis) for axis in range(3)]


def affine(prob: float) -> Callable:
    """Rotate."""
    angles = (math.radians(30),) * 3
    return mt.RandAffined(BOTH, prob=prob, rotate_range=angles, mode=("bilinear", "nearest"))


def light() -> list[Callable]:
    """Mirror, noise, brightness, contrast."""
    return [*flips(), change("noise", 0.1), change("brightness", 0.15), change("contrast", 0.15)]


def full() -> list[Callable]:
    """Follow the list of nnU-Net."""
    return [
        affine(0.2),
        mt.RandAffined(
            BOTH, prob=0.2, scale_range=((-0.3, 0.4),) * 3, mode=("bilinear", "nearest")
        ),
        change("noise", 0.1),
        # half the probability of nnU-Net, which changes only half of the channels
        change("blur", 0.1),
        change("brightness", 0.15),
        change("contrast", 0.15),
        change("low_resolution", 0.125),
        change("inverted_gamma", 0.1),
        change("gamma", 0.3),
        *flips(),
    ]
