"""Test the judgement of machines, most of which are described by hand."""

from dataclasses import replace
from pathlib import Path

import pytest

from brats_seg.errors import EnvironmentalError, Finding
from brats_seg.runtime import machine as machine_module
from brats_seg.runtime.machine import (
    GpuFacts,
    Machine,
    check_machine,
    disk_finding,
    machine_findings,
    read_machine,
)

GIB = 2**30
STOCK_WHEEL = ("sm_75", "sm_80", "sm_86", "sm_90", "sm_100", "sm_120")
T4 = GpuFacts(
    name="Tesla T4",
    capability=(7, 5),
    memory_bytes=15 * GIB,
    free_bytes=14 * GIB,
    half="fp16",
)
P100 = replace(T4, name="Tesla P100-PCIE-16GB", capability=(6, 0))
MACHINE = Machine(
    torch_version="2.13.0+cu128",
    cuda="12.8",
    built_for=STOCK_WHEEL,
    driver="570.86.15",
    gpus=(T4,),
    n_cpus=4,
    quota=None,
    half="",
    memory_bytes=30 * GIB,
    free_memory_bytes=28 * GIB,
    shared_bytes=14 * GIB,
)


def judged(machine: Machine, check: str) -> Finding:
    (finding,) = [one for one in machine_findings(machine, GIB) if one.check == check]
    return finding


def test_a_t4_is_all_right_and_has_no_bf16() -> None:
    assert {one.status for one in machine_findings(MACHINE, GIB)} == {"ok"}
    found = judged(MACHINE, "GPU 0").found
    assert found.startswith("Tesla T4, sm_75, 14.0 GiB free of 15.0 GiB")
    assert found.endswith("fp16 native, bf16 only emulated")


def test_a_p100_under_a_stock_wheel_is_a_problem_with_the_wheel_that_has_its_kernels() -> None:
    finding = judged(replace(MACHINE, gpus=(P100,)), "GPU 0")

    assert finding.status == "problem"
    assert "sm_60: torch calls it available, but was built for sm_75, sm_80" in finding.found
    assert finding.remedy == (
        'pip install --force-reinstall "torch<2.15" '
        "--index-url https://download.pytorch.org/whl/cu126"
    )


def test_a_p100_is_all_right_with_kernels_for_it() -> None:
    machine = replace(MACHINE, gpus=(P100,), built_for=("sm_50", "sm_60", "sm_70", "sm_75"))

    assert judged(machine, "GPU 0").status == "ok"


def test_a_gpu_that_does_not_compute_is_a_problem() -> None:
    gpu = replace(T4, failures=("fp16 fails (CUDA error: unspecified launch failure)",))

    finding = judged(replace(MACHINE, gpus=(gpu,)), "GPU 0")

    assert (finding.status, finding.remedy) == ("problem", "nvidia-smi -q")
    assert "unspecified launch failure" in finding.found


def test_a_gpu_that_others_use_is_a_warning() -> None:
    gpu = replace(T4, free_bytes=3 * GIB)

    finding = judged(replace(MACHINE, gpus=(gpu,)), "GPU 0")

    assert (finding.status, finding.remedy) == ("warning", "nvidia-smi")


@pytest.mark.parametrize(
    ("cuda", "visible", "found", "remedy"),
    [
        ("", None, "built without CUDA", "whl/cu128"),
        ("12.8", "", "torch sees no GPU", "unset CUDA_VISIBLE_DEVICES"),
        ("12.8", None, "CUDA 12.8 needs driver 525 or later", "nvidia-smi"),
    ],
)
def test_a_driver_without_a_gpu_for_torch_is_a_problem(
    monkeypatch: pytest.MonkeyPatch, cuda: str, visible: str | None, found: str, remedy: str
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if visible is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", visible)

    finding = judged(replace(MACHINE, gpus=(), cuda=cuda), "torch")

    assert finding.status == "problem"
    assert found in finding.found
    assert remedy in finding.remedy


def test_a_machine_without_gpu_is_all_right() -> None:
    machine = replace(MACHINE, gpus=(), cuda="", driver="")

    assert judged(machine, "torch").status == "ok"


def test_the_shared_memory_of_a_docker_container_is_a_warning() -> None:
    finding = judged(replace(MACHINE, shared_bytes=64 * 2**20), "shared memory")

    assert finding.status == "warning"
    assert finding.found.startswith("64 MiB free in /dev/shm, where worker processes may need 1.0")
    assert finding.remedy == "docker run --shm-size=8g ..."


def test_little_memory_is_a_warning() -> None:
    assert judged(replace(MACHINE, free_memory_bytes=GIB), "memory").status == "warning"


def test_more_threads_than_cpus_are_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "64")

    finding = judged(replace(MACHINE, quota=1.5), "CPU")

    assert (finding.status, finding.remedy) == ("warning", "unset OMP_NUM_THREADS")
    assert finding.found.startswith("4 CPUs (a control group allows 1.5)")


def test_a_full_disk_is_a_problem(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine_module, "free_bytes", lambda folder: 2**20)

    finding = disk_finding("disk", tmp_path / "new", GIB, "12 cases: ")

    assert finding.status == "problem"
    assert f"1 MiB free in {tmp_path / 'new'}, 12 cases: 1.0 GiB needed" in finding.found


def test_this_machine_is_read() -> None:
    found = read_machine()

    assert found.n_cpus >= 1
    assert found.free_memory_bytes > 0
    assert machine_findings(found, 0)


def test_the_short_check_warns(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(machine_module, "free_bytes", lambda folder: 2**20)

    check_machine(tmp_path / "run", needed_shared=GIB, needed_disk=GIB)

    assert "shared memory: 1 MiB free" in caplog.text
    assert "disk space: 1 MiB free" in caplog.text
    assert caplog.text.count("`brats-seg doctor` says more") == 2
    assert not (tmp_path / "run").exists()


def test_the_short_check_raises_where_nothing_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    with pytest.raises(EnvironmentalError, match="cannot be written"):
        check_machine(tmp_path / "file")
