"""Time verifying prepared cases at the beginning of a run, and the check sums that could be used.

Shown are, for each case, the median time over rounds of `verify_case` with its files in the cache of
the system and without them, of reading the files alone, and of the check sum alone; and the time for
all cases of the folder with several threads.

    python benchmarks/verify.py --prepared prepared/BraTS
"""

import argparse
import hashlib
import os
import statistics
import zlib
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import perf_counter

import deflate
from machine import version_of

from brats_seg.data.verify import prepared_ids, verify_case, verify_cases

CHECK_SUMS: dict[str, Callable[[bytes], object]] = {
    "crc32 of libdeflate": deflate.crc32,
    "crc32 of zlib": zlib.crc32,
    "BLAKE2b": lambda content: hashlib.blake2b(content).digest(),
    "SHA-256": lambda content: hashlib.sha256(content).digest(),
}


def main() -> None:
    """Print one line per way."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prepared", type=Path, required=True)
    parser.add_argument("--rounds", type=int, default=5)
    arguments = parser.parse_args()
    folder, case_ids = arguments.prepared, prepared_ids(arguments.prepared)
    files = {case_id: list((folder / case_id).iterdir()) for case_id in case_ids}
    n_bytes = sum(path.stat().st_size for paths in files.values() for path in paths)
    print(f"{len(case_ids)} cases of {n_bytes / len(case_ids) / 1e6:.0f} MB, per case:")
    verify = partial(_each, case_ids, partial(verify_case, folder))
    ways: dict[str, tuple[Callable[[], object], Callable[[], object]]] = {
        "verify, not in the cache": (partial(_each, case_ids, partial(_drop, files)), verify),
        "verify, in the cache": (verify, verify),
        "verify all at once": (verify, partial(verify_cases, case_ids, folder)),
        "read": (verify, partial(_each, case_ids, partial(_read, files))),
    }
    content = b"".join(path.read_bytes() for path in files[case_ids[0]])
    for name, function in CHECK_SUMS.items():
        ways[name] = (lambda: None, partial(_each, case_ids, partial(_sum, function, content)))
    for name, (before, way) in ways.items():
        seconds = [_seconds(before, way) for _ in range(arguments.rounds)]
        print(f"{1e3 * statistics.median(seconds) / len(case_ids):7.1f} ms  {name}")
    print(f"deflate {version_of('deflate')}, {os.cpu_count()} CPUs")


def _seconds(before: Callable[[], object], way: Callable[[], object]) -> float:
    before()
    started_s = perf_counter()
    way()
    return perf_counter() - started_s


def _each(case_ids: tuple[str, ...], work: Callable[[str], object]) -> None:
    for case_id in case_ids:
        work(case_id)


def _read(files: dict[str, list[Path]], case_id: str) -> None:
    for path in files[case_id]:
        path.read_bytes()


def _drop(files: dict[str, list[Path]], case_id: str) -> None:
    """Remove the files from the cache of the system."""
    for path in files[case_id]:
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


def _sum(function: Callable[[bytes], object], content: bytes, case_id: str) -> None:
    function(content)


if __name__ == "__main__":
    main()
