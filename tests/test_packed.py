"""Reading compressed and damaged files, and files that unpack to more than they should."""

import gzip
import os
import socket
import tracemalloc
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.nifti import read_geometry, read_volume
from brats_seg.cases.packed import SPARE_BYTES, PackedFile
from brats_seg.errors import CaseError
from tests.builders import make_volumes, write_nifti

CONTENT = np.random.default_rng(0).integers(0, 50, size=100_000, dtype=np.uint8).tobytes()


def packed_file(tmp_path: Path, content: bytes) -> PackedFile:
    path = tmp_path / "scan.nii.gz"
    path.write_bytes(content)
    return PackedFile(case_id="case_1", path=path)


def unpacked(file: PackedFile, n_bytes: int = len(CONTENT)) -> bytes:
    return file.unpack(file.path.read_bytes(), n_bytes)


def members(*lengths: int) -> bytes:
    """Return the content as a gzip file of several members, the first of the lengths given."""
    starts = np.cumsum([0, *lengths])
    ends = [*starts[1:], len(CONTENT)]
    return b"".join(
        gzip.compress(CONTENT[start:end]) for start, end in zip(starts, ends, strict=True)
    )


@pytest.mark.parametrize(
    "content",
    [CONTENT, gzip.compress(CONTENT), members(1000), members(99_000), members(10, 50_000, 10)],
    ids=["plain", "one member", "short first", "short last", "four members"],
)
def test_content_comes_whole_however_it_is_packed(tmp_path: Path, content: bytes) -> None:
    file = packed_file(tmp_path, content)

    assert unpacked(file) == CONTENT
    assert file.read_head(540) == CONTENT[:540]
    assert file.head_of(content, 540) == CONTENT[:540]
    file.check_length(len(CONTENT))


def test_bytes_after_the_voxels_are_kept(tmp_path: Path) -> None:
    file = packed_file(tmp_path, gzip.compress(CONTENT))

    assert unpacked(file, n_bytes=50_000) == CONTENT


@pytest.mark.parametrize("n_bytes", [3, 15, 500, 30_000, -9, -1])
def test_a_gzip_file_that_is_cut_off_is_refused(tmp_path: Path, n_bytes: int) -> None:
    file = packed_file(tmp_path, gzip.compress(CONTENT)[:n_bytes])

    with pytest.raises(CaseError, match=r"case_1, file scan\.nii\.gz: found a gzip file that is"):
        unpacked(file)


@pytest.mark.parametrize("n_bytes", [15, 500, 30_000, -9, -1])
def test_the_last_bytes_tell_that_a_gzip_file_is_cut_off(tmp_path: Path, n_bytes: int) -> None:
    file = packed_file(tmp_path, gzip.compress(CONTENT)[:n_bytes])

    with pytest.raises(CaseError, match=r"case_1, file scan\.nii\.gz: found a gzip file that is"):
        file.check_length(len(CONTENT))


def test_a_flipped_bit_is_noticed(tmp_path: Path) -> None:
    content = bytearray(gzip.compress(CONTENT))
    content[len(content) // 2] ^= 1
    file = packed_file(tmp_path, bytes(content))

    with pytest.raises(CaseError, match="cut off or damaged; expected a whole one"):
        unpacked(file)


def test_a_length_that_lies_takes_no_memory(tmp_path: Path) -> None:
    # the last four bytes tell 4 GB
    file = packed_file(tmp_path, gzip.compress(CONTENT)[:-4] + b"\xff\xff\xff\xff")

    with pytest.raises(CaseError, match="cut off or damaged"):
        unpacked(file)


def test_content_shorter_than_its_header_asks_for_is_refused(tmp_path: Path) -> None:
    file = packed_file(tmp_path, gzip.compress(CONTENT[:700]))

    with pytest.raises(CaseError, match="found 700 bytes; expected the 100000 that its header"):
        unpacked(file)
    with pytest.raises(CaseError, match="found 700 bytes; expected the 100000 that its header"):
        file.check_length(len(CONTENT))


def test_an_empty_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"found an empty file; .* Copy or download the file again"):
        packed_file(tmp_path, b"").read_head(540)


