"""Which prediction belongs to which reference, by the names of files and folders."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.folders import walk_folders
from brats_seg.cases.layouts import LABEL, parse_file_name
from brats_seg.errors import LayoutError, UsageError
from brats_seg.labels import MODALITIES


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The label maps of one case."""

    case_id: str
    reference: Path
    prediction: Path | None
    """None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Every reference with its prediction."""

    pairs: tuple[Pair, ...]
    """Sorted by case id."""
    without_reference: tuple[str, ...]
    """Predicted cases that cannot be scored."""


def find_pairs(reference: Path, prediction: Path) -> Pairing:
    """Pair two label maps, or the label maps in two folders.

    A folder may hold `<case>.nii.gz`, `<case>-seg.nii.gz`, or case folders at any depth; the scans
    in it are passed over.

    Raises:
        UsageError: A path is not there, one is a file and one a folder, or a case occurs twice.
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
    if not references.keys() & predictions.keys():
        msg = (
            f"no case is in both folders: {reference} has {_some(references)}, {prediction} has "
            f"{_some(predictions)}. Name each prediction as its case, for example "
            f"{next(iter(references))}.nii.gz."
        )
        raise LayoutError(msg)
    return Pairing(
        pairs=tuple(
            Pair(case_id=case_id, reference=path, prediction=predictions.get(case_id))
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
                "Keep one of them, or name the folder that holds the ones you mean."
            )
            raise UsageError(msg)
        found[case_id] = path
    if not found:
        msg = f"{root} holds no label map; expected <case>.nii.gz, or case folders with one each"
        raise LayoutError(msg)
    return dict(sorted(found.items()))


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


def _some(cases: dict[str, Path]) -> str:
    shown = list(cases)[:3]
    more = f" and {len(cases) - len(shown)} more" if len(cases) > len(shown) else ""
    return ", ".join(shown) + more
