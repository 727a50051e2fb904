"""Generate phantom cases: brain-like scans with a tumour, for demonstrations without patients.

The files are laid out as in BraTS 2021, a folder of five files per case. The scans are realistic
enough to train on: grey and white matter, fluid, a bias field, noise, and a tumour of nested
regions. The origin of the coordinates is the centre of the brain, its surface is at radius 1.
"""

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy.fft import irfftn, rfftn
from scipy.ndimage import fourier_gaussian, gaussian_filter

from brats_seg.cases.nifti import Geometry, write_volume
from brats_seg.files import alone_at
from brats_seg.labels import BRATS2017, LabelMap, RegionMasks, label_map_of
from brats_seg.tables import write_table
from brats_seg.voxels.box import Mask, Triple

Field = npt.NDArray[np.float64]

_SHAPE = (64, 64, 56)
_AFFINE = np.array([[-1.0, 0, 0, 0], [0, -1, 0, 239], [0, 0, 1, 0], [0, 0, 0, 1]])
_SUFFIXES = ("t1", "t1ce", "t2", "flair", "seg")
_WITHOUT_ET_EVERY = 4

_BACKGROUND, _CSF, _GREY, _WHITE, _OEDEMA, _NON_ENHANCING, _NECROSIS, _ENHANCING, _VESSEL = range(9)

