"""Test the choice of CPU threads: quotas of containers, and settings of a person."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from brats_seg import cpu_threads
from brats_seg.cpu_threads import available_cpus, choose_threads, cpu_quota
from brats_seg.runtime.device import SMALL_PATCH, threads_for

CPU = torch.device("cpu")


def group(root: Path, path: str, **files: str) -> None:
    folder = root / path
    folder.mkdir(parents=True, exist_ok=True)
    for name, content in files.items():
        (folder / name.replace("__", ".")).write_text(content)


def membership(root: Path, content: str) -> Path:
    (root / "membership").write_text(content)
    return root / "membership"


V1 = {"cpu__cfs_quota_us": "50000\n", "cpu__cfs_period_us": "100000\n"}


@pytest.mark.parametrize(
    ("groups", "member", "expected"),
    [
        # a container sees its own group as the root, in version 2 and in version 1
        ({".": {"cpu__max": "150000 100000\n"}}, "0::/\n", 1.5),
        ({"cpu": V1}, "4:memory:/a\n3:cpu,cpuacct:/docker/1\n", 0.5),
        # SLURM limits the job, and not the step that the process is in
        (
            {
                "slurm/job": {"cpu__max": "200000 100000"},
                "slurm/job/step": {"cpu__max": "max 100000"},
                "slurm": {"cpu__max": "800000 100000"},
            },
            "0::/slurm/job/step\n",
            2.0,
        ),
    ],
)
def test_the_lowest_quota_of_all_groups_counts(
    tmp_path: Path, groups: dict[str, dict[str, str]], member: str, expected: float
) -> None:
    for path, files in groups.items():
        group(tmp_path, path, **files)

    assert cpu_quota(tmp_path, membership(tmp_path, member)) == expected


@pytest.mark.parametrize("content", ["max 100000", "", "nonsense", "1 0"])
def test_no_quota_is_no_limit(tmp_path: Path, content: str) -> None:
    group(tmp_path, ".", cpu__max=content)

    assert cpu_quota(tmp_path, membership(tmp_path, "0::/\n")) is None
    assert cpu_quota(tmp_path / "absent", tmp_path / "absent") is None


@pytest.mark.parametrize(("quota", "expected"), [(0.5, 1), (1.0, 1), (1.5, 2), (99.0, 8)])
def test_a_quota_limits_the_cpus(
    monkeypatch: pytest.MonkeyPatch, quota: float, expected: int
) -> None:
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: quota)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(8)))

    assert available_cpus() == expected


@pytest.mark.parametrize("name", [*cpu_threads.NUMBERS, *cpu_threads.WAITING])
def test_what_a_person_has_set_stays(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    monkeypatch.delitem(sys.modules, "torch")
    monkeypatch.setattr(cpu_threads, "cpu_quota", lambda: 1.0)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {0, 1})
    environment = {name: "3"}

    chosen = choose_threads(environment)

    assert environment[name] == "3"
    expected = {"OMP_NUM_THREADS"} if name in cpu_threads.WAITING else {"GOMP_SPINCOUNT"}
    assert chosen.keys() == expected
    assert environment == {name: "3", **chosen}
    monkeypatch.undo()
    assert choose_threads({}) == {}  # torch is loaded


@pytest.mark.parametrize("given", [{}, {"OMP_WAIT_POLICY": "PASSIVE", "OMP_NUM_THREADS": "1"}])
def test_importing_the_package_chooses_before_torch_is_loaded(given: dict[str, str]) -> None:
    """In every way in, and for the processes that it starts."""
    names = (*cpu_threads.NUMBERS, *cpu_threads.WAITING)
    bare = {key: value for key, value in os.environ.items() if key not in names}
    code = (
        "import brats_seg, os, sys; assert 'torch' not in sys.modules; "
        f"print({{n: os.environ[n] for n in {names} if n in os.environ}})"
    )

    done = subprocess.run(
        [sys.executable, "-c", code], env={**bare, **given}, capture_output=True, check=True
    )

    expected = given or {"GOMP_SPINCOUNT": str(cpu_threads.SPIN_COUNT)}
    found = eval(done.stdout)
    assert given or found.pop("OMP_NUM_THREADS", "1")
    assert found == expected


@pytest.fixture
def two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine of two CPUs where a person has set nothing."""
    for name in cpu_threads.NUMBERS:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr("brats_seg.runtime.device.available_cpus", lambda: 2)
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_small_patch_is_computed_by_one_thread_unless_a_person_chose(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with threads_for(CPU, (32, 32, 32)):
        assert torch.get_num_threads() == 1
    assert torch.get_num_threads() == 2

    with threads_for(CPU, (SMALL_PATCH, 1, 2)):
        assert torch.get_num_threads() == 2
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    with threads_for(CPU, (8, 8, 8)):
        assert torch.get_num_threads() == 2
    monkeypatch.delenv("OMP_NUM_THREADS")
    torch.set_num_threads(5)
    with threads_for(CPU, (8, 8, 8)):
        assert torch.get_num_threads() == 5
