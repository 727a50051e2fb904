"""Measure peak and free memory of devices, and go on in another mode when it runs out."""

import ctypes
import gc
import logging
import os
import re
import resource
import sys
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any, Generic, TypeVar

import psutil
import torch

from brats_seg.cpu_threads import control_groups
from brats_seg.errors import UsageError

log = logging.getLogger(__name__)

Mode = TypeVar("Mode")
Result = TypeVar("Result")
MEGABYTE = 2**20
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _M_ARENA_MAX = -1, -3, -8
"""Numbers of options of glibc: free bytes at the end of the heap above which they are returned to the
system, bytes of a block from which it is mapped on its own, and the number of heaps."""
_MAPPED_FROM_BYTES = 2**16
"""Size of a block from which it is mapped on its own where address space is limited."""
_LARGEST_OPTION = 2**31 - 1
_N_KERNELS = 16
"""Kernels that oneDNN keeps where address space is limited, in place of 1024. It makes each of them once a
step then, in less than 1 % of the time (64^3, AVX2)."""
_LIMITS = (("memory.max", "memory.current"), ("memory.limit_in_bytes", "memory.usage_in_bytes"))
"""Files of a control group with its limit and its use, in version 2 and in version 1."""
_UNLIMITED = 2**60
"""Bytes above which a number means no limit; version 1 of cgroups writes one near 2^63."""


def gpu_module(device: torch.device) -> Any | None:
    """Return the module of torch for a GPU, such as `torch.cuda`; None where none measures memory."""
    return None if device.type in ("cpu", "meta", "mps") else torch.get_device_module(device)


def reset_peak_memory(device: torch.device) -> None:
    """Reset the peak memory of a GPU; that of a process cannot be reset."""
    if (gpu := gpu_module(device)) is not None:
        gpu.reset_peak_memory_stats(device)


def peak_memory_mb(device: torch.device) -> float:
    """Return the peak memory so far, in MiB: on the GPU, or of this process on the CPU."""
    if (gpu := gpu_module(device)) is not None:
        return float(gpu.max_memory_allocated(device)) / MEGABYTE
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    # kilobytes on Linux, bytes on macOS
    return peak / MEGABYTE if sys.platform == "darwin" else peak / 1024


def give_back_memory(device: torch.device) -> None:
    """Return memory that is no longer used, but still held by an allocator, to the system."""
    gc.collect()
    if (gpu := gpu_module(device)) is not None:
        gpu.empty_cache()
    elif (trim := _of_glibc("malloc_trim")) is not None:
        # small freed blocks are kept otherwise
        trim(0)


def keep_to_limit_of_address_space() -> None:
    """Release the address space of every tensor that is freed, if it is limited (`ulimit -v`).

    The heap of glibc keeps the addresses of freed blocks below one that is in use. Mapping each
    tensor separately is slower, so it is done only under such a limit. oneDNN keeps its kernels, also
    those of a mode that ran out of memory; it reads how many before it makes the first one.
    """
    if _is_address_space_limited():
        _set_malloc_option(_M_MMAP_THRESHOLD, _MAPPED_FROM_BYTES)
        os.environ.setdefault("ONEDNN_PRIMITIVE_CACHE_CAPACITY", str(_N_KERNELS))


def keep_freed_memory() -> None:
    """Keep the memory of freed tensors for the next ones, up to 2 GiB, instead of returning it.

    glibc maps each block of more than 32 MB anew, and the system clears its pages when they are first
    used. That was 17 % of the time of a network on a window of 96^3 and 24 % on 144x176x144 (one thread,
    bf16). Results do not change. Address space that is limited (`ulimit -v`) is not kept.
    """
    if not _is_address_space_limited():
        _set_malloc_option(_M_MMAP_THRESHOLD, _LARGEST_OPTION)
        _set_malloc_option(_M_TRIM_THRESHOLD, _LARGEST_OPTION)
        # other threads would have heaps of their own, of 64 MB at most
        _set_malloc_option(_M_ARENA_MAX, 1)


def _is_address_space_limited() -> bool:
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    return sys.platform == "linux" and limit != resource.RLIM_INFINITY


def _set_malloc_option(option: int, value: int) -> None:
    if (set_option := _of_glibc("mallopt")) is not None:
        set_option(option, value)


