"""What the label values of cases mean, decided for all cases of a release together."""

from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self

from brats_seg.cases.case import Case
from brats_seg.cases.datasets import NNUNET
from brats_seg.cases.inspection import Inspection, inspect_case
from brats_seg.cases.layouts import GLI_2023, GLI_2024, GLI_2024_SHAPE, UNKNOWN
from brats_seg.errors import LabelError
from brats_seg.labels import LabelConvention, check_values, convention_named, detect_convention


@dataclass(frozen=True, kw_only=True, slots=True)
class OpenedCase:
    """A case whose label values are known, but not yet what they mean."""

    case: Case
    """Its convention is the one that the layout declares, if it does."""
    inspection: Inspection | None
    """None if the case was not opened because an earlier index knows it."""
    previous: Case | None = None
    """The case in the earlier index."""

    @classmethod
    def inspected(cls, case: Case, inspection: Inspection) -> Self:
        """Join what names and files tell."""
        is_gli_2024 = case.release == GLI_2023 and inspection.shape == GLI_2024_SHAPE
        case = replace(
            case,
            release=GLI_2024 if is_gli_2024 else case.release,
            problems=(*case.problems, *inspection.problems),
            label_values=inspection.label_values,
            voxel_hash=inspection.voxel_hash,
        )
        return cls(case=case, inspection=inspection)

    @classmethod
    def recalled(cls, case: Case, previous: Case) -> Self:
        """Take from an earlier index what needs the files."""
        case = replace(
            case,
            release=previous.release,
            label_values=previous.label_values,
            voxel_hash=previous.voxel_hash,
        )
        return cls(case=case, inspection=None, previous=previous)

    def tumour_ml(self, root: Path, convention: LabelConvention) -> float | None:
        """Return the volume of the whole tumour in a convention."""
        if self.previous and self.previous.label_convention == convention.name:
            return self.previous.tumour_ml
        return (self.inspection or inspect_case(self.case, root)).tumour_ml(convention)


def with_conventions(
    opened: Iterable[OpenedCase], root: Path, named: LabelConvention | None
) -> tuple[Case, ...]:
    """Give labelled cases their convention, and a problem where their values do not fit it.

    Args:
        opened: All cases of the data folder.
        root: The data folder.
        named: The convention that the user wants; None to find it.
    """
    groups: defaultdict[tuple[str, str], list[OpenedCase]] = defaultdict(list)
    for one in opened:
        groups[_source(one.case)].append(one)
    return tuple(case for group in groups.values() for case in _explained(group, root, named))


def _source(case: Case) -> tuple[str, str]:
    """Return what cases have in common that number their labels alike."""
    known = case.release not in {UNKNOWN, NNUNET}
    return case.release, "" if known else case.images[0].path.parent.parent.as_posix()


def _explained(
    group: Sequence[OpenedCase], root: Path, named: LabelConvention | None
) -> Iterator[Case]:
    values = {value for one in group for value in one.case.label_values}
    declared = next((c for one in group if (c := one.case.label_convention)), "")
    convention = named or (convention_named(declared) if declared else None)
    remarks: tuple[str, ...] = ()
    if convention is None:
        release = group[0].case.release
        convention = detect_convention(release=release, values=values)
        if _is_open(release, values):
            remarks = (
                f"the label values {' '.join(map(str, sorted(values)))} were read as "
                f"{convention.name}, but the names leave it open: if that is wrong, name the "
                "convention with --labels",
            )
    for one in group:
        yield _labelled(one, root, convention, remarks)


def _is_open(release: str, values: Collection[int]) -> bool:
    """Tell whether another numbering could have given these values too."""
    return release in {UNKNOWN, NNUNET} or (release.endswith("-ped") and 4 not in values)


def _labelled(
    opened: OpenedCase, root: Path, convention: LabelConvention, remarks: tuple[str, ...]
) -> Case:
    case = opened.case
    if not case.label_values:
        return replace(case, label_convention="")
    problems = case.problems
    try:
        check_values(case.label_values, convention, case.case_id)
    except LabelError as error:
        problems = (*problems, str(error))
    if case.label_values == (0,):
        remarks = (*remarks, "the label map holds no tumour")
    return replace(
        case,
        label_convention=convention.name,
        problems=problems,
        remarks=(*case.remarks, *remarks),
        tumour_ml=opened.tumour_ml(root, convention),
    )
