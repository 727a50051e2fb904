"""Test the measurement of memory, and the recognition of out-of-memory errors."""

import resource
import subprocess
import sys

import pytest
import torch

from brats_seg.errors import UsageError
from brats_seg.runtime import memory

CPU = torch.device("cpu")


def test_out_of_memory_errors_are_recognised() -> None:
    # what the CPU raises, for a size that is larger than any machine has
    with pytest.raises(RuntimeError) as refused:
        torch.empty(2**60, dtype=torch.uint8)
    for error in (
        *(refused.value, MemoryError()),
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB"),
        RuntimeError("MPS backend out of memory (MPS allocated: 9 GB)"),
        RuntimeError("could not create a primitive"),
        RuntimeError("cuDNN error: CUDNN_STATUS_INTERNAL_ERROR_DEVICE_ALLOCATION_FAILED"),
        RuntimeError("CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`"),
    ):
        assert memory.is_out_of_memory(error), error
    for other in (RuntimeError("mat1 and mat2 shapes differ"), ValueError("out of memory")):
        assert not memory.is_out_of_memory(other)


SIZES = {
    "15GiB": 15 * 2**30,
    "15GB": 15_000_000_000,
    "900MB": 900_000_000,
    "1.5 gib": 3 * 2**29,
    " 2kB ": 2000,
    "7B": 7,
}


def test_sizes_are_read_and_others_refused() -> None:
    assert {text: memory.parse_memory(text) for text in SIZES} == SIZES
    for text in ("15", "GiB", "-1GiB", "15 parsecs", "0GiB", "1e3MB", "", "15G"):
        with pytest.raises(UsageError, match="is not a size; expected for example 15GiB"):
            memory.parse_memory(text)


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_limit_on_the_process_counts() -> None:
    program = (
        "import torch; from brats_seg.runtime.memory import free_memory; "
        "print(free_memory(torch.device('cpu')))"
    )
    limit = 40 * 2**30
    free = subprocess.check_output(
        [sys.executable, "-c", program],
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_AS, (limit, limit)),
    )
    assert 0 < int(free) < limit
    assert 2**20 < memory.free_memory(CPU) <= memory.total_memory(CPU) < 2**50
    assert 10 < memory.peak_memory_mb(CPU) < 1e6


VERSIONS = ("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes")


# version 1 has a name of its own for what groups inside hold as well, and a sandbox may have no such file
CACHED = {"inactive_file 300": 600, "inactive_file 5\ntotal_inactive_file 300": 600, "": 300}


@pytest.mark.parametrize("names", VERSIONS)
@pytest.mark.parametrize(("cached", "free"), CACHED.items())
def test_a_limit_on_the_group_counts(tmp_path, monkeypatch, names, cached, free):
    monkeypatch.setattr("brats_seg.runtime.memory.control_groups", lambda _: [tmp_path])
    (tmp_path / names[1]).write_text("700\n")
    if cached:
        (tmp_path / "memory.stat").write_text(f"anon 400\n{cached}\n")
    for no_limit in ("max", str(2**63)):
        (tmp_path / names[0]).write_text(no_limit)
        assert min(memory.free_memory(CPU), memory.total_memory(CPU)) > 2**20
    (tmp_path / names[0]).write_text("1000\n")
    assert (memory.total_memory(CPU), memory.free_memory(CPU)) == (1000, free)


FAULTS = """
import resource, torch
from brats_seg.runtime.memory import keep_freed_memory
faults = []
for kept in (False, True):
    if kept:
        keep_freed_memory()
    for n in range(40):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        torch.ones(2**24)
    faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
print(*faults)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="an option of glibc")
def test_memory_that_is_kept_is_not_cleared_again() -> None:
    """Each page of a tensor of 64 MB is a page fault, unless its memory is that of the last one."""
    shown = subprocess.check_output([sys.executable, "-c", FAULTS])
    cleared, kept = map(int, shown.split())
    # huge pages of 2 MB are 32 faults each time
    assert 10 * kept < cleared
