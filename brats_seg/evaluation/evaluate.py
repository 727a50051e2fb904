"""Score the label maps in one folder against the references in another.

They are paired by the names of files and folders. All label maps are read before the first is scored,
because the label convention of a case may depend on the others. A reference of another scan, and a
label map in another numbering than its names say, would give scores that mean nothing, and are refused.
"""

import zlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import pandas as pd

from brats_seg.cases import layouts, releases
from brats_seg.cases.case import Case, check_one_grid, count_labels, have_one_grid, load_case
from brats_seg.cases.described import is_path_table
from brats_seg.cases.find import find_cases
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_label_map
from brats_seg.errors import CaseError, LabelError, LayoutError, UsageError, counted, some_of
from brats_seg.evaluation import metrics, scores
from brats_seg.evaluation.lesions import Scale, group_lesions, match_lesions, score_lesions
from brats_seg.evaluation.protocols import ScoringProtocol
from brats_seg.evaluation.scores import RegionSummary
from brats_seg.files import alone_at
from brats_seg.labels import CONVENTIONS, MODALITIES, LabelConvention, LabelMap, convention_named
from brats_seg.progress import Track, untracked
from brats_seg.tables import read_table
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.wings import ShownLabels, find_wing

LEAST_GAIN = 0.3
"""Gain in Dice from which another numbering of a prediction is reported."""
LEAST_DICE = 0.6
"""Dice that another numbering reaches at least: two label maps that hardly overlap show nothing."""
FEWEST_VOXELS = 100
"""Voxels of a tissue in the reference from which it is compared."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelFile:
    """The file of a label map, and what is known of it without opening it."""

    path: Path
    case: Case | None = None
    """The scans next to it, if there are any."""
    convention: str = ""
    """Name of its label convention; empty if no `dataset.json` and no table of volumes says it."""
    in_training: str = ""
    """Whether its network was trained on the patient, `yes` or `no`; empty if that is not known."""


@dataclass(frozen=True, slots=True)
class Pair:
    """The files of the label maps of one case."""

    case_id: str
    reference: LabelFile
    prediction: LabelFile | None = None
    """None if there is no prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Pairing:
    """Every reference with its prediction."""

    pairs: tuple[Pair, ...]
    """Sorted by case id."""
    without_reference: tuple[str, ...] = ()
    """Predicted cases that cannot be scored."""
    remarks: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    """Cases whose references are not read or scored."""
    rows: Mapping[str, Mapping[Any, str]] = field(default_factory=dict)
    """Rows of the table of volumes of the predictions, which says whose patients the model was trained on."""

    @property
    def predicted(self) -> frozenset[str]:
        """Cases that have a prediction."""
        return frozenset(pair.case_id for pair in self.pairs if pair.prediction is not None)

    def only(self, case_ids: Collection[str]) -> Self:
        """Return the pairs of these cases, and leave out the others."""
        pairs = [pair for pair in self.pairs if pair.case_id in case_ids]
        left_out = [pair.case_id for pair in self.pairs if pair.case_id not in case_ids]
        return replace(self, pairs=tuple(pairs), left_out=tuple(left_out))


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """The scores of a folder of predictions, and what could not be scored."""

    scores: pd.DataFrame
    """A row per case and region; a case without a prediction has the worst scores."""
    missing: tuple[str, ...]
    """Cases without a prediction, which have the worst scores; those whose reference failed have none."""
    failures: tuple[Failure, ...]
    """Cases that could not be read or scored."""
    without_reference: tuple[str, ...]
    """Predicted cases that were left out."""
    reference_labels: tuple[str, ...]
    """Names of the label conventions of the references."""
    prediction_labels: tuple[str, ...]
    """Names of those of the predictions. Regions are compared even where they differ."""
    remarks: tuple[str, ...]
    """Remarks on the folders, and on unusual files of single cases."""
    left_out: tuple[str, ...]
    """Cases that are not scored, because only predicted ones are asked for."""
    in_training: tuple[str, ...]
    """Cases of patients that the model was trained on, as far as its predictions record it."""

    @property
    def case_ids(self) -> tuple[str, ...]:
        """Cases that have scores."""
        return tuple(self.scores["case_id"].unique())

    @cached_property
    def summaries(self) -> tuple[RegionSummary, ...]:
        """Summaries by region over all scores, with those of cases without a prediction."""
        return scores.summarise_scores(self.scores, np.random.default_rng(0))

    @cached_property
    def held_out_summaries(self) -> tuple[RegionSummary, ...]:
        """Summaries without the cases of patients that the model is known to have been trained on.

        Those without a prediction count, unless the table of volumes says otherwise: without them the
        mean of a model that fails in hard cases would rise.
        """
        held_out = self.scores[~self.scores["case_id"].isin(self.in_training)]
        return scores.summarise_scores(held_out, np.random.default_rng(0))


