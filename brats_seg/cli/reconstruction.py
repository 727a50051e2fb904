"""The command that shows what an autoencoder makes of cases."""

import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.prediction import log_to_stderr
from brats_seg.errors import CaseError

if TYPE_CHECKING:
    from brats_seg.inference.inputs import CaseInput
    from brats_seg.inference.reconstruction import Reconstruction, Reconstructor


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
    """Draw a case beside its reconstruction, and tell the error of each modality.

    The error is the root mean square inside the brain, in units of the normalised intensity: an
    image without any contrast has an error of 1. Exit code 1: some cases failed.
    """
    from brats_seg.inference.inputs import find_inputs
    from brats_seg.inference.reconstruction import Reconstructor
    from brats_seg.models.device import choose_device

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
    from brats_seg.report.reconstruction import reconstruction_figure
    from brats_seg.report.saving import write_figure

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