# mean signal of each tissue in t1n, t1c, t2w and t2f, in the arbitrary units of a scanner
_SIGNAL = np.array(
    [
        [0, 0, 0, 0],
        [180, 170, 1000, 130],
        [500, 520, 560, 560],
        [700, 690, 400, 430],
        [480, 470, 820, 950],
        [400, 420, 900, 800],
        [290, 220, 920, 420],
        [480, 1050, 660, 760],
        [350, 2400, 500, 400],
    ],
    dtype=np.float64,
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Phantom:
    """One phantom case."""

    images: npt.NDArray[np.int16]
    """Images (4, X, Y, Z) in the order of `MODALITIES`, exactly 0 outside the brain."""
    label_map: LabelMap
    """Label map (X, Y, Z) in the convention of BraTS 2021."""


def write_phantom_cases(root: Path, *, n_cases: int, seed: int, shape: Triple = _SHAPE) -> None:
    """Write case folders `BraTS2021_00000`, ... below `root`; every fourth case has no ET.

    Raises:
        UsageError: Another process is writing to the folder.
        EnvironmentalError: The folder cannot be written to.
    """
    geometry = Geometry.at(_AFFINE, shape, qform_code=1)
    with alone_at(root, is_folder=True):
        for number in range(n_cases):
            with_et = number % _WITHOUT_ET_EVERY != _WITHOUT_ET_EVERY - 1
            phantom = make_phantom(np.random.default_rng([seed, number]), shape, with_et=with_et)
            case_id = f"BraTS2021_{number:05d}"
            volumes = (*phantom.images, phantom.label_map)
            for suffix, array in zip(_SUFFIXES, volumes, strict=True):
                write_volume(root / case_id / f"{case_id}_{suffix}.nii.gz", array, geometry)


def write_phantom_survival(path: Path, *, n_cases: int, seed: int) -> None:
    """Write a table of ages and survival for phantom cases, with the columns of BraTS 2020.

    The numbers are independent of the scans: an analysis that predicts survival from them has a
    mistake. Every eighth patient is alive, and of every ninth the survival is unknown.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    rng, rows = np.random.default_rng([seed, n_cases]), []
    for number in range(n_cases):
        age, days = rng.normal(60, 11), int(rng.gamma(2, 210)) + 20
        text = f"ALIVE ({days} days later)" if number % 8 == 7 else str(days)
        survival = "NA" if number % 9 == 8 else text
        resection = ("GTR", "STR", "NA")[number % 3]
        rows.append((f"BraTS2021_{number:05d}", f"{age:.3f}", survival, resection))
    write_table(path, ("BraTS21ID", "Age", "Survival_days", "Extent_of_Resection"), rows)


def make_phantom(rng: np.random.Generator, shape: Triple = _SHAPE, *, with_et: bool) -> Phantom:
    """Return one case; the generator determines size, position and shape of its tumour."""
    tissue = _make_brain(rng, shape)
    regions = _make_tumour(rng, tissue, with_et=with_et)
    tissue[_vessels(rng, tissue)] = _VESSEL
    wt, tc, et = regions
    tissue[wt] = _OEDEMA
    tissue[tc] = _NECROSIS if with_et else _NON_ENHANCING
    tissue[et] = _ENHANCING
    return Phantom(images=_scanned(rng, tissue), label_map=label_map_of(regions, BRATS2017))


def _make_brain(rng: np.random.Generator, shape: Triple) -> npt.NDArray[np.uint8]:
    """Return the tissue (X, Y, Z) of a brain without a tumour."""
    x, y, z = _coordinates(shape)
    depth = 1 - np.sqrt(x**2 + y**2 + z**2) + 0.03 * _smooth_noise(rng, shape, 0.12)
    aside = np.abs(x + 0.02 * _smooth_noise(rng, shape, 0.08))
    # sulci are narrow at the surface and end inside; the fissure separates the hemispheres
    furrow = np.abs(_smooth_noise(rng, shape, 0.03)) + 1.6 * depth.clip(min=0)
    cleft = (aside < 0.02) & (depth < 0.45)
    nuclei = _ellipsoid(aside - 0.3, y, z, (0.14, 0.25, 0.18))
    ventricles = _ellipsoid(aside - 0.1 - 0.4 * y**2, y, z - 0.15, (0.08, 0.42, 0.16))
    tissue = np.full(shape, _WHITE, dtype=np.uint8)
    tissue[(depth < 0.11) | (furrow < 0.75) | (aside < 0.07) & (depth < 0.5) | nuclei] = _GREY
    tissue[(depth < 0.03) | (furrow < 0.26) | cleft | ventricles] = _CSF
    tissue[(depth < 0) | (z < -0.8)] = _BACKGROUND
    return tissue


def _make_tumour(
    rng: np.random.Generator, tissue: npt.NDArray[np.uint8], *, with_et: bool
) -> RegionMasks:
    """Return region masks (3, X, Y, Z): irregular shells around a point in the white matter."""
    shape = tissue.shape
    coordinates = np.stack(_coordinates(shape))
    deep = (tissue == _WHITE) & ((coordinates**2).sum(axis=0) < 0.5)
    centre = rng.choice(coordinates[:, deep & (np.abs(coordinates[0]) > 0.2)], axis=1)
    stretch = rng.uniform(0.8, 1.25, size=3)
    offsets = (coordinates - centre[:, None, None, None]) * stretch[:, None, None, None]
    distance = np.sqrt((offsets**2).sum(axis=0)) / rng.uniform(0.26, 0.46)
    # oedema spreads along the white matter and spares cortex and fluid
    spread = distance * (1 + 0.22 * _smooth_noise(rng, shape, 0.06))
    oedema = (spread < 1) & (tissue == _WHITE) | (spread < 0.75) & (tissue == _GREY)
    core_share = rng.uniform(0.55, 0.8)
    solid = distance * (1 + 0.2 * _smooth_noise(rng, shape, 0.06)) / core_share
    tc = (solid < 1) & (tissue != _BACKGROUND)
    necrosis = solid * (1 + 0.2 * _smooth_noise(rng, shape, 0.04)) < rng.uniform(0.5, 0.75)
    return np.stack([oedema | tc, tc, tc & ~necrosis & with_et])


def _vessels(rng: np.random.Generator, tissue: npt.NDArray[np.uint8]) -> Mask:
    """Return thin curved lines in cortex and fluid: vessels take up contrast agent in every brain."""
    # a generator of its own leaves the rest of the case as it would be without vessels
    (own,) = rng.spawn(1)
    one, other = (np.abs(_smooth_noise(own, tissue.shape, 0.06)) for _ in range(2))
    return (one < 0.18) & (other < 0.18) & ((tissue == _GREY) | (tissue == _CSF))


def _scanned(rng: np.random.Generator, tissue: npt.NDArray[np.uint8]) -> npt.NDArray[np.int16]:
    """Return images (4, X, Y, Z) of the tissue, each with its own gain, bias and noise."""
    brain = tissue != _BACKGROUND
    images = []
    for signal in _SIGNAL.T:
        texture = 1 + 0.04 * _smooth_noise(rng, tissue.shape, 0.02)
        blurred = gaussian_filter(signal[tissue] * texture, 0.6)
        bias = np.exp(0.1 * _smooth_noise(rng, tissue.shape, 0.35))
        noise = rng.normal(0, 18, tissue.shape)
        image = rng.uniform(0.7, 1.4) * (blurred * bias + noise)
        images.append(np.where(brain, image.clip(min=1), 0))
    return np.stack(images).astype(np.int16)


def _coordinates(shape: Triple) -> tuple[Field, Field, Field]:
    """Return x, y and z of every voxel; the surface of the brain is at radius 1."""
    half = np.array([0.4, 0.47, 0.47]) * shape
    middle = (np.array(shape) - 1) / 2
    x, y, z = (np.indices(shape).T - middle).T / half[:, None, None, None]
    return x, y, z


def _ellipsoid(x: Field, y: Field, z: Field, half_axes: tuple[float, float, float]) -> Mask:
    a, b, c = half_axes
    return (x / a) ** 2 + (y / b) ** 2 + (z / c) ** 2 < 1


def _smooth_noise(rng: np.random.Generator, shape: Triple, scale: float) -> Field:
    """Return a random field of unit variance, smoothed by `scale` as a fraction of the shape."""
    spectrum = rfftn(rng.standard_normal(shape))
    fourier_gaussian(spectrum, [scale * n for n in shape], n=shape[-1], output=spectrum)
    field = irfftn(spectrum, shape)
    return (field - field.mean()) / field.std()
