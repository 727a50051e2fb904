"""Which label convention the maps of one side of a comparison are in."""

import re
from collections.abc import Collection, Mapping

from brats_seg.cases.layouts import GLI_2024, parse_case_id
from brats_seg.evaluation.protocols import Protocol
from brats_seg.labels import BRATS2024, LabelConvention, detect_convention

_MSD_CASE = re.compile(r"BRATS_\d{3}")


def find_numbering(
    values_by_case: Mapping[str, Collection[int]], protocol: Protocol
) -> dict[str, LabelConvention]:
    """Tell the convention of every label map of one side.

    Args:
        values_by_case: The values that occur in the label map of each case.
        protocol: A task with a numbering of its own is read in that.

    A map that holds both 3 and 4 shows that its side tells four tissues apart; all maps of the side
    are then read alike. Elsewhere each map speaks for itself, so that a folder in which one map has
    3 for enhancing tumour and another 4 is read as it was meant.
    """
    if protocol.labels is not None:
        return dict.fromkeys(values_by_case, protocol.labels)
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
