"""Generate phantom cases: made-up scans of brains with a tumour, to try and teach without patients.

The files are laid out as in BraTS 2021, a folder of five files per case. The signal of each tissue is drawn
from wide ranges that keep the physics: fluid is dark on T1 and bright on T2, oedema bright on FLAIR, and what
enhances is brighter after contrast than before. What is no tumour is there too: vessels, dura and choroid
plexus that enhance, bright spots of white matter and artefacts on FLAIR.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import exp
from pathlib import Path

import numpy as np
import numpy.typing as npt
from scipy import ndimage, special

from brats_seg.cases import anatomy
from brats_seg.cases.anatomy import Anatomy, Glioma, Voxels
from brats_seg.cases.many import map_in_workers
from brats_seg.cases.nifti import Geometry, write_volume
from brats_seg.files import alone_at
from brats_seg.labels import BRATS2017, LabelMap, label_map_of
from brats_seg.tables import write_table
from brats_seg.voxels.box import Triple
from brats_seg.voxels.grids import Field

_SHAPE = (64, 76, 62)
"""Voxels of a phantom; its spacing is 2.5 mm."""
_SUFFIXES = ("t1", "t1ce", "t2", "flair", "seg")
_T1N, _T1C, _T2W, _T2F = range(4)
_VARIETY = 0.3
"""Variety of the phantoms to try the package on, see `write_phantom_cases`."""
_GAIN = 500
"""Signal of the brightest healthy tissue, in the arbitrary units of a scanner."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Phantom:
    """One phantom case."""

    images: npt.NDArray[np.int16]
    """Images (4, X, Y, Z) in the order of `MODALITIES`, exactly 0 outside the brain."""
    label_map: LabelMap
    """Label map (X, Y, Z) in the convention of BraTS 2021."""


def write_phantom_cases(
    root: Path,
    *,
    n_cases: int,
    seed: int,
    shape: Triple = _SHAPE,
    variety: float = _VARIETY,
    n_workers: int = 0,
) -> None:
    """Write case folders `BraTS2021_00000`, ... below `root`; every fourth case has no ET.

    The voxels are as large as needed for a brain to fit in the shape: 1 mm for 240x240x155. A variety of 1
    draws signals, slices and faults from all that scanners make, and resects tumours, to teach a network that
    is used on patients.

    Raises:
        UsageError: Another process is writing to the folder.
        EnvironmentalError: The folder cannot be written to.
    """
    write = partial(_write_case, root, seed, shape, variety)
    with alone_at(root, is_folder=True):
        list(map_in_workers(write, range(n_cases), n_workers))


def _write_case(root: Path, seed: int, shape: Triple, variety: float, number: int) -> None:
    with_et = number % 4 != 3
    rng = np.random.default_rng([seed, number])
    phantom = make_phantom(rng, shape, with_et=with_et, variety=variety)
    spacing_mm = Voxels.around_brain(shape).spacing_mm
    affine = np.diag([-spacing_mm, -spacing_mm, spacing_mm, 1])
    affine[1, 3] = spacing_mm * (shape[1] - 1)
    geometry = Geometry.at(affine, shape, qform_code=1)
    case_id = f"BraTS2021_{number:05d}"
    for suffix, array in zip(_SUFFIXES, (*phantom.images, phantom.label_map), strict=True):
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


def make_phantom(
    rng: np.random.Generator, shape: Triple = _SHAPE, *, with_et: bool, variety: float = _VARIETY
) -> Phantom:
    """Return one case, to rounding a pure function of the generator, whose tumour enhances or not."""
    grid = Voxels.around_brain(shape)
    positions = anatomy.random_positions(rng, grid)
    foci = anatomy.place_foci(rng, grid, positions)
    brain = anatomy.make_brain(rng, grid, positions + anatomy.displacement(rng, grid, foci))
    tumour = anatomy.make_tumour(rng, grid, brain, foci, with_et=with_et, variety=variety)
    images = _make_images(rng, grid, brain, tumour, variety)
    return Phantom(images=images, label_map=label_map_of(tumour.regions, BRATS2017))


