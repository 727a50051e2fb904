"""Compare a new scan with the training set of a model, and say in words what differs.

The sentences are warnings: the scan is predicted all the same. What `cases.modality_check` has already
remarked on, whatever the model, is not said again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from brats_seg.data.spacing import grid_of
from brats_seg.errors import counted
from brats_seg.inference.scan import Scan
from brats_seg.labels import MODALITIES
from brats_seg.quality.modality_check import MIXED_UP, NO_AGENT, NOT_STRIPPED
from brats_seg.quality.profile import (
    Deviation,
    Kind,
    TrainingProfile,
    deviations,
    measure_crop,
)
from brats_seg.voxels.grids import Spacing

_CAUSES: dict[Kind, str] = {
    "size": "another atlas, a wrong voxel size, or a brain that is cut or not stripped",
    "intensities": "another normalisation, or another modality in its place",
    "contrast": "modalities that are swapped, shifted against each other, or normalised otherwise",
    "uptake": "no contrast agent, or t1n and t1c swapped",
    "surface": "a brain that is not stripped, or stripped otherwise",
    "sharpness": "thick slices, smoothing, resampling or noise",
}
"""Usual causes of a deviation of each kind."""
_SAID: dict[Kind, str] = {
    "contrast": MIXED_UP,
    "uptake": NO_AGENT,
    "size": NOT_STRIPPED,
    "surface": NOT_STRIPPED,
}
"""Words of the remark that says the same of any scan."""
_SINGLE_CAUSE: tuple[Kind, ...] = ("uptake", "size")
"""Kinds that are told first: few faults change them, and most faults change the others."""
_MOST_SENTENCES = 3


def checked_scan(scan: Scan, profile: TrainingProfile | None, spacing_mm: Spacing) -> Scan:
    """Return a scan with a warning for each property that its training set makes unlikely.

    Args:
        scan: The scan, prepared for the model.
        profile: Profile of the training set; None to compare nothing. Nor is a scan compared that lacks
            modalities.
        spacing_mm: Voxel size of `scan.image`.
    """
    # a profile is one of all four modalities
    if profile is None or scan.modalities != MODALITIES:
        return scan
    found = tuple(unusual_properties(scan, profile, spacing_mm))
    return replace(scan, warnings=(*scan.warnings, *found)) if found else scan


def unusual_properties(scan: Scan, profile: TrainingProfile, spacing_mm: Spacing) -> Iterator[str]:
    """Yield sentences about the kinds of measures that deviate most from the training set.

    Nothing is said about a foreground that is no brain.
    """
    values = measure_crop(scan.image, spacing_mm)
    if values is None:
        return
    shape, _ = grid_of(scan.geometry)
    if profile.grids and scan.resampling is None and shape not in profile.grids:
        own, usual = ("x".join(map(str, grid)) for grid in (shape, profile.grids[0]))
        more = f" or {counted(len(profile.grids) - 1, 'other')}" if len(profile.grids) > 1 else ""
        yield (
            f"its grid has {own} voxels, those of the training scans {usual}{more}: it may be in "
            "another atlas, or cropped"
        )
    by_kind: dict[Kind, list[Deviation]] = {}
    for one in deviations(profile, values):
        by_kind.setdefault(one.measure.kind, []).append(one)
    said = [kind for kind, words in _SAID.items() if any(words in one for one in scan.warnings)]
    left = [kind for kind in by_kind if kind not in said]
    # the sort is stable, and the others stay in the order of their worst measure
    for kind in sorted(left, key=lambda kind: kind not in _SINGLE_CAUSE)[:_MOST_SENTENCES]:
        yield _sentence(kind, by_kind[kind])


def _sentence(kind: Kind, found: Sequence[Deviation]) -> str:
    more = f" ({counted(len(found) - 1, 'more measure')} of that kind)" if len(found) > 1 else ""
    return f"unlike the training scans: {found[0]}{more}; usual causes: {_CAUSES[kind]}"
