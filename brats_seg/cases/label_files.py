"""Find the label map of each case: beside its scans, or in a folder of label maps.

A file is a label map by its name (`layouts` lists the words), or because it matches the pattern that
a user gives. Beside the scans it belongs to the case whose name it begins with, or to the only case
of the folder. Folders that are called `labels`, `masks`, `images_segm` or alike, and the derivatives
of a BIDS data set, hold label maps of cases elsewhere: a file belongs to the case whose id is its
name or the name of a folder around it, or else to the only case of the folder above.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatch
from pathlib import Path
from typing import Self

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.folders import Folder, NiftiFile
from brats_seg.cases.layouts import (
    DERIVATIVES,
    LABEL,
    UNKNOWN,
    FileName,
    is_label_folder,
    parse_case_id,
)
from brats_seg.errors import CaseError

EXPECTED_LABELS = (
    "CASE_seg, -seg, _segm, _segmentation, _dseg, _label, _gt or _mask beside the scans, and CASE "
    "or such a name in a folder called labels, masks, segmentations or alike"
)
"""Names that label maps are looked for by, as words for a message."""

_SPACE = re.compile(r"(?:^|_)space-([^_]+)")
_TUMOUR = re.compile(r"tumou?r|lesion|gliom", re.IGNORECASE)
_AUTOMATED = re.compile(r"(?<![a-z])auto(?![a-z]|$)|automat", re.IGNORECASE)
_BOUNDARY = re.compile(r"[^a-zA-Z0-9]")
_BY_A_PROGRAM = "the label map was made by a program, as its name says"


@dataclass(frozen=True, kw_only=True, slots=True)
class FoundCase:
    """The scans of a case, whose label map is still to be found."""

    case: Case
    folder: Path
    """Folder of the scans, relative to the data folder."""
    prefix: str = ""
    """Text before the modality in all file names; empty if they have none in common."""
    space: str = ""
    """Coordinate space that BIDS names state for all of the scans; empty if they state none."""

    @property
    def names(self) -> frozenset[str]:
        """The names that a label map of the case may begin with."""
        return frozenset({self.case.case_id, self.prefix})


@dataclass(frozen=True, kw_only=True, slots=True)
class _Candidate:
    """A file that may be the label map of a case."""

    scan: NiftiFile
    is_apart: bool = False
    """Whether it is in another folder than the scans."""

    def rank(self, found: FoundCase) -> tuple[bool, ...]:
        """Return the order in which candidates are taken: the smallest comes first."""
        name = self.scan.name
        return (
            self.is_apart,
            space_of(self.scan) != found.space,
            # a mask may be of the brain
            name.stem.lower().endswith("mask"),
            self.is_automated,
            _TUMOUR.search(name.stem) is None,
        )

    @property
    def is_automated(self) -> bool:
        """Whether the name says that a program has made the label map."""
        return _AUTOMATED.search(self.scan.path.as_posix()) is not None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Owners:
    """The cases by everything that a label map may name them by."""

    of_folder: Mapping[Path, Sequence[FoundCase]]
    below: Mapping[Path, Sequence[FoundCase]]
    of_id: Mapping[str, Sequence[FoundCase]]
    of_patient: Mapping[str, Sequence[FoundCase]]

    @classmethod
    def of(cls, cases: Iterable[FoundCase]) -> Self:
        """Sort the cases."""
        of_folder, below, of_id, of_patient = (defaultdict(list) for _ in range(4))
        for found in cases:
            of_folder[found.folder].append(found)
            of_id[found.case.case_id].append(found)
            of_patient[found.case.patient_id].append(found)
            for folder in (found.folder, *found.folder.parents):
                below[folder].append(found)
        return cls(of_folder=of_folder, below=below, of_id=of_id, of_patient=of_patient)

    def named(self, names: Iterable[str]) -> Sequence[FoundCase]:
        """Return the cases of the first name that is an id, or that a patient with one case has."""
        for name in filter(None, names):
            if name in self.of_id:
                return self.of_id[name]
            if len(self.of_patient.get(name, ())) == 1:
                return self.of_patient[name]
        return ()

    def only_below(self, folder: Path) -> Sequence[FoundCase]:
        """Return the case below a folder, if it is the only one."""
        below = self.below.get(folder, ())
        return below if len(below) == 1 else ()


def marked(folders: Iterable[Folder], pattern: str) -> Iterator[Folder]:
    """Yield the folders with the files that match a pattern as the only label maps.

    Args:
        folders: Folders with the kinds that the names of their files show.
        pattern: Pattern of names such as `*_tumour.nii.gz`, or of paths such as `masks/*`.
    """
    for folder in folders:
        yield replace(folder, scans=tuple(_marked(scan, pattern) for scan in folder.scans))


def with_label_maps(
    cases: Sequence[FoundCase],
    folders: Mapping[Path, Folder],
    *,
    label_folders: Collection[Path] = (),
    anywhere: bool = False,
) -> Iterator[Case]:
    """Yield the cases with their label maps; several that fit equally well become a problem.

    Args:
        cases: The cases of the data folder.
        folders: Its folders by path; none if no label maps are looked for.
        label_folders: Folders that are searched for label maps of other folders' cases although
            their names do not say so.
        anywhere: Whether all folders are; otherwise those named after label maps, and derivatives.
    """
    owners = _Owners.of(cases)
    candidates: defaultdict[int, list[_Candidate]] = defaultdict(list)
    for folder in folders.values():
        beside = owners.of_folder.get(folder.path, ())
        is_apart = not beside and (anywhere or _is_for_labels(folder.path, label_folders))
        for scan in folder.scans:
            found = _beside(scan, beside) if beside else ()
            if is_apart:
                found = _apart(scan, folder, owners, given=anywhere)
            for owner in found:
                candidates[id(owner)].append(_Candidate(scan=scan, is_apart=is_apart))
    for one in cases:
        alone = len(owners.of_folder[one.folder]) == 1
        yield _labelled(one, candidates[id(one)], folders.get(one.folder) if alone else None)


def _marked(scan: NiftiFile, pattern: str) -> NiftiFile:
    name, path = scan.name, scan.path
    text = path.as_posix() if "/" in pattern else path.name
    is_label = name.kind == LABEL
    if fnmatch(text.lower(), pattern.lower()):
        return scan if is_label else replace(scan, name=FileName(stem=name.stem, kind=LABEL))
    return replace(scan, name=FileName(stem=name.stem)) if is_label else scan


def _beside(scan: NiftiFile, cases: Sequence[FoundCase]) -> Sequence[FoundCase]:
    """Return the case of a folder that a file beside the scans is the label map of."""
    if scan.name.kind != LABEL:
        return ()
    begun = scan.name.case or scan.name.stem
    named = [found for found in cases if begun in found.names]
    if not named and len(cases) > 1 and not scan.name.case:
        cuts = _cuts(scan.name.stem)
        named = [found for cut in cuts for found in cases if cut in found.names][:1]
    return named or (cases if len(cases) == 1 else ())


def _apart(scan: NiftiFile, folder: Folder, owners: _Owners, *, given: bool) -> Sequence[FoundCase]:
    """Return the cases that a file in a folder of label maps belongs to."""
    name, is_label = scan.name, scan.name.kind == LABEL
    if given and not is_label:
        return ()
    in_derivatives = DERIVATIVES in folder.path.parts
    if not is_label and (name.kind or in_derivatives):
        return ()
    stems = _cuts(name.stem) if given else (name.stem,)
    if named := owners.named((name.case, *stems)):
        return named
    if in_derivatives or not (is_label or len(folder.scans) == 1):
        return ()
    return owners.named(reversed(folder.path.parts)) or owners.only_below(folder.path.parent)


def _is_for_labels(folder: Path, named: Collection[Path]) -> bool:
    return folder in named or DERIVATIVES in folder.parts or any(map(is_label_folder, folder.parts))


def _cuts(stem: str) -> Iterator[str]:
    """Yield a name and what remains of it without its last word, its last two, and so on."""
    yield stem
    for boundary in reversed(list(_BOUNDARY.finditer(stem))):
        yield stem[: boundary.start()]


def _labelled(found: FoundCase, candidates: Sequence[_Candidate], folder: Folder | None) -> Case:
    """Return a case with its label map; `folder` is its folder if it has no other case."""
    foreign = [one for one in candidates if _is_foreign(one, found)]
    own = [one for one in candidates if one not in foreign]
    if not own:
        return _with_misnamed(found.case, [one.scan for one in foreign], folder)
    best = min(one.rank(found) for one in own)
    first = [one for one in own if one.rank(found) == best]
    first.sort(key=lambda one: (one.scan.path.with_name(one.scan.name.stem), is_packed(one.scan)))
    chosen = first[0].scan
    same: list[NiftiFile] = []
    others: list[NiftiFile] = []
    for one in first[1:]:
        is_same = one.scan.path.parent == chosen.path.parent
        (same if is_same and one.scan.name.stem == chosen.name.stem else others).append(one.scan)
    remarks = [ignored(one, chosen) for one in same]
    if first[0].is_automated:
        remarks.append(_BY_A_PROGRAM)
    case = found.case
    return replace(
        case,
        label=ScanFile(path=chosen.path),
        problems=(*case.problems, *_ambiguous(case, [chosen, *others])),
        remarks=(*case.remarks, *remarks),
    )


def space_of(scan: NiftiFile) -> str:
    """Return the coordinate space that a BIDS name states, such as `MNI152`; empty if it does not."""
    match = _SPACE.search(scan.name.variant)
    return match[1] if match else ""


def is_packed(scan: NiftiFile) -> bool:
    """Return whether a file is compressed."""
    return scan.path.suffix.lower() == ".gz"


def ignored(one: NiftiFile, chosen: NiftiFile) -> str:
    """Return a remark on a file of the same name as the one that is taken."""
    return f"{one.path.name} was ignored in favour of {chosen.path.name}"


def _is_foreign(one: _Candidate, found: FoundCase) -> bool:
    """Return whether a file beside the scans of a release is named after something else."""
    named = one.scan.name.case
    is_other = bool(named) and named not in found.names
    return is_other and not one.is_apart and found.case.release != UNKNOWN


def _ambiguous(case: Case, scans: Sequence[NiftiFile]) -> Iterator[str]:
    if len(scans) > 1:
        apart = len({scan.path.parent for scan in scans}) > 1
        files = " and ".join(str(scan.path) if apart else scan.path.name for scan in scans)
        next_step = "Remove or rename the others, or name the right ones with --label-files."
        found = f"{len(scans)} files for label map"
        yield str(CaseError(case.case_id, files, found, "one", next_step))


def _with_misnamed(case: Case, foreign: Sequence[NiftiFile], folder: Folder | None) -> Case:
    """Add the only file whose name is no modality's, if the case should have a label map.

    The label map of case 355 of BraTS 2020 is `W39_1998.09.19_Segm.nii`. A file that is named after
    the case but not after a segmentation, such as a brain mask, is something else.
    """
    unnamed = [scan for scan in folder.scans if not scan.name.kind] if folder else []
    others = [*unnamed, *foreign]
    is_release = parse_case_id(case.case_id).release != UNKNOWN
    if not is_release or "validation" in case.case_id.lower() or len(others) != 1:
        return case
    stem = others[0].name.stem.lower()
    if stem.startswith(case.case_id.lower()) and ("seg" not in stem or "brain" in stem):
        return case
    name = others[0].path.name
    remark = f"{name} was taken as the label map, although its name does not say so"
    return replace(case, label=ScanFile(path=others[0].path), remarks=(*case.remarks, remark))
