"""Score the label maps in one folder against the references in another.

All label maps are read before the first is scored, because the label convention of a case may depend
on the others. A reference of another scan, and a label map in another numbering than its names say,
would give scores that mean nothing, and are refused.
"""

import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd

from brats_seg.cases.case import (
    Case,
    check_one_grid,
    have_one_grid,
    label_values_of,
    load_case,
)
from brats_seg.cases.conventions import LabelContent, check_values, resolve_all
from brats_seg.cases.find import OUTPUT_MARKER
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_label_map
from brats_seg.errors import CaseError, LabelError
from brats_seg.evaluation.lesionwise import Scale, score_lesions
from brats_seg.evaluation.metrics import (
    count_regions,
    dice,
    dice_of_counts,
    hausdorff95,
    jaccard,
    sensitivity,
    specificity,
)
from brats_seg.evaluation.pairs import Pair, Pairing, find_pairs
from brats_seg.evaluation.protocols import ScoringProtocol
from brats_seg.evaluation.scores import (
    LESION_COLUMNS,
    RegionSummary,
    joined_scores,
    summarise_scores,
    with_worst_scores,
    write_scores,
    write_summary,
)
from brats_seg.files import alone_at
from brats_seg.labels import CONVENTIONS, LabelConvention, LabelMap
from brats_seg.progress import Track, untracked
from brats_seg.voxels.box import bounding_box
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.wings import ShownLabels, judges

LEAST_GAIN = 0.3
"""Gain in Dice from which another numbering of a prediction is reported."""
LEAST_DICE = 0.6
"""Dice that another numbering reaches at least: two label maps that hardly overlap show nothing."""
FEWEST_VOXELS = 100
"""Voxels of a tissue in the reference from which it is compared."""
_N_VALUES = 256


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Evaluation:
    """The scores of a folder of predictions, and what could not be scored."""

    protocol: ScoringProtocol
    scores: pd.DataFrame
    """A row per case and region; a case without a prediction has the worst scores."""
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
        """Cases that have scores."""
        return tuple(self.scores["case_id"].unique())

    @property
    def predicted_scores(self) -> pd.DataFrame:
        """The scores of the cases that have a prediction."""
        return self.scores[~self.scores["case_id"].isin(self.missing)]


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
    if (reference / OUTPUT_MARKER).exists() and not (prediction / OUTPUT_MARKER).exists():
        remark = (
            f"{reference} was written by `predict`, and is scored as the reference: the references "
            "come first, then the predictions"
        )
        return replace(evaluation, remarks=(remark, *evaluation.remarks))
    return evaluation


def evaluate_pairs(
    pairing: Pairing, protocol: ScoringProtocol, *, n_workers: int = 0, track: Track = untracked
) -> Evaluation:
    """Score predictions whose references are known, as `evaluate_folders` does."""
    attempt = partial(map_cases, n_workers=n_workers, track=track)
    read = attempt(read_pair, pairing.pairs, "reading label maps")
    tasks = _with_conventions(read.results, protocol)
    scored = attempt(partial(score_pair, protocol=protocol), tasks, "scoring")
    failures = sorted([*read.failures, *scored.failures], key=lambda failure: failure.case_id)
    predicted = [task for task in tasks if task.pair.predicted_file]
    return Evaluation(
        protocol=protocol,
        scores=joined_scores(scored.results),
        missing=tuple(pair.case_id for pair in pairing.pairs if pair.prediction is None),
        failures=tuple(failures),
        without_reference=pairing.without_reference,
        reference_labels=tuple(sorted({task.reference.name for task in tasks})),
        prediction_labels=tuple(sorted({task.prediction.name for task in predicted})),
        remarks=tuple(remark for pair in read.results for remark in pair.remarks),
        left_out=pairing.left_out,
    )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelPair:
    """The label maps of one case, cut to the box around the labels of both."""

    case_id: str
    reference: ShownLabels
    """Values of the reference, and the tissues that they show."""
    predicted_file: str
    """Side and name of the file; empty if there is no prediction."""
    predicted_values: frozenset[int]
    """Label values of the prediction, and 0."""
    geometry: Geometry
    """Grid of the reference."""
    shape: tuple[int, ...]
    """(2, x, y, z): both sides, in the box."""
    packed: bytes
    """The voxels of both sides, compressed by zlib."""
    remarks: tuple[str, ...] = ()

    def voxels(self) -> LabelMap:
        """Return reference and prediction (2, x, y, z); a missing prediction is empty."""
        return np.frombuffer(zlib.decompress(self.packed), np.uint8).reshape(self.shape)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ScoringTask:
    """The label maps of one case, and the conventions that they are read in."""

    pair: LabelPair
    reference: LabelConvention
    prediction: LabelConvention
    refusal: CaseError | None = None
    """Why the reference cannot be in its convention; None if it can."""

    @property
    def case_id(self) -> str:
        """Id of the case."""
        return self.pair.case_id