def score_folders(
    reference: Path,
    prediction: Path,
    output: Path,
    protocol: ScoringProtocol,
    *,
    only_predicted: bool = False,
    n_workers: int = 0,
    track: Track = untracked,
) -> Evaluation:
    """Score a folder of predictions, and write the table of scores and its summary if a case could be scored.

    Args:
        reference: A folder of `<case>.nii.gz` or of case folders, or one label map.
        prediction: The same. The two may be in different label conventions.
        output: The table, a `.csv`; the summary is written next to it as `.json`.
        protocol: Regions and rules of the scores.
        only_predicted: Whether references without a prediction are left out; otherwise each of them
            gets the worst scores.
        n_workers: Processes; 0 works in this one. The scores do not depend on it.
        track: Shows the progress.

    Raises:
        UsageError: A path does not exist, the prediction is a file for several cases, a case occurs
            twice, or the table is no `.csv`, is an input, or has the name of a table of predictions.
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
        >>> [(part.region, part.n_cases, part.spreads[0].mean) for part in scored.summaries]
        [('wt', 2, 1.0), ('tc', 2, 1.0), ('et', 2, 1.0)]
    """
    scores.check_output(output, reference, prediction)
    pairing = find_pairs(reference, prediction, only_predicted=only_predicted)
    evaluation = evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track)
    if evaluation.case_ids:
        with alone_at(output, wait=True):
            scores.write_scores(evaluation.scores, output)
            scores.write_summary(evaluation.summaries, output.with_suffix(".json"))
    return evaluation


def evaluate_pairs(
    pairing: Pairing, protocol: ScoringProtocol, *, n_workers: int = 0, track: Track = untracked
) -> Evaluation:
    """Score predictions whose references are known, as `score_folders` does."""
    run = partial(map_cases, n_workers=n_workers, track=track)
    read = run(read_pair, pairing.pairs, "reading label maps")
    pairs = sorted(_with_conventions(read.results, protocol), key=lambda pair: pair.case_id)
    scored = run(partial(score_pair, protocol=protocol), pairs, "scoring")
    failures = sorted([*read.failures, *scored.failures], key=lambda failure: failure.case_id)
    table = scores.join_scores(scored.results)
    table.insert(2, scores.PROTOCOL, protocol.title)
    answers = [pairing.rows.get(name, {}).get(scores.IN_TRAINING, "") for name in table["case_id"]]
    if any(answers):
        table.insert(2, scores.IN_TRAINING, answers)
    return Evaluation(
        scores=table,
        missing=tuple(sorted({*table["case_id"]} - pairing.predicted)),
        failures=tuple(failures),
        without_reference=pairing.without_reference,
        reference_labels=tuple(sorted({pair.conventions[0].name for pair in pairs})),
        prediction_labels=tuple(
            sorted({pair.conventions[1].name for pair in pairs if pair.predicted_file})
        ),
        remarks=(*pairing.remarks, *(remark for pair in pairs for remark in pair.remarks)),
        left_out=pairing.left_out,
        in_training=tuple(table["case_id"][[answer == "yes" for answer in answers]].unique()),
    )


