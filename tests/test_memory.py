"""How much memory is taken, and how it is told that there is none left."""

import pytest
import torch

from brats_seg.runtime.memory import is_out_of_memory, peak_memory_mb


@pytest.mark.parametrize(
    ("error", "expected"),
    [
        (torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"), True),
        (RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"), True),
        (MemoryError(), True),
        (RuntimeError("mat1 and mat2 shapes cannot be multiplied"), False),
        (ValueError("out of memory"), False),
    ],
)
def test_the_lack_of_memory_is_told_from_other_errors(error: Exception, expected: bool) -> None:
    assert is_out_of_memory(error) is expected


def test_what_the_cpu_raises_is_recognised() -> None:
    """More than any machine has: the allocator refuses at once."""
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)

    assert is_out_of_memory(refused.value)


def test_this_process_takes_some_memory() -> None:
    assert 10 < peak_memory_mb(torch.device("cpu")) < 1e6
