"""Time training on a CPU that other work or a quota takes time from.

Epochs of the demo network on two CPUs: alone, beside one and two busy processes, and with a quota of
one CPU, as a container may have. The settings are

before        a thread for each CPU, waiting as GNU OpenMP does by default (300,000 rounds)
one thread    OMP_NUM_THREADS=1
now           what `brats_seg.cpu_threads` and `runtime.device.threads_for` choose

A process for each setting starts once, then trains in turn with the others. Shown are medians over
rounds with the lowest and the highest, of the time from the first batch to the last checkpoint, and
the CPU time. The time until a process is ready (imports, network, prepared cases) is shown apart.

    python benchmarks/busy_cpu.py --rounds 3 --epochs 2

Without the right to make a control group, the quota is replaced by one CPU for both threads.
"""

import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from comparison import Comparison, append_json, options_of, ratios_of, table_of

from brats_seg import Trainer, load_config, open_fold, write_phantom_cases
from brats_seg.cpu_threads import NUMBERS, WAITING
from brats_seg.data.fold import FoldData
from brats_seg.progress import untracked

N_CPUS = 2
SETTINGS = {
    "before": {"OMP_NUM_THREADS": str(N_CPUS), "GOMP_SPINCOUNT": "300000"},
    "one thread": {"OMP_NUM_THREADS": "1"},
    "now": {},
}
BUSY = "while True: pass"
QUOTA_US = 100_000
"""CPU time in a period, which has the same length: one CPU."""


@dataclass(kw_only=True, slots=True)
class Timings:
    """Times of one setting in one situation."""

    seconds: list[float] = field(default_factory=list)
    cpu: list[float] = field(default_factory=list)

    @property
    def median(self) -> float:
        """Median of the seconds."""
        return statistics.median(self.seconds)


class Child:
    """A process that trains whenever it is asked."""

    def __init__(self, folder: Path, setting: str, set_up: Callable[[], None]) -> None:
        free = {key: value for key, value in os.environ.items() if key not in NUMBERS + WAITING}
        started_s = time.monotonic()
        self._process = subprocess.Popen(
            [sys.executable, __file__, "--child", str(folder)],
            env={**free, **SETTINGS[setting]},
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=set_up,
        )
        self._read()
        self.ready_s = time.monotonic() - started_s

    def train(self, n_epochs: int, timings: Timings) -> None:
        """Train a run of so many epochs, and add its times."""
        assert self._process.stdin is not None
        print(n_epochs, file=self._process.stdin, flush=True)
        answer = self._read()
        timings.seconds.append(answer["seconds"])
        timings.cpu.append(answer["cpu"])

    def end(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> dict[str, float]:
        assert self._process.stdout is not None
        answer: dict[str, float] = json.loads(self._process.stdout.readline())
        return answer


def main() -> None:
    """Print a line for each situation and setting, and the ratios that matter."""
    arguments = options_of(__doc__, rounds=3, epochs=2, child=Path)
    if arguments.child is not None:
        _serve(arguments.child)
        return
    os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:N_CPUS])
    with ExitStack() as opened:
        folder = Path(opened.enter_context(tempfile.TemporaryDirectory()))
        _prepare(folder)
        limit, how = opened.enter_context(_quota())
        children = _started(opened, folder, lambda: None)
        limited = _started(opened, folder, limit)
        situations = {
            "alone": (children, 0),
            "beside one": (children, 1),
            "beside two": (children, 2),
            "quota": (limited, 0),
        }
        found = _measured(situations, arguments.rounds, arguments.epochs)
    print(f"{arguments.epochs} epochs on {N_CPUS} CPUs, {arguments.rounds} rounds; quota: {how}")
    _print_table(found)
    _print_ratios(found, children)
    comparisons = _compared(found, situations, arguments.epochs)
    print(table_of(comparisons))
    append_json(comparisons, arguments.json)


def _measured(
    situations: dict[str, tuple[dict[str, Child], int]], n_rounds: int, n_epochs: int
) -> dict[tuple[str, str], Timings]:
    found = {(name, setting): Timings() for name in situations for setting in SETTINGS}
    for _ in range(n_rounds):
        for name, (children, n_busy) in situations.items():
            with _busy(n_busy):
                for setting, child in children.items():
                    child.train(n_epochs, found[name, setting])
    return found


def _started(opened: ExitStack, folder: Path, set_up: Callable[[], None]) -> dict[str, Child]:
    """Start a process for each setting, and train one epoch with it to warm up."""
    children = {}
    for setting in SETTINGS:
        child = Child(folder, setting, set_up)
        opened.callback(child.end)
        child.train(1, Timings())
        children[setting] = child
    return children