def _uniform(rng: np.random.Generator, variety: float) -> Callable[[float, float], float]:
    """Return a function that draws from a range, narrowed around its middle where variety is below 1."""
    return lambda low, high: (low + high + variety * rng.uniform(-1, 1) * (high - low)) / 2


def _draw_signals(rng: np.random.Generator, variety: float) -> Field:
    """Return mean signals of tissues in the modalities (7, 4), as shares of the brightest healthy tissue.

    The tissues are fluid, grey and white matter, oedema, solid core, necrosis and enhancing tumour.
    """
    u = _uniform(rng, variety)
    fluid, grey, white = np.ones((3, 4))
    grey[_T1N], fluid[_T1N] = u(0.68, 0.92), u(0.15, 0.5)
    grey[_T1C] = (grey[_T1N] + u(-0.05, 0.12)).clip(0.6, 1.02)
    fluid[_T1C] = fluid[_T1N] + u(-0.05, 0.08)
    grey[_T2W] = u(0.42, 0.66)
    white[_T2W] = grey[_T2W] - u(0.03, 0.2)
    white[_T2F], fluid[_T2F] = u(0.7, 1), u(0.15, 0.65)
    grey_t1, grey_t2 = grey[_T1N], grey[_T2W]
    oedema = np.array([grey_t1 * u(0.72, 1.02), 0, u(grey_t2 + 0.04, 0.95), u(1.12, 1.95)])
    solid = np.array([grey_t1 * u(0.55, 0.98), 0, u(grey_t2 + 0.12, 1.05), u(1.03, 1.8)])
    dark = u(min(fluid[_T1N], 0.9 * grey_t1), 0.95 * grey_t1)
    necrosis = np.array([dark, 0, u(grey_t2 + 0.1, 1.1), u(fluid[_T2F] + 0.1, 1.7)])
    for signal, least, most in ((oedema, 0.95, 1.05), (solid, 0.92, 1.15), (necrosis, 0.92, 1.2)):
        signal[_T1C] = signal[_T1N] * u(least, most)
    enhancing = np.array([grey_t1 * u(0.75, 1.08), u(1.12, 2.2), u(grey_t2 - 0.02, 0.9), u(1, 1.8)])
    return np.array([fluid, grey, white, oedema, solid, necrosis, enhancing], np.float32)


def _make_images(
    rng: np.random.Generator, grid: Voxels, brain: Anatomy, tumour: Glioma, variety: float
) -> npt.NDArray[np.int16]:
    """Return images (4, X, Y, Z) of the brain, each with its own slices, bias and noise."""
    signals = _draw_signals(rng, variety)
    uptake = _normal_uptake(rng, grid, brain, variety)
    lesions, rim = _white_matter_lesions(rng, grid, brain), _surface_artefact(rng, grid, brain)
    parts = _parts(rng, tumour)
    noises = np.stack([grid.noise(rng, knots_mm) for knots_mm in (5, 11, 40, 6)])
    blend = special.expit(2.5 * grid.noise(rng, 12) + rng.uniform(-3, 3))
    is_cystic = rng.random() < 0.8 if tumour.family == "ring" else rng.random() < 0.3
    in_t1n, from_vessels = rng.random() < 0.5, rng.uniform(0, 0.6)
    images = []
    for modality in range(4):
        _, grey, white, oedema, *_ = signals[:, modality]
        image = _healthy_image(rng, signals, brain, noises, modality)
        if modality == _T1C:
            image += uptake * (1 - parts[2])
        elif modality == _T1N and in_t1n:
            image += rng.uniform(0, 0.25) * uptake
        elif modality == _T2W:
            image *= 1 - from_vessels * uptake.clip(0, 1)
            image += 0.6 * (oedema - grey) * lesions
        elif modality == _T2F:
            image += rng.uniform(0.5, 1.1) * (oedema - 1) * lesions + rim
        looks = _tumour_looks(rng, signals, noises, blend if is_cystic else None, modality)
        for share, look in zip(parts, looks, strict=True):
            # oedema that is faint keeps the anatomy below it
            image += share * (look - image)
        brightest = float(max(grey, white))
        is_thick = rng.random() < variety * (0.2 if modality == _T1C else 0.5)
        image *= np.exp(_uneven_gain(rng, grid, brain, variety)) / brightest
        images.append(_simulate_scanner(rng, grid, image, variety, is_thick=is_thick))
    scaled = _GAIN * rng.uniform(0.5, 2, size=(4, 1, 1, 1)) * np.stack(images)
    return np.where(brain.mask, scaled.clip(min=1), 0).astype(np.int16)


