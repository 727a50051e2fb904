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
from brats_seg.cases.layouts import LABEL, is_label_folder, parse_file_name
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_label_map
from brats_seg.cases.path_table import is_path_table
from brats_seg.errors import CaseError, LayoutError, UsageError, some_of
from brats_seg.labels import MODALITIES, LabelMap
from brats_seg.quality.label_map import (
    LabelRoles,
    check_placement,
    roles_of,
    roles_of_outline,
)
from brats_seg.quality.scan import BrainSample, sample_brain
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

    A folder may hold `<case>.nii.gz`, `<case>-seg.nii.gz`, or scans of any layout with their label
    maps, as may a table of paths. The references are held against these scans.

    Raises:
        UsageError: A path does not exist, one is a file and one a folder, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in both.
    """
    for path in (reference, prediction):
        if not path.exists():
            msg = f"{path} does not exist; expected a label map, or a folder of label maps"
            raise UsageError(msg)
    is_pair = reference.is_file() and not is_path_table(reference)
    if is_pair != prediction.is_file():
        msg = (
            f"{reference} and {prediction}: expected two label maps or two folders, not one of each"
        )
        raise UsageError(msg)
    if is_pair:
        pair = Pair(case_id=_case_of(reference), reference=reference, prediction=prediction)
        return Pairing(pairs=(pair,), without_reference=())
    scans = _labelled_scans(reference)
    references, predictions = _label_maps_of(reference, scans), label_maps_in(prediction)
    cases = {case.path_of(case.label): case for case in scans if case.label and case.usable}
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
    return _label_maps_of(root, _labelled_scans(root))


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


def _labelled_scans(root: Path) -> tuple[Case, ...]:
    """Return the cases in a folder or a table of paths that have scans and a label map."""
    try:
        cases = find_cases(root).cases
    except LayoutError:
        return ()
    return tuple(case for case in cases if case.label)


def _label_maps_of(root: Path, scans: Sequence[Case]) -> dict[str, Path]:
    """Return the label maps of the scans, and those of other cases by their names."""
    found: dict[str, Path] = {}
    for case_id, path in _label_maps(root, scans):
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


def _label_maps(root: Path, scans: Sequence[Case]) -> Iterator[tuple[str, Path]]:
    known = {case.case_id for case in scans}
    used = {case.path_of(case.label) for case in scans if case.label}
    yield from ((case.case_id, case.path_of(case.label)) for case in scans if case.label)
    for folder in () if is_path_table(root) else walk_folders(root):
        beside_scans = any(scan.name.kind in MODALITIES for scan in folder.scans)
        own_name = (root / folder.path).name
        # among labelled scans, files of no kind are other images, unless their folder is for labels
        may_be_any = not beside_scans and (
            not scans or any(map(is_label_folder, folder.path.parts))
        )
        for scan in folder.scans:
            is_named, path = scan.name.kind == LABEL, root / scan.path
            case_id = (scan.name.case or own_name) if is_named else scan.name.stem
            is_label = is_named or (may_be_any and not scan.name.kind)
            if is_label and path not in used and case_id not in known:
                yield case_id, path


def _case_of(path: Path) -> str:
    name = parse_file_name(path.name)
    if name is None:
        msg = f"{path} is not a NIfTI file by its name; expected .nii or .nii.gz"
        raise UsageError(msg)
    return (name.case or path.parent.name) if name.kind == LABEL else name.stem
