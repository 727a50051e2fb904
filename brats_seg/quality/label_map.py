"""Check that the labels of a label map look like the tissues that they mark.

Values do not tell which numbering a label map has; the voxels do. Oedema is outermost: most of its
surface borders on healthy brain. Only enhancing tumour takes up contrast agent. And the edge of a
tumour is an edge of the images: FLAIR or T2 is brighter just inside than just outside. Nothing is
concluded where this is not clear. The limits were set on the twelve labelled real cases of BraTS 2018
and 2021.
"""

from collections import Counter
from collections.abc import Mapping, Sequence, Set
from dataclasses import replace
from math import prod

import numpy as np
import numpy.typing as npt
from scipy.ndimage import binary_dilation, binary_erosion

from brats_seg.cases.nifti import Volume, oriented
from brats_seg.errors import CaseError, LabelError
from brats_seg.labels import (
    BRATS2017,
    BRATS2023,
    CONVENTIONS,
    MODALITIES,
    LabelConvention,
    LabelMap,
    convention_named,
)
from brats_seg.quality import scan
from brats_seg.voxels.box import bounding_box
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.wings import NO_JUDGEMENT, Judgement, ShownLabels

FEWEST_VOXELS = 20
"""Voxels of a sample, 0.16 ml, from which a label is judged; the smallest of the real cases had 24."""
OUTER_SHARE = 0.5
"""Least share of the surface of oedema that borders on healthy brain; it was 0.60 or more."""
INNER_SHARE = 0.45
"""Largest such share of the other labels; it was 0.38 or less."""
LEAST_ENHANCEMENT = 0.9
"""Least enhancement of enhancing tumour above that of the other labels, in standard deviations; it
was 1.09 or more, but for one case of weak contrast, from which nothing is concluded."""
LEAST_BRIGHTNESS = 0.8
"""Least brightness of enhancing tumour in t1c, in standard deviations; it was 1.35 or more."""
LARGEST_SHARE_OUTSIDE = 0.2
"""Largest share of the labelled voxels outside the brain; it was 0."""
LARGEST_SHARE_OF_BRAIN = 0.6
"""Largest share of the brain that is labelled; it was 0.17 or less."""
LEAST_CONTRAST = 0.62
"""Least probability that a voxel just inside the edge of a tumour is brighter than one just outside,
in the best of FLAIR, T2 and t1c. It was 0.79 or more. Of label maps of another patient, 130 of 132
were below, of those that were shifted by 40 mm all, of those shifted by 20 mm more than half."""
CLEAR_CONTRAST = 0.72
"""Such a probability below which the placement is remarked on. All label maps that were mirrored,
upside down, transposed, of another patient, or shifted by 20 mm were below."""
SMALLEST_OUTLINE_ML = 0.1
"""Volume from which a label is judged by its outline alone."""
_RIM_MM = 4.0
"""Width of the rims inside and outside the edge of a tumour."""
_FEWEST_RIM_VOXELS = 60
_N_COMPARED = 3000
"""Least number of voxels that a larger rim is thinned to."""
_MOST_LABELS = 16
_NO_BRAIN = _MOST_LABELS - 1
_T1N, _T1C, _T2W, _T2F, _UPTAKE = range(5)
_COPIED = ("msd", "brats2024-ped")
"""Conventions of label maps that also occur under the names of other releases."""
_MIRRORED = ("left to right", "front to back", "upside down")


def judge_scan(case_id: str, volumes: Mapping[str, Volume], label: Volume | None) -> Judgement:
    """Return whether the modalities are what they are called, and the label map is of the scan.

    Args:
        case_id: Id of the case.
        volumes: Volume of each modality, on one grid, finite and not constant, as stored.
        label: The label map, as stored; None without one.
    """
    oriented_volumes = {modality: oriented(volume) for modality, volume in volumes.items()}
    images, oriented_label = [*oriented_volumes.values()], label and oriented(label)
    sample = scan.sample_brain(images, oriented_label)
    if sample is None:
        return NO_JUDGEMENT
    try:
        scan.check_modalities(case_id, oriented_volumes, sample)
    except CaseError as error:
        return Judgement(refusal=error)
    remarks = tuple(scan.scan_remarks(oriented_volumes, sample))
    # a tumour does not look like itself in other modalities than their names say
    if oriented_label is None or any(remark.startswith(scan.MIXED_UP) for remark in remarks):
        return Judgement(remarks=remarks)
    judgement = judge_sample(case_id, images, oriented_label, sample)
    return replace(judgement, remarks=(*remarks, *judgement.remarks))


