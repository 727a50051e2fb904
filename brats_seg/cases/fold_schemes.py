"""Schemes of sharing patients out: each gives cases, by their id, the number of a fold.

A group is the cases that must not be parted. A case that gets no number is left out.
"""

import warnings
from collections import Counter, defaultdict
from collections.abc import Hashable, Sequence

import numpy as np
from sklearn.model_selection import StratifiedKFold

from brats_seg.cases.case import Case
from brats_seg.cases.groups import first_of_group
from brats_seg.errors import FoldError

_NOTEBOOK_FOLDS = 7
_NOTEBOOK_SEED = 55
_NOTEBOOK_DROPPED = "BraTS20_Training_355"


def kept_together(ordered: Sequence[Case]) -> list[list[Case]]:
    """Put the cases of a patient together, and patients who share a scan."""
    keys: list[list[Hashable]] = [
        [("patient", case.patient_id), *([("voxels", case.voxel_hash)] if case.voxel_hash else [])]
        for case in ordered
    ]
    groups: defaultdict[int, list[Case]] = defaultdict(list)
    for first, case in zip(first_of_group(keys), ordered, strict=True):
        groups[first].append(case)
    return list(groups.values())


def stratified_folds(groups: Sequence[list[Case]], n_folds: int, seed: int) -> dict[str, int]:
    """Deal the groups of each stratum out, always to the fold that has the least of it.

    scikit-learn's StratifiedGroupKFold warns or leaves folds empty when patients are few; here
    an empty fold always comes first.
    """
    _check_enough(groups, n_folds)
    rng = np.random.default_rng(seed)
    totals = [0] * n_folds
    folds: dict[str, int] = {}
    for stratum in _strata(groups, n_folds):
        counts = [0] * n_folds
        # the largest first, so that the small ones can level out what they leave uneven
        shuffled = sorted((stratum[i] for i in rng.permutation(len(stratum))), key=len)
        for group in reversed(shuffled):
            fold = min(range(n_folds), key=lambda f: (counts[f], totals[f], f))
            counts[fold] += len(group)
            totals[fold] += len(group)
            folds |= {case.case_id: fold for case in group}
    return folds


def notebook_folds(groups: Sequence[list[Case]]) -> dict[str, int]:
    """Share out as the Kaggle notebook does: cases with an age, by its decade, into seven folds.

    The notebook goes by the rows of `name_mapping.csv`, which are in the order of the 2020 ids.
    It looks at cases, not patients: where it would part a group, here all of it goes to the fold
    of its first case. BraTS 2020 has one case per patient, so there the folds are the notebook's.
    """
    cases = sorted((case for group in groups for case in group), key=lambda case: case.case_id)
    aged = [c for c in cases if c.age_years is not None and c.case_id != _NOTEBOOK_DROPPED]
    decades = [case.age_years // 10 * 10 for case in aged if case.age_years is not None]
    if max(Counter(decades).values(), default=0) < _NOTEBOOK_FOLDS:
        msg = (
            f"the notebook's scheme stratifies {_NOTEBOOK_FOLDS} folds by decade of age, but only "
            f"{len(aged)} of {len(cases)} cases have an age, too few of one decade. Put the "
            "release's survival_*.csv into the data folder, or use --set folds.scheme=stratified"
        )
        raise FoldError(msg)
    splitter = StratifiedKFold(_NOTEBOOK_FOLDS, shuffle=True, random_state=_NOTEBOOK_SEED)
    folds: dict[str, int] = {}
    with warnings.catch_warnings():
        # the first and the last decades have fewer than seven patients, in the notebook too
        warnings.filterwarnings("ignore", "The least populated class", UserWarning)
        for fold, (_, held_out) in enumerate(splitter.split(decades, decades)):
            folds |= {aged[i].case_id: fold for i in held_out}
    for group in groups:
        own = [case.case_id for case in group if case.case_id in folds]
        folds |= dict.fromkeys(own, folds[own[0]]) if own else {}
    return folds


def _check_enough(groups: Sequence[list[Case]], n_folds: int) -> None:
    if len(groups) >= n_folds:
        return
    if not groups:
        msg = "there are no cases to share out into folds"
    elif len(groups) == 1:
        msg = (
            f"all cases are of one patient, {groups[0][0].patient_id}: nobody is left to validate "
            "on; expected cases of two patients at least"
        )
    else:
        msg = (
            f"{len(groups)} patients cannot fill {n_folds} folds (those who share a scan count as "
            f"one). Add patients, or ask for fewer folds: --set folds.n_folds={len(groups)}"
        )
    raise FoldError(msg)


def _strata(groups: Sequence[list[Case]], n_folds: int) -> list[list[list[Case]]]:
    """Put alike patients together: by grade and decade of age, the others by tumour volume.

    Neighbours in volume make a stratum of as many patients as there are folds. Neighbouring
    strata are alike as well, so that small ones even out along the list.
    """
    strata: defaultdict[tuple[str, float], list[list[Case]]] = defaultdict(list)
    unknown = []
    for group in groups:
        grade = next((case.grade for case in group if case.grade), "")
        age = next((case.age_years for case in group if case.age_years is not None), None)
        if grade or age is not None:
            strata[grade, -1 if age is None else age // 10].append(group)
        else:
            unknown.append(group)
    unknown.sort(key=_volume_ml)
    by_volume = [unknown[i : i + n_folds] for i in range(0, len(unknown), n_folds)]
    return [strata[key] for key in sorted(strata)] + by_volume


def _volume_ml(group: list[Case]) -> float:
    return max(-1.0 if case.tumour_ml is None else case.tumour_ml for case in group)
