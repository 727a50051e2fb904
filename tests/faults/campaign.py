"""Count the tries and the failures of each promise, and print them as a table at the end.

A campaign notes every try and goes on after a failure; its test fails at the end, with the first
failures as message. The counts travel in the reports of the tests, also between processes.
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import TypeAlias

import pytest

_PROPERTY = "campaign"
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
def campaign(request: pytest.FixtureRequest) -> NewCampaign:
    """Begin the campaign of a promise, whose name is a row of the table."""

    @contextmanager
    def begin(promise: str) -> Iterator[Campaign]:
        tries = Campaign()
        try:
            yield tries
        finally:
            counts = promise, tries.n_tries, len(tries.failures)
            request.node.user_properties.append((_PROPERTY, counts))
        if tries.failures:
            pytest.fail(tries.summary)

    return begin


def print_table(reporter: pytest.TerminalReporter) -> None:
    """Print promise, tries and failures of all campaigns of a session."""
    rows: dict[str, list[int]] = {}
    for report in (*reporter.getreports("passed"), *reporter.getreports("failed")):
        for name, value in report.user_properties:
            if name == _PROPERTY and report.when == "call":
                promise, n_tries, n_failures = value
                row = rows.setdefault(promise, [0, 0])
                row[:] = row[0] + n_tries, row[1] + n_failures
    if not rows:
        return
    reporter.section("promises")
    width = max(map(len, rows))
    reporter.line(f"{'promise':{width}}  {'tries':>6}  {'failures':>8}")
    for promise, (n_tries, n_failures) in sorted(rows.items()):
        reporter.line(f"{promise:{width}}  {n_tries:6}  {n_failures:8}")
