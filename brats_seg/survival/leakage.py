"""Determine whether a network was trained on a case, or on another scan of its patient."""

import logging
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Self

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import ClinicalTable
from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.cases.layouts import parse_case_id

log = logging.getLogger(__name__)


class Leakage(StrEnum):
    """Whether a network was trained on the patient of a case; the best answer first."""

    NO = "no"
    UNKNOWN = "unknown"
    YES = "yes"


def least_leakage(answers: Sequence[Leakage]) -> tuple[tuple[int, ...], Leakage]:
    """Return the indices of the networks with the least leakage, and that leakage."""
    order = list(Leakage)
    best = min(answers, key=order.index)
    return tuple(place for place, answer in enumerate(answers) if answer == best), best


@dataclass(frozen=True, kw_only=True, slots=True)
class People:
    """Ids of the patients of cases, in the releases of all years."""

    clinical: ClinicalTable
    """Tables that join the ids of one person."""

    def keys(self, case_id: str, patient_id: str) -> frozenset[str]:
        """Return the ids of the patient; two cases of one patient share at least one."""
        row = self.clinical.row(case_id)
        names = {case_id, patient_id, *([row.person] if row else [])}
        return frozenset(name.lower() for name in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainingCases:
    """The patients whom a run was trained on."""

    people: frozenset[str] | None
    """Ids of the patients as `People.keys` has them; None where the run has no record."""

    @classmethod
    def of_run(cls, path: Path, people: People, cases: Sequence[Case]) -> Self:
        """Read the split that a run was trained with; `path` is its folder or a checkpoint in it.

        Raises:
            FoldError: The split cannot be read.
        """
        split_path = (path if path.is_dir() else path.parent) / SPLIT_NAME
        if not split_path.exists():
            log.warning(
                "%s has no %s: whether it was trained on a case is unknown", path, SPLIT_NAME
            )
            return cls(people=None)
        patients = {case.case_id: case.patient_id for case in cases}
        keys: set[str] = set()
        for case_id in read_split(split_path).train:
            patient = patients.get(case_id) or parse_case_id(case_id).patient_id
            keys |= people.keys(case_id, patient)
        return cls(people=frozenset(keys))

    def leakage(self, keys: frozenset[str]) -> Leakage:
        """Return whether one of the keys is of a patient whom the run was trained on."""
        if self.people is None:
            return Leakage.UNKNOWN
        return Leakage.YES if self.people & keys else Leakage.NO
