"""Cases that lie in a data folder more than once under one id."""

from collections.abc import Iterable, Sequence
from dataclasses import replace
from itertools import groupby

from brats_seg.cases.case import Case
from brats_seg.errors import CaseError


def without_copies(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases by id, with one of each set of copies, and a problem where copies differ.

    Copies are the same if the voxels of their first modality are, and their label maps as far as
    they have one: values and volume of the tumour. Of these the first by path is kept, a labelled
    one if there is one. Copies with problems of their own stay, for somebody to mend or remove.
    """
    kept: list[Case] = []
    by_id = sorted(cases, key=lambda case: case.case_id)
    for _, same_id in groupby(by_id, key=lambda case: case.case_id):
        places = sorted(same_id, key=_folder)
        usable = [case for case in places if case.usable]
        kept += [case for case in places if not case.usable]
        if len(usable) > 1:
            kept += _one_of(usable)
        else:
            kept += usable
    return tuple(sorted(kept, key=lambda case: (case.case_id, _folder(case))))


def _one_of(places: Sequence[Case]) -> list[Case]:
    labelled = [case for case in places if case.label]
    if len({case.voxel_hash for case in places}) > 1:
        return [_refused(case, places, "another scan") for case in places]
    if len({(case.label_values, case.tumour_ml) for case in labelled}) > 1:
        return [_refused(case, places, "the scan with another label map") for case in places]
    chosen = (labelled or places)[0]
    remark = f"the same scan lies in {_others(chosen, places)}, which was passed over"
    return [replace(chosen, remarks=(*chosen.remarks, remark))]


def _refused(case: Case, places: Sequence[Case], what: str) -> Case:
    error = CaseError(
        case.case_id,
        f"{_folder(case)}/",
        f"{what} of the same id in {_others(case, places)}",
        "one folder per id",
        "Remove or rename what is not wanted.",
    )
    return replace(case, problems=(*case.problems, str(error)))


def _others(case: Case, places: Sequence[Case]) -> str:
    return " and ".join(f"{_folder(other)}/" for other in places if other is not case)


def _folder(case: Case) -> str:
    return case.images[0].path.parent.as_posix()
