"""Phantoms and real cases as volumes, for the checks of modalities and label maps."""

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import LoadedCase, load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.cases.phantom import make_phantom
from brats_seg.labels import (
    BRATS2017,
    MODALITIES,
    LabelConvention,
    LabelMap,
    label_map_of,
    regions_of,
)
from brats_seg.quality.scan import BrainSample, sample_brain

ATLAS_AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])


@cache
def phantom(seed: int, *, with_et: bool = True) -> tuple[npt.NDArray[np.int16], LabelMap]:
    """Return the images (4, X, Y, Z) of a phantom of 80 ml, and its label map of BraTS 2017."""
    made = make_phantom(np.random.default_rng([0, seed]), with_et=with_et)
    return made.images, made.label_map


def geometry(shape: tuple[int, ...], affine: npt.NDArray[np.float64] = ATLAS_AFFINE) -> Geometry:
    return Geometry.at(affine, shape, qform_code=1)


def volumes_of(
    images: npt.NDArray[np.generic], affine: npt.NDArray[np.float64] = ATLAS_AFFINE
) -> list[Volume]:
    """Return up to four images (n, X, Y, Z) as volumes named after the first modalities."""
    grid = geometry(images.shape[1:], affine)
    return [
        Volume(array=image, geometry=grid, file=f"{modality}.nii")
        for modality, image in zip(MODALITIES, images, strict=False)
    ]


def label_volume(label_map: LabelMap) -> Volume:
    return Volume(array=label_map, geometry=geometry(label_map.shape), file="seg.nii")


def sample_of(
    images: npt.NDArray[np.generic],
    label_map: LabelMap | None = None,
    affine: npt.NDArray[np.float64] = ATLAS_AFFINE,
) -> BrainSample:
    label = None if label_map is None else label_volume(label_map)
    sample = sample_brain(volumes_of(images, affine), label)
    assert sample is not None
    return sample


def renumbered(label_map: LabelMap, convention: LabelConvention) -> LabelMap:
    """Return a label map of BraTS 2017 in another convention."""
    return label_map_of(regions_of(label_map, BRATS2017), convention)


def real_cases(root: Path, *folders: str) -> list[LoadedCase]:
    return [load_case(case) for folder in folders for case in find_cases(root / folder).cases]


def images_of(case: LoadedCase) -> npt.NDArray[np.generic]:
    return np.stack([volume.array for volume in case.volumes])
