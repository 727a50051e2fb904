"""A function over many cases: order, failures, processes."""

import functools
import multiprocessing
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.many import map_cases, worker_pool
from brats_seg.errors import EnvironmentalError, LabelError, UsageError
from tests.builders import limited_files
from tests.test_files import wait_for
from tests.training_builders import Recorder

CASES = [Case(case_id=name, patient_id=name, release="unknown") for name in "abcd"]

with_and_without_processes = pytest.mark.parametrize("n_workers", [0, 2])


def shout(case: Case) -> str:
    return case.case_id.upper()


def fail_in_b(error: Exception, case: Case) -> str:
    if case.case_id == "b":
        raise error
    return case.case_id.upper()


REFUSED = functools.partial(fail_in_b, LabelError("b", "b.nii", "a 7", "no 7", "Correct it."))
NO_MEMORY = functools.partial(fail_in_b, MemoryError())


def divide_by_zero(case: Case) -> float:
    return 1 / "bcd".find(case.case_id)


def die(_: object) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def die_once(path: Path, case: Case) -> str:
    if case.case_id == "b" and not path.exists():
        path.touch()
        die(case)
    return shout(case)


@with_and_without_processes
@pytest.mark.parametrize(
    ("function", "results", "failures"),
    [
        (shout, ("A", "B", "C", "D"), []),
        (REFUSED, ("A", "C", "D"), [("LabelError", "case b, file b.nii: found a 7; expected")]),
        (NO_MEMORY, ("A", "C", "D"), [("MemoryError", "case b: memory ran out. Close other")]),
        # a foreign exception is a bug that is to be reported
        (divide_by_zero, (-1, 1, 0.5), [("ZeroDivisionError", "case b: division by zero. This")]),
    ],
)
def test_a_case_that_fails_does_not_stop_the_others(n_workers, function, results, failures, caplog):
    track = Recorder()
    done = map_cases(function, CASES, "working", n_workers=n_workers, track=track)
    assert (done.results, track.works) == (results, [("working", 4)])
    for failure, (error, message) in zip(done.failures, failures, strict=True):
        assert (failure.case_id, failure.error) == ("b", error)
        assert failure.message.startswith(message)
    # with its traceback, in the process that has the error
    is_logged = function is divide_by_zero and not n_workers
    logged = [(record.getMessage(), record.exc_info[0]) for record in caplog.records]
    assert logged == [("case b", ZeroDivisionError)] * is_logged


@with_and_without_processes
@pytest.mark.parametrize("error", [EnvironmentalError("the disk is full"), UsageError("no flag")])
def test_an_error_that_affects_all_cases_ends_the_batch(n_workers: int, error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        map_cases(functools.partial(fail_in_b, error), CASES, "working", n_workers=n_workers)


def test_half_the_processes_go_on_after_one_was_killed(tmp_path: Path, caplog) -> None:
    dying = functools.partial(die_once, tmp_path / "died")
    assert map_cases(dying, CASES, "dying", n_workers=2).results == ("A", "B", "C", "D")
    assert "was killed, most likely because memory ran out: going on with 1 pro" in caplog.text
    with pytest.raises(EnvironmentalError, match=r"memory ran out\. Close other programs"):
        map_cases(die, CASES, "dying", n_workers=2)


# a process with one worker that it never gives work to; prints the worker's id
PARENT = """
import os, time
from brats_seg.cases.many import worker_pool

with worker_pool(1) as pool:
    print(pool.submit(os.getpid).result(), flush=True)
    time.sleep(60)
"""


@pytest.mark.parametrize("method", ["fork", pytest.param("forkserver", marks=pytest.mark.slow)])
def test_work_is_done_however_processes_start(method: str, monkeypatch) -> None:
    """Processes are not forked on macOS, nor by Python 3.14."""
    context = multiprocessing.get_context(method)
    monkeypatch.setattr("multiprocessing.context._default_context._actual_context", context)
    with worker_pool(1) as pool:
        assert pool.submit(abs, -1).result() == 1


def test_workers_leave_ctrl_c_to_the_parent_and_do_not_inherit_its_handlers() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with worker_pool(1) as pool:
            found = list(pool.map(signal.getsignal, (signal.SIGINT, signal.SIGTERM)))
    finally:
        signal.signal(signal.SIGTERM, before)
    assert found == [signal.SIG_IGN, signal.SIG_DFL]


def test_workers_end_when_their_parent_is_killed() -> None:
    command = [sys.executable, "-c", PARENT]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as parent:
        worker = psutil.Process(int(parent.stdout.readline()))
        assert worker.is_running()
        parent.kill()
    # a dead process whose parent is gone may be a zombie until it is collected
    wait_for(lambda: not worker.is_running() or worker.status() == psutil.STATUS_ZOMBIE)


def test_a_pool_that_cannot_be_made_is_an_error_of_the_machine() -> None:
    refused = pytest.raises(EnvironmentalError, match=r"worker processes could not .*/dev/shm")
    with limited_files(1), refused, worker_pool(1):
        pytest.fail("there is no pool")
