"""Draw figures of one case: modalities, label maps, uncertainty and the output of an autoencoder.

Letters at the edges of each panel name the sides of the patient, and a bar gives the scale.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgb
from matplotlib.figure import Figure, SubFigure

from brats_seg.errors import CaseError
from brats_seg.evaluation.overlap import count_regions, dice
from brats_seg.figures.sections import (
    AXIAL,
    PLANES,
    Directions,
    Grid,
    Image,
    Spacing,
    centre_of,
    draw_outline,
    draw_outlines,
    draw_overlay,
    draw_section,
    draw_section_bar,
    draw_section_letters,
    grey_limits,
    section_of,
)
from brats_seg.figures.style import (
    LEFT_IS_RIGHT,
    MODALITY_NAMES,
    OTHER_TISSUE_COLOURS,
    REGION_COLOURS,
    RESEARCH_USE,
    LineStyle,
    add_dark_legend,
    add_title,
    dark_figure,
    filled_key,
    line_key,
    outline_key,
)
from brats_seg.figures.view import CaseView, Labelled, drawn_of, known_modality
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, RegionMasks
from brats_seg.voxels.box import Triple
from brats_seg.voxels.grids import AXES

SHOWN = ("t1c", "t2f")
"""Modalities of a preview: the first shows enhancement, the second oedema."""
N_SECTIONS = 12
"""Sections of a montage, at most."""

_BACKGROUND = "t2f"
"""Modality below the label map."""
_OPACITY = 0.75
"""Opacity of the label map."""
_N_MONTAGE_COLUMNS = 3
_SMALL_PRINT = f"{RESEARCH_USE}; {LEFT_IS_RIGHT}"
_HEAT = ("plasma", 0.85)
"""Colours of the entropy, and the share of them that is used: their brightness grows evenly, none is
grey like the scan, and white and cyan lines are seen on the brightest."""
_LOW_BITS = 0.1
"""Entropy below which the scan is shown: a probability below 1.3 or above 98.7 %."""
_HIGH_BITS = 0.5
"""Entropy above which a voxel counts as uncertain: a probability of 11 to 89 %."""
_WT_LINES: tuple[tuple[str, str, LineStyle], ...] = (
    ("reference", "cyan", "--"),
    ("prediction", "white", "-"),
)
"""Colour and style of the outlines over the entropy."""
_RECONSTRUCTION_COLUMNS = ("input", "reconstruction", "absolute difference")


def sample_figure(view: CaseView) -> Figure:
    """Draw an axial section of each modality through the tumour, and the label map over FLAIR.

    Each tissue of the section has its own colour, and the legend names its label value and its
    regions. Without a label map, the section with most brain is drawn.
    """
    labelled = view.reference
    regions = labelled.regions if labelled else np.zeros((3, *view.images.shape[1:]), bool)
    index = centre_of(regions, view.images[0])[AXIAL]
    figure = dark_figure(10, 6.2)
    grid = figure.add_gridspec(2, 4)
    for number, modality in enumerate(view.modalities):
        axes = figure.add_subplot(grid[number // 2, number % 2])
        _draw_panel(axes, view.image(modality), (AXIAL, index), view.grid)
        axes.set_title(MODALITY_NAMES[modality], color="white", fontsize="small")
    axes = figure.add_subplot(grid[:, 2:])
    background, image = _background(view)
    _draw_panel(axes, image, (AXIAL, index), view.grid)
    below = MODALITY_NAMES[background]
    title = f"label map over {below}" if labelled else f"{below}, no label map"
    axes.set_title(title, color="white", fontsize="small")
    entries = []
    if labelled:
        draw_overlay(axes, _painted(labelled, index))
        entries = filled_key(*_legend(labelled, index))
    add_dark_legend(figure, entries, _SMALL_PRINT)
    add_title(figure, f"{view.case_id}, axial {index}")
    return figure


def montage_figure(view: CaseView, *, modality: str = "t2f") -> Figure:
    """Draw axial sections from the lower to the upper end of the tumour, with the regions outlined.

    There is one block of sections for each label map of the case, with the volume of each region,
    and for the prediction its Dice.

    Raises:
        CaseError: The case has no label map, neither reference nor prediction.
        UsageError: No modality has that name.
    """
    image, labelled = view.image(modality), drawn_of(view)
    tumour = np.logical_or.reduce([regions[0] for _, regions in labelled])
    shown = tumour if tumour.any() else image != 0
    indices = _spread(np.flatnonzero(shown.any(axis=(0, 1))))
    n_rows = -(-len(indices) // _N_MONTAGE_COLUMNS)
    figure = dark_figure(1.9 * _N_MONTAGE_COLUMNS * len(labelled), 2.2 * n_rows + 1.1)
    blocks = figure.subfigures(1, len(labelled), squeeze=False)[0]
    for block, (words, regions) in zip(blocks, labelled, strict=True):
        _draw_block(block, image, regions, indices, view.grid)
        add_title(block, f"{words}\n{', '.join(_measured(view, words, regions))}", size=8.5)
    add_title(figure, f"{view.case_id}, {MODALITY_NAMES[known_modality(modality)]}")
    present = _present(*(regions for _, regions in labelled))
    add_dark_legend(figure, outline_key(shown=present), _SMALL_PRINT)
    return figure


def view_figure(view: CaseView) -> Figure:
    """Draw axial, coronal and sagittal sections with the regions of the prediction outlined.

    Without a prediction, the regions of the reference are outlined.

    Raises:
        CaseError: The case has neither.
    """
    words, regions = drawn_of(view)[-1]
    grid = view.grid
    images = view.shown(SHOWN)
    figure = planes_figure(images, regions, grid.spacing_mm, directions=grid.directions)
    present = _present(regions)
    add_title(figure, f"{view.case_id}, {words}{'' if present[0] else ': no tumour'}")
    key = outline_key(_measured(view, words, regions), present)
    add_dark_legend(figure, key, _SMALL_PRINT)
    return figure


def planes_figure(
    images: Mapping[str, Image],
    regions: RegionMasks,
    spacing_mm: Spacing,
    *,
    directions: Directions = AXES,
    centre: Triple | None = None,
) -> Figure:
    """Draw axial, coronal and sagittal sections, a row for each image, with the regions outlined.

    Args:
        images: Images `(X, Y, Z)` by modality, 0 outside the brain.
        regions: Region masks `(3, X, Y, Z)`.
        spacing_mm: Edges of a voxel.
        directions: Sides of the patient that X, Y and Z run to.
        centre: Triple that the sections go through; by default the middle of the largest tumour.
    """
    figure = dark_figure(9, 3.3 * len(images))
    grid = Grid(spacing_mm=spacing_mm, directions=directions)
    centre = centre or centre_of(regions, next(iter(images.values())))
    rows = figure.subplots(len(images), len(PLANES), squeeze=False)
    for row, (modality, image) in zip(rows, images.items(), strict=True):
        _draw_planes(row, image, centre, grid, MODALITY_NAMES[modality])
        for axes, (_, axis) in zip(row, PLANES, strict=True):
            draw_outlines(axes, regions, axis, centre[axis])
    return figure


def uncertainty_figure(view: CaseView) -> Figure:
    """Draw the outlines of a prediction, and below them its uncertainty in colours over FLAIR.

    The lower row has the outline of the predicted whole tumour, and that of the reference if there
    is one: a useful uncertainty is high where they differ.

    Raises:
        CaseError: The case has no prediction, or no map of its uncertainty.
    """
    bits, sides = _uncertain(view), dict(drawn_of(view))
    regions, (background, image), grid = sides["prediction"], _background(view), view.grid
    high = bits > _HIGH_BITS
    centre = centre_of(regions if regions[0].any() else np.stack([high] * 3), image)
    figure = dark_figure(9.6, 6.9)
    upper, lower = figure.subplots(2, len(PLANES))
    _draw_planes(upper, image, centre, grid, MODALITY_NAMES[background])
    _draw_planes(lower, image, centre, grid, "uncertainty")
    for above, below, (_, axis) in zip(upper, lower, PLANES, strict=True):
        draw_outlines(above, regions, axis, centre[axis])
        draw_overlay(below, _heat(section_of(bits, axis, centre[axis])))
        for name, colour, style in _WT_LINES:
            if name in sides:
                section = section_of(sides[name][0], axis, centre[axis])
                draw_outline(below, section, color=colour, linewidth=1.0, linestyle=style)
    _add_colour_bar(figure, [*upper, *lower])
    _add_uncertainty_words(figure, view, sides, high)
    return figure


def reconstruction_figure(
    image: npt.NDArray[Any],
    reconstruction: npt.NDArray[Any],
    *,
    case_id: str,
    spacing_mm: Spacing | None = None,
) -> Figure:
    """Draw an axial section of every modality, its reconstruction, and their difference.

    The section is the one with most brain. A row has one grey scale, so that equal greys are equal
    intensities; the difference is drawn over the width of that scale.

    Args:
        image: Modalities `(4, X, Y, Z)` in the order of `MODALITIES`, 0 outside the brain.
        reconstruction: Their reconstructions `(4, X, Y, Z)`.
        case_id: Id of the case, for the title.
        spacing_mm: Edges of a voxel; None draws cubes, and no scale bar.
    """
    brain = (image != 0).any(axis=0)
    section = int(brain.sum(axis=(0, 1)).argmax())
    figure = dark_figure(7, 9)
    grid = figure.subplots(len(MODALITIES), len(_RECONSTRUCTION_COLUMNS))
    for row, modality, before, after in zip(
        grid, MODALITIES, image[..., section], reconstruction[..., section], strict=True
    ):
        _draw_row(row, modality, before.astype(float), after.astype(float))
    for axes, words in zip(grid[0], _RECONSTRUCTION_COLUMNS, strict=True):
        axes.set_title(words, color="white", fontsize="small")
    voxels = Grid(spacing_mm=spacing_mm or (1.0, 1.0, 1.0))
    for axes in grid.flat:
        axes.set_aspect(voxels.spacing_mm[1] / voxels.spacing_mm[0])
        draw_section_letters(axes, AXIAL, voxels)
        if spacing_mm:
            draw_section_bar(axes, AXIAL, voxels)
    add_title(figure, f"{case_id}, axial {section}")
    figure.supxlabel(_SMALL_PRINT, color="grey", fontsize="x-small")
    return figure


def tissue_colours(convention: LabelConvention) -> dict[int, str]:
    """Return the colour of each label value.

    The first tissue that belongs to a region and to no smaller one has the colour of the region: it
    is the visible part where regions are painted over each other.
    """
    colours: dict[int, str] = {}
    left = iter(OTHER_TISSUE_COLOURS)
    taken = set()
    for value, _ in convention.meanings:
        inside = [k for k, values in enumerate(convention.regions) if value in values]
        smallest = inside[-1] if inside else None
        if smallest is None or smallest in taken:
            colours[value] = next(left)
        else:
            taken.add(smallest)
            colours[value] = REGION_COLOURS[smallest]
    return colours


def _background(view: CaseView) -> tuple[str, Image]:
    """Return the modality that maps are drawn over, with its name."""
    ((name, image),) = view.shown([_BACKGROUND]).items()
    return name, image


def _draw_panel(axes: Any, image: Image, at: tuple[int, int], grid: Grid) -> None:
    """Draw the section at an axis and an index, with a scale bar."""
    axis, index = at
    draw_section(axes, image, axis, index, grid)
    draw_section_bar(axes, axis, grid)


def _draw_planes(row: Any, image: Image, centre: Triple, grid: Grid, words: str) -> None:
    """Draw the three sections of an image through a voxel."""
    for axes, (plane, axis) in zip(row, PLANES, strict=True):
        _draw_panel(axes, image, (axis, centre[axis]), grid)
        title = f"{words}, {plane} {centre[axis]}"
        # a fixed height: to look for the labels of axes that are off takes an eighth of the time
        axes.set_title(title, color="white", fontsize="small", y=1.0)


def _draw_block(
    block: SubFigure, image: Image, regions: RegionMasks, indices: list[int], grid: Grid
) -> None:
    """Draw the axial sections of one label map; the first has the scale bar of all."""
    block.set_facecolor("black")
    n_rows = -(-len(indices) // _N_MONTAGE_COLUMNS)
    panels = block.subplots(n_rows, _N_MONTAGE_COLUMNS, squeeze=False).flat
    for axes, index in zip(panels, indices, strict=False):
        draw_section(axes, image, AXIAL, index, grid)
        draw_outlines(axes, regions, AXIAL, index)
        axes.set_title(f"axial {index}", color="grey", fontsize="x-small")
    draw_section_bar(block.axes[0], AXIAL, grid)
    for axes in block.axes[len(indices) :]:
        axes.set_axis_off()


def _present(*sides: RegionMasks) -> list[bool]:
    """Return for each region whether it is in any of the label maps."""
    return [any(bool(mask.any()) for mask in masks) for masks in zip(*sides, strict=True)]


def _measured(view: CaseView, side: str, regions: RegionMasks) -> list[str]:
    """Return the volume of each region, and of a prediction that can be scored its Dice."""
    n_voxels = regions.sum(axis=(1, 2, 3))
    words = [
        f"{region.upper()} {_volume(n * view.grid.voxel_ml)}"
        for region, n in zip(REGIONS, n_voxels, strict=True)
    ]
    if side == "reference" or view.reference is None:
        return words
    counts = count_regions(regions, view.reference.regions, view.case_id)
    either = counts.in_prediction + counts.in_reference
    return [
        f"{word} (Dice {score:.3f})" if n else f"{word} (none in the reference)"
        for word, score, n in zip(words, dice(counts), either, strict=True)
    ]


def _volume(ml: float) -> str:
    """Return a volume in words; one that is not 0 does not become 0."""
    return f"{ml:.1f} ml" if ml == 0 or ml >= 0.05 else f"{ml:.1g} ml"


def _uncertain(view: CaseView) -> Image:
    """Return the entropy of the prediction of a case."""
    missing = "no prediction" if view.prediction is None else "no map of its uncertainty"
    if view.prediction is None or view.uncertainty is None:
        raise CaseError(
            view.case_id,
            file="uncertainty",
            found=missing,
            expected="a label map and a map of entropy",
            next_step="Give the folder that predict --uncertainty wrote.",
        )
    return view.uncertainty


def _heat(bits: npt.NDArray[Any]) -> npt.NDArray[np.float64]:
    """Return a section of entropies in colours (rows, columns, 4), transparent where it is low."""
    picture: npt.NDArray[np.float64] = _heat_colours()(np.asarray(bits, float))
    picture[bits < _LOW_BITS, 3] = 0
    return picture


def _heat_colours() -> ListedColormap:
    name, share = _HEAT
    return ListedColormap(colormaps[name](np.linspace(0, share, 256)))


def _add_colour_bar(figure: Figure, panels: list[Any]) -> None:
    colours = ScalarMappable(Normalize(0, 1), _heat_colours())
    bar = figure.colorbar(colours, ax=panels, shrink=0.5, pad=0.01)
    bar.set_label("entropy (bits)", color="white", fontsize="small")
    bar.ax.tick_params(colors="white", labelsize="small")
    bar.ax.axhspan(0, _LOW_BITS, color="black")


def _add_uncertainty_words(
    figure: Figure, view: CaseView, sides: Mapping[str, RegionMasks], high: npt.NDArray[np.bool_]
) -> None:
    regions = sides["prediction"]
    ml = np.count_nonzero(high) * view.grid.voxel_ml
    add_title(
        figure,
        f"{view.case_id}, uncertainty of the prediction: {ml:.1f} ml above {_HIGH_BITS:g} bits",
    )
    entries = outline_key(_measured(view, "prediction", regions), _present(regions))
    entries += [
        line_key(f"WT of the {name}, lower row", colour, style)
        for name, colour, style in _WT_LINES
        if name in sides and sides[name][0].any()
    ]
    add_dark_legend(figure, entries, _SMALL_PRINT)


def _painted(labelled: Labelled, index: int) -> npt.NDArray[np.float64]:
    """Return a section of the label map in colours (Y, X, 4), transparent outside the tissues."""
    section = labelled.label_map[:, :, index].T
    picture = np.zeros((*section.shape, 4))
    for value, colour in tissue_colours(labelled.convention).items():
        picture[section == value] = (*to_rgb(colour), _OPACITY)
    return picture


def _legend(labelled: Labelled, index: int) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return the words and colours of the tissues in a section."""
    convention, present = labelled.convention, set(np.unique(labelled.label_map[:, :, index]))
    meanings = [(value, tissue) for value, tissue in convention.meanings if value in present]
    words = []
    for value, tissue in meanings:
        regions = (
            region.upper()
            for region, values in zip(REGIONS, convention.regions, strict=True)
            if value in values
        )
        words.append(f"{tissue}: label {value}, in {', '.join(regions) or 'no region'}")
    colours = tissue_colours(convention)
    return tuple(words), tuple(colours[value] for value, _ in meanings)


