"""Three planes through the tumour of a case."""

from matplotlib.figure import Figure

from brats_seg.drawing.look import LEFT_IS_RIGHT, RESEARCH_USE, add_dark_legend, outline_key
from brats_seg.drawing.planes import SHOWN, planes_figure
from brats_seg.report.view import CaseView, drawn_of


def view_figure(view: CaseView) -> Figure:
    """Draw axial, coronal and sagittal sections with the regions of the prediction outlined.

    Without a prediction they are those of the reference.

    Raises:
        CaseError: The case has neither.
    """
    words, regions = drawn_of(view)[-1]
    figure = planes_figure({name: view.image(name) for name in SHOWN}, regions, view.spacing_mm)
    figure.suptitle(f"{view.case_id}, {words}", color="white", fontsize="medium")
    add_dark_legend(figure, outline_key(), f"{RESEARCH_USE}; {LEFT_IS_RIGHT}")
    return figure
