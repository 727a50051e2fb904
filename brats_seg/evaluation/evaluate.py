"""Score the label maps in one folder against the references in another.

The label maps are read by `pairs`. All are read before the first is scored, because the label
convention of a case may depend on the others.

A label map in another numbering than its names say, or a reference of another scan, would give
scores that mean nothing, and is refused: where the scans lie beside the references, references are
held against them, and predictions against the references.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial, reduce
from pathlib import Path

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import check_one_grid, have_one_grid
from brats_seg.cases.conventions import LabelContent, check_values, resolve_all
from brats_seg.cases.folders import OUTPUT_MARKER
from brats_seg.cases.many import Failure, map_cases
from brats_seg.evaluation.agreement import check_agreement, check_numbering, rivals_of
from brats_seg.evaluation.lesionwise import LesionScores, Scale, score_lesions
from brats_seg.evaluation.overlap import BOTH_EMPTY, RegionCounts, count_regions, dice, jaccard
from brats_seg.evaluation.pairs import LabelPair, PackedLabelMap, Pairing, find_pairs, read_pair
from brats_seg.evaluation.protocols import ScoringProtocol
from brats_seg.evaluation.scores import (
    RegionSummary,
    Score,
    summarise_scores,
    write_scores,
    write_summary,
)
from brats_seg.evaluation.surface_distance import hausdorff95
from brats_seg.files import alone_at
from brats_seg.labels import LabelConvention, LabelMap
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import Box, Mask

PerRegion = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class PairConventions:
    """The label conventions of the two sides of a pair."""

    reference: LabelConvention
    prediction: LabelConvention


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseScores:
    """The scores of one case."""

    scores: tuple[Score, ...]
    """A row per region of the protocol."""
    remark: str = ""
    """A remark on an unusual file that could be scored; empty without one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Evaluation:
    """The scores of a folder of predictions, and what could not be scored."""

    protocol: ScoringProtocol
    scores: tuple[Score, ...]
    """By case id and region; a case without a prediction is among them, with the worst scores."""
    missing: tuple[str, ...]
    """Cases without a prediction, which get the worst scores."""
    failures: tuple[Failure, ...]
    """Cases that could not be read or scored."""
    without_reference: tuple[str, ...]
    """Predicted cases that were left out."""
    reference_labels: tuple[str, ...]
    """Names of the label conventions found in the references."""
    prediction_labels: tuple[str, ...]
    """Names of those found in the predictions. Regions are compared even where they differ."""
    remarks: tuple[str, ...]
    """Remarks on the folders, and on unusual files of single cases."""
    left_out: tuple[str, ...] = ()
    """Cases that are not scored, because only predicted ones are asked for."""

    @property
    def case_ids(self) -> tuple[str, ...]:
        """Cases that were scored."""
        return tuple(dict.fromkeys(score.case_id for score in self.scores))

    @property
    def predicted_scores(self) -> tuple[Score, ...]:
        """The scores of the cases that have a prediction."""
        missing = set(self.missing)
        return tuple(score for score in self.scores if score.case_id not in missing)


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredFolder:
    """An evaluation and its summary by region."""

    evaluation: Evaluation
    summaries: tuple[RegionSummary, ...]
    """Over all scores, with those of cases without a prediction."""
    predicted_summaries: tuple[RegionSummary, ...]
    """Over the cases that have a prediction; equal to `summaries` if all have one."""

    @property
    def dice_with_left_out(self) -> dict[str, float]:
        """Mean Dice by region if the cases that were left out had scored 0."""
        n_left_out = len(self.evaluation.left_out)
        return {
            one.region: one.spread("dice").mean * one.n_cases / (one.n_cases + n_left_out)
            for one in self.summaries
        }


