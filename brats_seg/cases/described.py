"""Read cases that a file describes: a `dataset.json`, or a table of paths.

A `dataset.json` names the modalities and the labels of the Medical Segmentation Decathlon, with a 4-D
file `imagesTr/CASE.nii.gz` per case, and of the raw data of nnU-Net, with `imagesTr/CASE_0000.nii.gz`
and so on; label maps are in `labelsTr`. A table of paths is a CSV file with the columns
`case_id,patient_id,t1n,t1c,t2w,t2f,label`, or other names of the modalities, such as `FLAIR`. Its paths
are relative to the table; `all.nii.gz#2` is the third volume of a 4-D file.
"""

import logging
import os
import re
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from brats_seg.cases import layouts, releases
from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.layouts import LABEL, Folder
from brats_seg.config import validation_problems
from brats_seg.errors import LayoutError, UsageError, printable, some_of
from brats_seg.files import check_regular
from brats_seg.labels import CONVENTIONS, MODALITIES, tissue_named
from brats_seg.tables import read_table

log = logging.getLogger(__name__)

DESCRIPTION = "dataset.json"
DATASET_FOLDERS = ("imagesTr", "labelsTr", "imagesTs", "labelsTs")
"""Folders next to a `dataset.json`, which it describes."""

_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


class _Description(BaseModel):
    """The parts of a `dataset.json` that are used."""

    channels: dict[int, str] = Field(validation_alias=AliasChoices("channel_names", "modality"))
    """Modality by index along the fourth axis, or by the number in the file name."""
    labels: dict[str, str | int | list[int]]
    """Tissue by value, value by tissue, or values by region."""


def cases_of_dataset(root: Path, path: Path, folders: Mapping[Path, Folder]) -> Iterator[Case]:
    """Yield the cases of a folder with a `dataset.json`; none, with a warning, if it has no modality of BraTS."""
    description, missing = _read_description(root / path / DESCRIPTION), Folder(path=path)
    named = {index: layouts.modality_named(name) for index, name in description.channels.items()}
    modalities = {index: modality for index, modality in named.items() if modality}
    if not modalities:
        found = some_of([*map(printable, description.channels.values())]) or "none"
        text = "%s names the channels %s; expected some of T1, T1ce, T2, FLAIR, or synonyms"
        log.warning(text, root / path / DESCRIPTION, found)
    if (convention := _find_convention(description.labels)) is None:
        text = "%s numbers tissues as no release of BraTS does: its label maps are left out; renumber them"
        log.warning(text, root / path / DESCRIPTION)
    for names in (DATASET_FOLDERS[:2], DATASET_FOLDERS[2:]):
        images, labels = (folders.get(path / name, missing) for name in names)
        yield from _make_cases(modalities, convention, images, labels)


def is_path_table(data: Path) -> bool:
    """Return whether the data are given as a table of paths."""
    # Path.is_file raises if the name is too long
    return data.suffix.lower() == ".csv" and os.path.isfile(data)  # noqa: PTH113


def data_folder(data: Path) -> Path:
    """Return the folder that the paths of the cases are relative to."""
    return data.parent if is_path_table(data) else data


def read_path_table(path: Path) -> tuple[Case, ...]:
    """Return the cases of a table of paths in its order; errors of a case are in its `problems`."""
    try:
        cases = tuple(map(_case, read_table(path, required=("case_id",)).to_dict("records")))
        if not any(case.files for case in cases):
            msg = "no row names a file"
            raise UsageError(msg)
    except UsageError as error:
        msg = (
            f"{path} cannot be read as a table of cases: {error}. Expected the "
            f"columns {', '.join(('case_id', *MODALITIES))}, and for training also label."
        )
        raise UsageError(msg) from error
    return cases


def _read_description(path: Path) -> _Description:
    try:
        check_regular(path)
        return _Description.model_validate_json(path.read_text("utf-8-sig", "replace"))
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Check its permissions, or remove it."
        raise LayoutError(msg) from error
    except ValidationError as error:
        problems = "; ".join(validation_problems(error, depth=2))
        msg = f"{path} is not valid ({problems}). Expected the modalities by index under 'channel_names', and 'labels'."
        raise LayoutError(msg) from error


def _make_cases(
    modalities: Mapping[int, str], convention: str | None, images: Folder, labels: Folder
) -> Iterator[Case]:
    """Yield the cases of a folder of images, given the modality of each channel that has one."""
    label_of = {file.stem: ScanFile(path=file.path) for file in labels.scans}
    scans: defaultdict[str, dict[str, ScanFile]] = defaultdict(dict)
    for file in images.scans:
        # the label map of a 4-D file has its name, which may end with four digits too
        channel = None if file.stem in label_of else _CHANNEL.fullmatch(file.stem)
        for index, modality in modalities.items():
            if channel and int(channel["channel"]) == index:
                scans[channel["case"]][modality] = ScanFile(path=file.path)
            elif not channel:
                scans[file.stem][modality] = ScanFile(path=file.path, volume=index)
    for case_id, files in scans.items():
        is_msd = any(scan.volume is not None for scan in files.values())
        if case_id in label_of and convention is not None:
            files[LABEL] = label_of[case_id]
        yield replace(
            Case.named(case_id, files),
            release=releases.DECATHLON if is_msd else releases.NNUNET,
            convention=convention if convention and LABEL in files else "",
        )


def _find_convention(labels: Mapping[str, str | int | list[int]]) -> str | None:
    """Return the convention with the same values for oedema and enhancing tumour, None if they have other ones.

    The name is empty if the labels do not say which they are.
    """
    named = [_name_and_values(*label) for label in labels.items()]
    enhancing = [values for name, values in named if tissue_named(name) == "et"]
    oedema = [values for name, values in named if tissue_named(name) == "ed"]
    if not oedema and len(named) > 1:
        # labels are regions: the whole tumour is the core and the oedema
        core, whole = sorted((values for _, values in named), key=len)[-2:]
        oedema = [whole - core]
    all_values = frozenset[int]().union(*(values for _, values in named))
    for convention in CONVENTIONS:
        wt, tc, et = map(frozenset, convention.regions)
        if enhancing == [et] and oedema == [wt - tc] and all_values <= convention.values:
            return convention.name
    return None if all(enhancing) and all(oedema) and enhancing and oedema else ""


def _name_and_values(key: str, value: str | int | list[int]) -> tuple[str, frozenset[int]]:
    if isinstance(value, str):
        return value, frozenset({int(key)} if re.fullmatch("[0-9]{1,5}", key) else ())
    return key, frozenset(value if isinstance(value, list) else {value})


def _case(row: Mapping[Any, str]) -> Case:
    cells = {str(key): text for key, value in row.items() if (text := value.strip())}
    columns: dict[str, str] = {}
    for name in cells:
        kind = layouts.kind_named(name)
        if kind in columns:
            msg = f"the columns {columns[kind]} and {name} both name {kind}"
            raise UsageError(msg)
        if kind:
            columns[kind] = name
    files = {kind: ScanFile.parse(cells[name]) for kind, name in columns.items()}
    case = Case.named(cells.get("case_id", ""), files)
    others = [n for n in cells if n not in columns.values() and layouts.parse_file_name(cells[n])]
    remarks = [
        f"the column {name} names a file, and no modality: it is not read" for name in others
    ]
    named = (text for name, text in cells.items() if name.lower() == "patient_id")
    return replace(case, patient_id=next(named, case.patient_id), remarks=tuple(remarks))
