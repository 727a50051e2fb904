"""Commands `predict`, `export` and `reconstruct`, which use trained models."""

import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brats_seg.cli.options import (
    COMPLETE_CONVENTION,
    COMPLETE_DEVICE,
    COMPLETE_PRECISION,
    DEVICES,
    PRECISIONS,
    DeviceOption,
    IdentifiersOption,
    JsonOption,
    PrecisionOption,
    PreprocessOption,
    SeriesOption,
    command_again,
    importing,
    one_of,
    print_json,
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
_WINDOWS = "Windows"
_LABEL_MAP = "Label map"
_WRITTEN = "What is written"
_MACHINE = "Machine"

ModelOption = Annotated[
    list[Path],
    typer.Option(
        "--model",
        help="A run, a checkpoint or an exported folder; several are averaged. Or one model of "
        "nnU-Net v2 or MONAI bundle.",
    ),
]


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
    t1n: Annotated[
        Path | None, typer.Option("--t1n", "--t1", rich_help_panel=_ONE_CASE, help="T1.")
    ] = None,
    t1c: Annotated[
        Path | None,
        typer.Option(
            *("--t1c", "--t1ce", "--t1gd"),
            rich_help_panel=_ONE_CASE,
            help="T1 with contrast agent.",
        ),
    ] = None,
    t2w: Annotated[
        Path | None, typer.Option("--t2w", "--t2", rich_help_panel=_ONE_CASE, help="T2.")
    ] = None,
    t2f: Annotated[
        Path | None, typer.Option("--t2f", "--flair", rich_help_panel=_ONE_CASE, help="FLAIR.")
    ] = None,
    case_id: Annotated[
        str | None, typer.Option(rich_help_panel=_ONE_CASE, help="Id of the case.")
    ] = None,
    labels: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_LABEL_MAP,
            autocompletion=COMPLETE_CONVENTION,
            help="Label convention to write. (default: that of the release of the case)",
        ),
    ] = None,
    windows: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_WINDOWS,
            autocompletion=one_of("auto", "whole", "centre", "sliding"),
            help="One pass (whole, or centre with statistics of its centre), or sliding windows; auto: "
            "what tune chose, else sliding windows.",
        ),
    ] = None,
    window: Annotated[
        str | None,
        typer.Option(metavar="X,Y,Z", rich_help_panel=_WINDOWS, help="Voxels of a sliding window."),
    ] = None,
    overlap: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_WINDOWS,
            help="Overlap of sliding windows, 0 to 1. (default: what tune chose, else 0.5)",
        ),
    ] = None,
    tta: Annotated[
        bool,
        typer.Option("--tta", rich_help_panel=_WINDOWS, help="Average over 8 mirror images."),
    ] = False,
    threshold: Annotated[
        str | None,
        typer.Option(
            metavar="WT,TC,ET",
            rich_help_panel=_LABEL_MAP,
            help="Probabilities above which a voxel is tumour.",
        ),
    ] = None,
    smallest: Annotated[
        str | None,
        typer.Option(
            metavar="WT,TC,ET",
            rich_help_panel=_LABEL_MAP,
            help="Volume of the smallest component, mm3.",
        ),
    ] = None,
    smallest_et: Annotated[
        float | None,
        typer.Option(
            rich_help_panel=_LABEL_MAP,
            help="Total ET volume, mm3, below which ET becomes necrosis.",
        ),
    ] = None,
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
    layout: Annotated[
        str,
        typer.Option(
            rich_help_panel=_WRITTEN,
            autocompletion=one_of("plain", "bids"),
            help="Names of the files: plain (CASE.nii.gz) or bids (a BIDS derivative).",
        ),
    ] = "plain",
    report: Annotated[
        bool,
        typer.Option(
            "--report",
            rich_help_panel=_WRITTEN,
            help="Write a page of each case too: reports/CASE.html, for any browser.",
        ),
    ] = False,
    preview: Annotated[
        bool, typer.Option(rich_help_panel=_WRITTEN, help="Write a picture of each case.")
    ] = True,
    device: Annotated[
        str | None,
        typer.Option(rich_help_panel=_MACHINE, autocompletion=COMPLETE_DEVICE, help=DEVICES),
    ] = None,
    precision: Annotated[
        str | None,
        typer.Option(rich_help_panel=_MACHINE, autocompletion=COMPLETE_PRECISION, help=PRECISIONS),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            rich_help_panel=_MACHINE,
            help="Number of processes (dask) to distribute the cases to.",
        ),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=_MACHINE, help="Address of a dask cluster to distribute the cases to."
        ),
    ] = None,
    series: SeriesOption = None,
    identifiers: IdentifiersOption = False,
    preprocess: PreprocessOption = False,
    as_json: JsonOption = False,
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
            "windows": windows,
            "window": _numbers(window),
            "overlap": overlap,
            "tta": tta,
            "thresholds": _numbers(threshold),
            "smallest_mm3": _numbers(smallest),
            "smallest_et_mm3": smallest_et,
            "labels": labels,
            "probabilities": probabilities,
            "uncertainty": uncertainty,
            "preview": preview,
            "report": report,
            "layout": layout,
        }
    )
    with importing():
        from brats_seg.dicom.convert import DicomOptions
        from brats_seg.dicom.modalities import parse_overrides
        from brats_seg.inference.batch import Executor, find_scans

    executor = Executor(n_workers=workers, scheduler=scheduler)
    dicom = DicomOptions(
        series=parse_overrides(series or []),
        with_identifiers=identifiers,
        preprocess=preprocess,
    )
    files = {"t1n": t1n, "t1c": t1c, "t2w": t2w, "t2f": t2f}
    of_files = _case_of_files(inputs or [], files, case_id)
    cases = of_files or find_scans(inputs or [], output, dicom, track=tracked)
    outcome = _predict_cases(cases, model, output, settings, executor, as_json=as_json)
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


