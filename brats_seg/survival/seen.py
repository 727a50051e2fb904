"""Whether a network has seen a case, or another scan of its patient, while it learnt."""

from collections.abc import Sequence
from enum import StrEnum


class Seen(StrEnum):
    """Whether a network learnt on a case; the best answer first."""

    NO = "no"
    UNKNOWN = "unknown"
    YES = "yes"


def least_seen(answers: Sequence[Seen]) -> tuple[tuple[int, ...], Seen]:
    """Return the places of the networks that know a case least, and how well they know it."""
    order = list(Seen)
    best = min(answers, key=order.index)
    return tuple(place for place, answer in enumerate(answers) if answer == best), best
