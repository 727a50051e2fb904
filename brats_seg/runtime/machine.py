"""Read what a machine can do, and say what will disturb training and prediction on it.

`read_machine` measures; `machine_findings` judges what was measured, so that it also judges a machine
that is described by hand. `check_machine` is the short form that runs before training and prediction, once `choose_device`
has checked that torch computes on the device.
"""

import logging
import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

import torch

from brats_seg.cpu_threads import NUMBERS, available_cpus, chosen_by_user, cpu_quota
from brats_seg.errors import EnvironmentalError, Finding, counted
from brats_seg.files import check_writable, free_bytes
from brats_seg.runtime.device import (
    choose_device,
    has_kernels,
    native_dtype,
    precision_name,
    wheel_for,
)
from brats_seg.runtime.memory import free_memory, total_memory

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Place through which torch passes tensors between processes."""
RUN_BYTES = 2**30
"""Free disk space below which a run is warned about: two checkpoints of a network of 30 million weights
with the state of its optimizer, of which one is written beside the other."""
_LITTLE_MEMORY = 2 * 2**30
"""Free memory below which a warning is given; predicting one BraTS scan took 1.1 GB."""
_HELD_BY_OTHERS = 0.25
"""Share of the memory of a GPU that is not free, above which a warning is given."""
_OLDEST_DRIVERS = {"11": 450, "12": 525, "13": 580}
"""Oldest driver of NVIDIA for each CUDA, by its first number (CUDA compatibility guide)."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuFacts:
    """One GPU that torch sees."""

    name: str
    capability: tuple[int, int]
    """Compute capability, such as (7, 5)."""
    memory_bytes: int
    free_bytes: int
    half: str
    """Half precision that it computes natively, `fp16` or `bf16`."""
    failures: tuple[str, ...] = ()
    """Precisions in which a convolution and its gradient failed, each with the reason."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine, as this process may use it."""

    torch_version: str
    cuda: str
    """CUDA that torch was built with; empty without."""
    built_for: tuple[str, ...]
    """GPU architectures that torch has kernels for, such as `sm_75`."""
    driver: str
    """Version of the driver of NVIDIA; empty without."""
    gpus: tuple[GpuFacts, ...]
    n_cpus: int
    """CPUs that may be used at the same time."""
    quota: float | None
    """CPU time per time that control groups allow; None for no limit."""
    half: str
    """Precision that the CPU computes natively besides fp32; empty without."""
    memory_bytes: int
    free_memory_bytes: int
    shared_bytes: int | None
    """Free shared memory, through which worker processes pass patches; None if there is none."""


def read_machine() -> Machine:
    """Return what this machine can do; a small convolution is computed on every GPU."""
    cpu = torch.device("cpu")
    n_gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    half = native_dtype(cpu)
    return Machine(
        torch_version=str(torch.__version__),
        cuda=torch.version.cuda or "",
        built_for=tuple(torch.cuda.get_arch_list()),
        driver=_driver(),
        gpus=tuple(_gpu(torch.device("cuda", index)) for index in range(n_gpus)),
        n_cpus=available_cpus(),
        quota=cpu_quota(),
        half="" if half is None else precision_name(half),
        memory_bytes=total_memory(cpu),
        free_memory_bytes=free_memory(cpu),
        shared_bytes=shared_bytes(),
    )


def shared_bytes() -> int | None:
    """Return the free shared memory; None on a system without."""
    return free_bytes(SHARED_MEMORY) if SHARED_MEMORY.is_dir() else None


def machine_findings(machine: Machine, needed_shared: int) -> tuple[Finding, ...]:
    """Judge a machine: GPUs, CPUs and memory.

    Args:
        machine: What was measured.
        needed_shared: Shared memory in bytes that the worker processes of a training may need.
    """
    return (
        _torch_finding(machine),
        *(_gpu_finding(machine, index) for index in range(len(machine.gpus))),
        _cpu_finding(machine),
        memory_finding(machine.free_memory_bytes, machine.memory_bytes),
        *shared_findings(machine.shared_bytes, needed_shared),
    )


def memory_finding(free: int, total: int) -> Finding:
    """Judge the memory of this process, in bytes."""
    found = f"{_gib(free)} free of {_gib(total)}"
    if free >= _LITTLE_MEMORY:
        return Finding(check="memory", status="ok", found=found)
    return Finding(
        check="memory",
        status="warning",
        found=f"{found}; predicting one scan takes about 1.1 GB, training a network more",
        remedy="brats-seg plan --device cpu",
    )


def shared_findings(free: int | None, needed: int) -> Iterator[Finding]:
    """Yield the judgement of the shared memory, if the system has such; sizes in bytes."""
    if free is None:
        return
    found = f"{_gib(free)} free in {SHARED_MEMORY}"
    if free >= needed:
        yield Finding(check="shared memory", status="ok", found=found)
    else:
        yield Finding(
            check="shared memory",
            status="warning",
            found=f"{found}, where worker processes may need {_gib(needed)}. Outside a container, "
            "load patches without workers: --set training.n_workers=0",
            remedy="docker run --shm-size=8g ...",
        )


def disk_finding(check: str, folder: Path, needed: int, found: str = "") -> Finding:
    """Judge the free space of a disk for a number of bytes; `found` says what needs them."""
    free = free_bytes(folder)
    text = f"{_gib(free)} free in {folder.absolute()}, {found}{_gib(needed)} needed"
    if free >= needed:
        return Finding(check=check, status="ok", found=text)
    return Finding(
        check=check,
        status="problem",
        found=f"{text}: free some space, or choose a folder on another disk",
        remedy="df -h",
    )