def judge_labels(case_id: str, volumes: Sequence[Volume], label: Volume) -> Judgement:
    """Return whether a label map lies on a tumour of its scan, and which tissues its values show.

    Args:
        case_id: Id of the case.
        volumes: Modalities in the axes of BraTS; nothing is judged without all four.
        label: Label map on the same grid, in the same axes.
    """
    sample = scan.sample_brain(volumes, label)
    return NO_JUDGEMENT if sample is None else judge_sample(case_id, volumes, label, sample)


def judge_sample(
    case_id: str, volumes: Sequence[Volume], label: Volume, sample: scan.BrainSample
) -> Judgement:
    """Return the judgement of `judge_labels`, given a sample of the scan and its label map."""
    # tissues are recognised by all four modalities
    if not sample.is_brain or len(volumes) < len(MODALITIES):
        return NO_JUDGEMENT
    problem = advice = ""
    remarks: tuple[str, ...] = ()
    labelled_ml = sample.n_inside * sample.voxel_ml
    if not _is_inside(sample):
        problem = f"{1 - sample.n_inside / sample.n_labelled:.0%} of the labelled voxels outside the brain"
    elif labelled_ml > LARGEST_SHARE_OF_BRAIN * sample.brain_ml:
        problem = f"labels on {labelled_ml / sample.brain_ml:.0%} of the brain"
    elif (contrast := edge_contrast(sample)) < CLEAR_CONTRAST:
        advice = _better_placement(volumes, label)
        evidence = f"contrast {contrast:.2f}, where 0.5 is none and tumours have 0.8 or more"
        if advice or contrast < LEAST_CONTRAST:
            problem = f"labels whose edge is no edge in t2f, t2w or t1c ({evidence})"
        else:
            remarks = (
                "the label map may be of another scan: view both, its edge is hardly an edge in t2f, "
                f"t2w or t1c [{evidence}]",
            )
    if problem:
        next_step = f"{advice}View both, and put the right label map there."
        expected = "labels on the tumour of this scan"
        return Judgement(refusal=LabelError(case_id, label.file, problem, expected, next_step))
    outermost, enhancing = find_tissues(sample)
    return Judgement(remarks=remarks, outermost=outermost, enhancing=enhancing)


def judge_group(
    group: Sequence[ShownLabels],
    convention: LabelConvention,
    *,
    is_named: bool = False,
    next_step: str = "",
) -> tuple[Judgement, ...]:
    """Return for each label map of one release whether the convention explains its tissues.

    A label map that shows nothing clear itself is refused where most others show another numbering
    in which its values have other regions. It has a remark if it is alone, and may be a copy in one.

    Args:
        group: Label maps that are read in one convention; one alone is judged by itself.
        convention: The convention.
        is_named: Whether a person named it, so that nothing is refused.
        next_step: Advice in a refusal, instead of naming the convention with --convention.

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> shown = ShownLabels(
        ...     case_id="a", file="a.nii", values=frozenset({0, 1, 2, 3}), outermost=1, enhancing=3
        ... )
        >>> "msd fits" in str(judge_group([shown], BRATS2023)[0].refusal)
        True
    """
    rival = "" if is_named else _rival(group, convention)
    if len(group) == 1 and not is_named and (remark := _ambiguity_remark(group[0], convention)):
        return (Judgement(remarks=(remark,)),)
    return tuple(_judge(labels, convention, rival, is_named, next_step) for labels in group)


def outermost_of_outline(labels: LabelMap, spacing_mm: tuple[float, float, float]) -> int | None:
    """Return the value that surrounds the others in the box (X, Y, Z) around a label map.

    Without scans, it is clear by the outline alone, or None.
    """
    counts = np.bincount(labels.ravel())
    fewest = SMALLEST_OUTLINE_ML * MM3_PER_ML / prod(spacing_mm)
    values = [value for value in range(1, min(len(counts), _NO_BRAIN)) if counts[value] >= fewest]
    return _outermost(np.pad(np.minimum(labels, _NO_BRAIN - 1), 1), values)


