"""The patches of MONAI's dictionary transforms, changed as often and as much as ours."""

import math
from collections.abc import Callable

from monai import transforms as mt

from brats_seg.cases.case import CaseIndex

IMAGES = ("t1n", "t1c", "t2w", "t2f")
BOTH = ("image", "label")


def items(index: CaseIndex, *, labels: bool) -> list[dict[str, str]]:
    """Return the files of every case."""
    names = (*IMAGES, "label") if labels else IMAGES
    return [
        {name: str(index.root / getattr(case, name).path) for name in names} for case in index.cases
    ]


def deterministic(*, labels: bool) -> list[Callable]:
    """Read a case, crop it to the brain and normalise it: what a cache holds."""
    keys = (*IMAGES, "label") if labels else IMAGES
    cropped = BOTH if labels else ("image",)
    return [
        mt.LoadImaged(keys),
        mt.EnsureChannelFirstd(keys),
        mt.ConcatItemsd(IMAGES, "image"),
        mt.DeleteItemsd(IMAGES),
        *([mt.ConvertToMultiChannelBasedOnBratsClassesd("label")] if labels else []),
        mt.CropForegroundd(cropped, "image", allow_smaller=True),
        mt.NormalizeIntensityd("image", nonzero=True, channel_wise=True),
    ]


def crop(size: tuple[int, int, int]) -> list[Callable]:
    """Take a patch anywhere."""
    return [mt.RandSpatialCropd(BOTH, size, random_size=False, allow_missing_keys=True)]


def light() -> list[Callable]:
    """Mirror, noise, brightness, contrast."""
    return [
        *(mt.RandFlipd(BOTH, prob=0.5, spatial_axis=axis) for axis in range(3)),
        mt.RandGaussianNoised("image", prob=0.1, std=0.1),
        mt.RandScaleIntensityd("image", factors=0.25, prob=0.15, channel_wise=True),
        mt.RandScaleIntensityFixedMeand(
            "image", factors=0.25, prob=0.15, preserve_range=True, channel_wise=True
        ),
    ]


def full() -> list[Callable]:
    """Follow the list of nnU-Net."""
    noise, brightness, contrast = light()[3:]
    gamma = {"gamma": (0.7, 1.5), "retain_stats": True}
    return [
        mt.RandAffined(
            BOTH, prob=0.2, rotate_range=(math.radians(30),) * 3, mode=("bilinear", "nearest")
        ),
        mt.RandAffined(
            BOTH, prob=0.2, scale_range=((-0.3, 0.4),) * 3, mode=("bilinear", "nearest")
        ),
        noise,
        # half of the channels in half as many patches more: nnU-Net keys for each channel
        mt.RandGaussianSmoothd("image", (0.5, 1), (0.5, 1), (0.5, 1), prob=0.1),
        brightness,
        contrast,
        mt.RandSimulateLowResolutiond("image", prob=0.125),
        mt.RandAdjustContrastd("image", prob=0.1, invert_image=True, **gamma),
        mt.RandAdjustContrastd("image", prob=0.3, **gamma),
        *light()[:3],
    ]
