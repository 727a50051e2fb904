"""Folders of references and predictions to a table of scores."""

# DOC evaluation/pairs: Which prediction belongs to which reference, by the names of files and folders.
# DOC evaluation/case_scores: The scores of one case: two label maps in, a row per region out.

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import check_one_grid, have_one_grid, label_values_of
from brats_seg.cases.conventions import LabelContent, check_values, resolve_all
from brats_seg.cases.folders import walk_folders
from brats_seg.cases.layouts import LABEL, parse_file_name
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import Volume, read_label_map
from brats_seg.errors import LayoutError, UsageError
from brats_seg.evaluation.lesionwise import LesionScores, Scale, score_lesions
from brats_seg.evaluation.overlap import BOTH_EMPTY, RegionCounts, count_regions, dice, jaccard
from brats_seg.evaluation.protocols import Protocol
from brats_seg.evaluation.scores import Score
from brats_seg.evaluation.surface_distance import hausdorff95
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import Box, bounding_box


@dataclass(frozen=True, kw_only=True, slots=True)
class Pair:
    """The label maps of one case."""

    case_id: str
    reference: Path
    prediction: Path | None
    """None if there is none."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Every reference with its prediction."""

    pairs: tuple[Pair, ...]
    """Sorted by case id."""
    without_reference: tuple[str, ...]
    """Predicted cases that cannot be scored."""


def find_pairs(reference: Path, prediction: Path) -> Pairing:
    """Pair two label maps, or the label maps in two folders.

    A folder may hold `<case>.nii.gz`, `<case>-seg.nii.gz`, or case folders at any depth; the scans
    in it are passed over.

    Raises:
        UsageError: A path is not there, one is a file and one a folder, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in both.
    """
    for path in (reference, prediction):
        if not path.exists():
            msg = f"{path} does not exist; expected a label map, or a folder of label maps"
            raise UsageError(msg)
    if reference.is_file() != prediction.is_file():
        msg = (
            f"{reference} and {prediction}: expected two label maps or two folders, not one of each"
        )
        raise UsageError(msg)
    if reference.is_file():
        pair = Pair(case_id=_case_of(reference), reference=reference, prediction=prediction)
        return Pairing(pairs=(pair,), without_reference=())
    references, predictions = label_maps_in(reference), label_maps_in(prediction)
    if not references.keys() & predictions.keys():
        msg = (
            f"no case is in both folders: {reference} has {_some(references)}, {prediction} has "
            f"{_some(predictions)}. Name each prediction as its case, for example "
            f"{next(iter(references))}.nii.gz."
        )
        raise LayoutError(msg)
    return Pairing(
        pairs=tuple(
            Pair(case_id=case_id, reference=path, prediction=predictions.get(case_id))
            for case_id, path in references.items()
        ),
        without_reference=tuple(sorted(predictions.keys() - references.keys())),
    )


def label_maps_in(root: Path) -> dict[str, Path]:
    """Return the label maps below a folder by case id, sorted.

    Raises:
        UsageError: A case occurs twice.
        LayoutError: There are none.
    """
    found: dict[str, Path] = {}
    for case_id, path in _label_maps(root):
        if case_id in found:
            msg = (
                f"case {case_id} has two label maps, {found[case_id]} and {path}. "
                "Keep one of them, or name the folder that holds the ones you mean."
            )
            raise UsageError(msg)
        found[case_id] = path
    if not found:
        msg = f"{root} holds no label map; expected <case>.nii.gz, or case folders with one each"
        raise LayoutError(msg)
    return dict(sorted(found.items()))


def _label_maps(root: Path) -> Iterator[tuple[str, Path]]:
    for folder in walk_folders(root):
        named = [scan for scan in folder.scans if scan.name.kind == LABEL]
        others = [scan for scan in folder.scans if not scan.name.kind]
        beside_scans = any(scan.name.kind in MODALITIES for scan in folder.scans)
        own_name = (root / folder.path).name
        for scan in named:
            yield scan.name.case or own_name, root / scan.path
        if beside_scans and named:
            continue
        for scan in others:
            # the one file that is no scan is the label map, such as that of BraTS20_Training_355
            foreign = beside_scans and len(others) == 1
            yield own_name if foreign else scan.name.stem, root / scan.path


def _case_of(path: Path) -> str:
    name = parse_file_name(path.name)
    if name is None:
        msg = f"{path} is not a NIfTI file by its name; expected .nii or .nii.gz"
        raise UsageError(msg)
    return (name.case or path.parent.name) if name.kind == LABEL else name.stem


def _some(cases: dict[str, Path]) -> str:
    shown = list(cases)[:3]
    more = f" and {len(cases) - len(shown)} more" if len(cases) > len(shown) else ""
    return ", ".join(shown) + more


