"""The faults of the campaigns happen, and are seen: without them a campaign would prove nothing."""

import errno
import re
import signal
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.programs import (
    At,
    Ended,
    KilledWriting,
    LimitedMemory,
    RefusedFrom,
    kill_all,
    n_moments,
    run,
)
from tests.faults.stages import COMMANDS, Stages, differences, results

ROOT = Path(__file__).parent.parent.parent
INDEX = COMMANDS["index"].words


def test_moments_are_counted(stages: Stages, place: Path) -> None:
    folder = stages.start("scans", place / "here")

    assert n_moments(INDEX, folder) >= 4


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (At(1, kill_all), -signal.SIGKILL),
        (KilledWriting(1), -signal.SIGXFSZ),
        (RefusedFrom(1, errno.ENOSPC), 3),
    ],
)
def test_a_fault_ends_the_command_without_its_result(
    fault, code: int, stages: Stages, place
) -> None:
    folder = stages.start("scans", place / "here")

    assert run(INDEX, folder, fault).code == code
    assert not (folder / "cases.csv").exists()


def test_a_hang_and_a_traceback_are_problems(stages: Stages, place: Path) -> None:
    folder = stages.start("scans", place / "here")

    hung = run(INDEX, folder, timeout_s=0.001)
    died = Ended(code=1, shown="Traceback (most recent call last):\nKeyError")

    assert "it hung" in hung.problem
    assert "it ended in a traceback" in died.problem
    assert "exit code 2, expected (0,)" in Ended(code=2, shown="").expect(0)


def test_memory_is_limited(stages: Stages, place: Path) -> None:
    folder = stages.start("scans", place / "here")

    assert run("phantom other", folder, LimitedMemory(1 << 20)).code != 0


def test_another_byte_is_another_result(stages: Stages, place: Path) -> None:
    folder = stages.start("scans", place / "here")
    (folder / "a").write_bytes(b"1")
    expected = results(folder)
    (folder / "a").write_bytes(b"2")
    (folder / "b").touch()

    assert differences(results(folder), expected) == ("other results: a (other content), b (extra)")


def test_a_try_with_a_problem_is_a_failure() -> None:
    tries = Campaign()

    tries.note("one", "")
    tries.note("two", "", "a problem")

    assert tries.failures == ["two: a problem"]
    assert tries.summary == "1 of 2 tries failed\ntwo: a problem"


def test_the_tests_that_the_security_page_names_exist() -> None:
    page = (ROOT / "SECURITY.md").read_text()
    named = re.findall(r"`([./]*test_\w+\.py)`", page)

    assert len(named) >= 9
    assert [name for name in named if not (ROOT / "tests" / "faults" / name).exists()] == []
