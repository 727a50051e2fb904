"""Index a data folder: find its cases, open their files, and report what is wrong with them.

All files of each case are read once and checked as `load_case` does; what is unusual becomes a
remark, what cannot be used a problem. The label maps of a release have one numbering, so that what
the clear ones show is compared with all of them. The index is stored as `cases.csv`, a row per case.
"""

import hashlib
import logging
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, get_type_hints

import numpy as np
import numpy.typing as npt
from pydantic import TypeAdapter, ValidationError

from brats_seg.cases import layouts, releases
from brats_seg.cases.case import Case, CaseFacts, CaseIndex, ScanFile, open_files, read_case_files
from brats_seg.cases.described import data_folder
from brats_seg.cases.find import EXPECTED_LABELS, find_cases
from brats_seg.config import validation_problems
from brats_seg.errors import UsageError, counted
from brats_seg.labels import convention_named
from brats_seg.progress import Track, untracked
from brats_seg.tables import BETWEEN_TEXTS, read_table, write_table
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.voxels.shapes import group_by
from brats_seg.wings import find_wing

log = logging.getLogger(__name__)

_PLAIN = [name for name in get_type_hints(Case) if name not in {"root", "files", "facts"}]
"""Fields of a case that have a column of their own."""
_FACTS = [*get_type_hints(CaseFacts)]
_TEXTS = ("problems", "remarks", "scan_remarks", "near_copies")
"""Columns of several texts."""
_COLUMNS = [*_PLAIN, *layouts.KINDS, *_FACTS]
_PARSER = TypeAdapter(CaseFacts)


def index_cases(
    root: Path,
    *,
    previous: CaseIndex | None = None,
    labels: str | None = None,
    label_files: str | None = None,
    n_workers: int = 0,
    track: Track = untracked,
) -> CaseIndex:
    """Find the cases of a data folder, or of a table of paths, open their files, and resolve their label conventions.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     write_phantom_cases(Path(folder), n_cases=2, seed=0)
        ...     index = index_cases(Path(folder))
        >>> [(case.case_id, case.convention, case.usable) for case in index.cases]
        [('BraTS2021_00000', 'brats2017', True), ('BraTS2021_00001', 'brats2017', True)]
    """
    if labels:
        convention_named(labels)
    index = find_cases(root, label_files=label_files)
    for notice in index.notices:
        log.warning("%s: %s", root, notice)
    known = {case.facts.files_key: case for case in previous.usable} if previous else {}
    new = [case for case in index.cases if case.facts.files_key not in known]
    with ThreadPoolExecutor(n_workers or 1) as pool:
        results = pool.map(inspect_case, new) if n_workers else map(inspect_case, new)
        cases = list(track(results, what="index", total=len(new)))
    for case in index.cases:
        if earlier := known.get(case.facts.files_key):
            # the grade is that of the folders above, and other cases decide about near copies
            facts = replace(earlier.facts, grade=case.facts.grade, age_years=None, near_copies=())
            cases.append(replace(case, release=earlier.release, facts=facts))
    kept = without_duplicates(with_conventions(cases, labels or ""))
    if judge := find_wing("quality.near_copies"):
        kept = judge.with_near_copies(kept)
    return CaseIndex(root=index.root, cases=kept)


def inspect_case(case: Case) -> Case:
    """Open the files of a case, and return it with its facts, its release and its problems."""
    volumes, problems, facts = open_files(case, read_case_files(case))
    first, judge = volumes.get(next(iter(case.modalities), "")), find_wing("quality.near_copies")
    facts = replace(
        facts,
        fingerprint=judge.fingerprint_of(first) if judge and first and not problems else "",
        voxel_hash=_hash(first.array) if first else "",
    )
    return replace(
        case,
        release=releases.release_at(case.release, first.geometry.shape if first else None),
        problems=(*case.problems, *map(str, problems)),
        facts=facts,
    )


def with_conventions(cases: Iterable[Case], labels: str) -> tuple[Case, ...]:
    """Return the cases with their label convention; values outside it become a problem.

    Cases of one release are resolved together.
    """
    groups = group_by(cases, lambda case: [_source(case)])
    return tuple(case for group in groups for case in _resolve_group(group, labels))