def find_pairs(reference: Path, prediction: Path, *, only_predicted: bool = False) -> Pairing:
    """Pair the label maps in two folders, or two label maps, or one with that of its case in a folder.

    A folder may hold `<case>.nii.gz`, `<case>-seg.nii.gz`, or scans of any layout with their label
    maps, as may a table of paths. The references are compared with these scans.

    Raises:
        UsageError: A path does not exist, the prediction is a file for several cases, or a case occurs twice.
        LayoutError: A folder holds no label map, or no case is in both.
    """
    references = label_maps_in(reference)
    # also of cases whose label maps are gone
    rows, predictions = recorded(prediction), label_maps_in(prediction, [*references])
    if not references.keys() & predictions.keys():
        names = f"{reference} has {some_of(references)}, {prediction} has {some_of(predictions)}"
        msg = f"no case is in both: {names}. Name each prediction as its case."
        raise LayoutError(msg)
    written = [(path / layouts.OUTPUT_MARKER).exists() for path in (reference, prediction)]
    remark = f"{reference}, given first, was written by `predict`, and is scored as the reference"
    pairing = Pairing(
        pairs=tuple(Pair(name, file, predictions.get(name)) for name, file in references.items()),
        without_reference=tuple(sorted(predictions.keys() - references.keys())),
        remarks=(remark,) if written == [True, False] else (),
        rows=rows,
    )
    return pairing.only(pairing.predicted) if only_predicted else pairing


def recorded(predictions: Path) -> dict[str, dict[Any, str]]:
    """Return the rows of the table of volumes of predictions by case id; none without a table."""
    folder = predictions if predictions.is_dir() else predictions.parent
    # there is none, or another one, of predictions of another program or version
    with suppress(UsageError):
        table = read_table(folder / scores.VOLUMES_NAME, required=("case_id",))
        return {row["case_id"]: row for row in table.to_dict("records")}
    return {}


def recorded_file(path: Path, row: Mapping[Any, str], root: Path) -> LabelFile:
    """Return a label map with what the row of its case says, in the table of volumes at `root`.

    Raises:
        ConfigError: The label convention is unknown.
    """
    if name := row.get("convention", ""):
        convention_named(name, f"{scores.VOLUMES_NAME} of {root}, case {row['case_id']}: ")
    return LabelFile(path=path, convention=name, in_training=row.get(scores.IN_TRAINING, ""))


def label_maps_in(root: Path, case_ids: Sequence[str] | None = None) -> dict[str, LabelFile]:
    """Return the label maps of scans, and others by their names, by case id, sorted.

    Args:
        root: A folder, a table of paths, or one label map.
        case_ids: The cases, the only one of which one label map is; None to go by its name.

    Raises:
        UsageError: The path does not exist, a case occurs twice, a file is given for no case or for
            several, or the table of volumes names an unknown label convention.
        LayoutError: There are none.
    """
    if not root.exists():
        msg = f"{root} does not exist; expected a label map, or a folder of label maps"
        raise UsageError(msg)
    rows = recorded(root)
    if root.is_file() and not is_path_table(root):
        names = [case_of(root)] if case_ids is None else case_ids
        if len(names) != 1:
            msg = f"{root} is one label map, for {counted(len(names), 'case')}; give a folder with one for each, or one --case where that is an option"
            raise UsageError(msg)
        return {names[0]: recorded_file(root, rows.get(names[0], {}), root)}
    label_maps = dict(_labels_of_scans(root))
    used = {file.path for file in label_maps.values()}
    ids = {layouts.bids_name(name): name for name in rows}
    for name, path in _named_label_maps(root, is_any_kind=not used):
        case_id = ids.get(name, name)
        file = recorded_file(path, rows.get(case_id, {}), root)
        known = label_maps.setdefault(case_id, file) if path not in used else file
        # a label map that lies with its scans is the one of the case
        if known is not file and known.case is None:
            msg = f"case {case_id} has two label maps, {known.path} and {path}; keep one, or name each after its own case"
            raise UsageError(msg)
    if not label_maps:
        msg = f"{root} holds no label map; expected <case>.nii.gz, or case folders with one each"
        raise LayoutError(msg)
    return dict(sorted(label_maps.items()))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class LabelPair:
    """The label maps of one case, cut to the box around the labels of both."""

    case_id: str
    reference: ShownLabels
    """Values of the reference, and the tissues that they show."""
    predicted_file: str
    """Side and name of the file; empty if there is no prediction."""
    values: tuple[frozenset[int], frozenset[int]]
    """Label values of reference and prediction, and 0."""
    geometry: Geometry
    """Grid of the reference."""
    shape: tuple[int, ...]
    """(2, x, y, z): both sides, in the box."""
    packed: bytes
    """The voxels of both sides, compressed by zlib."""
    declared: tuple[str, str]
    """Names of the conventions of reference and prediction; empty where their files do not say them."""
    remarks: tuple[str, ...]
    conventions: tuple[LabelConvention, ...] = ()
    """Those of reference and prediction, once the label maps of all cases are known."""
    refusal: CaseError | None = None
    """Why the reference cannot be in its convention; None if it can."""


