"""The case table of a data folder: what is there, what it means, and what is wrong with it."""

import logging
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import repeat
from pathlib import Path

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.copies import without_copies
from brats_seg.cases.discovery import find_cases
from brats_seg.cases.inspection import Inspection, inspect_case
from brats_seg.cases.meaning import OpenedCase, with_conventions
from brats_seg.cases.summary import summarise
from brats_seg.cases.table import read_index, write_index
from brats_seg.labels import convention_named
from brats_seg.progress import Track, untracked

__all__ = ["index_cases", "read_index", "summarise", "write_index"]

log = logging.getLogger(__name__)


def index_cases(
    root: Path,
    *,
    previous: CaseIndex | None = None,
    labels: str | None = None,
    n_workers: int = 0,
    track: Track = untracked,
) -> CaseIndex:
    """Find the cases below a data folder, look into their files, and tell what they mean.

    Args:
        root: The data folder.
        previous: An earlier index of the folder. Its cases without problems are not opened again
            unless their files have changed.
        labels: Name of the label convention, where names and values do not tell the right one.
        n_workers: Threads that open files, or 0 to do it in this one. Decompressing and hashing
            let other threads run.
        track: Shows how far the work is.

    Raises:
        LayoutError: Nothing below the folder is a case.
        ConfigError: No convention has the name given.
    """
    named = convention_named(labels) if labels else None
    discovery = find_cases(root)
    for notice in discovery.notices:
        log.warning("%s: %s", root, notice)
    known = {case.files_key: case for case in previous.usable} if previous else {}
    new = [case for case in discovery.cases if case.files_key not in known]
    inspections = track(_inspect_all(new, root, n_workers), what="index", total=len(new))
    opened = {
        case.files_key: OpenedCase.inspected(case, inspection)
        for case, inspection in zip(new, inspections, strict=True)
    }
    cases = [
        opened.get(case.files_key) or OpenedCase.recalled(case, known[case.files_key])
        for case in discovery.cases
    ]
    return CaseIndex(root=root, cases=without_copies(with_conventions(cases, root, named)))


def _inspect_all(cases: Sequence[Case], root: Path, n_workers: int) -> Iterator[Inspection]:
    if n_workers == 0:
        yield from (inspect_case(case, root) for case in cases)
        return
    with ThreadPoolExecutor(n_workers) as pool:
        yield from pool.map(inspect_case, cases, repeat(root))
