"""Commands `figure ...`, one for each kind of figure."""

from pathlib import Path
from typing import Annotated, Any

import typer

from brats_seg.cli.options import Command, Commands, JsonOption, LabelsOption, one_of, print_json
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError

OutputOption = Annotated[
    Path, typer.Option("-o", "--output", help="Picture to write: .png, .svg or .pdf.")
]
DataArgument = Annotated[Path, typer.Argument(help="Folder of scans, of any layout.")]
CaseOption = Annotated[
    str | None, typer.Option("--case", help="Id of the case. (default: the first)")
]
PredictionOption = Annotated[
    Path | None, typer.Option(help="A label map, or a folder of CASE.nii.gz.")
]
ScoresArgument = Annotated[Path, typer.Argument(help="Table that `evaluate` wrote.")]


class _Kinds(Commands):
    """Group of commands whose error for an unknown kind of figure lists the known ones."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            msg = f"there is no kind of figure {args[0]!r}; there are {', '.join(self.commands)}"
            raise UsageError(msg)
        return super().resolve_command(ctx, args)


app = typer.Typer(cls=_Kinds, no_args_is_help=True, help="Draw a case, scores, a cohort or a run.")


@app.command(cls=Command)
def sample(
    data: DataArgument,
    output: OutputOption,
    case: CaseOption = None,
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the four modalities of a case, and its label map with a legend."""
    from brats_seg.figures.draw import draw_sample

    draw_sample(data, output, case_id=case, labels=labels)
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def montage(
    data: DataArgument,
    output: OutputOption,
    prediction: PredictionOption = None,
    case: CaseOption = None,
    modality: Annotated[
        str,
        typer.Option(
            autocompletion=one_of("t1n", "t1c", "t2w", "t2f"),
            help="Modality to draw: t1n, t1c, t2w or t2f; also t1, t1ce, t2 or flair.",
        ),
    ] = "t2f",
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw sections through the tumour, reference and prediction side by side."""
    from brats_seg.figures.draw import draw_montage

    draw_montage(
        data, output, prediction=prediction, case_id=case, modality=modality, labels=labels
    )
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def preview(
    data: DataArgument,
    output: OutputOption,
    prediction: PredictionOption = None,
    case: CaseOption = None,
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw three planes through the tumour of the prediction, or else of the reference."""
    from brats_seg.figures.draw import draw_preview

    draw_preview(data, output, prediction=prediction, case_id=case, labels=labels)
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def uncertainty(
    data: DataArgument,
    output: OutputOption,
    prediction: Annotated[
        Path, typer.Option(help="Folder that `predict --uncertainty` wrote, or a label map in it.")
    ],
    entropy: Annotated[
        Path | None, typer.Option(help="Map of entropy. (default: that of the folder)")
    ] = None,
    case: CaseOption = None,
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw where a prediction is uncertain, in three planes."""
    from brats_seg.figures.draw import draw_uncertainty

    draw_uncertainty(
        data, output, prediction=prediction, entropy=entropy, case_id=case, labels=labels
    )
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def surface(
    data: DataArgument,
    output: Annotated[
        Path,
        typer.Option(
            "-o", "--output", help="Picture to write: a turning .gif, or .png, .svg or .pdf."
        ),
    ],
    prediction: PredictionOption = None,
    case: CaseOption = None,
    azimuth: Annotated[
        float,
        typer.Option(
            help="Viewpoint, in degrees from the patient's front to the left; not for a GIF."
        ),
    ] = 30.0,
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw the regions in space, reference and prediction side by side."""
    from brats_seg.figures.draw import draw_surface

    draw_surface(
        data, output, prediction=prediction, case_id=case, azimuth_degrees=azimuth, labels=labels
    )
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def scores(
    table: ScoresArgument,
    output: OutputOption,
    column: Annotated[str, typer.Option(help="Score to draw: a column of the table.")] = "dice",
    as_json: JsonOption = False,
) -> None:
    """Draw a score of every case, with a box for each region."""
    from brats_seg.figures.draw import draw_scores

    draw_scores(table, output, column=column)
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def bars(
    table: ScoresArgument,
    output: OutputOption,
    as_json: JsonOption = False,
) -> None:
    """Draw the mean Dice and Jaccard of each region."""
    from brats_seg.figures.draw import draw_bars

    draw_bars(table, output)
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def distributions(
    data: DataArgument,
    output: OutputOption,
    table: Annotated[
        list[Path] | None,
        typer.Option(help="Table of ages and survival, besides those below DATA; may be repeated."),
    ] = None,
    labels: LabelsOption = None,
    as_json: JsonOption = False,
) -> None:
    """Draw how age, survival and tumour volume are distributed over the cases of a folder."""
    from brats_seg.figures.draw import draw_distributions
    from brats_seg.progress import tracked

    n_workers = available_cpus()
    draw_distributions(
        data, output, tables=table or (), labels=labels, n_workers=n_workers, track=tracked
    )
    _print_written(output, as_json=as_json)


@app.command(cls=Command)
def history(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")],
    output: OutputOption,
    as_json: JsonOption = False,
) -> None:
    """Draw the history of a run: loss and scores of every epoch."""
    from brats_seg.figures.history import history_figure
    from brats_seg.figures.style import write_figure
    from brats_seg.training.history import read_history

    write_figure(history_figure(read_history(run)), output)
    _print_written(output, as_json=as_json)


def _print_written(output: Path, *, as_json: bool) -> None:
    if as_json:
        from brats_seg.json_results import WrittenFile

        print_json(WrittenFile(path=output))
    print(f"wrote {output}. Research use only.")
