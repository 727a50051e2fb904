"""Describe the machine and the packages that a benchmark runs with."""

import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from time import process_time

import torch

from brats_seg.cpu_threads import available_cpus
from brats_seg.runtime.memory import total_memory

CPU_INFO = Path("/proc/cpuinfo")


def machine_name() -> str:
    """Return processor, cores and memory, and the GPU if torch sees one; no name of the computer."""
    gib = total_memory(torch.device("cpu")) / 2**30
    words = [_processor(), f"{available_cpus()} cores", f"{gib:.0f} GiB of memory"]
    if torch.cuda.is_available():
        gpu = torch.cuda.get_device_properties(0)
        words.append(f"{gpu.name}, {gpu.total_memory / 2**30:.0f} GiB")
    return ", ".join(words)


def _processor() -> str:
    if CPU_INFO.exists():
        for line in CPU_INFO.read_text().splitlines():
            name, _, value = line.partition(":")
            if name.strip() == "model name":
                return value.strip()
    return platform.processor() or platform.machine()


def matrix_product_rate(dtype: torch.dtype = torch.float32, n: int = 2048) -> float:
    """Return floating-point operations per second of CPU time, in a product of large matrices."""
    a, b = torch.randn(2, n, n).to(dtype)
    rates = []
    for _ in range(7):
        start = process_time()
        a @ b
        rates.append(2 * n**3 / (process_time() - start))
    return max(rates)


def version_of(package: str) -> str:
    """Return the version of a package, or that it is not installed."""
    try:
        return version(package)
    except PackageNotFoundError:
        return "not installed"
