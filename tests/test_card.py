"""Test what a GPU computes without one; its kernels, speed and memory are not seen."""

import sys

import pytest

from tests.builders import ROOT, start


@pytest.mark.parametrize("which", ["not slow", pytest.param("slow", marks=pytest.mark.slow)])
def test_gpu_code_runs_on_a_simulated_gpu(which: str) -> None:
    """In a process of its own, because torch forgets no device that it was taught."""
    options = ["-q", "-p", "no:cacheprovider", "--durations=9", "-m", which]
    done = start([sys.executable, "-m", "pytest", *options, "tests/on_card.py"], ROOT)
    assert done.returncode == 0, done.stdout
