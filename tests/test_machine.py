"""Test the judgement of machines, most of which are simulated."""

import pytest
import torch

from brats_seg.errors import EnvironmentalError, Finding
from brats_seg.runtime import machine
from brats_seg.runtime.machine import check_machine, disk_finding, machine_findings

GIB = 2**30
STOCK_WHEEL = ["sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120"]


@pytest.fixture
def t4(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """A machine with one T4, a stock wheel of torch, four CPUs and enough memory."""
    facts = {
        "brats_seg.runtime.machine._driver": "570.86.15",
        "brats_seg.runtime.machine._compute": None,
        "brats_seg.runtime.device.native_dtype": torch.float16,
        "brats_seg.runtime.machine.available_cpus": 4,
        "brats_seg.runtime.machine.cpu_quota": None,
        "brats_seg.runtime.machine.free_memory": 28 * GIB,
        "brats_seg.runtime.machine.free_bytes": 14 * GIB,
        "torch.cuda.is_available": True,
        "torch.cuda.device_count": 1,
        "torch.cuda.get_arch_list": STOCK_WHEEL,
        "torch.cuda.get_device_name": "Tesla T4",
        "torch.cuda.get_device_capability": (7, 5),
        "torch.cuda.mem_get_info": (14 * GIB, 15 * GIB),
    }
    for name, value in facts.items():
        monkeypatch.setattr(name, lambda *_, value=value: value)
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return monkeypatch


def judged(check: str) -> Finding:
    (finding,) = [one for one in machine_findings(GIB) if one.check == check]
    return finding


def test_a_t4_is_all_right_and_has_no_bf16(t4: pytest.MonkeyPatch) -> None:
    assert {one.status for one in machine_findings(GIB)} == {"ok"}
    found = judged("GPU 0").found
    assert found.startswith("Tesla T4, sm_75, 14.0 GiB free of 15.0 GiB")
    assert found.endswith("fp16 native, bf16 only emulated")


def test_a_p100_needs_a_wheel_that_has_its_kernels(t4: pytest.MonkeyPatch) -> None:
    t4.setattr(torch.cuda, "get_device_capability", lambda _: (6, 0))
    finding = judged("GPU 0")
    assert finding.status == "problem"
    assert "sm_60: torch calls it available, but was built for sm_75, sm_80" in finding.found
    assert finding.remedy == (
        'pip install --force-reinstall "torch<2.15" '
        "--index-url https://download.pytorch.org/whl/cu126"
    )
    t4.setattr(torch.cuda, "get_arch_list", lambda: ["sm_50", "sm_60", "sm_70", "sm_75"])
    assert judged("GPU 0").status == "ok"


def refuse(*_: object) -> None:
    raise RuntimeError("CUDA error: unspecified launch failure\nmore")


@pytest.mark.parametrize(
    "failing", ["torch.cuda.mem_get_info", "brats_seg.runtime.machine._compute"]
)
def test_a_gpu_that_does_not_compute_is_a_problem(t4: pytest.MonkeyPatch, failing: str) -> None:
    t4.setattr(failing, refuse)
    finding = judged("GPU 0")
    assert (finding.status, finding.remedy) == ("problem", "nvidia-smi -q")
    assert finding.found.endswith("(CUDA error: unspecified launch failure)")


def test_a_gpu_that_others_use_is_a_warning(t4: pytest.MonkeyPatch) -> None:
    t4.setattr(torch.cuda, "mem_get_info", lambda _: (3 * GIB, 15 * GIB))
    assert (judged("GPU 0").status, judged("GPU 0").remedy) == ("warning", "nvidia-smi")


@pytest.mark.parametrize(
    ("cuda", "visible", "found", "remedy"),
    [
        (None, None, "built without CUDA", "whl/cu128"),
        ("12.8", "", "torch sees no GPU", "unset CUDA_VISIBLE_DEVICES"),
        ("12.8", None, "perhaps because the driver is older", "nvidia-smi"),
    ],
)
def test_a_driver_without_a_gpu_for_torch_is_a_problem(t4, cuda, visible, found, remedy):
    t4.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        t4.setenv("CUDA_VISIBLE_DEVICES", visible)
    t4.setattr(torch.cuda, "is_available", lambda: False)
    t4.setattr(torch.version, "cuda", cuda)
    finding = judged("torch")
    assert finding.status == "problem"
    assert found in finding.found
    assert remedy in finding.remedy
    t4.setattr(machine, "_driver", lambda: "")
    assert judged("torch").status == "ok"


def test_little_memory_or_shared_memory_is_a_warning(t4: pytest.MonkeyPatch) -> None:
    t4.setattr(machine, "free_memory", lambda _: GIB)
    assert judged("memory").status == "warning"
    t4.setattr(machine, "free_bytes", lambda _: 64 * 2**20)
    finding = judged("shared memory")
    assert (finding.status, finding.remedy) == ("warning", "docker run --shm-size=8g ...")
    assert finding.found.startswith("64 MiB free in /dev/shm, where worker processes may need 1.0")


def test_more_threads_than_cpus_are_a_warning(t4: pytest.MonkeyPatch) -> None:
    t4.setenv("OMP_NUM_THREADS", "64")
    t4.setattr(machine, "cpu_quota", lambda: 1.5)
    finding = judged("CPU")
    assert (finding.status, finding.remedy) == ("warning", "unset OMP_NUM_THREADS")
    assert finding.found.startswith("4 CPUs (a control group allows 1.5)")


def test_the_short_check_warns(tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(machine, "free_bytes", lambda folder: 2**20)
    finding = disk_finding("disk", tmp_path / "new", GIB, "12 cases: ")
    check_machine(tmp_path / "run", needed_shared=GIB, needed_disk=GIB)
    assert finding.status == "problem"
    assert f"1 MiB free in {tmp_path / 'new'}, 12 cases: 1.0 GiB needed" in finding.found
    assert "shared memory: 1 MiB free" in caplog.text
    assert "disk space: 1 MiB free" in caplog.text
    assert caplog.text.count("`brats-seg doctor` says more") == 2
    assert not (tmp_path / "run").exists()
    (tmp_path / "file").write_text("")
    with pytest.raises(EnvironmentalError, match="cannot be written"):
        check_machine(tmp_path / "file")
