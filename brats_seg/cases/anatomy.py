"""Make the anatomy of phantoms: healthy brains, and gliomas that grow in them.

A brain has the tissues of the ICBM 2009a nonlinear symmetric average of 152 adults (Fonov et al. 2009 and 2011),
reduced to shares of grey and white matter at 2 mm and deformed at random; `template.LICENSE` has its notice.
A glioma has one to four foci. Around them oedema spreads fast in white matter, slowly in cortex and hardly in
fluid. Families of gliomas are a ring that enhances around necrosis, solid enhancement, patches, and none.
Positions are in millimetres from the centre of the template, towards left, back and head.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
import scipy as sp  # imports its modules when they are used
from scipy import ndimage, special

from brats_seg.labels import RegionMasks
from brats_seg.voxels.box import Mask, Triple
from brats_seg.voxels.grids import Field

EXTENT_MM = (160, 190, 155)
"""Edges of the box that holds every brain."""
_TEMPLATE_MM = 2.0
_CENTRE_MM = np.array([98, 115, 77], dtype=np.float32)
"""Centre of the brain in the template, in millimetres from its first voxel."""
_DEEP_MM = 22
"""Fluid deeper than this below the surface of the template is that of the ventricles."""
Family = Literal["ring", "solid", "patchy", "none"]
_FAMILIES: tuple[Family, ...] = ("ring", "solid", "patchy")
_FAMILY_SHARES = (0.68, 0.15, 0.17)
"""Share of each family among tumours that enhance."""
_OUTLINE_MM = 1
"""Millimetres of pure white matter by which an outline of oedema is wider than it."""
_RESECTED_SHARE = 1 / 8
_FASTEST = 1.6
"""Largest speed of oedema, as a multiple of that in even white matter."""
_FAR = 1e3


@dataclass(frozen=True, kw_only=True, slots=True)
class Voxels:
    """The voxels of a phantom: cubes in a box around the centre of the brain."""

    shape: Triple
    spacing_mm: float

    @classmethod
    def around_brain(cls, shape: Triple) -> Self:
        """Return the finest grid of the shape that holds every brain."""
        return cls(shape=shape, spacing_mm=float(np.divide(EXTENT_MM, shape).max()))

    def positions(self) -> Field:
        """Return the positions (3, X, Y, Z) of the voxels."""
        middle = (np.array(self.shape, dtype=np.float32) - 1) / 2
        indices = np.indices(self.shape, dtype=np.float32)
        centred = indices - middle[:, None, None, None]
        return (centred * self.spacing_mm).astype(np.float32, copy=False)

    def noise(self, rng: np.random.Generator, knots_mm: float) -> Field:
        """Return smooth noise (X, Y, Z) of mean 0 and deviation 1: a cubic spline through random knots."""
        x, y, z = (_spline_weights(rng, n, knots_mm / self.spacing_mm) for n in self.shape)
        knots = rng.standard_normal((len(x.T), len(y.T), len(z.T)), dtype=np.float32)
        field = y @ np.tensordot(x, knots, axes=1) @ z.T
        return (field - field.mean()) / (field.std() + np.float32(1e-6))


@dataclass(frozen=True, kw_only=True, slots=True)
class Anatomy:
    """The tissues of a brain without a tumour, as arrays of the grid."""

    tissue: Field
    """Shares (3, X, Y, Z) of fluid, grey and white matter in each voxel; their sum is 1."""
    mask: Mask
    """Voxels of the brain; all others are background."""
    depth_mm: Field
    """Distance below the surface of the brain."""
    leftover: Field
    """Shares (X, Y, Z) of what skull stripping left around the brain: dura, sinuses, muscles, eyes."""
    ventricle_mm: Field
    """Distance from the wall of the ventricles, negative inside."""
    positions: Field
    """Positions (3, X, Y, Z) in the template."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Focus:
    """One focus of a tumour."""

    position: Field
    """Position of its centre on the grid, in millimetres."""
    radius_mm: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Glioma:
    """The parts of a tumour, as arrays of the grid."""

    regions: RegionMasks
    """WT, TC and ET (3, X, Y, Z)."""
    oedema: Field
    """Share of its full brightness that oedema has in each voxel: it falls off towards its border."""
    cavity: Mask
    """Where an operation left fluid; it belongs to no region."""
    family: Family


