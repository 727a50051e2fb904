"""Tell the release of a case by its id, and the label convention of its label map.

`releases.toml` is the table of releases, with their ids, patients and conventions. The id gives the release, and the
release gives the convention. The label values confirm it, because some copies of a release have been
converted to the convention of another. Everything that reads label maps uses these rules.
"""

import re
from collections import defaultdict
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence

from brats_seg.errors import CaseError, LabelError
from brats_seg.files import table_beside
from brats_seg.labels import MSD, LabelConvention, convention_named
from brats_seg.voxels.box import Triple
from brats_seg.wings import NO_JUDGEMENT, Judgement, ShownLabels, find_wing

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

_TABLE = table_beside(__file__)
_RELEASES = [
    (re.compile(pattern, re.IGNORECASE), release) for pattern, release, _ in _TABLE["releases"]
]
_OF_VALUES = {
    name: [*map(convention_named, names)] for name, names in _TABLE["conventions"].items()
}
"""Conventions of label maps with neither 3 nor 4, with 3 alone, with 4 alone, and with both."""
# the three tissues of the decathlon have another order, which the values do not show
_CONVENTIONS_OF = {release: _OF_VALUES[name] for _, release, name in _TABLE["releases"]} | {
    DECATHLON: [MSD] * 4
}
_RESOLVED_TOGETHER = frozenset({"brats-ped", "brats-met"})
"""Releases whose convention depends on whether 4 occurs in any of their cases."""
_GLI_2024_SHAPE = (182, 218, 182)
"""Voxels of the GLI cases of 2024, and of no other GLI release."""


def parse_case_id(case_id: str) -> tuple[str, str]:
    """Return release and patient of a case id; one that matches no pattern is a patient itself.

    The ids of 2017 to 2019 differ in the year and in a number of the institution, which are omitted
    from the patient id: `Brats17_TCIA_201_1` and `Brats18_TCIA01_201_1` are one patient.

    Example:
        >>> parse_case_id("BraTS-GLI-00005-100")
        ('brats2024-gli', 'BraTS-GLI-00005')
    """
    for pattern, release in _RELEASES:
        if match := pattern.fullmatch(case_id):
            return release, re.sub(r"(?i)^(tcia)\d+(?=_)", r"\1", match["patient"])
    return UNKNOWN, case_id


def release_of(case_id: str) -> str:
    """Return the release of a label map by its case id alone, or `UNKNOWN`.

    `BRATS_001` is of the decathlon, whose scans are known by their `dataset.json` instead.
    """
    return DECATHLON if re.fullmatch(r"BRATS_\d{3}", case_id) else parse_case_id(case_id)[0]


def resolve_convention(
    release: str, values: Collection[int], *, declared: str = ""
) -> tuple[LabelConvention, bool]:
    """Return the label convention of a case, and whether another one could have the same values.

    An unexpected value in one case does not change the convention of the others; `check_values`
    reports values that the convention does not contain.

    Example:
        >>> convention, is_ambiguous = resolve_convention("brats2024-gli", {0, 4})
        >>> convention.name, is_ambiguous
        ('brats2024', False)
    """
    if declared:
        return convention_named(declared), False
    is_of_any_origin = release in {UNKNOWN, NNUNET, BIDS}
    is_ambiguous = is_of_any_origin or (release.endswith("-ped") and 4 not in values)
    of_release = _CONVENTIONS_OF.get(release, _OF_VALUES["any"])
    return of_release[(3 in values) + 2 * (4 in values)], is_ambiguous


def release_at(release: str, shape: Triple | None) -> str:
    """Return the release of a case by its name, corrected by the shape of its volumes."""
    return GLI_2024 if release == GLI_2023 and shape == _GLI_2024_SHAPE else release


def resolve_conventions(
    label_maps: Mapping[str, tuple[Triple, frozenset[int]]], declared: Mapping[str, str]
) -> dict[str, LabelConvention]:
    """Return the label convention of every label map of a folder, given shape and values by case id.

    `declared` has the names of those that are known, by case id.

    Whether 4 occurs anywhere in a release of `_RESOLVED_TOGETHER` decides its convention, so that its
    label maps are resolved together. All other label maps are resolved together if they have four tissues.
    Otherwise each is resolved alone, so that a folder in which one case has 3 for enhancing tumour and
    another has 4 is read correctly.
    """
    of_release: defaultdict[str, set[int]] = defaultdict(set)
    for case_id, (_, values) in label_maps.items():
        of_release[release_of(case_id)] |= values
    has_four_tissues = have_four_tissues([values for _, values in label_maps.values()])
    of_folder = set[int]().union(*of_release.values())
    conventions = {}
    for case_id, (shape, values) in label_maps.items():
        release = release_at(release_of(case_id), shape)
        together: Collection[int] = of_folder if has_four_tissues else values
        shared = of_release[release] if release in _RESOLVED_TOGETHER else together
        name = declared.get(case_id, "")
        conventions[case_id], _ = resolve_convention(release, shared, declared=name)
    return conventions


def have_four_tissues(label_maps: Sequence[Collection[int]]) -> bool:
    """Return whether 3 and 4 are two tissues in label maps of one origin, given the values of each.

    One that holds both shows it, unless more hold 4 without 3 than hold 3.
    """
    with_3 = [values for values in label_maps if 3 in values]
    n_with_4_alone = sum(4 in values and 3 not in values for values in label_maps)
    return len(with_3) >= n_with_4_alone and any(4 in values for values in with_3)


def check_values(
    values: Collection[int], convention: LabelConvention, case_id: str, file: str = "label map"
) -> None:
    """Raise `LabelError` if a case has a value that its convention does not contain."""
    if unknown := sorted(set(values) - convention.values):
        expected = f"those of the convention {convention.name}, {sorted(convention.values)}"
        next_step = "Correct the label map, or name another --convention where that is an option."
        raise LabelError(case_id, file, f"label values {unknown}", expected, next_step)


def judge_labels(
    shown: Iterable[ShownLabels], convention: LabelConvention, *, is_named: bool, advice: str = ""
) -> Iterator[tuple[list[CaseError], tuple[str, ...]]]:
    """Yield for each label map of a group what is wrong with it in a convention, and remarks.

    `advice` is the next step where the voxels show another numbering, instead of `--convention`.
    """
    group, judge = list(shown), find_wing("quality.label_map")
    judgements: Sequence[Judgement] = [NO_JUDGEMENT] * len(group)
    if judge is not None:
        judgements = judge.judge_group(group, convention, is_named=is_named, next_step=advice)
    for labelled, judgement in zip(group, judgements, strict=True):
        problems = [judgement.refusal] if judgement.refusal else []
        try:
            check_values(labelled.values, convention, labelled.case_id, labelled.file)
        except CaseError as error:
            problems.insert(0, error)
        yield problems, judgement.remarks
