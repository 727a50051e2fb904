"""How much memory a run takes."""

# DOC training/room: How much memory there is: sizes as people write them, and what is free at the moment.

import ctypes
import gc
import re
import sys
from collections.abc import Iterator
from pathlib import Path

import torch

from brats_seg.errors import EnvironmentalError, UsageError

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


_UNITS = {
    "b": 1,
    "kb": 1e3,
    "mb": 1e6,
    "gb": 1e9,
    "tb": 1e12,
    "kib": 2**10,
    "mib": 2**20,
    "gib": 2**30,
    "tib": 2**40,
}
_CGROUPS = Path("/sys/fs/cgroup")
_UNLIMITED = 2**60
"""Bytes; version 1 of cgroups writes a number near 2^63 where there is no limit."""


def parse_memory(text: str) -> int:
    """Turn `15GiB`, `15 GB` or `900MB` into bytes; raises `UsageError` for anything else."""
    parts = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([a-z]+)\s*", text, re.IGNORECASE)
    unit = _UNITS.get(parts[2].lower()) if parts else None
    if parts is None or unit is None or float(parts[1]) == 0:
        msg = f"memory {text!r} is not a size; expected for example 15GiB, 15GB or 900MB"
        raise UsageError(msg)
    return int(float(parts[1]) * unit)


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take on a device.

    On the CPU that is the least of what the machine has, what its cgroups (of a container, or of a
    SLURM job) allow, and what `ulimit -v` leaves. Raises `EnvironmentalError` where the system does
    not tell.
    """
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return min(_free_on_host())


def read_numbers(path: Path) -> dict[str, int]:
    """Return the numbers of a file of lines `name number` or `name: number kB`."""
    rows = (line.replace(":", " ").split() for line in path.read_text().splitlines())
    return {row[0]: int(row[1]) for row in rows if len(row) > 1 and row[1].isdigit()}


def _free_on_host() -> Iterator[int]:
    if sys.platform != "linux":
        yield _free_elsewhere()
        return
    memory = read_numbers(Path("/proc/meminfo"))
    yield memory["MemAvailable"] * 1024
    yield from _free_in_cgroups()
    import resource

    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit - read_numbers(Path("/proc/self/status"))["VmSize"] * 1024


def _free_elsewhere() -> int:
    """Macs do not tell what is free without a tool: half of what is built in."""
    import os

    if sys.platform == "win32":
        msg = "Windows is not asked for its free memory; give a size, for example 15GiB"
        raise EnvironmentalError(msg)
    return os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") // 2


def _free_in_cgroups() -> Iterator[int]:
    """Yield what every group around this process has left, in either version of cgroups."""
    for line in Path("/proc/self/cgroup").read_text().splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers == "":
            root, limit, used = _CGROUPS, "memory.max", "memory.current"
        elif "memory" in controllers.split(","):
            root = _CGROUPS / "memory"
            limit, used = "memory.limit_in_bytes", "memory.usage_in_bytes"
        else:
            continue
        group = root / path.strip("/")
        # in a container the path may be that of the host, which is not to be seen from here
        for folder in (group, *group.parents):
            if folder.is_relative_to(root) and (folder / limit).is_file():
                yield from _free_in_cgroup(folder, limit, used)


def _free_in_cgroup(folder: Path, limit: str, used: str) -> Iterator[int]:
    allowed = (folder / limit).read_text().strip()
    if allowed == "max" or int(allowed) > _UNLIMITED:
        return
    # files that were read count as used, and go when memory is needed
    cached = read_numbers(folder / "memory.stat").get("inactive_file", 0)
    yield int(allowed) - int((folder / used).read_text()) + cached
