"""Choose the voxel spacing of prepared cases, and resample cases to it.

A network sees voxels, not millimetres: scans of 2 mm look half as large to it as scans of 1 mm.
Training and prediction therefore resample with the same function, `at_spacing`, to the spacing that
`ModelIdentity` stores. Spacings are along X, Y and Z in the axes of BraTS.
"""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import replace
from statistics import median_low

import numpy as np

from brats_seg.cases.case import LoadedCase
from brats_seg.cases.nifti import Geometry, Volume, planned_resampling, resampled
from brats_seg.labels import LabelConvention, label_map_of, regions_of
from brats_seg.voxels.box import Triple
from brats_seg.voxels.grids import SPACING_TOLERANCE, Resampling, Spacing, turn_of

USUAL_MM = 1.0
"""Edge of the voxels of every BraTS release."""
_DECIMALS = 2
"""Headers state edges with rounding errors, such as 0.99999994."""
_N_LISTED = 3
"""Spacings that a message lists at most."""


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
        return USUAL_MM, USUAL_MM, USUAL_MM
    x, y, z = (_rounded(median_low(edges)) for edges in zip(*spacings, strict=True))
    return x, y, z


def grid_of(geometry: Geometry) -> tuple[Triple, Spacing]:
    """Return shape and spacing of a grid, turned to the axes of BraTS."""
    x, y, z = np.argsort(turn_of(geometry.affine)[:, 0])
    shape, spacing_mm = geometry.shape, geometry.spacing_mm
    return (shape[x], shape[y], shape[z]), (spacing_mm[x], spacing_mm[y], spacing_mm[z])


def at_spacing(loaded: LoadedCase, spacing_mm: Spacing) -> tuple[LoadedCase, Resampling | None]:
    """Return a case at a spacing, and the resampling, which is None where it has that spacing.

    The voxels of the four modalities and of the label map change; `geometry` stays that of the files.

    Raises:
        CaseError: The grid would have too many voxels.
    """
    resampling = planned_resampling(loaded.volumes[0], spacing_mm, case_id=loaded.case.case_id)
    if resampling is None:
        return loaded, None
    volumes = tuple(resampled(volume, resampling) for volume in loaded.volumes)
    label = loaded.label
    if label is not None and loaded.convention is not None:
        label = resampled_labels(label, loaded.convention, resampling)
    return replace(loaded, volumes=volumes, label=label), resampling


def resampled_labels(label: Volume, convention: LabelConvention, resampling: Resampling) -> Volume:
    """Return a label map at another spacing.

    Each region is interpolated and cut at one half, as probabilities are in prediction: regions stay
    nested, and the whole tumour does not shrink where its parts meet, as it does if each tissue
    competes with the background alone. Tissues that the regions do not distinguish are not restored;
    see `label_map_of`. After 2 mm and back, the Dice to the label maps of twelve real cases is 0.967,
    0.956 and 0.859 (WT, TC, ET), with the nearest label 0.959, 0.947 and 0.848.
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
    others = Counter(
        spacing_text(own)
        for own in spacings
        if Resampling.needed((1, 1, 1), own, spacing_mm) is not None
    )
    line = f"cases are prepared at {spacing_text(spacing_mm)} mm"
    if not others:
        return None if spacing_mm == choose_spacing(()) else line
    n = others.total()
    most = others.most_common(_N_LISTED)
    listed = [f"{count} from {text} mm" for text, count in most]
    n_more = n - sum(count for _, count in most)
    words = ", ".join(listed) + (f" and {n_more} from other spacings" if n_more else "")
    return f"{line}; {n} of {len(spacings)} {'is' if n == 1 else 'are'} resampled: {words}"


def spacing_text(spacing_mm: Spacing) -> str:
    """Return a spacing as text for messages.

    Example:
        >>> spacing_text((0.9375, 0.9375, 5.0))
        '0.94x0.94x5'
    """
    return "x".join(f"{round(edge, _DECIMALS):g}" for edge in spacing_mm)


def _rounded(edge_mm: float) -> float:
    if abs(edge_mm / USUAL_MM - 1) <= SPACING_TOLERANCE:
        return USUAL_MM
    return round(edge_mm, _DECIMALS)