@cache
def _template() -> Field:
    """Return shares of grey and white matter, depth and distance from ventricles (4, X, Y, Z)."""
    with np.load(Path(__file__).with_name("template.npz")) as stored:
        grey, white, mask = (stored[name].astype(np.float32) for name in ("grey", "white", "mask"))
    grey, white = grey / 15, white / 15
    # the brain stem ends here: it would go on below the template, whose border is repeated
    mask[..., 0] = 0
    depth = ndimage.distance_transform_edt(mask) - ndimage.distance_transform_edt(mask == 0)
    depth *= _TEMPLATE_MM
    fluid = ndimage.binary_opening((1 - grey - white > 0.5) & (depth > _DEEP_MM))
    components, _ = ndimage.label(fluid)
    ventricles = fluid & (np.bincount(components.ravel())[components] > 40)
    apart = ndimage.distance_transform_edt(~ventricles) * _TEMPLATE_MM
    return np.stack([grey, white, depth, apart]).astype(np.float32)


def template_at(positions: Field) -> Field:
    """Return shares of grey and white matter, depth and distance from ventricles (4, ...) at positions."""
    voxels = (positions + _CENTRE_MM.reshape(3, *[1] * (positions.ndim - 1))) / _TEMPLATE_MM
    return np.stack(
        [ndimage.map_coordinates(values, voxels, order=1, mode="nearest") for values in _template()]
    )


def random_positions(rng: np.random.Generator, grid: Voxels) -> Field:
    """Return the positions (3, X, Y, Z) in the template of a brain of random size and shape, perhaps mirrored."""
    # the brains of BraTS are pitched against the template
    angles = rng.uniform((0.1, -0.08, -0.08), (0.24, 0.08, 0.08))
    rotation = sp.spatial.transform.Rotation.from_euler("XYZ", angles * (1, -1, 1)).as_matrix()
    scale = rng.uniform(0.98, 1.18, size=3) * (rng.choice([-1, 1]), 1, 1)
    positions = np.einsum("ij,jxyz->ixyz", (rotation * scale).astype(np.float32), grid.positions())
    for knots_mm, most_mm in ((20, 2.2), (45, 4)):
        amount = np.float32(most_mm * rng.uniform(0.3, 1))
        positions += amount * np.stack([grid.noise(rng, knots_mm) for _ in range(3)])
    return positions


def make_brain(rng: np.random.Generator, grid: Voxels, positions: Field) -> Anatomy:
    """Return the brain whose voxels stand at these positions in the template, of any age."""
    grey, white, depth, ventricle = template_at(positions)
    depth += rng.uniform(0, 1.2) * grid.noise(rng, 14)
    inside = depth > rng.uniform(-0.5, 1.5)
    around = special.expit(4 * (grid.noise(rng, rng.uniform(14, 30)) - rng.uniform(0.8, 2.5)))
    leftover = around * (depth > -rng.uniform(2, 9)) * ~inside
    mask = ndimage.binary_fill_holes(inside | (leftover > 0.5))
    # ventricles and sulci widen with age
    ventricle -= rng.uniform(-1.5, 1) if rng.random() < 0.6 else rng.uniform(0, 4.5)
    near_surface = special.expit((rng.uniform(9, 20) - depth) / 3) * (ventricle > 8)
    furrow, width = grid.noise(rng, rng.uniform(15, 22)), rng.uniform(0.05, 0.16)
    shares = np.stack([(1 - grey - white).clip(0, 1), grey, white])
    logits = rng.uniform(1.2, 2.6) * np.log(shares + np.float32(0.03))
    logits += rng.uniform(0.1, 0.6) * np.stack([grid.noise(rng, 6) for _ in range(3)])
    # a furrow is a sheet of fluid with cortex on both sides, where smooth noise is zero
    logits[0] += near_surface * (rng.uniform(1, 4) * np.exp(-((furrow / width) ** 2)) - 1)
    logits[1] += near_surface * rng.uniform(0.5, 2.5) * np.exp(-((furrow / (3.5 * width)) ** 2))
    logits[0] += rng.uniform(0, 2.5) * np.exp(-depth.clip(min=0) / rng.uniform(1, 2.5))
    logits[0] += 4 * special.expit(-ventricle / 0.8)
    logits[0] -= 0.9 * ((ventricle > 2) & (ventricle < 25) & (depth > 25))
    return Anatomy(
        tissue=special.softmax(logits, axis=0),
        mask=mask,
        leftover=leftover * mask,
        depth_mm=depth,
        ventricle_mm=ventricle,
        positions=positions,
    )


