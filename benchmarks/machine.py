"""Describe the machine and the packages that a benchmark runs with."""

from importlib.metadata import PackageNotFoundError, version
from time import process_time

import torch


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
