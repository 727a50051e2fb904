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


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on a GPU or in this machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the allocators of CPU and Mac have no class of their own
    signs = ("out of memory", "DefaultCPUAllocator")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