def read_pair(pair: Pair) -> LabelPair:
    """Read the label maps of one case, and hold the reference against its scans.

    Raises:
        CaseError: One of them cannot be read, or they are not on one grid.
        LabelError: The reference does not lie on a tumour of the scans.
    """
    label = read_label_map(pair.reference, case_id=pair.case_id)
    predicted = None
    remarks: tuple[str, ...] = ()
    if pair.prediction is not None:
        predicted = read_label_map(pair.prediction, case_id=pair.case_id)
        remarks = _check_grids(pair.case_id, label, predicted)
    arrays = (label.array, np.zeros_like(label.array) if predicted is None else predicted.array)
    box = bounding_box(np.logical_or(*arrays))
    both = np.stack([array[np.s_[:1, :1, :1] if box is None else box.slices] for array in arrays])
    reference, unclear = _judge_reference(label, both[0], pair)
    return LabelPair(
        case_id=pair.case_id,
        reference=reference,
        predicted_file=f"prediction {predicted.file}" if predicted else "",
        predicted_values=label_values_of(both[1]) | {0},
        geometry=label.geometry,
        shape=both.shape,
        packed=zlib.compress(both.tobytes(), level=1),
        remarks=(*unclear, *remarks),
    )


def score_pair(task: ScoringTask, protocol: ScoringProtocol) -> pd.DataFrame:
    """Score the prediction of one case: a row per region of the protocol.

    Without a prediction every region gets the worst score, also one that the reference lacks.

    Raises:
        CaseError: A label map holds values that its convention has not.
        LabelError: A label map is in another numbering.
    """
    pair, geometry = task.pair, task.pair.geometry
    check_values(pair.reference.values, task.reference, pair.case_id, pair.reference.file)
    if task.refusal is not None:
        raise task.refusal
    label_maps = pair.voxels()
    if pair.predicted_file:
        check_values(pair.predicted_values, task.prediction, pair.case_id, pair.predicted_file)
        _check_agreement(task, label_maps)
    scale = Scale(
        spacing_mm=geometry.spacing_mm,
        penalty_mm=protocol.hd95_penalty(geometry.shape, geometry.spacing_mm),
    )
    reference, prediction = (
        np.stack([np.isin(label_map, region.values(labels)) for region in protocol.regions])
        for label_map, labels in zip(label_maps, (task.reference, task.prediction), strict=True)
    )
    counts = count_regions(prediction, reference, pair.case_id)
    n_outside = int(np.prod(geometry.shape)) - label_maps[0].size
    counts = replace(counts, true_negative=counts.true_negative + n_outside)
    hd95 = [
        hausdorff95(*sides, scale.spacing_mm) for sides in zip(reference, prediction, strict=True)
    ]
    table = pd.DataFrame(
        {
            "case_id": pair.case_id,
            "region": protocol.region_names,
            "dice": dice(counts),
            "jaccard": jaccard(counts),
            "hd95": np.where(np.isfinite(hd95), hd95, scale.penalty_mm),
            "sensitivity": sensitivity(counts),
            "specificity": specificity(counts),
            "reference_ml": counts.in_reference * (scale.voxel_mm3 / MM3_PER_ML),
            "prediction_ml": counts.in_prediction * (scale.voxel_mm3 / MM3_PER_ML),
        }
    )
    if protocol.lesions is not None:
        rows = [one.values for one in score_lesions(reference, prediction, protocol, scale)]
        table = table.join(pd.DataFrame(rows, columns=list(LESION_COLUMNS)))
    return table if pair.predicted_file else with_worst_scores(table, scale.penalty_mm)


