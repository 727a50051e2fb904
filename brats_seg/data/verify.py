"""Verify prepared cases on disk by the check sums of their manifests.

A changed bit in a prepared image would be learnt without a sign of it. All cases of a run are
therefore verified when it begins and when it resumes, and a held-out case whenever it is read as a
whole. Verifying a real case of 29 MB takes 15 ms if the system has its files in the cache, as long as
reading them does, and 29 ms if it has not (`benchmarks/verify.py`, one core of a Xeon); the first epoch
then finds them there. Damage that happens while a run trains is found when it resumes.
"""

from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

from brats_seg.cpu_threads import available_cpus
from brats_seg.data.manifest import MANIFEST_NAME, StoredFile, check_sum, manifest_of
from brats_seg.data.store import FOREGROUND_NAME, MEASURES_NAME, PREPARE_AGAIN, array_name
from brats_seg.errors import CaseError, UsageError, some_of
from brats_seg.progress import Track, untracked

_N_THREADS = 8
"""Largest number of threads: more do not make a disk faster."""
_WRITTEN = (
    MANIFEST_NAME,
    FOREGROUND_NAME,
    MEASURES_NAME,
    *(
        array_name(stem, compressed=packed)
        for stem in ("image", "labels")
        for packed in (False, True)
    ),
)
"""Names of the files of prepared cases."""


def verify_case(folder: Path, case_id: str) -> None:
    """Compare every file of a prepared case with its check sum.

    Args:
        folder: Folder of all prepared cases.
        case_id: Id of the case.

    Raises:
        CaseError: A file is missing or damaged.
    """
    path, manifest = folder / case_id, manifest_of(folder, case_id)
    for written in manifest.files:
        _compare(case_id, path / written.name, written)


def verify_cases(
    case_ids: Sequence[str], folder: Path, *, track: Track = untracked
) -> tuple[CaseError, ...]:
    """Verify prepared cases, several at a time.

    Args:
        case_ids: Ids of the cases.
        folder: Folder of all prepared cases.
        track: Shows the progress.

    Returns:
        What `verify_case` raises for the damaged ones.
    """
    with ThreadPoolExecutor(min(_N_THREADS, available_cpus())) as pool:
        found = pool.map(partial(_damage, folder), case_ids)
        verified = track(found, what="verifying prepared cases", total=len(case_ids))
        return tuple(error for error in verified if error is not None)


def prepared_ids(folder: Path) -> tuple[str, ...]:
    """Return the ids of the prepared cases in a folder, damaged or not.

    Raises:
        UsageError: There are none.
    """
    found = tuple(
        sorted(
            path.name
            for path in folder.glob("*")
            if not path.name.startswith(".") and _has_files(path)
        )
    )
    if not found:
        msg = f"{folder} holds no prepared cases: give the folder of `brats-seg prepare`"
        raise UsageError(msg)
    return found


def is_replaceable(path: Path) -> bool:
    """Return whether a folder is a prepared case, damaged or not, or empty."""
    return path.is_dir() and (_has_files(path) or not any(path.iterdir()))


def raise_damage(errors: Collection[CaseError]) -> None:
    """Raise the first of the errors of `verify_cases`, if any; its message names the other cases."""
    if not errors:
        return
    first, *others = errors
    also = some_of([error.case_id for error in others])
    found = f"{first.found} (damaged too: {also})" if others else first.found
    raise CaseError(first.case_id, first.file, found, first.expected, first.next_step)


def _has_files(path: Path) -> bool:
    """Return whether a folder has a file of a prepared case."""
    return any((path / name).exists() for name in _WRITTEN)


def _damage(folder: Path, case_id: str) -> CaseError | None:
    try:
        verify_case(folder, case_id)
    except CaseError as error:
        return error
    return None


def _compare(case_id: str, path: Path, written: StoredFile) -> None:
    try:
        n_bytes = path.stat().st_size
        crc32 = check_sum(path) if n_bytes == written.n_bytes else None
    except OSError as error:
        found = f"a file that cannot be read ({error.strerror})"
        expected = "a file of the prepared case"
        raise CaseError(case_id, str(path), found, expected, PREPARE_AGAIN) from error
    if crc32 != written.crc32:
        found = f"{n_bytes} bytes" if crc32 is None else f"the check sum {crc32:08x}"
        expected = f"{written.n_bytes} bytes" if crc32 is None else f"{written.crc32:08x}"
        expected += " as they were written: the file is damaged"
        raise CaseError(case_id, str(path), found, expected, PREPARE_AGAIN)
