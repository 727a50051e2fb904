"""Choose the device to compute on, and its precision.

Only the modules of `runtime` call `torch.cuda`, so that tests can replace a GPU in one place.
"""

import platform
from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass
from math import prod

import torch

from brats_seg.cpu_threads import COUNT_VARIABLES, available_cpus, user_value
from brats_seg.errors import ConfigError, EnvironmentalError, UsageError, counted
from brats_seg.runtime.memory import gpu_module, parse_memory

SMALL_PATCH = 40**3
"""Voxels of the largest patch that one CPU thread computes. A layer takes less than a millisecond there,
and several threads would wait for each other most of the time."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device and the precision to compute in."""

    torch_device: torch.device
    autocast_dtype: torch.dtype | None = None
    """Type that autocast computes in; None for float32 throughout."""

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients need a loss scale, without which float16 underflows."""
        return self.autocast_dtype is torch.float16

    @property
    def precision(self) -> str:
        """Name of the precision in settings and checkpoints."""
        return next(name for name, dtype in _DTYPES.items() if dtype is self.autocast_dtype)

    def autocast(self) -> AbstractContextManager[None]:
        """Return a context that computes in the precision of the device."""
        return torch.autocast(
            self.torch_device.type,
            dtype=self.autocast_dtype or torch.float32,
            enabled=self.autocast_dtype is not None,
        )


_WHEELS = "https://download.pytorch.org/whl"
_OLDEST_OF_NEW_WHEELS = (7, 5)
"""Compute capability of a T4: wheels for CUDA 12.8 and later have no kernels for most older GPUs."""
_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


@dataclass(frozen=True, kw_only=True, slots=True)
class Gpu:
    """A GPU that training is planned for, on a machine that need not have it."""

    name: str
    memory_bytes: int
    """Memory that torch reports for the whole GPU."""
    half: torch.dtype
    """Half precision that it computes natively."""

    def device(self, precision: str) -> Device:
        """Return the device with a precision; `auto` takes the native half precision."""
        if precision == "bf16" and self.half is not torch.bfloat16:
            msg = f"precision bf16 on {self.name}, which emulates it; use fp16, fp32 or auto"
            raise ConfigError(msg)
        dtype = self.half if precision == "auto" else _DTYPES[precision]
        return Device(torch_device=torch.device("cuda"), autocast_dtype=dtype)


def _gpu(name: str, gib: float, half: torch.dtype) -> Gpu:
    return Gpu(name=name, memory_bytes=int(gib * 2**30), half=half)


_KINDS = ("auto", "cpu", "cuda", "mps")
GPUS = {
    "t4": _gpu("Tesla T4", 14.56, torch.float16),
    "p100": _gpu("Tesla P100", 15.89, torch.float16),
    "v100": _gpu("Tesla V100, 16 GB", 15.77, torch.float16),
    "v100-32gb": _gpu("Tesla V100, 32 GB", 31.73, torch.float16),
    "l4": _gpu("L4", 21.95, torch.bfloat16),
    "a10g": _gpu("A10G", 21.99, torch.bfloat16),
    "a100": _gpu("A100, 40 GB", 39.39, torch.bfloat16),
    "a100-80gb": _gpu("A100, 80 GB", 79.15, torch.bfloat16),
    "h100": _gpu("H100, 80 GB", 79.1, torch.bfloat16),
    "h200": _gpu("H200", 139.0, torch.bfloat16),
    "rtx3060": _gpu("GeForce RTX 3060, 12 GB", 11.75, torch.bfloat16),
    "rtx3090": _gpu("GeForce RTX 3090", 23.68, torch.bfloat16),
    "rtx4060": _gpu("GeForce RTX 4060", 7.75, torch.bfloat16),
    "rtx4090": _gpu("GeForce RTX 4090", 23.64, torch.bfloat16),
    "rtx5090": _gpu("GeForce RTX 5090", 31.36, torch.bfloat16),
}
"""GPUs by short name. The memory is the smallest `total capacity` that people quote from messages of
torch about each on Linux, which is below what is printed on the box; that of an A10G is an A10's, and
that of an H200 is rounded down. bf16 needs compute capability 8.0."""


def gpu_named(text: str) -> Gpu | None:
    """Return the GPU of a short name such as `t4` or of a size such as `16GiB`; None for a device here.

    Nothing is known of a GPU of some size, so that its half precision is fp16, which every GPU has.

    Example:
        >>> gpu_named("8GiB").memory_bytes == 8 * 2**30
        True
    """
    if text[:1].isdigit():
        size = parse_memory(text)
        return Gpu(name=f"a GPU of {text}", memory_bytes=size, half=torch.float16)
    gpu = GPUS.get(text.lower())
    if gpu is None and text.lower().partition(":")[0] not in _KINDS:
        msg = (
            f"device {text!r} is unknown; expected a GPU ({', '.join(GPUS)}), the memory of a GPU such "
            f"as 8GiB, or a device of this machine ({', '.join(_KINDS)}, cuda:1)"
        )
        raise UsageError(msg)
    return gpu


def choose_device(name: str, precision: str) -> Device:
    """Return the device of a name, with a precision.

    Args:
        name: `cpu`, `cuda`, `cuda:1`, `mps`, or `auto` for the GPU if there is one.
        precision: `fp32`, `fp16`, `bf16`, or `auto` for the one that the device computes natively.

    Example:
        >>> choose_device("cpu", "fp32").precision
        'fp32'
    """
    device = _device_named(name)
    if precision == "auto":
        return Device(torch_device=device, autocast_dtype=native_dtype(device))
    if device.type == "cpu" and not _is_fast_on_cpu(precision):
        msg = f"precision {precision} needs AVX-512 BF16 or AMX (bf16) or a GPU (fp16): use fp32 or auto"
        raise ConfigError(msg)
    return Device(torch_device=device, autocast_dtype=_DTYPES[precision])


def gpus() -> tuple[torch.device, ...]:
    """Return the CUDA devices that torch sees."""
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return tuple(torch.device("cuda", index) for index in range(count))


def use_gpu(index: int) -> bool:
    """Compute on the GPU of that index from now on; return whether there is any GPU."""
    if not gpus():
        return False
    torch.cuda.set_device(_device_named(f"cuda:{index}"))
    return True


def device_name(device: torch.device) -> str:
    """Return the name of a GPU, or of the processor, which is empty on many Linux systems."""
    gpu = gpu_module(device)
    return platform.processor() if gpu is None else str(gpu.get_device_name(device))


def generators_of(device: torch.device) -> list[torch.Generator]:
    """Return the generators of random numbers of the CPU and of a GPU."""
    gpu, generators = gpu_module(device), [torch.default_generator]
    if gpu is not None:
        index = device.index if ":" in str(device) else gpu.current_device()
        generators.append(gpu.default_generators[index])
    return generators


def widest_dtype(device: torch.device) -> torch.dtype:
    """Return float64, or float32 on a Mac's GPU, which has no float64."""
    return torch.float32 if device.type == "mps" else torch.float64