def check_machine(output: Path, *, needed_shared: int = 0, needed_disk: int = 0) -> None:
    """Check what needs no time, and log a warning for what may disturb the work.

    Args:
        output: Folder that will be written to.
        needed_shared: Shared memory in bytes that worker processes may need.
        needed_disk: Free disk space in bytes below which a warning is given.

    Raises:
        EnvironmentalError: The folder cannot be written to.
    """
    check_writable(output)
    cpu = torch.device("cpu")
    findings = [memory_finding(free_memory(cpu), total_memory(cpu))]
    findings += shared_findings(shared_bytes() if needed_shared else None, needed_shared)
    findings += [disk_finding("disk space", output, needed_disk)] if needed_disk else []
    for one in findings:
        if one.status != "ok":
            log.warning("%s: %s. `brats-seg doctor` says more.", one.check, one.found)


def _torch_finding(machine: Machine) -> Finding:
    built = f"built for CUDA {machine.cuda}" if machine.cuda else "built without CUDA"
    found = f"torch {machine.torch_version}, {built}"
    if machine.gpus:
        return Finding(
            check="torch",
            status="ok",
            found=f"{found}; driver {machine.driver or 'unknown'}",
        )
    if not machine.driver:
        return Finding(check="torch", status="ok", found=f"{found}; no GPU: the CPU computes")
    found = f"{found}; driver {machine.driver} is there, but torch sees no GPU"
    if not machine.cuda:
        remedy = wheel_for(None)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        oldest = _OLDEST_DRIVERS.get(machine.cuda.split(".")[0])
        found += "" if oldest is None else f"; CUDA {machine.cuda} needs driver {oldest} or later"
        remedy = "nvidia-smi"
    return Finding(check="torch", status="problem", found=found, remedy=remedy)


def _gpu_finding(machine: Machine, index: int) -> Finding:
    gpu = machine.gpus[index]
    check = f"GPU {index}"
    major, minor = gpu.capability
    found = f"{gpu.name}, sm_{major}{minor}"
    if not has_kernels(machine.built_for, gpu.capability):
        built = ", ".join(machine.built_for) or "no GPU"
        return Finding(
            check=check,
            status="problem",
            found=f"{found}: torch calls it available, but was built for {built}",
            remedy=wheel_for(gpu.capability),
        )
    if gpu.failures:
        return Finding(
            check=check,
            status="problem",
            found=f"{found}: {'; '.join(gpu.failures)}",
            remedy="nvidia-smi -q",
        )
    emulated = ", bf16 only emulated" if gpu.half == "fp16" else ""
    found = f"{found}, {_gib(gpu.free_bytes)} free of {_gib(gpu.memory_bytes)}; {gpu.half} native{emulated}"
    if gpu.free_bytes < (1 - _HELD_BY_OTHERS) * gpu.memory_bytes:
        found = f"{found}; other processes hold the rest"
        return Finding(check=check, status="warning", found=found, remedy="nvidia-smi")
    return Finding(check=check, status="ok", found=found)


def _cpu_finding(machine: Machine) -> Finding:
    quota = "" if machine.quota is None else f" (a control group allows {machine.quota:g})"
    precision = f"fp32 and {machine.half}" if machine.half else "fp32"
    found = f"{counted(machine.n_cpus, 'CPU')}{quota}, {precision} native"
    for name in NUMBERS:
        number = chosen_by_user(name)
        if number is not None and number.isdecimal() and int(number) > machine.n_cpus:
            found = f"{found}; {name} is {number}, and threads will wait for each other"
            return Finding(check="CPU", status="warning", found=found, remedy=f"unset {name}")
    return Finding(check="CPU", status="ok", found=found)


def _gpu(device: torch.device) -> GpuFacts:
    native = native_dtype(device)
    half = "fp16" if native is None else precision_name(native)
    free, total = 0, 0
    try:
        free, total = torch.cuda.mem_get_info(device)
        failures = tuple(_failures(device, ("fp32", half)))
    except RuntimeError as error:
        failures = (f"its memory cannot be read ({_first_line(error)})",)
    return GpuFacts(
        name=torch.cuda.get_device_name(device),
        capability=torch.cuda.get_device_capability(device),
        memory_bytes=total,
        free_bytes=free,
        half=half,
        failures=failures,
    )


def _failures(device: torch.device, precisions: Sequence[str]) -> Iterator[str]:
    """Compute a convolution and its gradient in each precision, and yield those that fail."""
    for precision in precisions:
        try:
            chosen = choose_device(str(device), precision)
            with chosen.autocast():
                image = torch.ones(1, 4, 16, 16, 16, device=device)
                weights = torch.ones(8, 4, 3, 3, 3, device=device, requires_grad=True)
                torch.nn.functional.conv3d(image, weights).float().sum().backward()
            torch.cuda.synchronize(device)
        except (RuntimeError, EnvironmentalError) as error:
            yield f"{precision} fails ({_first_line(error)})"


def _driver() -> str:
    """Return the version of the driver of NVIDIA; empty without."""
    with suppress(OSError):
        if match := re.search(r"Kernel Module\D*([\d.]+)", _DRIVER_FILE.read_text()):
            return match[1]
    program = shutil.which("nvidia-smi")
    if program is None:
        return ""
    command = [program, "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.TimeoutExpired):
        done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
        lines = done.stdout.split()
        return lines[0] if done.returncode == 0 and lines else ""
    return ""


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0]


def _gib(n_bytes: int) -> str:
    return f"{n_bytes / 2**30:.1f} GiB" if n_bytes >= 2**30 else f"{n_bytes / 2**20:.0f} MiB"
