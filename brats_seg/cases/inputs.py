"""Find the cases to predict: in folders of any layout, in tables of paths, or in four files.

Folders of DICOM files are handed to a function that converts them.
"""

import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.discovery import find_cases, id_problems
from brats_seg.cases.folders import holds_dicom
from brats_seg.cases.layouts import parse_file_name
from brats_seg.cases.path_table import is_path_table, path_problems
from brats_seg.errors import CaseError, UsageError

log = logging.getLogger(__name__)


def find_inputs(
    paths: Sequence[Path], *, of_dicom: Callable[[Path], Sequence[Case]] | None = None
) -> tuple[Case, ...]:
    """Return the cases in folders and tables of paths, sorted by id.

    Their roots are absolute, so that a worker on another machine finds the files. Label maps are not
    looked for. Errors of a case are listed in its `problems`.

    Args:
        paths: Folders of any layout, or tables of paths.
        of_dicom: Converts a folder of DICOM files to cases, as `dicom.convert.cases_of_dicom` does;
            without it, such a folder holds no cases.

    Raises:
        LayoutError: A folder contains no cases.
        UsageError: A path is neither a folder nor a table, or a table cannot be read or is empty.
    """
    found = [case for path in paths for case in _inputs_of(path, of_dicom)]
    if not found:
        msg = f"{', '.join(map(str, paths)) or 'the input'} lists no cases; expected at least one"
        raise UsageError(msg)
    n_of_id = Counter(case.case_id for case in found)
    checked = [_checked(case, n_of_id) for case in found]
    return tuple(sorted(checked, key=lambda case: (case.case_id, str(case.images[:1]))))


def single_input(case_id: str | None, files: Mapping[str, Path]) -> Case:
    """Return the case of four files, given by modality.

    The default id is the common part of the file names before the modality, or else the name of the
    folder.
    """
    if case_id is None:
        names = [parse_file_name(path.name) for path in files.values()]
        ids = {name.case for name in names if name}
        folder = next(iter(files.values())).absolute().parent.name
        case_id = (ids.pop() if len(ids) == 1 else "") or folder
    scans = {modality: ScanFile(path=path.absolute()) for modality, path in files.items()}
    case = Case.named(case_id, scans)
    case = replace(case, root=Path("/"), problems=tuple(id_problems(case)))
    return _checked(case, Counter([case.case_id]))


def _inputs_of(path: Path, of_dicom: Callable[[Path], Sequence[Case]] | None) -> Iterator[Case]:
    # Path.is_file raises if the name is too long
    if os.path.isfile(path) and not is_path_table(path):  # noqa: PTH113
        msg = (
            f"{path} is a file; expected a folder of scans, or a .csv or .json table of paths. For "
            "one case give --t1n, --t1c, --t2w and --t2f."
        )
        raise UsageError(msg)
    if of_dicom is not None and os.path.isdir(path) and holds_dicom(path):  # noqa: PTH112
        yield from of_dicom(path)
        return
    # neither a lack of label maps nor a choice of them matters to scans that are predicted
    discovery = find_cases(path, with_labels=False)
    for notice in discovery.notices:
        log.warning("%s: %s", path, notice)
    for case in discovery.cases:
        yield replace(case, root=case.root.absolute())


def _checked(case: Case, n_of_id: Mapping[str, int]) -> Case:
    problems = [*case.problems, *path_problems(case)]
    n_cases = n_of_id[case.case_id]
    if n_cases > 1:
        files = " and ".join(map(str, case.images)) or "(none)"
        next_step = "Rename or omit all but one: their results would have the same name."
        found = f"{n_cases} cases of this id"
        problems.append(str(CaseError(case.case_id, files, found, "one", next_step)))
    # those of a table have been found before
    return replace(case, problems=tuple(dict.fromkeys(problems)))
