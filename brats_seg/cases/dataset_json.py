"""Read the cases of a folder that a `dataset.json` describes.

Such are the Medical Segmentation Decathlon and the raw data of nnU-Net:

    dataset.json               the modalities in their order, and the labels
    imagesTr/, imagesTs/       one 4-D file CASE.nii.gz per case in the decathlon,
                               CASE_0000.nii.gz, CASE_0001.nii.gz, ... in nnU-Net
    labelsTr/, labelsTs/       CASE.nii.gz
"""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from pydantic import AliasChoices, BaseModel, Field, ValidationError

from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.folders import Folder, NiftiFile
from brats_seg.cases.layouts import DECATHLON, NNUNET, modality_named
from brats_seg.errors import LayoutError
from brats_seg.files import check_regular
from brats_seg.labels import CONVENTIONS

DATASET_FOLDERS = ("imagesTr", "labelsTr", "imagesTs", "labelsTs")
"""Folders that a `dataset.json` describes, beside it."""

_DESCRIPTION = "dataset.json"
_VALUE = re.compile(r"[0-9]{1,5}")
_CHANNEL = re.compile(r"(?P<case>.+)_(?P<channel>\d{4})")


class _Description(BaseModel):
    """The parts of a `dataset.json` that are used."""

    channels: dict[int, str] = Field(validation_alias=AliasChoices("channel_names", "modality"))
    """Modality by index along the fourth axis, or by the number in the file name."""
    labels: dict[str, str | int | list[int]]
    """Tissue by value, value by tissue, or values by region."""

    @property
    def modalities(self) -> dict[int, str | None]:
        """Modality at each index; None for one that BraTS does not have."""
        return {place: modality_named(name) for place, name in self.channels.items()}


def is_dataset(folder: Folder, folders: Mapping[Path, Folder]) -> bool:
    """Return whether a folder has a `dataset.json` and images for training."""
    return _DESCRIPTION in folder.others and folder.path / "imagesTr" in folders


def cases_of_dataset(root: Path, folder: Folder, folders: Mapping[Path, Folder]) -> Iterator[Case]:
    """Yield the cases of a folder with a `dataset.json`; none if it has no modality of BraTS.

    Raises:
        LayoutError: The `dataset.json` is not valid.
    """
    description = _read_description(root / folder.path / _DESCRIPTION)
    if not any(description.modalities.values()):
        return
    empty = Folder(path=folder.path)
    training, training_labels, test, test_labels = (
        folders.get(folder.path / name, empty).scans for name in DATASET_FOLDERS
    )
    yield from _cases_described(description, training, training_labels)
    yield from _cases_described(description, test, test_labels)


def _read_description(path: Path) -> _Description:
    try:
        check_regular(path)
        return _Description.model_validate_json(path.read_bytes())
    except OSError as error:
        msg = f"{path} cannot be read: {error.strerror}. Check its permissions, or remove it."
        raise LayoutError(msg) from error
    except ValidationError as error:
        found = ", ".join(
            f"{'.'.join(map(str, part['loc'])) or 'file'}: {part['msg']}" for part in error.errors()
        )
        msg = (
            f"{path} is not valid ({found}). Expected the names of the modalities by their "
            "index under 'modality' or 'channel_names', and the values under 'labels'."
        )
        raise LayoutError(msg) from error


def _cases_described(
    description: _Description, images: Sequence[NiftiFile], labels: Sequence[NiftiFile]
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
        label = label_of.get(case_id)
        is_msd = any(scan.volume is not None for scan in found.values())
        yield replace(
            Case.named(case_id, found),
            release=DECATHLON if is_msd else NNUNET,
            label_convention=_convention_of(description.labels) if label else "",
            label=label,
        )


def _convention_of(labels: Mapping[str, str | int | list[int]]) -> str:
    """Return the convention with the same values for oedema and enhancing tumour, or nothing."""
    values = dict(map(_name_and_values, labels.items()))
    enhancing = [v for name, v in values.items() if name.startswith("enhancing") or name == "et"]
    oedema = [v for name, v in values.items() if "edema" in name or name in {"ed", "snfh"}]
    if not oedema and len(values) > 1:
        # labels are regions: the whole tumour is the core and the oedema
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
        return value.lower(), frozenset({int(key)} if _VALUE.fullmatch(key) else ())
    return key.lower(), frozenset(value if isinstance(value, list) else {value})