def uses_one_thread(device: torch.device, patch: Sequence[int]) -> bool:
    """Return whether one CPU thread computes a patch of that size, see `threads_for`."""
    is_chosen = any(map(user_value, COUNT_VARIABLES)) or torch.get_num_threads() != available_cpus()
    return device.type == "cpu" and not is_chosen and prod(patch) <= SMALL_PATCH


@contextmanager
def threads_for(device: torch.device, patch: Sequence[int]) -> Iterator[None]:
    """Compute small patches with one CPU thread, unless the number of threads was set by the user.

    The choice depends on the size of the patch alone, not on how busy the machine is, because the
    number of threads changes the last bits of the results.

    Args:
        device: Device that computes.
        patch: Voxels along X, Y and Z.
    """
    before = torch.get_num_threads()
    if uses_one_thread(device, patch):
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def _device_named(name: str) -> torch.device:
    if name.lower() == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    device = None
    with suppress(RuntimeError):
        device = torch.device(name.lower())
    # torch knows other types too, such as xpu and meta, and takes cuda:256 for cuda:0
    if device is None or device.type not in _KINDS or str(device) != name.lower():
        msg = f"device {name!r} is unknown; use auto, cpu, cuda, cuda:1 or mps"
        raise ConfigError(msg)
    if device.type == "cuda":
        _check_cuda(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        msg = "device mps is not available here; use --device auto"
        raise EnvironmentalError(msg)
    return device


def _check_cuda(device: torch.device) -> None:
    count = len(gpus())
    if (device.index or 0) >= count:
        msg = f"device {device} is not available: torch sees {counted(count, 'CUDA device')}; use --device cpu"
        raise EnvironmentalError(msg)
    capability = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    # torch may be built without kernels for an old card: is_available() is then still true, and the
    # first operation fails (Kaggle/kaggle-cli#1151)
    if not has_kernels(built_for, capability):
        major, minor = capability
        msg = (
            f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}, and this torch "
            f"{torch.__version__} was built for {', '.join(built_for)}. Install one that was built for "
            f"it: {wheel_for(capability)}, or use --device cpu"
        )
        raise EnvironmentalError(msg)


