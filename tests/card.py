"""A card that is not there: a device of torch whose tensors lie on the host, and say that they do not.

It refuses what a GPU refuses: tensors of two devices in one operation, and arrays of its memory. It
counts what a GPU waits for: values that the host reads, and copies between card and host. With sizes
alone its tensors take no memory, and the host reads ones and zeros. Importing this module registers the
device for the rest of the process: tests that use it run in one of their own (`on_card.py`).
"""

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.library import Library, fallthrough_kernel
from torch.utils import backend_registration
from torch.utils._python_dispatch import TorchDispatchMode, return_and_correct_aliasing
from torch.utils._pytree import tree_map_only

NAME = "card"
COUNTS: Counter[str] = Counter()
"""Values read by the host, copies to the host, and copies to the card."""
HOME = ["cpu"]
"""Device that holds the values of the card; the last is used, and `meta` has sizes alone."""
HALVES: dict[int, Tensor] = {}  # weights, which autocast keeps until it ends
_COPIES = ("aten::copy_", "aten::_to_copy")
_INDEXING = ("aten::index", "aten::index_put", "aten::index_put_")
"""Operations that take indices of the host, and wait for the card where they are given a mask."""
_IN_HALF = ("conv3d", "conv_transpose3d.input", "linear", "matmul")
"""Operations that autocast computes in half precision."""


