"""Sums over patches: what a phase of an epoch is scored from."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np


@dataclass(kw_only=True, slots=True)
class Tally:
    """Sums over patches or cases, of plain values only, so that a checkpoint can hold them."""

    seconds: float = 0.0
    """Time they have taken."""
    loss_sum: float = 0.0
    """Sum of their losses."""
    n_patches: int = 0
    counts: dict[str, list[list[float]]] = field(default_factory=dict)
    """What was measured of them, by case: rows that the task knows the meaning of."""

    @property
    def loss(self) -> float:
        """Mean over patches, not a number without any."""
        return self.loss_sum / self.n_patches if self.n_patches else float("nan")

    def add(self, case_id: str, counts: Sequence[Sequence[float]]) -> None:
        """Add what was measured of a patch to that of its case."""
        before = self.counts.get(case_id)
        summed = counts if before is None else np.add(before, counts).tolist()
        self.counts[case_id] = [list(row) for row in summed]

    def add_all(self, other: "Tally") -> None:
        """Add the patches of another tally."""
        self.loss_sum += other.loss_sum
        self.n_patches += other.n_patches
        for case_id, counts in other.counts.items():
            self.add(case_id, counts)
