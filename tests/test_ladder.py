"""When memory runs out: one step down at a time, said aloud, and an end."""

import logging

import pytest
import torch

from brats_seg.errors import CaseError
from brats_seg.inference.predict import PredictionFallback, PredictionMode
from brats_seg.runtime.device import Device
from tests.inference_builders import CPU

GPU = Device(torch_device=torch.device("meta"))
"""Any device that is not the CPU: the fallback itself does not compute."""


def runs_out_until(n_halvings: int, *, on_cpu: bool = False):
    tried: list[PredictionMode] = []

    def work(mode: PredictionMode) -> int:
        tried.append(mode)
        if mode.n_halvings < n_halvings or (on_cpu and mode.device.torch_device.type != "cpu"):
            raise torch.OutOfMemoryError("GPU memory is full\nand so on")
        return len(tried)

    return work, tried


def test_with_enough_memory_nothing_changes() -> None:
    fallback = PredictionFallback("a", CPU)

    assert fallback.run(lambda mode: mode.n_halvings) == 0
    assert fallback.warnings == ()


def test_a_gpu_gives_way_step_by_step_to_the_cpu(caplog: pytest.LogCaptureFixture) -> None:
    work, tried = runs_out_until(1, on_cpu=True)
    fallback = PredictionFallback("a", GPU)

    with caplog.at_level(logging.WARNING):
        assert fallback.run(work) == 5

    steps = [(r.device.torch_device.type, r.stitch_on_host, r.n_halvings) for r in tried]
    assert steps == [
        ("meta", False, 0),
        ("meta", True, 0),
        ("meta", True, 1),
        ("meta", True, 2),
        ("cpu", True, 1),
    ]
    assert fallback.warnings == (
        "memory ran out: computed on cpu with windows of 1/2 along each axis",
    )
    assert (
        "case a: memory ran out; computing it again on meta with the sum of the windows"
        in caplog.text
    )


def test_the_next_part_of_the_case_starts_where_the_last_one_ended() -> None:
    work, tried = runs_out_until(1)
    fallback = PredictionFallback("a", CPU)
    fallback.run(work)
    tried.clear()

    fallback.run(work)

    assert [mode.n_halvings for mode in tried] == [1]


def test_the_next_case_starts_at_the_top() -> None:
    work, _ = runs_out_until(2)
    PredictionFallback("a", CPU).run(work)

    assert PredictionFallback("b", CPU).mode.n_halvings == 0


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate"),
        RuntimeError("[enforce fail at alloc_cpu.cpp:1] DefaultCPUAllocator: not enough memory"),
        RuntimeError("MPS backend out of memory"),
        MemoryError(),
    ],
)
def test_a_case_that_fits_nowhere_is_refused(error: Exception) -> None:
    def work(mode: PredictionMode) -> None:
        raise error

    with pytest.raises(CaseError, match=r"case a, .*no memory on cpu .* smaller windows with"):
        PredictionFallback("a", CPU).run(work)


def test_other_errors_are_not_taken_for_a_lack_of_memory() -> None:
    def work(mode: PredictionMode) -> None:
        raise RuntimeError("shapes do not match")

    with pytest.raises(RuntimeError, match="shapes do not match"):
        PredictionFallback("a", CPU).run(work)
