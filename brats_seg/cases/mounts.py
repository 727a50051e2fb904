"""Where the scans are, on machines that mount them somewhere of their own, such as Kaggle's."""

import logging
import os
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

from brats_seg.cases.case import Case
from brats_seg.cases.discovery import find_cases
from brats_seg.errors import LayoutError

log = logging.getLogger(__name__)


def find_data(places: Iterable[Path]) -> Path | None:
    """Return the folder that holds the labelled cases of one release, or None if there are none.

    The first place with labelled cases counts, and in it the release with most of them: what is
    mounted may hold several data sets, and their folders may lie at any depth.

    Args:
        places: Folders to search, such as `/kaggle/input`; they need not exist.
    """
    for place in places:
        if not place.is_dir():
            continue
        try:
            found = find_cases(place)
        except LayoutError as error:
            log.warning("%s", error)
            continue
        labelled = [case for case in found.cases if case.label is not None]
        if labelled:
            return _folder_of(place, labelled)
        log.warning("%s holds %d cases, none of them with a label map", place, len(found.cases))
    return None


def _folder_of(place: Path, cases: Sequence[Case]) -> Path:
    """Return the folder above the case folders of the commonest release."""
    by_release = Counter(case.release for case in cases)
    release = min(by_release, key=lambda name: (-by_release[name], name))
    if len(by_release) > 1:
        others = ", ".join(f"{n} of {name}" for name, n in by_release.items() if name != release)
        log.warning(
            "%s holds %d cases of %s; left aside: %s", place, by_release[release], release, others
        )
    chosen = [case for case in cases if case.release == release]
    folders = {place / scan.path.parent for case in chosen for scan in case.images}
    # the tables of a release lie beside its case folders, not in them
    above = folders if len(folders) < len(chosen) else {folder.parent for folder in folders}
    return Path(os.path.commonpath(above))