def read_pair(pair: Pair) -> LabelPair:
    """Read the label maps of one case, and compare the reference with its scans.

    Raises:
        CaseError: One of them cannot be read, or they are not on one grid.
        LabelError: The reference does not lie on a tumour of the scans.
    """
    label = _read_side("reference", pair.reference.path, pair.case_id)
    predicted = replace(label, array=np.zeros_like(label.array), file="")
    if pair.prediction is not None:
        predicted = _read_side("prediction", pair.prediction.path, pair.case_id)
    remarks = _check_grids(pair.case_id, label, predicted)
    both = np.stack(metrics.cropped(label.array, predicted.array))
    reference, unclear = _judge_reference(label, both[0], pair)
    return LabelPair(
        case_id=pair.case_id,
        reference=reference,
        predicted_file=predicted.file,
        values=(reference.values, frozenset({0, *count_labels(both[1])})),
        geometry=label.geometry,
        shape=both.shape,
        packed=zlib.compress(both.tobytes(), level=1),
        declared=(pair.reference.convention, pair.prediction.convention if pair.prediction else ""),
        remarks=(*unclear, *remarks),
    )


def score_pair(pair: LabelPair, protocol: ScoringProtocol) -> pd.DataFrame:
    """Score the prediction of one case: a row per region of the protocol.

    Without a prediction every region gets the worst score, also one that the reference lacks.

    Raises:
        CaseError: A label map holds values that its convention has not.
        LabelError: A label map is in another numbering.
    """
    shape, spacing_mm = pair.geometry.shape, pair.geometry.spacing_mm
    label_maps = np.frombuffer(zlib.decompress(pair.packed), np.uint8).reshape(pair.shape)
    _check_labels(pair, label_maps)
    scale = Scale(spacing_mm=spacing_mm, penalty_mm=protocol.hd95_penalty(shape, spacing_mm))
    reference, prediction = (
        np.stack([np.isin(label_map, region.values(labels)) for region in protocol.regions])
        for label_map, labels in zip(label_maps, pair.conventions, strict=True)
    )
    counts = metrics.count_regions(prediction, reference, pair.case_id)
    n_outside = int(np.prod(shape)) - label_maps[0].size
    counts = replace(counts, true_negative=counts.true_negative + n_outside)
    names = [region.name for region in protocol.regions]
    table = scores.scores_of_counts(counts, names, scale.voxel_mm3 / MM3_PER_ML)
    if protocol.matching is not None:
        # its Dice of whole regions is NaN where both sides are empty
        measured = match_lesions(reference, prediction, protocol.matching, scale)
    else:
        sides = zip(reference, prediction, strict=True)
        measured = pd.DataFrame({"hd95": [metrics.hausdorff95(*s, spacing_mm) for s in sides]})
    if protocol.lesions is not None:
        references = group_lesions(reference, protocol)
        measured = measured.join(score_lesions(references, prediction, protocol, scale))
    table = table.assign(**measured)
    table.insert(4, "hd95", table.pop("hd95").replace(np.inf, scale.penalty_mm))
    return table if pair.predicted_file else scores.with_worst_scores(table, scale.penalty_mm)


