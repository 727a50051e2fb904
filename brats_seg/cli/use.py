"""Commands `predict`, `fuse`, `export`, `features` and `survival`, which use trained models."""

import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from brats_seg.cli.options import command_again, emit, importing, print_failures, print_table
from brats_seg.errors import UsageError, counted
from brats_seg.files import check_writable
from brats_seg.presets import FileFormat
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.cases.case import Case
    from brats_seg.inference.batch import CaseOutcome, Workers
    from brats_seg.survival.results import Estimate, SurvivalStudy

_FIGURES = (
    ("accuracy", "accuracy", 1.0, 2),
    ("mse_days2", "MSE (1000 days2)", 1000.0, 0),
    ("median_se_days2", "median SE (1000)", 1000.0, 0),
    ("spearman", "Spearman", 1.0, 2),
    ("mae_days", "mean error (days)", 1.0, 0),
    ("concordance", "concordance", 1.0, 2),
)
"""Scores of `survival` that are printed: name, heading, unit and digits."""


def predict(
    output: Path,
    model: list[Path] | None = None,
    data: list[Path] | None = None,
    t1n: Path | None = None,
    t1c: Path | None = None,
    t2w: Path | None = None,
    t2f: Path | None = None,
    case: str | None = None,
    tta: bool = False,
    window: str | None = None,
    convention: str | None = None,
    probabilities: bool = False,
    uncertainty: bool = False,
    report: bool = False,
    layout: str = "plain",
    changes: list[str] | None = None,
    device: str = "auto",
    precision: str = "auto",
    workers: str | None = None,
    watch: float | None = None,
    series: list[str] | None = None,
    identifiers: bool = False,
    preprocess: bool = False,
    atlas: str | None = None,
) -> int:
    """Segment new scans: label maps on their own grids, volumes, pictures and a record of each.

    Without --model, the network that the package carries predicts; it says what it has learnt from.
    Cases that the same command has finished earlier are kept. With --watch, the command waits for
    more. Exit code 1: some cases failed; they are listed in failures.csv.

    Examples:
        brats-seg predict scans -o predictions --report
        brats-seg predict scans -o predictions --model runs/fold0
        brats-seg predict dicom -o predictions --model model --series t1c=5
        brats-seg predict incoming -o predictions --watch 30
        brats-seg predict --t1n a.nii.gz --t1c b.nii.gz --t2w c.nii.gz --t2f d.nii.gz -o out --model model
    """
    from brats_seg.inference.settings import prediction_settings

    settings = prediction_settings(
        {
            "device": device,
            "precision": precision,
            "window": window,
            "tta": tta,
            "labels": convention,
            "probabilities": probabilities,
            "uncertainty": uncertainty,
            "report": report,
            "layout": layout,
            **dict(map(_parse_assignment, changes or [])),
        }
    )
    atlas = atlas or ("sri24" if preprocess else "")
    with importing():
        from brats_seg.cases.layouts import holds_dicom

        options = _scan_options(series or [], atlas, with_identifiers=identifiers)
    files = {"t1n": t1n, "t1c": t1c, "t2w": t2w, "t2f": t2f}
    single = _case_of_files(data or [], files, case)
    n_workers = _parse_workers(workers)
    if (series or identifiers) and watch is None and not (data and all(map(holds_dicom, data))):
        msg = "--series and --identifiers apply to DICOM examinations alone: leave them out for NIfTI files"
        raise UsageError(msg)
    check_writable(output)
    with importing():
        from brats_seg.inference.batch import predict_folder

    done: list[CaseOutcome] = []

    def on_case(outcome: "CaseOutcome") -> None:
        done.append(outcome)
        emit(outcome.record)
        print_outcome(outcome)

    cases = _find(single or data or [], output, options, watch)
    try:
        outcome = predict_folder(
            cases, model or (), output, settings, workers=n_workers, on_case=on_case, track=tracked
        )
    except KeyboardInterrupt:
        # watching has no other end
        part = f"{len(done)} of {len(cases)} cases" if isinstance(cases, Sequence) else ""
        print(
            f"interrupted after {part or counted(len(done), 'case')}. Results are in {output}; the same "
            f"command continues with the other cases:\n    {command_again()}",
            file=sys.stderr,
        )
        return 128 + signal.SIGINT if part else 0
    for remark in outcome.remarks:
        print(remark if convention else f"{remark}; --convention chooses another")
    predicted, skipped, failed = len(outcome.predicted), outcome.n_skipped, len(outcome.failures)
    print(f"{predicted} predicted, {skipped} finished before, {failed} failed.", end=" ")
    print(f"Results and tables are in {output}. Research use only.")
    return int(failed > 0)


