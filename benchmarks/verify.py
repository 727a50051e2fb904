"""Time verifying prepared cases at the beginning of a run, and the check sums that could be used.

Shown are, for each case, the median time over rounds of `verify_case` with its files in the cache of
the system and without them, of reading the files alone, and of the check sum alone; and the time for
all cases of the folder with several threads. The check sums are compared in CPU time.

    python benchmarks/verify.py --prepared prepared/BraTS

Without a folder, two phantom cases of full size are prepared.
"""

import hashlib
import os
import statistics
import tempfile
import zlib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from time import perf_counter

import deflate
from comparison import (
    Comparison,
    append_json,
    options_of,
    ratios_of,
    seconds_in_turn,
    table_of,
)
from machine import version_of

from brats_seg.cases.index import index_cases
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import StoreConfig
from brats_seg.data.manifest import prepared_ids, verify_case, verify_cases
from brats_seg.data.prepare import prepare_cases

OURS = "crc32 of libdeflate"
CHECK_SUMS: dict[str, Callable[[bytes], object]] = {
    OURS: deflate.crc32,
    "crc32 of zlib": zlib.crc32,
    "BLAKE2b": lambda content: hashlib.blake2b(content).digest(),
    "SHA-256": lambda content: hashlib.sha256(content).digest(),
}


def main() -> None:
    """Print one line per way, and the comparison of the check sums."""
    arguments = options_of(__doc__, prepared=Path, rounds=5)
    with _folder(arguments.prepared) as folder:
        content = _print_times(folder, arguments.rounds)
    found = _compared(content, arguments.rounds)
    print(table_of(found))
    append_json(found, arguments.json)
    print(f"deflate {version_of('deflate')}, {os.cpu_count()} CPUs")


@contextmanager
def _folder(prepared: Path | None) -> Iterator[Path]:
    if prepared is not None:
        yield prepared
        return
    with tempfile.TemporaryDirectory() as name:
        scans, folder = Path(name) / "scans", Path(name) / "prepared"
        write_phantom_cases(scans, n_cases=2, seed=0, shape=(240, 240, 155))
        prepare_cases(index_cases(scans).cases, folder, StoreConfig(), n_workers=0)
        yield folder


def _print_times(folder: Path, n_rounds: int) -> bytes:
    """Print the time of each way of verifying, and return the files of one case."""
    case_ids = prepared_ids(folder)
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
    for name, (before, way) in ways.items():
        seconds = [_seconds(before, way) for _ in range(n_rounds)]
        print(f"{1e3 * statistics.median(seconds) / len(case_ids):7.1f} ms  {name}")
    return b"".join(path.read_bytes() for path in files[case_ids[0]])


def _compared(content: bytes, n_rounds: int) -> list[Comparison]:
    ways = {name: partial(function, content) for name, function in CHECK_SUMS.items()}
    seconds = seconds_in_turn(ways, n_rounds)
    return [
        Comparison(
            task=f"check sum of a prepared case, {len(content) / 1e6:.0f} MB",
            ours=f"{1e3 * statistics.median(seconds[OURS]):.1f} ms",
            peer=name,
            theirs=f"{1e3 * statistics.median(seconds[name]):.1f} ms",
            ratios=ratios_of(seconds[name], seconds[OURS]),
        )
        for name in CHECK_SUMS
        if name != OURS
    ]


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


if __name__ == "__main__":
    main()
