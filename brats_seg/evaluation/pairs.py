"""Find the label maps of references and predictions that belong together.

Label maps are paired by the names of files and folders.
"""

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from brats_seg.cases.case import Case
from brats_seg.cases.described import is_path_table
from brats_seg.cases.find import find_cases
from brats_seg.cases.folders import OUTPUT_MARKER, walk_folders
from brats_seg.cases.layouts import LABEL, is_label_folder, parse_file_name
from brats_seg.errors import LayoutError, UsageError, counted, some_of
from brats_seg.labels import MODALITIES


@dataclass(frozen=True, slots=True)
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
    without_reference: tuple[str, ...] = ()
    """Predicted cases that cannot be scored."""
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Cases whose references are not read or scored."""

    @property
    def predicted(self) -> frozenset[str]:
        """Cases that have a prediction."""
        return frozenset(pair.case_id for pair in self.pairs if pair.prediction is not None)

    def only(self, case_ids: Collection[str]) -> Self:
        """Return the pairs of these cases, and leave out the others."""
        pairs = [pair for pair in self.pairs if pair.case_id in case_ids]
        left_out = [pair.case_id for pair in self.pairs if pair.case_id not in case_ids]
        return replace(self, pairs=tuple(pairs), left_out=tuple(left_out))


def find_pairs(reference: Path, prediction: Path, *, only_predicted: bool = False) -> Pairing:
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
        msg = f"expected two label maps, or two folders; found {reference} and {prediction}"
        raise UsageError(msg)
    if is_pair:
        pair = Pair(case_id=_case_of(reference), reference=reference, prediction=prediction)
        return Pairing(pairs=(pair,))
    scans = _labelled_scans(reference)
    references, predictions = _label_maps_of(reference, scans), label_maps_in(prediction)
    if not references.keys() & predictions.keys():
        names = f"{reference} has {some_of(references)}, {prediction} has {some_of(predictions)}"
        msg = f"no case is in both folders: {names}. Name each prediction as its case."
        raise LayoutError(msg)
    cases = {case.path_of(case.label): case for case in scans if case.label and case.usable}
    pairs = [
        Pair(case_id, path, predictions.get(case_id), cases.get(path))
        for case_id, path in references.items()
    ]
    remark = (
        f"{reference} was written by `predict`, and is scored as the reference, which comes first"
    )
    is_swapped = (reference / OUTPUT_MARKER).exists() and not (prediction / OUTPUT_MARKER).exists()
    pairing = Pairing(
        pairs=tuple(pairs),
        without_reference=tuple(sorted(predictions.keys() - references.keys())),
        remarks=(remark,) if is_swapped else (),
    )
    return pairing.only(pairing.predicted) if only_predicted else pairing


def label_maps_in(path: Path, case_ids: Sequence[str] = ()) -> dict[str, Path]:
    """Return the label maps below a folder by case id, sorted; or one file, for the only case.

    Raises:
        UsageError: A case occurs twice, or a file is given for no case or for several.
        LayoutError: There are none.
    """
    if path.is_dir():
        return _label_maps_of(path, _labelled_scans(path))
    if not path.exists():
        msg = f"{path} does not exist; expected a label map, or a folder of label maps"
        raise UsageError(msg)
    if len(case_ids) != 1:
        msg = (
            f"{path} is one label map, for {counted(len(case_ids), 'case')}; choose one with --case"
        )
        raise UsageError(msg)
    return {case_ids[0]: path}


def _labelled_scans(root: Path) -> tuple[Case, ...]:
    """Return the cases in a folder or a table of paths that have scans and a label map."""
    try:
        cases = find_cases(root).cases
    except LayoutError:
        return ()
    return tuple(case for case in cases if case.label)


def _label_maps_of(root: Path, scans: Sequence[Case]) -> dict[str, Path]:
    """Return the label maps of the scans, and those of other cases by their names."""
    label_maps = {case.case_id: case.path_of(case.label) for case in scans if case.label}
    of_scans, used = {*label_maps}, {*label_maps.values()}
    for case_id, path in _named_label_maps(root, is_any_kind=not scans):
        if path in used or case_id in of_scans:
            continue
        if case_id in label_maps:
            msg = f"case {case_id} has two label maps, {label_maps[case_id]} and {path}; keep one"
            raise UsageError(msg)
        label_maps[case_id] = path
    if not label_maps:
        msg = f"{root} holds no label map; expected <case>.nii.gz, or case folders with one each"
        raise LayoutError(msg)
    return dict(sorted(label_maps.items()))


def _named_label_maps(root: Path, *, is_any_kind: bool) -> Iterator[tuple[str, Path]]:
    """Yield the files that are label maps by their names, or by their folders, with their cases.

    Among labelled scans, files of no kind are other images, unless their folder is for labels.
    """
    for folder in () if is_path_table(root) else walk_folders(root):
        has_scans = any(scan.kind in MODALITIES for scan in folder.scans)
        is_for_labels = is_any_kind or any(map(is_label_folder, folder.path.parts))
        for scan in folder.scans:
            path = root / scan.path
            if scan.kind == LABEL:
                yield scan.case or (root / folder.path).name, path
            elif is_for_labels and not has_scans and not scan.kind:
                yield scan.stem, path


def _case_of(path: Path) -> str:
    name = parse_file_name(path.name)
    if name is None:
        msg = f"{path} is not a NIfTI file by its name; expected .nii or .nii.gz"
        raise UsageError(msg)
    return (name.case or path.parent.name) if name.kind == LABEL else name.stem
