"""Read cases or scores from files and write figures of them, as the command `figure` does.

The suffix of the output decides the format: PNG, SVG or PDF. The functions of `case_figures`,
`charts` and `surface` return figures instead, for example to show them in a notebook.
"""

from collections.abc import Sequence
from pathlib import Path

from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.index import index_cases
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


def draw_sample(
    data: Path, output: Path, *, case_id: str | None = None, labels: str | None = None
) -> None:
    """Draw the four modalities of a case, and its label map with a legend.

    Args:
        data: Folder of scans, of any layout.
        output: The figure.
        case_id: Id of the case; None for the first by name.
        labels: Name of the label convention; None to infer it.

    Raises:
        UsageError: The suffix of the figure is unknown, or the folder does not hold the case.
        CaseError: The case cannot be used.
        EnvironmentalError: The figure cannot be written.
    """
    check_suffix(output)
    write_figure(sample_figure(open_view(data, case_id, labels=labels)), output)


def draw_montage(
    data: Path,
    output: Path,
    *,
    prediction: Path | None = None,
    case_id: str | None = None,
    modality: str = "t2f",
    labels: str | None = None,
) -> None:
    """Draw sections through the tumour, reference and prediction side by side.

    The arguments and errors are those of `draw_sample`; `prediction` is a label map or a folder of
    `<case>.nii.gz`.
    """
    check_suffix(output)
    view = _view(data, case_id, prediction, labels)
    write_figure(montage_figure(view, modality=modality), output)


def draw_preview(
    data: Path,
    output: Path,
    *,
    prediction: Path | None = None,
    case_id: str | None = None,
    labels: str | None = None,
) -> None:
    """Draw three planes through the tumour of the prediction, or else of the reference.

    The arguments and errors are those of `draw_montage`.
    """
    check_suffix(output)
    write_figure(view_figure(_view(data, case_id, prediction, labels)), output)


def draw_uncertainty(
    data: Path,
    output: Path,
    *,
    prediction: Path,
    entropy: Path | None = None,
    case_id: str | None = None,
    labels: str | None = None,
) -> None:
    """Draw the uncertainty of a prediction in three planes.

    The arguments and errors are those of `draw_montage`; `entropy` is the map, or a folder that
    `predict --uncertainty` wrote, and None if that is the folder of the prediction.
    """
    check_suffix(output)
    view = _view(data, case_id, prediction, labels)
    folder = prediction if prediction.is_dir() else prediction.parent
    write_figure(uncertainty_figure(with_uncertainty(view, entropy or folder)), output)


def draw_surface(
    data: Path,
    output: Path,
    *,
    prediction: Path | None = None,
    case_id: str | None = None,
    azimuth_degrees: float = 30.0,
    labels: str | None = None,
) -> None:
    """Draw the regions in three dimensions, reference and prediction side by side.

    The arguments and errors are those of `draw_montage`; a `.gif` is a full turn, for which the
    azimuth is not used.
    """
    is_gif = output.suffix.lower() == ".gif"
    if not is_gif:
        check_suffix(output)
    models = models_of(_view(data, case_id, prediction, labels))
    if is_gif:
        write_surface_gif(models, output)
    else:
        write_figure(surface_figure(models, azimuth_degrees=azimuth_degrees), output)


def draw_scores(table: Path, output: Path, *, column: str = "dice") -> None:
    """Draw a score of every case, with a box for each region.

    Raises:
        UsageError: The table is not one of scores, or lacks the column.
        EnvironmentalError: The figure cannot be written.
    """
    check_suffix(output)
    write_figure(score_figure(read_scores(table), column=column), output)


def draw_bars(table: Path, output: Path) -> None:
    """Draw the mean Dice and Jaccard of each region; the errors are those of `draw_scores`."""
    check_suffix(output)
    write_figure(bar_figure(read_scores(table)), output)


def draw_distributions(
    data: Path,
    output: Path,
    *,
    tables: Sequence[Path] = (),
    labels: str | None = None,
    n_workers: int = 0,
    track: Track = untracked,
) -> None:
    """Draw how age, survival and tumour volume are distributed over the cases of a folder.

    Args:
        data: Folder of scans, of any layout.
        output: The figure.
        tables: Tables of ages and survival, in addition to those below the folder.
        labels: Name of the label convention; None to infer it.
        n_workers: Processes that read cases; 0 works in this one.
        track: Shows the progress.

    Raises:
        UsageError: The suffix is unknown, or nothing is known of any case.
        LayoutError: The folder holds no cases.
        EnvironmentalError: The figure cannot be written.
    """
    check_suffix(output)
    known = read_clinical_tables(data, tables)
    found = index_cases(data, labels=labels, n_workers=n_workers, track=track)
    write_figure(cohort_figure(with_clinical(found.cases, known), known), output)


def _view(data: Path, case_id: str | None, prediction: Path | None, labels: str | None) -> CaseView:
    view = open_view(data, case_id, labels=labels)
    # the reference and the prediction need not have one label convention
    return view if prediction is None else with_prediction(view, prediction)
