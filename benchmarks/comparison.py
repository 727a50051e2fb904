"""Measure programs in turn, and describe the result in one form that all benchmarks share.

Costs are measured in rounds, A B A B, and compared within a round, because machines are shared and
their speed drifts. A ratio is the cost of the other program divided by ours: above 1, ours is less.
"""

import argparse
import json
import resource
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from types import MappingProxyType
from typing import Any

NO_GOALS: Mapping[str, float] = MappingProxyType({})


@dataclass(frozen=True, kw_only=True, slots=True)
class Comparison:
    """What a task costs us and another program, measured in turn in one run."""

    task: str
    """The task, in the words of a table, such as `read the four volumes of a case`."""
    ours: str
    """What it cost us, with its unit: the median over rounds, such as `26 ms`."""
    peer: str
    """The other program with its version and setting, such as `nibabel 5.4.2`."""
    theirs: str
    """What it cost the other program, with its unit."""
    ratios: tuple[float, ...]
    """Cost of the other program over ours, one for each round."""
    least: float | None = None
    """Goal: smallest median ratio; None where there is none."""
    agreement: str = ""
    """How far the results of both agree, such as `largest difference 0`."""

    @property
    def ratio(self) -> float:
        """Median over rounds."""
        return statistics.median(self.ratios)

    @property
    def is_met(self) -> bool | None:
        """Whether the goal is met; None without one."""
        return None if self.least is None else self.ratio >= self.least


def cpu_seconds() -> float:
    """Return the CPU time of this process and of those that it has started and that have ended."""
    both = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(usage.ru_utime + usage.ru_stime for usage in both)


def seconds_in_turn(
    ways: Mapping[str, Callable[[], object]],
    n_rounds: int,
    *,
    n_warm_ups: int = 1,
    clock: Callable[[], float] = cpu_seconds,
) -> dict[str, list[float]]:
    """Return the seconds of each way in each round, of the CPU by default; they are run in turn."""
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for round_number in range(-n_warm_ups, n_rounds):
        for name, run in ways.items():
            started_s = clock()
            run()
            spent_s = clock() - started_s
            if round_number >= 0:
                seconds[name].append(spent_s)
    return seconds


def ratios_of(theirs: Iterable[float], ours: Iterable[float]) -> tuple[float, ...]:
    """Return the cost of the other program over ours, round by round."""
    return tuple(a / b for a, b in zip(theirs, ours, strict=True))


def compare_with_first(
    task: str,
    seconds: Mapping[str, Sequence[float]],
    goals: Mapping[str, float] = NO_GOALS,
    agreement: Callable[[str], str] = lambda peer: "",
) -> list[Comparison]:
    """Compare the first way, which is ours, with all others, by the seconds of each in each round."""
    ours, *peers = seconds
    return [
        Comparison(
            task=task,
            ours=median_time(seconds[ours]),
            peer=peer,
            theirs=median_time(seconds[peer]),
            ratios=ratios_of(seconds[peer], seconds[ours]),
            least=goals.get(peer),
            agreement=agreement(peer),
        )
        for peer in peers
    ]


def median_time(seconds: Sequence[float]) -> str:
    """Return the median of times with its unit."""
    median_s = statistics.median(seconds)
    if median_s >= 1:
        return f"{median_s:.2f} s"
    return f"{1e3 * median_s:.{1 if median_s < 0.1 else 0}f} ms"


def table_of(comparisons: Iterable[Comparison]) -> str:
    """Return a Markdown table with a row for each comparison."""
    head = ("task", "ours", "the other program", "theirs", "ratio", "range", "goal", "agreement")
    rows = [head, ("---",) * len(head), *map(_cells, comparisons)]
    return "\n".join(f"| {' | '.join(row)} |" for row in rows)


def _cells(found: Comparison) -> tuple[str, ...]:
    goal = "" if found.least is None else f"{_number(found.least)}x"
    if found.is_met is not None:
        goal += ", met" if found.is_met else ", **not met**"
    low, high = min(found.ratios), max(found.ratios)
    return (
        found.task,
        found.ours,
        found.peer,
        found.theirs,
        f"{_number(found.ratio)}x",
        f"{_number(low)} to {_number(high)}" if len(found.ratios) > 1 else "",
        goal,
        found.agreement,
    )


def _number(value: float) -> str:
    """Return a ratio with three digits or two decimals."""
    return f"{value:.0f}" if value >= 100 else f"{value:.2f}"


def options_of(description: str, **defaults: Any) -> argparse.Namespace:
    """Parse `--json`, the file to append the comparisons to, and options with those defaults.

    A type in place of a default makes an option that may be missing; False a flag; a list or a tuple
    an option of several values, of a tuple as many as it has.
    """
    parser = argparse.ArgumentParser(description=description.partition("\n")[0])
    for name, default in {**defaults, "json": Path}.items():
        flag, many = f"--{name.replace('_', '-')}", isinstance(default, (list, tuple))
        if default is False:
            parser.add_argument(flag, action="store_true")
        elif isinstance(default, type):
            parser.add_argument(flag, type=default)
        else:
            n = (len(default) if isinstance(default, tuple) else "+") if many else None
            kind = type(default[0] if many else default)
            parser.add_argument(
                flag, type=kind, nargs=n, default=default, help="default: %(default)s"
            )
    return parser.parse_args()


def in_a_process(function: Callable[..., Any], *arguments: object) -> Any:
    """Return the result of a function in a new process, which has a peak of memory of its own."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as pool:
        return pool.submit(function, *arguments).result()


def report(comparisons: Sequence[Comparison], path: Path | None) -> None:
    """Print the table of comparisons, and append them to the file of `--json`."""
    print(table_of(comparisons), flush=True)
    append_json(comparisons, path)


def append_json(comparisons: Iterable[Comparison], path: Path | None) -> None:
    """Append comparisons to the file of `--json`, if it was given."""
    if path is not None:
        with path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(asdict(found)) + "\n" for found in comparisons)


def read_json(path: Path) -> list[Comparison]:
    """Read the comparisons that benchmarks appended to a file."""
    lines = path.read_text(encoding="utf-8").splitlines()
    return [
        Comparison(**{**values, "ratios": tuple(values["ratios"])})
        for values in map(json.loads, lines)
    ]