def better_numbering(
    shared: npt.NDArray[np.int64], reference: LabelConvention, prediction: LabelConvention
) -> str:
    """Return in which convention the prediction agrees far better with the reference; empty if none.

    Other exchanges of labels do not count: a network that takes necrosis for enhancing tumour is poor,
    and its labels are not in another numbering.

    Args:
        shared: The result of `shared_voxels`.
        reference: Convention that the reference is read in.
        prediction: Convention that the prediction is read in.

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> truth = np.repeat(np.array([0, 1, 2, 3], dtype=np.uint8), 200)
        >>> swapped = np.repeat(np.array([0, 2, 1, 3], dtype=np.uint8), 200)
        >>> better_numbering(shared_voxels(truth, swapped), BRATS2023, BRATS2023)
        'msd (mean Dice of the tissues 1.00 instead of 0.33)'
    """
    n_reference, n_prediction = shared.sum(axis=1), shared.sum(axis=0)
    compared = [
        (tissue, value)
        for tissue, value in enumerate(reference.painted)
        if n_reference[value] >= FEWEST_VOXELS
    ]
    if len(compared) < 2:
        return ""

    def mean_dice(painted: Sequence[int]) -> float:
        pairs = np.array([(value, painted[tissue]) for tissue, value in compared]).T
        of_tissues = dice_of_counts(shared[*pairs], n_reference[pairs[0]], n_prediction[pairs[1]])
        return float(of_tissues.mean())

    values = set(np.flatnonzero(n_prediction).tolist())
    others = [other for other in CONVENTIONS if values <= other.values]
    best = max(others, key=lambda other: mean_dice(other.painted), default=prediction)
    given, found = mean_dice(prediction.painted), mean_dice(best.painted)
    if found < LEAST_DICE or found - given < LEAST_GAIN:
        return ""
    return f"{best.name} (mean Dice of the tissues {found:.2f} instead of {given:.2f})"


def shared_voxels(reference: LabelMap, prediction: LabelMap) -> npt.NDArray[np.int64]:
    """Return how many voxels have each value of the reference and of the prediction, (256, 256)."""
    joint = reference.astype(np.uint16) * np.uint16(_N_VALUES) + prediction
    counts = np.bincount(joint.ravel(), minlength=_N_VALUES**2)
    return counts.reshape(_N_VALUES, _N_VALUES)


def _judge_reference(
    label: Volume, labelled: LabelMap, pair: Pair
) -> tuple[ShownLabels, tuple[str, ...]]:
    """Return what a reference shows of its numbering, and remarks on its place on the scans.

    `labelled` is the box around its labels.
    """
    shown = ShownLabels(
        case_id=pair.case_id,
        file=f"reference {label.file}",
        values=label_values_of(labelled) | {0},
        outermost=None,
        enhancing=None,
        is_on_scan=False,
    )
    quality = judges()
    if quality is None:
        return shown, ()
    scans, turned = _readable_scans(pair.case), oriented(label)
    if not scans or not have_one_grid(scans[0].geometry, turned.geometry):
        outermost = quality.outermost_of_outline(labelled, label.geometry.spacing_mm)
        return replace(shown, outermost=outermost), ()
    judgement = quality.judge_labels(pair.case_id, scans, turned)
    if judgement.refusal is not None:
        raise judgement.refusal
    shown = replace(
        shown,
        outermost=judgement.outermost,
        enhancing=judgement.enhancing,
        is_on_scan=True,
    )
    return shown, tuple(f"{pair.case_id}: {remark}" for remark in judgement.warnings)


