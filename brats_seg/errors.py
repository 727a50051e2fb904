"""Errors of the package, each with the exit code of a command that it ends.

BratsError                1  something about the data is wrong
|- CaseError              1  one case cannot be used
|  `- LabelError          1  label values outside the convention
|- CaseProblemsError      1  several cases cannot be used
|- LayoutError            2  a folder holds no cases that can be read
|- UsageError             2  the command or a setting is wrong
|  |- ConfigError         2  a setting is unknown or out of range
|  |- FoldError           2  the fold table leaks, or lacks the requested fold
|  `- ResumeError         2  a run cannot be resumed with the given settings
`- EnvironmentalError     3  disk, permissions, device or memory prevent the work
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from difflib import get_close_matches
from itertools import islice
from typing import Literal

MORE_MEMORY = "Close other programs, or use a machine with more memory."
"""Next step where memory ran out."""
_N_NAMED = 5
"""Names that a message lists at most."""


class BratsError(Exception):
    """Base class of the errors of the package; the message is written for the user."""

    exit_code = 1


class CaseError(BratsError):
    """One case cannot be used; the message names case, file, found, expected and the next step."""

    def __init__(self, case_id: str, file: str, found: str, expected: str, next_step: str) -> None:
        # all parts are in `args`, so that the error can be pickled in a worker process
        super().__init__(case_id, file, found, expected, next_step)
        self.case_id = case_id
        self.file = file
        self.found = found
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        if not self.expected:
            # problems that a search has found, each of which is a whole message
            return self.found
        return printable(
            f"case {self.case_id}, file {self.file}: found {self.found}; "
            f"expected {self.expected}. {self.next_step}"
        )


class CaseProblemsError(BratsError):
    """Several cases cannot be used; the message lists all of them."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        whom = "it" if len(self.problems) == 1 else "them"
        lines = [f"{counted(len(self.problems), 'case')} cannot be used:", *self.problems]
        advice = f"Correct {whom}, or exclude {whom} with --skip-bad (cases.skip_bad=true)."
        return "\n  ".join(lines) + f"\n{advice}"


class LabelError(CaseError):
    """A label map does not fit its convention or its scan."""


class LayoutError(BratsError):
    """A folder contains no cases that can be read."""

    exit_code = 2


class UsageError(BratsError):
    """A command or a setting is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown or out of range."""


class FoldError(UsageError):
    """The fold table leaks, or does not contain the requested fold."""


class ResumeError(UsageError):
    """A run cannot be resumed with the given settings."""


class EnvironmentalError(BratsError):
    """Disk, permissions, device or memory prevent the work."""

    exit_code = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """Result of one check of the installation, the machine, the scans or a run."""

    check: str
    """Name of what was checked."""
    status: Literal["ok", "warning", "problem"]
    """`problem` prevents work, `warning` may disturb it."""
    found: str
    """Sentence about it."""
    remedy: str = ""
    """Command that fixes it; empty if nothing has to be done."""


def printable(text: str) -> str:
    r"""Return text on one line that any terminal and any file can hold.

    File names may hold line breaks, sequences that control a terminal, and bytes that are not UTF-8.

    Example:
        >>> printable("caf\udce9\n")
        'caf\\xe9\\n'
    """
    return "".join(part if part.isprintable() else _escaped(part) for part in text)


def _escaped(character: str) -> str:
    # the bytes of a file name that is not UTF-8 are the characters U+DC80 to U+DCFF (PEP 383)
    return character.encode("unicode_escape").decode().replace("\\udc", "\\x")


def counted(n: int, noun: str) -> str:
    """Return a number with its noun, in the plural where it needs one.

    Example:
        >>> counted(1, "case"), counted(2, "patch"), counted(3, "epoch")
        ('1 case', '2 patches', '3 epochs')
    """
    plural = "es" if noun.endswith(("tch", "sh", "s", "x")) else "s"
    return f"{n} {noun}{'' if n == 1 else plural}"


def unknown_name(
    subject: str, name: str, known: Collection[str], nearest: Sequence[str] = ()
) -> str:
    """Return a message about an unknown name, with the known ones and the nearest of them.

    Example:
        >>> unknown_name("preset 'dmo'", "dmo", ["demo", "full"])
        "preset 'dmo' is unknown; there are demo, full. Did you mean demo?"
    """
    nearest = nearest or get_close_matches(name, known, n=1)
    hint = f". Did you mean {nearest[0]}?" if nearest else ""
    return f"{subject} is unknown; there are {', '.join(known)}{hint}"


def some_of(names: Collection[str]) -> str:
    """Return the first names as text for a message, and how many more there are."""
    more = f" and {len(names) - _N_NAMED} more" if len(names) > _N_NAMED else ""
    return ", ".join(islice(names, _N_NAMED)) + more
