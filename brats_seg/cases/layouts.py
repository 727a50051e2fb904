"""Parse names of files and folders: modality, release, patient, time point, grade.

Only names are used here; `index` compares them with the voxels.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from brats_seg.labels import MODALITIES

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
LABEL = "label"
"""Kind of a file that is a label map by its name."""

_SPELLINGS = {
    "t1n": ("t1", "t1n", "t1w"),
    "t1c": ("t1c", "t1ce", "t1gd"),
    "t2w": ("t2", "t2w"),
    "t2f": ("t2f", "flair", "fla"),
    LABEL: ("seg",),
}
_KINDS = {spelling: kind for kind, spellings in _SPELLINGS.items() for spelling in spellings}

_NIFTI_NAME = re.compile(r"(?P<stem>.+)\.nii(\.gz)?", re.IGNORECASE | re.DOTALL)
_SCAN_STEM = re.compile(
    rf"((?P<case>.*)[-_. ])?(?P<spelling>{'|'.join(_KINDS)})(?P<processed>[-_](bet|brain))?",
    re.IGNORECASE | re.DOTALL,
)

# the first pattern that matches gives the release
_CASE_IDS = tuple(
    (re.compile(pattern, re.IGNORECASE), release)
    for pattern, release in (
        (r"brats17_(?P<patient>\w+)_\d+", "brats2017"),
        (r"brats18_(?P<patient>\w+)_\d+", "brats2018"),
        (r"brats19_(?P<patient>\w+)_\d+", "brats2019"),
        (r"(?P<patient>brats20_(training|validation|testing)_\d{3})", "brats2020"),
        (r"(?P<patient>brats2021_\d{5})", "brats2021"),
        (r"(?P<patient>brats-men-rt-\d{4})-(?P<timepoint>\d)", MEN_RT),
        (r"(?P<patient>brats-gli-\d{5})-(?P<timepoint>[1-9]\d\d)", GLI_2024),
        (r"(?P<patient>brats-gli-\d{5})(-(?P<timepoint>\d{3}))?", GLI_2023),
        # these tasks have kept their names since 2023: the name does not give the year
        (r"(?P<patient>brats-men-\d{5})(-(?P<timepoint>\d{3}))?", "brats-men"),
        (r"(?P<patient>brats-met-\d{5})(-(?P<timepoint>\d{3}))?", "brats-met"),
        (r"(?P<patient>brats-ped-\d{5})(-(?P<timepoint>\d{3}))?", "brats-ped"),
        (r"(?P<patient>brats-ssa-\d{5})(-(?P<timepoint>\d{3}))?", "brats-ssa"),
        (r"(?P<patient>brats-goat-\d{5})(-(?P<timepoint>\d{3}))?", "brats-goat"),
    )
)
_TCIA_NUMBER = re.compile(r"^(tcia)\d+(?=_)", re.IGNORECASE)
_GRADES = frozenset({"HGG", "LGG"})


@dataclass(frozen=True, kw_only=True, slots=True)
class FileName:
    """The parts of a NIfTI file's name."""

    stem: str
    """The name without `.nii` or `.nii.gz`."""
    case: str = ""
    """Part before the modality: the case id in most releases, empty in `t1.nii.gz`."""
    kind: str = ""
    """A modality, `LABEL`, or empty if the name shows neither."""
    processed: bool = False
    """Whether the name continues after the modality, as in `_t1_bet`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseName:
    """The parts of a case id."""

    release: str
    patient_id: str
    timepoint: str = ""


def parse_file_name(name: str) -> FileName | None:
    """Parse a file name; return None if it is not the name of a NIfTI file.

    Example:
        >>> parse_file_name("BraTS2021_00000_flair.nii.gz")
        FileName(stem='BraTS2021_00000_flair', case='BraTS2021_00000', kind='t2f', processed=False)
    """
    nifti = _NIFTI_NAME.fullmatch(name)
    if nifti is None:
        return None
    scan = _SCAN_STEM.fullmatch(nifti["stem"])
    if scan is None:
        return FileName(stem=nifti["stem"])
    return FileName(
        stem=nifti["stem"],
        case=scan["case"] or "",
        kind=_KINDS[scan["spelling"].lower()],
        processed=scan["processed"] is not None,
    )


def modality_named(word: str) -> str | None:
    """Return the modality of a word such as `FLAIR` or `t1gd`, or None."""
    kind = _KINDS.get(word.lower())
    return kind if kind in MODALITIES else None


def parse_case_id(case_id: str) -> CaseName:
    """Parse a case id; one that matches no pattern is a patient of an unknown release.

    The ids of 2017 to 2019 differ in the year and in a number of the institution, which are omitted
    from the patient id: `Brats17_TCIA_201_1` and `Brats18_TCIA01_201_1` are one patient.

    Example:
        >>> parse_case_id("BraTS-GLI-00005-100")
        CaseName(release='brats2024-gli', patient_id='BraTS-GLI-00005', timepoint='100')
    """
    for pattern, release in _CASE_IDS:
        if match := pattern.fullmatch(case_id):
            return CaseName(
                release=release,
                patient_id=_TCIA_NUMBER.sub(r"\1", match["patient"]),
                timepoint=match.groupdict().get("timepoint") or "",
            )
    return CaseName(release=UNKNOWN, patient_id=case_id)


def grade_of(folders: Iterable[str]) -> str:
    """Return the grade, `HGG` or `LGG`, that is the name of a folder above a case, or nothing."""
    return next((name.upper() for name in folders if name.upper() in _GRADES), "")
