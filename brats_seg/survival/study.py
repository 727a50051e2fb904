"""What survival is learnt from: the features of many cases, and what became of the patients."""

from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

from brats_seg.survival.families import Family
from brats_seg.survival.outcomes import GTR, STR, Outcomes
from brats_seg.survival.seen import least_seen
from brats_seg.survival.table import AGE, FeatureTable, encoder_of

Places = npt.NDArray[np.intp]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Study:
    """A table of features and what became of the patients."""

    table: FeatureTable
    outcomes: Outcomes
    columns: tuple[str, ...]
    """The features that are used."""
    values: npt.NDArray[np.float64]
    """(cases, features)"""
    dropped: tuple[str, ...]
    """Columns that say nothing: empty, or equal wherever they are known."""

    @classmethod
    def of(cls, table: FeatureTable, outcomes: Outcomes) -> Self:
        """Put the two together; age and resection are features too."""
        resections = np.array(outcomes.resections)
        own = [name for name in table.columns if name != AGE]
        columns = (AGE, "resection_gtr", "resection_str", *own)
        extra = (outcomes.ages, resections == GTR, resections == STR)
        values = np.column_stack([*extra, *(table.column(name) for name in own)]).astype(np.float64)
        empty = np.isnan(values)
        lowest = np.where(empty, np.inf, values).min(axis=0)
        tells = np.where(empty, -np.inf, values).max(axis=0) > lowest
        # the baseline has nothing else
        tells[0] = True
        return cls(
            table=table,
            outcomes=outcomes,
            columns=tuple(name for name, kept in zip(columns, tells, strict=True) if kept),
            values=values[:, tells],
            dropped=tuple(name for name, kept in zip(columns, tells, strict=True) if not kept),
        )

    @property
    def encoders(self) -> Places:
        """The autoencoder that has not seen each case, or the first one."""
        if not self.table.n_encoders:
            return np.zeros(len(self.values), dtype=np.intp)
        return np.array([least_seen(answers)[0][0] for answers in self.table.latent_seen])

    def features_of(self, family: Family, encoder: int) -> npt.NDArray[np.float64]:
        """Return what a family sees of the cases (n, p): never the vectors of two autoencoders."""
        if family.age_only:
            return self.values[:, :1]
        kept = [encoder_of(name) in (None, encoder) for name in self.columns]
        return self.values[:, kept]