def place_foci(rng: np.random.Generator, grid: Voxels, positions: Field) -> list[Focus]:
    """Choose centres and sizes of the foci of one tumour, of 1 to 130 ml and smaller satellites."""
    coarse = positions[:, ::2, ::2, ::2]
    grey, white, depth, ventricle = template_at(coarse)
    _, y, z = coarse
    # not in the brain stem or the cerebellum
    above = (z > -30) & ~((z < -8) & (y > 22))
    possible = above & (depth > 6) & (ventricle > 2) & ((white > 0.4) | (grey > 0.6))
    candidates = grid.positions()[:, ::2, ::2, ::2][:, possible].T
    n_foci = 1 if rng.random() < 0.8 else int(rng.integers(2, 4))
    foci: list[Focus] = []
    for number in range(n_foci):
        choices = candidates
        if number and rng.random() < 0.6:
            apart = np.linalg.norm(candidates - foci[0].position, axis=1)
            near = candidates[(apart > 12) & (apart < 60)]
            choices = near if len(near) else candidates
        sizes_ml = (0.3, 12) if number else (1, 12) if rng.random() < 0.3 else (8, 130)
        radius_mm = (_log_uniform(rng, *sizes_ml) * 1000 * 3 / 4 / np.pi) ** (1 / 3)
        foci.append(Focus(position=rng.choice(choices), radius_mm=radius_mm))
    return foci


def displacement(rng: np.random.Generator, grid: Voxels, foci: list[Focus]) -> Field:
    """Return by how many millimetres (3, X, Y, Z) each voxel shows tissue that the foci pushed outwards."""
    shift = np.zeros((3, *grid.shape), dtype=np.float32)
    for focus in foci:
        offset = _offsets_from(focus.position, grid)
        distance = np.sqrt((offset**2).sum(axis=0)) + np.float32(1e-3)
        beyond = ((distance - focus.radius_mm) / (1.3 * focus.radius_mm)).clip(min=0)
        push = rng.uniform(0, 0.5) * focus.radius_mm * np.exp(-(beyond**2))
        shift -= offset / distance * push * (distance / focus.radius_mm).clip(max=1)
    return shift


def make_tumour(
    rng: np.random.Generator,
    grid: Voxels,
    brain: Anatomy,
    foci: list[Focus],
    *,
    with_et: bool,
    variety: float,
) -> Glioma:
    """Return a tumour that has grown from the foci, and that enhances or not.

    More variety makes fainter oedema; at 1, a part of one core in eight was resected.
    """
    family = _FAMILIES[rng.choice(len(_FAMILIES), p=_FAMILY_SHARES)] if with_et else "none"
    largest_mm = foci[0].radius_mm
    # 0 in the middle of a focus, 1 at the border of the core
    radius = np.minimum.reduce([_lobes(rng, grid, focus) for focus in foci])
    radius += rng.uniform(0.08, 0.3) * grid.noise(rng, max(6, 0.9 * largest_mm))
    radius += rng.uniform(0.03, 0.14) * grid.noise(rng, 7)
    fluid, _, _ = brain.tissue
    ventricle = (fluid > 0.6) & (brain.ventricle_mm < 1)
    core = (radius < 1) & brain.mask & ~(ventricle & (radius > 0.6))
    core &= brain.depth_mm > rng.uniform(-1, 3)
    whole, cavity = core, np.zeros_like(core)
    if variety >= 1 and rng.random() < _RESECTED_SHARE:
        core, cavity = _resect(rng, grid, core, radius)
    enhancing = core & _enhancing(rng, grid, family, (1 - radius) * largest_mm)
    if family != "none" and not enhancing.any():
        enhancing = core
    reach_mm = _reach_mm(rng, family)
    arrival_mm = _arrival_mm(rng, grid, brain, whole, reach_mm)
    # outlines are drawn around what is visible, and so take in its blurred border
    outline_mm = reach_mm + variety * _OUTLINE_MM if reach_mm else 0
    oedema = (arrival_mm < outline_mm) & ~core & ~cavity & brain.mask & (fluid < 0.6)
    inwards = (reach_mm - arrival_mm) / max(reach_mm * rng.uniform(0.2, 1), 1)
    strength = (inwards + rng.uniform(0.7 - 0.45 * variety, 0.7)).clip(0, 1)
    # often much fainter than what is inside
    strength *= rng.uniform(1 - 0.75 * variety, 1) if rng.random() < 0.6 else 1
    strength[arrival_mm >= reach_mm] = 0
    strength *= (1 + 0.25 * grid.noise(rng, 12)).clip(0.3, 1.6)
    regions = np.stack([core | oedema, core, enhancing])
    return Glioma(regions=regions, oedema=strength.astype(np.float32), cavity=cavity, family=family)


def _resect(rng: np.random.Generator, grid: Voxels, core: Mask, radius: Field) -> tuple[Mask, Mask]:
    """Return what an operation leaves of a core, at its border, and the cavity inside."""
    cavity = core & (radius + 0.15 * grid.noise(rng, 12) < rng.uniform(0.5, 0.95))
    left = core & ~cavity & (grid.noise(rng, 14) > rng.uniform(-1.5, 1))
    return (left, cavity) if left.any() else (core, np.zeros_like(core))


