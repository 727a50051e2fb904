"""How much memory a run takes."""

import ctypes
import gc
import sys

import torch

MEGABYTE = 2**20
_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES = -3, 2**16
"""Number of the option in glibc, and what it is set to."""


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


def give_back_memory(device: torch.device) -> None:
    """Return to the system, or to the device, what is no longer used but still held."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    elif sys.platform == "linux":
        # the C library keeps what was freed in pieces; musl, say, has no such call
        trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
        if trim is not None:
            trim(0)


def keep_to_limit_of_address_space() -> None:
    """Have every tensor give its addresses back, if a limit is set on them (`ulimit -v`).

    The heap of glibc keeps the addresses of what was freed below something that lives. Mapping each
    tensor by itself is slower, so it is done under such a limit only.
    """
    if sys.platform != "linux":
        return
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    set_option = getattr(ctypes.CDLL(None), "mallopt", None)
    if limit != resource.RLIM_INFINITY and set_option is not None:
        set_option(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)


def is_out_of_memory(error: BaseException) -> bool:
    """Tell whether an error means that memory ran out, on a GPU or in this machine."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the allocators of CPU and Mac have no class of their own, and oneDNN names no reason
    signs = ("out of memory", "DefaultCPUAllocator", "could not create a primitive")
    return isinstance(error, RuntimeError) and any(sign in str(error) for sign in signs)
