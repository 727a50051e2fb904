"""Commands `predict`, `export` and `reconstruct`, which use trained models."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brats_seg.cli.options import (
    DeviceOption,
    IdentifiersOption,
    LabelsOption,
    ModelOption,
    PrecisionOption,
    PreprocessOption,
    SeriesOption,
    command_again,
    emit,
    importing,
    one_of,
)
from brats_seg.errors import UsageError, counted
from brats_seg.presets import FileFormat
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.cases.case import Case
    from brats_seg.inference.batch import BatchOutcome, CaseOutcome, Executor
    from brats_seg.inference.reconstruct import DrawnCase
    from brats_seg.inference.settings import PredictionSettings

_ONE_CASE = "One case by its files"
_WRITTEN = "What is written"

FileOption = Annotated[Path | None, typer.Option(rich_help_panel=_ONE_CASE, help="Its scan.")]


def predict(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    model: ModelOption,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(
            help="Folders of scans of any layout, or of DICOM files; or .csv or .json tables of "
            "paths."
        ),
    ] = None,
    t1n: FileOption = None,
    t1c: FileOption = None,
    t2w: FileOption = None,
    t2f: FileOption = None,
    case: Annotated[
        str | None, typer.Option(rich_help_panel=_ONE_CASE, help="Id of the case.")
    ] = None,
    tta: Annotated[bool, typer.Option("--tta", help="Average over 8 mirror images.")] = False,
    window: Annotated[
        str | None,
        typer.Option(
            metavar="X,Y,Z",
            help="Voxels of a window, or whole for one pass. (default: the window that tune chose)",
        ),
    ] = None,
    labels: LabelsOption = None,
    probabilities: Annotated[
        bool,
        typer.Option(
            "--probabilities", rich_help_panel=_WRITTEN, help="Write probability maps too."
        ),
    ] = False,
    uncertainty: Annotated[
        bool,
        typer.Option(
            "--uncertainty", rich_help_panel=_WRITTEN, help="Write a map of the entropy too."
        ),
    ] = False,
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            rich_help_panel=_WRITTEN,
            help="Write a page of each case too: reports/CASE.html, for any browser.",
        ),
    ] = False,
    layout: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WRITTEN,
            autocompletion=one_of("plain", "bids"),
            help="Names of the files: plain (CASE.nii.gz) or bids (a BIDS derivative).",
        ),
    ] = "plain",
    assignments: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="One setting; may be repeated: overlap, thresholds, smallest_mm3, smallest_et_mm3 or "
            "preview.",
        ),
    ] = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    workers: Annotated[
        str | None,
        typer.Option(
            metavar="N",
            help="Number of processes (dask) to distribute the cases to, or the address tcp://... of "
            "a dask cluster.",
        ),
    ] = None,
    series: SeriesOption = None,
    identifiers: IdentifiersOption = False,
    preprocess: PreprocessOption = False,
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
            **_window_settings(window),
            "tta": tta,
            "labels": labels,
            "probabilities": probabilities,
            "uncertainty": uncertainty,
            "report": report,
            "layout": layout,
            **dict(map(_assigned, assignments or [])),
        }
    )
    with importing():
        from brats_seg.dicom.convert import DicomOptions
        from brats_seg.dicom.modalities import parse_overrides
        from brats_seg.inference.batch import find_scans

    dicom = DicomOptions(
        series=parse_overrides(series or []),
        with_identifiers=identifiers,
        preprocess=preprocess,
    )
    files = {"t1n": t1n, "t1c": t1c, "t2w": t2w, "t2f": t2f}
    single = _case_of_files(inputs or [], files, case)
    executor = _executor(workers)
    cases = single or find_scans(inputs or [], output, dicom, track=tracked)
    outcome = _predict_cases(cases, model, output, settings, executor)
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


def _window_settings(window: str | None) -> dict[str, Any]:
    if window is None:
        return {}
    return {"window": window.split(",")} if "," in window else {"windows": window}


def _assigned(assignment: str) -> tuple[str, Any]:
    key, equals, value = assignment.partition("=")
    if not equals:
        msg = f"--set {assignment!r} has no '='; expected for example overlap=0.25"
        raise UsageError(msg)
    return key, value.split(",") if "," in value else value


def _executor(workers: str | None) -> "Executor":
    from brats_seg.inference.batch import Executor

    if workers is None or "://" in workers:
        return Executor(scheduler=workers)
    if not workers.isdecimal() or int(workers) == 0:
        msg = f"--workers is {workers!r}; expected a number from 1, or an address such as tcp://host:8786"
        raise UsageError(msg)
    return Executor(n_workers=int(workers))


def _predict_cases(
    cases: "Sequence[Case]",
    models: Sequence[Path],
    output: Path,
    settings: "PredictionSettings",
    executor: "Executor",
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
            cases, models, output, settings, executor=executor, on_case=on_case, track=tracked
        )
    except KeyboardInterrupt:
        print(
            f"interrupted after {n_done} of {len(cases)} cases. Results are in {output}; the same "
            f"command continues with the other cases:\n    {command_again()}",
            file=sys.stderr,
        )
        raise typer.Exit(128 + signal.SIGINT) from None


def export(
    runs: Annotated[list[Path], typer.Argument(help="Runs, checkpoints or exported folders.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    license_name: Annotated[
        str, typer.Option("--license", help="Licence of the weights, for the model card.")
    ] = "",
    name_cases: Annotated[
        bool | None,
        typer.Option(
            "--name-cases/--count-cases",
            help="Name the cases by their ids in the model card, or only count them. (default: "
            "named if all ids are of public releases, such as BraTS)",
        ),
    ] = None,
    file_format: Annotated[
        FileFormat,
        typer.Option(
            "--format",
            help="safetensors alone, or a MONAI bundle or ONNX files beside them.",
        ),
    ] = "safetensors",
) -> None:
    """Export networks to a folder: weights, settings, tables and a model card, without pickles.

    The model card names the training cases, and has the scores of the validation during training.
    """
    with importing():
        from brats_seg.inference.export import export_model

    exported = export_model(
        runs, output, license_name=license_name, case_ids=name_cases, file_format=file_format
    )
    n_networks = len(exported.networks)
    emit(path=output, n_networks=n_networks, fingerprint=exported.fingerprint)
    print(f"wrote {counted(n_networks, 'network')} to {output}, fingerprint {exported.fingerprint}")
    print("Research use only.")


def reconstruct(
    model: Annotated[Path, typer.Argument(help="Run with model.name autoencoder.")],
    scans: Annotated[
        Path, typer.Argument(help="Folder of one case or several, of any layout; or a table.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the pictures, CASE.png.")
    ] = Path("reconstructions"),
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
) -> None:
    """Draw a case beside its reconstruction, and print the error of each modality.

    The error is the root mean square inside the brain, in units of the normalised intensity: an
    image without any contrast has an error of 1. Exit code 1: some cases failed.
    """
    with importing():
        from brats_seg.inference.reconstruct import reconstruct_cases
        from brats_seg.inference.settings import prediction_settings

    settings = prediction_settings({"device": device, "precision": precision})
    done = reconstruct_cases([scans], model, output, settings, track=tracked)
    for drawn in done.results:
        _print_drawn(drawn)
    for failure in done.failures:
        print(f"FAILED  {failure.message}")
    print("1 is the error of an image without contrast. Research use only.")
    if done.failures:
        raise typer.Exit(1)


def print_outcome(outcome: "CaseOutcome") -> None:
    """Print the result of a case."""
    record = outcome.record
    if record.status == "failed":
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
    from brats_seg.cases.inputs import single_input

    given = {modality: path for modality, path in files.items() if path is not None}
    if bool(given) == bool(paths):
        msg = "give either INPUTS, or one case by --t1n, --t1c, --t2w and --t2f"
        raise UsageError(msg)
    if paths:
        if case_id is not None:
            msg = "--case needs one case by --t1n, --t1c, --t2w and --t2f instead of INPUTS"
            raise UsageError(msg)
        return ()
    return (single_input(case_id, given),)


def _print_drawn(drawn: "DrawnCase") -> None:
    from brats_seg.labels import MODALITIES

    errors = dict(zip(MODALITIES, drawn.rmse, strict=True))
    emit(
        case_id=drawn.case_id,
        rmse=errors,
        mean_rmse=drawn.mean_rmse,
        picture=drawn.picture,
        warnings=drawn.warnings,
    )
    parts = ", ".join(f"{modality} {error:.3f}" for modality, error in errors.items())
    print(f"{drawn.case_id}: error {drawn.mean_rmse:.3f} in the brain ({parts}), {drawn.picture}")
    for warning in drawn.warnings:
        print(f"    note: {warning}")