def _check_labels(pair: LabelPair, label_maps: LabelMap) -> None:
    """Raise `LabelError` if a side has values that its convention has not, or another numbering."""
    reference, prediction = pair.conventions
    if pair.refusal is not None:
        raise pair.refusal
    # both pass an empty label map, as which a missing prediction is read
    releases.check_values(pair.values[1], prediction, pair.case_id, pair.predicted_file)
    shared = metrics.shared_voxels(label_maps[0], label_maps[1], (256, 256))
    if better := better_numbering(shared, reference, prediction):
        problem = f"labels that agree with the reference far better numbered as {better}"
        advice = "Correct the one that is wrong, or name the convention of predictions in a volumes.csv beside them (case_id,convention)."
        raise LabelError(pair.case_id, pair.predicted_file, problem, "both numbered alike", advice)


def better_numbering(
    shared: metrics.Counts, reference: LabelConvention, prediction: LabelConvention
) -> str:
    """Return in which convention the prediction agrees far better with the reference; empty if none.

    Other exchanges of labels do not count: a network that takes necrosis for enhancing tumour is poor,
    and its labels are not in another numbering.

    Args:
        shared: Number of voxels with each value of the reference and of the prediction, (256, 256).
        reference: Convention that the reference is read in.
        prediction: Convention that the prediction is read in.

    Example:
        >>> from brats_seg.labels import BRATS2023
        >>> truth = np.repeat(np.array([0, 1, 2, 3], dtype=np.uint8), 200)
        >>> swapped = np.repeat(np.array([0, 2, 1, 3], dtype=np.uint8), 200)
        >>> shared = metrics.shared_voxels(truth, swapped, (256, 256))
        >>> better_numbering(shared, BRATS2023, BRATS2023)
        'msd (mean Dice of the tissues 1.00 instead of 0.33)'
    """
    n_reference, n_prediction = shared.sum(axis=1), shared.sum(axis=0)
    painted = np.array(reference.painted)
    tissues = np.flatnonzero(n_reference[painted] >= FEWEST_VOXELS)
    if len(tissues) < 2:
        return ""

    def mean_dice(convention: LabelConvention) -> float:
        of_reference, of_prediction = painted[tissues], np.take(convention.painted, tissues)
        sizes = n_reference[of_reference], n_prediction[of_prediction]
        return float(metrics.dice_of_counts(shared[of_reference, of_prediction], *sizes).mean())

    values = set(np.flatnonzero(n_prediction).tolist())
    conventions = [convention for convention in CONVENTIONS if values <= convention.values]
    best = max(conventions, key=mean_dice, default=prediction)
    given, better = mean_dice(prediction), mean_dice(best)
    if better < LEAST_DICE or better - given < LEAST_GAIN:
        return ""
    return f"{best.name} (mean Dice of the tissues {better:.2f} instead of {given:.2f})"


def _read_side(side: str, path: Path, case_id: str) -> Volume:
    """Read a label map, and name its side before its file: both files may have the same name."""
    try:
        volume = read_label_map(path, case_id=case_id)
    except CaseError as error:
        file = f"{side} {error.file}"
        raise CaseError(case_id, file, error.found, error.expected, error.next_step) from None
    return replace(volume, file=f"{side} {volume.file}")


def _judge_reference(
    label: Volume, labelled: LabelMap, pair: Pair
) -> tuple[ShownLabels, tuple[str, ...]]:
    """Return what a reference shows of its numbering, and remarks on its place on the scans.

    `labelled` is the box around its labels.
    """
    shown = ShownLabels(
        case_id=pair.case_id,
        file=label.file,
        values=frozenset({0, *count_labels(labelled)}),
        is_on_scan=False,
    )
    quality = find_wing("quality.label_map")
    if quality is None:
        return shown, ()
    case, scans, turned = pair.reference.case, tuple[Volume, ...](), oriented(label)
    # only label maps are scored, so that a damaged scan does not matter
    with suppress(CaseError):
        scans = load_case(case, with_label=False).volumes if case else ()
    if not scans or not have_one_grid(scans[0].geometry, turned.geometry):
        outermost = quality.outermost_of_outline(labelled, label.geometry.spacing_mm)
        return replace(shown, outermost=outermost), ()
    judgement = quality.judge_labels(pair.case_id, scans, turned)
    if judgement.refusal is not None:
        raise judgement.refusal
    outermost, enhancing = judgement.outermost, judgement.enhancing
    shown = replace(shown, outermost=outermost, enhancing=enhancing, is_on_scan=True)
    return shown, tuple(f"{pair.case_id}: {remark}" for remark in judgement.remarks)


