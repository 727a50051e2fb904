"""Test that every benchmark is listed, and that their results become one page."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.builders import ROOT, start

FOLDER = ROOT / "benchmarks"
MODULES = {"all", "comparison", "gpu_checks", "gpu_setting", "machine", "scorers"}
MODULES |= {"monai_patches", "nnunet_patches"}
"""Files that are no benchmarks."""
FAKE = """
from comparison import Comparison, append_json, options_of
found = Comparison(task="read", ours="2 ms", peer="other 1.0", theirs="5 ms", ratios=(2.0, 2.5, 4.0),
                   least={least})
append_json([found], options_of("").json)
{end}
"""


@pytest.fixture
def benchmarks(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("all")


def test_every_benchmark_is_listed(benchmarks: ModuleType) -> None:
    listed = [program.name for program in benchmarks.PROGRAMS] + list(benchmarks.NOT_COMPARED)
    assert sorted(listed) == sorted({path.stem for path in FOLDER.glob("*.py")} - MODULES)


def test_a_comparison_becomes_a_row_with_its_goal(benchmarks, tmp_path, monkeypatch):
    monkeypatch.setattr(benchmarks, "FOLDER", tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setattr(benchmarks, "matrix_product_rate", lambda dtype: 1e9)
    program, pages = benchmarks.Program(name="fake", title="A title"), []
    for least, end in ((2.0, ""), (3.0, "raise SystemExit(3)")):
        (tmp_path / "fake.py").write_text(FAKE.format(least=least, end=end))
        pages.append(benchmarks.page_of([benchmarks.run_program(program, limit_s=500)]))
    met, missed = pages
    assert "| read | 2 ms | other 1.0 | 5 ms | 2.50x | 2.00 to 4.00 | 2.00x, met |  |" in met
    assert "1 of 1 goals are met" in met
    assert "## A title" in met
    assert "| 3.00x, **not met** |" in missed
    assert "0 of 1 goals are met" in missed
    assert "**It failed with exit code 3.**" in missed


@pytest.mark.slow
def test_every_part_of_the_benchmark_of_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    program = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--tiny"]
    done = start([*program, "--json", found], tmp_path)
    assert done.returncode == 0, done.stderr
    # fewer where the CPU computes no half precision natively
    assert len(found.read_text().splitlines()) in {13, 17}


def test_programs_to_compare_with_are_pinned_as_the_tested_versions() -> None:
    tested, pinned = (
        dict(line.split("==") for line in (ROOT / name).read_text().splitlines() if "==" in line)
        for name in ("constraints.txt", "benchmarks/peers.txt")
    )
    assert {name: tested[name] for name in tested.keys() & pinned.keys()}.items() <= pinned.items()