def score_folders(
    reference: Path,
    prediction: Path,
    output: Path,
    protocol: ScoringProtocol,
    *,
    only_predicted: bool = False,
    n_workers: int = 0,
    track: Track = untracked,
) -> ScoredFolder:
    """Score a folder of predictions, and write the table of scores and its summary.

    Args:
        reference: A folder of `<case>.nii.gz` or of case folders, or one label map.
        prediction: The same. The two may be in different label conventions.
        output: The table, a `.csv`; the summary is written beside it as `.json`.
        protocol: Regions and rules of the scores.
        only_predicted: Whether references without a prediction are left out, as if they were not in
            the folder. Otherwise each of them gets the worst scores.
        n_workers: Processes; 0 works in this one. The scores do not depend on it.
        track: Shows the progress.

    Raises:
        UsageError: The paths are not two files or two folders, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in both.
        EnvironmentalError: A process was killed, or a file cannot be written.

    Example:
        >>> import tempfile
        >>> from brats_seg.cases.phantom import write_phantom_cases
        >>> from brats_seg.evaluation.protocols import protocol_named
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     data, table = Path(folder) / "data", Path(folder) / "scores.csv"
        ...     write_phantom_cases(data, n_cases=2, seed=0)
        ...     scored = score_folders(data, data, table, protocol_named("legacy"))
        >>> [(one.region, one.n_cases, one.spreads[0].mean) for one in scored.summaries]
        [('wt', 2, 1.0), ('tc', 2, 1.0), ('et', 2, 1.0)]
    """
    evaluation = evaluate_folders(
        reference,
        prediction,
        protocol,
        only_predicted=only_predicted,
        n_workers=n_workers,
        track=track,
    )
    summaries, predicted = (
        summarise_scores(scores, np.random.default_rng(0))
        for scores in (evaluation.scores, evaluation.predicted_scores)
    )
    with alone_at(output, wait=True):
        write_scores(evaluation.scores, output)
        write_summary(summaries, output.with_suffix(".json"))
    return ScoredFolder(evaluation=evaluation, summaries=summaries, predicted_summaries=predicted)


def evaluate_folders(
    reference: Path,
    prediction: Path,
    protocol: ScoringProtocol,
    *,
    only_predicted: bool = False,
    n_workers: int = 0,
    track: Track = untracked,
) -> Evaluation:
    """Score the predictions in one folder, or one file, against the references in another.

    The arguments and errors are those of `score_folders`.
    """
    pairing = find_pairs(reference, prediction)
    if only_predicted:
        pairing = pairing.only(pairing.predicted)
    evaluation = evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track)
    remarks = (*_remarks_on_order(reference, prediction), *evaluation.remarks)
    return replace(evaluation, remarks=remarks)


def evaluate_pairs(
    pairing: Pairing, protocol: ScoringProtocol, *, n_workers: int = 0, track: Track = untracked
) -> Evaluation:
    """Score predictions whose references are known, as `evaluate_folders` does."""
    attempt = partial(map_cases, n_workers=n_workers, track=track)
    read = attempt(read_pair, pairing.pairs, "reading label maps")
    tasks = _with_conventions(read.results, protocol)
    scored = attempt(partial(_score, protocol=protocol), tasks, "scoring")
    failures = sorted([*read.failures, *scored.failures], key=lambda failure: failure.case_id)
    return Evaluation(
        protocol=protocol,
        scores=tuple(score for case in scored.results for score in case.scores),
        missing=tuple(pair.case_id for pair in pairing.pairs if pair.prediction is None),
        failures=tuple(failures),
        without_reference=pairing.without_reference,
        reference_labels=tuple(sorted({task.conventions.reference.name for task in tasks})),
        prediction_labels=tuple(
            sorted({task.conventions.prediction.name for task in tasks if task.pair.prediction})
        ),
        remarks=(
            *(f"{pair.case_id}: {remark}" for pair in read.results for remark in pair.remarks),
            *(case.remark for case in scored.results if case.remark),
        ),
        left_out=pairing.left_out,
    )


def score_pair(
    pair: LabelPair, conventions: PairConventions, protocol: ScoringProtocol
) -> CaseScores:
    """Score the prediction of one case.

    Without a prediction every region gets the worst score, also one that the reference lacks.

    Raises:
        CaseError: The two label maps are not on one grid.
    """
    remark = _check_grids(pair)
    check_agreement(pair, conventions.reference, conventions.prediction)
    geometry = pair.reference.geometry
    scale = Scale(
        spacing_mm=geometry.spacing_mm,
        penalty_mm=protocol.hd95_penalty(geometry.shape, geometry.spacing_mm),
    )
    rows = _scored(pair.case_id, _sides_of(pair, conventions, protocol), protocol, scale)
    if pair.prediction is None:
        rows = tuple(_worst(row, scale.penalty_mm) for row in rows)
    return CaseScores(scores=rows, remark=remark)


