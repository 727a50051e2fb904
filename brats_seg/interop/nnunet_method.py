"""Prepare a scan for a network of nnU-Net, and read its output, as nnU-Net does.

nnU-Net crops to the voxels that are not 0, normalises each modality, resamples to the voxel size of
its plans, and resamples the logits back before it takes labels from them. Its arrays are
`(C, z, y, x)` in the axes of the file, permuted as the plans say.
"""

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import floor
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_fill_holes, zoom
from scipy.special import expit
from torch import Tensor

from brats_seg.cases.case import LoadedCase
from brats_seg.errors import CaseError
from brats_seg.inference.method import Field as Image
from brats_seg.inference.method import NetworkInput, Scan
from brats_seg.runtime.windows import WindowRule, gaussian, window_starts
from brats_seg.voxels.box import Mask, Triple, bounding_box
from brats_seg.voxels.grids import Spacing, turn_of, turned, turned_back

Axes: TypeAlias = tuple[int, int, int]
Normalisation: TypeAlias = Callable[[Image, Mask], Image]
"""Normalises a modality (x, y, z), given the mask of the voxels that are not 0."""

_ANISOTROPY = 3
"""Ratio of voxel edges above which nnU-Net resamples each slice by itself."""
_IMAGE_ORDER, _LOGITS_ORDER = 3, 1
"""Orders of the splines for images and for logits."""
_SMALLEST_STD = 1e-8