@contextmanager
def _busy(n_processes: int) -> Iterator[None]:
    processes = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(n_processes)]
    try:
        yield
    finally:
        for process in processes:
            process.kill()
            process.wait()


@contextmanager
def _quota() -> Iterator[tuple[Callable[[], None], str]]:
    """Provide a function that limits the process that calls it to one CPU, and say how it does."""
    own = {
        controllers: path.strip("/")
        for _, controllers, path in (
            line.split(":", 2) for line in Path("/proc/self/cgroup").read_text().splitlines()
        )
    }
    for root, files in (
        (
            Path("/sys/fs/cgroup/cpu") / own.get("cpu", ""),
            {"cpu.cfs_period_us": f"{QUOTA_US}", "cpu.cfs_quota_us": f"{QUOTA_US}"},
        ),
        (Path("/sys/fs/cgroup") / own.get("", ""), {"cpu.max": f"{QUOTA_US} {QUOTA_US}"}),
    ):
        group = root / f"brats-busy-cpu-{os.getpid()}"
        try:
            group.mkdir()
            for name, value in files.items():
                (group / name).write_text(value)
        except OSError:
            with suppress(OSError):
                group.rmdir()
            continue
        try:
            yield partial(_join, group / "cgroup.procs"), "a control group"
        finally:
            with suppress(OSError):
                group.rmdir()
        return
    yield partial(os.sched_setaffinity, 0, sorted(os.sched_getaffinity(0))[:1]), "one CPU for all"


def _join(processes: Path) -> None:
    processes.write_text(str(os.getpid()))


def _print_table(found: dict[tuple[str, str], Timings]) -> None:
    print(
        f"{'situation':12} {'setting':11} {'seconds':>8} {'lowest':>7} {'highest':>8} {'CPU s':>7}"
    )
    for (name, setting), timings in found.items():
        print(
            f"{name:12} {setting:11} {timings.median:8.2f} {min(timings.seconds):7.2f} "
            f"{max(timings.seconds):8.2f} {statistics.median(timings.cpu):7.2f}"
        )


def _print_ratios(found: dict[tuple[str, str], Timings], children: dict[str, Child]) -> None:
    def ratio(one: tuple[str, str], other: tuple[str, str], start_s: float = 0.0) -> float:
        pairs = zip(found[one].seconds, found[other].seconds, strict=True)
        return statistics.median((a + start_s) / (b + start_s) for a, b in pairs)

    start_s = statistics.median(child.ready_s for child in children.values())
    now, before = ("alone", "now"), ("alone", "before")
    print(f"alone, now over before: {ratio(now, before):.2f}")
    print(
        f"the same with the {start_s:.1f} s until training begins: {ratio(now, before, start_s):.2f}"
    )
    for setting in SETTINGS:
        slower = ratio(("beside one", setting), ("alone", setting))
        print(f"beside one busy process over alone, {setting}: {slower:.2f}")
    for setting in SETTINGS:
        slower = ratio(("quota", setting), ("alone", "one thread"))
        print(f"quota of one CPU over one thread alone, {setting}: {slower:.2f}")


def _compared(
    found: dict[tuple[str, str], Timings], situations: Iterable[str], n_epochs: int
) -> list[Comparison]:
    """Compare the time of the clock of our choice with that of the other settings."""
    return [
        Comparison(
            task=f"{n_epochs} epochs of the demo, {situation}",
            ours=f"{found[situation, 'now'].median:.1f} s",
            peer=setting,
            theirs=f"{found[situation, key].median:.1f} s",
            ratios=ratios_of(found[situation, key].seconds, found[situation, "now"].seconds),
        )
        for situation in situations
        for key, setting in (("before", "GNU OpenMP as it is"), ("one thread", "one thread"))
    ]


def _prepare(folder: Path) -> None:
    write_phantom_cases(folder / "scans", n_cases=12, seed=0)
    _open(folder)


def _open(folder: Path) -> FoldData:
    config, prepared = load_config(preset="demo"), folder / "prepared"
    return open_fold(folder / "scans", fold=0, config=config, prepared_path=prepared)


def _serve(folder: Path) -> None:
    """Train a run for each number of epochs on stdin, and answer with its times."""
    data = _open(folder)
    print(json.dumps({}), flush=True)
    for line in sys.stdin:
        config = load_config(preset="demo", values={"training.n_epochs": int(line)})
        with tempfile.TemporaryDirectory(dir=folder) as run:
            trainer = Trainer(data=data, config=config, run_path=Path(run))
            started_s, cpu_s = time.monotonic(), time.process_time()
            trainer.run(track=untracked)
            times = {
                "seconds": time.monotonic() - started_s,
                "cpu": time.process_time() - cpu_s,
            }
        print(json.dumps(times), flush=True)


if __name__ == "__main__":
    main()