def has_kernels(built_for: Sequence[str], capability: tuple[int, int]) -> bool:
    """Return whether a torch that was built for some architectures computes on a GPU.

    Args:
        built_for: Architectures, such as `sm_75`, as `torch.cuda.get_arch_list` returns them.
        capability: Compute capability of the GPU.

    Example:
        >>> has_kernels(["sm_75", "sm_80"], (8, 6)), has_kernels(["sm_75", "sm_80"], (6, 0))
        (True, False)
        >>> has_kernels(["gfx90a"], (9, 0))
        True
    """
    return any(_runs_on(architecture, *capability) for architecture in built_for)


def wheel_for(capability: tuple[int, int] | None) -> str:
    """Return the command that installs a torch for a GPU; None for one that is not known.

    pip would keep a torch of the same version that was built for another CUDA.
    """
    if capability is not None and capability < _OLDEST_OF_NEW_WHEELS:
        # the last wheels with kernels for sm_50 to sm_70
        return f'pip install --force-reinstall "torch<2.15" --index-url {_WHEELS}/cu126'
    return f"pip install --force-reinstall torch --index-url {_WHEELS}/cu128"


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Return whether kernels run: binaries within a generation of cards, PTX on all later cards."""
    kind, _, digits = architecture.rstrip("af").partition("_")
    if not digits:
        # ROCm has other names, such as gfx90a, and is built for the GPUs that it finds
        return True
    built_major, built_minor = int(digits[:-1]), int(digits[-1])
    if kind == "sm":
        return built_major == major and built_minor <= minor
    return (built_major, built_minor) <= (major, minor)


def native_dtype(device: torch.device) -> torch.dtype | None:
    """Return the half precision that a device computes natively, or None."""
    if device.type == "cuda":
        # a T4 emulates bf16 slowly, which torch counts as support by default
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    is_native = device.type == "cpu" and _has_bf16(_cpu_capabilities())
    return torch.bfloat16 if is_native else None


def _is_fast_on_cpu(precision: str) -> bool:
    """Return whether a CPU has instructions for a precision; bf16 without them is emulated.

    One convolution took 1.6 s in emulated bf16 and 18 ms in float32 (pytorch/pytorch#183815).
    """
    capabilities = _cpu_capabilities()
    is_emulated = capabilities.get("architecture") == "x86_64" and not _has_bf16(capabilities)
    return precision == "fp32" or (precision == "bf16" and not is_emulated)


def _has_bf16(capabilities: Mapping[str, object]) -> bool:
    return bool(capabilities.get("avx512_bf16") or capabilities.get("amx_bf16"))


def _cpu_capabilities() -> Mapping[str, object]:
    """Return what torch reports of the processor; nothing if torch is too old to report it."""
    capabilities: Mapping[str, object] = getattr(torch.cpu, "get_capabilities", dict)()
    return capabilities