def _of_glibc(name: str) -> Callable[..., int] | None:
    """Return a function of glibc; None with another C library, such as musl, which lacks it."""
    return getattr(ctypes.CDLL(None), name, None) if sys.platform == "linux" else None


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory ran out, on a GPU or on the host."""
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    # the allocators of CPU and Mac, cuBLAS and cuDNN raise a RuntimeError; oneDNN does not give the reason
    signs = "out of memory|DefaultCPUAllocator|could not create a primitive|_ALLOC(ATION)?_FAILED"
    return isinstance(error, RuntimeError) and re.search(signs, str(error)) is not None


class Fallback(Generic[Mode]):
    """Out-of-memory fallback: repeat work in a mode that needs less memory when memory runs out.

    The mode is kept for the work that follows.

    Example:
        >>> fallback = Fallback(["large", "small"], torch.device("cpu"), MemoryError)
        >>> fallback.run(lambda mode: mode.upper())
        'LARGE'
    """

    def __init__(
        self,
        modes: Sequence[Mode],
        device: torch.device,
        exhausted: Callable[[str], Exception],
        *,
        what: str = "",
    ) -> None:
        """Start in the first mode.

        Args:
            modes: Modes of any kind, the one that needs most memory first; `str` of each names it.
            device: Device whose memory is given back before work is repeated.
            exhausted: Returns the error for the last mode, given a message that names all modes.
            what: What the work is for, which the lines of the log begin with, such as `case 1: `.
        """
        self.modes = tuple(modes)
        self.index = 0
        """Index of the mode in use."""
        self._device = device
        self._exhausted = exhausted
        self._what = what

    @property
    def mode(self) -> Mode:
        """The mode in use."""
        return self.modes[self.index]

    def run(self, work: Callable[[Mode], Result]) -> Result:
        """Return the result of work that is given the mode; if memory runs out, repeat it in the next."""
        while True:
            try:
                return work(self.mode)
            except (RuntimeError, MemoryError) as error:
                if not is_out_of_memory(error):
                    raise
                reason = str(error).partition("\n")[0]
            # outside the handler, which would keep the tensors of the work alive
            self._use_next_mode(reason)

    def _use_next_mode(self, reason: str) -> None:
        give_back_memory(self._device)
        if self.index + 1 == len(self.modes):
            tried = "; ".join(map(str, self.modes))
            peak = f"at a peak of {peak_memory_mb(self._device):.0f} MB"
            msg = f"memory ran out in every mode ({tried}), {peak}: {reason}"
            raise self._exhausted(msg)
        log.warning("%smemory ran out with %s: %s", self._what, self.mode, reason)
        self.index += 1
        log.warning("%scomputing it again, and what follows, with %s", self._what, self.mode)


def parse_memory(text: str) -> int:
    """Turn a size such as `15GiB`, `15 GB` or `900MB` into bytes.

    Example:
        >>> parse_memory("1.5 KiB")
        1536
    """
    size = re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([kmgt]?)(i?)b\s*", text.lower())
    if size is None or float(size[1]) == 0:
        msg = f"memory {text!r} is not a size; expected for example 15GiB, 15GB or 900MB"
        raise UsageError(msg)
    return int(float(size[1]) * (1024 if size[3] else 1000) ** "_kmgt".index(size[2] or "_"))


def free_memory(device: torch.device) -> int:
    """Return the bytes that this process may still take on a device.

    On the CPU that is the minimum of the memory that the machine has available, the limits of its
    cgroups (of a container, or of a SLURM job), which psutil does not read, and that of `ulimit -v`.
    """
    if (gpu := gpu_module(device)) is not None:
        free: int = gpu.mem_get_info(device)[0]
        return free + int(gpu.memory_reserved(device) - gpu.memory_allocated(device))
    return min(free for _, free in _host_limits())


def total_memory(device: torch.device) -> int:
    """Return the bytes that a device has, whoever uses them now.

    On the CPU that is the minimum of the memory of the machine and the limits of this process.
    """
    if (gpu := gpu_module(device)) is not None:
        return int(gpu.get_device_properties(device).total_memory)
    return min(total for total, _ in _host_limits())


def _host_limits() -> Iterator[tuple[int, int]]:
    """Yield the bytes of the machine and of each limit of this process, and those that are free."""
    memory = psutil.virtual_memory()
    yield memory.total, memory.available
    limit, _ = resource.getrlimit(resource.RLIMIT_AS)
    if limit != resource.RLIM_INFINITY:
        yield limit, limit - psutil.Process().memory_info().vms
    # every group around this process, in either version of cgroups
    for folder, (limit_name, used_name) in product(control_groups("memory"), _LIMITS):
        path = folder / limit_name
        allowed = path.read_text().strip() if path.is_file() else "max"
        if allowed != "max" and int(allowed) <= _UNLIMITED:
            # cached files count as used, and are dropped when memory is needed. Version 1 adds up those of
            # the groups inside under another name; a sandbox, such as gVisor, may not state them
            stat = folder / "memory.stat"
            lines = stat.read_text().splitlines() if stat.is_file() else []
            numbers = {name: int(number) for name, number in map(str.split, lines)}
            cached = numbers.get("total_inactive_file", numbers.get("inactive_file", 0))
            yield int(allowed), int(allowed) - int((folder / used_name).read_text()) + cached
