"""Commands `figure` and `report`: figures, and pages that a browser opens without a network."""

from pathlib import Path
from typing import Annotated

import typer

from brats_seg.cli.options import (
    ClinicalOption,
    DeviceOption,
    LabelsOption,
    PrecisionOption,
    emit,
    importing,
    one_of,
    prepared_path,
)
from brats_seg.cpu_threads import available_cpus
from brats_seg.progress import tracked

_KINDS = (
    *("sample", "montage", "preview", "uncertainty", "surface"),
    *("scores", "bars", "distributions", "history"),
)
_RUN = "Page of a run"


def figure(
    kind: Annotated[
        str, typer.Argument(autocompletion=one_of(*_KINDS), help=f"Kind: {', '.join(_KINDS)}.")
    ],
    source: Annotated[
        Path,
        typer.Argument(
            help="Folder of scans; for scores and bars the table that `evaluate` wrote; for history a run."
        ),
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Picture to write: .png, .svg or .pdf; for surface also .gif."
        ),
    ],
    prediction: Annotated[
        Path | None, typer.Option(help="A label map, or a folder that `predict` wrote.")
    ] = None,
    case: Annotated[str | None, typer.Option(help="Id of the case. (default: the first)")] = None,
    column: Annotated[str, typer.Option(help="Score to draw: a column of the table.")] = "dice",
    modality: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("t1n", "t1c", "t2w", "t2f"),
            help="Modality of a montage: t1n, t1c, t2w or t2f.",
        ),
    ] = "t2f",
    labels: LabelsOption = None,
    clinical: ClinicalOption = None,
) -> None:
    """Draw a case, scores, the distributions of a cohort, or the history of a run.

    sample: the modalities and the label map of a case. montage, preview, surface: the outlines of
    reference and prediction in sections, in three planes, in space. uncertainty: where a prediction
    is uncertain. scores, bars: the scores of every case, their means. distributions: age, survival
    and tumour volume. history: loss and scores of every epoch.
    """
    from brats_seg.figures.draw import FigureOptions, draw

    if kind == "history":
        _draw_history(source, output)
    else:
        options = FigureOptions(
            prediction=prediction,
            case_id=case,
            column=column,
            modality=modality,
            labels=labels,
            clinical=tuple(clinical or ()),
            n_workers=available_cpus(),
            track=tracked,
        )
        draw(kind, source, output, options)
    emit(path=output)
    print(f"wrote {output}. Research use only.")


def _draw_history(run: Path, output: Path) -> None:
    from brats_seg.figures.history import history_figure
    from brats_seg.figures.style import write_figure
    from brats_seg.training.history import read_history

    write_figure(history_figure(read_history(run)), output)


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
        list[str] | None, typer.Option(help="Id of a case; may be repeated. (default: all)")
    ] = None,
    no_case_pages: Annotated[
        bool, typer.Option("--no-case-pages", help="Write the page of all predictions alone.")
    ] = False,
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
) -> None:
    """Write pages for a browser: of each case, of all predictions, or of a run.

    The page of a case has viewer, volumes, lesions, warnings and origin; that of a folder of
    predictions a table of its cases, the worst first; that of a run its history and its held-out
    cases. A page is one self-contained HTML file. Exit code 1: some cases have no page.
    """
    with importing():
        from brats_seg.pages.case_pages import PageSettings
        from brats_seg.pages.report import ReportSettings, write_report

    pages = PageSettings(
        output=output, prediction=prediction, reference=reference, case_ids=tuple(case or ())
    )
    settings = ReportSettings(
        pages=pages,
        with_cases=not no_case_pages,
        scores=scores,
        prepared=prepared_path(data, prepared) if data or prepared else None,
        device=device,
        precision=precision,
    )
    written = write_report(inputs, settings, n_workers=available_cpus(), track=tracked)
    emit(pages=written.results, failures=written.failures)
    for failure in written.failures:
        print(f"FAILED  {failure.message}")
    by_folder: dict[Path, list[Path]] = {}
    for page in written.results:
        by_folder.setdefault(page.parent, []).append(page)
    for folder, paths in by_folder.items():
        print(f"wrote {paths[0]}" if len(paths) == 1 else f"wrote {len(paths)} pages to {folder}")
    print("Research use only.")
    if written.failures:
        raise typer.Exit(1)
