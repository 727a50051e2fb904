"""Compare the installed packages with those that brats_seg requires, and with those it was tested with.

Only the standard library is used, because the other packages may be missing. `constraints.txt`, which
is installed with the package, holds the versions that were tested.
"""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, requires, version
from importlib.resources import files
from typing import Literal

PACKAGE = "brats_seg"
_REQUIREMENT = re.compile(r"([\w.-]+)\s*(?:>=\s*([\d.]+))?")

Status = Literal["ok", "warning", "problem"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check of the installation, the machine, the scans or a run."""

    check: str
    """Name of what was checked."""
    status: Status
    """`problem` prevents work, `warning` may disturb it."""
    found: str
    """Sentence about it."""
    remedy: str = ""
    """Command that mends it; empty if nothing has to be done."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Requirement:
    """A package that is required, with its versions."""

    name: str
    minimum: str
    """Oldest version that is accepted; empty for any."""
    tested: str
    """Version that was tested; empty if it is not known."""
    installed: str
    """Version that is installed; empty if it is missing."""

    @property
    def is_missing(self) -> bool:
        """Whether the package is missing or too old."""
        return not self.installed or _numbers(self.installed) < _numbers(self.minimum)

    @property
    def is_tested(self) -> bool:
        """Whether the installed version is the one that was tested, whatever it was built for."""
        return not self.tested or _numbers(self.installed) == _numbers(self.tested)

    def __str__(self) -> str:
        """Return the requirement as pip takes it."""
        return f"{self.name}>={self.minimum}" if self.minimum else self.name


def package_findings(
    required: Mapping[str, str] | None = None, tested: Mapping[str, str] | None = None
) -> tuple[Finding, ...]:
    """Return what is missing, too old, or of another version than the tested one.

    Args:
        required: Oldest accepted version of each package; those of brats_seg by default.
        tested: Tested version of each package; those of `constraints.txt` by default.
    """
    if required is None and not installed_version(PACKAGE):
        found = f"{PACKAGE} is on the path without being installed: what it needs cannot be checked"
        remedy = f"pip install {files(PACKAGE).joinpath('..')}"
        return (Finding(check="packages", status="warning", found=found, remedy=remedy),)
    versions = versions_tested() if tested is None else tested
    every = tuple(_requirements(versions_required() if required is None else required, versions))
    if missing := [one for one in every if one.is_missing]:
        return (_missing(missing),)
    # torch is left as it is: a wheel for another CUDA may be needed
    others = [one for one in every if not one.is_tested and one.name != "torch"]
    if others:
        return (_untested(others),)
    return (Finding(check="packages", status="ok", found=f"{len(every)} as tested"),)


def versions_required() -> dict[str, str]:
    """Return the oldest accepted version of each package that is always needed."""
    lines = requires(PACKAGE) or []
    found = (_REQUIREMENT.match(line) for line in lines if "extra ==" not in line)
    return {match[1]: match[2] or "" for match in found if match}


def versions_tested() -> dict[str, str]:
    """Return the tested version of each package, by its name in lower case with hyphens."""
    text = (files(PACKAGE) / "constraints.txt").read_text()
    pairs = (line.split("==") for line in text.splitlines() if "==" in line)
    return {_normalised(name): number for name, number in pairs}


def installed_version(name: str) -> str:
    """Return the version of an installed package; empty if it is missing."""
    try:
        return version(name)
    except PackageNotFoundError:
        return ""


def _requirements(required: Mapping[str, str], tested: Mapping[str, str]) -> Iterator[Requirement]:
    for name, minimum in required.items():
        yield Requirement(
            name=name,
            minimum=minimum,
            tested=tested.get(_normalised(name), ""),
            installed=installed_version(name),
        )


def _missing(missing: list[Requirement]) -> Finding:
    found = ", ".join(f"{one} ({one.installed or 'not installed'})" for one in missing)
    wanted = " ".join(f'"{one}"' for one in missing)
    return Finding(
        check="packages",
        status="problem",
        found=f"missing or too old: {found}",
        remedy=f"pip install {wanted}",
    )


def _untested(others: list[Requirement]) -> Finding:
    found = ", ".join(f"{one.name} {one.installed} (tested: {one.tested})" for one in others)
    wanted = " ".join(f"{one.name}=={one.tested}" for one in others)
    return Finding(
        check="packages",
        status="warning",
        found=f"not the tested versions: {found}",
        remedy=f"pip install {wanted}",
    )


def _normalised(name: str) -> str:
    return re.sub(r"[-_.]+", "-", name).lower()


def _numbers(text: str) -> tuple[int, ...]:
    """Return the numbers of a release, without what follows, such as `+cpu` or `rc1`."""
    release = re.match(r"\d+(?:\.\d+)*", text)
    numbers = [int(part) for part in release[0].split(".")] if release else []
    while numbers and numbers[-1] == 0:
        numbers.pop()
    return tuple(numbers)