def _scan_options(series: Sequence[str], atlas: str, *, with_identifiers: bool) -> Any:
    """Return the options of `brats_seg.dicom`; None where it is missing, and no option was given."""
    from brats_seg.wings import find_wing

    if wing := find_wing("dicom"):
        chosen = wing.modalities.parse_overrides(series)
        return wing.ScanOptions(series=chosen, with_identifiers=with_identifiers, atlas=atlas)
    if series or atlas or with_identifiers:
        msg = "--series, --identifiers, --preprocess and --atlas need brats_seg.dicom, which is missing"
        raise UsageError(msg)
    return None


def _find(
    given: "Sequence[Path | Case]", output: Path, options: Any, watch: float | None
) -> "Sequence[Case] | Iterator[Sequence[Case]]":
    """Return the cases, or an iterator over those that arrive."""
    from brats_seg.inference.batch import find_scans, watched_scans
    from brats_seg.wings import find_wing

    if watch is None:
        return find_scans(given, output, options, track=tracked)
    if len(given) != 1 or not isinstance(given[0], Path) or not given[0].is_dir():
        msg = "--watch takes one folder, no table of paths and no files"
        raise UsageError(msg)
    if (wing := find_wing("dicom")) and options.atlas:
        # what is missing is said now, and not when the first scan arrives
        wing.prepare_cases((), output, options)
    return watched_scans(given[0], output, options, quiet_s=watch)


def _parse_assignment(assignment: str) -> tuple[str, Any]:
    key, equals, value = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example overlap=0.25"
        raise UsageError(msg)
    return key, value.split(",") if "," in value else value


def _parse_workers(workers: str | None) -> "Workers":
    if workers is None or "://" in workers:
        return workers
    if not workers.isdecimal() or int(workers) == 0:
        msg = f"--workers is {workers!r}; expected a number from 1, or an address such as tls://host:8786"
        raise UsageError(msg)
    return int(workers)


def _case_of_files(
    paths: Sequence[Path], files: dict[str, Path | None], case_id: str | None
) -> "tuple[Case, ...]":
    """Return the case that is given by its files, or nothing if paths are given."""
    from brats_seg.cases.find import single_input

    given = {modality: path for modality, path in files.items() if path is not None}
    if bool(given) == bool(paths) or (paths and case_id):
        msg = "give either DATA, or one case by --t1n, --t1c, --t2w and --t2f, which --case names"
        raise UsageError(msg)
    return (single_input(case_id, given),) if given else ()


def print_outcome(outcome: "CaseOutcome") -> None:
    """Print the result of a case."""
    from brats_seg.cases.many import Failure
    from brats_seg.labels import REGIONS

    record = outcome.record
    if isinstance(record, Failure):
        print(f"FAILED  {record.message}", flush=True)
        return
    ml = {part.name: part.ml for part in record.volumes}
    volumes = ", ".join(f"{region.upper()} {ml[region]:.1f} ml" for region in REGIONS)
    how = f"{record.seconds:.1f} s" if outcome.is_new else "finished before"
    print(f"{record.case_id}: {volumes} ({how})", flush=True)
    if record.predicted_dice:
        print(f"    predicted Dice: {', '.join(map(str, record.predicted_dice))}", flush=True)
    for warning in record.warnings:
        print(f"    note: {warning}", flush=True)


def fuse(label_maps: list[Path], output: Path, method: str = "majority") -> None:
    """Fuse several label maps of each case to one, region by region.

    majority: more than half of them; a tie is outside. staple: by STAPLE, which weights each by how well
    it agrees (needs SimpleITK). mean: of the maps that predict --probabilities wrote, but not in
    --layout bids.

    Examples:
        brats-seg fuse first second third -o fused
        brats-seg fuse a.nii.gz b.nii.gz c.nii.gz -o fused --method staple
    """
    with importing():
        from brats_seg.inference.fuse import fuse_label_maps

    written = fuse_label_maps(label_maps, output, method, track=tracked)
    emit(paths=written)
    print(f"wrote {counted(len(written), 'label map')} to {output}. Research use only.")


def export(
    model: list[Path],
    output: Path,
    license_name: str = "",
    name_cases: bool = False,
    file_format: FileFormat = "safetensors",
) -> None:
    """Export networks to a folder: weights, settings, tables and a model card, without pickles.

    The model card has the scores of the validation during training. `model.json` names the training cases
    only if all are of public releases, or with --name-cases.

    Examples:
        brats-seg export runs/fold0 runs/fold1 -o model --license CC-BY-4.0
    """
    with importing():
        from brats_seg.inference.export import export_model

    exported = export_model(
        model, output, license_name=license_name, case_ids=name_cases, file_format=file_format
    )
    n_networks = len(exported.networks)
    emit(exported, path=output, n_networks=n_networks)
    print(f"wrote {counted(n_networks, 'network')} to {output}, fingerprint {exported.fingerprint}")
    print("Research use only.")


