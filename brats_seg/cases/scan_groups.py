"""Group the scans of each folder into cases, and name the cases.

Files belong together if the same text precedes the modality in their names, and this text is the id of
the case. If it is the id of no release, a folder with one file of each modality is one case with the
name of the folder, because file names from scanners, such as `AX_T1_POST_12_t1c` and `AX_T2_3_t2`,
have nothing in common. If several such folders have one name, as in `A/raw` and `B/raw`, their cases
are named after the folders above.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg.cases.folders import Folder, NiftiFile
from brats_seg.cases.layouts import BIDS, DERIVATIVES, UNKNOWN, parse_case_id
from brats_seg.labels import MODALITIES

_TIMEPOINT = re.compile(
    r"(ses|session|tp|time|timepoint|visit|week|day|month|year|scan|baseline|fu|follow[-_ ]?up|pre"
    r"|post)([-_ ]?op)?[-_ ]?\d*|\d{8}|\d{4}-\d\d-\d\d",
    re.IGNORECASE,
)
"""Name of a folder that holds one time point of the patient of the folder above."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanGroup:
    """The scans of one case in one folder."""

    case_id: str
    folder: Folder
    scans: tuple[NiftiFile, ...]
    """Files of the modalities, perhaps several of one."""
    is_named_by_folder: bool = False
    """Whether the id is the name of the folder, because the file names show none."""
    patient_id: str = ""
    """Patient by the folders above; empty if the id shows it."""
    timepoint: str = ""
    """Time point by the name of the folder."""

    @property
    def release(self) -> str:
        """Release by the id."""
        return parse_case_id(self.case_id).release

    @property
    def above(self) -> Path:
        """The folder above that of the scans, relative to the data folder."""
        return self.folder.path.parent


def group_scans(folder: Folder, name: str) -> Iterator[ScanGroup]:
    """Yield the scans of a folder by case; `name` is the name of the folder."""
    groups: defaultdict[str, list[NiftiFile]] = defaultdict(list)
    for scan in folder.scans:
        if scan.name.kind in MODALITIES:
            groups[scan.name.case or name].append(scan)
    scans = tuple(scan for group in groups.values() for scan in group)
    is_one = len(groups) == 1 or len({scan.name.kind for scan in scans}) == len(scans)
    if name in groups and parse_case_id(name).release != UNKNOWN:
        # the folder of one case: files with other names are derived from it
        yield ScanGroup(case_id=name, folder=folder, scans=tuple(groups[name]))
    elif groups and is_one and all(parse_case_id(key).release == UNKNOWN for key in groups):
        yield ScanGroup(case_id=name, folder=folder, scans=scans, is_named_by_folder=True)
    else:
        for case_id, group in groups.items():
            yield ScanGroup(case_id=case_id, folder=folder, scans=tuple(group))


def most_complete(groups: Sequence[ScanGroup]) -> tuple[list[ScanGroup], list[ScanGroup]]:
    """Separate the scans of BIDS cases from those of the same cases with fewer modalities.

    Derivatives with as many modalities as the raw scans are preferred to them: they are on one grid
    and without the skull, as a network needs them.

    Returns:
        The groups to read, and the others.
    """
    most: dict[str, tuple[int, bool]] = {}
    for group in groups:
        most[group.case_id] = max(_worth(group), most.get(group.case_id, (0, False)))
    kept: list[ScanGroup] = []
    less: list[ScanGroup] = []
    for group in groups:
        is_less = group.release == BIDS and _worth(group) < most[group.case_id]
        (less if is_less else kept).append(group)
    return kept, less


def named_apart(groups: Sequence[ScanGroup], root_name: str) -> list[ScanGroup]:
    """Return the groups, those of folders of one name named after the folders above.

    `A/raw` and `B/raw` become the cases `A` and `B`. A folder above that holds other cases too
    precedes the name: `A/week1` and `A/week2` become `A_week1` and `A_week2`, of the patient `A`.
    Folders directly below the data folder keep their names.

    Args:
        groups: All groups of a data folder.
        root_name: Name of the data folder.
    """
    n_of_name = Counter(group.case_id for group in groups if group.is_named_by_folder)
    same = {name for name, n in n_of_name.items() if n > 1}
    if any(map(_TIMEPOINT.fullmatch, same)):
        same |= {name for name in n_of_name if _TIMEPOINT.fullmatch(name)}
    above = {group.above for group in groups if group.is_named_by_folder and group.case_id in same}
    names = _shortest_names(above - {Path()}, root_name)
    n_below = Counter(group.above for group in groups)
    return [
        _named_after(names[group.above], group, n_below[group.above])
        if group.is_named_by_folder and group.above in names
        else group
        for group in groups
    ]


def _worth(group: ScanGroup) -> tuple[int, bool]:
    n_modalities = len({scan.name.kind for scan in group.scans})
    return n_modalities, DERIVATIVES in group.folder.path.parts


def _shortest_names(folders: Iterable[Path], root_name: str) -> dict[Path, str]:
    """Return for each folder the fewest of its last names, joined, that no other one has."""
    parts = {folder: (root_name, *folder.parts) for folder in folders}
    names: dict[Path, str] = {}
    for n in range(1, max(map(len, parts.values()), default=0) + 1):
        names = {folder: "_".join(words[-n:]) for folder, words in parts.items()}
        if len(set(names.values())) == len(names):
            break
    return names


def _named_after(above: str, group: ScanGroup, n_below: int) -> ScanGroup:
    """Return a group with the name of the folder above, which holds `n_below` cases."""
    own = group.case_id
    is_timepoint = _TIMEPOINT.fullmatch(own) is not None
    return replace(
        group,
        case_id=above if n_below == 1 else f"{above}_{own}",
        patient_id=parse_case_id(above).patient_id if is_timepoint or n_below == 1 else "",
        timepoint=own if is_timepoint else "",
    )
