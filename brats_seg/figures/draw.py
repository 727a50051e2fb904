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
from brats_seg.figures import cases, charts
from brats_seg.figures.sections import check_suffix, write_figure
from brats_seg.progress import tracked


def draw(kind: str, source: Path, output: Path, **options: Any) -> None:
    """Draw a figure and write it, in the format that the suffix of the output names.

    Args:
        kind: One of `FIGURES`.
        source: Folder of scans, table of scores or folder of a run, by the kind.
        output: A `.png`, `.svg` or `.pdf`.
        options: Options by name, without those that are None: `prediction`, `case`, `column`,
            `modality`, `convention` and `clinical`, as far as the function of the kind has them.
    """
    function, known = FIGURES[kind]
    given = {name: value for name, value in options.items() if value is not None}
    if unknown := [f"--{name}" for name in given if name not in known]:
        has = ", ".join(f"--{name}" for name in known) or "none"
        msg = f"figure {kind} has no option {', '.join(unknown)}; it has {has}"
        raise UsageError(msg)
    check_suffix(output)
    drawn: Any = source
    if "case" in known:
        drawn = _view(kind, source, **{name: given.pop(name, None) for name in _CASE})
    write_figure(function(drawn, **given), output)


def _view(
    kind: str, source: Path, prediction: Path | None, case: str | None, convention: str | None
) -> cases.CaseView:
    """Open a case with what a figure of that kind shows."""
    view = cases.open_view(source, case, labels=convention)
    if prediction is not None:
        # the reference and the prediction need not have one label convention
        view = cases.with_prediction(view, prediction)
    if kind != "uncertainty":
        return view
    if prediction is None:
        msg = "figure uncertainty needs --prediction: a folder that predict --uncertainty wrote"
        raise UsageError(msg)
    return cases.with_uncertainty(view, prediction if prediction.is_dir() else prediction.parent)


def _distributions(
    source: Path, clinical: Sequence[Path] = (), convention: str | None = None
) -> Figure:
    table = read_clinical_tables(source, clinical)
    index = index_cases(source, labels=convention, n_workers=available_cpus(), track=tracked)
    return charts.cohort_figure(with_clinical(index.cases, table), table)


_CASE = ("prediction", "case", "convention")
FIGURES: Mapping[str, tuple[Callable[..., Figure], tuple[str, ...]]] = {
    "sample": (cases.sample_figure, ("case", "convention")),
    "montage": (cases.montage_figure, (*_CASE, "modality")),
    "preview": (cases.view_figure, _CASE),
    "uncertainty": (cases.uncertainty_figure, _CASE),
    "scores": (lambda source, **kw: charts.score_figure(read_scores(source), **kw), ("column",)),
    "distributions": (_distributions, ("clinical", "convention")),
    "history": (lambda source: charts.history_figure(charts.read_history(source)), ()),
}
"""Function that draws each kind of figure from a case or from its source, and the options it has."""
