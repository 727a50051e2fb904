"""Say what will disturb training and prediction on this machine.

`machine_findings` examines everything, for `brats-seg doctor`. `check_machine` is the short form that
runs before training and prediction, once `choose_device` has checked that torch computes on the device.
"""

import logging
import os
import re
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path

import torch

from brats_seg.cpu_threads import COUNT_VARIABLES, available_cpus, cpu_quota, user_value
from brats_seg.errors import EnvironmentalError, Finding, counted
from brats_seg.files import check_writable, free_bytes, size_text
from brats_seg.runtime import device as devices
from brats_seg.runtime.memory import free_memory, total_memory

log = logging.getLogger(__name__)

SHARED_MEMORY = Path("/dev/shm")
"""Folder through which processes pass tensors."""
RUN_BYTES = 2**30
"""Free disk space below which a run is warned about: two checkpoints of a network of 30 million weights
with the state of its optimizer, of which one is written beside the other."""
_LITTLE_MEMORY = 2 * 2**30
"""Free memory below which a warning is given; predicting one BraTS scan took 1.1 GB."""
_HELD_BY_OTHERS = 0.25
"""Share of the memory of a GPU that is not free, above which a warning is given."""
_DRIVER_FILE = Path("/proc/driver/nvidia/version")
_CPU = torch.device("cpu")


def machine_findings(needed_shared: int) -> list[Finding]:
    """Examine GPUs, CPUs and memory; a small convolution is computed on every GPU.

    Args:
        needed_shared: Shared memory in bytes that the worker processes of a training may need.
    """
    n_gpus = len(devices.gpus())
    return [
        _torch_finding(n_gpus),
        *(_gpu_finding(index) for index in range(n_gpus)),
        _cpu_finding(),
        _memory_finding(),
        *_shared_findings(needed_shared),
    ]


def disk_finding(check: str, folder: Path, needed: int, found: str = "") -> Finding:
    """Judge the free space of a disk for a number of bytes; `found` says what needs them."""
    free = free_bytes(folder)
    text = f"{size_text(free)} free in {folder.absolute()}, {found}{size_text(needed)} needed"
    if free >= needed:
        return Finding(check=check, status="ok", found=text)
    text += ": free some space, or choose a folder on another disk"
    return Finding(check=check, status="problem", found=text, remedy="df -h")


def check_machine(output: Path, *, needed_shared: int = 0, needed_disk: int = 0) -> None:
    """Check what needs no time, and log a warning for what may disturb the work.

    Args:
        output: Folder that will be written to.
        needed_shared: Shared memory in bytes that worker processes may need.
        needed_disk: Free disk space in bytes below which a warning is given.
    """
    check_writable(output)
    findings = [_memory_finding(), *_shared_findings(needed_shared)]
    findings.append(disk_finding("disk space", output, needed_disk))
    for finding in findings:
        if finding.status != "ok":
            log.warning("%s: %s. `brats-seg doctor` says more.", finding.check, finding.found)


def _memory_finding() -> Finding:
    free = free_memory(_CPU)
    found = f"{size_text(free)} free of {size_text(total_memory(_CPU))}"
    if free >= _LITTLE_MEMORY:
        return Finding(check="memory", status="ok", found=found)
    found += "; predicting one scan takes about 1.1 GB, training a network more"
    remedy = "brats-seg plan --device cpu"
    return Finding(check="memory", status="warning", found=found, remedy=remedy)


def _shared_findings(needed: int) -> Iterator[Finding]:
    """Yield the judgement of the shared memory, if the system has such."""
    if not SHARED_MEMORY.is_dir():
        return
    free = free_bytes(SHARED_MEMORY)
    found = f"{size_text(free)} free in {SHARED_MEMORY}"
    if free >= needed:
        yield Finding(check="shared memory", status="ok", found=found)
        return
    found += (
        f", where worker processes may need {size_text(needed)}. Outside a container, load patches without "
        "workers: --set training.n_workers=0"
    )
    remedy = "docker run --shm-size=8g ..."
    yield Finding(check="shared memory", status="warning", found=found, remedy=remedy)


