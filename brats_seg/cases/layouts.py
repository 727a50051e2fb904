"""Parse names of files and folders: modality, release, patient, grade; infer label conventions.

There are two tables: the words of the modalities, and the releases with their ids and conventions. The
names give the release, and the release gives the convention. The label values confirm it, because some
copies of a release have been converted to the convention of another. Everything that reads label maps
uses these rules.
"""

import os
import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from brats_seg import labels
from brats_seg.errors import CaseError, LabelError
from brats_seg.files import check_regular
from brats_seg.labels import MODALITIES, LabelConvention, convention_named
from brats_seg.voxels.box import Triple
from brats_seg.wings import NO_JUDGEMENT, Judgement, ShownLabels, judges

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
LONGEST_ID = 200
"""Bytes of the longest case id: a file name has 255, and results add a few words and a suffix."""
OUTPUT_MARKER = "brats_seg.json"
"""Name of the file that marks a folder of results."""
STEPS_NAME = "steps.png"
"""Name of the picture of how a case was prepared, in the folder of its scans."""

_DICOM = (".dcm", ".ima", "dicomdir")
_BIDS_ID = re.compile(r"sub-[A-Za-z0-9]+(_ses-[A-Za-z0-9]+)?")
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

# a space matches one of - _ . and space, or nothing
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


def _join_patterns(spellings: Iterable[str]) -> str:
    return "|".join(spelling.replace(" ", "[-_. ]?") for spelling in spellings)


