"""Read the files of a case as they are on the disk, and decompress them, both within bounds.

The content of a file shows whether it is compressed, not its name: some copies of the releases have
compressed `.nii` files or uncompressed `.nii.gz` files. Files are decompressed with libdeflate, because
zlib, which nibabel uses, takes 2.6 to 3.1 times as long.

A small file can unpack to gigabytes. The header of a volume states how many bytes its voxels end
at, and no more than `SPARE_BYTES` beyond them are ever read or unpacked.
"""

import gzip
import os
import zlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import BinaryIO

import deflate

from brats_seg.errors import CaseError
from brats_seg.files import check_regular

FETCH_AGAIN = "Copy or download the file again."
SPARE_BYTES = 1 << 20
"""Most bytes that may follow the voxels."""

_GZIP_MAGIC = b"\x1f\x8b"
_GZIP_ERRORS = (EOFError, zlib.error, gzip.BadGzipFile)
_LENGTH_BYTES = 4
_HEAD_BYTES = 1 << 18
"""Bytes of a compressed file that hold its first bytes: the longest gzip header has about 64 KiB."""
_CHUNK_BYTES = 1 << 20
_LARGEST_RATIO = 1032
"""Largest ratio of unpacked to packed bytes in the format deflate (https://zlib.net/zlib_tech.html)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PackedFile:
    """A file of a case, compressed or not."""

    case_id: str
    path: Path

    def refuse(self, *, found: str, expected: str, next_step: str) -> CaseError:
        """Return an error that says what is wrong with the file."""
        return CaseError(self.case_id, self.path.name, found, expected, next_step)

    def read_bytes(self, n_bytes: int) -> bytes:
        """Read the file as it is on the disk.

        Args:
            n_bytes: Length of the unpacked content, as its header states it.

        Raises:
            CaseError: The file cannot be read, or is longer than its content and `SPARE_BYTES`.
        """
        with self._opened() as stream:
            self._check_size(os.fstat(stream.fileno()).st_size, n_bytes)
            return stream.read()

    def read_head(self, n_bytes: int) -> bytes:
        """Return the first bytes of the decompressed content, fewer if it is shorter."""
        with self._opened() as stream:
            return self._head(stream, n_bytes)

    def head_of(self, packed: bytes, n_bytes: int) -> bytes:
        """Return the first bytes of the decompressed content, given the result of `read_bytes`."""
        return self._head(BytesIO(packed), n_bytes)

    def check_length(self, n_bytes: int) -> None:
        """Raise `CaseError` if the unpacked content is not as long as its header states.

        The last bytes of a gzip file state the length; it is decompressed only if they are implausible.
        """
        with self._opened() as stream:
            is_packed = stream.read(len(_GZIP_MAGIC)) == _GZIP_MAGIC
            n_stated = stream.seek(0, os.SEEK_END)
            self._check_size(n_stated, n_bytes)
            if is_packed:
                stream.seek(max(0, n_stated - _LENGTH_BYTES))
                n_stated = _stated_length(stream.read())
        if not _is_likely(n_stated, n_bytes):
            self.unpack(self.read_bytes(n_bytes), n_bytes)

    def unpack(self, packed: bytes, n_bytes: int) -> bytes | bytearray:
        """Decompress the result of `read_bytes`, if it is compressed, and check its length.

        Raises:
            CaseError: It is damaged, shorter than `n_bytes`, or longer by more than `SPARE_BYTES`.
        """
        content: bytes | bytearray = packed
        if packed.startswith(_GZIP_MAGIC):
            if n_bytes > _LARGEST_RATIO * len(packed):
                raise self._damaged()
            content = _unpack_at_once(packed, n_bytes) or self._unpack_members(packed, n_bytes)
        if len(content) < n_bytes:
            raise self.refuse(
                found=f"{len(content)} bytes",
                expected=f"the {n_bytes} that its header states",
                next_step=FETCH_AGAIN,
            )
        self._check_size(len(content), n_bytes)
        return content

    @contextmanager
    def _opened(self) -> Iterator[BinaryIO]:
        try:
            # opening a named pipe would wait for a writer
            check_regular(self.path)
            with self.path.open("rb") as stream:
                yield stream
        except ValueError as error:  # a NUL in the name
            raise self._unreadable(str(error)) from error
        except OSError as error:
            raise self._unreadable(error.strerror or str(error)) from error

    def _head(self, stream: BinaryIO, n_bytes: int) -> bytes:
        start = stream.read(_HEAD_BYTES)
        if not start:
            raise self.refuse(found="an empty file", expected="a NIfTI file", next_step=FETCH_AGAIN)
        if not start.startswith(_GZIP_MAGIC):
            return start[:n_bytes]
        try:
            with gzip.GzipFile(fileobj=BytesIO(start)) as unpacked:
                return unpacked.read(n_bytes)
        except _GZIP_ERRORS as error:
            raise self._damaged() from error

    def _unpack_members(self, packed: bytes, n_bytes: int) -> bytearray:
        """Decompress a file of any number of members, and stop at the first byte that is too many."""
        content = bytearray()
        limit = n_bytes + SPARE_BYTES + 1
        try:
            with gzip.GzipFile(fileobj=BytesIO(packed)) as stream:
                while chunk := stream.read(min(_CHUNK_BYTES, limit - len(content))):
                    content += chunk
        except _GZIP_ERRORS as error:
            raise self._damaged() from error
        return content

    def _check_size(self, n_found: int, n_bytes: int) -> None:
        if n_found > n_bytes + SPARE_BYTES:
            raise self.refuse(
                found=f"more than {n_bytes + SPARE_BYTES} bytes",
                expected=f"the {n_bytes} that its header states",
                next_step=f"The header or the file is wrong. {FETCH_AGAIN}",
            )

    def _damaged(self) -> CaseError:
        return self.refuse(
            found="a gzip file that is cut off or damaged",
            expected="a whole one",
            next_step=FETCH_AGAIN,
        )

    def _unreadable(self, reason: str) -> CaseError:
        return self.refuse(
            found=f"a file that cannot be read ({reason})",
            expected="a NIfTI file",
            next_step="Check its name, its permissions and the disk.",
        )


def _unpack_at_once(packed: bytes, n_bytes: int) -> bytes:
    """Decompress with libdeflate, which supports one member only; return nothing if that fails.

    It allocates the length that the last four bytes state. They are arbitrary in a file that is cut
    off or has several members.
    """
    if not _is_likely(_stated_length(packed), n_bytes):
        return b""
    try:
        return deflate.gzip_decompress(packed)
    except (deflate.DeflateError, ValueError):
        return b""


def _stated_length(packed: bytes) -> int:
    """Return the length of the content of a gzip file, as its last bytes state it."""
    return int.from_bytes(packed[-_LENGTH_BYTES:], "little")


def _is_likely(n_stated: int, n_bytes: int) -> bool:
    return n_bytes <= n_stated <= n_bytes + SPARE_BYTES