def test_a_file_that_is_gone_is_a_problem_of_its_case(tmp_path: Path) -> None:
    file = PackedFile(case_id="case_1", path=tmp_path / "gone.nii")

    with pytest.raises(
        CaseError, match=r"gone\.nii: found a file that cannot be read \(No such file"
    ):
        file.read_bytes(1)
    with pytest.raises(
        CaseError, match=r"gone\.nii: found a file that cannot be read \(No such file"
    ):
        file.read_head(540)
    with pytest.raises(
        CaseError, match=r"gone\.nii: found a file that cannot be read \(No such file"
    ):
        file.check_length(1)


def test_a_folder_in_the_place_of_a_file_is_a_problem_of_its_case(tmp_path: Path) -> None:
    with pytest.raises(CaseError, match=r"cannot be read \(it is a folder\)"):
        PackedFile(case_id="case_1", path=tmp_path).read_head(540)


@pytest.mark.parametrize("reader", [read_volume, read_geometry])
@pytest.mark.parametrize("states", ["its length", "a likely length"])
def test_no_more_is_unpacked_than_the_header_asks_for(
    tmp_path: Path, states: str, reader: Callable[..., object]
) -> None:
    content = write_nifti(tmp_path / "scan.nii", make_volumes()[0]).read_bytes()
    packed = gzip.compress(content + bytes(100 * SPARE_BYTES), 1)
    if states == "a likely length":
        packed = packed[:-4] + len(content).to_bytes(4, "little")
    bomb = packed_file(tmp_path, packed)

    tracemalloc.start()
    if (states, reader) == ("a likely length", read_geometry):
        # nothing is unpacked: the voxels are read later
        reader(bomb.path, case_id="c")
    else:
        with pytest.raises(
            CaseError, match=rf"found more than \d+ bytes; expected the {len(content)}"
        ):
            reader(bomb.path, case_id="c")
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()

    assert peak < 5 * SPARE_BYTES


@pytest.mark.parametrize("n_bytes", [SPARE_BYTES, SPARE_BYTES + 1])
def test_few_bytes_may_follow_the_voxels(tmp_path: Path, n_bytes: int) -> None:
    path = write_nifti(tmp_path / "scan.nii", make_volumes()[0])
    path.write_bytes(path.read_bytes() + bytes(n_bytes))

    if n_bytes <= SPARE_BYTES:
        assert np.array_equal(read_volume(path, case_id="c").array, make_volumes()[0])
        return
    for reader in (read_volume, read_geometry):
        with pytest.raises(CaseError, match="found more than"):
            reader(path, case_id="c")


def test_a_sparse_file_of_a_terabyte_is_not_read(tmp_path: Path) -> None:
    path = write_nifti(tmp_path / "scan.nii", make_volumes()[0])
    os.truncate(path, 1 << 40)

    with pytest.raises(CaseError, match="found more than"):
        read_volume(path, case_id="c")


def test_a_name_of_any_length_in_a_gzip_header_ends_the_search(tmp_path: Path) -> None:
    # flag 8: a file name follows, up to a NUL
    file = packed_file(tmp_path, b"\x1f\x8b\x08\x08" + bytes(6) + b"x" * 3_000_000)

    with pytest.raises(CaseError, match="cut off or damaged"):
        file.read_head(540)


def named_pipe(path: Path) -> None:
    os.mkfifo(path)


def socket_file(path: Path) -> None:
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(os.fspath(path))


def device(path: Path) -> None:
    path.symlink_to("/dev/zero")


def link_to_itself(path: Path) -> None:
    path.symlink_to(path.name)


@pytest.mark.parametrize(
    ("make", "found"),
    [
        (named_pipe, "it is a named pipe"),
        (socket_file, "it is a socket"),
        (device, "it is a device"),
        (link_to_itself, "Too many levels of symbolic links"),
        (Path.mkdir, "it is a folder"),
    ],
)
def test_what_is_no_file_is_refused_without_opening_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, make: Callable[[Path], None], found: str
) -> None:
    # the path of a socket has about a hundred characters at most
    monkeypatch.chdir(tmp_path)
    path = Path("scan.nii.gz")
    make(path)

    for reader in (read_volume, read_geometry):
        with pytest.raises(CaseError, match=rf"scan\.nii\.gz: found .* \({found}\)"):
            reader(path, case_id="c")


@pytest.mark.parametrize("name", ["n" * 300, "a\0b", "\ud800"])
def test_a_name_that_no_file_can_have_is_refused(tmp_path: Path, name: str) -> None:
    with pytest.raises(CaseError, match="found a file that cannot be read"):
        read_volume(tmp_path / name, case_id="c")