Masks = npt.NDArray[np.bool_]
PerRegion = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairConventions:
    """The label conventions of the two sides of a pair."""

    reference: LabelConvention
    prediction: LabelConvention


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseScores:
    """One case, scored."""

    scores: tuple[Score, ...]
    """A row per region of the protocol."""
    remark: str = ""
    """What was unusual, and could be dealt with."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sides:
    """The regions of both sides, cut to where either has any."""

    reference: Masks
    """(R, X, Y, Z)"""
    prediction: Masks
    """(R, X, Y, Z)"""
    n_cut_off: int
    """Voxels of the volume that are in no region of either side."""


def score_pair(pair: Pair, numbering: PairConventions, protocol: Protocol) -> CaseScores:
    """Score the prediction of one case.

    Without a prediction every region scores the worst there is, also one that the reference lacks.

    Raises:
        CaseError: A file cannot be read, or the two are not on one grid.
    """
    reference = read_label_map(pair.reference, case_id=pair.case_id)
    geometry = reference.geometry
    scale = Scale(
        spacing_mm=geometry.spacing_mm,
        penalty_mm=protocol.hd95_penalty(geometry.shape, geometry.spacing_mm),
    )
    if pair.prediction is None:
        nothing = np.zeros(geometry.shape, np.uint8)
        sides = _regions(reference.array, nothing, numbering, protocol)
        rows = _scored(pair.case_id, sides, protocol, scale)
        return CaseScores(scores=tuple(_worst(row, scale.penalty_mm) for row in rows))
    prediction = read_label_map(pair.prediction, case_id=pair.case_id)
    remark = _check_grids(pair.case_id, reference, prediction)
    sides = _regions(reference.array, prediction.array, numbering, protocol)
    return CaseScores(scores=_scored(pair.case_id, sides, protocol, scale), remark=remark)


def label_content(path: Path, case_id: str) -> LabelContent:
    """Return the shape and the values of a label map, or raise `CaseError` if it cannot be read."""
    label = read_label_map(path, case_id=case_id)
    return LabelContent(shape=label.geometry.shape, values=label_values_of(label.array))


def _check_grids(case_id: str, reference: Volume, prediction: Volume) -> str:
    """Refuse a prediction on another grid; return a remark if a side does not say where it is."""
    here, there = reference.geometry, prediction.geometry
    if have_one_grid(here, there):
        return ""
    sides = [(f"reference {reference.file}", here), (f"prediction {prediction.file}", there)]
    # arrays are saved with the identity when nothing is known of their place
    placeless = [file for file, grid in sides if np.array_equal(grid.affine, np.eye(4))]
    if here.shape != there.shape or not placeless:
        check_one_grid(case_id, sides)
    return f"case {case_id}: {placeless[0]} has no affine, so that voxels were paired by index"


def _regions(
    reference: LabelMap, prediction: LabelMap, numbering: PairConventions, protocol: Protocol
) -> _Sides:
    box = bounding_box((reference > 0) | (prediction > 0)) or Box.at((0, 0, 0), (1, 1, 1))
    cut = reference[box.slices]
    return _Sides(
        reference=_masks(cut, numbering.reference, protocol),
        prediction=_masks(prediction[box.slices], numbering.prediction, protocol),
        n_cut_off=reference.size - cut.size,
    )


def _masks(label_map: LabelMap, convention: LabelConvention, protocol: Protocol) -> Masks:
    return np.stack([np.isin(label_map, region.values(convention)) for region in protocol.regions])


def _scored(case_id: str, sides: _Sides, protocol: Protocol, scale: Scale) -> tuple[Score, ...]:
    counts = count_regions(sides.prediction, sides.reference, case_id)
    counts = replace(counts, true_negative=counts.true_negative + sides.n_cut_off)
    ml = scale.voxel_mm3 / 1000
    hd95 = [
        hausdorff95(reference, prediction, scale.spacing_mm)
        for reference, prediction in zip(sides.reference, sides.prediction, strict=True)
    ]
    columns = {
        "dice": dice(counts),
        "jaccard": jaccard(counts),
        "hd95": np.where(np.isfinite(hd95), hd95, scale.penalty_mm),
        "sensitivity": _sensitivity(counts),
        "specificity": _specificity(counts),
        "reference_ml": counts.in_reference * ml,
        "prediction_ml": counts.in_prediction * ml,
    }
    lesions: tuple[LesionScores | None, ...] = (None,) * len(hd95)
    if protocol.lesions is not None:
        lesions = score_lesions(sides.reference, sides.prediction, protocol, scale)
    return tuple(
        Score(
            case_id=case_id,
            region=region,
            lesions=lesions[k],
            **{column: float(values[k]) for column, values in columns.items()},
        )
        for k, region in enumerate(protocol.region_names)
    )


def _sensitivity(counts: RegionCounts) -> PerRegion:
    in_reference = counts.in_reference
    without = np.where(counts.in_prediction == 0, BOTH_EMPTY, 0.0)
    return np.where(in_reference > 0, counts.true_positive / np.maximum(in_reference, 1), without)


def _specificity(counts: RegionCounts) -> PerRegion:
    outside = counts.true_negative + counts.false_positive
    return np.where(outside > 0, counts.true_negative / np.maximum(outside, 1), 1.0)


def _worst(score: Score, penalty_mm: float) -> Score:
    lesions = score.lesions
    if lesions is not None:
        nsd = (0.0,) * len(lesions.nsd)
        lesions = replace(lesions, dice=0.0, hd95=penalty_mm, nsd=nsd)
    return replace(
        score,
        dice=0.0,
        jaccard=0.0,
        hd95=penalty_mm,
        sensitivity=0.0,
        specificity=0.0,
        lesions=lesions,
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """Every reference, and what became of it."""

    protocol: Protocol
    scores: tuple[Score, ...]
    """By case id and region; a case without a prediction is among them, with the worst scores."""
    missing: tuple[str, ...]
    """Cases without a prediction."""
    failures: tuple[Failure, ...]
    """Cases that are not in the scores."""
    without_reference: tuple[str, ...]
    """Predicted cases that were passed over."""
    reference_labels: tuple[str, ...]
    """Names of the label conventions found in the references."""
    prediction_labels: tuple[str, ...]
    """Those found in the predictions. Where they differ, regions were compared all the same."""
    remarks: tuple[str, ...]
    """What was unusual about single cases."""


def evaluate_folders(
    reference: Path,
    prediction: Path,
    protocol: Protocol,
    *,
    n_workers: int = 0,
    track: Track = untracked,
) -> Evaluation:
    """Score the predictions in one folder, or one file, against the references in another.

    Args:
        reference: A folder of `<case>.nii.gz` or of case folders, or one label map.
        prediction: The same. The two may be in different label conventions.
        protocol: What is scored, and how.
        n_workers: Processes; 0 works in this one. The scores do not depend on it.
        track: Shows how far the work is.

    Raises:
        UsageError: The paths are not two files or two folders, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in both.
        EnvironmentalError: A process was killed.
    """
    pairing = find_pairs(reference, prediction)
    return evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track)


def evaluate_pairs(
    pairing: Pairing, protocol: Protocol, *, n_workers: int = 0, track: Track = untracked
) -> Evaluation:
    """Score predictions whose references are known, as `evaluate_folders` does."""
    attempt = partial(map_cases, n_workers=n_workers, track=track)
    read = attempt(_read_values, pairing.pairs, "reading label maps")
    tasks = _numbered(read.results, protocol)
    scored = attempt(partial(_score, protocol=protocol), tasks, "scoring")
    failures = sorted([*read.failures, *scored.failures], key=lambda failure: failure.case_id)
    return Evaluation(
        protocol=protocol,
        scores=tuple(score for case in scored.results for score in case.scores),
        missing=tuple(pair.case_id for pair in pairing.pairs if pair.prediction is None),
        failures=tuple(failures),
        without_reference=pairing.without_reference,
        reference_labels=tuple(sorted({task.numbering.reference.name for task in tasks})),
        prediction_labels=tuple(
            sorted({task.numbering.prediction.name for task in tasks if task.read.pair.prediction})
        ),
        remarks=tuple(case.remark for case in scored.results if case.remark),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _ReadPair:
    """A pair, and the content of its label maps."""

    pair: Pair
    in_reference: LabelContent
    in_prediction: LabelContent | None
    """None if there is no prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A pair that is ready to be scored."""

    read: _ReadPair
    numbering: PairConventions

    @property
    def case_id(self) -> str:
        """The case."""
        return self.read.pair.case_id


_NOTHING = LabelContent(shape=(0, 0, 0), values=frozenset())
"""Content of a prediction that is missing."""


def _read_values(pair: Pair) -> _ReadPair:
    predicted = pair.prediction
    return _ReadPair(
        pair=pair,
        in_reference=label_content(pair.reference, pair.case_id),
        in_prediction=label_content(predicted, pair.case_id) if predicted else None,
    )


def _numbered(read: Sequence[_ReadPair], protocol: Protocol) -> tuple[_Task, ...]:
    declared = protocol.labels.name if protocol.labels else ""
    references = resolve_all(
        {one.pair.case_id: one.in_reference for one in read}, declared=declared
    )
    predictions = resolve_all(
        {one.pair.case_id: one.in_prediction or _NOTHING for one in read}, declared=declared
    )
    return tuple(
        _Task(
            read=one,
            numbering=PairConventions(
                reference=references[one.pair.case_id].convention,
                prediction=predictions[one.pair.case_id].convention,
            ),
        )
        for one in read
    )


def _score(task: _Task, protocol: Protocol) -> CaseScores:
    pair, numbering = task.read.pair, task.numbering
    # both sides may have one file name
    where = f"{pair.case_id} (reference {pair.reference.name})"
    check_values(task.read.in_reference.values, numbering.reference, where)
    if pair.prediction is not None and task.read.in_prediction is not None:
        where = f"{pair.case_id} (prediction {pair.prediction.name})"
        check_values(task.read.in_prediction.values, numbering.prediction, where)
    return score_pair(pair, numbering, protocol)
