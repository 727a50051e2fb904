"""Read a case and its label maps for figures, turned to the axes of BraTS."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import LoadedCase, check_one_grid, label_values_of, load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.layouts import check_values, modality_named, resolve
from brats_seg.cases.nifti import Geometry, oriented, read_label_map, read_volume
from brats_seg.errors import CaseError, UsageError, some_of
from brats_seg.evaluation.pairs import label_maps_in
from brats_seg.figures.sections import Grid, Image
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.voxels.box import background_of
from brats_seg.voxels.grids import Affine

_MOST_BITS = 1.001
"""Largest entropy of a yes or no, and the rounding error of half precision."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Labelled:
    """A label map and its convention."""

    label_map: LabelMap
    """(X, Y, Z)"""
    convention: LabelConvention

    @property
    def regions(self) -> RegionMasks:
        """Region masks (3, X, Y, Z)."""
        return regions_of(self.label_map, self.convention)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseView:
    """The scans of a case, and its label maps if it has any."""

    case_id: str
    release: str
    images: npt.NDArray[Any]
    """(n, X, Y, Z), an image for each of the modalities, as scanned, 0 outside the brain."""
    geometry: Geometry
    """Grid of the files as they are stored."""
    affine: Affine
    """(4, 4), from the voxels of the images to millimetres."""
    modalities: tuple[str, ...] = MODALITIES
    """Modalities of the images: all four, but for models that predict without some."""
    reference: Labelled | None = None
    prediction: Labelled | None = None
    uncertainty: Image | None = None
    """Entropy (X, Y, Z) of the prediction in bits."""

    @property
    def sides(self) -> dict[str, Labelled]:
        """The label maps that the case has, by name: the prediction first."""
        sides = {"prediction": self.prediction, "reference": self.reference}
        return {name: side for name, side in sides.items() if side is not None}

    @property
    def grid(self) -> Grid:
        """Size and directions of the voxels of the images."""
        return Grid.of(self.affine)

    def image(self, modality: str) -> Image:
        """Return one modality (X, Y, Z), by a name that files may have too, such as `flair`.

        Raises:
            UsageError: There is no modality of that name, or the case lacks it.
        """
        name = modality_named(modality)
        if name not in self.modalities:
            has = ", ".join(self.modalities)
            msg = f"{self.case_id} has no {name or modality}; there are {has}"
            raise UsageError(msg)
        return self.images[self.modalities.index(name)]

    def shown(self, preferred: Sequence[str]) -> dict[str, Image]:
        """Return those of the preferred modalities that the case has, or its first one, by name."""
        return {name: self.image(name) for name in shown_of(self.modalities, preferred)}


def shown_of(modalities: Sequence[str], preferred: Sequence[str]) -> list[str]:
    """Return those of the preferred modalities that are there, or the first one that is."""
    return [name for name in preferred if name in modalities] or [modalities[0]]


def open_view(root: Path, case_id: str | None = None, *, labels: str | None = None) -> CaseView:
    """Read a case below a folder of scans of any layout; without an id, the first by name.

    Args:
        root: A data folder, or the folder of one case.
        case_id: One of its cases.
        labels: Name of the label convention, where values and release do not give the right one.

    Raises:
        LayoutError: The folder holds no cases.
        UsageError: The folder does not hold that case.
        CaseError: The case lacks a modality, or a file of it cannot be used.
    """
    cases = {case.case_id: case for case in find_cases(root).cases}
    chosen = cases.get(case_id or next(iter(cases)))
    if chosen is None:
        msg = f"{root} holds no case {case_id}; it has {some_of(cases)}"
        raise UsageError(msg)
    return view_of(load_case(chosen, labels=labels or ""))


def view_of(loaded: LoadedCase) -> CaseView:
    """Return a case that has been loaded, with its reference if it has a label map."""
    reference = None
    if loaded.label is not None and loaded.convention is not None:
        label_map = np.ascontiguousarray(loaded.label.array)
        reference = Labelled(label_map=label_map, convention=loaded.convention)
    return CaseView(
        case_id=loaded.case.case_id,
        release=loaded.case.release,
        images=np.stack([_on_zero(volume.array) for volume in loaded.volumes]),
        geometry=loaded.geometry,
        affine=loaded.volumes[0].geometry.affine,
        modalities=loaded.case.modalities,
        reference=reference,
    )


def with_prediction(view: CaseView, path: Path, *, labels: str | None = None) -> CaseView:
    """Add the prediction of a case: a label map, or a folder that holds one named after the case.

    Raises:
        UsageError: The label map does not exist.
        CaseError: The label map cannot be read, or has another grid than the scans.
    """
    return replace(view, prediction=_read_labelled(view, path, labels or ""))


def with_reference(view: CaseView, path: Path) -> CaseView:
    """Add the reference of a case; the arguments and errors are those of `with_prediction`."""
    return replace(view, reference=_read_labelled(view, path, ""))


def with_uncertainty(view: CaseView, path: Path) -> CaseView:
    """Add the uncertainty of a prediction: a map of entropy, or a folder of `predict --uncertainty`.

    Raises:
        UsageError: The map does not exist.
        CaseError: The map cannot be read, has another grid than the scans, or holds no entropies.
    """
    if path.is_dir():
        path = path / "uncertainty" / f"{view.case_id}.nii.gz"
    if not path.exists():
        msg = f"{path} does not exist; predict the case with --uncertainty to have this map"
        raise UsageError(msg)
    volume = read_volume(path, case_id=view.case_id)
    check_one_grid(view.case_id, [("the scans", view.geometry), (volume.file, volume.geometry)])
    low, high = volume.array.min(), volume.array.max()
    # NaN fails the comparison, as intended
    if not (low >= 0 and high <= _MOST_BITS):
        found, expected = f"values from {low:g} to {high:g}", "entropies from 0 to 1 bit"
        next_step = "Give the map that predict --uncertainty wrote."
        raise CaseError(view.case_id, volume.file, found, expected, next_step)
    return replace(view, uncertainty=oriented(volume).array)


def drawn_of(view: CaseView) -> dict[str, RegionMasks]:
    """Return the region masks of the label maps of a case by name, `reference` and `prediction`.

    Raises:
        CaseError: The case has neither.
    """
    if not view.sides:
        found, next_step = "neither reference nor prediction", "Give it, or choose another case."
        raise CaseError(view.case_id, "label map", found, "one of them, to draw", next_step)
    # the prediction stands on the right
    return {name: side.regions for name, side in reversed(view.sides.items())}


def _on_zero(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a volume whose background is 0, whatever constant its file has there."""
    background = background_of(array)
    return np.where(array == background, 0, array) if background else array


def _read_labelled(view: CaseView, path: Path, labels: str) -> Labelled:
    if path.is_dir():
        paths = label_maps_in(path)
        if view.case_id not in paths:
            msg = f"{path} holds no label map of case {view.case_id}; it has {some_of(paths)}"
            raise UsageError(msg)
        path = paths[view.case_id]
    elif not path.exists():
        msg = f"{path} does not exist; expected a label map, or a folder of <case>.nii.gz"
        raise UsageError(msg)
    label = read_label_map(path, case_id=view.case_id)
    check_one_grid(view.case_id, [("the scans", view.geometry), (label.file, label.geometry)])
    values, shape = label_values_of(label.array), label.geometry.shape
    convention, _ = resolve(view.release, values, shape=shape, declared=labels)
    check_values(values, convention, view.case_id, label.file)
    # regions of an array in another order of voxels take ten times as long
    label_map = np.ascontiguousarray(oriented(label).array)
    return Labelled(label_map=label_map, convention=convention)
