"""The folder of a run: what lies where, and whether a run there can go on."""

import json
import logging
import platform
import re
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

import torch

from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.config import Config
from brats_seg.errors import ResumeError
from brats_seg.files import remove_leftovers, whole_file
from brats_seg.models.device import Device
from brats_seg.models.trained import ModelIdentity
from brats_seg.settings import config_of, differing_settings
from brats_seg.training.checkpoint import Checkpoint, load_checkpoint

log = logging.getLogger(__name__)

FREE_SETTINGS = frozenset(
    {
        "training.device",
        "training.n_workers",
        "training.checkpoint_minutes",
        "training.micro_batch",
        "training.memory",
    }
)
"""May change between two starts of a run: the mathematics stays what it was."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """The files of one training."""

    path: Path

    @property
    def last_path(self) -> Path:
        """The latest state, which the run goes on from."""
        return self.path / "last.pt"

    @property
    def best_path(self) -> Path:
        """The weights that did best on the held-out cases."""
        return self.path / "best.pt"

    def begin(self, config: Config, split: Split, device: Device) -> None:
        """Write down the settings, the cases and the environment."""
        with whole_file(self.path / "config.yaml") as beside:
            beside.write_text(config.to_yaml())
        write_split(split, self.path / SPLIT_NAME)
        with whole_file(self.path / "environment.json") as beside:
            beside.write_text(json.dumps(environment_of(device), indent=2) + "\n")
        remove_leftovers(self.path)

    def set_aside(self) -> Path | None:
        """Rename an earlier run of this name, so that a fresh one takes its place."""
        if not self.path.exists():
            return None
        numbers = (
            re.fullmatch(rf"{re.escape(self.path.name)}\.(\d+)", p.name)
            for p in self.path.parent.iterdir()
        )
        last = max((int(match[1]) for match in numbers if match), default=0)
        aside = self.path.with_name(f"{self.path.name}.{last + 1}")
        self.path.rename(aside)
        return aside

    def checkpoint(
        self, config: Config, identity: ModelIdentity, device: torch.device
    ) -> Checkpoint | None:
        """Return the latest state, or None if the run has none yet.

        Raises `ResumeError` with the differences if settings or training cases are not those that
        the run began with, because what came of it would be neither run.
        """
        if not self.last_path.exists():
            return None
        checkpoint = load_checkpoint(self.last_path, device)
        self._check_settings(config_of(checkpoint.config), config)
        if checkpoint.identity.fingerprint != identity.fingerprint:
            msg = (
                f"{self.path} was trained on other cases: fingerprint "
                f"{checkpoint.identity.fingerprint}, now {identity.fingerprint}. {_WAYS_OUT}"
            )
            raise ResumeError(msg)
        return checkpoint

    def _check_settings(self, before: Config, now: Config) -> None:
        free = FREE_SETTINGS
        if now.schedule.name in {"plateau", "constant"}:
            # these do not look ahead to the end of the run
            free |= {"training.n_epochs"}
        changes = differing_settings(before, now)
        refused = {key: values for key, values in changes.items() if key not in free}
        if refused:
            lines = [f"  {key}: {old!r} -> {new!r}" for key, (old, new) in refused.items()]
            msg = "\n".join([f"{self.path} was begun with other settings:", *lines, _WAYS_OUT])
            raise ResumeError(msg)
        for key, (old, new) in changes.items():
            log.info("%s changes from %r to %r", key, old, new)


_WAYS_OUT = "Give the old ones, choose another --run, or start anew with --fresh."


def environment_of(device: Device) -> dict[str, str]:
    """Return versions and device, as they are written into the run and its checkpoints."""
    kind = device.torch_device
    name = torch.cuda.get_device_name(kind) if kind.type == "cuda" else platform.processor()
    packages = ("brats_seg", "torch", "monai", "numpy", "nibabel")
    return {
        "python": platform.python_version(),
        **{package: version(package) for package in packages},
        "platform": platform.platform(),
        "device": f"{kind} {name}".strip(),
        "precision": device.precision,
        "threads": str(torch.get_num_threads()),
    }
