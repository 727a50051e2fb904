"""Parse names of files and folders: modality, release, patient, time point, grade.

There are two tables: the words of the modalities, and the releases with their ids and conventions.
Only names are used here; `index` compares them with the voxels.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

from brats_seg import labels
from brats_seg.labels import MODALITIES, LabelConvention

UNKNOWN = "unknown"
"""Release of a case whose id matches no pattern."""
MEN_RT = "brats2024-men-rt"
"""Release of the radiotherapy task, with one modality and another target than all others."""
GLI_2023 = "brats2023-gli"
GLI_2024 = "brats2024-gli"
DECATHLON = "msd"
"""Release of the brain tumour task of the Medical Segmentation Decathlon."""
NNUNET = "nnunet"
"""Release of a raw data folder of nnU-Net."""
BIDS = "bids"
"""Release of cases whose files are called as in BIDS (`sub-01_ses-02_T1w`), of any origin."""
DERIVATIVES = "derivatives"
"""Folder of a BIDS data set that holds what was made from its scans."""
LABEL = "label"
"""Kind of a file that is a label map by its name."""

_AGENTS = ("ce", "gd", "gad", "post", "contrast")
_OF_A_LABEL = (
    *("tumou?r", "lesion", "glioma", "automated", "auto", "approx", "manual", "expert"),
    *("corrected", "final", "consensus"),
)
"""Words that may precede the word for a label map, and are no part of the case id."""
_OF_ANATOMY = frozenset(
    {
        *("brain", "bet", "skull", "head", "face", "parenchyma", "tissue", "tissues", "background"),
        *("wm", "gm", "csf", "nawm", "white", "grey", "gray", "cortex", "hippocampus"),
        *("aseg", "aparc", "aparcaseg", "ventricle", "ventricles", "vessel", "vessels"),
    }
)
"""Words that precede the word for a mask or a segmentation of something else than a tumour."""

# a space stands for one of - _ . and space, or for nothing
_SPELLINGS = {
    "t1n": ("t1", "t1n", "t1w", "t1 pre"),
    "t1c": ("t1c", "ct1", *(f"{t1} {agent}" for t1 in ("t1", "t1w") for agent in _AGENTS)),
    "t2w": ("t2", "t2w"),
    "t2f": ("t2f", "flair", "fla", "t2 flair", "t2w flair"),
    LABEL: ("seg", "segm", "segmentation", "dseg", "label", "labels", "gt", "ground truth", "mask"),
}
_SEPARATOR = re.compile("[-_. ]")
_KINDS = {
    spelling.replace(" ", ""): kind
    for kind, spellings in _SPELLINGS.items()
    for spelling in spellings
}


def _any_of(spellings: Iterable[str]) -> str:
    return "|".join(spelling.replace(" ", "[-_. ]?") for spelling in spellings)


_NIFTI_NAME = re.compile(r"(?P<stem>.+)\.nii(\.gz)?", re.IGNORECASE | re.DOTALL)
_SCAN_STEM = re.compile(
    rf"((?P<case>.*?)[-_. ])?"
    rf"((?P<modality>{_any_of(s for kind in MODALITIES for s in _SPELLINGS[kind])})"
    rf"([-_](?P<processed>bet|brain|bias))?"
    rf"|(({'|'.join(_OF_A_LABEL)})[-_. ]?)*(?P<label>{_any_of(_SPELLINGS[LABEL])}))",
    re.IGNORECASE | re.DOTALL,
)
_LABEL_FOLDER = re.compile(
    r"(.*[-_. ])?(labels?|labelmaps?|labelst[rs]|masks?|segs?|segms?|segmentations?|annotations?|gt"
    r"|ground[-_. ]?truths?)",
    re.IGNORECASE | re.DOTALL,
)
_BIDS_STEM = re.compile(
    r"(?P<case>sub-[a-z0-9]+(_ses-[a-z0-9]+)?)(?P<entities>(_[a-z0-9]+-[a-z0-9+]+)*)_(?P<rest>[^-]+)",
    re.IGNORECASE,
)
_DESCRIBING = ("desc-", "label-")
_AFTER_CONTRAST = re.compile(
    r"ce-(?!none|no$).+|acq-(?!.*pre)(.*(post|contrast|gad|gd|gadolinium)|ce|t1ce|t1c)",
    re.IGNORECASE,
)

# conventions of label maps with neither 3 nor 4, with 3 alone, with 4 alone, and with both
_EARLY = (labels.BRATS2017, labels.BRATS2023, labels.BRATS2017, labels.BRATS2017)
_LATE = (labels.BRATS2023, labels.BRATS2023, labels.BRATS2017, labels.BRATS2023)
_CHILDREN = (labels.BRATS2023, labels.BRATS2023, labels.BRATS2024_PED, labels.BRATS2024_PED)
_METASTASES = (labels.BRATS2023, labels.BRATS2023, labels.BRATS2024, labels.BRATS2024)
_ANY = (labels.BRATS2023, labels.BRATS2023, labels.BRATS2017, labels.BRATS2024)

# pattern of the case ids, release, conventions; the first pattern that matches gives the release
_RELEASES = tuple(
    (re.compile(pattern, re.IGNORECASE), release, conventions)
    for pattern, release, conventions in (
        (r"brats17_(?P<patient>\w+)_\d+", "brats2017", _EARLY),
        (r"brats18_(?P<patient>\w+)_\d+", "brats2018", _EARLY),
        (r"brats19_(?P<patient>\w+)_\d+", "brats2019", _EARLY),
        (r"(?P<patient>brats20_(training|validation|testing)_\d{3})", "brats2020", _EARLY),
        (r"(?P<patient>brats2021_\d{5})", "brats2021", _EARLY),
        (r"(?P<patient>brats-men-rt-\d{4})-\d", MEN_RT, _ANY),
        # 4 is the resection cavity, which also occurs in cases without enhancing tumour
        (r"(?P<patient>brats-gli-\d{5})-[1-9]\d\d", GLI_2024, (labels.BRATS2024,) * 4),
        (r"(?P<patient>brats-gli-\d{5})(-\d{3})?", GLI_2023, _LATE),
        # these tasks have kept their names since 2023: the name does not give the year
        (r"(?P<patient>brats-men-\d{5})(-\d{3})?", "brats-men", _LATE),
        (r"(?P<patient>brats-met-\d{5})(-\d{3})?", "brats-met", _METASTASES),
        (r"(?P<patient>brats-ped-\d{5})(-\d{3})?", "brats-ped", _CHILDREN),
        (r"(?P<patient>brats-ssa-\d{5})(-\d{3})?", "brats-ssa", _LATE),
        (r"(?P<patient>brats-goat-\d{5})(-\d{3})?", "brats-goat", _LATE),
        # 11 is the scan before the first operation, 21 one at recurrence
        (r"(?P<patient>upenn-gbm-\d{5})_\d\d", "upenn-gbm", _EARLY),
        (r"(?P<patient>ucsf-pdgm-\d{4})(_fu\d{3}d)?", "ucsf-pdgm", _EARLY),
        (r"(?P<patient>sub-[a-z0-9]+)(_ses-[a-z0-9]+)?", BIDS, _ANY),
    )
)
_TCIA_NUMBER = re.compile(r"^(tcia)\d+(?=_)", re.IGNORECASE)
_GRADES = frozenset({"HGG", "LGG"})


@dataclass(frozen=True, kw_only=True, slots=True)
class NamedFile:
    """A NIfTI file, or a folder with such a name that contains one file, and the parts of the name."""

    path: Path = Path()
    """Path of the file, relative to the data folder."""
    stem: str
    """The name without `.nii` or `.nii.gz`."""
    case: str = ""
    """Part before the modality: the case id in most releases, empty in `t1.nii.gz`."""
    kind: str = ""
    """A modality, `LABEL`, or empty if the name shows neither."""
    variant: str = ""
    """Other parts of the name, which tell files of one kind apart: `bet` in `_t1_bet`, or
    `acq-axial_run-2` in the name of a BIDS file."""


def parse_file_name(name: str, path: Path = Path()) -> NamedFile | None:
    """Parse a file name; return None if it is not the name of a NIfTI file.

    Masks and segmentations of the brain and of other anatomy have no kind.

    Example:
        >>> found = parse_file_name("sub-01_acq-ax_ce-gadolinium_T1w.nii.gz")
        >>> found.case, found.kind, found.variant
        ('sub-01', 't1c', 'acq-ax')
    """
    nifti = _NIFTI_NAME.fullmatch(name)
    if nifti is None:
        return None
    bids = _BIDS_STEM.fullmatch(nifti["stem"])
    case, kind, variant = _bids_parts(bids) if bids else _plain_parts(nifti["stem"])
    return NamedFile(path=path, stem=nifti["stem"], case=case, kind=kind, variant=variant)


def modality_named(word: str) -> str | None:
    """Return the modality of a word such as `FLAIR`, `t1gd` or `T1 post`, or None."""
    kind = _kind_of(word)
    return kind if kind in MODALITIES else None


def is_label_word(word: str) -> bool:
    """Return whether a word, such as `seg` or `mask`, names a label map."""
    return _kind_of(word) == LABEL


def is_label_folder(name: str) -> bool:
    """Return whether a folder is for label maps by its name, such as `labels` or `images_segm`."""
    return _LABEL_FOLDER.fullmatch(name) is not None


def parse_case_id(case_id: str) -> tuple[str, str]:
    """Return release and patient of a case id; one that matches no pattern is a patient itself.

    The ids of 2017 to 2019 differ in the year and in a number of the institution, which are omitted
    from the patient id: `Brats17_TCIA_201_1` and `Brats18_TCIA01_201_1` are one patient.

    Example:
        >>> parse_case_id("BraTS-GLI-00005-100")
        ('brats2024-gli', 'BraTS-GLI-00005')
    """
    for pattern, release, _ in _RELEASES:
        if match := pattern.fullmatch(case_id):
            return release, _TCIA_NUMBER.sub(r"\1", match["patient"])
    return UNKNOWN, case_id


def conventions_of(release: str) -> tuple[LabelConvention, ...]:
    """Return the conventions of a release: without 3 and 4, with 3 alone, with 4 alone, with both."""
    if release == DECATHLON:
        # the three tissues have another order, which the values do not show
        return (labels.MSD,) * 4
    return next((conventions for _, name, conventions in _RELEASES if name == release), _ANY)


def grade_of(folders: Iterable[str]) -> str:
    """Return the grade, `HGG` or `LGG`, that is the name of a folder above a case, or nothing."""
    return next((name.upper() for name in folders if name.upper() in _GRADES), "")


_Parts: TypeAlias = tuple[str, str, str]
"""Case, kind and variant of a name."""
_NO_PARTS: _Parts = ("", "", "")


def _plain_parts(stem: str) -> _Parts:
    scan = _SCAN_STEM.fullmatch(stem)
    if scan is None:
        return _NO_PARTS
    case, word = scan["case"] or "", scan["modality"] or scan["label"]
    kind, last = _kind_of(word), _SEPARATOR.split(case)[-1].lower()
    # programs that remove the skull write the mask of the brain to t1_mask
    is_of_anatomy = last in _OF_ANATOMY or (word.lower() == "mask" and last in _KINDS)
    if kind == LABEL and is_of_anatomy:
        return _NO_PARTS
    return case, kind, scan["processed"] or ""


def _bids_parts(bids: re.Match[str]) -> _Parts:
    """Return the parts of a BIDS name: `case`, `entities` such as `_acq-ax`, and the `rest`."""
    before, kind, processed = _plain_parts(bids["rest"])
    entities = [part for part in bids["entities"].split("_") if part]
    described = [part.split("-")[1].lower() for part in entities if part.startswith(_DESCRIBING)]
    if kind == LABEL and any(word in _OF_ANATOMY or "brain" in word for word in described):
        return _NO_PARTS
    if kind == "t1n" and any(map(_AFTER_CONTRAST.fullmatch, entities)):
        kind = "t1c"
        entities = [part for part in entities if not _AFTER_CONTRAST.fullmatch(part)]
    variant = [*entities, *([before] if kind != LABEL else []), processed]
    return (bids["case"], kind, "_".join(filter(None, variant))) if kind else _NO_PARTS


def _kind_of(word: str) -> str:
    return _KINDS.get(_SEPARATOR.sub("", word).lower(), "")
