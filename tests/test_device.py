"""Test the choice of device and precision."""

import pytest
import torch

from brats_seg.errors import ConfigError, EnvironmentalError, UsageError
from brats_seg.presets import GPU_NAMES
from brats_seg.runtime.device import GPUS, choose_device, gpu_named


def test_the_cpu_takes_its_native_precision(monkeypatch: pytest.MonkeyPatch) -> None:
    for capabilities, precision in (
        ({"avx512_bf16": True}, "bf16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bf16"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "fp32"),
        ({}, "fp32"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)
        assert choose_device("cpu", "auto").precision == precision


def test_an_emulated_precision_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with choose_device("cpu", precision).autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    avx2 = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: avx2)
    with pytest.raises(ConfigError, match="bf16 needs AVX-512 BF16 or AMX"):
        choose_device("cpu", "bf16")


@pytest.mark.parametrize(
    ("capability", "built_for", "precision"),
    [
        ((6, 0), ["sm_70", "sm_75", "sm_80"], None),
        # torch claims bf16, which it emulates
        ((7, 5), ["sm_70", "sm_80"], "fp16"),
        ((8, 9), ["sm_80", "sm_86"], "bf16"),
        ((12, 0), ["sm_80", "compute_90"], "bf16"),
        ((12, 0), ["sm_80", "sm_90a"], None),
    ],
)
def test_a_card_needs_kernels_and_computes_natively(monkeypatch, capability, built_for, precision):
    facts = {"is_available": True, "device_count": 1, "get_device_name": "Tesla"}
    facts |= {"get_device_capability": capability, "get_arch_list": built_for}
    for name, value in facts.items():
        monkeypatch.setattr(torch.cuda, name, lambda *_, value=value: value)

    def is_supported(including_emulation: bool = True) -> bool:
        return including_emulation or capability >= (8, 0)

    monkeypatch.setattr(torch.cuda, "is_bf16_supported", is_supported)
    if precision is None:
        with pytest.raises(EnvironmentalError, match=r"is sm_\d+, and this torch .* built for"):
            choose_device("cuda", "fp32")
    else:
        assert choose_device("cuda", "fp32").torch_device.type == "cuda"
        device = choose_device("auto", "auto")
        assert (device.precision, device.needs_scaler) == (precision, precision == "fp16")


def test_what_is_not_there_is_refused() -> None:
    for choose, error, message in (
        (lambda: choose_device("gpu", "auto"), ConfigError, "device 'gpu' is unknown"),
        (lambda: choose_device("meta", "auto"), ConfigError, "device 'meta' is unknown"),
        # torch counts devices modulo 256
        (lambda: choose_device("cuda:256", "auto"), ConfigError, "device 'cuda:256' is unknown"),
        (lambda: choose_device("cuda:97", "auto"), EnvironmentalError, "torch sees .* CUDA devic"),
        (lambda: choose_device("cpu", "fp16"), ConfigError, "fp16 needs AVX-512 BF16"),
        (lambda: gpu_named("titan"), UsageError, r"'titan' is unknown; expected a GPU \(t4, p100"),
        (lambda: gpu_named("8GiBB"), UsageError, "memory '8GiBB' is not a size"),
        (
            lambda: GPUS["t4"].device("bf16"),
            ConfigError,
            "bf16 on Tesla T4, which emulates it; use",
        ),
    ):
        with pytest.raises(error, match=message):
            choose()
    assert {gpu_named(text) for text in ("auto", "CPU", "cuda", "cuda:1", "mps")} == {None}
    assert choose_device("CPU", "fp32") == choose_device("cpu", "fp32")
    assert tuple(GPUS) == GPU_NAMES
    assert all(2**30 < gpu.memory_bytes < 2**38 for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("text", "gib", "precision"),
    [("t4", 14.56, "fp16"), ("T4", 14.56, "fp16"), ("h200", 139, "bf16"), ("8 GiB", 8, "fp16")],
)
def test_a_gpu_is_planned_for_by_name_or_by_size(text: str, gib: float, precision: str) -> None:
    gpu = gpu_named(text)
    assert gpu.memory_bytes == int(gib * 2**30)
    assert gpu.device("auto").precision == precision
    assert gpu.device("fp32").precision == "fp32"
