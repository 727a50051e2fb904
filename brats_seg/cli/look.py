"""Commands `figure` and `report`: figures, and pages that a browser opens without a network."""

from pathlib import Path

import typer

from brats_seg.cli.options import emit, importing, prepared_path
from brats_seg.cpu_threads import available_cpus
from brats_seg.progress import tracked


def figure(
    kind: str,
    source: Path,
    output: Path,
    prediction: Path | None = None,
    case: str | None = None,
    column: str | None = None,
    modality: str | None = None,
    labels: str | None = None,
    clinical: list[Path] | None = None,
) -> None:
    """Draw a case, scores, the distributions of a cohort, or the history of a run.

    sample: the modalities and the label map of a case. montage, preview, surface: the outlines of
    reference and prediction in sections, in three planes, in space. uncertainty: where a prediction
    is uncertain. scores, bars: the scores of every case, their means. distributions: age, survival
    and tumour volume. history: loss and scores of every epoch.
    """
    from brats_seg.figures.draw import draw

    draw(
        kind,
        source,
        output,
        prediction=prediction,
        case=case,
        column=column,
        modality=modality,
        labels=labels,
        clinical=clinical or None,
    )
    emit(path=output)
    print(f"wrote {output}. Research use only.")


def report(
    results: list[Path],
    output: Path | None = None,
    prediction: Path | None = None,
    reference: Path | None = None,
    case: list[str] | None = None,
    no_case_pages: bool = False,
    scores: Path | None = None,
    data: Path | None = None,
    prepared: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> None:
    """Write pages for a browser: of each case, of all predictions, or of a run.

    The page of a case has viewer, volumes, lesions, warnings and origin; that of a folder of
    predictions a table of its cases, the worst first; that of a run its history and its held-out
    cases. A page is one self-contained HTML file. Exit code 1: some cases have no page.
    """
    with importing():
        from brats_seg.pages.write import PageOptions, write_report

    options = PageOptions(
        output=output,
        prediction=prediction,
        reference=reference,
        case_ids=tuple(case or ()),
        with_cases=not no_case_pages,
        scores=scores,
        prepared=prepared_path(data, prepared) if data or prepared else None,
        device=device,
        precision=precision,
    )
    written = write_report(results, options, n_workers=available_cpus(), track=tracked)
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
