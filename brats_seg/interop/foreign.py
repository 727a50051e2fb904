"""Describe a trained model of another program, and how that program applies it to a scan.

`nnunet_model` and `monai_bundle` read such models. Only the preparation, the windows and the reading
of the output are those of the other program; cases, label maps, tables, records and pictures are
those of every prediction.
"""

import hashlib
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from torch import nn

from brats_seg.cases.case import LoadedCase
from brats_seg.cases.layouts import modality_named
from brats_seg.errors import UsageError
from brats_seg.inference.scan import Scan
from brats_seg.labels import MODALITIES
from brats_seg.runtime.windows import WindowRule
from brats_seg.runtime.weights import NOT_FITTED, FittedPrediction, ModelIdentity
from brats_seg.voxels.box import Triple

Image: TypeAlias = npt.NDArray[np.float32]

LONGEST_TEXT = 1 << 24
"""Bytes of the longest description of a model."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class NetworkInput:
    """A scan as a network takes it, and the way back."""

    image: Image
    """(C, ...): the channels, axes and voxel size of the network."""
    back: Callable[[Image], Image]
    """Turns logits on that grid into probabilities (3, x, y, z) of WT, TC and ET on the crop."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForeignMethod:
    """The way in which another program applies a network to a scan."""

    prepare: Callable[[LoadedCase], Scan]
    """Crops and normalises the modalities of a case."""
    to_network: Callable[[Scan], NetworkInput]
    """Returns the input of the network for a scan."""
    rule: WindowRule
    overlap: float
    """Share that neighbouring windows have in common, unless the user gives another."""
    mirror_axes: tuple[int, ...]
    """Axes of the input along which it is mirrored for the mean over mirror images."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ForeignNetwork:
    """A network of another program with its weights, and how it is applied."""

    network: nn.Module
    name: str
    """Name of its architecture, for messages."""
    identity: ModelIdentity
    multiple: Triple
    """Numbers that the size of an input must be a multiple of."""
    fingerprint: str
    method: ForeignMethod
    fitted: FittedPrediction = NOT_FITTED
    """Thresholds of the program."""


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
