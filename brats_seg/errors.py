"""The errors of the package, and the exit code that each ends a command with.

BratsError                1  something about the data is wrong
|- CaseError              1  one case cannot be used
|  |- UnusableCaseError   1  a case has problems that an index or a search has found
|  `- LabelError          1  label values outside the convention
|- CaseProblemsError      1  several cases cannot be used
|- LayoutError            2  a folder holds no cases that can be read
|- UsageError             2  the command or a setting is wrong
|  |- ConfigError         2  a setting is unknown or out of range
|  |- FoldError           2  the fold table leaks, or lacks the fold asked for
|  `- ResumeError         2  a run cannot go on with what was given
`- EnvironmentalError     3  this machine cannot do it: disk, rights, device, memory
"""

from collections.abc import Sequence


class BratsError(Exception):
    """Anything the package refuses to do, with a message for the person at the keyboard."""

    exit_code = 1


class CaseError(BratsError):
    """One case cannot be used: the message names case, file, found, expected and the next step."""

    def __init__(self, case_id: str, file: str, found: str, expected: str, next_step: str) -> None:
        # every part goes to `args`, so that the error survives the way back from a worker process
        super().__init__(case_id, file, found, expected, next_step)
        self.case_id = case_id
        self.file = file
        self.found = found
        self.expected = expected
        self.next_step = next_step

    def __str__(self) -> str:
        return (
            f"case {self.case_id}, file {self.file}: found {self.found}; "
            f"expected {self.expected}. {self.next_step}"
        )


class CaseProblemsError(BratsError):
    """Several cases cannot be used: the message is the whole list."""

    def __init__(self, problems: Sequence[str]) -> None:
        super().__init__(problems)
        self.problems = tuple(problems)

    def __str__(self) -> str:
        return "\n".join(
            [
                f"{len(self.problems)} cases cannot be used:",
                *(f"  {problem}" for problem in self.problems),
                "Mend them, or leave them out with --skip-bad.",
            ]
        )


class UnusableCaseError(CaseError):
    """A case was found to be unusable before its voxels were read: the message is the list."""

    def __init__(self, case_id: str, problems: Sequence[str]) -> None:
        super().__init__(case_id, "(all)", "; ".join(problems), "a case without problems", "")
        # the arguments of this class, so that the error can be pickled
        self.args = (case_id, tuple(problems))

    def __str__(self) -> str:
        return self.found


class LabelError(CaseError):
    """A label map holds values that its convention does not know."""


class LayoutError(BratsError):
    """A folder holds no cases that can be read."""

    exit_code = 2


class UsageError(BratsError):
    """The command, or a setting of it, is wrong."""

    exit_code = 2


class ConfigError(UsageError):
    """A setting is unknown or out of range."""


class FoldError(UsageError):
    """The fold table leaks, or lacks the fold asked for."""


class ResumeError(UsageError):
    """A run cannot go on with what was given."""


class EnvironmentalError(BratsError):
    """This machine cannot do it: disk, rights, device or memory."""

    exit_code = 3
