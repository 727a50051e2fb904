"""Test that every benchmark is listed, and that their results become one page."""

import importlib
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.builders import ROOT, start

FOLDER = ROOT / "benchmarks"
MODULES = {
    "all",
    "comparison",
    "gpu_checks",
    "gpu_setting",
    "machine",
    "monai_patches",
    "nnunet_patches",
    "scorers",
}
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
    """The program that runs all benchmarks, which imports its neighbours as programs do."""
    monkeypatch.syspath_prepend(FOLDER)
    return importlib.import_module("all")


def test_every_benchmark_is_listed(benchmarks: ModuleType) -> None:
    listed = [program.name for program in benchmarks.PROGRAMS] + list(benchmarks.NOT_COMPARED)
    assert sorted(listed) == sorted({path.stem for path in FOLDER.glob("*.py")} - MODULES)


def page(
    benchmarks: ModuleType,
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    *,
    least: float = 2.0,
    end: str = "",
) -> str:
    (folder / "fake.py").write_text(FAKE.format(least=least, end=end))
    monkeypatch.setattr(benchmarks, "FOLDER", folder)
    monkeypatch.setenv("PYTHONPATH", str(FOLDER))
    monkeypatch.setattr(benchmarks, "matrix_product_rate", lambda dtype: 1e9)
    program = benchmarks.Program(name="fake", title="A title")
    text: str = benchmarks.page_of([benchmarks.run_program(program, limit_s=60)])
    return text


def test_a_comparison_becomes_a_row_with_its_goal(benchmarks, tmp_path, monkeypatch):
    text = page(benchmarks, tmp_path, monkeypatch)
    assert "| read | 2 ms | other 1.0 | 5 ms | 2.50x | 2.00 to 4.00 | 2.00x, met |  |" in text
    assert "1 of 1 goals are met" in text
    assert "## A title" in text


def test_a_goal_that_is_missed_and_a_benchmark_that_fails_are_named(
    benchmarks: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = page(benchmarks, tmp_path, monkeypatch, least=3.0, end="raise SystemExit(3)")
    assert "| 3.00x, **not met** |" in text
    assert "0 of 1 goals are met" in text
    assert "**It failed with exit code 3.**" in text


def test_each_kind_of_cpu_keeps_its_page(
    benchmarks: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    pages = ""
    for flags, number in (
        ({"avx2": True, "amx_bf16": True}, 1),
        ({"avx2": True}, 2),
        ({"avx2": 1}, 3),
    ):
        monkeypatch.setattr(benchmarks.torch.cpu, "get_capabilities", lambda flags=flags: flags)
        pages = benchmarks.with_page(
            f"# On {benchmarks.kind_of_cpu()}\n\n## Step\n{number}\n", pages
        )

    assert pages == "# On AMX\n\n## Step\n1\n\n# On AVX2\n\n## Step\n3\n"


@pytest.mark.slow
def test_every_part_of_the_benchmark_of_gpus_runs_on_the_cpu(tmp_path: Path) -> None:
    found = tmp_path / "found.json"
    program = [sys.executable, str(FOLDER / "gpu.py"), "--device", "cpu", "--tiny"]
    done = start([*program, "--json", found], tmp_path)
    assert done.returncode == 0, done.stderr
    # fewer where the CPU computes no half precision natively
    assert len(found.read_text().splitlines()) in {13, 17}
