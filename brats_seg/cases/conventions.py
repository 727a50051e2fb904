"""Infer the label convention of label maps.

The file names give the release, and the release gives the convention. The label values confirm it,
because some copies of a release have been converted to the convention of another. Everything that
reads label maps uses these rules: `index`, `prepare`, `predict`, `evaluate`, `figure` and `features`.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Mapping

from brats_seg.cases import layouts
from brats_seg.errors import LabelError
from brats_seg.labels import LabelConvention, convention_named
from brats_seg.voxels.box import Triple

_GLI_2024_SHAPE = (182, 218, 182)
"""Voxels of the GLI cases of 2024, and of no other GLI release."""
_RESOLVED_TOGETHER = frozenset({"brats-ped", "brats-met"})
"""Releases whose convention depends on whether 4 occurs in any of their cases."""
_DECATHLON_CASE = re.compile(r"BRATS_\d{3}")


def resolve(
    release: str, values: Collection[int], *, shape: Triple | None = None, declared: str = ""
) -> tuple[LabelConvention, bool]:
    """Return the label convention of a case, and whether another one could have the same values.

    An unexpected value in one case does not change the convention of the others; `check_values`
    reports values that the convention does not contain.

    Example:
        >>> convention, is_ambiguous = resolve("brats2023-gli", {0, 4}, shape=(182, 218, 182))
        >>> convention.name, is_ambiguous
        ('brats2024', False)
    """
    if declared:
        return convention_named(declared), False
    release = release_at(release, shape)
    is_of_any_origin = release in {layouts.UNKNOWN, layouts.NNUNET, layouts.BIDS}
    is_ambiguous = is_of_any_origin or (release.endswith("-ped") and 4 not in values)
    return layouts.conventions_of(release)[(3 in values) + 2 * (4 in values)], is_ambiguous


def release_at(release: str, shape: Triple | None) -> str:
    """Return the release of a case by its name, corrected by the shape of its volumes."""
    is_of_2024 = release == layouts.GLI_2023 and shape == _GLI_2024_SHAPE
    return layouts.GLI_2024 if is_of_2024 else release


def resolve_all(
    label_maps: Mapping[str, tuple[Triple, frozenset[int]]],
) -> dict[str, LabelConvention]:
    """Return the label convention of every label map of a folder, given shape and values by case id.

    Whether 4 occurs anywhere in a release of `_RESOLVED_TOGETHER` decides its convention, so that its
    label maps are resolved together. A label map that holds both 3 and 4 shows that its folder
    distinguishes four tissues; all other label maps of the folder are then resolved together as
    well. Otherwise each is resolved alone, so that a folder in which one case has 3 for enhancing
    tumour and another has 4 is read correctly.
    """
    of_release: defaultdict[str, set[int]] = defaultdict(set)
    for case_id, (_, values) in label_maps.items():
        of_release[release_of(case_id)] |= values
    has_four_tissues = any({3, 4} <= values for _, values in label_maps.values())
    of_folder = set[int]().union(*of_release.values())
    conventions = {}
    for case_id, (shape, values) in label_maps.items():
        release = release_of(case_id)
        shared: Collection[int] = of_folder if has_four_tissues else values
        if release in _RESOLVED_TOGETHER:
            shared = of_release[release]
        conventions[case_id], _ = resolve(release, shared, shape=shape)
    return conventions


def check_values(
    values: Collection[int], convention: LabelConvention, case_id: str, file: str = "label map"
) -> None:
    """Raise `LabelError` if a case has a value that its convention does not contain."""
    unknown = sorted(set(values) - convention.values)
    if unknown:
        expected = f"those of the convention {convention.name}, {sorted(convention.values)}"
        next_step = "Correct the label map, or name another convention with --labels."
        raise LabelError(case_id, file, f"label values {unknown}", expected, next_step)


def release_of(case_id: str) -> str:
    """Return the release that a case id belongs to, or `UNKNOWN`."""
    is_decathlon = _DECATHLON_CASE.fullmatch(case_id)
    return layouts.DECATHLON if is_decathlon else layouts.parse_case_id(case_id)[0]