def _torch_finding(n_gpus: int) -> Finding:
    cuda, driver = torch.version.cuda or "", _driver()
    found = f"torch {torch.__version__}, built {f'for CUDA {cuda}' if cuda else 'without CUDA'}"
    if n_gpus or not driver:
        found += f"; driver {driver or 'unknown'}" if n_gpus else "; no GPU: the CPU computes"
        return Finding(check="torch", status="ok", found=found)
    found += f"; driver {driver} is there, but torch sees no GPU"
    if not cuda:
        remedy = devices.wheel_for(None)
    elif os.environ.get("CUDA_VISIBLE_DEVICES") is not None:
        remedy = "unset CUDA_VISIBLE_DEVICES"
    else:
        found += ", perhaps because the driver is older than that CUDA"
        remedy = "nvidia-smi"
    return Finding(check="torch", status="problem", found=found, remedy=remedy)


def _gpu_finding(index: int) -> Finding:
    device, check = torch.device("cuda", index), f"GPU {index}"
    capability, built_for = torch.cuda.get_device_capability(device), torch.cuda.get_arch_list()
    found = f"{torch.cuda.get_device_name(device)}, sm_{capability[0]}{capability[1]}"
    if not devices.has_kernels(built_for, capability):
        found += f": torch calls it available, but was built for {', '.join(built_for) or 'no GPU'}"
        remedy = devices.wheel_for(capability)
        return Finding(check=check, status="problem", found=found, remedy=remedy)
    half = devices.choose_device(str(device), "auto").precision
    try:
        free, total = torch.cuda.mem_get_info(device)
        for precision in ("fp32", half):
            _compute(device, precision)
    except (RuntimeError, EnvironmentalError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
        found += f": it does not compute ({reason})"
        return Finding(check=check, status="problem", found=found, remedy="nvidia-smi -q")
    emulated = ", bf16 only emulated" if half == "fp16" else ""
    found += f", {size_text(free)} free of {size_text(total)}; {half} native{emulated}"
    if free < (1 - _HELD_BY_OTHERS) * total:
        found += "; other processes hold the rest"
        return Finding(check=check, status="warning", found=found, remedy="nvidia-smi")
    return Finding(check=check, status="ok", found=found)


def _cpu_finding() -> Finding:
    n_cpus, quota, native = available_cpus(), cpu_quota(), devices.choose_device("cpu", "auto")
    half = "" if native.precision == "fp32" else f" and {native.precision}"
    allowed = "" if quota is None else f" (a control group allows {quota:g})"
    found = f"{counted(n_cpus, 'CPU')}{allowed}, fp32{half} native"
    for name in COUNT_VARIABLES:
        number = user_value(name)
        if number is not None and number.isdecimal() and int(number) > n_cpus:
            found += f"; {name} is {number}, and threads will wait for each other"
            return Finding(check="CPU", status="warning", found=found, remedy=f"unset {name}")
    return Finding(check="CPU", status="ok", found=found)


def _compute(device: torch.device, precision: str) -> None:
    """Compute a convolution and its gradient."""
    with devices.choose_device(str(device), precision).autocast():
        image = torch.ones(1, 4, 16, 16, 16, device=device)
        weights = torch.ones(8, 4, 3, 3, 3, device=device, requires_grad=True)
        torch.nn.functional.conv3d(image, weights).float().sum().backward()
    torch.cuda.synchronize(device)


def _driver() -> str:
    """Return the version of the driver of NVIDIA; empty without."""
    with suppress(OSError):
        if match := re.search(r"Kernel Module\D*([\d.]+)", _DRIVER_FILE.read_text()):
            return match[1]
    # under Windows Subsystem for Linux there is no such file
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    with suppress(OSError, subprocess.SubprocessError, IndexError):
        return subprocess.check_output(command, text=True, timeout=20).split()[0]
    return ""