def _readable_scans(case: Case | None) -> tuple[Volume, ...]:
    """Return the scans of a case in the axes of BraTS; none if they cannot be used.

    Only label maps are scored, so that a damaged scan does not matter.
    """
    try:
        return () if case is None else load_case(case, with_label=False).volumes
    except CaseError:
        return ()


def _check_grids(case_id: str, label: Volume, predicted: Volume) -> tuple[str, ...]:
    """Refuse a prediction on another grid; return a remark if the affine of a side is missing."""
    if have_one_grid(label.geometry, predicted.geometry):
        return ()
    grids = [
        # both files may have the same name
        (f"reference {label.file}", label.geometry),
        (f"prediction {predicted.file}", predicted.geometry),
    ]
    # arrays are saved with the identity when their affine is not known
    without_affine = [file for file, grid in grids if np.array_equal(grid.affine, np.eye(4))]
    if label.geometry.shape != predicted.geometry.shape or not without_affine:
        check_one_grid(case_id, grids)
    return (
        f"case {case_id}: {without_affine[0]} has no affine, so that voxels were paired by index",
    )


def _with_conventions(
    pairs: Sequence[LabelPair], protocol: ScoringProtocol
) -> tuple[ScoringTask, ...]:
    references = {
        pair.case_id: LabelContent(shape=pair.geometry.shape, values=pair.reference.values)
        for pair in pairs
    }
    predictions = {
        pair.case_id: LabelContent(shape=pair.geometry.shape, values=pair.predicted_values)
        for pair in pairs
        if pair.predicted_file
    }
    of_references = _conventions(references, protocol)
    # the convention of a missing prediction is not used
    of_predictions = of_references | _conventions(predictions, protocol)
    refusals = _refusals([pair.reference for pair in pairs], of_references)
    return tuple(
        ScoringTask(
            pair=pair,
            reference=of_references[pair.case_id],
            prediction=of_predictions[pair.case_id],
            refusal=refusals.get(pair.case_id),
        )
        for pair in pairs
    )


def _conventions(
    contents: Mapping[str, LabelContent], protocol: ScoringProtocol
) -> dict[str, LabelConvention]:
    if protocol.labels is not None:
        return dict.fromkeys(contents, protocol.labels)
    return {case_id: one.convention for case_id, one in resolve_all(contents).items()}


def _refusals(
    references: Sequence[ShownLabels], conventions: Mapping[str, LabelConvention]
) -> dict[str, CaseError | None]:
    """Return why references are clearly not in the convention that they are read in, by case id.

    An outline without scans does not suffice; it counts if most references agree.
    """
    quality = judges()
    if quality is None:
        return {}
    refusals: dict[str, CaseError | None] = {}
    for convention in dict.fromkeys(conventions.values()):
        group = [one for one in references if conventions[one.case_id] == convention]
        advice = "Renumber the references, or name folders and files as their release does."
        for shown, judgement in zip(
            group, quality.judge_group(group, convention, next_step=advice), strict=True
        ):
            refusals[shown.case_id] = judgement.refusal
    return refusals


def _check_agreement(task: ScoringTask, label_maps: LabelMap) -> None:
    """Raise `LabelError` if the prediction would agree far better in another numbering."""
    shared = shared_voxels(*label_maps)
    if better := better_numbering(shared, task.reference, task.prediction):
        raise LabelError(
            task.case_id,
            task.pair.predicted_file,
            f"labels that agree with the reference far better numbered as {better}",
            "both numbered alike",
            "Find out which of the two is wrong, and correct it.",
        )
