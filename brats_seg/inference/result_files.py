"""Name the files of a case in a folder of results, and describe its label values to other programs.

Layout `plain` is that of `inference.output`. Layout `bids` is a BIDS derivative:

dataset_description.json
desc-brats2017_dseg.tsv                       label values, names and colours
sub-01/ses-02/anat/sub-01_ses-02_desc-brats2017_dseg.nii.gz
                                 ..._label-WT_probseg.nii.gz, with TC and ET
                                 ..._desc-entropy_probseg.nii.gz

Beside the label maps of either layout lie `labels-brats2017.txt` for ITK-SNAP ("Import Label
Descriptions") and `labels-brats2017.ctbl` for 3D Slicer, in the colours of the pictures.
"""

import json
import re
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.inference.settings import ResultLayout
from brats_seg.labels import REGIONS, LabelConvention

_BIDS_VERSION = "1.10.0"
_BIDS_ID = re.compile(r"sub-[A-Za-z0-9]+(_ses-[A-Za-z0-9]+)?")
_NOT_BIDS = (
    *("brats_seg.json", "manifest.jsonl", "volumes.csv", "failures.csv", "previews", "reports"),
    *("cohort.html", "scans", "labels-*"),
    *("**/*_desc-entropy_*", "**/*.dcm"),
)
"""Files in a BIDS derivative that BIDS does not know, for its validator."""
_SNAP_HEAD = """################################################
# ITK-SnAP Label Description File
# File format:
# IDX   -R-  -G-  -B-  -A--  VIS MSH  LABEL
################################################
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultFiles:
    """Names of the files of a case, relative to the folder of the results."""

    label_map: str
    probabilities: tuple[str, ...]
    """One for each region."""
    uncertainty: str
    preview: str
    segmentation: str
    """DICOM segmentation, of a case that was converted from DICOM."""


def result_files(layout: ResultLayout, case_id: str, convention: LabelConvention) -> ResultFiles:
    """Return the names of the files of a case.

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> result_files("bids", "BraTS-GLI-00001-000", BRATS2023).label_map
        'sub-BraTSGLI00001000/anat/sub-BraTSGLI00001000_desc-brats2023_dseg.nii.gz'
    """
    preview = f"previews/{case_id}.png"
    if layout == "plain":
        return ResultFiles(
            label_map=f"{case_id}.nii.gz",
            probabilities=tuple(f"probabilities/{case_id}-{region}.nii.gz" for region in REGIONS),
            uncertainty=f"uncertainty/{case_id}.nii.gz",
            preview=preview,
            segmentation=f"{case_id}.dcm",
        )
    name = bids_name(case_id)
    start = f"{name.replace('_', '/')}/anat/{name}"
    return ResultFiles(
        label_map=f"{start}_desc-{_letters(convention.name)}_dseg.nii.gz",
        probabilities=tuple(f"{start}_label-{r.upper()}_probseg.nii.gz" for r in REGIONS),
        uncertainty=f"{start}_desc-entropy_probseg.nii.gz",
        preview=preview,
        segmentation=f"{start}_desc-{_letters(convention.name)}_dseg.dcm",
    )


def bids_name(case_id: str) -> str:
    """Return the name of a case in BIDS: its id, if that is one, or else its letters and digits.

    Example:
        >>> bids_name("sub-01_ses-pre"), bids_name("UPENN-GBM-00001_11")
        ('sub-01_ses-pre', 'sub-UPENNGBM0000111')
    """
    return case_id if _BIDS_ID.fullmatch(case_id) else f"sub-{_letters(case_id)}"


def check_names(layout: ResultLayout, case_ids: Iterable[str]) -> None:
    """Raise `UsageError` if two cases would have the same name, or one has none, in BIDS."""
    if layout == "plain":
        return
    known: dict[str, list[str]] = defaultdict(list)
    for case_id in case_ids:
        known[bids_name(case_id)].append(case_id)
    wrong = {name: ids for name, ids in known.items() if len(ids) > 1 or name == "sub-"}
    for name, ids in wrong.items():
        msg = (
            f"the cases {', '.join(ids)} would be called {name} in BIDS, which has letters and digits "
            "only; expected a name for each. Rename them, or write them with --layout plain"
        )
        raise UsageError(msg)


def write_descriptions(
    folder: Path, layout: ResultLayout, conventions: Iterable[LabelConvention]
) -> None:
    """Write what other programs need to show the label maps of a folder.

    Args:
        folder: Folder of the results.
        layout: Its layout.
        conventions: Label conventions that occur in it.
    """
    for convention in conventions:
        _write(folder / f"labels-{convention.name}.txt", itk_snap_labels(convention))
        _write(folder / f"labels-{convention.name}.ctbl", slicer_colours(convention))
        if layout == "bids":
            name = f"desc-{_letters(convention.name)}_dseg.tsv"
            _write(folder / name, bids_labels(convention))
    if layout == "bids":
        _write(folder / "dataset_description.json", _description())
        _write(folder / ".bidsignore", "".join(f"{name}\n" for name in _NOT_BIDS))


def itk_snap_labels(convention: LabelConvention) -> str:
    """Return the label description file of ITK-SNAP for a convention."""
    lines = ['    0     0    0    0        0  0  0    "Clear Label"']
    lines += [
        f'{value:5d} {red:5d} {green:4d} {blue:4d}        1  1  1    "{name}"'
        for value, name, (red, green, blue) in _labels(convention)
    ]
    return _SNAP_HEAD + "".join(f"{line}\n" for line in lines)


def slicer_colours(convention: LabelConvention) -> str:
    """Return the colour table of 3D Slicer for a convention."""
    lines = [f"# Color table file of brats_seg for {convention.name}", "0 background 0 0 0 0"]
    lines += [
        f"{value} {name} {red} {green} {blue} 255"
        for value, name, (red, green, blue) in _labels(convention)
    ]
    return "".join(f"{line}\n" for line in lines)


def bids_labels(convention: LabelConvention) -> str:
    """Return the table of the label values of a convention, as BIDS wants it."""
    rows = [
        f"{value}\t{name}\t#{red:02x}{green:02x}{blue:02x}"
        for value, name, (red, green, blue) in _labels(convention)
    ]
    return "".join(f"{row}\n" for row in ("index\tname\tcolor", *rows))


def _labels(convention: LabelConvention) -> list[tuple[int, str, tuple[int, int, int]]]:
    """Return value, name and colour (red, green, blue: 0 to 255) of each tissue."""
    # matplotlib takes long to import
    from brats_seg.figures.cases import tissue_colours

    colours = tissue_colours(convention)
    return [
        (value, name, tuple(bytes.fromhex(colours[value].removeprefix("#"))))  # type: ignore[misc]
        for value, name in convention.meanings
    ]


def _description() -> str:
    text = {
        "Name": "Tumour segmentations by brats_seg (research use only)",
        "BIDSVersion": _BIDS_VERSION,
        "DatasetType": "derivative",
        "GeneratedBy": [{"Name": "brats_seg", "Version": version("brats_seg")}],
    }
    return json.dumps(text, indent=2) + "\n"


def _letters(text: str) -> str:
    return re.sub("[^A-Za-z0-9]", "", text)


def _write(path: Path, text: str) -> None:
    with whole_file(path) as beside:
        beside.write_text(text)
