"""Read cases or scores from files and draw a figure of them, as the command `figure` does.

The functions of `figures.cases`, `charts` and `surface` return figures instead, for example to show
them in a notebook.
"""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from matplotlib.figure import Figure

from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.index import index_cases
from brats_seg.errors import UsageError
from brats_seg.evaluation.scores import read_scores
from brats_seg.figures.cases import (
    montage_figure,
    sample_figure,
    uncertainty_figure,
    view_figure,
)
from brats_seg.figures.charts import bar_figure, cohort_figure, score_figure
from brats_seg.figures.style import check_suffix, write_figure
from brats_seg.figures.surface import models_of, surface_figure, write_surface_gif
from brats_seg.figures.view import CaseView, open_view, with_prediction, with_uncertainty
from brats_seg.progress import Track, untracked


@dataclass(frozen=True, kw_only=True, slots=True)
class FigureOptions:
    """Options of a figure; each kind uses some of them."""

    prediction: Path | None = None
    """A label map, or a folder that `predict` wrote."""
    case_id: str | None = None
    """Id of the case; None for the first by name."""
    column: str = "dice"
    """Score to draw."""
    modality: str = "t2f"
    """Modality of a montage."""
    labels: str | None = None
    """Name of the label convention; None to detect it."""
    clinical: tuple[Path, ...] = ()
    """Tables of ages and survival, besides those among the scans."""
    n_workers: int = 0
    """Processes that read cases; 0 works in this one."""
    track: Track = untracked


DEFAULT_OPTIONS = FigureOptions()


def draw(kind: str, source: Path, output: Path, options: FigureOptions = DEFAULT_OPTIONS) -> None:
    """Draw a figure of a kind in `FIGURES`; a surface may also be a turning GIF.

    Args:
        kind: A name in `FIGURES`.
        source: Folder of scans, or the table of scores for `scores` and `bars`.
        output: The figure: .png, .svg or .pdf, or .gif for `surface`.
        options: Options of the figure.

    Raises:
        UsageError: The kind, the suffix or a case is unknown, or an option is missing.
        CaseError: The case cannot be used.
        EnvironmentalError: The figure cannot be written.
    """
    if kind not in FIGURES:
        msg = f"there is no kind of figure {kind!r}; there are {', '.join(FIGURES)}"
        raise UsageError(msg)
    if kind == "surface" and output.suffix.lower() == ".gif":
        write_surface_gif(models_of(_view(source, options)), output)
        return
    check_suffix(output)
    write_figure(FIGURES[kind](source, options), output)


def _view(data: Path, options: FigureOptions) -> CaseView:
    view = open_view(data, options.case_id, labels=options.labels)
    # the reference and the prediction need not have one label convention
    return view if options.prediction is None else with_prediction(view, options.prediction)


def _uncertainty(data: Path, options: FigureOptions) -> Figure:
    prediction = options.prediction
    if prediction is None:
        msg = "the figure needs --prediction, a folder that `predict --uncertainty` wrote"
        raise UsageError(msg)
    folder = prediction if prediction.is_dir() else prediction.parent
    return uncertainty_figure(with_uncertainty(_view(data, options), folder))


def _distributions(data: Path, options: FigureOptions) -> Figure:
    known = read_clinical_tables(data, options.clinical)
    index = index_cases(
        data, labels=options.labels, n_workers=options.n_workers, track=options.track
    )
    return cohort_figure(with_clinical(index.cases, known), known)


FIGURES: dict[str, Callable[[Path, FigureOptions], Figure]] = {
    "sample": lambda data, options: sample_figure(_view(data, options)),
    "montage": lambda data, options: montage_figure(
        _view(data, options), modality=options.modality
    ),
    "preview": lambda data, options: view_figure(_view(data, options)),
    "uncertainty": _uncertainty,
    "surface": lambda data, options: surface_figure(models_of(_view(data, options))),
    "scores": lambda table, options: score_figure(read_scores(table), column=options.column),
    "bars": lambda table, _: bar_figure(read_scores(table)),
    "distributions": _distributions,
}
"""Kinds of figures: the function that draws each from its source."""
