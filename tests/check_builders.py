"""Phantoms and real cases as volumes, for the checks of modalities and label maps."""

from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg import labels
from brats_seg.cases import phantom as phantoms
from brats_seg.cases.anatomy import Glioma, Voxels, make_brain, random_positions
from brats_seg.cases.case import LoadedCase, load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.labels import BRATS2017, LabelConvention, LabelMap
from brats_seg.quality.scan import BrainSample, sample_brain
from tests.builders import write_arrays

ATLAS_AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])
PHANTOM_SHAPE = (64, 76, 62)
PHANTOM_AFFINE = np.diag([-2.5, -2.5, 2.5, 1.0])
RADII_MM = (27, 17, 11)
"""Radii of a clear tumour, its core and its necrosis."""


@cache
def phantom(
    seed: int, shape: tuple[int, int, int] = PHANTOM_SHAPE, *, with_et: bool = True
) -> tuple[npt.NDArray[np.int16], labels.LabelMap]:
    """Return the images (4, X, Y, Z) of a brain with a clear tumour, and its label map of BraTS 2017.

    The tumour, of 80 ml in the left hemisphere, is necrosis in a ring of ET in oedema. Brains and
    scans differ by the seed.
    """
    rng, grid = np.random.default_rng([7, seed]), Voxels.around_brain(shape)
    brain = make_brain(rng, grid, random_positions(rng, grid))
    offset = grid.positions() - np.reshape([34, -5, 15], (3, 1, 1, 1))
    distance = np.linalg.norm(offset, axis=0)
    wt, tc, necrosis = ((distance < radius) & brain.mask for radius in RADII_MM)
    regions = np.stack([wt, tc, tc & ~necrosis & with_et])
    family = "ring" if with_et else "none"
    oedema, cavity = np.ones(shape, np.float32), np.zeros(shape, np.bool_)
    tumour = Glioma(regions=regions, oedema=oedema, cavity=cavity, family=family)
    images = phantoms._make_images(rng, grid, brain, tumour, variety=0)
    return images, labels.label_map_of(regions, BRATS2017)


def write_clear_phantoms(
    root: Path, n_cases: int, shape: tuple[int, int, int] = PHANTOM_SHAPE
) -> Path:
    for number in range(n_cases):
        images, label_map = phantom(number, shape)
        spacing_mm = Voxels.around_brain(shape).spacing_mm
        affine = np.diag([-spacing_mm, -spacing_mm, spacing_mm, 1])
        write_arrays(root / f"BraTS2021_{number:05d}", (*images, label_map), affine)
    return root


def geometry(shape: tuple[int, ...], affine: npt.NDArray[np.float64] = ATLAS_AFFINE) -> Geometry:
    return Geometry.at(affine, shape, qform_code=1)


def affine_of(images: npt.NDArray[np.generic]) -> npt.NDArray[np.float64]:
    """Return the matrix of images (n, X, Y, Z): that of phantoms, if they have their shape."""
    return PHANTOM_AFFINE if images.shape[1:] == PHANTOM_SHAPE else ATLAS_AFFINE


def volumes_of(images: npt.NDArray[np.generic], affine: np.ndarray | None = None) -> list[Volume]:
    grid = geometry(images.shape[1:], affine_of(images) if affine is None else affine)
    return [
        Volume(array=image, geometry=grid, file=f"{modality}.nii")
        for modality, image in zip(labels.MODALITIES, images, strict=False)
    ]


def label_volume(label_map: labels.LabelMap) -> Volume:
    return Volume(array=label_map, geometry=geometry(label_map.shape), file="seg.nii")


def sample_of(
    images: npt.NDArray[np.generic],
    label_map: labels.LabelMap | None = None,
    affine: npt.NDArray[np.float64] | None = None,
) -> BrainSample:
    label = None if label_map is None else label_volume(label_map)
    sample = sample_brain(volumes_of(images, affine), label)
    assert sample is not None
    return sample


def renumbered(label_map: LabelMap, convention: LabelConvention) -> LabelMap:
    return labels.label_map_of(labels.regions_of(label_map, BRATS2017), convention)


def real_cases(root: Path, *folders: str) -> list[LoadedCase]:
    return [load_case(case) for folder in folders for case in find_cases(root / folder).cases]


def images_of(case: LoadedCase) -> npt.NDArray[np.generic]:
    return np.stack([volume.array for volume in case.volumes])
