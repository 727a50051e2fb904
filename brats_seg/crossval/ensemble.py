"""The runs of a cross-validation as one model to hand out."""

from collections.abc import Sequence
from pathlib import Path

from brats_seg.data.case_folder import whole_folder
from brats_seg.errors import UsageError
from brats_seg.inference.exported import MODEL_NAME, read_exported, write_exported
from brats_seg.inference.model import fingerprint_of, read_together


def export_ensemble(runs: Sequence[Path], folder: Path) -> str:
    """Export runs to a folder, unless they are there already, and return their fingerprint.

    Raises:
        UsageError: The runs do not go together, or the folder holds something else.
        EnvironmentalError: It cannot be written.
    """
    check_free(folder)
    networks = read_together(runs)
    fingerprint = fingerprint_of(networks)
    if not _holds(folder, fingerprint):
        when_full = "Free some space; the same command then goes on."
        with whole_folder(folder, when_full=when_full) as beside:
            write_exported(networks, fingerprint, beside)
    return fingerprint


def check_free(folder: Path) -> None:
    """Raise `UsageError` if a folder is there that is not an exported model."""
    if folder.exists() and not (folder / MODEL_NAME).exists():
        msg = f"{folder} is there and holds no model. Move it away, or choose another --output."
        raise UsageError(msg)


def _holds(folder: Path, fingerprint: str) -> bool:
    try:
        return folder.exists() and read_exported(folder).fingerprint == fingerprint
    except UsageError:
        # damaged, or of another version
        return False
