"""Find the label maps of references and predictions that belong together, and read them.

Label maps are paired by the names of files and folders. Each is read once, its labelled voxels are
kept compressed, and what it shows of its numbering is found out: in the scans, where they lie beside
the references, and otherwise in its outline.
"""

import zlib
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

import numpy as np

from brats_seg.cases.case import Case, have_one_grid, label_values_of, load_case
from brats_seg.cases.discovery import find_cases
from brats_seg.cases.folders import walk_folders
from brats_seg.cases.label_check import (
    LabelRoles,
    check_placement,
    roles_of,
    roles_of_outline,
)
from brats_seg.cases.layouts import LABEL, parse_file_name
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_label_map
from brats_seg.cases.sample import BrainSample, sample_brain
from brats_seg.errors import CaseError, LayoutError, UsageError, some_of
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.voxels.box import Box, bounding_box


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The files of the label maps of one case."""

    case_id: str
    reference: Path
    prediction: Path | None
    """None if there is no prediction."""
    case: Case | None = None
    """The scans beside the reference; None if there are none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Every reference with its prediction."""

    pairs: tuple[Pair, ...]
    """Sorted by case id."""
    without_reference: tuple[str, ...]
    """Predicted cases that cannot be scored."""
    left_out: tuple[str, ...] = ()
    """Cases whose references are not read or scored."""

    @property
    def predicted(self) -> frozenset[str]:
        """Cases that have a prediction."""
        return frozenset(pair.case_id for pair in self.pairs if pair.prediction is not None)

    def only(self, case_ids: Collection[str]) -> Self:
        """Return the pairs of these cases, and leave out the others."""
        left_out = [pair.case_id for pair in self.pairs if pair.case_id not in case_ids]
        return replace(
            self,
            pairs=tuple(pair for pair in self.pairs if pair.case_id in case_ids),
            left_out=tuple(left_out),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PackedLabelMap:
    """A compressed label map: the box around its labelled voxels."""

    file: str
    """Name of the file."""
    geometry: Geometry
    values: frozenset[int]
    """Label values that occur, and 0."""
    box: Box | None
    """Box around the labelled voxels; None if there are none."""
    packed: bytes
    """The voxels of the box, compressed by zlib."""
    roles: LabelRoles
    """Label values that are clearly oedema and enhancing tumour."""
    is_on_scan: bool
    """Whether the scans show it, and not the outline alone."""

    def within(self, box: Box) -> LabelMap:
        """Return the voxels in a box that holds all labelled ones."""
        if self.box is None:
            return np.zeros(box.shape, np.uint8)
        voxels = np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(self.box.shape)
        return self.box.seen_from(box.start).placed(voxels, box.shape)

    def mirrored(self, axis: int) -> Self:
        """Return the label map with an axis reversed."""
        if self.box is None:
            return self
        start, stop = list(self.box.start), list(self.box.stop)
        n = self.geometry.shape[axis]
        start[axis], stop[axis] = n - stop[axis], n - start[axis]
        x, y, z = start
        right, front, top = stop
        return replace(
            self,
            box=Box(start=(x, y, z), stop=(right, front, top)),
            packed=zlib.compress(np.flip(self.within(self.box), axis).tobytes(), level=1),
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelPair:
    """The label maps of one case."""

    case_id: str
    reference: PackedLabelMap
    prediction: PackedLabelMap | None
    """None if there is no prediction."""
    remarks: tuple[str, ...] = ()
    """Sentences about a reference of unclear place."""


def find_pairs(reference: Path, prediction: Path) -> Pairing:
    """Pair two label maps, or the label maps in two folders.

    A folder may hold `<case>.nii.gz`, `<case>-seg.nii.gz`, or case folders at any depth. The
    references are held against the scans beside them, if there are any.

    Raises:
        UsageError: A path does not exist, one is a file and one a folder, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in both.
    """
    for path in (reference, prediction):
        if not path.exists():
            msg = f"{path} does not exist; expected a label map, or a folder of label maps"
            raise UsageError(msg)
    if reference.is_file() != prediction.is_file():
        msg = (
            f"{reference} and {prediction}: expected two label maps or two folders, not one of each"
        )
        raise UsageError(msg)
    if reference.is_file():
        pair = Pair(case_id=_case_of(reference), reference=reference, prediction=prediction)
        return Pairing(pairs=(pair,), without_reference=())
    references, predictions = label_maps_in(reference), label_maps_in(prediction)
    cases = _labelled_scans(reference)
    if not references.keys() & predictions.keys():
        msg = (
            f"no case is in both folders: {reference} has {some_of(references)}, {prediction} has "
            f"{some_of(predictions)}. Name each prediction as its case, for example "
            f"{next(iter(references))}.nii.gz."
        )
        raise LayoutError(msg)
    return Pairing(
        pairs=tuple(
            Pair(
                case_id=case_id,
                reference=path,
                prediction=predictions.get(case_id),
                case=cases.get(path),
            )
            for case_id, path in references.items()
        ),
        without_reference=tuple(sorted(predictions.keys() - references.keys())),
    )


def label_maps_in(root: Path) -> dict[str, Path]:
    """Return the label maps below a folder by case id, sorted.

    Raises:
        UsageError: A case occurs twice.
        LayoutError: There are none.
    """
    found: dict[str, Path] = {}
    for case_id, path in _label_maps(root):
        if case_id in found:
            msg = (
                f"case {case_id} has two label maps, {found[case_id]} and {path}. "
                "Keep one of them, or name the folder that holds the right ones."
            )
            raise UsageError(msg)
        found[case_id] = path
    if not found:
        msg = f"{root} holds no label map; expected <case>.nii.gz, or case folders with one each"
        raise LayoutError(msg)
    return dict(sorted(found.items()))


def read_pair(pair: Pair) -> LabelPair:
    """Read the label maps of one case, and hold them against its scans.

    Raises:
        CaseError: One of them cannot be read.
        LabelError: The reference does not lie on a tumour of the scans.
    """
    reference = read_label_map(pair.reference, case_id=pair.case_id)
    scans = _scans_of(pair.case)
    sample = _sampled(reference, scans)
    remarks: tuple[str, ...] = ()
    if sample is not None:
        remarks = check_placement(pair.case_id, scans, oriented(reference), sample)
    prediction = None
    if pair.prediction is not None:
        prediction = _packed(read_label_map(pair.prediction, case_id=pair.case_id))
    return LabelPair(
        case_id=pair.case_id,
        reference=_packed(reference, sample),
        prediction=prediction,
        remarks=remarks,
    )


def _labelled_scans(root: Path) -> dict[Path, Case]:
    """Return the cases below a folder that have scans, by the path of their label map."""
    try:
        cases = find_cases(root).cases
    except LayoutError:
        return {}
    return {case.path_of(case.label): case for case in cases if case.label and case.usable}


def _scans_of(case: Case | None) -> tuple[Volume, ...]:
    """Return the scans of a case in the axes of BraTS; none if they cannot be used.

    Only label maps are scored, so that a damaged scan does not matter.
    """
    if case is None:
        return ()
    try:
        return load_case(case, with_label=False).volumes
    except CaseError:
        return ()


def _packed(label: Volume, sample: BrainSample | None = None) -> PackedLabelMap:
    box = bounding_box(label.array > 0)
    labelled = label.array[:0] if box is None else label.array[box.slices]
    spacing_mm = label.geometry.spacing_mm
    return PackedLabelMap(
        file=label.file,
        geometry=label.geometry,
        # counting outside the box would take ten times as long
        values=label_values_of(labelled) | {0},
        box=box,
        packed=zlib.compress(labelled.tobytes(), level=1),
        roles=roles_of(sample) if sample else roles_of_outline(labelled, spacing_mm),
        is_on_scan=sample is not None,
    )


def _sampled(label: Volume, scans: Sequence[Volume]) -> BrainSample | None:
    turned = oriented(label)
    is_on_grid = bool(scans) and have_one_grid(scans[0].geometry, turned.geometry)
    return sample_brain(scans, turned) if is_on_grid else None


def _label_maps(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in walk_folders(root):
        named = [scan for scan in folder.scans if scan.name.kind == LABEL]
        others = [scan for scan in folder.scans if not scan.name.kind]
        beside_scans = any(scan.name.kind in MODALITIES for scan in folder.scans)
        own_name = (root / folder.path).name
        for scan in named:
            yield scan.name.case or own_name, root / scan.path
        if beside_scans and named:
            continue
        for scan in others:
            # the one file that is no scan is the label map, such as that of BraTS20_Training_355
            foreign = beside_scans and len(others) == 1
            yield own_name if foreign else scan.name.stem, root / scan.path


def _case_of(path: Path) -> str:
    name = parse_file_name(path.name)
    if name is None:
        msg = f"{path} is not a NIfTI file by its name; expected .nii or .nii.gz"
        raise UsageError(msg)
    return (name.case or path.parent.name) if name.kind == LABEL else name.stem
