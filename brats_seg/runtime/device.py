"""Where a run computes, and in which precision."""

from contextlib import AbstractContextManager
from dataclasses import dataclass

import torch

from brats_seg.errors import ConfigError, EnvironmentalError


@dataclass(frozen=True, kw_only=True, slots=True)
class Device:
    """A device with the precision that it computes in."""

    torch_device: torch.device
    autocast_dtype: torch.dtype | None = None
    """Type that autocast computes in; none means float32 throughout."""

    @property
    def needs_scaler(self) -> bool:
        """Whether gradients would underflow without a loss scale: float16 has five exponent bits."""
        return self.autocast_dtype is torch.float16

    @property
    def precision(self) -> str:
        """The word for it in settings and checkpoints."""
        return next(word for word, dtype in _DTYPES.items() if dtype is self.autocast_dtype)

    def autocast(self) -> AbstractContextManager[None]:
        """Compute in the device's precision."""
        return torch.autocast(
            self.torch_device.type,
            dtype=self.autocast_dtype or torch.float32,
            enabled=self.autocast_dtype is not None,
        )


_DTYPES = {"fp32": None, "fp16": torch.float16, "bf16": torch.bfloat16}


def choose_device(name: str, precision: str) -> Device:
    """Return the device of that name with the precision asked for, or its native one for `auto`.

    Raises `EnvironmentalError` if the machine lacks the device, or cannot run kernels on it.
    """
    device = _device_named(name)
    if precision == "auto":
        return Device(torch_device=device, autocast_dtype=native_dtype(device))
    if precision == "fp16" and device.type == "cpu":
        msg = "precision fp16 on the CPU has no fast kernels; use bf16, fp32 or auto"
        raise ConfigError(msg)
    return Device(torch_device=device, autocast_dtype=_DTYPES[precision])


def _device_named(name: str) -> torch.device:
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        device = torch.device(name)
    except RuntimeError:
        msg = f"device {name!r} is unknown; use auto, cpu, cuda, cuda:1 or mps"
        raise ConfigError(msg) from None
    if device.type == "cuda":
        _check_cuda(device)
    elif device.type == "mps" and not torch.backends.mps.is_available():
        msg = "device mps is not available here; use --device auto"
        raise EnvironmentalError(msg)
    return device


def _check_cuda(device: torch.device) -> None:
    count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if (device.index or 0) >= count:
        msg = f"device {device} is not available: torch sees {count} CUDA devices; use --device cpu"
        raise EnvironmentalError(msg)
    major, minor = torch.cuda.get_device_capability(device)
    built_for = torch.cuda.get_arch_list()
    # a stock image may hold a torch without kernels for an old card: is_available() is true all the
    # same, and the first operation dies (Kaggle/kaggle-cli#1151)
    if not any(_runs_on(architecture, major, minor) for architecture in built_for):
        msg = (
            f"{torch.cuda.get_device_name(device)} is sm_{major}{minor}, and this torch "
            f"{torch.__version__} was built for {', '.join(built_for)}; install a torch built for "
            "an older CUDA (the cu126 wheels reach back to sm_60), or use --device cpu"
        )
        raise EnvironmentalError(msg)


def _runs_on(architecture: str, major: int, minor: int) -> bool:
    """Binary code runs on later cards of its generation, intermediate code on all later ones."""
    kind, _, digits = architecture.rstrip("af").partition("_")
    built_major, built_minor = int(digits[:-1]), int(digits[-1])
    if kind == "sm":
        return built_major == major and built_minor <= minor
    return (built_major, built_minor) <= (major, minor)


def native_dtype(device: torch.device) -> torch.dtype | None:
    """Return the half precision that a device computes in itself, or None if it has none."""
    if device.type == "cuda":
        # a T4 emulates bf16, slowly, and torch counts that as support unless told not to
        native = torch.cuda.is_bf16_supported(including_emulation=False)
        return torch.bfloat16 if native else torch.float16
    if device.type == "cpu":
        # an older torch cannot tell, and computes in float32
        capabilities: dict[str, bool] = getattr(torch.cpu, "get_capabilities", dict)()
        native = capabilities.get("avx512_bf16") or capabilities.get("amx_bf16")
        return torch.bfloat16 if native else None
    return None
