"""Resample a scan to one voxel spacing, crop it to the brain, and normalise its intensities.

Training and prediction do it with the same functions, so that a network sees the same image of a
scan in both. A network sees voxels, not millimetres: scans of 2 mm look half as large to it as scans
of 1 mm, and are resampled to the spacing that `ModelIdentity` stores. Spacings are along X, Y and Z
in the axes of BraTS; `voxels.box` says which voxels belong to the brain.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from statistics import median_low

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import LoadedCase
from brats_seg.cases.nifti import Geometry, Volume, plan_resampling, resampled
from brats_seg.errors import CaseError, some_of
from brats_seg.labels import LabelConvention, LabelMap, label_map_of, regions_of
from brats_seg.voxels.box import Box, Triple, bounding_box, brain_mask, normalised, triple
from brats_seg.voxels.grids import SPACING_TOLERANCE, Resampling, Spacing, find_orientation

USUAL_MM = (1.0, 1.0, 1.0)
"""Voxel spacing of every BraTS release."""
_DECIMALS = 2
"""Headers state edges with rounding errors, such as 0.99999994."""
_CHECK_SCAN = "View the scan, and export it again or leave the case out."


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Brain:
    """A case cropped to the brain and normalised."""

    box: Box
    """Position of the crop in the scan."""
    image: npt.NDArray[np.float16]
    """Image (4, x, y, z), mean 0 and standard deviation 1 inside the brain, exactly 0 around it."""
    labels: LabelMap | None
    """Label map (x, y, z); None without one."""


def extract_brain(case_id: str, volumes: Sequence[Volume], label: Volume | None) -> Brain:
    """Crop checked volumes of one grid to the brain and normalise them.

    The box contains all labels, including those outside the brain.

    Raises:
        CaseError: There is no brain, or a modality has no contrast inside it.
    """
    mask = brain_mask([volume.array for volume in volumes])
    box = bounding_box(mask)
    if box is None:
        problem = "no voxel that differs from the background"
        raise CaseError(case_id, volumes[0].file, problem, "a brain", _CHECK_SCAN)
    labelled = None if label is None else bounding_box(label.array > 0)
    box = box if labelled is None else box.joined(labelled)
    # x varies fastest in files; with reversed axes the arrays are read in the order of the memory
    inside = np.ascontiguousarray(mask[box.slices].T)
    # n values of standard deviation 1 are at most sqrt(n): any brain fits into float16 (65504)
    image = np.empty((len(volumes), *box.shape), dtype=np.float16)
    scaled = np.zeros(inside.shape, dtype=np.float32)
    for volume, modality in zip(volumes, image, strict=True):
        values, mean, std = normalised(volume.array[box.slices].T[inside])
        if std == 0:
            problem = f"the value {mean:g} in the whole brain"
            raise CaseError(case_id, volume.file, problem, "a scan with contrast", _CHECK_SCAN)
        scaled[inside] = values
        modality[...] = scaled.T
    return Brain(
        box=box,
        image=image,
        labels=None if label is None else np.ascontiguousarray(label.array[box.slices]),
    )


def choose_spacing(spacings: Collection[Spacing]) -> Spacing:
    """Return the spacing to prepare cases of these spacings at: the median along each axis.

    Of two middle values it is the smaller one, which loses no detail. An edge that counts as 1 mm
    becomes exactly that, so that cases of BraTS are prepared at 1 mm. Without cases it is 1 mm.

    Example:
        >>> choose_spacing([(1, 1, 1), (0.99, 1.02, 1), (2, 2, 2)])
        (1.0, 1.0, 1.0)
        >>> choose_spacing([(0.9375, 0.9375, 5.0), (0.9375, 0.9375, 6.0), (1.0, 1.0, 5.0)])
        (0.94, 0.94, 5.0)
    """
    if not spacings:
        return USUAL_MM
    return triple(_round_edge(median_low(edges)) for edges in zip(*spacings, strict=True))


def grid_of(geometry: Geometry) -> tuple[Triple, Spacing]:
    """Return shape and spacing of a grid, turned to the axes of BraTS."""
    x, y, z = np.argsort(find_orientation(geometry.affine)[:, 0])
    shape, spacing_mm = geometry.shape, geometry.spacing_mm
    return (shape[x], shape[y], shape[z]), (spacing_mm[x], spacing_mm[y], spacing_mm[z])


def at_spacing(loaded: LoadedCase, spacing_mm: Spacing) -> tuple[LoadedCase, Resampling | None]:
    """Return a case at a spacing, and the resampling, which is None where it has that spacing.

    The voxels of the four modalities and of the label map change; `geometry` stays that of the files.

    Raises:
        CaseError: The grid would have too many voxels.
    """
    resampling = plan_resampling(loaded.volumes[0], spacing_mm, case_id=loaded.case.case_id)
    if resampling is None:
        return loaded, None
    volumes = tuple(resampled(volume, resampling) for volume in loaded.volumes)
    label = loaded.label
    if label is not None and loaded.convention is not None:
        label = resample_labels(label, loaded.convention, resampling)
    return replace(loaded, volumes=volumes, label=label), resampling


def resample_labels(label: Volume, convention: LabelConvention, resampling: Resampling) -> Volume:
    """Return a label map at another spacing.

    Each region is interpolated and cut at one half, as probabilities are in prediction: regions stay
    nested, and the whole tumour does not shrink where its parts meet, as it does if each tissue
    competes with the background alone. Tissues that the regions do not distinguish are not restored;
    see `label_map_of`.
    """
    regions = regions_of(label.array, convention)
    fields = [resampled(replace(label, array=mask), resampling) for mask in regions]
    kept = np.stack([field.array > 0.5 for field in fields])
    return replace(fields[0], array=label_map_of(kept, convention))


def spacing_line(spacings: Sequence[Spacing], spacing_mm: Spacing) -> str | None:
    """Return a line that says which cases are resampled, or None if none is and voxels have 1 mm.

    Args:
        spacings: Spacing of each case.
        spacing_mm: Spacing that they are prepared at.

    Example:
        >>> spacing_line([(1, 1, 1), (2, 2, 2)], (1, 1, 1))
        'cases are prepared at 1x1x1 mm; 1 of 2 is resampled: 1 from 2x2x2 mm'
    """
    resampled_from = Counter(
        spacing_text(before)
        for before in spacings
        if Resampling.needed((1, 1, 1), before, spacing_mm) is not None
    )
    line = f"cases are prepared at {spacing_text(spacing_mm)} mm"
    if not resampled_from:
        return None if spacing_mm == USUAL_MM else line
    n = resampled_from.total()
    listed = some_of([f"{count} from {text} mm" for text, count in resampled_from.most_common()])
    return f"{line}; {n} of {len(spacings)} {'is' if n == 1 else 'are'} resampled: {listed}"


def spacing_text(spacing_mm: Spacing) -> str:
    """Return a spacing as text for messages.

    Example:
        >>> spacing_text((0.9375, 0.9375, 5.0))
        '0.94x0.94x5'
    """
    return "x".join(f"{round(edge, _DECIMALS):g}" for edge in spacing_mm)


def _round_edge(edge_mm: float) -> float:
    return 1.0 if abs(edge_mm - 1) <= SPACING_TOLERANCE else round(edge_mm, _DECIMALS)
