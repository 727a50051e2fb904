"""Arrays on disk of which a part is read without the rest: plain, or compressed in small blocks."""

import os
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt

from brats_seg.errors import EnvironmentalError

_CHUNK = 64
"""Edge in voxels of what blosc2 finds its way by; a block is what it unpacks at a time."""
_BLOCK = 32
"""A patch of 64 voxels an edge touches at most 27 blocks, a patch of 128 some 125."""


class StoredArray(Protocol):
    """An array whose parts are read when they are asked for."""

    @property
    def shape(self) -> tuple[int, ...]:
        """Length of every axis."""
        ...

    def __getitem__(self, key: tuple[slice, ...]) -> npt.NDArray[Any]: ...


def array_name(stem: str, *, compressed: bool) -> str:
    """Return the name of the file that holds an array."""
    return f"{stem}.b2nd" if compressed else f"{stem}.npy"


def write_array(path: Path, array: npt.NDArray[Any]) -> None:
    """Write an array in the form that the file name says, and wait until the disk has it."""
    with path.open("wb") as file:
        if path.suffix == ".b2nd":
            file.write(_compress(array))
        else:
            # not np.save: it reports a full disk without saying so
            array = np.ascontiguousarray(array)
            header = np.lib.format.header_data_from_array_1_0(array)
            np.lib.format.write_array_header_1_0(file, header)
            file.write(array.data)
        file.flush()
        os.fsync(file.fileno())


def open_array(path: Path) -> StoredArray:
    """Open an array for reading.

    Raises:
        EnvironmentalError: It is compressed, and the extra `compressed` is not installed.
    """
    if path.suffix == ".b2nd":
        return _blosc2().open(str(path), mode="r", mmap_mode="r", dparams={"nthreads": 1})
    # a plain array: np.memmap would run its own code at every slice
    return np.load(path, mmap_mode="r").view(np.ndarray)


def check_compression() -> None:
    """Raise `EnvironmentalError` unless compressed arrays can be written and read."""
    _blosc2()


def _compress(array: npt.NDArray[Any]) -> bytes:
    blosc2 = _blosc2()
    n_outer = array.ndim - 3
    # zstd 1 with shuffled bytes: a third of the size, and as fast to read as weaker codecs
    packed = blosc2.asarray(
        np.ascontiguousarray(array),
        chunks=(1,) * n_outer + tuple(min(_CHUNK, n) for n in array.shape[n_outer:]),
        blocks=(1,) * n_outer + tuple(min(_BLOCK, n) for n in array.shape[n_outer:]),
        cparams={
            "codec": blosc2.Codec.ZSTD,
            "clevel": 1,
            "filters": [blosc2.Filter.SHUFFLE],
            "nthreads": 1,
        },
        contiguous=True,
    )
    return packed.to_cframe()


def _blosc2() -> Any:
    try:
        import blosc2
    except ImportError as error:
        msg = (
            "compressed cases need the package blosc2, which is not installed. Run "
            "`pip install brats_seg[compressed]`, or set store.compressed to false."
        )
        raise EnvironmentalError(msg) from error
    return blosc2