def _spread(indices: "np.ndarray[tuple[int], np.dtype[np.intp]]") -> list[int]:
    """Return at most `N_SECTIONS` of the indices, evenly, both ends among them."""
    places = np.linspace(0, len(indices) - 1, min(N_SECTIONS, len(indices)))
    return [int(indices[place]) for place in places.round().astype(int)]


def _draw_row(
    row: Any, modality: str, before: npt.NDArray[np.float64], after: npt.NDArray[np.float64]
) -> None:
    """Draw the sections (X, Y) of one modality and their difference."""
    low, high = grey_limits(before)
    air = before == 0
    pictures = (
        (np.where(air, low, before), low, high),
        # the reconstruction is not shown outside the brain
        (np.where(air, low, after), low, high),
        (np.where(air, 0, np.abs(after - before)), 0.0, high - low),
    )
    for axes, (picture, darkest, brightest) in zip(row, pictures, strict=True):
        axes.imshow(picture.T, cmap="gray", vmin=darkest, vmax=brightest, origin="upper")
        axes.set(xticks=[], yticks=[])
        axes.set_frame_on(False)
    error = float(np.sqrt(np.mean((after - before)[~air] ** 2))) if not air.all() else 0.0
    row[0].set_ylabel(MODALITY_NAMES[modality], color="white", fontsize="small")
    row[-1].set_xlabel(f"RMSE here {error:.3g}", color="grey", fontsize="x-small", labelpad=2)
