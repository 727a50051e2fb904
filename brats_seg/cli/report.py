"""Command `report`: pages that a browser opens without a network."""

from pathlib import Path
from typing import Annotated

import typer

from brats_seg.cli.options import (
    DeviceOption,
    JsonOption,
    LabelsOption,
    PrecisionOption,
    importing,
    prepared_path,
    print_json,
)
from brats_seg.cpu_threads import available_cpus
from brats_seg.progress import tracked

_RUN = "Page of a run"


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `predict` wrote, or of scans, or tables of paths; or runs."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder for the pages, or one page.html. (default: reports/ in the folder of the "
            "predictions, or else here; cohort.html beside it; report.html in a run)",
        ),
    ] = None,
    prediction: Annotated[
        Path | None,
        typer.Option(help="Predictions for scans: a folder that `predict` wrote, or a label map."),
    ] = None,
    reference: Annotated[
        Path | None,
        typer.Option(help="Label maps to compare with. (default: those beside the scans)"),
    ] = None,
    case: Annotated[
        list[str] | None,
        typer.Option("--case", help="Id of a case; may be repeated. (default: all)"),
    ] = None,
    labels: LabelsOption = None,
    cases: Annotated[
        bool, typer.Option(help="Write a page of each case, beside that of all predictions.")
    ] = True,
    scores: Annotated[
        Path | None,
        typer.Option(
            help="Table of `evaluate` for the page of all predictions, instead of --reference."
        ),
    ] = None,
    data: Annotated[
        Path | None,
        typer.Option(
            rich_help_panel=_RUN,
            help="Scans that the run was trained on: its held-out cases are predicted and scored.",
        ),
    ] = None,
    prepared: Annotated[
        Path | None,
        typer.Option(rich_help_panel=_RUN, help="The same by the folder of prepared cases."),
    ] = None,
    device: DeviceOption = "auto",
    precision: PrecisionOption = "auto",
    as_json: JsonOption = False,
) -> None:
    """Write pages for a browser: of each case, of all predictions, or of a run.

    The page of a case has viewer, volumes, lesions, warnings and origin; that of a folder of
    predictions a table of its cases, the worst first; that of a run its history and its held-out
    cases. A page is one file, opens by a double click, and needs no network. Exit code 1: some cases
    have no page.
    """
    with importing():
        from brats_seg.pages.case_pages import PageSettings
        from brats_seg.pages.report import ReportSettings, write_report

    pages = PageSettings(
        output=output,
        prediction=prediction,
        reference=reference,
        case_ids=tuple(case or ()),
        labels=labels or "",
    )
    settings = ReportSettings(
        pages=pages,
        with_cases=cases,
        scores=scores,
        prepared=prepared_path(data, prepared) if data or prepared else None,
        device=device,
        precision=precision,
    )
    written = write_report(inputs, settings, n_workers=available_cpus(), track=tracked)
    if as_json:
        from brats_seg.json_results import WrittenPages

        print_json(WrittenPages(pages=written.results, failures=written.failures))
    for failure in written.failures:
        print(f"FAILED  {failure.message}")
    by_folder: dict[Path, list[Path]] = {}
    for page in written.results:
        by_folder.setdefault(page.parent, []).append(page)
    for folder, own in by_folder.items():
        print(f"wrote {own[0]}" if len(own) == 1 else f"wrote {len(own)} pages to {folder}")
    print("Research use only.")
    if written.failures:
        raise typer.Exit(1)
