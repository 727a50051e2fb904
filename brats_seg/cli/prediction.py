"""Commands that use trained models: on new scans, and to hand them out."""

# DOC cli/reconstruction: The command that shows what an autoencoder makes of cases.

import json
import logging
import sys
from collections.abc import Generator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from brats_seg.errors import CaseError, UsageError
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.cases.inputs import CaseInput
    from brats_seg.inference.batch import CaseOutcome
    from brats_seg.inference.model import Model
    from brats_seg.inference.output import OutputFolder
    from brats_seg.inference.reconstruct import Reconstruction, Reconstructor
    from brats_seg.inference.settings import PredictionSettings

ModelOption = Annotated[
    list[Path],
    typer.Option(
        "--model", help="A run, a checkpoint or an exported folder; several are averaged."
    ),
]


def predict(
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
    model: ModelOption,
    inputs: Annotated[
        list[Path] | None,
        typer.Argument(help="Folders of scans of any layout, or .csv or .json tables of paths."),
    ] = None,
    t1n: Annotated[Path | None, typer.Option(help="One case: its T1.")] = None,
    t1c: Annotated[Path | None, typer.Option(help="One case: its T1 with contrast agent.")] = None,
    t2w: Annotated[Path | None, typer.Option(help="One case: its T2.")] = None,
    t2f: Annotated[Path | None, typer.Option(help="One case: its FLAIR.")] = None,
    case_id: Annotated[str | None, typer.Option(help="One case: what to call it.")] = None,
    labels: Annotated[
        str | None, typer.Option(help="Label convention to write. (default: the scan's release's)")
    ] = None,
    windows: Annotated[str | None, typer.Option(help="auto, whole or sliding.")] = None,
    window: Annotated[
        str | None, typer.Option(metavar="X,Y,Z", help="Voxels of a sliding window.")
    ] = None,
    overlap: Annotated[float | None, typer.Option(help="Of sliding windows, 0 to 1.")] = None,
    tta: Annotated[bool, typer.Option("--tta", help="Average over 8 mirror images.")] = False,
    threshold: Annotated[
        str | None, typer.Option(metavar="WT,TC,ET", help="Probability that makes a voxel tumour.")
    ] = None,
    smallest: Annotated[
        str | None, typer.Option(metavar="WT,TC,ET", help="Smallest component, mm3.")
    ] = None,
    smallest_et: Annotated[
        float | None, typer.Option(help="Less ET than this in all, mm3, becomes necrosis.")
    ] = None,
    probabilities: Annotated[bool, typer.Option("--probabilities", help="Write them too.")] = False,
    uncertainty: Annotated[
        bool, typer.Option("--uncertainty", help="Write a map of the entropy too.")
    ] = False,
    preview: Annotated[bool, typer.Option(help="PatchKey a picture of each case.")] = True,
    device: Annotated[str | None, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = None,
    precision: Annotated[str | None, typer.Option(help="auto, fp32, fp16, bf16.")] = None,
    workers: Annotated[
        int | None, typer.Option(min=1, help="Share the cases out to processes (dask).")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="Share the cases out to a dask cluster at this address.")
    ] = None,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each case, for machines.")
    ] = False,
) -> None:
    """Segment new scans: label maps on their own grids, volumes, pictures and a record of each.

    Cases that an earlier start of the same command has finished are left alone. Exit code 1: some
    cases failed, listed in failures.csv.
    """
    from brats_seg.inference.settings import prediction_settings

    if as_json:
        log_to_stderr()
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
        }
    )
    if workers is not None and scheduler is not None:
        msg = "--workers starts processes here, --scheduler uses a cluster that runs: give one"
        raise UsageError(msg)
    cases = _cases(inputs or [], {"t1n": t1n, "t1c": t1c, "t2w": t2w, "t2f": t2f}, case_id)
    n_failed = _predict(cases, model, settings, output, (workers, scheduler), as_json=as_json)
    if n_failed:
        raise typer.Exit(1)


