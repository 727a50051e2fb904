"""Check the installation, the machine, the disks and the scans before work begins.

`diagnose` asks the modules that do the work, changes nothing, and returns a line for each check, with
the command that fixes what is wrong. At import only the standard library is needed, because other
packages may be missing.
"""

import platform
import re
import shlex
import sys
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from brats_seg.errors import BratsError, Finding, counted, printable

if TYPE_CHECKING:
    from brats_seg.config import Config

_PACKAGE = "brats_seg"
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?")


@dataclass(frozen=True, kw_only=True, slots=True)
class Diagnosis:
    """Everything that `brats-seg doctor` has found."""

    version: str
    """Version of brats_seg; empty if it was put on the path without being installed."""
    can_work: bool
    """Whether no check has found a problem; warnings do not count."""
    findings: tuple[Finding, ...]


def diagnose(
    data: Path | None = None,
    *,
    prepared_path: Path | None = None,
    runs: Path = Path("runs"),
    config: "Config | None" = None,
) -> Diagnosis:
    """Check installation, machine, disk and scans; nothing is written.

    Args:
        data: Folder of scans, or table of their paths; None checks no scans.
        prepared_path: Folder of prepared cases; `prepared_path_of` the data folder by default.
        runs: Folder of the runs.
        config: Settings; those of cases, store, patch and workers are used.

    Example:
        >>> diagnosis = diagnose()
        >>> diagnosis.findings[0].check
        'Python'
    """
    python = f"{platform.python_version()} on {platform.platform(terse=True)}, {sys.prefix}"
    findings = [Finding(check="Python", status="ok", found=python), package_finding()]
    # the other checks need the packages
    if all(finding.status != "problem" for finding in findings):
        from brats_seg.config import Config

        config = config or Config()
        findings += _machine_findings(config)
        if data is not None:
            index = f"brats-seg index {shlex.quote(str(data))}" if data.exists() else ""
            findings += _run_check("scans", _scan_findings(data, prepared_path, config), index)
        findings += _run_findings(runs)
    return Diagnosis(
        version=installed_version(_PACKAGE),
        can_work=all(finding.status != "problem" for finding in findings),
        findings=tuple(findings),
    )


def package_finding() -> Finding:
    """Return what is missing or too old of what brats_seg requires."""
    if not installed_version(_PACKAGE):
        message = f"{_PACKAGE} is not installed, only on the path: what it needs cannot be checked"
        remedy = f"pip install {shlex.quote(str(files(_PACKAGE).joinpath('..')))}"
        return Finding(check="packages", status="warning", found=message, remedy=remedy)
    required = versions_required()
    installed = {name: installed_version(name) for name in required}
    needed = {
        name: f"{name}>={oldest}" if oldest else name
        for name, oldest in required.items()
        if not installed[name] or _numbers(installed[name]) < _numbers(oldest)
    }
    if not needed:
        return Finding(check="packages", status="ok", found=f"{len(required)} are new enough")
    parts = (f"{text} ({installed[name] or 'not'} installed)" for name, text in needed.items())
    return Finding(
        check="packages",
        status="problem",
        found=f"missing or too old: {', '.join(parts)}",
        remedy=" ".join(["pip install", *(f'"{text}"' for text in needed.values())]),
    )


def versions_required() -> dict[str, str]:
    """Return the oldest accepted version of each package that is always needed."""
    lines = requires(_PACKAGE) or []
    matches = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return {match[1]: match[2] or "" for match in matches if match}


def installed_version(name: str) -> str:
    """Return the version of an installed package; empty if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what follows, such as `+cpu` or `rc1`."""
    release = re.match(r"[\d.]*\d", text.removesuffix(".0"))
    return tuple(map(int, release[0].split("."))) if release else ()


def _machine_findings(config: "Config") -> list[Finding]:
    try:
        from brats_seg.runtime.device import gpus
        from brats_seg.runtime.machine import machine_findings
        from brats_seg.training.run_plan import shared_memory_needed
    # a library of CUDA that is missing, or of another version, raises an OSError
    except (ImportError, OSError) as error:
        message = f"it is installed, and cannot be imported: {printable(str(error))}"
        remedy = "pip install --force-reinstall torch"
        return [Finding(check="torch", status="problem", found=message, remedy=remedy)]
    return machine_findings(shared_memory_needed(config, on_gpu=bool(gpus())))


def _run_check(check: str, findings: Iterable[Finding], remedy: str) -> Iterator[Finding]:
    """Yield findings, and the error that ends them as a problem."""
    try:
        yield from findings
    except (BratsError, OSError) as error:
        yield Finding(check=check, status="problem", found=printable(str(error)), remedy=remedy)


def _scan_findings(data: Path, prepared_path: Path | None, config: "Config") -> Iterator[Finding]:
    from brats_seg.cases.case import missing_problems
    from brats_seg.cases.find import find_cases
    from brats_seg.data.fold import prepared_path_of
    from brats_seg.data.prepare import required_bytes
    from brats_seg.data.store import read_manifest
    from brats_seg.runtime.machine import disk_finding

    index = find_cases(data, label_files=config.cases.label_files)
    bad = [case for case in index.cases if not case.usable]
    n_labelled = sum(case.label is not None for case in index.cases)
    message = f"{counted(len(index.cases), 'case')} in {data}, {n_labelled} with a label map"
    if not bad:
        yield Finding(check="scans", status="ok", found=message)
    else:
        problem = f"{bad[0].case_id}: {[*bad[0].problems, *missing_problems(bad[0])][0]}"
        yield Finding(
            check="scans",
            status="problem" if len(bad) == len(index.cases) else "warning",
            found=f"{message}; {len(bad)} with problems, such as {printable(problem)}",
            remedy=f"brats-seg index {shlex.quote(str(data))}",
        )
    folder = prepared_path or prepared_path_of(data)
    left = [case for case in index.trainable if read_manifest(folder / case.case_id) is None]
    needed = required_bytes(left, folder, config.store.spacing_mm)
    prepared = f"{len(index.trainable) - len(left)} of {counted(len(index.trainable), 'labelled case')} prepared: "
    yield disk_finding("prepared cases", folder, needed, prepared)
    yield from _write_findings("write access", folder)


def _write_findings(check: str, folder: Path) -> Iterator[Finding]:
    # another mode does not help where a file is in its place, or above it
    remedy = f"chmod u+w {shlex.quote(str(folder))}" if folder.is_dir() else ""
    yield from _run_check(check, _writable_findings(check, folder), remedy)


def _writable_findings(check: str, folder: Path) -> Iterator[Finding]:
    from brats_seg.files import check_writable

    check_writable(folder)
    yield Finding(check=check, status="ok", found=f"{folder.absolute()} can be written to")


def _run_findings(runs: Path) -> Iterator[Finding]:
    from brats_seg.runtime.machine import RUN_BYTES, disk_finding

    yield from _write_findings("runs", runs)
    yield disk_finding("disk of the runs", runs, RUN_BYTES, "a run: ")
