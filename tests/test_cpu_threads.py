"""Test the choice of CPU threads: quotas of containers, and settings of a person."""

import os
import platform
import sys

import pytest
import torch

from brats_seg import cpu_threads
from brats_seg.cpu_threads import available_cpus, choose_threads, cpu_quota
from brats_seg.runtime.device import SMALL_PATCH, threads_for
from tests.builders import ROOT, start

IS_X86 = platform.machine() in ("x86_64", "AMD64")
COUNTS, WAITS = cpu_threads.COUNT_VARIABLES, cpu_threads.WAIT_VARIABLES
NAMES = ("OPENBLAS_NUM_THREADS", *COUNTS, *WAITS)
CPU = torch.device("cpu")
V1 = {"cpu.cfs_quota_us": "50000\n", "cpu.cfs_period_us": "100000\n"}
JOB = {"slurm/job": "200000 100000", "slurm/job/step": "max 100000", "slurm": "800000 100000"}


@pytest.mark.parametrize(
    ("groups", "member", "expected"),
    [
        # a container sees its own group as the root, in version 2 and in version 1
        ({".": {"cpu.max": "150000 100000\n"}}, "0::/\n", 1.5),
        ({"cpu": V1}, "4:memory:/a\n3:cpu,cpuacct:/docker/1\n", 0.5),
        # SLURM limits the job, and not the step that the process is in
        ({path: {"cpu.max": text} for path, text in JOB.items()}, "0::/slurm/job/step\n", 2.0),
        *(({".": {"cpu.max": text}}, "0::/\n", None) for text in ("max 100000", "", "x", "1 0")),
    ],
)
def test_the_lowest_quota_of_all_groups_counts(tmp_path, groups, member, expected):
    for path, files in groups.items():
        (tmp_path / path).mkdir(parents=True, exist_ok=True)
        for name, content in files.items():
            (tmp_path / path / name).write_text(content)
    (tmp_path / "membership").write_text(member)
    assert cpu_quota(tmp_path, tmp_path / "membership") == expected
    assert cpu_quota(tmp_path / "absent", tmp_path / "absent") is None


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_what_a_person_has_set_stays(monkeypatch, name: str, machine: str) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))
    for quota, n_cpus in ((0.5, 1), (1.5, 2), (99.0, 8), (1.0, 1)):
        monkeypatch.setattr(cpu_threads, "cpu_quota", lambda quota=quota: quota)
        assert available_cpus() == n_cpus
    monkeypatch.setattr("platform.machine", lambda: machine)
    monkeypatch.setattr(os, "environ", environment := {name: "3"})
    monkeypatch.setattr(cpu_threads, "_chosen", chosen := {})
    choose_threads()
    counted = {"OMP_NUM_THREADS"} if name not in COUNTS else set()
    # on ARM, torch computes with OpenBLAS too
    product = {"OPENBLAS_NUM_THREADS"} if counted and machine == "x86_64" else set()
    waiting = {"GOMP_SPINCOUNT"} if name not in WAITS else set()
    assert chosen.keys() == (counted | product | waiting) - {name}
    assert environment == {name: "3", **chosen}
    monkeypatch.undo()
    before = dict(os.environ)
    choose_threads()
    assert os.environ == before  # torch is loaded


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}])
def test_importing_the_package_chooses_before_torch_is_loaded(given: dict[str, str]) -> None:
    bare = {key: value for key, value in os.environ.items() if key not in NAMES}
    code = (
        "import brats_seg, os, sys; assert 'torch' not in sys.modules; "
        f"print({{n: os.environ[n] for n in {NAMES} if n in os.environ}})"
    )
    done = start([sys.executable, "-c", code], ROOT, {**bare, **given})
    expected = given or {"GOMP_SPINCOUNT": str(cpu_threads.SPIN_COUNT)}
    found = eval(done.stdout)
    assert given or found.pop("OMP_NUM_THREADS", "1")
    assert found.pop("OPENBLAS_NUM_THREADS", "") == ("" if given or not IS_X86 else "1")
    assert found == expected


def test_a_small_patch_takes_one_thread_by_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("brats_seg.runtime.device.available_cpus", lambda: 2)
    for name in COUNTS:
        monkeypatch.delenv(name, raising=False)
    large, small, before = (SMALL_PATCH, 1, 2), (32, 32, 32), torch.get_num_threads()
    try:
        for patch, chosen, n_threads, expected in (
            (small, None, 2, 1),
            (large, None, 2, 2),
            (small, "2", 2, 2),
            # set in torch itself
            (small, None, 5, 5),
        ):
            with monkeypatch.context() as patched:
                if chosen:
                    patched.setenv("OMP_NUM_THREADS", chosen)
                torch.set_num_threads(n_threads)
                with threads_for(CPU, patch):
                    assert torch.get_num_threads() == expected
                assert torch.get_num_threads() == n_threads
    finally:
        torch.set_num_threads(before)
