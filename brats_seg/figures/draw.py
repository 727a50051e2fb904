"""Draw the figure that the command `figure KIND SOURCE` is asked for, and write it."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.index import index_cases
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError
from brats_seg.evaluation.scores import read_scores
from brats_seg.figures import charts
from brats_seg.figures.cases import montage_figure, sample_figure, uncertainty_figure, view_figure
from brats_seg.figures.sections import check_suffix, write_figure
from brats_seg.figures.surface import models_of, surface_figure, write_surface_gif
from brats_seg.figures.view import CaseView, open_view, with_prediction, with_uncertainty
from brats_seg.progress import tracked

_AZIMUTH_DEGREES = 30.0


def draw(kind: str, source: Path, output: Path, **options: Any) -> None:
    """Draw a figure and write it, in the format that the suffix of the output names.

    Args:
        kind: One of `FIGURES`.
        source: Folder of scans, table of scores or folder of a run, by the kind.
        output: A `.png`, `.svg` or `.pdf`; of surfaces also a `.gif`, which turns.
        options: Options by name, without those that are None: `prediction`, `case`, `column`,
            `modality`, `labels` and `clinical`, as far as the function of the kind has them.

    Raises:
        UsageError: The kind, the suffix or an option is unknown, or the source does not fit.
        CaseError: The case cannot be used.
        EnvironmentalError: The figure cannot be written.
    """
    if kind not in FIGURES:
        msg = f"there is no kind of figure {kind!r}; there are {', '.join(FIGURES)}"
        raise UsageError(msg)
    function, known = FIGURES[kind]
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := [f"--{name}" for name in given if name not in known]:
        has = ", ".join(f"--{name}" for name in known) or "none"
        msg = f"figure {kind} has no option {', '.join(unknown)}; it has {has}"
        raise UsageError(msg)
    if kind == "surface" and output.suffix.lower() == ".gif":
        write_surface_gif(models_of(_view(source, **given)), output)
        return
    check_suffix(output)
    write_figure(function(source, **given), output)


def _view(
    source: Path, prediction: Path | None = None, case: str | None = None, labels: str | None = None
) -> CaseView:
    view = open_view(source, case, labels=labels)
    # the reference and the prediction need not have one label convention
    return view if prediction is None else with_prediction(view, prediction)


def _montage(source: Path, modality: str = "t2f", **case: Any) -> Figure:
    return montage_figure(_view(source, **case), modality=modality)


def _uncertainty(source: Path, prediction: Path | None = None, **case: Any) -> Figure:
    if prediction is None:
        msg = "figure uncertainty needs --prediction: a folder that predict --uncertainty wrote"
        raise UsageError(msg)
    folder = prediction if prediction.is_dir() else prediction.parent
    return uncertainty_figure(with_uncertainty(_view(source, prediction, **case), folder))


def _surface(source: Path, **case: Any) -> Figure:
    return surface_figure(models_of(_view(source, **case)), azimuth_degrees=_AZIMUTH_DEGREES)


def _distributions(
    source: Path, clinical: Sequence[Path] = (), labels: str | None = None
) -> Figure:
    table = read_clinical_tables(source, clinical)
    index = index_cases(source, labels=labels, n_workers=available_cpus(), track=tracked)
    return charts.cohort_figure(with_clinical(index.cases, table), table)


_CASE = ("prediction", "case", "labels")
FIGURES: Mapping[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
    "sample": (lambda source, **case: sample_figure(_view(source, **case)), ("case", "labels")),
    "montage": (_montage, (*_CASE, "modality")),
    "preview": (lambda source, **case: view_figure(_view(source, **case)), _CASE),
    "uncertainty": (_uncertainty, _CASE),
    "surface": (_surface, _CASE),
    "scores": (lambda source, **one: charts.score_figure(read_scores(source), **one), ("column",)),
    "bars": (lambda source: charts.bar_figure(read_scores(source)), ()),
    "distributions": (_distributions, ("clinical", "labels")),
    "history": (lambda source: charts.history_figure(charts.read_history(source)), ()),
}
"""Function that draws each kind of figure from its source, and the options that it has."""
