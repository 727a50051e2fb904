"""Read what models of other programs have in common: names of channels, and files to hash."""

import hashlib
from collections.abc import Iterable, Sequence
from pathlib import Path

from brats_seg.cases.layouts import modality_named
from brats_seg.errors import UsageError
from brats_seg.labels import MODALITIES

LONGEST_TEXT = 1 << 24
"""Bytes of the longest description of a model."""


def channels_of(names: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the modality of each input channel of a model, given the names of its channels.

    Args:
        names: Such as `T1Gd` or `FLAIR`, in the order of the channels.
        path: File that has the names, for messages.

    Raises:
        UsageError: They are not the four modalities of BraTS.
    """
    # MONAI's bundles call T1 with contrast agent T1c, nnU-Net's datasets T1ce or T1Gd
    found = [modality_named(name) for name in names]
    if sorted(map(str, found)) != sorted(MODALITIES):
        msg = (
            f"{path}: the model takes the channels {', '.join(names) or 'none'}; expected T1, T1 "
            "with contrast agent, T2 and FLAIR, each once. Models of other images cannot be used."
        )
        raise UsageError(msg)
    return tuple(map(str, found))


def hash_of_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files, in any order, as the fingerprint of a model."""
    sums = []
    for path in paths:
        with path.open("rb") as file:
            sums.append(hashlib.file_digest(file, "sha256").hexdigest())
    return hashlib.sha256("\n".join(sorted(sums)).encode()).hexdigest()[:32]
