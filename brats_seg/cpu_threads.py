"""Choose how many CPU threads torch uses, and how they wait for each other.

torch computes with OpenMP, whose library reads its settings from the environment when it is loaded.
The package therefore sets them when it is imported, if torch is not loaded yet; processes that it
starts inherit them. What a person has set stays as it is.

Number of threads. OpenMP starts one for each CPU of the process, and does not know of the share of
CPU time that a container may have ("quota"). With more threads than that, the system stops all of
them in the middle of their work for most of the time. Small patches are computed by one thread: see
`runtime.device.threads_for`.

Waiting. Threads of GNU OpenMP that are done with their part wait for the others in a loop that takes
the CPU, for up to 300,000 rounds, about 3 ms. On a machine with other work the thread that they wait
for may be the one whose CPU is taken. `SPIN_COUNT` rounds are enough to bridge the short waits of an
idle machine.

Products of matrices. OpenBLAS, with which numpy computes them, starts threads of its own, which wait in the
same way. Those of this package are small: `index` and `phantom` take as long with one thread on two idle CPUs,
for .7 to 1 of the CPU time, and .7 of the time where another process takes one of them (numpy 2.4.6, six
cases, two and three pairs). torch has another library for them, but on ARM.

The number of threads changes the last bits of sums. It does not depend on how busy the machine is,
so that a run that is resumed on the same machine has as many threads as before.
"""

import os
import platform
import sys
from collections.abc import Iterator
from contextlib import suppress
from math import ceil
from pathlib import Path

SPIN_COUNT = 30_000
"""Rounds of a waiting thread before it sleeps. A step on a patch of 96x96x96 with two threads on two CPUs
took 2.95 s with 300,000 rounds, 2.88 with 30,000, 3.07 with 10,000 and 3.36 with 1,000; beside one busy
process 11.0, 8.6, 8.4 and 6.5 s (torch 2.13 with libgomp)."""
COUNT_VARIABLES = ("OMP_NUM_THREADS", "OMP_THREAD_LIMIT", "MKL_NUM_THREADS")
"""Variables that decide the number of threads."""
WAIT_VARIABLES = ("OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "KMP_BLOCKTIME")
"""Variables that decide how threads wait."""

_CGROUPS = Path("/sys/fs/cgroup")
_MEMBERSHIP = Path("/proc/self/cgroup")
_chosen: dict[str, str] = {}
"""Variables that this module has set, with their values."""


def choose_threads() -> None:
    """Set the variables of this process that a person has not set, unless torch has read them already."""
    if "torch" in sys.modules:
        return
    if not os.environ.keys() & COUNT_VARIABLES and available_cpus() < _n_cpus():
        _chosen["OMP_NUM_THREADS"] = str(available_cpus())
    is_x86 = platform.machine() in ("x86_64", "AMD64")
    if is_x86 and not os.environ.keys() & {"OPENBLAS_NUM_THREADS", *COUNT_VARIABLES}:
        _chosen["OPENBLAS_NUM_THREADS"] = "1"
    if not os.environ.keys() & WAIT_VARIABLES:
        _chosen["GOMP_SPINCOUNT"] = str(SPIN_COUNT)
    os.environ.update(_chosen)


def user_value(name: str) -> str | None:
    """Return a variable of the environment, or None if it is missing or this module has set it."""
    return None if name in _chosen else os.environ.get(name)


def available_cpus() -> int:
    """Return the number of CPUs that this process may use: those it sees, or its quota of their time.

    A quota of one and a half CPUs counts as two.
    """
    quota = cpu_quota()
    return _n_cpus() if quota is None else max(1, min(_n_cpus(), ceil(quota)))


def cpu_quota(root: Path = _CGROUPS, membership: Path = _MEMBERSHIP) -> float | None:
    """Return the CPU time per time that control groups allow this process, or None for no limit.

    Args:
        root: Folder where control groups are mounted.
        membership: File with the groups of this process.
    """
    quotas = []
    for group in control_groups("cpu", root, membership):
        with suppress(OSError, ValueError, ZeroDivisionError):
            quotas.append(_read_quota(group))
    # a negative one is no limit
    return min((quota for quota in quotas if quota > 0), default=None)


def control_groups(
    controller: str, root: Path = _CGROUPS, membership: Path = _MEMBERSHIP
) -> Iterator[Path]:
    """Yield the folders of the control groups of this process, and of those above them.

    They are of version 1 or 2, and need not exist.

    Args:
        controller: Resource that they limit, `cpu` or `memory`.
        root: Folder where control groups are mounted.
        membership: File with the groups of this process.
    """
    with suppress(OSError):
        for line in membership.read_text().splitlines():
            _, controllers, path = line.split(":", 2)
            if not controllers or controller in controllers.split(","):
                # of version 2, and of version 1; in a container the path may be that of the host, and
                # the group is mounted as the root
                for mount in (root, root / "unified", root / controller, root / controllers):
                    group = mount / path.strip("/")
                    above = [folder for folder in group.parents if folder.is_relative_to(mount)]
                    yield from (group, *above)


def _n_cpus() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _read_quota(group: Path) -> float:
    """Return the quota of a group, in CPUs; raise `ValueError` if it is the word `max`."""
    # version 2 has both numbers in one file
    names = "cpu.max" if (group / "cpu.max").exists() else "cpu.cfs_quota_us cpu.cfs_period_us"
    quota, period = " ".join((group / name).read_text() for name in names.split()).split()
    return int(quota) / int(period)