def without_duplicates(cases: Iterable[Case]) -> tuple[Case, ...]:
    """Return the cases by id, one of each set of duplicates; duplicates that differ get a problem.

    Duplicates are equal if the voxels of their first modality are equal, and the values and tumour
    volumes of the label maps of those that have one. The first of equal duplicates by path is kept,
    preferably one with a label map. Duplicates with other problems are all kept.
    """
    ordered = sorted(cases, key=lambda case: (case.case_id, case.folder.as_posix()))
    kept = [case for case in ordered if not case.usable]
    usable = [case for case in ordered if case.usable]
    for duplicates in group_by(usable, lambda case: [case.case_id]):
        kept += _merge_duplicates(duplicates) if len(duplicates) > 1 else duplicates
    return tuple(sorted(kept, key=lambda case: (case.case_id, case.folder.as_posix())))


def write_index(index: CaseIndex, path: Path) -> None:
    """Write the case table; raise `EnvironmentalError` if the file cannot be written."""
    write_table(path, _COLUMNS, map(_row, index.cases))


def read_index(path: Path, root: Path) -> CaseIndex:
    """Read a case table that `write_index` wrote of a data folder or a table of paths.

    File names are relative to the data folder, or to the folder of the table of paths.
    """
    try:
        table = read_table(path, required=_COLUMNS, short_rows=False)
        rows, folder = table.to_dict("records"), data_folder(root)
        return CaseIndex(root=folder, cases=tuple(_case(row, folder) for row in rows))
    except (UsageError, ValueError) as error:
        wrong = (
            "; ".join(validation_problems(error)) if isinstance(error, ValidationError) else error
        )
        msg = f"{path} is not a case table: {wrong}. Expected a case table of `brats-seg index`. Move it away, and index the data again."
        raise UsageError(msg) from error


def summarise(index: CaseIndex) -> tuple[str, ...]:
    """Return lines that describe an index: the cases of each release, problems, and remarks."""
    broken = [case for case in index.cases if not case.usable]
    lines = [
        f"{counted(len(index.cases), 'case')}, {len(index.usable)} usable, "
        f"{len(index.trainable)} of these with a label map",
        *_release_lines(index.cases),
    ]
    if index.cases and not any(case.label for case in index.cases):
        looked_for = f"looked for label maps called {EXPECTED_LABELS}"
        lines.append(f"{looked_for}; name others with --label-files")
    if broken:
        lines.append(f"{counted(len(broken), 'case')} cannot be used:")
        lines += [f"  {problem}" for case in broken for problem in case.problems]
    return (*lines, *remark_lines(index.cases))


def remark_lines(cases: Iterable[Case]) -> Iterator[str]:
    """Yield lines with the remarks on cases; equal remarks share a line."""
    if remarks := [(remark, case.case_id) for case in cases for remark in case.remarks]:
        yield "remarks:"
    for group in group_by(remarks, lambda pair: pair[:1]):
        remark, case_id = group[0]
        yield f"  {case_id if len(group) == 1 else counted(len(group), 'case')}: {remark}"


def _hash(array: npt.NDArray[Any]) -> str:
    """Hash the shape and the numbers of an array (X, Y, Z).

    One release stores as float32 what another stores as int16: whole numbers in the range of int16
    are hashed as int16, all others as float32.
    """
    with np.errstate(invalid="ignore", over="ignore"):
        canonical: npt.NDArray[Any] = array.astype(np.int16, copy=False)
        if not np.array_equal(canonical, array):
            # adding 0 turns negative zeros into positive ones
            canonical = array.astype(np.float32) + np.float32(0)
    key = hashlib.sha256(str(array.shape).encode())
    key.update(np.asfortranarray(canonical).T.data)
    return key.hexdigest()[:32]


def _source(case: Case) -> tuple[str, str]:
    """Return a key that is equal for cases which use one label convention."""
    if case.release not in {releases.UNKNOWN, releases.NNUNET, releases.DECATHLON}:
        return case.release, ""
    above = case.folder.parent
    # the cases of a data set are in one folder, or its patients are
    return case.release, (above.parent if above.name == case.patient_id else above).as_posix()