def _check_grids(case_id: str, label: Volume, predicted: Volume) -> tuple[str, ...]:
    """Refuse a prediction on another grid; return a remark if the affine of a side is missing."""
    if have_one_grid(label.geometry, predicted.geometry):
        return ()
    grids = [(side.file, side.geometry) for side in (label, predicted)]
    # arrays are saved with the identity when their affine is not known
    without_affine = [file for file, grid in grids if np.array_equal(grid.affine, np.eye(4))]
    if label.geometry.shape != predicted.geometry.shape or not without_affine:
        check_one_grid(case_id, grids)
    remark = f"{without_affine[0]} has no affine, so that voxels were paired by index"
    return (f"case {case_id}: {remark}",)


def _with_conventions(pairs: Sequence[LabelPair], protocol: ScoringProtocol) -> Iterator[LabelPair]:
    """Yield all pairs with their conventions, and the reasons why references cannot be in theirs."""
    known = protocol.labels
    usual = known.name if known else ""
    references, predictions = (
        # a gross tumour volume is no tissue of other conventions
        {pair.case_id: known for pair in pairs}
        if known and known not in CONVENTIONS
        else releases.resolve_conventions(
            # only 0 for a missing prediction, which changes no convention
            {pair.case_id: (pair.geometry.shape, pair.values[side]) for pair in pairs},
            {pair.case_id: pair.declared[side] or usual for pair in pairs},
        )
        for side in range(2)
    )
    advice = "Renumber the references, or name folders and files as their release does."
    for convention in dict.fromkeys(references.values()):
        group = [pair for pair in pairs if references[pair.case_id] == convention]
        # an outline without scans does not suffice; it counts if most references agree, and no file
        # says the convention
        shown = [pair.reference for pair in group]
        is_named = any(pair.declared[0] and not pair.reference.is_on_scan for pair in group)
        judgements = releases.judge_labels(shown, convention, is_named=is_named, advice=advice)
        for pair, (problems, _) in zip(group, judgements, strict=True):
            refusal, both = next(iter(problems), None), (convention, predictions[pair.case_id])
            yield replace(pair, conventions=both, refusal=refusal)


def _labels_of_scans(root: Path) -> Iterator[tuple[str, LabelFile]]:
    """Yield the label maps that lie with the scans of their cases, by case id."""
    with suppress(LayoutError):
        for case in find_cases(root).cases:
            if case.label:
                path = case.path_of(case.label)
                yield case.case_id, LabelFile(path=path, case=case, convention=case.convention)


def _named_label_maps(root: Path, *, is_any_kind: bool) -> Iterator[tuple[str, Path]]:
    """Yield the files that are label maps by their names, or by their folders, with their cases.

    Among labelled scans, files of no kind are other images, unless their folder is for labels.
    """
    for folder in () if is_path_table(root) else layouts.walk_folders(root):
        has_scans = any(scan.kind in MODALITIES for scan in folder.scans)
        is_for_labels = is_any_kind or any(map(layouts.is_label_folder, folder.path.parts))
        for scan in folder.scans:
            path = root / scan.path
            if scan.kind == layouts.LABEL:
                yield scan.case or (root / folder.path).name, path
            # the gross tumour volume lies with the one scan of its case
            elif releases.release_of(target := scan.stem.removesuffix("_gtv")) == releases.MEN_RT:
                yield target, path
            # probabilities are no label maps, in BIDS
            elif is_for_labels and not (has_scans or scan.kind or scan.stem.endswith("_probseg")):
                yield scan.stem, path


def case_of(path: Path) -> str:
    """Return the id of the case of a label map by the name of its file."""
    name = layouts.parse_file_name(path.name)
    if name is None:
        msg = f"{path} is not a NIfTI file by its name; expected .nii or .nii.gz"
        raise UsageError(msg)
    return (name.case or path.parent.name) if name.kind == layouts.LABEL else name.stem
