"""How much memory a run takes."""

import sys

import torch

MEGABYTE = 2**20


def reset_peak_memory(device: torch.device) -> None:
    """Start measuring anew, where the device can; the peak of a process only rises."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the most memory taken so far: on the GPU, or by this process on the CPU."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / MEGABYTE
    if sys.platform == "win32":
        return float("nan")
    import resource

    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kilobytes on Linux, bytes on macOS
    return peak / MEGABYTE if sys.platform == "darwin" else peak / 1024
