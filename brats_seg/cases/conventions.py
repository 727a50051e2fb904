"""Modality order, the label values of every BraTS release, and regions.

A label map is an integer array `(X, Y, Z)`. Region masks are boolean `(3, X, Y, Z)` in the order
of `REGIONS`: the enhancing tumour lies inside the tumour core, the core inside the whole tumour.
Tables: BraTS 2017-2025 and the Medical Segmentation Decathlon, as published by the challenges.
"""

# DOC evaluation/numbering: Which label convention the maps of one side of a comparison are in.

import re
from collections.abc import Collection, Mapping

from brats_seg.cases.layouts import GLI_2024, parse_case_id
from brats_seg.errors import LabelError
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD, LabelConvention


def detect_convention(*, release: str, values: Collection[int]) -> LabelConvention:
    """Tell the convention from the release and all label values seen in its cases.

    The release says how it numbers tissues, and the voxels confirm it: copies of one year exist in
    the numbering of another. One stray case must not change what the others mean, so a value that
    fits neither is left for `check_values` to find, case by case.
    """
    has_3, has_4 = 3 in values, 4 in values
    match release:
        case "msd":
            # three tissues in an order of its own, which only its layout tells
            return MSD
        case "brats2024-gli":
            return BRATS2024
        case "brats-ped":
            return BRATS2024_PED if has_4 else BRATS2023
        case "brats-met":
            return BRATS2024 if has_4 else BRATS2023
        case "brats2017" | "brats2018" | "brats2019" | "brats2020" | "brats2021":
            return BRATS2023 if has_3 and not has_4 else BRATS2017
        case "brats2023-gli" | "brats-men" | "brats-ssa" | "brats-goat":
            return BRATS2017 if has_4 and not has_3 else BRATS2023
    if has_3 and has_4:
        return BRATS2024
    return BRATS2017 if has_4 else BRATS2023


def check_values(values: Collection[int], convention: LabelConvention, case_id: str) -> None:
    """Raise `LabelError` if a case holds a value that its convention does not know."""
    unknown = sorted(set(values) - convention.values)
    if unknown:
        raise LabelError(
            case_id,
            file="label map",
            found=f"label values {unknown}",
            expected=f"those of the convention {convention.name}, {sorted(convention.values)}",
            next_step="Mend the label map, or name another convention with --labels.",
        )


_MSD_CASE = re.compile(r"BRATS_\d{3}")


def find_conventions(
    values_by_case: Mapping[str, Collection[int]], named: LabelConvention | None
) -> dict[str, LabelConvention]:
    """Tell the convention of every label map of one side.

    Args:
        values_by_case: The values that occur in the label map of each case.
        named: The convention of a task that has one of its own, or None to detect it.

    A map that holds both 3 and 4 shows that its side tells four tissues apart; all maps of the side
    are then read alike. Elsewhere each map speaks for itself, so that a folder in which one map has
    3 for enhancing tumour and another 4 is read as it was meant.
    """
    if named is not None:
        return dict.fromkeys(values_by_case, named)
    has_four_tissues = any({3, 4} <= set(values) for values in values_by_case.values())
    of_all = frozenset[int]().union(*values_by_case.values())
    return {
        case_id: _convention(case_id, of_all if has_four_tissues else values)
        for case_id, values in values_by_case.items()
    }


def _convention(case_id: str, values: Collection[int]) -> LabelConvention:
    release = parse_case_id(case_id).release
    if release == GLI_2024:
        # after treatment 4 is the resection cavity, also where no tumour enhances
        return BRATS2024
    if _MSD_CASE.fullmatch(case_id):
        release = "msd"
    return detect_convention(release=release, values=values)