_NIFTI_NAME = re.compile(r"(?P<stem>.+)\.nii(\.gz)?", re.IGNORECASE | re.DOTALL)
_SCAN_STEM = re.compile(
    rf"((?P<case>.*?)[-_. ])?"
    rf"((?P<modality>{_join_patterns(s for kind in MODALITIES for s in _SPELLINGS[kind])})"
    rf"([-_](?P<processed>bet|brain|bias))?"
    rf"|(({'|'.join(_OF_A_LABEL)})[-_. ]?)*(?P<label>{_join_patterns(_SPELLINGS[LABEL])}))",
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
# the three tissues of the decathlon have another order, which the values do not show
_CONVENTIONS_OF = {release: of_release for _, release, of_release in _RELEASES} | {
    DECATHLON: (labels.MSD,) * 4
}
_RESOLVED_TOGETHER = frozenset({"brats-ped", "brats-met"})
"""Releases whose convention depends on whether 4 occurs in any of their cases."""
_GLI_2024_SHAPE = (182, 218, 182)
"""Voxels of the GLI cases of 2024, and of no other GLI release."""
_DECATHLON_CASE = re.compile(r"BRATS_\d{3}")
_TCIA_NUMBER = re.compile(r"^(tcia)\d+(?=_)", re.IGNORECASE)


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
    kind = kind_named(word)
    return kind if kind in MODALITIES else None


def kind_named(word: str) -> str:
    """Return the modality of a word, `LABEL` for one such as `seg` or `mask`, or nothing."""
    return _KINDS.get(_SEPARATOR.sub("", word).lower(), "")


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


def release_of(case_id: str) -> str:
    """Return the release that a case id belongs to, or `UNKNOWN`."""
    return DECATHLON if _DECATHLON_CASE.fullmatch(case_id) else parse_case_id(case_id)[0]


@dataclass(frozen=True, kw_only=True, slots=True)
class Folder:
    """One folder, without its subfolders."""

    path: Path
    """Path relative to the data folder."""
    scans: tuple[NamedFile, ...] = ()
    other_names: tuple[str, ...] = ()
    """Names of the files that are not NIfTI."""
    refused: str = ""
    """Reason why the folder cannot be listed; empty if it can."""


def walk_folders(root: Path) -> Iterator[Folder]:
    """Yield the folders below `root` in alphabetical order, each once; links are followed.

    Hidden files, and the folders of results that a file `brats_seg.json` marks, are passed over.
    """
    seen: set[tuple[int, int]] = set()
    pending = [Path()]
    while pending:
        path = pending.pop()
        try:
            status = (root / path).stat()
            entries = sorted(os.scandir(root / path), key=lambda entry: entry.name)
        except OSError as error:
            yield Folder(path=path, refused=error.strerror or "")
            continue
        identity = (status.st_dev, status.st_ino)
        # the data folder itself is read in any case: the user has named it
        is_output = path != Path() and any(entry.name == OUTPUT_MARKER for entry in entries)
        if identity not in seen and not is_output:
            seen.add(identity)
            folder, below = _split_entries(path, entries)
            yield folder
            pending += reversed(below)


def holds_dicom(root: Path) -> bool:
    """Return whether DICOM files are below a folder, and no NIfTI file is."""
    is_dicom = False
    for folder in walk_folders(root) if os.path.isdir(root) else ():  # noqa: PTH112
        if folder.scans:
            return False
        is_dicom = is_dicom or has_dicom(root, folder)
    return is_dicom


def has_dicom(root: Path, folder: Folder) -> bool:
    """Return whether DICOM files are in a folder; scanners omit the suffix or write numbers after a dot."""
    if any(name.lower().endswith(_DICOM) for name in folder.other_names):
        return True
    suffixes = {name: Path(name).suffix[1:] for name in folder.other_names}
    # one file is read for all of the folder, as there may be thousands
    bare = next((name for name, end in suffixes.items() if not end or end.isdecimal()), "")
    path = root / folder.path / bare
    try:
        check_regular(path)
        with path.open("rb") as stream:
            stream.seek(128)
            return stream.read(4) == b"DICM"
    except OSError:
        return False


def resolve_convention(
    release: str, values: Collection[int], *, shape: Triple | None = None, declared: str = ""
) -> tuple[LabelConvention, bool]:
    """Return the label convention of a case, and whether another one could have the same values.

    An unexpected value in one case does not change the convention of the others; `check_values`
    reports values that the convention does not contain.

    Example:
        >>> convention, is_ambiguous = resolve_convention("brats2023-gli", {0, 4}, shape=(182, 218, 182))
        >>> convention.name, is_ambiguous
        ('brats2024', False)
    """
    if declared:
        return convention_named(declared), False
    release = release_at(release, shape)
    is_of_any_origin = release in {UNKNOWN, NNUNET, BIDS}
    is_ambiguous = is_of_any_origin or (release.endswith("-ped") and 4 not in values)
    return _CONVENTIONS_OF.get(release, _ANY)[(3 in values) + 2 * (4 in values)], is_ambiguous


def release_at(release: str, shape: Triple | None) -> str:
    """Return the release of a case by its name, corrected by the shape of its volumes."""
    return GLI_2024 if release == GLI_2023 and shape == _GLI_2024_SHAPE else release


def resolve_conventions(
    label_maps: Mapping[str, tuple[Triple, frozenset[int]]],
) -> dict[str, LabelConvention]:
    """Return the label convention of every label map of a folder, given shape and values by case id.

    Whether 4 occurs anywhere in a release of `_RESOLVED_TOGETHER` decides its convention, so that its
    label maps are resolved together. A label map that holds both 3 and 4 shows that its folder
    distinguishes four tissues, unless more label maps hold 4 without 3 than hold 3; all other label maps
    of the folder are then resolved together as well. Otherwise each is resolved alone, so that a folder in
    which one case has 3 for enhancing tumour and another has 4 is read correctly.
    """
    of_release: defaultdict[str, set[int]] = defaultdict(set)
    for case_id, (_, values) in label_maps.items():
        of_release[release_of(case_id)] |= values
    all_values = [values for _, values in label_maps.values()]
    n_with_3 = sum(3 in values for values in all_values)
    n_with_4_alone = sum(4 in values and 3 not in values for values in all_values)
    has_four_tissues = n_with_3 >= n_with_4_alone and any({3, 4} <= v for v in all_values)
    of_folder = set[int]().union(*of_release.values())
    conventions = {}
    for case_id, (shape, values) in label_maps.items():
        release = release_of(case_id)
        shared: Collection[int] = of_folder if has_four_tissues else values
        if release in _RESOLVED_TOGETHER:
            shared = of_release[release]
        conventions[case_id], _ = resolve_convention(release, shared, shape=shape)
    return conventions


def check_values(
    values: Collection[int], convention: LabelConvention, case_id: str, file: str = "label map"
) -> None:
    """Raise `LabelError` if a case has a value that its convention does not contain."""
    if unknown := sorted(set(values) - convention.values):
        expected = f"those of the convention {convention.name}, {sorted(convention.values)}"
        next_step = "Correct the label map, or name another --convention where that is an option."
        raise LabelError(case_id, file, f"label values {unknown}", expected, next_step)


def bids_name(case_id: str) -> str:
    """Return the name of a case in BIDS: its id, if that is one, or else its letters and digits.

    Example:
        >>> bids_name("sub-01_ses-pre"), bids_name("UPENN-GBM-00001_11")
        ('sub-01_ses-pre', 'sub-UPENNGBM0000111')
    """
    return case_id if _BIDS_ID.fullmatch(case_id) else f"sub-{bids_letters(case_id)}"


def bids_letters(text: str) -> str:
    """Return the letters and digits of a text, which alone may be in a label of BIDS."""
    return re.sub("[^A-Za-z0-9]", "", text)


def judge_labels(
    shown: Iterable[ShownLabels], convention: LabelConvention, *, is_named: bool, advice: str = ""
) -> Iterator[tuple[list[CaseError], tuple[str, ...]]]:
    """Yield for each label map of a group what is wrong with it in a convention, and warnings.

    `advice` is the next step where the voxels show another numbering, instead of `--convention`.
    """
    group, judge = list(shown), judges("label_map")
    judgements: Sequence[Judgement] = [NO_JUDGEMENT] * len(group)
    if judge is not None:
        judgements = judge.judge_group(group, convention, is_named=is_named, next_step=advice)
    for labelled, judgement in zip(group, judgements, strict=True):
        problems = [judgement.refusal] if judgement.refusal else []
        try:
            check_values(labelled.values, convention, labelled.case_id, labelled.file)
        except CaseError as error:
            problems.insert(0, error)
        yield problems, judgement.warnings


def _split_entries(path: Path, entries: list[os.DirEntry[str]]) -> tuple[Folder, list[Path]]:
    """Separate scans, other files and the folders to visit."""
    scans, other_names, below = [], [], []
    for entry in entries:
        # archives made on a Mac contain a `._x.nii.gz` for every `x.nii.gz`
        if entry.name.startswith(".") or entry.name == "__MACOSX":
            continue
        file = parse_file_name(entry.name, path / entry.name)
        if not _is_folder(entry):
            if file:
                scans.append(file)
            else:
                other_names.append(entry.name)
        elif file and (inner := _only_file(Path(entry.path))):
            # Kaggle unpacks some archives to x.nii/y.nii, where the name of the folder is right
            scans.append(replace(file, path=file.path / inner))
        else:
            below.append(path / entry.name)
    return Folder(path=path, scans=tuple(scans), other_names=tuple(other_names)), below


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:
        # a link that leads to itself: reading the file reports it
        return False


def _only_file(folder: Path) -> str:
    """Return the name of the only entry of a folder if it is a file, else nothing."""
    try:
        inside = [entry for entry in folder.iterdir() if not entry.name.startswith(".")]
        return inside[0].name if len(inside) == 1 and inside[0].is_file() else ""
    except OSError:
        return ""


def _plain_parts(stem: str) -> tuple[str, str, str]:
    """Return the case, the kind and the variant that a name shows."""
    scan = _SCAN_STEM.fullmatch(stem)
    if scan is None:
        return "", "", ""
    case, word = scan["case"] or "", scan["modality"] or scan["label"]
    kind, last = kind_named(word), _SEPARATOR.split(case)[-1].lower()
    # programs that remove the skull write the mask of the brain to t1_mask
    is_of_anatomy = last in _OF_ANATOMY or (word.lower() == "mask" and last in _KINDS)
    if kind == LABEL and is_of_anatomy:
        return "", "", ""
    return case, kind, scan["processed"] or ""


def _bids_parts(bids: re.Match[str]) -> tuple[str, str, str]:
    """Return the parts of a BIDS name: `case`, `entities` such as `_acq-ax`, and the `rest`."""
    before, kind, processed = _plain_parts(bids["rest"])
    entities = [part for part in bids["entities"].split("_") if part]
    described = [part.split("-")[1].lower() for part in entities if part.startswith(_DESCRIBING)]
    if kind == LABEL and any(word in _OF_ANATOMY or "brain" in word for word in described):
        return "", "", ""
    if kind == "t1n" and any(map(_AFTER_CONTRAST.fullmatch, entities)):
        kind = "t1c"
        entities = [part for part in entities if not _AFTER_CONTRAST.fullmatch(part)]
    variant = [*entities, *([before] if kind != LABEL else []), processed]
    return (bids["case"], kind, "_".join(filter(None, variant))) if kind else ("", "", "")