RULE = WindowRule(starts=window_starts, weights=lambda length: gaussian(length, length // 2))
"""Windows are spaced evenly; the Gaussian has its peak at a voxel."""


def z_score_inside(image: Image, mask: Mask) -> Image:
    """Normalise the voxels of the mask to mean 0 and standard deviation 1; the others stay."""
    values = image[mask]
    image[mask] = (values - values.mean()) / max(values.std(), _SMALLEST_STD)
    return image


def z_score(image: Image, mask: Mask) -> Image:
    """Normalise the crop to mean 0 and standard deviation 1."""
    return (image - image.mean()) / max(image.std(), _SMALLEST_STD)


def unchanged(image: Image, mask: Mask) -> Image:
    """Return the crop as it is."""
    return image


def between_0_and_1(image: Image, mask: Mask) -> Image:
    """Scale the crop to values from 0 to 1."""
    image = image - image.min()
    return image / max(image.max(), _SMALLEST_STD)


@dataclass(frozen=True, kw_only=True, slots=True)
class NnunetGrid:
    """Grid of voxels that a network of nnU-Net was trained on."""

    channels: tuple[int, ...]
    """Place in `MODALITIES` of each input channel."""
    normalisations: tuple[Normalisation, ...]
    """Normalisation of each input channel."""
    axes: Axes
    """Axis of z, y, x that becomes each axis of the input (`transpose_forward`)."""
    spacing_mm: Spacing
    """Voxel size along the axes of the input."""
    is_turned: bool
    """Whether scans are turned to right, anterior, superior first; else they stay as stored."""
    regions: Callable[[Image], Image]
    """Turns the output of the network into logits (3, ...) of WT, TC and ET."""

    def prepare(self, loaded: LoadedCase) -> Scan:
        """Crop a case to the voxels that are not 0, and normalise its modalities.

        Raises:
            CaseError: All voxels are 0.
        """
        volumes = [volume.array for volume in loaded.volumes]
        outside = np.logical_and.reduce([volume == 0 for volume in volumes])
        mask: Mask = binary_fill_holes(~outside)
        box = bounding_box(mask)
        if box is None:
            found, next_step = "no voxel that is not 0", "View the scan, and export it again."
            raise CaseError(loaded.case.case_id, loaded.volumes[0].file, found, "a scan", next_step)
        image = np.empty((len(volumes), *box.shape), dtype=np.float32)
        for channel, normalise in zip(self.channels, self.normalisations, strict=True):
            crop = volumes[channel][box.slices].astype(np.float32)
            image[channel] = normalise(crop, mask[box.slices])
        return Scan(
            case_id=loaded.case.case_id,
            release=loaded.case.release,
            image=image,
            box=box,
            geometry=loaded.geometry,
            warnings=loaded.case.remarks,
        )

    def to_network(self, scan: Scan) -> NetworkInput:
        """Return a scan on the grid of the network."""
        crop = self._permuted(scan.image[list(self.channels)], scan)
        image = _resized(crop, self._shape(crop, scan), self._spacings(scan), _IMAGE_ORDER)
        return NetworkInput(image=image, back=partial(self._back, crop.shape[1:], scan))

    def _back(self, shape: tuple[int, ...], scan: Scan, output: Tensor) -> Image:
        """Return probabilities (3, x, y, z) on the crop of a scan, of the output of the network."""
        there, here = self._spacings(scan)
        logits = self.regions(_resized(output.cpu().numpy(), shape, (here, there), _LOGITS_ORDER))
        stored = expit(logits).transpose(0, *(1 + int(axis) for axis in np.argsort(self.axes)))
        stored = stored.transpose(0, 3, 2, 1)
        if self.is_turned:
            return np.ascontiguousarray(stored[:, ::-1, ::-1])
        turn = turn_of(scan.geometry.affine)
        return np.stack([turned(one, turn) for one in stored])

    def _permuted(self, image: Image, scan: Scan) -> Image:
        if self.is_turned:
            stored = image[:, ::-1, ::-1]
        else:
            turn = turn_of(scan.geometry.affine)
            stored = np.stack([turned_back(one, turn) for one in image])
        permuted = stored.transpose(0, 3, 2, 1).transpose(0, *(1 + axis for axis in self.axes))
        return np.ascontiguousarray(permuted)

    def _spacings(self, scan: Scan) -> tuple[Spacing, Spacing]:
        """Return the voxel size of a scan and of the network, along the axes of the network."""
        stored = scan.spacing_mm if self.is_turned else scan.geometry.spacing_mm
        x, y, z = (stored[::-1][axis] for axis in self.axes)
        return (x, y, z), self.spacing_mm

    def _shape(self, image: Image, scan: Scan) -> Triple:
        edges = zip(image.shape[1:], *self._spacings(scan), strict=True)
        x, y, z = (max(1, round(here / there * n)) for n, here, there in edges)
        return x, y, z


def region_logits(heads: tuple[frozenset[int], ...]) -> Callable[[Image], Image]:
    """Return a function that turns logits of labels (L, ...) into logits (3, ...) of the regions.

    The logit of a region is the largest one of its labels, less the largest one of the others: it is
    above 0 exactly where the most probable label belongs to the region.

    Args:
        heads: Places among the labels of those of WT, TC and ET.
    """

    def regions(logits: Image) -> Image:
        everywhere = frozenset(range(len(logits)))
        return np.stack(
            [
                logits[sorted(inside)].max(axis=0) - logits[sorted(everywhere - inside)].max(axis=0)
                for inside in heads
            ]
        )

    return regions


def _resized(
    image: Image, shape: tuple[int, ...], spacings: tuple[Spacing, Spacing], order: int
) -> Image:
    """Resample an image (C, ...) to a shape, slice by slice where the voxels are long and thin."""
    if image.shape[1:] == shape:
        return image
    axis = _long_axis(spacings)
    if axis is None:
        return np.stack([_zoomed(one, shape, order) for one in image])
    flat = tuple(n for place, n in enumerate(shape) if place != axis)
    # the nearest slice, as nnU-Net takes along the long axis
    scale = image.shape[1 + axis] / shape[axis]
    nearest = [
        min(max(floor(scale * (place + 0.5)), 0), image.shape[1 + axis] - 1)
        for place in range(shape[axis])
    ]
    slices = np.moveaxis(image, 1 + axis, 1)
    resized = np.stack([[_zoomed(one, flat, order) for one in channel] for channel in slices])
    return np.ascontiguousarray(np.moveaxis(resized[:, nearest], 1, 1 + axis))


def _long_axis(spacings: tuple[Spacing, Spacing]) -> int | None:
    """Return the axis along which voxels are much longer than along both others, if there is one."""
    for spacing in spacings:
        if max(spacing) / min(spacing) > _ANISOTROPY:
            longest = [axis for axis, edge in enumerate(spacing) if edge == max(spacing)]
            return longest[0] if len(longest) == 1 else None
    return None


def _zoomed(image: npt.NDArray[np.float32], shape: tuple[int, ...], order: int) -> Image:
    factors = [there / here for there, here in zip(shape, image.shape, strict=True)]
    values = image.astype(np.float64)
    found = zoom(values, factors, order=order, mode="nearest", grid_mode=True)
    # splines overshoot
    return found.clip(values.min(), values.max()).astype(np.float32)
