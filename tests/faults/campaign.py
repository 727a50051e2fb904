"""Try many faults in one test: it goes on after a failure, and fails at the end with the first ones."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import pytest

_N_SHOWN = 5


class Campaign:
    """Tries of one promise."""

    def __init__(self) -> None:
        self.n_tries = 0
        self.failures: list[str] = []

    def note(self, what: str, *problems: str) -> None:
        """Count a try, which has failed if one of the problems is not empty."""
        self.n_tries += 1
        if found := "; ".join(filter(None, problems)):
            # a name may have characters that no terminal and no report can show
            self.failures.append(ascii(f"{what}: {found}")[1:-1].replace("\\n", "\n"))

    @property
    def summary(self) -> str:
        """Number of failures, and the first of them."""
        shown = "\n\n".join(self.failures[:_N_SHOWN])
        return f"{len(self.failures)} of {self.n_tries} tries failed\n{shown}"


NewCampaign: TypeAlias = Callable[[str], AbstractContextManager[Campaign]]
"""Begins the campaign of a promise; the end fails the test if a try has failed."""


@pytest.fixture
def campaign() -> NewCampaign:
    """Begin the campaign of a promise, which the message names."""

    @contextmanager
    def begin(promise: str) -> Iterator[Campaign]:
        tries = Campaign()
        yield tries
        if tries.failures:
            pytest.fail(f"{promise}: {tries.summary}")

    return begin
