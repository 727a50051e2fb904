"""Options that several commands share, and how flags become settings."""

from pathlib import Path
from typing import Annotated, Any

import typer

from brats_seg.config import Config
from brats_seg.errors import ConfigError
from brats_seg.presets import PRESETS
from brats_seg.settings import load_config

DEMO_CASES = 12
"""Phantom cases of a demo set."""

PreparedOption = Annotated[
    Path | None, typer.Option(help="Folder of prepared cases. (default: prepared/<data name>)")
]
PresetOption = Annotated[
    str | None, typer.Option(help=f"Settings to start from: {', '.join(PRESETS)}.")
]
ConfigOption = Annotated[
    Path | None, typer.Option(help="YAML file with settings, over the preset.")
]
SetOption = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="One setting; may be repeated."),
]
LabelsOption = Annotated[
    str | None, typer.Option(help="Label convention of all cases, if detection errs.")
]
SkipBadOption = Annotated[bool, typer.Option("--skip-bad", help="Leave cases with problems out.")]


def settings_of(
    preset: str | None, path: Path | None, assignments: list[str] | None, flags: dict[str, Any]
) -> Config:
    """Flags win over `--set`, which wins over the file, which wins over the preset."""
    given = [f"{key}={value}" for key, value in flags.items() if value is not None]
    try:
        text = "" if path is None else path.read_text()
    except OSError as error:
        msg = f"the configuration file {path} cannot be read: {error.strerror}"
        raise ConfigError(msg) from None
    return load_config(preset=preset, text=text, assignments=[*(assignments or []), *given])
