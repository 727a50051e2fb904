"""Commands that draw: one kind of picture each."""

import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from typer.core import TyperGroup

from brats_seg.cli.options import LabelsOption
from brats_seg.errors import UsageError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

    from brats_seg.report.case_view import CaseView


def _checked(output: Path) -> Path:
    """Refuse a name before the work begins."""
    from brats_seg.report.style import check_suffix

    check_suffix(output)
    return output


def _checked_gif(output: Path) -> Path:
    return output if output.suffix.lower() == ".gif" else _checked(output)


OutputOption = Annotated[
    Path,
    typer.Option(
        "-o", "--output", help="The picture: a name in .png, .svg or .pdf.", callback=_checked
    ),
]
DataArgument = Annotated[Path, typer.Argument(help="Folder of scans, of any layout.")]
CaseOption = Annotated[str | None, typer.Option("--case", help="Which. (default: the first)")]
PredictionOption = Annotated[
    Path | None, typer.Option(help="A label map, or a folder of <case>.nii.gz.")
]
ScoresArgument = Annotated[Path, typer.Argument(help="The table that `evaluate` wrote.")]


class _Kinds(TyperGroup):
    """Lists the kinds when one is asked for that there is not."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        if args[0] not in self.commands:
            msg = f"there is no kind of figure {args[0]!r}; there are {', '.join(self.commands)}"
            raise UsageError(msg)
        return super().resolve_command(ctx, args)


app = typer.Typer(
    cls=_Kinds, no_args_is_help=True, help="PatchKey a case, scores, a cohort or a run."
)


@app.command()
def sample(
    data: DataArgument, output: OutputOption, case: CaseOption = None, labels: LabelsOption = None
) -> None:
    """PatchKey the four modalities of a case, and its label map with a legend."""
    from brats_seg.report.case_figures import sample_figure
    from brats_seg.report.case_view import open_view

    _write(sample_figure(open_view(data, case, labels=labels)), output)


@app.command()
def montage(
    data: DataArgument,
    output: OutputOption,
    prediction: PredictionOption = None,
    case: CaseOption = None,
    modality: Annotated[str, typer.Option(help="t1n, t1c, t2w or t2f.")] = "t2f",
    labels: LabelsOption = None,
) -> None:
    """PatchKey sections through the tumour, reference and prediction side by side."""
    from brats_seg.report.case_figures import montage_figure

    _write(montage_figure(_view(data, case, prediction, labels), modality=modality), output)


@app.command()
def preview(
    data: DataArgument,
    output: OutputOption,
    prediction: PredictionOption = None,
    case: CaseOption = None,
    labels: LabelsOption = None,
) -> None:
    """PatchKey three planes through the tumour of the prediction, or else of the reference."""
    from brats_seg.report.case_figures import view_figure

    _write(view_figure(_view(data, case, prediction, labels)), output)


@app.command()
def surface(
    data: DataArgument,
    output: Annotated[
        Path,
        typer.Option(
            "-o",
            "--output",
            help="A turning .gif, or a .png, .svg or .pdf.",
            callback=_checked_gif,
        ),
    ],
    prediction: PredictionOption = None,
    case: CaseOption = None,
    azimuth: Annotated[
        float, typer.Option(help="Degrees from the patient's front to the left; not for a GIF.")
    ] = 30.0,
    labels: LabelsOption = None,
) -> None:
    """PatchKey the regions in space, reference and prediction side by side."""
    from brats_seg.report.surface import models_of, surface_figure, write_surface_gif

    models = models_of(_view(data, case, prediction, labels))
    if output.suffix.lower() == ".gif":
        write_surface_gif(models, output)
        print(f"wrote {output}. Research use only.")
    else:
        _write(surface_figure(models, azimuth_degrees=azimuth), output)


@app.command()
def scores(
    table: ScoresArgument,
    output: OutputOption,
    column: Annotated[str, typer.Option(help="Which score: a column of the table.")] = "dice",
) -> None:
    """PatchKey a score of every case, with a box for each region."""
    from brats_seg.evaluation.scores import read_scores
    from brats_seg.report.charts import score_figure

    _write(score_figure(read_scores(table), column=column), output)


@app.command()
def bars(table: ScoresArgument, output: OutputOption) -> None:
    """PatchKey the mean Dice and Jaccard of each region."""
    from brats_seg.evaluation.scores import read_scores
    from brats_seg.report.charts import bar_figure

    _write(bar_figure(read_scores(table)), output)


@app.command()
def distributions(
    data: DataArgument,
    output: OutputOption,
    table: Annotated[
        list[Path] | None,
        typer.Option(help="Table of ages and survival, besides those below DATA; may be repeated."),
    ] = None,
    labels: LabelsOption = None,
) -> None:
    """PatchKey how age, survival and tumour volume are distributed over the cases of a folder."""
    from brats_seg.cases.clinical import read_clinical_tables, with_clinical
    from brats_seg.cases.index import index_cases
    from brats_seg.progress import tracked
    from brats_seg.report.charts import cohort_figure

    known = read_clinical_tables(data, table or ())
    found = index_cases(data, labels=labels, n_workers=os.cpu_count() or 1, track=tracked)
    _write(cohort_figure(with_clinical(found.cases, known), known), output)


@app.command()
def history(
    run: Annotated[Path, typer.Argument(help="Folder of a run.")], output: OutputOption
) -> None:
    """PatchKey what every epoch of a run measured."""
    from brats_seg.report.history import history_figure
    from brats_seg.training.history import read_history

    _write(history_figure(read_history(run)), output)


def _view(data: Path, case: str | None, prediction: Path | None, labels: str | None) -> "CaseView":
    from brats_seg.report.case_view import open_view, with_prediction

    view = open_view(data, case, labels=labels)
    # the convention of the scans is not that of what a network wrote
    return view if prediction is None else with_prediction(view, prediction)


def _write(figure: "Figure", output: Path) -> None:
    from brats_seg.report.style import write_figure

    write_figure(figure, output)
    print(f"wrote {output}. Research use only.")