class CardTensor(Tensor):
    """A tensor on the card; `inner` holds its values on the host."""

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, inner: Tensor) -> "CardTensor":
        layout = {"strides": inner.stride(), "storage_offset": inner.storage_offset()}
        kind = {"dtype": inner.dtype, "device": f"{NAME}:0"}
        return Tensor._make_wrapper_subclass(cls, inner.shape, **layout, **kind)

    def __init__(self, inner: Tensor) -> None:
        self.inner = inner

    def __reduce_ex__(self, protocol: Any) -> Any:
        return self.detach().cpu().__reduce_ex__(protocol)

    def tolist(self) -> Any:
        COUNTS["read"] += 1
        return (torch.zeros(self.shape) if self.inner.is_meta else self.inner).tolist()

    def numpy(self, **_: object) -> Any:
        msg = "can't convert card:0 device type tensor to numpy. Use Tensor.cpu()"
        raise TypeError(msg)

    @classmethod
    def __torch_dispatch__(
        cls, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        return _compute(func, args, kwargs or {})


class _Making(TorchDispatchMode):
    """Make tensors on the card where that is asked for, of nothing or of a tensor of the host."""

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: Any = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if torch.device(kwargs.get("device") or "cpu").type == NAME:
            return _compute(func, args, kwargs)
        return func(*args, **kwargs)


def _compute(func: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    name, tensors = func._schema.name, list[Tensor]()
    inner_args = _mapped(_at_home, args, tensors)
    others = {key: value for key, value in kwargs.items() if key not in ("device", "pin_memory")}
    given = {key: _mapped(_at_home, value, tensors) for key, value in others.items()}
    on_host = [tensor for tensor in tensors if not isinstance(tensor, CardTensor)]
    target = torch.device(kwargs.get("device") or NAME)
    if name in _COPIES:
        is_home = target.type == "cpu" or (not isinstance(args[0], CardTensor) and not kwargs)
        COUNTS["to host" if is_home else "to card"] += is_home or bool(on_host)
    elif name not in _INDEXING and len(on_host) < len(tensors) and any(t.ndim for t in on_host):
        msg = f"Expected all tensors to be on the same device, found card:0 and cpu in {name}"
        raise RuntimeError(msg)
    if HOME[-1] == "meta" and name in ("aten::_local_scalar_dense", "aten::equal"):
        result = True
    elif HOME[-1] == "meta" and target.type == "cpu":
        result = torch.zeros(args[0].shape, dtype=kwargs.get("dtype") or args[0].dtype)
    else:
        result = func(*inner_args, **given, **({"device": HOME[-1]} if "device" in kwargs else {}))
    found = list[Tensor]()
    on_card = _mapped(CardTensor, result, found)
    is_value = result is not None and not found
    has_mask = name in _INDEXING and any(tensor.dtype == torch.bool for tensor in tensors[1:])
    COUNTS["read"] += is_value or has_mask or name == "aten::nonzero"
    if is_value or target.type == "cpu":
        return result
    if name == "aten::copy_" and not isinstance(args[0], CardTensor):
        return args[0]
    return return_and_correct_aliasing(func, args, dict(kwargs), on_card)


def _mapped(change: Callable[[Tensor], Tensor], value: Any, tensors: list[Tensor]) -> Any:
    """Return a value with its tensors changed, and add these to a list; torch's own trees take longer."""
    if isinstance(value, Tensor):
        tensors.append(value)
        return change(value)
    if isinstance(value, (list, tuple)):
        return type(value)([_mapped(change, part, tensors) for part in value])
    return value


def _at_home(tensor: Tensor) -> Tensor:
    """Return what holds the values of a tensor; numbers of the host stay there."""
    if isinstance(tensor, CardTensor):
        return tensor.inner
    return tensor.to(HOME[-1]) if tensor.ndim else tensor


class Module:
    """What `torch.card` holds, as `torch.cuda` does."""

    default_generators = (torch.Generator(),)
    get_device_name = staticmethod(lambda device: "A card")
    max_memory_allocated = staticmethod(lambda device: 3 * 2**20)
    get_amp_supported_dtype = staticmethod(lambda: [torch.float16, torch.bfloat16])
    is_initialized = is_available = staticmethod(lambda: True)
    _is_in_bad_fork = staticmethod(lambda: False)
    current_device = staticmethod(lambda: 0)
    device_count = staticmethod(lambda: 1)
    empty_cache = staticmethod(lambda: None)
    reset_peak_memory_stats = staticmethod(lambda device: None)

    def manual_seed_all(self, seed: int) -> None:
        self.default_generators[0].manual_seed(seed)


def _in_half(name: str) -> Any:
    """Return an operation of torch that casts its arguments as autocast does."""
    packet, _, overload = name.partition(".")
    operation = getattr(getattr(torch.ops.aten, packet), overload or "default")
    keys = torch._C.DispatchKeySet(torch._C.DispatchKey.AutocastPrivateUse1)

    def half(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, torch.nn.Parameter):
            return tensor.to(torch.get_autocast_dtype(NAME))
        if id(tensor) not in HALVES:
            HALVES[id(tensor)] = tensor.to(torch.get_autocast_dtype(NAME))
        return HALVES[id(tensor)]

    def cast(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(keys):
            return operation(*tree_map_only(Tensor, half, args), **kwargs)

    return cast


backend_registration._setup_privateuseone_for_python_backend(NAME, backend_module=Module())
_LIBRARIES = (Library("_", "IMPL"), Library("aten", "IMPL"))
_LIBRARIES[0].fallback(fallthrough_kernel, "AutocastPrivateUse1")
for _name in _IN_HALF:
    _LIBRARIES[1].impl(_name, _in_half(_name), "AutocastPrivateUse1")


@contextmanager
def a_card(home: str = "cpu") -> Iterator[None]:
    COUNTS.clear()
    HOME.append(home)
    overwrite = torch.__future__.get_overwrite_module_params_on_conversion()
    torch.__future__.set_overwrite_module_params_on_conversion(True)
    # so that `new_tensor` copies from the host by an operation that the mode sees
    torch._C._set_only_lift_cpu_tensors(True)
    try:
        # the mode applies to this thread only; tensors of inference mode have no versions, which views need
        with (
            _Making(),
            torch.autograd.set_multithreading_enabled(False),
            patch.object(torch._C, "_InferenceMode", lambda _: torch.no_grad()),
            patch.object(torch, "clear_autocast_cache", HALVES.clear),
            patch("brats_seg.runtime.device._KINDS", ("cpu", NAME)),
        ):
            yield
    finally:
        HOME.pop()
        torch._C._set_only_lift_cpu_tensors(False)
        torch.__future__.set_overwrite_module_params_on_conversion(overwrite)
