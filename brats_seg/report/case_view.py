"""A case as the pictures show it: read from its files, turned to the axes of BraTS."""

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import Case, check_one_grid, check_volumes
from brats_seg.cases.conventions import check_values, resolve
from brats_seg.cases.discovery import find_cases
from brats_seg.cases.nifti import Geometry, oriented, read_label_map, read_volume
from brats_seg.errors import CaseError, CaseProblemsError, UsageError
from brats_seg.evaluation.evaluate import label_maps_in
from brats_seg.labels import (
    MODALITIES,
    LabelConvention,
    LabelMap,
    RegionMasks,
    regions_of,
)
from brats_seg.report.sections import Image, Spacing

_N_NAMED = 5


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Labelled:
    """A label map and what its values mean."""

    label_map: LabelMap
    """(X, Y, Z)"""
    convention: LabelConvention

    @property
    def regions(self) -> RegionMasks:
        """Its region masks (3, X, Y, Z)."""
        return regions_of(self.label_map, self.convention)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseView:
    """The scans of a case, and its label maps if it has any."""

    case_id: str
    release: str
    images: npt.NDArray[Any]
    """(4, X, Y, Z) in the order of `MODALITIES`, as scanned, 0 outside the brain."""
    geometry: Geometry
    """Of the files."""
    spacing_mm: Spacing
    """Of the images."""
    reference: Labelled | None = None
    prediction: Labelled | None = None

    def image(self, modality: str) -> Image:
        """Return one modality (X, Y, Z).

        Raises:
            UsageError: There is no modality of that name.
        """
        if modality not in MODALITIES:
            msg = f"modality {modality!r} is unknown; there are {', '.join(MODALITIES)}"
            raise UsageError(msg)
        return self.images[MODALITIES.index(modality)]


def open_view(root: Path, case_id: str | None = None, *, labels: str | None = None) -> CaseView:
    """Read a case below a folder of scans of any layout; without an id, the first by name.

    Args:
        root: A data folder, or the folder of one case.
        case_id: One of its cases.
        labels: Name of the label convention, where values and release do not tell the right one.

    Raises:
        LayoutError: The folder holds no cases.
        UsageError: It does not hold that case.
        CaseError: A file of the case cannot be read.
        CaseProblemsError: The case lacks a modality.
    """
    case = _chosen(find_cases(root).cases, root, case_id)
    if case.problems:
        raise CaseProblemsError([f"{case.case_id}: {problem}" for problem in case.problems])
    volumes = [
        read_volume(root / scan.path, case_id=case.case_id, volume=scan.volume)
        for scan in case.images
    ]
    label = None
    if case.label is not None:
        label = read_label_map(root / case.label.path, case_id=case.case_id)
    check_volumes(case.case_id, volumes, label)
    turned = [oriented(volume) for volume in volumes]
    view = CaseView(
        case_id=case.case_id,
        release=case.release,
        images=np.stack([volume.array for volume in turned]),
        geometry=volumes[0].geometry,
        spacing_mm=turned[0].geometry.spacing_mm,
    )
    if label is None:
        return view
    found = _labelled(view, oriented(label).array, label.file, labels)
    return replace(view, reference=found)


def with_prediction(view: CaseView, path: Path, *, labels: str | None = None) -> CaseView:
    """Add what was predicted for a case: a label map, or a folder that holds one of its name.

    Raises:
        UsageError: There is none.
        CaseError: It cannot be read, or lies on another grid.
    """
    if path.is_dir():
        found = label_maps_in(path)
        if view.case_id not in found:
            msg = f"{path} holds no label map of case {view.case_id}; it has {_some(list(found))}"
            raise UsageError(msg)
        path = found[view.case_id]
    elif not path.exists():
        msg = f"{path} does not exist; expected a label map, or a folder of <case>.nii.gz"
        raise UsageError(msg)
    label = read_label_map(path, case_id=view.case_id)
    check_one_grid(view.case_id, [("the scans", view.geometry), (label.file, label.geometry)])
    return replace(view, prediction=_labelled(view, oriented(label).array, label.file, labels))


def drawn_of(view: CaseView) -> tuple[tuple[str, RegionMasks], ...]:
    """Return what each label map of a case is, `reference` or `prediction`, and its regions.

    Raises:
        CaseError: It has none.
    """
    sides = (("reference", view.reference), ("prediction", view.prediction))
    drawn = tuple((words, side.regions) for words, side in sides if side is not None)
    if not drawn:
        raise CaseError(
            view.case_id,
            file="label map",
            found="neither reference nor prediction",
            expected="one of them, to draw",
            next_step="Give the prediction, or choose another case.",
        )
    return drawn


def _chosen(cases: tuple[Case, ...], root: Path, case_id: str | None) -> Case:
    if case_id is None:
        return cases[0]
    for case in cases:
        if case.case_id == case_id:
            return case
    msg = f"{root} holds no case {case_id}; it has {_some([case.case_id for case in cases])}"
    raise UsageError(msg)


def _labelled(view: CaseView, label_map: LabelMap, file: str, labels: str | None) -> Labelled:
    values = {int(value) for value in np.flatnonzero(np.bincount(label_map.ravel()))}
    convention = resolve(
        release=view.release, shape=view.geometry.shape, values=values, declared=labels or ""
    ).convention
    check_values(values, convention, f"{view.case_id} ({file})")
    return Labelled(label_map=label_map, convention=convention)


def _some(names: list[str]) -> str:
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return ", ".join(names[:_N_NAMED]) + more
