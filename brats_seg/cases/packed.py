"""The bytes of a scan's file, compressed or not, and what can be wrong with them.

What the file holds decides, not its name: a `.nii` that is compressed and a `.nii.gz` that is not
both occur in copies of the releases.
"""

import gzip
import os
import zlib
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import deflate

from brats_seg.errors import CaseError

FETCH_AGAIN = "Copy or download the file again."

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_LENGTH_BYTES = 4
_SPARE_BYTES = 1 << 20
"""What may follow the voxels."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFile:
    """A file of a case, to be read or refused."""

    case_id: str
    path: Path

    def refuse(self, *, found: str, expected: str, next_step: str) -> CaseError:
        """Return the error that says what is wrong with the file."""
        return CaseError(self.case_id, self.path.name, found, expected, next_step)

    def read_bytes(self) -> bytes:
        """Read the file as it is on the disk."""
        try:
            return self.path.read_bytes()
        except OSError as error:
            raise self._unreadable(error) from error

    def read_head(self, n_bytes: int) -> bytes:
        """Read the first bytes of the unpacked content, fewer if it is shorter."""
        try:
            with self.path.open("rb") as stream:
                return self._head(stream, n_bytes)
        except OSError as error:
            raise self._unreadable(error) from error

    def head_of(self, packed: bytes, n_bytes: int) -> bytes:
        """Return the same as `read_head`, from what `read_bytes` read."""
        return self._head(BytesIO(packed), n_bytes)

    def check_length(self, n_bytes: int) -> None:
        """Refuse a file whose unpacked content is shorter than `n_bytes`.

        The last bytes tell its length; only where they look wrong is it unpacked.
        """
        try:
            with self.path.open("rb") as stream:
                magic = stream.read(len(_GZIP_MAGIC))
                n_told = stream.seek(0, os.SEEK_END)
                if magic == _GZIP_MAGIC:
                    stream.seek(max(0, n_told - _LENGTH_BYTES))
                    n_told = _told_length(stream.read())
        except OSError as error:
            raise self._unreadable(error) from error
        if not _is_likely(n_told, n_bytes):
            self.unpack(self.read_bytes(), n_bytes)

    def unpack(self, packed: bytes, n_bytes: int) -> bytes:
        """Decompress what `read_bytes` read, if it is compressed; at least `n_bytes` must come."""
        content = packed
        if packed.startswith(_GZIP_MAGIC):
            content = _unpack_at_once(packed, n_bytes) or self._unpack_members(packed)
        if len(content) < n_bytes:
            raise self.refuse(
                found=f"{len(content)} bytes",
                expected=f"the {n_bytes} that its header asks for",
                next_step=FETCH_AGAIN,
            )
        return content

    def _head(self, stream: BinaryIO, n_bytes: int) -> bytes:
        magic = stream.read(len(_GZIP_MAGIC))
        stream.seek(0)
        if not magic:
            raise self.refuse(found="an empty file", expected="a NIfTI file", next_step=FETCH_AGAIN)
        if magic != _GZIP_MAGIC:
            return stream.read(n_bytes)
        try:
            with gzip.GzipFile(fileobj=stream) as unpacked:
                return unpacked.read(n_bytes)
        except _GZIP_ERRORS as error:
            raise self._damaged() from error

    def _unpack_members(self, packed: bytes) -> bytes:
        try:
            return gzip.decompress(packed)
        except _GZIP_ERRORS as error:
            raise self._damaged() from error

    def _damaged(self) -> CaseError:
        return self.refuse(
            found="a gzip file that is cut off or damaged",
            expected="a whole one",
            next_step=FETCH_AGAIN,
        )

    def _unreadable(self, error: OSError) -> CaseError:
        return self.refuse(
            found=f"that it cannot be read ({error.strerror})",
            expected="a NIfTI file",
            next_step="Check its name, its rights and the disk.",
        )


def _unpack_at_once(packed: bytes, n_bytes: int) -> bytes:
    """Decompress with libdeflate, which knows one member only; return nothing if that fails.

    It trusts the length in the last four bytes, and takes that much memory: in a file that is cut
    off or has several members they say anything.
    """
    if not _is_likely(_told_length(packed), n_bytes):
        return b""
    try:
        return deflate.gzip_decompress(packed)
    except (deflate.DeflateError, ValueError):
        return b""


def _told_length(packed: bytes) -> int:
    """Return how long the content of a gzip file is, by its last bytes."""
    return int.from_bytes(packed[-_LENGTH_BYTES:], "little")


def _is_likely(n_told: int, n_bytes: int) -> bool:
    return n_bytes <= n_told <= n_bytes + _SPARE_BYTES
