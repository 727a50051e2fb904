"""Folders of references and predictions to a table of scores."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from brats_seg.evaluation.attempts import Failure, attempt_all
from brats_seg.evaluation.case_scores import CaseScores, Numbering, label_values, score_pair
from brats_seg.evaluation.numbering import find_numbering
from brats_seg.evaluation.pairs import Pair, Pairing, find_pairs
from brats_seg.evaluation.protocols import Protocol
from brats_seg.evaluation.scores import Score
from brats_seg.labels import check_values
from brats_seg.progress import Track, untracked


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
    attempt = partial(attempt_all, n_workers=n_workers, track=track)
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
    """A pair, and the label values that occur in it."""

    pair: Pair
    in_reference: frozenset[int]
    in_prediction: frozenset[int]
    """Empty if there is no prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Task:
    """A pair that is ready to be scored."""

    read: _ReadPair
    numbering: Numbering

    @property
    def case_id(self) -> str:
        """The case."""
        return self.read.pair.case_id


def _read_values(pair: Pair) -> _ReadPair:
    predicted = pair.prediction
    return _ReadPair(
        pair=pair,
        in_reference=label_values(pair.reference, pair.case_id),
        in_prediction=label_values(predicted, pair.case_id) if predicted else frozenset(),
    )


def _numbered(read: Sequence[_ReadPair], protocol: Protocol) -> tuple[_Task, ...]:
    references = find_numbering({one.pair.case_id: one.in_reference for one in read}, protocol)
    predictions = find_numbering({one.pair.case_id: one.in_prediction for one in read}, protocol)
    return tuple(
        _Task(read=one, numbering=Numbering(reference=reference, prediction=prediction))
        for one, reference, prediction in zip(
            read, references.values(), predictions.values(), strict=True
        )
    )


def _score(task: _Task, protocol: Protocol) -> CaseScores:
    pair, numbering = task.read.pair, task.numbering
    # both sides may have one file name
    where = f"{pair.case_id} (reference {pair.reference.name})"
    check_values(task.read.in_reference, numbering.reference, where)
    if pair.prediction is not None:
        where = f"{pair.case_id} (prediction {pair.prediction.name})"
        check_values(task.read.in_prediction, numbering.prediction, where)
    return score_pair(pair, numbering, protocol)
