"""Describe how a network is applied to a scan: what goes in, in which windows, and the way back.

A scan `(X, Y, Z)` is reoriented to the axes of BraTS, resampled if its voxels do not have the size of
those in training, and cut to the brain crop `(x, y, z)`. A model of another program brings a method
of its own; everything else is that of every prediction.
"""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import partial
from math import prod
from typing import Any, Literal, TypeAlias

import numpy as np
import numpy.typing as npt
from torch import Tensor

from brats_seg.cases.case import Case, LoadedCase
from brats_seg.cases.nifti import Geometry
from brats_seg.data.normalisation import at_spacing, extract_brain, grid_of, spacing_text
from brats_seg.labels import MODALITIES
from brats_seg.runtime.windows import EVENLY_SPACED, WindowRule
from brats_seg.voxels.box import Box
from brats_seg.voxels.grids import Resampling, Spacing, find_orientation, reorient_back

Field: TypeAlias = npt.NDArray[np.float32]

COARSER = 1.2
"""Edge of a voxel, as a multiple of that in training, from which a worse result is to be expected."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Scan:
    """A case prepared for a network."""

    case: Case
    """The case, with a remark if its voxels are larger than those in training."""
    image: Field
    """(4, x, y, z): the crop, normalised as in training, 0 for modalities that are missing."""
    box: Box
    """Position of the crop in the reoriented and resampled scan."""
    geometry: Geometry
    """Grid of the files."""
    resampling: Resampling | None = None
    """None where the voxels have the size of those in training."""

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel of the files."""
        return prod(self.geometry.spacing_mm)

    @property
    def spacing_mm(self) -> Spacing:
        """Voxel size of `on_scan_spacing`."""
        return grid_of(self.geometry)[1]

    @property
    def scan_box(self) -> Box:
        """Position of `on_scan_spacing` in the reoriented scan."""
        return self.box if self.resampling is None else self.resampling.box_before(self.box)

    def on_scan_spacing(self, field: Field) -> Field:
        """Return values (n, x, y, z) of the crop at the spacing of the files."""
        if self.resampling is None:
            return field
        return np.stack([self.resampling.back(values, self.box) for values in field])

    def on_scan_grid(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        """Return an array (x, y, z) of `on_scan_spacing` on the grid of the files, 0 around it."""
        whole = self.scan_box.placed(array, grid_of(self.geometry)[0])
        return np.ascontiguousarray(reorient_back(whole, find_orientation(self.geometry.affine)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NetworkInput:
    """A scan as a network takes it, and the way back."""

    image: Field
    """(C, ...): the channels, axes and voxel size of the network."""
    to_volume: Callable[[Tensor], Field]
    """Turns logits on that grid, which it may overwrite, into probabilities (3, x, y, z) on the crop."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Method:
    """The way in which networks are applied to a scan."""

    prepare: Callable[[LoadedCase], Scan]
    """Crops and normalises the modalities of a case."""
    to_network: Callable[[Scan], NetworkInput]
    rule: WindowRule = EVENLY_SPACED
    mirror_axes: tuple[int, ...] = (0, 1, 2)
    """Axes of the input that are mirrored for the mean over mirror images."""
    mean_of: Literal["probabilities", "logits"] = "probabilities"
    """What is averaged over mirror images: the probabilities of the scan, or the logits of each window."""


def standard_method(spacing_mm: Spacing) -> Method:
    """Return the method of networks that were trained with this package, at a voxel size."""
    return Method(
        prepare=partial(prepare_scan, spacing_mm=spacing_mm),
        to_network=lambda scan: input_of_crop(scan.image),
    )


def prepare_scan(loaded: LoadedCase, spacing_mm: Spacing) -> Scan:
    """Resample, crop and normalise a case that has been loaded; its label map is not used."""
    case = loaded.case
    at_size, resampling = at_spacing(replace(loaded, label=None), spacing_mm)
    before = grid_of(loaded.geometry)[1]
    # smaller voxels lose what those of the training cases lack too, so that the scores show it
    if any(mm > COARSER * trained_mm for mm, trained_mm in zip(before, spacing_mm, strict=True)):
        edges, trained_edges = map(spacing_text, (before, spacing_mm))
        remark = (
            f"voxels of {edges} mm were resampled to {trained_edges} mm for the network and the "
            "result back: expect a worse result than on scans of that voxel size"
        )
        case = replace(case, remarks=(*case.remarks, remark))
    brain = extract_brain(case.case_id, at_size.volumes, None)
    image = np.zeros((len(MODALITIES), *brain.box.shape), dtype=np.float32)
    image[[MODALITIES.index(modality) for modality in case.modalities]] = brain.image
    geometry, box = loaded.geometry, brain.box
    return Scan(case=case, image=image, box=box, geometry=geometry, resampling=resampling)


def input_of_crop(image: Field) -> NetworkInput:
    """Return a brain crop (4, x, y, z) as the input of a network of this package."""

    def to_volume(logits: Tensor) -> Field:
        # in place, which saves a whole float32 volume
        probabilities: Field = logits.sigmoid_().cpu().numpy()
        # no tumour outside the brain, whatever a network returns there
        probabilities *= (image != 0).any(axis=0)
        return probabilities

    return NetworkInput(image=image, to_volume=to_volume)
