"""Command `figure`."""

from pathlib import Path
from typing import Annotated

import typer

from brats_seg.cli.options import JsonOption, LabelsOption, importing, one_of, print_json

_KINDS = one_of(
    *("sample", "montage", "preview", "uncertainty", "surface"),
    *("scores", "bars", "distributions", "history"),
)


def figure(
    kind: Annotated[
        str,
        typer.Argument(
            autocompletion=_KINDS,
            help="Of a case: sample, montage, preview, uncertainty or surface; of a table of scores: "
            "scores or bars; of a folder of scans: distributions; of a run: history.",
        ),
    ],
    source: Annotated[
        Path, typer.Argument(help="Folder of scans, table that `evaluate` wrote, or run.")
    ],
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="Picture to write: .png, .svg or .pdf; a surface turns in a .gif.",
        ),
    ],
    prediction: Annotated[
        Path | None, typer.Option(help="A label map, or a folder of CASE.nii.gz.")
    ] = None,
    case: Annotated[
        str | None, typer.Option("--case", help="Id of the case. (default: the first)")
    ] = None,
    modality: Annotated[
        str | None,
        typer.Option(
            autocompletion=one_of("t1n", "t1c", "t2w", "t2f"),
            help="Modality of a montage: t1n, t1c, t2w or t2f; also t1, t1ce, t2 or flair.",
        ),
    ] = None,
    column: Annotated[
        str | None, typer.Option(help="Score to draw: a column of the table. (default: dice)")
    ] = None,
    clinical: Annotated[
        list[Path] | None,
        typer.Option(
            help="Table of ages and survival, besides those below SOURCE; may be repeated."
        ),
    ] = None,
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw a case, scores, a cohort or a run.

    `sample` has the modalities and the label map of a case, `montage` sections through the tumour,
    reference and prediction side by side, `preview` three planes, `uncertainty` where a prediction is
    uncertain, `surface` the regions in space.
    """
    with importing():
        from brats_seg.figures.draw import draw

    draw(
        kind,
        source,
        output,
        prediction=prediction,
        case=case,
        modality=modality,
        column=column,
        clinical=clinical or None,
        labels=labels,
    )
    if as_json:
        from brats_seg.json_results import WrittenFile

        print_json(WrittenFile(path=output))
    print(f"wrote {output}. Research use only.")
