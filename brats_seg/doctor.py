"""Check the installation, the machine, the scans and the runs before work begins.

`diagnose` asks the modules that do the work, changes nothing, and returns a line for each check, with
the command that fixes what is wrong. At import only the standard library is needed, because other
packages may be missing; `constraints.txt`, which is installed with the package, holds the versions
that were tested.
"""

import platform
import re
import shlex
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from pathlib import Path
from typing import TYPE_CHECKING

from brats_seg.errors import BratsError, EnvironmentalError, Finding, counted, printable

if TYPE_CHECKING:
    from brats_seg.cases.case import Case
    from brats_seg.config import Config
    from brats_seg.training.state import SavedState

_PACKAGE = "brats_seg"
_OLDEST_PYTHON = (3, 11)
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
    """Check installation, machine, disk, scans and runs; nothing is written.

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
    findings = [_python_finding(), package_finding()]
    # the other checks need the packages
    if all(finding.status != "problem" for finding in findings):
        from brats_seg.config import Config

        config = config or Config()
        findings += _machine_findings(config)
        if data is not None:
            findings += _scan_findings(data, prepared_path, config)
        findings += _run_findings(runs, data)
    return Diagnosis(
        version=installed_version(_PACKAGE),
        can_work=all(finding.status != "problem" for finding in findings),
        findings=tuple(findings),
    )


def package_finding(
    required: Mapping[str, str] | None = None, tested: Mapping[str, str] | None = None
) -> Finding:
    """Return what is missing, too old, or of another version than the tested one.

    By default these are the versions that brats_seg requires, and those of `constraints.txt`.
    """
    check = "packages"
    if required is None and not installed_version(_PACKAGE):
        found = (
            f"{_PACKAGE} is on the path without being installed: what it needs cannot be checked"
        )
        remedy = f"pip install {files(_PACKAGE).joinpath('..')}"
        return Finding(check=check, status="warning", found=found, remedy=remedy)
    required = versions_required() if required is None else required
    tested = versions_tested() if tested is None else tested
    installed = {name: installed_version(name) for name in required}
    needed = {
        name: f"{name}>={oldest}" if oldest else name
        for name, oldest in required.items()
        if not installed[name] or _numbers(installed[name]) < _numbers(oldest)
    }
    if needed:
        parts = (f"{text} ({installed[name] or 'not installed'})" for name, text in needed.items())
        quoted = " ".join(f'"{text}"' for text in needed.values())
        remedy = f"pip install {quoted}"
        found = f"missing or too old: {', '.join(parts)}"
        return Finding(check=check, status="problem", found=found, remedy=remedy)
    others = {
        name: tested[key]
        for name in required
        # torch is left as it is: a wheel for another CUDA may be needed
        if name != "torch"
        and (key := _normalised(name)) in tested
        and _numbers(installed[name]) != _numbers(tested[key])
    }
    if others:
        parts = (f"{name} {installed[name]} (tested: {other})" for name, other in others.items())
        remedy = f"pip install {' '.join(f'{name}=={other}' for name, other in others.items())}"
        found = f"not the tested versions: {', '.join(parts)}"
        return Finding(check=check, status="warning", found=found, remedy=remedy)
    return Finding(check=check, status="ok", found=f"{len(required)} as tested")


def versions_required() -> dict[str, str]:
    """Return the oldest accepted version of each package that is always needed."""
    lines = requires(_PACKAGE) or []
    matches = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return {match[1]: match[2] or "" for match in matches if match}


def versions_tested() -> dict[str, str]:
    """Return the tested version of each package, by its name in lower case with hyphens."""
    text = (files(_PACKAGE) / "constraints.txt").read_text()
    pairs = (line.split("==") for line in text.splitlines() if "==" in line)
    return {_normalised(name): number for name, number in pairs}


def installed_version(name: str) -> str:
    """Return the version of an installed package; empty if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what follows, such as `+cpu` or `rc1`."""
    release = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)


def _python_finding() -> Finding:
    found = f"Python {platform.python_version()} on {platform.platform(terse=True)}, {sys.prefix}"
    if sys.version_info >= _OLDEST_PYTHON:
        return Finding(check="Python", status="ok", found=found)
    oldest = ".".join(map(str, _OLDEST_PYTHON))
    found = f"{found}; expected {oldest} or later"
    remedy = f"python{oldest} -m venv .venv"
    return Finding(check="Python", status="problem", found=found, remedy=remedy)


def _machine_findings(config: "Config") -> list[Finding]:
    try:
        import torch

        from brats_seg.runtime.machine import machine_findings
        from brats_seg.training.batches import shared_memory_needed
    # a library of CUDA that is missing, or of another version, raises an OSError
    except (ImportError, OSError) as error:
        found = f"it is installed, and cannot be imported: {printable(str(error))}"
        remedy = "pip install --force-reinstall torch"
        return [Finding(check="torch", status="problem", found=found, remedy=remedy)]
    needed = shared_memory_needed(config, on_gpu=torch.cuda.is_available())
    return machine_findings(needed)


def _scan_findings(data: Path, prepared_path: Path | None, config: "Config") -> Iterator[Finding]:
    from brats_seg.cases.find import find_cases
    from brats_seg.data.fold import prepared_path_of
    from brats_seg.data.manifest import read_manifest
    from brats_seg.data.prepare import required_bytes
    from brats_seg.runtime.machine import disk_finding

    index = f"brats-seg index {shlex.quote(str(data))}"
    try:
        cases = find_cases(data, label_files=config.cases.label_files).cases
    except BratsError as error:
        remedy = index if data.exists() else ""
        yield Finding(check="scans", status="problem", found=printable(str(error)), remedy=remedy)
        return
    yield _cases_finding(cases, data, index)
    folder = prepared_path or prepared_path_of(data)
    labelled = [case for case in cases if case.label is not None and case.usable]
    n_done = sum(read_manifest(folder / case.case_id) is not None for case in labelled)
    needed = required_bytes(labelled, folder, config.store.spacing_mm)
    what = f"{n_done} of {counted(len(labelled), 'labelled case')} prepared: "
    yield disk_finding("prepared cases", folder, needed, what)
    yield _write_finding("write access", folder)


def _cases_finding(cases: "tuple[Case, ...]", data: Path, index: str) -> Finding:
    from brats_seg.cases.case import missing_problem

    n_labelled = sum(case.label is not None for case in cases)
    bad = [case for case in cases if not case.usable]
    found = f"{counted(len(cases), 'case')} in {data}, {n_labelled} with a label map"
    if not bad:
        return Finding(check="scans", status="ok", found=found)
    example = printable(f"{bad[0].case_id}: {next(iter(bad[0].problems), missing_problem(bad[0]))}")
    found = f"{found}; {len(bad)} with problems, such as {example}"
    status = "problem" if len(bad) == len(cases) else "warning"
    return Finding(check="scans", status=status, found=found, remedy=index)  # type: ignore[arg-type]


def _write_finding(check: str, folder: Path) -> Finding:
    from brats_seg.files import check_writable

    try:
        check_writable(folder)
    except EnvironmentalError as error:
        remedy = f"chmod u+w {shlex.quote(str(folder))}"
        return Finding(check=check, status="problem", found=printable(str(error)), remedy=remedy)
    return Finding(check=check, status="ok", found=f"{folder.absolute()} can be written to")


def _run_findings(runs: Path, data: Path | None) -> Iterator[Finding]:
    from brats_seg.runtime.machine import RUN_BYTES, disk_finding
    from brats_seg.training.run_folder import CONFIG_NAME

    yield _write_finding("runs", runs)
    yield disk_finding("disk of the runs", runs, RUN_BYTES, "a run: ")
    for path in sorted(runs.glob("*")) if runs.is_dir() else []:
        if (path / CONFIG_NAME).is_file():
            yield _run_finding(path, data)


def _run_finding(path: Path, data: Path | None) -> Finding:
    """Say how far a run is, and whether this version can continue it."""
    from brats_seg.files import is_locked
    from brats_seg.runtime.weights import RUN_LOCK_NAME
    from brats_seg.training.run_folder import RunFolder
    from brats_seg.training.state import read_state

    check = printable(f"run {path.name}")
    if is_locked(path / RUN_LOCK_NAME):
        return Finding(check=check, status="ok", found="another process trains or tunes it now")
    last = RunFolder(path=path).last_path
    again = _train_command(path, data)
    if not last.exists():
        found = "it was begun, and has no checkpoint yet"
        return Finding(check=check, status="warning", found=found, remedy=again)
    try:
        saved = read_state(last)
    except (BratsError, OSError) as error:
        found = printable(str(error))
        return Finding(check=check, status="problem", found=found, remedy=f"{again} --fresh")
    return _progress_finding(check, saved, again)


def _progress_finding(check: str, saved: "SavedState", again: str) -> Finding:
    n_done, n_epochs = saved.progress.epoch, saved.progress.n_epochs
    found = f"{n_done} of {counted(n_epochs, 'epoch') if n_epochs else 'unknown epochs'} done"
    if saved.progress.is_finished:
        return Finding(check=check, status="ok", found=f"{found}: finished")
    then = saved.environment
    others = [
        f"{name} {then[name]}, now {now}"
        for name in (_PACKAGE, "torch", "monai")
        if name in then and (now := installed_version(name)) not in {then[name], ""}
    ]
    if others:
        found += f"; begun with {'; '.join(others)}: the last bits of its results may differ"
    return Finding(check=check, status="warning", found=f"{found}, unfinished", remedy=again)


def _train_command(path: Path, data: Path | None) -> str:
    """Return the command that continues a run, as far as its folder tells."""
    command = ["brats-seg", "train"]
    if data is not None:
        command += ["--data", str(data)]
    if fold := re.fullmatch(r"fold(\d+)", path.name):
        command += ["--fold", fold[1]]
    return shlex.join([*command, "--run", str(path)])