def features(
    data: Path,
    output: Path = Path("features.csv"),
    model: list[Path] | None = None,
    autoencoder: Path | None = None,
    clinical: list[Path] | None = None,
    convention: str | None = None,
    prepared: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> int:
    """Measure each case: size, shape and intensities of the tumour, and its latent vector.

    Where there is no label map, runs predict one; with several, those that were not trained on the
    patient. Exit code 1: some cases failed; they are listed in failures.csv beside the table.

    Examples:
        brats-seg features data -o features.csv
        brats-seg features data --autoencoder runs/autoencoder
    """
    if output.is_dir() or output.name == "failures.csv":
        msg = f"{output} is a folder, or the list of cases that failed; expected another --output"
        raise UsageError(msg)
    with importing():
        import pandas as pd

        from brats_seg.survival.features import REFERENCE, features_of_folder
        from brats_seg.survival.table import seen_remarks

    extraction = features_of_folder(
        data,
        output,
        autoencoder=autoencoder,
        segmentations=model or (),
        tables=clinical or (),
        labels=convention,
        prepared_path=prepared,
        device=device,
        precision=precision,
        track=tracked,
    )
    rows = extraction.results
    case_ids = [row["case_id"] for row in rows]
    columns = [name for row in rows[:1] for name, cell in row.items() if not isinstance(cell, str)]
    emit(table=output, case_ids=case_ids, columns=columns, failures=extraction.failures)
    code = print_failures([failure.message for failure in extraction.failures])
    n_reference = sum(row["labels_from"] == REFERENCE for row in rows)
    label_maps = f"label maps: {n_reference} reference, {len(rows) - n_reference} predicted"
    print(f"{counted(len(rows), 'case')} with {len(columns)} features; {label_maps}")
    for remark in seen_remarks(pd.DataFrame(rows)):
        print(f"note: {remark}")
    print(f"wrote {output} and {output.with_name('failures.csv')}. Research use only.")
    return code


def survival(
    features: Path,
    clinical: list[Path],
    output: Path = Path("survival"),
    fold_table: Path | None = None,
    repeats: int = 3,
) -> None:
    """Predict days of survival, and test the predictions against chance.

    Nested cross-validation: no case is predicted by a model that was trained on it or its patient.
    Days are learnt from deaths. If lifelines is installed (extra `survival`), a Cox model also
    learns from censored cases (alive at the last follow-up), which count in the concordance index.

    Examples:
        brats-seg survival features.csv --clinical survival_data.csv
    """
    with importing():
        from brats_seg.survival.results import study_survival

    study = study_survival(
        features, clinical, output, folds=fold_table, n_repeats=repeats, track=tracked
    )
    emit(study, folder=output, conclusion=str(study.verdict))
    _print_study(study)
    print(f"wrote predictions, figures and picture to {output}. Research use only.")


def _print_study(study: "SurvivalStudy") -> None:
    from brats_seg.cases.clinical import SURVIVAL_CLASS_DAYS

    for remark in study.remarks:
        print(remark)
    classes = "short (under {:.0f} days), mid and long (over {:.0f} days)"
    print(f"Accuracy is over {classes.format(*SURVIVAL_CLASS_DAYS)} survivors. Intervals of 95 %.")
    _print_figures(study)
    times = ", ".join(f"{name} {n}" for name, n in study.predictions.n_chosen.items() if n)
    print(f"selected on the inner folds: {times}")
    print(study.verdict)


def _print_figures(study: "SurvivalStudy") -> None:
    given = {name for estimates in study.figures.values() for name in estimates}
    shown = [figure for figure in _FIGURES if figure[0] in given]
    rows = [
        [family, *(_cell(estimates.get(name), unit, digits) for name, _, unit, digits in shown)]
        for family, estimates in study.figures.items()
    ]
    print_table(["model", *(heading for _, heading, _, _ in shown)], rows)


def _cell(estimate: "Estimate | None", unit: float, digits: int) -> str:
    if estimate is None:
        return ""
    numbers = (estimate.value, estimate.low, estimate.high)
    value, low, high = (f"{number / unit:.{digits}f}" for number in numbers)
    return f"{value} [{low}, {high}]"
