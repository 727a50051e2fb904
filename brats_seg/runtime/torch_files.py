"""Read and write the files of `torch.save` without running code from them.

A file is refused if it is damaged, or holds more than plain values and tensors.
"""

import hashlib
import pickle
import reprlib
import zipfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import IO, Any, BinaryIO, cast

import numpy as np
import torch
from pydantic import ValidationError
from torch import Tensor

from brats_seg.config_text import explained
from brats_seg.errors import ResumeError, some_of
from brats_seg.files import check_regular, whole_file

RUN_AGAIN = "Copy the file again; without a whole copy, train the run again with --fresh."
"""Advice where a checkpoint of a run cannot be read."""
_MOST_VALUES = 1_000_000
"""Values of a checkpoint besides the tensors, counted as often as they are referred to."""
_DEEPEST = 32
"""Levels of lists and dictionaries in a checkpoint; ours have six."""
_CPU = torch.device("cpu")
_NUMPY_SCALARS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")),
    *(
        (cast("Callable[..., Any]", np.float64(0).__reduce__()[0]), f"numpy.{module}.scalar")
        for module in ("core.multiarray", "_core.multiarray")
    ),
]
"""Classes of single numbers of numpy, which other programs keep in checkpoints: plain values."""


def read_plain(path: Path, next_step: str = RUN_AGAIN, *, device: torch.device = _CPU) -> Any:
    """Return the values and tensors that `torch.save` has written, read without running code.

    Args:
        path: File to read.
        next_step: Advice of the message if it cannot be read.
        device: Device of the tensors.

    Raises:
        ResumeError: The file is damaged, or holds more than plain values and tensors.
    """
    try:
        check_regular(path)
        _check_entries(path)
        with torch.serialization.safe_globals(_NUMPY_SCALARS):
            content = torch.load(path, map_location=device, weights_only=True)
        _check_values(content)
    except OSError as error:
        msg = f"{path} is not a checkpoint that can be read: {error.strerror}. {next_step}"
        raise ResumeError(msg) from None
    except Exception as error:  # noqa: BLE001 - torch raises errors of many kinds for a damaged file
        msg = f"{path} is not a checkpoint that can be read: {reason_of(error)}. {next_step}"
        raise ResumeError(msg) from None
    return content


def write_checkpoint(content: Mapping[str, Any], path: Path) -> None:
    """Write the entries of a checkpoint as a whole: a reader finds the old file or the new one.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    with whole_file(path) as beside, beside.open("wb") as file:
        writer = _Writer(file)
        try:
            torch.save(content, cast("IO[bytes]", writer))
        except RuntimeError:
            # torch reports a full disk as "unexpected pos"
            if writer.error is None:
                raise
            raise writer.error from None


def checked_weights(state: Any) -> dict[str, Tensor]:
    """Return a state dict, if all its entries are tensors whose values are in the file.

    Raises:
        TypeError: It is no dictionary of tensors.
        ValueError: A tensor repeats the values of the file.
    """
    if not isinstance(state, dict):
        msg = f"found {type(state).__name__} in place of the weights"
        raise TypeError(msg)
    for name, value in state.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not isinstance(name, str) or not is_dense or value.is_complex():
            msg = f"the weight {reprlib.repr(name)} is no tensor of real numbers"
            raise TypeError(msg)
        # a tensor can repeat a few stored values without end
        if value.nbytes > value.untyped_storage().nbytes():
            msg = f"the weight {name} has more values than the file holds"
            raise ValueError(msg)
    return state


def reason_of(error: Exception) -> str:
    """Return what an error says about content that cannot be read, as one line for a message."""
    if isinstance(error, ValidationError):
        return some_of(explained(error))
    if isinstance(error, pickle.UnpicklingError):
        # the message of torch recommends to run the code
        return "it holds something else than weights and plain values"
    if isinstance(error, KeyError):
        return f"it has no entry {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return f"{error}".partition("\n")[0] or "it ends too soon"


def sha256_of(path: Path) -> str:
    """Return the check sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_values(content: Any) -> None:
    """Raise `ValueError` if nested values are too deep or too many, as lists that hold each other."""
    pending = [(content, 0)]
    n_values = 0
    while pending:
        value, depth = pending.pop()
        below: Collection[Any] = ()
        if isinstance(value, Mapping):
            below = value.values()
        elif isinstance(value, list | tuple | set):
            below = value
        n_values += len(below)
        if depth > _DEEPEST or n_values > _MOST_VALUES:
            msg = (
                "its values are nested too deeply" if depth > _DEEPEST else "it has too many values"
            )
            raise ValueError(msg)
        pending += [(one, depth + 1) for one in below]


def _check_entries(path: Path) -> None:
    """Raise `BadZipFile` if a byte has changed: torch writes check sums but does not verify them.

    Entries of `torch.save` are not compressed, and cannot unpack to more than the file holds.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            msg = "its entries are compressed or overlap"
            raise zipfile.BadZipFile(msg)
        damaged = archive.testzip()
    if damaged is not None:
        msg = f"its entry {damaged} is damaged"
        raise zipfile.BadZipFile(msg)


class _Writer:
    """File to write to, which keeps the error of the system."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self.error: OSError | None = None

    def write(self, data: bytes) -> int:
        try:
            return self._file.write(data)
        except OSError as error:
            self.error = error
            raise

    def flush(self) -> None:
        self._file.flush()
