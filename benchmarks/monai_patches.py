"""Make patches with MONAI's dictionary transforms, as often and as strongly augmented as ours."""

import math
from collections.abc import Callable

from monai import transforms as mt

from brats_seg.cases.case import Case, CaseIndex

IMAGES = ("t1n", "t1c", "t2w", "t2f")
BOTH = ("image", "label")


def items(index: CaseIndex, *, labels: bool) -> list[dict[str, str]]:
    """Return the files of every case."""
    return [item(case, labels=labels) for case in index.cases]


def item(case: Case, *, labels: bool) -> dict[str, str]:
    """Return the files of a case."""
    scans = dict(zip(IMAGES, case.images, strict=True))
    if labels:
        scans["label"] = case.label
    return {name: str(case.path_of(scan)) for name, scan in scans.items()}


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


def flips() -> list[Callable]:
    """Mirror each axis."""
    return [mt.RandFlipd(BOTH, prob=0.5, spatial_axis=axis) for axis in range(3)]


def light() -> list[Callable]:
    """Mirror, noise, brightness, contrast."""
    return [*flips(), *_noise_and_scale()]


def _noise_and_scale() -> list[Callable]:
    scaling = {"factors": 0.25, "channel_wise": True, "prob": 0.15}
    return [
        mt.RandGaussianNoised("image", prob=0.1, std=0.1),
        mt.RandScaleIntensityd("image", **scaling),
        mt.RandScaleIntensityFixedMeand("image", preserve_range=True, **scaling),
    ]


def full() -> list[Callable]:
    """Follow the list of nnU-Net."""
    noise, *scale = _noise_and_scale()
    modes, sigmas = ("bilinear", "nearest"), ((0.5, 1),) * 3
    gamma = {"gamma": (0.7, 1.5), "retain_stats": True}
    return [
        mt.RandAffined(BOTH, prob=0.2, rotate_range=(math.radians(30),) * 3, mode=modes),
        mt.RandAffined(BOTH, prob=0.2, scale_range=((-0.3, 0.4),) * 3, mode=modes),
        noise,
        # half the probability of nnU-Net, which changes only half of the channels
        mt.RandGaussianSmoothd("image", *sigmas, prob=0.1),
        *scale,
        mt.RandSimulateLowResolutiond("image", prob=0.125),
        mt.RandAdjustContrastd("image", invert_image=True, prob=0.1, **gamma),
        mt.RandAdjustContrastd("image", prob=0.3, **gamma),
        *flips(),
    ]