def find_tissues(sample: scan.BrainSample) -> tuple[int | None, int | None]:
    """Return the values that are clearly oedema and enhancing tumour; None where it is not clear."""
    outlined = np.where(sample.brain, np.minimum(sample.labels, _NO_BRAIN - 1), _NO_BRAIN)
    counts = np.bincount(outlined.ravel(), minlength=_MOST_LABELS)
    values = [value for value in range(1, _NO_BRAIN) if counts[value] >= FEWEST_VOXELS]
    shown = np.stack([*sample.images, sample.images[_T1C] - sample.images[_T1N]])
    medians = {value: np.median(shown[:, outlined == value], axis=1) for value in values}
    outermost = _outermost(outlined, values)
    if outermost is not None:
        brightest = max(medians[value][_T2W] for value in values if value != outermost)
        # necrosis is brighter than oedema on T2; the margin is that of noise
        if brightest < medians[outermost][_T2W] - 0.3:
            outermost = None
    return outermost, _enhancing(medians)


def edge_contrast(sample: scan.BrainSample) -> float:
    """Return how much the edge of the labelled region is an edge of the images, 0.5 to 1.

    It is the probability that a voxel just inside is brighter than one just outside, in the best of
    FLAIR, T2 and t1c; 1 if the region is too small to be judged.
    """
    box = bounding_box(sample.labels > 0)
    if box is None:
        return 1.0
    n_layers = max(1, round(_RIM_MM / max(sample.spacing_mm)))
    around = box.grown(n_layers + 1).within(sample.brain.shape).slices
    labelled, brain = sample.labels[around] > 0, sample.brain[around]
    inner = brain & labelled & ~binary_erosion(labelled, iterations=n_layers)
    outer = brain & ~labelled & binary_dilation(labelled, iterations=n_layers)
    if min(np.count_nonzero(inner), np.count_nonzero(outer)) < _FEWEST_RIM_VOXELS:
        return 1.0
    images = (sample.images[modality][around] for modality in (_T2F, _T2W, _T1C))
    return max(_probability_brighter(image[inner], image[outer]) for image in images)


def _judge(
    labels: ShownLabels, convention: LabelConvention, rival: str, is_named: bool, next_step: str
) -> Judgement:
    contradiction, fitting = _contradiction(labels, convention), _matches(labels)
    is_rival = bool(rival) and _has_other_regions(rival, convention, labels.values)
    if is_rival and not contradiction:
        contradiction = "most label maps of the release show another numbering"
        fitting = (rival,)
    if not contradiction or not (labels.is_on_scan or is_rival):
        return NO_JUDGEMENT
    fits = f"; {' or '.join(fitting)} fits" if fitting else ""
    if is_named or not fitting:
        message = f"the labels do not look like {convention.name}: {contradiction}{fits}"
        return Judgement(remarks=(message,))
    problem = f"labels that {convention.name} does not explain ({contradiction})"
    expected = f"the numbering of that convention{fits}"
    next_step = next_step or f"Name the right one, such as --convention {fitting[0]}."
    refusal = LabelError(labels.case_id, labels.file, problem, expected, next_step)
    return Judgement(refusal=refusal)


def _rival(group: Sequence[ShownLabels], convention: LabelConvention) -> str:
    """Return the name of another convention that most label maps look like; empty if none is.

    Most label maps show nothing that is clear, and do not count.
    """
    against = Counter(
        name for labels in group if _contradiction(labels, convention) for name in _matches(labels)
    )
    if not against:
        return ""
    rival, n_against = against.most_common(1)[0]
    n_for = sum({rival, convention.name} - {*_matches(labels)} == {rival} for labels in group)
    return rival if n_against > n_for else ""


def _ambiguity_remark(labels: ShownLabels, convention: LabelConvention) -> str:
    """Return a remark if the tissues allow the convention, and others in which it may be a copy."""
    fitting = _matches(labels)
    rivals = [name for name in _COPIED if name in fitting]
    rivals = [name for name in rivals if _has_other_regions(name, convention, labels.values)]
    if convention not in (BRATS2017, BRATS2023) or convention.name not in fitting or not rivals:
        return ""
    return (
        f"the scan does not show whether the numbering is {convention.name} or {' or '.join(rivals)}: "
        "check which tissue each label is, and name the convention with --convention"
    )


