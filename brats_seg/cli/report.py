"""Command `report`: pages that a browser opens without a network."""

from pathlib import Path
from typing import Annotated

import typer

from brats_seg.cli.options import JsonOption, LabelsOption, print_json
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import counted
from brats_seg.progress import tracked


def report(
    inputs: Annotated[
        list[Path],
        typer.Argument(
            help="Folders that `predict` wrote, or folders of scans, or tables of paths."
        ),
    ],
    output: Annotated[
        Path | None,
        typer.Option(
            "-o",
            "--output",
            help="Folder for the pages, or one page.html. (default: reports/ in the folder of the "
            "predictions, or else here)",
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
    as_json: JsonOption = False,
) -> None:
    """Write a page of each case: viewer, volumes, lesions, warnings, origin; one HTML file.

    A page opens by a double click and needs no network. Exit code 1: some cases have no page.
    """
    from brats_seg.inference.case_pages import PageSettings, write_case_pages

    settings = PageSettings(
        output=output,
        prediction=prediction,
        reference=reference,
        case_ids=tuple(case or ()),
        labels=labels or "",
    )
    written = write_case_pages(inputs, settings, n_workers=available_cpus(), track=tracked)
    if as_json:
        from brats_seg.json_results import WrittenPages

        print_json(WrittenPages(pages=written.results, failures=written.failures))
    for failure in written.failures:
        print(f"FAILED  {failure.message}")
    pages = written.results
    if len(pages) == 1:
        print(f"wrote {pages[0]}")
    elif pages:
        print(f"wrote {counted(len(pages), 'page')} to {pages[0].parent}")
    print("Research use only.")
    if written.failures:
        raise typer.Exit(1)
