"""Run the benchmarks that compare brats_seg with other programs, and write their results to a page.

Each program runs in a process of its own, with one thread unless it measures several, and its
comparisons become a section of RESULTS.md. Goals stand in the programs, beside what they measure.
All of it takes half an hour or more on two cores.

    python benchmarks/all.py                      every program; writes benchmarks/RESULTS.md
    python benchmarks/all.py step patches         these alone; their tables are printed

`make bench` first installs the other programs (peers.txt). Programs that are missing are left out by
each benchmark with a line that says so.
"""

import argparse
import os
import platform
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path

import torch
from comparison import Comparison, read_json, table_of
from machine import machine_name, matrix_product_rate, version_of

from brats_seg.runtime.device import native_dtype

FOLDER = Path(__file__).parent
RESULTS = FOLDER / "RESULTS.md"
LIMIT_S = 1800.0
"""Seconds after which a program is ended. On two cores with AVX2 the longest takes two thirds of them."""
ONE_THREAD = {
    "OMP_NUM_THREADS": "1",
    "OMP_WAIT_POLICY": "PASSIVE",
    "BLOSC_NTHREADS": "1",
    "ITK_GLOBAL_DEFAULT_NUMBER_OF_THREADS": "1",
}
"""Variables by which the programs that are compared compute with one thread."""
KINDS = {
    "amx_bf16": "AMX",
    "avx512_bf16": "AVX-512 with bf16",
    "avx512_f": "AVX-512",
    "avx2": "AVX2",
}
"""Kinds of processors by what torch reports of them, the fastest first; each has a page of its own."""
PACKAGES = (
    *("torch", "monai", "nnunetv2", "dynamic-network-architectures", "batchgeneratorsv2"),
    *("mist-medical", "brats-evaluation", "panoptica", "nibabel", "SimpleITK", "deflate"),
    *("numpy", "scipy"),
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """A benchmark that runs without anything but the repository."""

    name: str
    """Its file, without `.py`."""
    title: str
    """Heading of its section."""
    arguments: tuple[str, ...] = ()
    by_hand: str = ""
    """Why it runs only if it is named; empty if it is one of those that always run."""


PROGRAMS = (
    Program(name="patches", title="Training patches"),
    Program(name="step", title="Training step"),
    Program(name="step_memory", title="Memory of a training step", arguments=("--patch", "64")),
    Program(name="accumulation_cost", title="Effective batches"),
    Program(name="predict_case", title="Predicting a case"),
    Program(name="cases", title="Reading, preparing, scoring and writing cases"),
    Program(name="scale", title="From ten cases to thousands"),
    Program(name="start", title="Start"),
    Program(name="gpu", title="On a GPU", by_hand="it needs a GPU"),
)
NOT_COMPARED = {
    "accumulation_error": "compares weights with those of Lightning, Accelerate and MONAI, not costs",
    "brain_template": "makes the template of phantoms",
    "learning": "trains for hours on real cases",
    "predicted_dice": "needs trained networks and their held-out cases",
    "starter": "teaches the network of the package for hours, and judges it on real cases",
    "scores": "draws the case of docs/scores.md, and compares protocols with each other",
    "scan_check": "needs real cases, and compares with no other program",
}
"""Benchmarks that only print a table of their own, each with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a program has measured."""

    program: Program
    comparisons: tuple[Comparison, ...]
    seconds: float
    failure: str = ""
    """Why it did not end well; empty if it did."""


def main() -> None:
    """Run the programs and write the page; exit with 1 if one of them fails."""
    arguments = _arguments()
    names = arguments.names or [p.name for p in PROGRAMS if not p.by_hand]
    chosen = [program for program in PROGRAMS if program.name in names]
    outcomes = [run_program(program, arguments.limit) for program in chosen]
    page = page_of(outcomes)
    if arguments.output is None and arguments.names:
        print(page)
    else:
        output = arguments.output or RESULTS
        before = output.read_text(encoding="utf-8") if output.exists() else ""
        output.write_text(with_page(page, before), encoding="utf-8")
        print(f"results: {output}")
    sys.exit(any(outcome.failure for outcome in outcomes))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("names", nargs="*", metavar="PROGRAM", help="these alone, such as `step`")
    parser.add_argument("--output", type=Path, help=f"page to write, by default {RESULTS.name}")
    parser.add_argument("--limit", type=float, default=LIMIT_S, help="seconds for each program")
    arguments = parser.parse_args()
    names = [program.name for program in PROGRAMS]
    if unknown := sorted(set(arguments.names) - set(names)):
        parser.error(f"there is no {', '.join(unknown)}; expected some of {', '.join(names)}")
    return arguments


def run_program(program: Program, limit_s: float) -> Outcome:
    """Run a benchmark, and return its comparisons, also those from before it failed."""
    print(f"== {program.name}", flush=True)
    started_s = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        found = Path(folder) / "comparisons.json"
        command = [sys.executable, str(FOLDER / f"{program.name}.py"), *program.arguments]
        failure = _failure([*command, "--json", str(found)], limit_s)
        comparisons = tuple(read_json(found)) if found.exists() else ()
    if failure:
        print(f"{program.name} {failure}", flush=True)
    seconds = time.monotonic() - started_s
    return Outcome(program=program, comparisons=comparisons, seconds=seconds, failure=failure)


def _failure(command: Sequence[str], limit_s: float) -> str:
    """Run a command with one thread, and say how it failed; nothing if it did not."""
    try:
        done = subprocess.run(
            command, env={**os.environ, **ONE_THREAD}, timeout=limit_s, check=False
        )
    except subprocess.TimeoutExpired:
        return f"was ended after {limit_s:.0f} s"
    return f"failed with exit code {done.returncode}" if done.returncode else ""


def page_of(outcomes: Sequence[Outcome]) -> str:
    """Return the page of results, in Markdown."""
    return "\n".join(
        [
            f"# Results of the benchmarks on a CPU with {kind_of_cpu()}",
            "",
            f"Written by `make bench` on {datetime.now(UTC):%Y-%m-%d}. [NOTES.md](NOTES.md) says why rows "
            "fall short, and what was tried.",
            "",
            *_machine_lines(),
            "",
            "Costs were measured in turn, in rounds. The ratio is the cost of the other "
            "program divided by ours in the same round (median and range over rounds): above 1, ours is "
            "less.",
            "",
            _count_of_goals(outcomes),
            *(line for outcome in outcomes for line in _section(outcome)),
            "",
            "## Run by hand",
            "",
            *(f"- `{p.name}.py`: {p.by_hand}." for p in PROGRAMS if p.by_hand),
            *(f"- `{name}.py` {reason}." for name, reason in NOT_COMPARED.items()),
            "",
        ]
    )


def kind_of_cpu() -> str:
    """Return the widest instructions of the processor that torch finds."""
    found = torch.cpu.get_capabilities()
    return next((kind for flag, kind in KINDS.items() if found.get(flag)), platform.machine())


def with_page(page: str, before: str) -> str:
    """Return the pages of all kinds of CPU, with that of this kind replaced or added."""
    pages = [text.rstrip() for text in re.split(r"^(?=# )", before, flags=re.MULTILINE) if text]
    by_title = {text.partition("\n")[0]: text for text in (*pages, page.rstrip())}
    return "\n\n".join(by_title.values()) + "\n"


def _machine_lines() -> Iterator[str]:
    # without instructions for bf16 its product takes minutes
    dtypes = {"fp32": torch.float32, "bf16": native_dtype(torch.device("cpu"))}
    rates = {name: matrix_product_rate(dtype) / 1e9 for name, dtype in dtypes.items() if dtype}
    shown = " and ".join(f"{rate:.0f} GFLOP/s in {name}" for name, rate in rates.items())
    yield f"- Machine: {machine_name()}; {platform.system()}; a matrix product on one thread: {shown}."
    found = ", ".join(f"{package} {version_of(package)}" for package in PACKAGES)
    yield f"- Cases: {'real ones' if os.environ.get('BRATS_REAL_DATA') else 'phantoms'}."
    yield f"- Versions: Python {platform.python_version()}, {found}."


def _count_of_goals(outcomes: Sequence[Outcome]) -> str:
    met = [found.is_met for outcome in outcomes for found in outcome.comparisons]
    n_goals = len(met) - met.count(None)
    return f"{met.count(True)} of {n_goals} goals are met; {len(met)} comparisons in all."


def _section(outcome: Outcome) -> Iterator[str]:
    program = outcome.program
    words = " ".join([f"benchmarks/{program.name}.py", *program.arguments])
    yield from ("", f"## {program.title}", "", f"`{words}`, {outcome.seconds:.0f} s")
    if outcome.failure:
        yield from ("", f"**It {outcome.failure}.**")
    if outcome.comparisons:
        yield from ("", table_of(outcome.comparisons))


if __name__ == "__main__":
    main()
