"""Test the choice of device and precision."""

import pytest
import torch

from brats_seg.errors import ConfigError, EnvironmentalError, UsageError
from brats_seg.presets import GPU_NAMES
from brats_seg.runtime.device import GPUS, Device, choose_device, gpu_named


def test_the_precision_of_the_cpu_is_what_it_computes_natively(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for capabilities, precision in (
        ({"avx512_bf16": True}, "bf16"),
        ({"amx_bf16": True, "avx512_bf16": False}, "bf16"),
        ({"avx2": True, "avx512_f": True, "avx512_bf16": False, "amx_bf16": False}, "fp32"),
        ({}, "fp32"),
    ):
        monkeypatch.setattr(torch.cpu, "get_capabilities", lambda found=capabilities: found)

        assert choose_device("cpu", "auto").precision == precision


def test_a_precision_that_is_asked_for_is_taken_unless_it_is_emulated(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: {"avx512_bf16": True})
    for precision, dtype in (("bf16", torch.bfloat16), ("fp32", torch.float32)):
        with choose_device("cpu", precision).autocast():
            assert (torch.ones(2, 2) @ torch.ones(2, 2)).dtype is dtype
    avx2 = {"architecture": "x86_64", "avx2": True, "avx512_bf16": False, "amx_bf16": False}
    monkeypatch.setattr(torch.cpu, "get_capabilities", lambda: avx2)
    with pytest.raises(ConfigError, match="bf16 needs AVX-512 BF16 or AMX"):
        choose_device("cpu", "bf16")


def test_only_float16_needs_a_loss_scale() -> None:
    cuda = torch.device("cuda")

    assert Device(torch_device=cuda, autocast_dtype=torch.float16).needs_scaler
    assert not Device(torch_device=cuda, autocast_dtype=torch.bfloat16).needs_scaler


def fake_gpu(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built_for: list[str]
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla")
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: built_for)
    monkeypatch.setattr(
        torch.cuda,
        "is_bf16_supported",
        lambda including_emulation=True: including_emulation or capability >= (8, 0),
    )


@pytest.mark.parametrize(("capability", "precision"), [((7, 5), "fp16"), ((9, 0), "bf16")])
def test_a_t4_computes_in_fp16_although_torch_claims_bf16(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], precision: str
) -> None:
    fake_gpu(monkeypatch, capability, ["sm_75", "sm_80", "sm_90"])

    assert choose_device("auto", "auto").precision == precision


@pytest.mark.parametrize(
    ("capability", "built_for", "runs"),
    [
        ((6, 0), ["sm_70", "sm_75", "sm_80"], False),
        ((7, 5), ["sm_70", "sm_80"], True),
        ((8, 9), ["sm_80", "sm_86"], True),
        ((12, 0), ["sm_80", "compute_90"], True),
        ((12, 0), ["sm_80", "sm_90a"], False),
    ],
)
def test_a_card_that_torch_has_no_kernels_for_is_refused_before_training(
    monkeypatch: pytest.MonkeyPatch, capability: tuple[int, int], built_for: list[str], runs: bool
) -> None:
    fake_gpu(monkeypatch, capability, built_for)

    if runs:
        assert choose_device("cuda", "fp32").torch_device.type == "cuda"
    else:
        with pytest.raises(EnvironmentalError, match=r"is sm_\d+, and this torch .* built for"):
            choose_device("cuda", "fp32")


def test_what_is_not_there_is_refused() -> None:
    with pytest.raises(ConfigError, match="device 'gpu' is unknown"):
        choose_device("gpu", "auto")
    with pytest.raises(EnvironmentalError, match=r"torch sees .* CUDA devices"):
        choose_device("cuda:97", "auto")
    with pytest.raises(ConfigError, match="fp16 needs AVX-512 BF16"):
        choose_device("cpu", "fp16")


def test_every_gpu_that_the_command_line_names_is_known() -> None:
    assert tuple(GPUS) == GPU_NAMES
    assert all(2**30 < gpu.memory_bytes < 2**38 for gpu in GPUS.values())


@pytest.mark.parametrize(
    ("text", "gib", "precision"),
    [("t4", 14.56, "fp16"), ("T4", 14.56, "fp16"), ("a100", 39.39, "bf16"), ("8 GiB", 8, "fp16")],
)
def test_a_gpu_is_planned_for_by_name_or_by_size(text: str, gib: float, precision: str) -> None:
    gpu = gpu_named(text)

    assert gpu is not None
    assert gpu.memory_bytes == int(gib * 2**30)
    assert gpu.device("auto").precision == precision
    assert gpu.device("fp32").precision == "fp32"


def test_other_names_are_those_of_devices_here_or_refused() -> None:
    assert {gpu_named(text) for text in ("auto", "cpu", "cuda", "cuda:1", "mps")} == {None}
    with pytest.raises(UsageError, match=r"device 'titan' is unknown; expected a GPU \(t4, p100"):
        gpu_named("titan")
    with pytest.raises(UsageError, match="memory '8GiBB' is not a size"):
        gpu_named("8GiBB")
    with pytest.raises(ConfigError, match="bf16 on Tesla T4, which emulates it; use fp16, fp32"):
        GPUS["t4"].device("bf16")
