"""Memory that is used again as soon as nobody holds what was in it.

A patch of 128 voxels an edge takes 32 MB, and a new array of that size is given back to the system
when it is freed: asking for its pages again takes longer than filling them.
"""

import weakref
from math import prod
from typing import Self, TypeVar

import numpy as np
import numpy.typing as npt

Scalar = TypeVar("Scalar", bound=np.generic)


class Buffers:
    """Hands out arrays, and hands their memory out again when nothing refers to them any more.

    Whoever holds an array, a view of it, or a tensor made from it has it alone. As much memory is
    kept as was held at the same time.
    """

    def __init__(self) -> None:
        self._blocks: dict[int, list[_Block]] = {}

    def take(self, shape: tuple[int, ...], dtype: type[Scalar]) -> npt.NDArray[Scalar]:
        """Return an array with arbitrary contents."""
        n_bytes = prod(shape) * np.dtype(dtype).itemsize
        # powers of two: boxes of many sizes share blocks, and untouched pages cost nothing
        size = 1 << (n_bytes - 1).bit_length()
        blocks = self._blocks.setdefault(size, [])
        block = next((block for block in blocks if block.is_free), None)
        if block is None:
            block = _Block(size)
            blocks.append(block)
        return block.lend(n_bytes).view(dtype).reshape(shape)

    def __reduce__(self) -> tuple[type[Self], tuple[()]]:
        """Pickle nothing: in another process it begins with no memory."""
        return type(self), ()


class _Block:
    """A stretch of memory, and who has it."""

    def __init__(self, n_bytes: int) -> None:
        # numpy makes every view refer to the array that owns the memory, but a memoryview stops it:
        # all views of what is lent keep that alive, and nothing else does
        self._memory = np.empty(n_bytes, dtype=np.uint8).data
        self._lent: weakref.ref[npt.NDArray[np.uint8]] | None = None

    @property
    def is_free(self) -> bool:
        return self._lent is None or self._lent() is None

    def lend(self, n_bytes: int) -> npt.NDArray[np.uint8]:
        lent = np.frombuffer(self._memory, dtype=np.uint8, count=n_bytes)
        self._lent = weakref.ref(lent)
        return lent
