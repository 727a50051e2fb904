import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from brats_seg.cases.many import worker_pool
from brats_seg.errors import CaseError, EnvironmentalError

ADVICE = "Buy memory."

# a process with one worker that it never gives work to; prints the worker's id
PARENT = """
import os, time
from brats_seg.cases.many import worker_pool

if __name__ == "__main__":
    with worker_pool(1, when_killed="") as pool:
        print(pool.submit(os.getpid).result(), flush=True)
        time.sleep(60)
"""


def double(number: int) -> int:
    return 2 * number


def die(_: int) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


def fail(_: int) -> None:
    raise CaseError("a", "b", "c", "d", "e")


def handlers(_: int) -> tuple[object, object]:
    return signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)


def is_running(pid: int) -> bool:
    # a dead process whose parent is gone may stay in the table, as a zombie, until it is collected
    try:
        return "Z" not in Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False


def test_work_is_done() -> None:
    with worker_pool(2, when_killed=ADVICE) as pool:
        assert list(pool.map(double, range(5))) == [0, 2, 4, 6, 8]


def test_an_error_keeps_its_type_and_its_parts() -> None:
    with (
        worker_pool(1, when_killed=ADVICE) as pool,
        pytest.raises(CaseError, match=r"case a, file b: found c; expected d\. e"),
    ):
        pool.submit(fail, 0).result()


def test_a_killed_worker_is_explained() -> None:
    with (
        pytest.raises(EnvironmentalError, match=r"was killed, .* memory ran out. Buy memory\."),
        worker_pool(2, when_killed=ADVICE) as pool,
    ):
        list(pool.map(die, range(3)))


def test_workers_leave_ctrl_c_to_the_parent_and_do_not_inherit_its_handlers() -> None:
    before = signal.signal(signal.SIGTERM, lambda *_: None)
    try:
        with worker_pool(1, when_killed=ADVICE) as pool:
            found = pool.submit(handlers, 0).result()
    finally:
        signal.signal(signal.SIGTERM, before)

    assert found == (signal.SIG_IGN, signal.SIG_DFL)


@pytest.mark.skipif(sys.platform != "linux", reason="looks at /proc")
def test_workers_end_when_their_parent_is_killed(tmp_path: Path) -> None:
    script = tmp_path / "parent.py"
    script.write_text(PARENT)
    with subprocess.Popen([sys.executable, script], stdout=subprocess.PIPE, text=True) as parent:
        assert parent.stdout is not None
        worker = int(parent.stdout.readline())
        assert is_running(worker)
        parent.kill()

    deadline = time.monotonic() + 10
    while is_running(worker) and time.monotonic() < deadline:
        time.sleep(0.01)

    assert not is_running(worker)
