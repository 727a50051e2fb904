"""Commands `predict`, `export` and `reconstruct`, which use trained models."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import typer

from brats_seg.cli.options import command_again, emit, importing
from brats_seg.errors import UsageError, counted
from brats_seg.presets import FileFormat
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.cases.case import Case
    from brats_seg.inference.batch import BatchOutcome, CaseOutcome, Workers
    from brats_seg.inference.reconstruct import DrawnCase
    from brats_seg.inference.settings import PredictionSettings


def predict(
    output: Path,
    model: list[Path],
    inputs: list[Path] | None = None,
    t1n: Path | None = None,
    t1c: Path | None = None,
    t2w: Path | None = None,
    t2f: Path | None = None,
    case: str | None = None,
    tta: bool = False,
    window: str | None = None,
    labels: str | None = None,
    probabilities: bool = False,
    uncertainty: bool = False,
    report: bool = False,
    layout: str = "plain",
    changes: list[str] | None = None,
    device: str = "auto",
    precision: str = "auto",
    workers: str | None = None,
    series: list[str] | None = None,
    identifiers: bool = False,
    preprocess: bool = False,
) -> None:
    """Segment new scans: label maps on their own grids, volumes, pictures and a record of each.

    Cases that the same command has finished earlier are kept. Exit code 1: some cases failed; they
    are listed in failures.csv.
    """
    from brats_seg.inference.settings import prediction_settings

    settings = prediction_settings(
        {
            "device": device,
            "precision": precision,
            "window": window,
            "tta": tta,
            "labels": labels,
            "probabilities": probabilities,
            "uncertainty": uncertainty,
            "report": report,
            "layout": layout,
            **dict(map(_assigned, changes or [])),
        }
    )
    with importing():
        from brats_seg.dicom.convert import DicomOptions
        from brats_seg.dicom.modalities import parse_overrides
        from brats_seg.inference.batch import find_scans

    overrides = parse_overrides(series or [])
    dicom = DicomOptions(series=overrides, with_identifiers=identifiers, preprocess=preprocess)
    files = {"t1n": t1n, "t1c": t1c, "t2w": t2w, "t2f": t2f}
    single = _case_of_files(inputs or [], files, case)
    n_workers = _parse_workers(workers)
    cases = single or find_scans(inputs or [], output, dicom, track=tracked)
    outcome = _predict_cases(cases, model, output, settings, n_workers)
    advice = "" if labels else "; --labels chooses another"
    for remark in outcome.remarks:
        print(f"{remark}{advice}")
    n_failed = len(outcome.failures)
    print(
        f"{outcome.n_predicted} predicted, {outcome.n_skipped} finished before, {n_failed} "
        f"failed. Results and tables are in {output}. Research use only."
    )
    if n_failed:
        raise typer.Exit(1)


def _assigned(assignment: str) -> tuple[str, Any]:
    key, equals, value = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example overlap=0.25"
        raise UsageError(msg)
    return key, value.split(",") if "," in value else value


def _parse_workers(workers: str | None) -> "Workers":
    if workers is None or "://" in workers:
        return workers
    if not workers.isdecimal() or int(workers) == 0:
        msg = f"--workers is {workers!r}; expected a number from 1, or an address such as tcp://host:8786"
        raise UsageError(msg)
    return int(workers)


def _predict_cases(
    cases: "Sequence[Case]",
    models: Sequence[Path],
    output: Path,
    settings: "PredictionSettings",
    workers: "Workers",
) -> "BatchOutcome":
    """Predict cases, print each as it ends, and say after an interruption how to resume."""
    from brats_seg.inference.batch import predict_cases

    n_done = 0

    def on_case(outcome: "CaseOutcome") -> None:
        nonlocal n_done
        n_done += 1
        emit(outcome.record)
        print_outcome(outcome)

    try:
        return predict_cases(
            cases, models, output, settings, workers=workers, on_case=on_case, track=tracked
        )
    except KeyboardInterrupt:
        print(
            f"interrupted after {n_done} of {len(cases)} cases. Results are in {output}; the same "
            f"command continues with the other cases:\n    {command_again()}",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.SIGINT) from None


def export(
    trained: list[Path],
    output: Path,
    license_name: str = "",
    name_cases: bool | None = None,
    file_format: FileFormat = "safetensors",
) -> None:
    """Export networks to a folder: weights, settings, tables and a model card, without pickles.

    The model card names the training cases, and has the scores of the validation during training.
    """
    with importing():
        from brats_seg.inference.export import export_model

    exported = export_model(
        trained, output, license_name=license_name, case_ids=name_cases, file_format=file_format
    )
    n_networks = len(exported.networks)
    emit(exported, path=output, n_networks=n_networks)
    print(f"wrote {counted(n_networks, 'network')} to {output}, fingerprint {exported.fingerprint}")
    print("Research use only.")


def reconstruct(
    autoencoder_run: Path,
    scans: Path,
    output: Path = Path("reconstructions"),
    device: str = "auto",
    precision: str = "auto",
) -> None:
    """Draw a case beside its reconstruction, and print the error of each modality.

    The error is the root mean square inside the brain, in units of the normalised intensity: an
    image without any contrast has an error of 1. Exit code 1: some cases failed.
    """
    with importing():
        from brats_seg.inference.reconstruct import reconstruct_cases
        from brats_seg.inference.settings import prediction_settings

    settings = prediction_settings({"device": device, "precision": precision})
    done = reconstruct_cases([scans], autoencoder_run, output, settings, track=tracked)
    for drawn in done.results:
        _print_drawn(drawn)
    for failure in done.failures:
        print(f"FAILED  {failure.message}")
    print("1 is the error of an image without contrast. Research use only.")
    if done.failures:
        raise typer.Exit(1)


def print_outcome(outcome: "CaseOutcome") -> None:
    """Print the result of a case."""
    from brats_seg.cases.many import Failure

    record = outcome.record
    if isinstance(record, Failure):
        print(f"FAILED  {record.message}", flush=True)
        return
    ml: dict[str, Any] = {part.name: part.ml for part in record.volumes}
    how = f"{record.seconds:.1f} s" if outcome.is_new else "finished before"
    print(
        f"{record.case_id}: WT {ml['wt']:.1f} ml, TC {ml['tc']:.1f} ml, ET {ml['et']:.1f} ml "
        f"({how})",
        flush=True,
    )
    if record.predicted_dice:
        print(f"    predicted Dice: {', '.join(map(str, record.predicted_dice))}", flush=True)
    for warning in record.warnings:
        print(f"    note: {warning}", flush=True)


def _case_of_files(
    paths: Sequence[Path], files: dict[str, Path | None], case_id: str | None
) -> "tuple[Case, ...]":
    """Return the case that is given by its files, or nothing if paths are given."""
    from brats_seg.cases.find import single_input

    given = {modality: path for modality, path in files.items() if path is not None}
    if bool(given) == bool(paths):
        msg = "give either INPUTS, or one case by --t1n, --t1c, --t2w and --t2f"
        raise UsageError(msg)
    if paths and case_id is not None:
        msg = "--case needs one case by --t1n, --t1c, --t2w and --t2f instead of INPUTS"
        raise UsageError(msg)
    return (single_input(case_id, given),) if given else ()


def _print_drawn(drawn: "DrawnCase") -> None:
    from brats_seg.labels import MODALITIES

    errors = dict(zip(MODALITIES, drawn.rmse, strict=True))
    emit(drawn, rmse=errors)
    parts = ", ".join(f"{modality} {error:.3f}" for modality, error in errors.items())
    print(f"{drawn.case_id}: error {drawn.mean_rmse:.3f} in the brain ({parts}), {drawn.picture}")
    for warning in drawn.warnings:
        print(f"    note: {warning}")
