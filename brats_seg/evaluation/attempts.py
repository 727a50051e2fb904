"""One function over many cases: those that fail are listed, and do not stop the others."""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Generic, Protocol, TypeVar

from brats_seg.data.processes import worker_pool
from brats_seg.errors import CaseError
from brats_seg.progress import Track

Result = TypeVar("Result")


class OfCase(Protocol):
    """Anything that belongs to a case."""

    @property
    def case_id(self) -> str:
        """The case."""


Item = TypeVar("Item", bound=OfCase)


@dataclass(frozen=True, kw_only=True, slots=True)
class Failure:
    """A case that could not be dealt with."""

    case_id: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempts(Generic[Result]):
    """What became of every case."""

    results: tuple[Result, ...]
    """In the order of the cases."""
    failures: tuple[Failure, ...]


def attempt_all(
    function: Callable[[Item], Result],
    items: Sequence[Item],
    what: str,
    *,
    n_workers: int,
    track: Track,
) -> Attempts[Result]:
    """Apply a function to every case, in this process if there are no workers.

    Raises:
        EnvironmentalError: A process was killed.
    """
    done = track(
        _outcomes(partial(_attempt, function), items, n_workers), what=what, total=len(items)
    )
    outcomes = list(done)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Failure)]
    results = [outcome for outcome in outcomes if not isinstance(outcome, Failure)]
    return Attempts(results=tuple(results), failures=tuple(failures))


def _outcomes(
    attempt: Callable[[Item], Result | Failure], items: Sequence[Item], n_workers: int
) -> Iterator[Result | Failure]:
    if n_workers == 0:
        yield from map(attempt, items)
        return
    with worker_pool(n_workers, when_killed="Use fewer workers.") as pool:
        yield from pool.map(attempt, items)


def _attempt(function: Callable[[Item], Result], item: Item) -> Result | Failure:
    try:
        return function(item)
    except CaseError as error:
        return Failure(case_id=item.case_id, reason=str(error))
