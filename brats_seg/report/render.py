"""Surfaces to pixels: a picture of nested regions, seen from any side.

What faces the viewer is sampled densely and the nearest sample of each pixel is kept. A turn of
large tumours takes seconds, and matplotlib's 3-D axes as long for a single view.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.report.mesh import Mesh

Pixels: TypeAlias = npt.NDArray[np.float64]
Points: TypeAlias = npt.NDArray[np.float32]

_ELEVATION = np.radians(20)
"""From where one looks, above the horizon."""
_LIGHT = np.array([-0.4, 0.5, 0.77])
"""To the light, in the axes of the screen: right, up, to the viewer."""
_AMBIENT = 0.35
_SKIN_MM = 1.5
"""What lies this little behind a surface is seen as if it lay on it: the rim that enhances often is
the rim of the core."""
_RIM_POWER = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Layer:
    """One surface and its look."""

    mesh: Mesh
    colour: tuple[float, float, float]
    opacity: float
    rim_only: bool = False
    """Whether it is a haze that shows at its rim alone."""


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """From where one looks, and at what."""

    azimuth: float
    """Radians: at 0 from the patient's front, at a quarter turn from the left side."""
    centre_mm: npt.NDArray[np.float64]
    """(3,) what is in the middle of the picture."""
    reach_mm: float
    """From the middle of the picture to its edge."""
    n_pixels: int
    """Along each edge."""

    @property
    def screen_axes(self) -> npt.NDArray[np.float64]:
        """(3, 3) right, up and to the viewer, in the axes of the scan."""
        # X runs to the patient's left, Y to the back, Z to the head
        to_viewer = np.array([np.sin(self.azimuth), -np.cos(self.azimuth), np.tan(_ELEVATION)])
        to_viewer /= np.linalg.norm(to_viewer)
        right = np.array([np.cos(self.azimuth), np.sin(self.azimuth), 0.0])
        return np.stack([right, np.cross(to_viewer, right), to_viewer])


def render(layers: Sequence[Layer], view: View) -> Pixels:
    """Return the picture (n, n, 3) of layers from the innermost to the outermost, on black.

    Rows run down. An outer layer lies as a veil over inner ones that are clearly behind it.
    """
    picture = np.zeros((view.n_pixels, view.n_pixels, 3))
    nearest = np.full(picture.shape[:2], -np.inf)
    for layer in layers:
        depth, colour, opacity = _drawn(layer, view)
        veiled = np.where(depth > nearest + _SKIN_MM, opacity, 0.0)[..., None]
        picture += veiled * (colour - picture)
        nearest = np.maximum(nearest, depth)
    return picture


def _drawn(layer: Layer, view: View) -> tuple[Pixels, Pixels, Pixels]:
    """Return depth (n, n) in mm, -inf where the layer is not, colour (n, n, 3) and opacity."""
    axes = view.screen_axes
    normals = layer.mesh.normals @ axes.T
    faces_us = normals[:, 2] > 0
    quads, normals = layer.mesh.quads[faces_us], normals[faces_us]
    placed = (layer.mesh.vertices_mm - view.centre_mm) @ axes.T
    corners = placed.astype(np.float32)[quads]
    brightness = _AMBIENT + (1 - _AMBIENT) * (normals @ _LIGHT).clip(0, 1)
    opacity = np.full(len(quads), layer.opacity)
    if layer.rim_only:
        opacity *= (1 - normals[:, 2]) ** _RIM_POWER
    depth, owner = _nearest(corners, view)
    seen = owner >= 0
    colour = np.zeros((*owner.shape, 3))
    colour[seen] = brightness[owner[seen], None] * layer.colour
    opacities = np.zeros(owner.shape)
    opacities[seen] = opacity[owner[seen]]
    return depth, colour, opacities


def _nearest(corners: Points, view: View) -> tuple[Pixels, npt.NDArray[np.int64]]:
    """Return the depth and the number (n, n) of the quadrilateral (m, 4, 3) nearest to the viewer."""
    n, per_mm = view.n_pixels, view.n_pixels / (2 * view.reach_mm)
    owner = np.full(n * n, -1)
    edges = np.abs(np.diff(corners[..., :2], axis=1, append=corners[:, :1, :2]))
    heights = corners[..., 2].mean(axis=1)
    order = np.argsort(heights)
    n_along = int(np.ceil(edges.max(initial=0) * per_mm)) + 1
    points = _samples(corners[order, :, :2], n_along)
    columns = ((points[..., 0] + view.reach_mm) * per_mm).astype(np.int32)
    rows = ((view.reach_mm - points[..., 1]) * per_mm).astype(np.int32)
    shown = (columns >= 0) & (columns < n) & (rows >= 0) & (rows < n)
    # of several numbers for one pixel the last one stays: that of the nearest
    owner[(rows * n + columns)[shown]] = np.broadcast_to(order[:, None], shown.shape)[shown]
    depth = np.full(n * n, -np.inf)
    depth[owner >= 0] = heights[owner[owner >= 0]]
    return depth.reshape(n, n), owner.reshape(n, n)


def _samples(corners: Points, n_along: int) -> Points:
    """Return points (m, n_along squared, 2) spread over quadrilaterals (m, 4, 2)."""
    share = (np.arange(n_along, dtype=np.float32) + 0.5) / n_along
    s, t = (grid.ravel() for grid in np.meshgrid(share, share))
    weights = np.stack([(1 - s) * (1 - t), s * (1 - t), s * t, (1 - s) * t])
    return np.matmul(corners.transpose(0, 2, 1), weights).transpose(0, 2, 1)