def export(
    runs: Annotated[list[Path], typer.Argument(help="Runs, checkpoints or exported folders.")],
    output: Annotated[Path, typer.Option("-o", "--output", help="Folder to write to.")],
) -> None:
    """Make one folder to hand out: weights, settings, tables and a model card, and no pickle."""
    from brats_seg.inference.export import write_exported
    from brats_seg.inference.model import load_model, read_trained
    from brats_seg.runtime.device import choose_device

    # refuses what does not go together
    fingerprint = load_model(runs, choose_device("cpu", "fp32")).fingerprint
    networks = [network for run in runs for network in read_trained(run)]
    write_exported(networks, fingerprint, output)
    print(f"wrote {len(networks)} networks to {output}, fingerprint {fingerprint}")
    print("Research use only.")


def _predict(
    cases: Sequence["CaseInput"],
    model_paths: Sequence[Path],
    settings: "PredictionSettings",
    output_path: Path,
    cluster: tuple[int | None, str | None],
    *,
    as_json: bool,
) -> int:
    """Return how many cases failed."""
    from brats_seg.inference.batch import check_apart, finish_batch
    from brats_seg.inference.model import load_model
    from brats_seg.inference.output import OutputFolder
    from brats_seg.runtime.device import choose_device

    folder = OutputFolder(output_path)
    check_apart(cases, folder)
    model = load_model(model_paths, choose_device(settings.device, settings.precision))
    with folder.opened():
        endings = _endings(cases, model, model_paths, settings, folder, cluster)
        outcome = finish_batch(
            endings,
            folder,
            len(cases),
            report=_print_json if as_json else print_ending,
            track=tracked,
        )
    if not as_json:
        n_failed = len(outcome.failures)
        print(
            f"{outcome.n_predicted} predicted, {outcome.n_skipped} finished before, {n_failed} "
            f"failed. Results and tables are in {output_path}. Research use only."
        )
    return len(outcome.failures)


def _endings(
    cases: Sequence["CaseInput"],
    model: "Model",
    model_paths: Sequence[Path],
    settings: "PredictionSettings",
    folder: "OutputFolder",
    cluster: tuple[int | None, str | None],
) -> Generator["CaseOutcome"]:
    from brats_seg.inference.batch import CaseWork, local_endings
    from brats_seg.inference.cluster import Job, cluster_endings

    n_workers, scheduler = cluster
    if n_workers is None and scheduler is None:
        work = CaseWork(model=model, settings=settings, output=folder, earlier=folder.records())
        return local_endings(cases, work)
    job = Job(
        model_paths=tuple(path.absolute() for path in model_paths),
        fingerprint=model.fingerprint,
        settings=settings,
        output_path=folder.path.absolute(),
    )
    return cluster_endings(cases, job, n_workers=n_workers, scheduler=scheduler)


def _cases(
    paths: Sequence[Path], files: dict[str, Path | None], case_id: str | None
) -> "tuple[CaseInput, ...]":
    from brats_seg.cases.inputs import find_inputs, single_input

    given = {modality: path for modality, path in files.items() if path is not None}
    if bool(given) == bool(paths):
        msg = "give either INPUTS, or one case by --t1n, --t1c, --t2w and --t2f"
        raise UsageError(msg)
    if paths:
        if case_id is not None:
            msg = "--case-id names the one case of --t1n, --t1c, --t2w and --t2f"
            raise UsageError(msg)
        return find_inputs(paths)
    if missing := [f"--{modality}" for modality in files if modality not in given]:
        msg = f"one case needs four modalities; missing: {', '.join(missing)}"
        raise UsageError(msg)
    return (single_input(case_id, given),)


def log_to_stderr() -> None:
    """Leave the standard output to what machines read."""
    for handler in logging.getLogger("brats_seg").handlers:
        if isinstance(handler, logging.StreamHandler):
            handler.setStream(sys.stderr)


