"""Try many faults in one test: it goes on after a failure, and fails at the end with the first ones."""

import tempfile
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from tests.faults.programs import limit_memory, run
from tests.faults.stages import Command, Stages, Undisturbed

OWNED = "owned"
"""File that hostile code would write."""
_N_SHOWN = 5
_MEMORY = partial(limit_memory, 2 << 30)


@dataclass
class Campaign:
    """Tries of one promise, in folders that are at some stage of the work."""

    stages: Stages
    folder: Path
    n_tries: int = 0
    failures: list[str] = field(default_factory=list)

    def start(self, stage: str, name: object = "here") -> Path:
        return self.stages.start(stage, self.folder / str(name))

    def undisturbed(self, command: Command) -> Undisturbed:
        return self.stages.undisturbed(command, Path(tempfile.mkdtemp(dir=self.folder)) / "alone")

    def note(self, what: str, *problems: str) -> None:
        """Count a try, which has failed if one of the problems is not empty."""
        self.n_tries += 1
        if message := "; ".join(filter(None, problems)):
            # a name may have characters that no terminal and no report can show
            self.failures.append(ascii(f"{what}: {message}")[1:-1].replace("\\n", "\n"))

    def attack(self, what: str, words: str, folder: Path, *codes: int) -> None:
        """Run a command that is given something hostile, with little memory."""
        ended = run(words, folder, _MEMORY)
        outside = any(OWNED in path.name for path in folder.parent.iterdir())
        is_owned = outside or (folder / OWNED).exists()
        owned = "code was run, or a file written outside" if is_owned else ""
        silent = "" if ended.code == 0 or ended.shown.strip() else "it said nothing"
        self.note(what, ended.expect(*codes), owned, silent)

    def finish(self) -> None:
        shown = "\n\n".join(self.failures[:_N_SHOWN])
        assert not self.failures, f"{len(self.failures)} of {self.n_tries} tries failed\n{shown}"