def _predict_cases(
    cases: "Sequence[Case]",
    models: Sequence[Path],
    output: Path,
    settings: "PredictionSettings",
    executor: "Executor",
    *,
    as_json: bool,
) -> "BatchOutcome":
    """Predict cases, print each as it ends, and say after an interruption how to go on."""
    from brats_seg.inference.batch import predict_cases

    n_done = 0

    def on_case(outcome: "CaseOutcome") -> None:
        nonlocal n_done
        n_done += 1
        if as_json:
            print_json(outcome.record, is_line=True)
        else:
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
        str,
        typer.Option("--license", help="Licence of the weights, for the model card."),
    ] = "",
    case_ids: Annotated[
        bool | None,
        typer.Option(
            "--case-ids/--no-case-ids",
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
    as_json: JsonOption = False,
) -> None:
    """Export networks to a folder: weights, settings, tables and a model card, without pickles.

    The model card names the training cases, and has the scores of the validation during training.
    """
    with importing():
        from brats_seg.inference.export import export_model

    exported = export_model(
        runs, output, license_name=license_name, case_ids=case_ids, file_format=file_format
    )
    n_networks = len(exported.networks)
    if as_json:
        from brats_seg.json_results import ExportedFolder

        print_json(
            ExportedFolder(path=output, n_networks=n_networks, fingerprint=exported.fingerprint)
        )
    print(f"wrote {counted(n_networks, 'network')} to {output}, fingerprint {exported.fingerprint}")
    print("Research use only.")


def reconstruct(
    run: Annotated[Path, typer.Argument(help="Folder of a run with model.name autoencoder.")],
    case: Annotated[
        Path, typer.Argument(help="Folder of one case or several, of any layout; or a table.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the pictures, CASE.png.")
    ] = Path("reconstructions"),
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Draw a case beside its reconstruction, and print the error of each modality.

    The error is the root mean square inside the brain, in units of the normalised intensity: an
    image without any contrast has an error of 1. Exit code 1: some cases failed.
    """
    with importing():
        from brats_seg.inference.reconstruct import reconstruct_cases
        from brats_seg.inference.settings import prediction_settings

    settings = prediction_settings({"device": device, "precision": precision})
    done = reconstruct_cases([case], run, output, settings, track=tracked)
    for drawn in done.results:
        if as_json:
            from brats_seg.json_results import reconstructed_case

            print_json(reconstructed_case(drawn), is_line=True)
        else:
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
    from brats_seg.cases.find import single_input

    given = {modality: path for modality, path in files.items() if path is not None}
    if bool(given) == bool(paths):
        msg = "give either INPUTS, or one case by --t1n, --t1c, --t2w and --t2f"
        raise UsageError(msg)
    if paths:
        if case_id is not None:
            msg = "--case-id needs one case by --t1n, --t1c, --t2w and --t2f instead of INPUTS"
            raise UsageError(msg)
        return ()
    return (single_input(case_id, given),)


def _numbers(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def _print_drawn(drawn: "DrawnCase") -> None:
    from brats_seg.labels import MODALITIES

    errors = dict(zip(MODALITIES, drawn.rmse, strict=True))
    parts = ", ".join(f"{modality} {error:.3f}" for modality, error in errors.items())
    print(f"{drawn.case_id}: error {drawn.mean_rmse:.3f} in the brain ({parts}), {drawn.picture}")
    for warning in drawn.warnings:
        print(f"    note: {warning}")
