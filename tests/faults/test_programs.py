"""The faults of the campaigns happen, and are seen: without them a campaign would prove nothing."""

import errno
import re
import signal
from functools import partial
from pathlib import Path

import pytest

from tests.builders import ROOT
from tests.faults import programs
from tests.faults.campaign import Campaign
from tests.faults.stages import COMMANDS, Stages, differences, results

INDEX = COMMANDS["index"].words


@pytest.fixture
def folder(stages: Stages, tmp_path: Path) -> Path:
    return stages.start("scans", tmp_path / "here")


@pytest.mark.parametrize(
    ("fault", "code"),
    [
        (partial(programs.at, 1, programs.kill_all), -signal.SIGKILL),
        (partial(programs.kill_writing, 1), -signal.SIGXFSZ),
        (partial(programs.refuse_from, 1, errno.ENOSPC), 3),
    ],
)
def test_a_fault_ends_the_command_without_its_result(fault, code: int, folder: Path) -> None:
    assert programs.run(INDEX, folder, fault).code == code
    assert not (folder / "cases.csv").exists()


def test_fault_injection_detects_hangs_tracebacks_and_lack_of_memory(folder: Path) -> None:
    assert programs.n_moments(INDEX, folder) >= 4
    hung = programs.run(INDEX, folder, timeout_s=0.001)
    died = programs.Ended(code=1, shown="Traceback (most recent call last):\nKeyError")
    assert "it hung" in hung.problem
    assert "it ended in a traceback" in died.problem
    assert "exit code 2, expected (0,)" in programs.Ended(code=2, shown="").expect(0)
    assert programs.run("phantom other", folder, partial(programs.limit_memory, 1 << 20)).code != 0


def test_a_changed_byte_is_a_different_result(folder: Path) -> None:
    (folder / "a").write_bytes(b"1")
    expected = results(folder)
    (folder / "a").write_bytes(b"2")
    (folder / "b").touch()
    assert differences(results(folder), expected) == "other results: a (other content), b (extra)"


def test_a_failed_try_fails_the_campaign(stages: Stages, tmp_path: Path) -> None:
    tries = Campaign(stages, tmp_path)
    tries.note("one", "")
    tries.finish()
    tries.note("two", "", "a problem")
    with pytest.raises(AssertionError, match="1 of 2 tries failed\ntwo: a problem"):
        tries.finish()


def test_the_tests_that_the_security_page_names_exist() -> None:
    named = re.findall(r"`([./]*test_\w+\.py)`", (ROOT / "SECURITY.md").read_text())
    assert len(named) >= 9
    assert [name for name in named if not (ROOT / "tests" / "faults" / name).exists()] == []