def _resolve_group(group: Sequence[Case], labels: str) -> Iterator[Case]:
    """Yield the cases of one release with their label convention."""
    shown = [case.shown_labels for case in group if case.label_values]
    maps = [labels_of_case.values for labels_of_case in shown]
    values = sorted(frozenset[int]().union(*maps))
    given = labels or next((case.convention for case in group if case.convention), "")
    # the shape has been taken into account in the release already
    convention, is_ambiguous = releases.resolve_convention(group[0].release, values, declared=given)
    if is_ambiguous and {3, 4} <= {*values} and not releases.have_four_tissues(maps):
        # enhancing tumour is 3 in some label maps and 4 in others
        for part in group_by(group, lambda case: [3 in case.label_values]):
            yield from _resolve_group(part, labels)
        return
    guesses = [
        f"the label values {' '.join(map(str, values))} were read as {convention.name}, but the "
        "names do not confirm it: if that is wrong, name the convention with --convention"
    ] * is_ambiguous
    n_of_one = sum(1 in of_map for of_map in maps)
    are_masks = is_ambiguous and max(values, default=0) == 1 and n_of_one > 1
    judgements = releases.judge_labels(shown, convention, is_named=bool(labels))
    for case in group:
        remarks = [*case.remarks, *case.facts.scan_remarks]
        if not case.label_values:
            yield replace(case, convention="", remarks=tuple(remarks))
            continue
        problems, on_label = next(judgements)
        if are_masks:
            problem = f"label 1 alone, as in all {n_of_one} label maps: a mask of the whole tumour"
            expected = "labels of oedema, tumour core and enhancing tumour"
            next_step = "Give label maps of the tissues, or say by --convention which tissue 1 is."
            case = case.with_problem(problem, expected, next_step, case.shown_labels.file)
        in_wt = (n for value, n in case.facts.label_voxels if value in convention.regions[0])
        empty = ["the label map holds no tumour"] if case.label_values == (0,) else []
        yield replace(
            case,
            convention=convention.name,
            facts=replace(case.facts, tumour_ml=sum(in_wt) * case.facts.voxel_mm3 / MM3_PER_ML),
            problems=(*case.problems, *map(str, problems)),
            remarks=(*remarks, *(on_label or guesses), *empty),
        )


def _merge_duplicates(duplicates: Sequence[Case]) -> Iterator[Case]:
    labelled = [case for case in duplicates if case.label]
    if len({case.facts.voxel_hash for case in duplicates}) > 1:
        problem = "another scan"
    elif len({(case.label_values, case.facts.tumour_ml) for case in labelled}) > 1:
        problem = "the scan with another label map"
    else:
        chosen = (labelled or duplicates)[0]
        remark = f"the same scan is in {_other_folders(chosen, duplicates)}, which was ignored"
        yield replace(chosen, remarks=(*chosen.remarks, remark))
        return
    next_step = "Remove or rename the one that is not wanted."
    for case in duplicates:
        message = f"{problem} of the same id in {_other_folders(case, duplicates)}"
        yield case.with_problem(message, "one folder per id", next_step)


def _other_folders(case: Case, duplicates: Sequence[Case]) -> str:
    return " and ".join(f"{copy.folder.as_posix()}/" for copy in duplicates if copy is not case)


def _row(case: Case) -> dict[str, str]:
    values = {name: getattr(case.facts, name) for name in _FACTS}
    values |= {name: getattr(case, name) for name in _PLAIN} | dict(case.files)
    values |= {name: BETWEEN_TEXTS.join(values[name]) for name in _TEXTS}
    values["label_voxels"] = " ".join(f"{value}:{n}" for value, n in case.facts.label_voxels)
    return {column: "" if value is None else str(value) for column, value in values.items()}


def _case(row: Mapping[Any, str], root: Path) -> Case:
    values: dict[Any, Any] = {**row}
    values |= {name: tuple(filter(None, row[name].split(BETWEEN_TEXTS))) for name in _TEXTS}
    values["label_voxels"] = [pair.split(":") for pair in row["label_voxels"].split()]
    # what is empty has its default
    facts = _PARSER.validate_python({name: values[name] for name in _FACTS if values[name]})
    files = {kind: ScanFile.parse(row[kind]) for kind in layouts.KINDS if row[kind]}
    return Case(**{name: values[name] for name in _PLAIN}, root=root, files=files, facts=facts)


def _release_lines(cases: Iterable[Case]) -> Iterator[str]:
    for of_release in group_by(cases, lambda case: [case.release]):
        yield f"{of_release[0].release}: {counted(len(of_release), 'case')}"
        for group in group_by(of_release, lambda case: [_reading(case)]):
            values = sorted({value for case in group for value in case.label_values})
            of_values = f"label values {' '.join(map(str, values))}, " if values else ""
            yield f"  {counted(len(group), 'case')}: {of_values}{_reading(group[0])}"


def _reading(case: Case) -> str:
    without = "no label map" if case.label is None else "no label map that can be read"
    return f"read as {case.convention}" if case.convention else without