def _remarks_on_order(reference: Path, prediction: Path) -> tuple[str, ...]:
    """Return a remark if the folder of references holds predictions and the other one does not."""
    if not (reference / OUTPUT_MARKER).exists() or (prediction / OUTPUT_MARKER).exists():
        return ()
    return (
        f"{reference} was written by `predict`, and is scored as the reference: the references "
        "come first, then the predictions",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A pair that is ready to be scored."""

    pair: LabelPair
    conventions: PairConventions
    rival: str
    """Name of the convention that most references look like, if it is another; empty otherwise."""

    @property
    def case_id(self) -> str:
        """Id of the case."""
        return self.pair.case_id


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Sides:
    """The regions of both sides, cut to the box around the labelled voxels of both."""

    reference: Mask
    """(R, X, Y, Z)"""
    prediction: Mask
    """(R, X, Y, Z)"""
    n_cut_off: int
    """Voxels of the volume outside the box: in no region of either side."""


def _with_conventions(pairs: Sequence[LabelPair], protocol: ScoringProtocol) -> tuple[_Task, ...]:
    references = {pair.case_id: pair.reference for pair in pairs}
    predictions = {pair.case_id: pair.prediction for pair in pairs if pair.prediction}
    of_references = _conventions(references, protocol)
    of_predictions = _conventions(predictions, protocol)
    rivals = rivals_of(references, of_references)
    return tuple(
        _Task(
            pair=pair,
            conventions=PairConventions(
                reference=of_references[pair.case_id],
                # not used without a prediction
                prediction=of_predictions.get(pair.case_id, of_references[pair.case_id]),
            ),
            rival=rivals[pair.case_id],
        )
        for pair in pairs
    )


def _conventions(
    label_maps: Mapping[str, PackedLabelMap], protocol: ScoringProtocol
) -> dict[str, LabelConvention]:
    if protocol.labels is not None:
        return dict.fromkeys(label_maps, protocol.labels)
    contents = {
        case_id: LabelContent(shape=label_map.geometry.shape, values=label_map.values)
        for case_id, label_map in label_maps.items()
    }
    return {case_id: found.convention for case_id, found in resolve_all(contents).items()}


def _score(task: _Task, protocol: ScoringProtocol) -> CaseScores:
    pair, conventions = task.pair, task.conventions
    # both files may have the same name
    file = f"reference {pair.reference.file}"
    check_values(pair.reference.values, conventions.reference, pair.case_id, file)
    check_numbering(pair.reference, pair.case_id, conventions.reference, task.rival)
    if pair.prediction is not None:
        file = f"prediction {pair.prediction.file}"
        check_values(pair.prediction.values, conventions.prediction, pair.case_id, file)
    return score_pair(pair, conventions, protocol)


def _check_grids(pair: LabelPair) -> str:
    """Refuse a prediction on another grid; return a remark if the affine of a side is missing."""
    reference, prediction = pair.reference, pair.prediction
    if prediction is None or have_one_grid(reference.geometry, prediction.geometry):
        return ""
    sides = [
        (f"reference {reference.file}", reference.geometry),
        (f"prediction {prediction.file}", prediction.geometry),
    ]
    # arrays are saved with the identity when their affine is not known
    without_affine = [file for file, grid in sides if np.array_equal(grid.affine, np.eye(4))]
    if reference.geometry.shape != prediction.geometry.shape or not without_affine:
        check_one_grid(pair.case_id, sides)
    which = f"case {pair.case_id}: {without_affine[0]}"
    return f"{which} has no affine, so that voxels were paired by index"


def _sides_of(pair: LabelPair, conventions: PairConventions, protocol: ScoringProtocol) -> _Sides:
    sides = [pair.reference] if pair.prediction is None else [pair.reference, pair.prediction]
    boxes = [side.box for side in sides if side.box is not None]
    box = reduce(Box.joined, boxes) if boxes else Box.at((0, 0, 0), (1, 1, 1))
    reference = pair.reference.within(box)
    prediction = (
        np.zeros_like(reference) if pair.prediction is None else pair.prediction.within(box)
    )
    return _Sides(
        reference=_masks(reference, conventions.reference, protocol),
        prediction=_masks(prediction, conventions.prediction, protocol),
        n_cut_off=int(np.prod(pair.reference.geometry.shape)) - reference.size,
    )


def _masks(label_map: LabelMap, convention: LabelConvention, protocol: ScoringProtocol) -> Mask:
    return np.stack([np.isin(label_map, region.values(convention)) for region in protocol.regions])


def _scored(
    case_id: str, sides: _Sides, protocol: ScoringProtocol, scale: Scale
) -> tuple[Score, ...]:
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
