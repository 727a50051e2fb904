"""Embed volumes in a page: cut to the brain, of 8 or 16 bits, compressed, as `viewer.js` reads them.

Whole numbers are embedded as they are, and the page shows the values of the file. Other numbers are
rounded to 65,536 steps, and to fewer where the volumes of a case would take more than `MOST_BYTES`.

Voxels of 16 bits are coded as differences along X, of these along Y, and of these along Z, modulo 2^16,
with the sign in the lowest bit, and all low bytes before all high bytes: four fifths of the size that gzip alone
gives. The order of voxels is that of NIfTI, X first.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.figures.sections import Image, grey_limits
from brats_seg.figures.view import CaseView
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.pages.html import packed
from brats_seg.voxels.box import Box, bounding_box

MOST_BYTES = 12_500_000
"""Largest size of the volumes of a case, which leaves room for the rest in a page of 15 MB."""

_ENTROPY_STEP = 1 / 250
_COARSEST = 256
"""Factor by which steps become coarser at most, however large the volumes are."""
_INT16 = np.iinfo(np.int16)
_COARSE = 2
"""Every second voxel is enough for the grey limits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedVolume:
    """One volume in a page; its voxels are `step * stored`."""

    name: str
    """A modality, `prediction`, `reference` or `uncertainty`."""
    bits: int
    """16 for a scan, which is coded as differences, and 8 for the others."""
    step: float
    """Difference between neighbouring values; 1 for whole numbers."""
    low: float
    """Value that is drawn black, or transparent."""
    high: float
    """Value that is drawn white."""
    data: str
    """Stored voxels, as `packed` returns them."""


@dataclass(frozen=True, kw_only=True, slots=True)
class EmbeddedVolumes:
    """The volumes of a case on one grid."""

    shape: tuple[int, int, int]
    affine: tuple[tuple[float, ...], ...]
    """(4, 4), from the embedded voxels to millimetres."""
    from_mm: tuple[tuple[float, ...], ...]
    """(4, 4), from millimetres to the voxels of the files as they are stored."""
    volumes: tuple[EmbeddedVolume, ...]

    @property
    def largest_step(self) -> float:
        """Largest step between the values of a scan; 0 if all are those of the file."""
        steps = (one.step for one in self.volumes if one.name in MODALITIES)
        return max((step for step in steps if step != 1), default=0.0)


def embedded(view: CaseView) -> EmbeddedVolumes:
    """Embed the scans of a case, its label maps and its uncertainty, cut to the brain."""
    box = _box_of(view)
    affine = view.affine.copy()
    affine[:3, 3] += affine[:3, :3] @ box.start
    layers = tuple(_layers(view, box))
    scans, coarser = _scans(view, box, 1), 1
    while _n_bytes(*scans, *layers) > MOST_BYTES and coarser < _COARSEST:
        coarser *= 4
        scans = _scans(view, box, coarser)
    return EmbeddedVolumes(
        shape=box.shape,
        affine=_rows(affine),
        from_mm=_rows(np.linalg.inv(view.geometry.affine)),
        volumes=(*scans, *layers),
    )


def _scans(view: CaseView, box: Box, coarser: int) -> tuple[EmbeddedVolume, ...]:
    return tuple(
        _scan(name, image[box.slices], coarser)
        for name, image in zip(view.modalities, view.images, strict=True)
    )


def _layers(view: CaseView, box: Box) -> list[EmbeddedVolume]:
    sides = (("prediction", view.prediction), ("reference", view.reference))
    layers = [_labels(name, side.label_map[box.slices]) for name, side in sides if side is not None]
    if view.uncertainty is not None:
        layers.append(_entropy(view.uncertainty[box.slices]))
    return layers


def _box_of(view: CaseView) -> Box:
    """Return the box of the brain and of all labels, with one voxel around it."""
    seen = (view.images != 0).any(axis=0)
    for side in (view.prediction, view.reference):
        if side is not None:
            seen |= side.label_map > 0
    x, y, z = seen.shape
    box = bounding_box(seen)
    if box is None:
        return Box(start=(0, 0, 0), stop=(x, y, z))
    (left, front, low), (right, back, top) = box.start, box.stop
    around = Box(start=(left - 1, front - 1, low - 1), stop=(right + 1, back + 1, top + 1))
    return around.within((x, y, z))


def _scan(name: str, image: npt.NDArray[Any], coarser: int) -> EmbeddedVolume:
    """Embed a scan; its steps are so many times as coarse as they need to be."""
    low, high = grey_limits(image[::_COARSE, ::_COARSE, ::_COARSE])
    step = _step_of(image) * coarser
    stored = np.rint(image / step)
    return EmbeddedVolume(
        name=name,
        bits=16,
        step=step,
        low=low,
        high=high,
        data=packed(_coded(stored.astype(np.int16))),
    )


def _step_of(image: npt.NDArray[Any]) -> float:
    """Return the step with which int16 holds an image, in which 0 stays 0; 1 for whole numbers."""
    least, most = float(image.min()), float(image.max())
    fits = _INT16.min <= least and most <= _INT16.max
    if fits and (image.dtype.kind in "iu" or bool((image == np.rint(image)).all())):
        return 1.0
    return max(most / _INT16.max, least / _INT16.min)


def _coded(stored: npt.NDArray[np.int16]) -> bytes:
    """Return the bytes of int16 voxels (X, Y, Z), coded as the module says."""
    rest = stored.view(np.uint16).copy()
    # unsigned numbers wrap around, here and in the page
    rest[1:] -= rest[:-1].copy()
    rest[:, 1:] -= rest[:, :-1].copy()
    rest[:, :, 1:] -= rest[:, :, :-1].copy()
    signed = rest.view(np.int16)
    zigzag = ((signed << 1) ^ (signed >> 15)).view(np.uint16).ravel(order="F")
    low, high = (zigzag & 0xFF).astype(np.uint8), (zigzag >> 8).astype(np.uint8)
    return low.tobytes() + high.tobytes()


def _labels(name: str, label_map: LabelMap) -> EmbeddedVolume:
    data = packed(label_map.tobytes(order="F"))
    high = float(label_map.max())
    return EmbeddedVolume(name=name, bits=8, step=1.0, low=0.0, high=high, data=data)


def _entropy(bits: Image) -> EmbeddedVolume:
    stored = np.rint(np.clip(bits, 0, 1) / _ENTROPY_STEP).astype(np.uint8)
    return EmbeddedVolume(
        name="uncertainty",
        bits=8,
        step=_ENTROPY_STEP,
        low=0.1,
        high=1.0,
        data=packed(stored.tobytes(order="F")),
    )


def _n_bytes(*volumes: EmbeddedVolume) -> int:
    return sum(len(volume.data) for volume in volumes)


def _rows(matrix: npt.NDArray[np.floating[Any]]) -> tuple[tuple[float, ...], ...]:
    return tuple(tuple(row) for row in matrix.tolist())
