"""Define the JSON that commands print with `--json`.

The values hold the parts of a result that a program can use; other commands print a value that the
package returns anyway. The types of results are imported for the type checker alone: a command imports
what it needs, and not torch because another command does. `json_schema` describes all of them.
"""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic_core import to_jsonable_python

from brats_seg.labels import MODALITIES

if TYPE_CHECKING:
    from brats_seg.cases.case import CaseIndex
    from brats_seg.cases.many import Failure
    from brats_seg.crossval import CrossValidation
    from brats_seg.dicom.convert import Conversion
    from brats_seg.evaluation.compare import ComparedFolders, Comparison
    from brats_seg.evaluation.evaluate import Evaluation, ScoredFolder
    from brats_seg.evaluation.scores import RegionSummary
    from brats_seg.inference.reconstruct import DrawnCase
    from brats_seg.inference.tuning import Tuning
    from brats_seg.survival.features import Extraction
    from brats_seg.survival.results import SurvivalStudy
    from brats_seg.survival.verdict import FamilyFigures, Verdict
    from brats_seg.training.trainer import Outcome


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenFile:
    """A file or a folder that a command has written."""

    path: Path


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenPages:
    """Pages that `report` has written."""

    pages: tuple[Path, ...]
    failures: "tuple[Failure, ...]"
    """Cases that have no page."""


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedCase:
    """A case that `index` has found."""

    case_id: str
    patient_id: str
    release: str
    label_convention: str
    """Empty without a label map."""
    problems: tuple[str, ...]
    """Reasons why it cannot be used; empty if it can."""
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class IndexedFolder:
    """Result of `index`."""

    table: Path
    cases: tuple[IndexedCase, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class PreparedFolder:
    """Result of `prepare`."""

    folder: Path
    case_ids: tuple[str, ...]
    """Cases that are prepared; with `--verify`, those that were verified."""
    n_folds: int | None = None
    """Number of folds; null with `--verify`, as is the next."""
    folds_table: Path | None = None
    damage: tuple[str, ...] = ()
    """Messages about damaged cases, by `--verify`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedSeries:
    """A DICOM series that `convert` has found."""

    number: int
    description: str
    modality: str
    """Empty if it is not used."""
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedCase:
    """An examination that `convert` has found."""

    case_id: str
    folder: Path
    """Folder of its DICOM files."""
    series: tuple[SortedSeries, ...]
    problems: tuple[str, ...]
    """Reasons why it cannot be predicted; empty if it can."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ConvertedFolder:
    """Result of `convert`."""

    path: Path
    cases: tuple[ConvertedCase, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrainedRun:
    """Result of `train`."""

    run: Path
    finished: bool
    """Whether all epochs are done; otherwise the same command continues."""
    reason: str
    """Reason why it ended."""
    signal: str | None
    """Signal that stopped it, if one did."""
    best: float | None
    """Best watched value."""
    history: tuple[dict[str, float], ...]
    """Rows of `history.csv`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExportedFolder:
    """Result of `export`."""

    path: Path
    n_networks: int
    fingerprint: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ReconstructedCase:
    """A line of `reconstruct`."""

    case_id: str
    rmse: dict[str, float]
    """Error of each modality in the brain; an image without contrast has 1."""
    mean_rmse: float
    picture: Path
    warnings: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredCases:
    """Cases that were scored, and those that were not."""

    case_ids: tuple[str, ...]
    missing: tuple[str, ...]
    """Cases without a prediction, which get the worst scores."""
    left_out: tuple[str, ...]
    without_reference: tuple[str, ...]
    failures: "tuple[Failure, ...]"
    remarks: tuple[str, ...]


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """Result of `evaluate`: of one set of predictions, or with `--compare` of two."""

    table: Path
    evaluations: tuple[ScoredCases, ...]
    """One for each set of predictions."""
    summaries: "tuple[RegionSummary, ...]" = ()
    """Means over all references, with the worst scores where a prediction is missing."""
    predicted_summaries: "tuple[RegionSummary, ...]" = ()
    """Means over the predicted cases."""
    comparison: "Comparison | None" = None
    predicted_comparison: "Comparison | None" = None
    """The same over the cases that both sets predict."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CrossValidated:
    """Result of `crossval`; without results, training was stopped and the same command continues."""

    output: Path
    runs: tuple[Path, ...]
    finished: bool
    fingerprint: str = ""
    """Fingerprint of the exported ensemble."""
    tuning: "Tuning | None" = None
    summaries: "tuple[RegionSummary, ...]" = ()
    predicted_summaries: "tuple[RegionSummary, ...]" = ()
    failures: "tuple[Failure, ...]" = ()
    """Held-out cases that could not be predicted or scored."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MeasuredCases:
    """Result of `features`."""

    table: Path
    case_ids: tuple[str, ...]
    columns: tuple[str, ...]
    """Names of the features."""
    failures: "tuple[Failure, ...]"


@dataclass(frozen=True, kw_only=True, slots=True)
class SurvivalResult:
    """Result of `survival`."""

    folder: Path
    figures: "tuple[FamilyFigures, ...]"
    verdict: "Verdict"
    conclusion: str
    """The verdict in words."""
    remarks: tuple[str, ...]
    missing: tuple[str, ...]
    """Cases to submit that have no features."""


def json_text(value: Any, *, is_line: bool = False) -> str:
    """Return a value as JSON, on one line or on several; a number that is not finite becomes null."""
    plain = to_jsonable_python(value, inf_nan_mode="null")
    # without other characters than ASCII, because file names need not be UTF-8
    return json.dumps(plain, indent=None if is_line else 2)


def indexed_folder(found: "CaseIndex", table: Path) -> IndexedFolder:
    """Return the JSON of an index."""
    cases = (
        IndexedCase(
            case_id=case.case_id,
            patient_id=case.patient_id,
            release=case.release,
            label_convention=case.convention,
            problems=case.problems,
            remarks=case.remarks,
        )
        for case in found.cases
    )
    return IndexedFolder(table=table, cases=tuple(cases))


def converted_folder(done: "Sequence[Conversion]", path: Path) -> ConvertedFolder:
    """Return the JSON of a conversion."""
    cases = (
        ConvertedCase(
            case_id=one.case.case_id,
            folder=one.found.study.folder,
            series=tuple(
                SortedSeries(
                    number=series.series.number,
                    description=series.series.description,
                    modality=series.modality,
                    reason=series.reason,
                )
                for series in one.found.series
            ),
            problems=one.case.problems,
        )
        for one in done
    )
    return ConvertedFolder(path=path, cases=tuple(cases))


def trained_run(run: Path, outcome: "Outcome") -> TrainedRun:
    """Return the JSON of a training."""
    return TrainedRun(
        run=run,
        finished=outcome.finished,
        reason=outcome.reason,
        signal=None if outcome.signal is None else outcome.signal.name,
        best=outcome.best,
        history=tuple(dict(row) for row in outcome.history),
    )


def reconstructed_case(drawn: "DrawnCase") -> ReconstructedCase:
    """Return the JSON of a reconstruction."""
    return ReconstructedCase(
        case_id=drawn.case_id,
        rmse=dict(zip(MODALITIES, drawn.rmse, strict=True)),
        mean_rmse=drawn.mean_rmse,
        picture=drawn.picture,
        warnings=drawn.warnings,
    )


def scored(found: "ScoredFolder", table: Path) -> Scores:
    """Return the JSON of the scores of one set of predictions."""
    return Scores(
        table=table,
        evaluations=(_scored_cases(found.evaluation),),
        summaries=found.summaries,
        predicted_summaries=found.predicted_summaries,
    )


def compared(found: "ComparedFolders", table: Path) -> Scores:
    """Return the JSON of the comparison of two sets of predictions."""
    return Scores(
        table=table,
        evaluations=(_scored_cases(found.first), _scored_cases(found.second)),
        comparison=found.comparison,
        predicted_comparison=found.predicted,
    )


def cross_validated(done: "CrossValidation", output: Path) -> CrossValidated:
    """Return the JSON of a cross-validation."""
    if done.results is None:
        return CrossValidated(output=output, runs=done.runs, finished=False)
    results = done.results
    unpredicted = tuple(record.failure for record in results.batch.failures)
    unscored = results.evaluation.failures if results.evaluation else ()
    return CrossValidated(
        output=output,
        runs=done.runs,
        finished=True,
        fingerprint=results.fingerprint,
        tuning=results.tuning,
        summaries=results.summaries,
        predicted_summaries=results.predicted_summaries,
        failures=(*unpredicted, *unscored),
    )


def measured_cases(extraction: "Extraction", table: Path) -> MeasuredCases:
    """Return the JSON of measured features."""
    rows = extraction.rows
    return MeasuredCases(
        table=table,
        case_ids=tuple(row.case_id for row in rows),
        columns=tuple(feature.name for feature in rows[0].features) if rows else (),
        failures=extraction.failures,
    )


def survival_result(study: "SurvivalStudy", folder: Path) -> SurvivalResult:
    """Return the JSON of a study of survival."""
    return SurvivalResult(
        folder=folder,
        figures=study.summary.figures,
        verdict=study.summary.verdict,
        conclusion=str(study.summary.verdict),
        remarks=study.summary.remarks,
        missing=study.missing,
    )


def _scored_cases(evaluation: "Evaluation") -> ScoredCases:
    return ScoredCases(
        case_ids=tuple(dict.fromkeys(score.case_id for score in evaluation.scores)),
        missing=evaluation.missing,
        left_out=evaluation.left_out,
        without_reference=evaluation.without_reference,
        failures=evaluation.failures,
        remarks=evaluation.remarks,
    )
