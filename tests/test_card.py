"""Test what a GPU computes without one; its kernels, speed and memory are not seen."""

from pathlib import Path

import pytest

from tests.builders import ROOT, call_in_fork


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_gpu_code_runs_on_a_simulated_gpu(tmp_path: Path, which: str) -> None:
    """In a process of its own, because torch forgets no device that it was taught."""
    # by default pytest removes the folders of earlier runs, which takes as long as the tests
    options = ["-q", "-p", "no:cacheprovider", "-m", which, f"--basetemp={tmp_path / 'own'}"]
    done = call_in_fork(pytest.main, [*options, f"{ROOT}/tests/on_card.py"])
    assert done.code == 0, done.out
