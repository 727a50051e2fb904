"""Infer the label convention of label maps.

The file names give the release, and the release gives the convention. The label values confirm it,
because some copies of a release have been converted to the convention of another. Everything that
reads label maps uses these rules: `index`, `prepare`, `predict`, `evaluate`, `figure` and `features`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping
from dataclasses import dataclass

from brats_seg.cases.layouts import (
    BIDS,
    DECATHLON,
    GLI_2023,
    GLI_2024,
    NNUNET,
    UNKNOWN,
    conventions_of,
    parse_case_id,
)
from brats_seg.errors import LabelError
from brats_seg.labels import LabelConvention, convention_named
from brats_seg.voxels.box import Triple

_GLI_2024_SHAPE = (182, 218, 182)
"""Voxels of the GLI cases of 2024, and of no other GLI release."""
_RESOLVED_TOGETHER = frozenset({"brats-ped", "brats-met"})
"""Releases whose convention depends on whether 4 occurs in any of their cases."""
_DECATHLON_CASE = re.compile(r"BRATS_\d{3}")


@dataclass(frozen=True, kw_only=True, slots=True)
class Resolution:
    """The release and the label convention of a label map."""

    release: str
    """Release by the name of the case, corrected by the shape of the volume."""
    convention: LabelConvention
    is_ambiguous: bool
    """Whether another convention could have given the same label values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelContent:
    """Shape and values of a label map, from which its convention is inferred."""

    shape: Triple
    """Voxels along X, Y and Z, as stored."""
    values: frozenset[int]
    """Label values that occur."""


def resolve(
    *, release: str, shape: Triple | None, values: Collection[int], declared: str = ""
) -> Resolution:
    """Return the release and the label convention of a case.

    An unexpected value in one case does not change the convention of the others; `check_values`
    reports values that the convention does not contain.

    Example:
        >>> found = resolve(
        ...     release="brats2023-gli", shape=(182, 218, 182), values={0, 1, 2, 4}
        ... )
        >>> found.release, found.convention.name, found.is_ambiguous
        ('brats2024-gli', 'brats2024', False)
    """
    release = release_at(release, shape)
    if declared:
        convention, is_ambiguous = convention_named(declared), False
    else:
        convention = conventions_of(release)[(3 in values) + 2 * (4 in values)]
        is_ambiguous = release in {UNKNOWN, NNUNET, BIDS} or (
            release.endswith("-ped") and 4 not in values
        )
    return Resolution(release=release, convention=convention, is_ambiguous=is_ambiguous)


def release_at(release: str, shape: Triple | None) -> str:
    """Return the release of a case by its name, corrected by the shape of its volumes."""
    return GLI_2024 if release == GLI_2023 and shape == _GLI_2024_SHAPE else release


def resolve_all(
    label_maps: Mapping[str, LabelContent], *, declared: str = ""
) -> dict[str, Resolution]:
    """Return the release and the label convention of every label map of a folder, by case id.

    Whether 4 occurs anywhere in a release of `_RESOLVED_TOGETHER` decides its convention, so that its
    label maps are resolved together. A label map that holds both 3 and 4 shows that its folder
    distinguishes four tissues; all other label maps of the folder are then resolved together as
    well. Otherwise each is resolved alone, so that a folder in which one case has 3 for enhancing
    tumour and another has 4 is read correctly.
    """
    of_release: defaultdict[str, set[int]] = defaultdict(set)
    for case_id, content in label_maps.items():
        of_release[release_of(case_id)] |= content.values
    has_four_tissues = any({3, 4} <= content.values for content in label_maps.values())
    of_folder = set[int]().union(*of_release.values())
    found = {}
    for case_id, content in label_maps.items():
        release = release_of(case_id)
        values: Collection[int] = of_folder if has_four_tissues else content.values
        if release in _RESOLVED_TOGETHER:
            values = of_release[release]
        found[case_id] = resolve(
            release=release, shape=content.shape, values=values, declared=declared
        )
    return found


def check_values(
    values: Collection[int], convention: LabelConvention, case_id: str, file: str = "label map"
) -> None:
    """Raise `LabelError` if a case has a value that its convention does not contain."""
    unknown = sorted(set(values) - convention.values)
    if unknown:
        raise LabelError(
            case_id,
            file=file,
            found=f"label values {unknown}",
            expected=f"those of the convention {convention.name}, {sorted(convention.values)}",
            next_step="Correct the label map, or name another convention with --labels.",
        )


def release_of(case_id: str) -> str:
    """Return the release that a case id belongs to, or `UNKNOWN`."""
    return DECATHLON if _DECATHLON_CASE.fullmatch(case_id) else parse_case_id(case_id)[0]