def _lobes(rng: np.random.Generator, grid: Voxels, focus: Focus) -> Field:
    """Return the distance from the centre as a share of the radius, for one to three ellipsoids."""
    n_lobes = 1 if rng.random() < 0.5 or focus.radius_mm < 7 else int(rng.integers(2, 4))
    fields = []
    for lobe in range(n_lobes):
        aside = rng.standard_normal(3) * 0.55 * focus.radius_mm if lobe else np.zeros(3)
        axes = np.exp(rng.normal(0, 0.22, size=3))
        axes *= focus.radius_mm * (rng.uniform(0.5, 0.85) if lobe else 1) / axes.prod() ** (1 / 3)
        rotation, _ = np.linalg.qr(rng.standard_normal((3, 3)))
        offset = _offsets_from(focus.position + aside, grid)
        scaled = np.tensordot((rotation / axes[:, None]).astype(np.float32), offset, axes=1)
        fields.append(np.sqrt((scaled**2).sum(axis=0)))
    return np.minimum.reduce(fields)


def _enhancing(rng: np.random.Generator, grid: Voxels, family: Family, depth_mm: Field) -> Mask:
    """Return where a core of the family enhances, by the depth below its border."""
    coarse, fine = grid.noise(rng, rng.uniform(8, 14)), grid.noise(rng, 6)
    if family == "ring":
        # a rim of uneven thickness, with islands inside and gaps
        enhancing = depth_mm < _log_uniform(rng, 1.5, 9) * np.exp(0.5 * coarse)
        if rng.random() < 0.7:
            enhancing |= fine > rng.uniform(1, 2.2)
        if rng.random() < 0.5:
            enhancing &= grid.noise(rng, 16) < rng.uniform(0.7, 2)
        return enhancing
    if family == "solid":
        return fine < rng.uniform(0.8, 2.5)
    if family == "patchy":
        return coarse + 0.6 * fine > rng.uniform(0.8, 2)
    return np.zeros(grid.shape, dtype=np.bool_)


def _reach_mm(rng: np.random.Generator, family: Family) -> float:
    """Return how far oedema spreads in pure white matter."""
    if rng.random() < 0.04:
        return 0
    is_narrow = family == "none" and rng.random() < 0.6
    return _log_uniform(rng, *((3, 12) if is_narrow else (5, 28)))


def _arrival_mm(
    rng: np.random.Generator, grid: Voxels, brain: Anatomy, core: Mask, reach_mm: float
) -> Field:
    """Return the way from the core to each voxel, in millimetres of pure white matter; found at half resolution."""
    half = (slice(None, None, 2),) * 3
    speeds = np.array([0.04, rng.uniform(0.2, 0.55), 1], dtype=np.float32)
    cost = np.exp(rng.uniform(0.2, 0.7) * grid.noise(rng, 10)[half]).clip(min=1 / _FASTEST)
    cost /= np.tensordot(speeds, brain.tissue[(slice(None), *half)], axes=1).clip(min=0.03)
    cost = np.where(brain.mask[half], cost, _FAR) * 2 * grid.spacing_mm
    arrival = np.where(ndimage.maximum_filter(core, 2)[half], 0, _FAR).astype(np.float32)
    for _ in range(int(_FASTEST / 2 * reach_mm / grid.spacing_mm) + 2):
        by_face = [ndimage.minimum_filter1d(arrival, 3, axis=axis) + cost for axis in range(3)]
        by_corner = ndimage.minimum_filter(arrival, 3) + 1.5 * cost
        arrival = np.minimum.reduce([arrival, *by_face, by_corner])
    at = np.indices(grid.shape, dtype=np.float32) / 2
    return ndimage.map_coordinates(arrival.clip(max=reach_mm + 20), at, order=1, mode="nearest")


def _offsets_from(position: npt.NDArray[np.floating], grid: Voxels) -> Field:
    return grid.positions() - position.astype(np.float32)[:, None, None, None]


def _log_uniform(rng: np.random.Generator, low: float, high: float) -> float:
    return float(np.exp(rng.uniform(np.log(low), np.log(high))))


def _spline_weights(rng: np.random.Generator, n: int, knots: float) -> Field:
    """Return the weights (n, knots) of a cubic B-spline with knots so many voxels apart, at a random phase."""
    positions = np.arange(n) / knots + rng.random() + 1
    distance = np.abs(positions[:, None] - np.arange(int(positions[-1]) + 3))
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = (2 - distance).clip(min=0) ** 3 / 6
    return np.where(distance < 1, near, far).astype(np.float32)