def _has_other_regions(rival: str, convention: LabelConvention, values: Set[int]) -> bool:
    """Return whether label values have other regions in another convention, given by its name."""
    rival_convention = convention_named(rival)
    return values <= rival_convention.values and any(
        values & set(region) != values & set(rival_region)
        for region, rival_region in zip(convention.regions, rival_convention.regions, strict=True)
    )


def _contradiction(labels: ShownLabels, convention: LabelConvention) -> str:
    """Return why the convention cannot be right; empty if it can."""
    oedema, _, enhancing = convention.painted
    if labels.enhancing not in {None, enhancing}:
        return (
            f"label {labels.enhancing} takes up contrast agent, but enhancing tumour is {enhancing}"
        )
    if labels.outermost not in {None, oedema} and oedema in labels.values:
        return f"label {labels.outermost} surrounds the others, but oedema is {oedema}"
    return ""


def _matches(labels: ShownLabels) -> tuple[str, ...]:
    """Return the names of the conventions that agree with the tissues."""
    return tuple(
        convention.name
        for convention in CONVENTIONS
        if labels.values <= convention.values
        and labels.enhancing in {None, convention.painted[2]}
        and labels.outermost in {None, convention.painted[0]}
    )


def _outermost(labels: LabelMap, values: Sequence[int]) -> int | None:
    """Return the one of the values whose surface borders on unlabelled voxels, or None.

    Args:
        labels: Label map (x, y, z), or a box of it with a margin; voxels of `_NO_BRAIN` do not count.
        values: Labels that are large enough to be judged.
    """
    if len(values) < 2:
        return None
    borders = _borders(labels)
    shares = {value: borders[value, 0] / max(1, borders[value].sum()) for value in values}
    second, first = sorted(values, key=lambda value: shares[value])[-2:]
    return first if shares[first] >= OUTER_SHARE and shares[second] <= INNER_SHARE else None


def _enhancing(medians: dict[int, npt.NDArray[np.float32]]) -> int | None:
    """Return the one of the values that takes up contrast agent, by the medians of the images."""
    uptake = {value: float(of_images[_UPTAKE]) for value, of_images in medians.items()}
    if not uptake:
        return None
    *rest, best = sorted(uptake, key=lambda value: uptake[value])
    second = uptake[rest[-1]] if rest else 0.0
    is_clear = uptake[best] - second >= LEAST_ENHANCEMENT
    return best if is_clear and medians[best][_T1C] >= LEAST_BRIGHTNESS else None


def _borders(labels: LabelMap) -> npt.NDArray[np.int64]:
    """Return how many faces voxels of one label share with voxels of another, as (16, 16)."""
    n = _MOST_LABELS
    counts = np.zeros(n * n, dtype=np.int64)
    for axis in range(3):
        along = np.moveaxis(labels, axis, 0).astype(np.uint8)
        before, after = along[:-1], along[1:]
        differ = before != after
        counts += np.bincount(before[differ] * np.uint8(n) + after[differ], minlength=n * n)
    faces = counts.reshape(n, n)
    faces = faces + faces.T
    faces[:, _NO_BRAIN] = 0
    return faces


def _is_inside(sample: scan.BrainSample) -> bool:
    return sample.n_labelled - sample.n_inside <= LARGEST_SHARE_OUTSIDE * sample.n_labelled


def _better_placement(volumes: Sequence[Volume], label: Volume) -> str:
    """Return a sentence that says how the label map would have to be mirrored to fit, if it would."""
    for axis, direction in enumerate(_MIRRORED):
        sample = scan.sample_brain(volumes, replace(label, array=np.flip(label.array, axis)))
        if sample and _is_inside(sample) and CLEAR_CONTRAST < edge_contrast(sample) < 1:
            return f"It would fit if it were mirrored {direction}. "
    return ""


def _probability_brighter(inner: npt.NDArray[np.float32], outer: npt.NDArray[np.float32]) -> float:
    """Return the probability that a value of `inner` is larger than one of `outer`."""
    inner, outer = (values[:: max(1, values.size // _N_COMPARED)] for values in (inner, outer))
    # a tie counts half, as in Mann and Whitney's U; importing scipy.stats would take longer
    ordered = np.sort(outer)
    n_below, n_up_to = (np.searchsorted(ordered, inner, side) for side in ("left", "right"))
    return float((n_below + n_up_to).mean() / 2 / outer.size)
