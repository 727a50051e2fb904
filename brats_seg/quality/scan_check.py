"""Compare a new scan with the training set of a model, and say in words what differs.

The sentences are warnings: the scan is predicted all the same. What `quality.scan` has already
remarked on, whatever the model, is not said again.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from brats_seg.cases.nifti import Volume, oriented
from brats_seg.data.normalisation import grid_of
from brats_seg.errors import CaseError, counted
from brats_seg.labels import MODALITIES
from brats_seg.quality.label_map import judge_sample
from brats_seg.quality.profile import (
    Deviation,
    Kind,
    TrainingProfile,
    deviations,
    measure_crop,
    profile_in,
)
from brats_seg.quality.scan import (
    MIXED_UP,
    NO_AGENT,
    NOT_STRIPPED,
    check_all_different,
    check_are_scans,
    sample_brain,
    scan_remarks,
    stripping_remark,
)
from brats_seg.voxels.grids import Spacing
from brats_seg.wings import NO_JUDGEMENT, Judgement, Notes

if TYPE_CHECKING:
    from brats_seg.inference.method import Scan

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


def checked_scan(scan: "Scan", profile: TrainingProfile | None, spacing_mm: Spacing) -> "Scan":
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


def unlike_training(scan: "Scan", notes: Sequence[Notes], spacing_mm: Spacing) -> tuple[str, ...]:
    """Return a warning for each property that the training sets of a model make unlikely.

    Args:
        scan: The scan, prepared for the model.
        notes: Notes of each member of the model; none for models of other programs.
        spacing_mm: Voxel size of `scan.image`.
    """
    profile = profile_in(notes)
    if profile is None or scan.modalities != MODALITIES:
        return ()
    return tuple(unusual_properties(scan, profile, spacing_mm))


def judge_scan(
    case_id: str,
    volumes: Sequence[Volume],
    label: Volume | None,
    modalities: Sequence[str] = MODALITIES,
) -> Judgement:
    """Return whether the modalities are what they are called, and the label map is of the scan.

    Args:
        case_id: Id of the case.
        volumes: Volumes on one grid, finite and not constant, as stored.
        label: The label map, as stored; None without one.
        modalities: Modality of each volume.
    """
    turned = [oriented(volume) for volume in volumes]
    turned_label = label and oriented(label)
    sample = sample_brain(turned, turned_label)
    if sample is None:
        return NO_JUDGEMENT
    try:
        check_are_scans(case_id, turned, sample)
        check_all_different(case_id, turned, sample, modalities)
    except CaseError as error:
        return Judgement(refusal=error)
    remarks = tuple(scan_remarks(volumes[0].geometry, sample))
    # in other modalities than it is told to be, a tumour does not look like itself
    if turned_label is None or any(remark.startswith(MIXED_UP) for remark in remarks):
        return Judgement(warnings=remarks)
    labels = judge_sample(case_id, turned, turned_label, sample)
    return replace(labels, warnings=(*remarks, *labels.warnings))


def has_skull(volumes: Sequence[Volume]) -> bool:
    """Return whether the skull or the scalp does not seem to be stripped from volumes of one grid."""
    sample = sample_brain(volumes, None)
    return sample is not None and bool(stripping_remark(sample))


def unusual_properties(
    scan: "Scan", profile: TrainingProfile, spacing_mm: Spacing
) -> Iterator[str]:
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