def _healthy_image(
    rng: np.random.Generator, signals: Field, brain: Anatomy, noises: Field, modality: int
) -> Field:
    """Return the brain without contrast agent, and what skull stripping left around it."""
    fine, middle, wide, texture = noises
    unevenness = rng.uniform(0, 0.14 if modality == _T2F else 0.07)
    fluid, grey, white, *_ = signals[:, modality]
    image: Field = fluid * brain.tissue[0]
    image += grey * (1 + unevenness * wide) * brain.tissue[1]
    image += white * (1 + 0.4 * unevenness * wide) * brain.tissue[2]
    image *= 1 + rng.uniform(0, 0.05) * fine + rng.uniform(0, 0.03) * middle
    around = rng.uniform(0.3, 2.5 if modality == _T1C else 1.4) * (1 + 0.3 * texture)
    image += brain.leftover * (around - image)
    return image


def _tumour_looks(
    rng: np.random.Generator,
    signals: Field,
    noises: Field,
    necrotic: Field | None,
    modality: int,
) -> tuple[Field, ...]:
    """Return the signals of oedema, core without enhancement, of which a share is necrotic, ET and a cavity."""
    fine, middle, _, texture = noises
    fluid, _, _, oedema, core, necrosis, enhancing = signals[:, modality]
    if necrotic is not None:
        core = necrotic * necrosis + (1 - necrotic) * core
    bright = (0.05, 0.35) if modality == _T1C else (0, 0.2)
    return (
        oedema * (1 + rng.uniform(0, 0.15) * middle + rng.uniform(0, 0.1) * fine),
        core * (1 + rng.uniform(0, 0.25) * middle + rng.uniform(0, 0.2) * fine),
        enhancing * (1 + rng.uniform(*bright) * texture),
        fluid,
    )


def _parts(rng: np.random.Generator, tumour: Glioma) -> Field:
    """Return the shares (4, X, Y, Z) of oedema, core without enhancement, ET and cavity in each voxel."""
    wt, tc, et = tumour.regions
    sigma = rng.uniform(0.35, 0.8)
    masks = (wt & ~tc, tc & ~et, et, tumour.cavity)
    shares = [ndimage.gaussian_filter(mask.astype(np.float32), sigma) for mask in masks]
    return np.stack([(shares[0] * tumour.oedema).clip(0, 1), *shares[1:]])


def _normal_uptake(rng: np.random.Generator, grid: Voxels, brain: Anatomy, variety: float) -> Field:
    """Return what contrast agent adds outside tumours: vessels, falx and sinuses, dura, choroid plexus."""
    u, depth, (fluid, _, _) = _uniform(rng, variety), brain.depth_mm, brain.tissue
    below = depth.clip(min=0)
    knots_mm, width = u(14, 26), u(0.05, 0.2)
    # tubes where two fields of smooth noise are zero together
    tubes = sum((grid.noise(rng, knots_mm) / width) ** 2 for _ in range(2))
    vessels = np.exp(-tubes) * (0.3 + fluid).clip(max=1) * (depth < u(8, 60))
    x, _, z = brain.positions
    falx = np.exp(-((x / u(1, 2.5)) ** 2)) * (depth < u(3, 14)) * (fluid > 0.2) * (z > -20)
    dura = np.exp(-below / u(0.7, 2.5)) * special.expit(3 * grid.noise(rng, 25) + u(-2, 2))
    plexus = (brain.ventricle_mm < 1) * special.expit(4 * (grid.noise(rng, 8) - u(0.3, 1.6)))
    sinuses = np.exp(-below / u(2, 5)) * special.expit(4 * (grid.noise(rng, 15) - u(0.8, 2)))
    amounts = (u(0, 1.4), u(0, 1.2), u(0, 0.9) * (rng.random() < 0.7), u(0, 0.9), u(0, 1.8))
    parts = (vessels, falx, dura, plexus, sinuses)
    return np.sum([a * p for a, p in zip(amounts, parts, strict=True)], axis=0, dtype=np.float32)


