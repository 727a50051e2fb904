"""Folders that describe themselves in a `dataset.json`: the decathlon's, and nnU-Net's raw data.

dataset.json               the modalities in their order, and the labels
imagesTr/, imagesTs/       one 4-D file CASE.nii.gz per case in the decathlon,
                           CASE_0000.nii.gz, CASE_0001.nii.gz, ... in nnU-Net
labelsTr/, labelsTs/       CASE.nii.gz
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.folders import Folder, Scan
from brats_seg.cases.layouts import modality_named, parse_case_id
from brats_seg.errors import LayoutError
from brats_seg.labels import CONVENTIONS

MSD = "msd"
NNUNET = "nnunet"
"""Releases of self-described folders."""
DATASET_FOLDERS = ("imagesTr", "labelsTr", "imagesTs", "labelsTs")

_DESCRIPTION = "dataset.json"
_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


def is_dataset(folder: Folder, folders: Mapping[Path, Folder]) -> bool:
    """Tell whether a folder describes itself."""
    return _DESCRIPTION in folder.others and folder.path / "imagesTr" in folders


def read_dataset(root: Path, folder: Folder, folders: Mapping[Path, Folder]) -> Iterator[Case]:
    """Find the cases of a folder that describes itself; none if it names no modality of ours.

    Raises:
        LayoutError: The description cannot be understood.
    """
    description = _read_description(root / folder.path / _DESCRIPTION)
    if not any(description.modalities.values()):
        return
    empty = Folder(path=folder.path)
    training, training_labels, test, test_labels = (
        folders.get(folder.path / name, empty).scans for name in DATASET_FOLDERS
    )
    yield from _cases(description, training, training_labels)
    yield from _cases(description, test, test_labels)


class _Description(BaseModel):
    """What is used of a `dataset.json`."""

    channels: dict[int, str] = Field(validation_alias=AliasChoices("channel_names", "modality"))
    """By place along the fourth axis, or by the number in the file name."""
    labels: dict[str, str | int | list[int]]
    """Value and tissue, either way round; or the values of a region."""

    @property
    def modalities(self) -> dict[int, str | None]:
        """The modality in each place, None where it is not one of ours."""
        return {place: modality_named(name) for place, name in self.channels.items()}


def _read_description(path: Path) -> _Description:
    try:
        return _Description.model_validate_json(path.read_bytes())
    except ValidationError as error:
        found = ", ".join(
            f"{'.'.join(map(str, part['loc'])) or 'file'}: {part['msg']}" for part in error.errors()
        )
        msg = (
            f"{path} cannot be understood ({found}). Expected the names of the modalities by their "
            "place under 'modality' or 'channel_names', and the values under 'labels'."
        )
        raise LayoutError(msg) from error


def _cases(
    description: _Description, images: Sequence[Scan], labels: Sequence[Scan]
) -> Iterator[Case]:
    label_of = {scan.name.stem: ScanFile(path=scan.path) for scan in labels}
    files: defaultdict[str, dict[str, ScanFile]] = defaultdict(dict)
    for scan in images:
        channel = _CHANNEL.fullmatch(scan.name.stem)
        for place, modality in description.modalities.items():
            if modality and channel and int(channel["channel"]) == place:
                files[channel["case"]][modality] = ScanFile(path=scan.path)
            elif modality and not channel:
                files[scan.name.stem][modality] = ScanFile(path=scan.path, volume=place)
    for case_id, found in files.items():
        name = parse_case_id(case_id)
        label = label_of.get(case_id)
        is_msd = any(scan.volume is not None for scan in found.values())
        yield Case(
            case_id=case_id,
            patient_id=name.patient_id,
            timepoint=name.timepoint,
            release=MSD if is_msd else NNUNET,
            label_convention=_convention_of(description.labels) if label else "",
            t1n=found.get("t1n"),
            t1c=found.get("t1c"),
            t2w=found.get("t2w"),
            t2f=found.get("t2f"),
            label=label,
        )


def _convention_of(labels: Mapping[str, str | int | list[int]]) -> str:
    """Name the convention that has oedema and enhancing tumour where the labels have them."""
    values = dict(map(_name_and_values, labels.items()))
    enhancing = [v for name, v in values.items() if name.startswith("enhancing") or name == "et"]
    oedema = [v for name, v in values.items() if "edema" in name or name in {"ed", "snfh"}]
    if not oedema and len(values) > 1:
        # regions: the whole tumour is the core and the oedema
        core, whole = sorted(values.values(), key=len)[-2:]
        oedema = [whole - core]
    for convention in CONVENTIONS:
        wt, tc, et = map(frozenset, convention.regions)
        all_known = frozenset().union(*values.values()) <= convention.values
        if enhancing == [et] and oedema == [wt - tc] and all_known:
            return convention.name
    return ""


def _name_and_values(label: tuple[str, str | int | list[int]]) -> tuple[str, frozenset[int]]:
    key, value = label
    if isinstance(value, str):
        return value.lower(), frozenset({int(key)} if key.isdecimal() else ())
    return key.lower(), frozenset(value if isinstance(value, list) else {value})
