"""Make healthy brains: the tissues of a template of the population, deformed at random.

The template is the ICBM 2009a nonlinear symmetric average of 152 adults (Fonov et al. 2009 and 2011), reduced
to shares of grey and white matter at 2 mm; `template.LICENSE` has its notice. Positions are in millimetres
from its centre, towards left, back and head.
"""

from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Self

import numpy as np
import scipy as sp  # imports its modules when they are used
from scipy import ndimage

from brats_seg.voxels.box import Mask, Triple
from brats_seg.voxels.grids import Field

EXTENT_MM = (160, 190, 155)
"""Edges of the box that holds every brain."""
_TEMPLATE_MM = 2.0
_CENTRE_MM = np.array([98, 115, 77], dtype=np.float32)
"""Centre of the brain in the template, in millimetres from its first voxel."""
_DEEP_MM = 22
"""Fluid deeper than this below the surface of the template is that of the ventricles."""


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
    sizes = np.bincount(components.ravel())
    ventricles = fluid & (sizes[components] > 40)
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
    angles = rng.uniform((0.03, -0.08, -0.08), (0.23, 0.08, 0.08))
    turn = sp.spatial.transform.Rotation.from_euler("XYZ", angles * (1, -1, 1)).as_matrix()
    scale = rng.uniform(0.98, 1.18, size=3) * (rng.choice([-1, 1]), 1, 1)
    positions = np.einsum("ij,jxyz->ixyz", (turn * scale).astype(np.float32), grid.positions())
    for knots_mm, most_mm in ((20, 2.2), (45, 4)):
        amount = np.float32(most_mm * rng.uniform(0.3, 1))
        positions += amount * np.stack([grid.noise(rng, knots_mm) for _ in range(3)])
    return positions


def make_brain(rng: np.random.Generator, grid: Voxels, positions: Field) -> Anatomy:
    """Return the brain whose voxels stand at these positions in the template, of any age."""
    grey, white, depth, ventricle = template_at(positions)
    depth += rng.uniform(0, 1.2) * grid.noise(rng, 14)
    inside = depth > rng.uniform(-0.5, 1.5)
    around = sigmoid(4 * (grid.noise(rng, rng.uniform(14, 30)) - rng.uniform(0.8, 2.5)))
    leftover = around * (depth > -rng.uniform(2, 9)) * ~inside
    mask = ndimage.binary_fill_holes(inside | (leftover > 0.5))
    # ventricles and sulci widen with age
    ventricle -= rng.uniform(-1.5, 1) if rng.random() < 0.6 else rng.uniform(0, 4.5)
    near_surface = sigmoid((rng.uniform(9, 20) - depth) / 3) * (ventricle > 8)
    furrow, width = grid.noise(rng, rng.uniform(15, 22)), rng.uniform(0.05, 0.16)
    shares = np.stack([(1 - grey - white).clip(0, 1), grey, white])
    logits = rng.uniform(1.2, 2.6) * np.log(shares + np.float32(0.03))
    logits += rng.uniform(0.1, 0.6) * np.stack([grid.noise(rng, 6) for _ in range(3)])
    # a furrow is a sheet of fluid with cortex on both sides, where smooth noise is zero
    logits[0] += near_surface * (rng.uniform(1, 4) * np.exp(-((furrow / width) ** 2)) - 1)
    logits[1] += near_surface * rng.uniform(0.5, 2.5) * np.exp(-((furrow / (3.5 * width)) ** 2))
    logits[0] += rng.uniform(0, 2.5) * np.exp(-depth.clip(min=0) / rng.uniform(1, 2.5))
    logits[0] += 4 * sigmoid(-ventricle / 0.8)
    logits[0] -= 0.9 * ((ventricle > 2) & (ventricle < 25) & (depth > 25))
    tissue = np.exp(logits - logits.max(axis=0))
    return Anatomy(
        tissue=tissue / tissue.sum(axis=0),
        mask=mask,
        leftover=leftover * mask,
        depth_mm=depth,
        ventricle_mm=ventricle,
        positions=positions,
    )


def _spline_weights(rng: np.random.Generator, n: int, knots: float) -> Field:
    """Return the weights (n, knots) of a cubic B-spline with knots so many voxels apart, at a random phase."""
    places = np.arange(n) / knots + rng.random() + 1
    distance = np.abs(places[:, None] - np.arange(int(places[-1]) + 3))
    near = 2 / 3 - distance**2 + distance**3 / 2
    far = (2 - distance).clip(min=0) ** 3 / 6
    return np.where(distance < 1, near, far).astype(np.float32)


def sigmoid(values: Field) -> Field:
    """Return 1 / (1 + exp(-values)) without overflow."""
    return ((1 + np.tanh(values / 2)) / 2).astype(np.float32, copy=False)
