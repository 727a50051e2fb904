"""Read what models of other programs have in common: names of channels, and files to hash."""

import hashlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path

import yaml
from torch import Tensor, nn

from brats_seg.cases.layouts import modality_named
from brats_seg.errors import UsageError
from brats_seg.labels import MODALITIES
from brats_seg.runtime.torch_files import reason_of

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


@contextmanager
def usable(path: Path, next_step: str) -> Iterator[None]:
    """Turn errors of reading and building the content of a file into `UsageError`."""
    try:
        yield
    except (
        *(OSError, KeyError, TypeError, ValueError, AttributeError, RuntimeError, RecursionError),
        yaml.YAMLError,
    ) as error:
        msg = f"{path} cannot be used: {reason_of(error)}. {next_step}"
        raise UsageError(msg) from None


def load_weights(network: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load weights into a network, which may be on the device `meta`.

    Raises:
        UsageError: They are those of another network.
    """
    try:
        network.load_state_dict(weights, assign=next(network.parameters()).is_meta)
    except RuntimeError as error:
        reason = str(error).partition("\n")[2].strip().partition("\n")[0] or error
        msg = f"{path}: the weights are not those of the network that is described: {reason}"
        raise UsageError(msg) from None