def _white_matter_lesions(rng: np.random.Generator, grid: Voxels, brain: Anatomy) -> Field:
    """Return shares of bright caps around the ventricles and of spots in white matter."""
    u, beyond = rng.uniform, brain.ventricle_mm
    caps = np.exp(-(beyond - 1).clip(min=0) / u(1, 6)) * (beyond > 0)
    caps *= special.expit(2 * grid.noise(rng, 18) + u(-2, 2))
    spots = special.expit(5 * (grid.noise(rng, u(6, 14)) - u(1.2, 3))) * (brain.depth_mm > 8)
    amounts = u(0, 1.2) * (rng.random() < 0.8), u(0, 1.2) * (rng.random() < 0.5)
    _, _, white = brain.tissue
    return ((amounts[0] * caps + amounts[1] * spots) * white).clip(0, 1)


def _surface_artefact(rng: np.random.Generator, grid: Voxels, brain: Anatomy) -> Field:
    """Return what FLAIR adds to cortex near the surface."""
    u, below = rng.uniform, brain.depth_mm.clip(min=0)
    rim = np.exp(-below / u(0.8, 2.5)) * special.expit(2 * grid.noise(rng, 25) + u(-2, 2))
    in_grey = u(0, 0.6) * (rng.random() < 0.6)
    anywhere = u(0, 0.4) * (rng.random() < 0.3)
    _, grey, _ = brain.tissue
    return rim * (in_grey * grey + anywhere)


def _uneven_gain(rng: np.random.Generator, grid: Voxels, brain: Anatomy, variety: float) -> Field:
    """Return the logarithm of the gain of coils: smooth, often more near the surface, other at the skull base."""
    gain = rng.uniform(0, 0.16) * grid.noise(rng, 80) + rng.uniform(0, 0.03) * grid.noise(rng, 30)
    if rng.random() < 0.4 * variety:
        gain += rng.uniform(0, 0.4) * np.exp(-brain.depth_mm.clip(min=0) / rng.uniform(6, 25))
    if rng.random() < 0.4 * variety:
        gain += rng.uniform(-0.3, 0.3) * special.expit((-25 - brain.positions[2]) / 6)
    return gain


def _simulate_scanner(
    rng: np.random.Generator, grid: Voxels, image: Field, variety: float, *, is_thick: bool
) -> Field:
    """Return the image as a scanner shows it: blur, thick slices, movement, a missing slab, noise."""
    if rng.random() < 0.6 * variety:
        image = ndimage.gaussian_filter(image, rng.uniform(0.4, 1.5) / grid.spacing_mm)
    if is_thick:
        thickness = max(1, round(rng.uniform(3, 9) / grid.spacing_mm))
        axis = 2 if rng.random() < 0.7 else int(rng.integers(2))
        image = ndimage.uniform_filter1d(image, thickness, axis=axis)
    if rng.random() < 0.3 * variety:
        shift = rng.uniform(-1, 1, size=3) * (2 if rng.random() < 0.2 else 1) / grid.spacing_mm
        image = ndimage.shift(image, shift, order=1, mode="nearest")
    if rng.random() < 0.06 * variety:
        axis, thickness = int(rng.integers(3)), round(rng.uniform(8, 32) / grid.spacing_mm)
        slab = slice(0, thickness) if rng.random() < 0.5 else slice(-thickness, None)
        np.moveaxis(image, axis, 0)[slab] = 0
    level = np.float32(0.016 * exp(variety * rng.uniform(-1.15, 1.15)))
    real, imaginary = level * rng.standard_normal((2, *grid.shape), dtype=np.float32)
    magnitude: Field = np.hypot(image.clip(min=0) + real, imaginary)
    return magnitude ** np.float32(exp(variety * rng.uniform(-0.2, 0.2)))