def _numbers(text: str | None) -> list[str] | None:
    return None if text is None else text.split(",")


def _print_json(ending: "CaseOutcome") -> None:
    print(ending.record.model_dump_json(), flush=True)


def print_ending(ending: "CaseOutcome") -> None:
    """Tell what became of a case."""
    record = ending.record
    if record.status == "failed":
        print(f"FAILED  {record.message}", flush=True)
        return
    ml: dict[str, Any] = {part.name: part.ml for part in record.volumes}
    how = f"{record.seconds:.1f} s" if ending.is_new else "finished before"
    print(
        f"{record.case_id}: WT {ml['wt']:.1f} ml, TC {ml['tc']:.1f} ml, ET {ml['et']:.1f} ml "
        f"({how})",
        flush=True,
    )
    for warning in record.warnings:
        print(f"    note: {warning}", flush=True)


def reconstruct(
    run: Annotated[Path, typer.Argument(help="A run of model.name autoencoder.")],
    case: Annotated[
        Path, typer.Argument(help="Folder of a case, or of several, of any layout; or a table.")
    ],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder for the pictures, <case>.png.")
    ] = Path("reconstructions"),
    device: Annotated[str, typer.Option(help="auto, cpu, cuda, cuda:1, mps.")] = "auto",
    precision: Annotated[str, typer.Option(help="auto, fp32, fp16, bf16.")] = "auto",
    as_json: Annotated[
        bool, typer.Option("--json", help="Print a line of JSON for each case.")
    ] = False,
) -> None:
    """PatchKey a case beside its reconstruction, and tell the error of each modality.

    The error is the root mean square inside the brain, in units of the normalised intensity: an
    image without any contrast has an error of 1. Exit code 1: some cases failed.
    """
    from brats_seg.cases.inputs import find_inputs
    from brats_seg.inference.reconstruct import Reconstructor
    from brats_seg.runtime.device import choose_device

    if as_json:
        log_to_stderr()
    reconstructor = Reconstructor.load(run, choose_device(device, precision))
    n_failed = 0
    for case_input in find_inputs([case]):
        made = _attempt(reconstructor, case_input)
        if isinstance(made, str):
            n_failed += 1
            print(f"FAILED  {made}", file=sys.stderr if as_json else sys.stdout)
        else:
            _tell(made, _draw(made, output), as_json=as_json)
    if not as_json:
        print("1 is the error of an image without contrast. Research use only.")
    if n_failed:
        raise typer.Exit(1)


def _attempt(reconstructor: "Reconstructor", case_input: "CaseInput") -> "Reconstruction | str":
    """Return what became of a case, or why nothing did."""
    from brats_seg.inference.scan import read_scan

    if case_input.case.problems:
        return "; ".join(case_input.case.problems)
    try:
        return reconstructor.reconstruct(read_scan(case_input, reconstructor.spacing_mm))
    except CaseError as error:
        return str(error)


def _draw(made: "Reconstruction", folder: Path) -> Path:
    from brats_seg.report.case_figures import reconstruction_figure
    from brats_seg.report.style import write_figure

    path = folder / f"{made.case_id}.png"
    figure = reconstruction_figure(made.image, made.reconstruction, case_id=made.case_id)
    write_figure(figure, path)
    return path


def _tell(made: "Reconstruction", picture: Path, *, as_json: bool) -> None:
    from brats_seg.labels import MODALITIES

    errors = dict(zip(MODALITIES, made.rmse, strict=True))
    mean = sum(errors.values()) / len(errors)
    if as_json:
        record = {"case_id": made.case_id, "rmse": errors, "mean_rmse": mean}
        print(json.dumps({**record, "picture": str(picture), "warnings": made.warnings}))
        return
    parts = ", ".join(f"{modality} {error:.3f}" for modality, error in errors.items())
    print(f"{made.case_id}: error {mean:.3f} in the brain ({parts}), {picture}")
    for warning in made.warnings:
        print(f"    note: {warning}")
