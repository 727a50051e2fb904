"""A picture of a result: three planes through the tumour, with the outlines of the regions."""

from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from brats_seg.cases.orientation import turn_of, turned
from brats_seg.inference.predict import CaseResult
from brats_seg.inference.scan import Scan
from brats_seg.labels import MODALITIES, REGIONS, regions_of

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DPI = 100


def write_preview(scan: Scan, result: CaseResult, path: Path) -> None:
    """Draw a case into a PNG, the patient's left on the right, as radiologists look at it."""
    from brats_seg.drawing.planes import SHOWN, planes_figure

    turn = turn_of(scan.geometry.affine)
    regions = regions_of(turned(result.label_map, turn), result.convention)
    images = {name: _on_grid(scan, MODALITIES.index(name), turn) for name in SHOWN}
    stored = scan.geometry.spacing_mm
    x, y, z = (stored[int(axis)] for axis in np.argsort(turn[:, 0]))
    figure = planes_figure(images, regions, (x, y, z))
    _add_words(figure, result)
    figure.savefig(path, dpi=_DPI, format="png")


def _on_grid(scan: Scan, modality: int, turn: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return a modality (X, Y, Z) on the turned grid of the files."""
    image = scan.on_scan_spacing(scan.image[modality : modality + 1])[0]
    return turned(scan.on_scan_grid(image), turn)


def _add_words(figure: "Figure", result: CaseResult) -> None:
    from brats_seg.drawing.look import (
        LEFT_IS_RIGHT,
        RESEARCH_USE,
        add_dark_legend,
        outline_key,
    )

    ml = {part.name: part.ml for part in result.volumes}
    words = tuple(f"{region.upper()} {ml[region]:.1f} ml" for region in REGIONS)
    add_dark_legend(figure, outline_key(words), f"{RESEARCH_USE}; {LEFT_IS_RIGHT}")
    title = f"{result.case_id}{'' if ml['wt'] else ': no tumour found'}"
    figure.suptitle(title, color="white", fontsize="medium")
