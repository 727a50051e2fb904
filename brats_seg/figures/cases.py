"""Read a case and its label maps, turned to the axes of BraTS, and draw it.

Figures of one case show its modalities, label maps, uncertainty or the output of an autoencoder.
Letters at the edges of each panel name the sides of the patient, and a bar gives the scale.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
from matplotlib import colormaps
from matplotlib.artist import Artist
from matplotlib.cm import ScalarMappable
from matplotlib.colors import ListedColormap, Normalize, to_rgba
from matplotlib.figure import Figure

from brats_seg.cases import releases
from brats_seg.cases.case import LoadedCase, check_one_grid, count_labels, load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.layouts import bids_name, modality_named
from brats_seg.cases.nifti import Geometry, oriented, read_label_map, read_volume
from brats_seg.errors import CaseError, UsageError, some_of
from brats_seg.evaluation.evaluate import LabelFile, label_maps_in
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.figures import sections
from brats_seg.figures.sections import AXIAL, MODALITY_NAMES, PLANES, Grid, Image
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.voxels.box import Triple, background_of
from brats_seg.voxels.grids import Affine, Spacing

SHOWN = ("t1c", "t2f")
"""Modalities of a preview: the first shows enhancement, the second oedema."""
N_SECTIONS = 12
"""Sections of a montage, at most."""

_BACKGROUND = "t2f"
"""Modality below label maps and entropy."""
_OPACITY = 0.75
"""Opacity of the label map."""
_N_COLUMNS = 3
"""Sections in a row of a montage."""
_HEAT = ListedColormap(
    colormaps["plasma"](np.linspace(0, 0.85, 256)) * [1, 1, 1, 0]
    + np.linspace(0, 4, 256).clip(max=1)[:, None] * [0, 0, 0, 1]
)
"""Colours of the entropy, from transparent at 0 to opaque at 0.25 bits: none is grey like the scan, and white
and cyan lines are seen on all."""
_HIGH_BITS = 0.5
"""Entropy above which a voxel counts as uncertain: a probability of 11 to 89 %."""
_WT_LINES: dict[str, tuple[str, float, sections.LineStyle]] = {
    "reference": ("cyan", 1.0, "--"),
    "prediction": ("white", 1.0, "-"),
}
"""Colour, width and style of the outlines over the entropy."""
_MOST_BITS = 1.001
"""Largest entropy of a yes or no, and the rounding error of half precision."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Labelled:
    """A label map and its convention."""

    label_map: LabelMap
    """(X, Y, Z)"""
    convention: LabelConvention

    @property
    def regions(self) -> RegionMasks:
        """Region masks (3, X, Y, Z)."""
        return regions_of(self.label_map, self.convention)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseView:
    """The scans of a case, and its label maps if it has any."""

    case_id: str
    release: str
    images: npt.NDArray[Any]
    """(n, X, Y, Z), an image for each of the modalities, as scanned, 0 outside the brain."""
    geometry: Geometry
    """Grid of the files as they are stored."""
    affine: Affine
    """(4, 4), from the voxels of the images to millimetres."""
    modalities: tuple[str, ...] = MODALITIES
    """Modalities of the images: all four, or those that the case has."""
    reference: Labelled | None = None
    prediction: Labelled | None = None
    uncertainty: Image | None = None
    """Entropy (X, Y, Z) of the prediction in bits."""

    @property
    def sides(self) -> dict[str, Labelled]:
        """The label maps that the case has, by name: the prediction first."""
        sides = {"prediction": self.prediction, "reference": self.reference}
        return {name: side for name, side in sides.items() if side is not None}

    @property
    def grid(self) -> Grid:
        """Size and directions of the voxels of the images."""
        return Grid.of(self.affine)

    def image(self, modality: str) -> Image:
        """Return one modality (X, Y, Z), by a name that files may have too, such as `flair`."""
        name = modality_named(modality)
        if name not in self.modalities:
            has = ", ".join(self.modalities)
            msg = f"{self.case_id} has no {name or modality}; there are {has}"
            raise UsageError(msg)
        return self.images[self.modalities.index(name)]

    def shown(self, preferred: Sequence[str] = SHOWN) -> dict[str, Image]:
        """Return those of the preferred modalities that the case has, or its first one, by name."""
        return {name: self.image(name) for name in select_shown(self.modalities, preferred)}


def select_shown(modalities: Sequence[str], preferred: Sequence[str] = SHOWN) -> list[str]:
    """Return those of the preferred modalities that are there, or the first one that is."""
    return [name for name in preferred if name in modalities] or [modalities[0]]


def open_view(root: Path, case_id: str | None = None, *, labels: str | None = None) -> CaseView:
    """Read a case below a folder of scans of any layout; without an id, the first by name.

    Args:
        root: A data folder, or the folder of one case.
        case_id: One of its cases.
        labels: Name of the label convention, where values and release do not give the right one.

    Raises:
        LayoutError: The folder holds no cases.
        UsageError: The folder does not hold that case.
        CaseError: The case has no modality, or a file of it cannot be used.
    """
    cases = {case.case_id: case for case in find_cases(root).cases}
    chosen = cases.get(case_id or next(iter(cases)))
    if chosen is None:
        msg = f"{root} holds no case {case_id}; it has {some_of(cases)}"
        raise UsageError(msg)
    # one that was predicted without some modalities is shown without them
    modalities = chosen.modalities or MODALITIES
    return make_view(load_case(chosen, labels=labels or "", modalities=modalities))


def make_view(loaded: LoadedCase) -> CaseView:
    """Return a case that has been loaded, with its reference if it has a label map."""
    reference = None
    if loaded.label is not None and loaded.convention is not None:
        label_map = np.ascontiguousarray(loaded.label.array)
        reference = Labelled(label_map=label_map, convention=loaded.convention)
    return CaseView(
        case_id=loaded.case.case_id,
        release=loaded.case.release,
        images=np.stack([_subtract_background(volume.array) for volume in loaded.volumes]),
        geometry=loaded.geometry,
        affine=loaded.volumes[0].geometry.affine,
        modalities=loaded.case.modalities,
        reference=reference,
    )


def with_prediction(view: CaseView, path: Path) -> CaseView:
    """Add the prediction of a case: a label map, or a folder that holds one named after the case.

    Raises:
        UsageError: The label map does not exist.
        CaseError: The label map cannot be read, or has another grid than the scans.
    """
    files = label_maps_in(path, [view.case_id])
    if view.case_id not in files:
        msg = f"{path} holds no label map of case {view.case_id}; it has {some_of(files)}"
        raise UsageError(msg)
    return replace(view, prediction=read_labelled(view, files[view.case_id]))


def read_labelled(view: CaseView, file: LabelFile) -> Labelled:
    """Read a label map of a case; raise `CaseError` if it cannot be read, or has another grid."""
    label = read_label_map(file.path, case_id=view.case_id)
    check_one_grid(view.case_id, [("the scans", view.geometry), (label.file, label.geometry)])
    values = count_labels(label.array)
    convention, _ = releases.resolve_convention(view.release, values, declared=file.convention)
    releases.check_values(values, convention, view.case_id, label.file)
    # regions of an array in another order of voxels take ten times as long
    label_map = np.ascontiguousarray(oriented(label).array)
    return Labelled(label_map=label_map, convention=convention)


def with_uncertainty(view: CaseView, path: Path) -> CaseView:
    """Add the uncertainty of a prediction: a map of entropy, or a folder of `predict --uncertainty`."""
    if path.is_dir():
        plain = path / "uncertainty" / f"{view.case_id}.nii.gz"
        bids = path.rglob(f"{bids_name(view.case_id)}_desc-entropy_probseg.nii.gz")
        path = plain if plain.exists() else next(bids, plain)
    if not path.exists():
        msg = f"{path} does not exist; predict the case with --uncertainty to have this map"
        raise UsageError(msg)
    volume = read_volume(path, case_id=view.case_id)
    check_one_grid(view.case_id, [("the scans", view.geometry), (volume.file, volume.geometry)])
    low, high = volume.array.min(), volume.array.max()
    # NaN fails the comparison, as intended
    if not (low >= 0 and high <= _MOST_BITS):
        problem, expected = f"values from {low:g} to {high:g}", "entropies from 0 to 1 bit"
        next_step = "Give the map that predict --uncertainty wrote."
        raise CaseError(view.case_id, volume.file, problem, expected, next_step)
    return replace(view, uncertainty=oriented(volume).array)


def masks_to_draw(view: CaseView) -> dict[str, RegionMasks]:
    """Return the region masks of the label maps of a case by name, `reference` and `prediction`."""
    if not view.sides:
        problem, next_step = "neither reference nor prediction", "Give it, or choose another case."
        raise CaseError(view.case_id, "label map", problem, "one of them, to draw", next_step)
    # the prediction stands on the right
    return {name: side.regions for name, side in reversed(view.sides.items())}


def sample_figure(view: CaseView) -> Figure:
    """Draw an axial section of each modality through the tumour, and the label map over FLAIR.

    Each tissue of the section has its own colour, and the legend names its label value and its
    regions. Without a label map, the section with most brain is drawn.
    """
    labelled = view.reference
    regions = labelled.regions if labelled else None
    index = sections.centre_of(regions, view.images[0])[AXIAL]
    figure = sections.dark_figure(10, 6.2)
    panels = figure.add_gridspec(2, 4)
    for number, modality in enumerate(view.modalities):
        axes = figure.add_subplot(panels[number // 2, number % 2])
        _draw_panel(axes, view.image(modality), AXIAL, index, view.grid, MODALITY_NAMES[modality])
        sections.draw_scale_bar(axes, view.grid.spacing_mm[0])
    axes = figure.add_subplot(panels[:, 2:])
    ((name, image),) = view.shown([_BACKGROUND]).items()
    name = MODALITY_NAMES[name]
    title = f"label map over {name}" if labelled else f"{name}, no label map"
    _draw_panel(axes, image, AXIAL, index, view.grid, title)
    sections.draw_scale_bar(axes, view.grid.spacing_mm[0])
    sections.add_dark_legend(figure, _draw_tissues(axes, labelled, index) if labelled else [])
    sections.add_title(figure, f"{view.case_id}, axial {index}")
    return figure


def montage_figure(view: CaseView, *, modality: str | None = None) -> Figure:
    """Draw axial sections from the lower to the upper end of the tumour, with the regions outlined.

    There is one block of sections for each label map of the case, with the volume of each region,
    and for the prediction its Dice. The default modality is FLAIR, or the first one without it.

    Raises:
        CaseError: The case has no label map, neither reference nor prediction.
        UsageError: No modality has that name.
    """
    kind = modality_named(modality or "") or select_shown(view.modalities, [_BACKGROUND])[0]
    image, sides = view.image(modality or kind), masks_to_draw(view)
    tumour = np.logical_or.reduce([regions[0] for regions in sides.values()])
    shown = np.flatnonzero((tumour if tumour.any() else image != 0).any(axis=(0, 1)))
    indices = shown[np.linspace(0, len(shown) - 1, min(N_SECTIONS, len(shown))).round().astype(int)]
    n_rows = -(-len(indices) // _N_COLUMNS)
    figure = sections.dark_figure(1.9 * _N_COLUMNS * len(sides), 2.2 * n_rows + 1.1)
    blocks = figure.subfigures(1, len(sides), squeeze=False)[0]
    for block, (name, regions) in zip(blocks, sides.items(), strict=True):
        block.set_facecolor("black")
        for axes in block.subplots(n_rows, _N_COLUMNS).flat:
            axes.set_axis_off()
        for axes, index in zip(block.axes, indices.tolist(), strict=False):
            sections.draw_section(axes, image, AXIAL, index, view.grid)
            sections.draw_outlines(axes, regions, AXIAL, index)
            axes.set_title(f"axial {index}", color="grey", fontsize="x-small")
        # one scale for all
        sections.draw_scale_bar(block.axes[0], view.grid.spacing_mm[0])
        reference = sides.get("reference") if name == "prediction" else None
        texts = _region_texts(regions, view.grid, reference)
        sections.add_title(block, f"{name}\n{', '.join(texts)}", size=8.5)
    sections.add_title(figure, f"{view.case_id}, {MODALITY_NAMES[kind]}")
    sections.add_dark_legend(figure, sections.region_key([name.upper() for name in REGIONS]))
    return figure


def view_figure(view: CaseView) -> Figure:
    """Draw axial, coronal and sagittal sections with the regions of the prediction outlined.

    Without a prediction, the regions of the reference are outlined.

    Raises:
        CaseError: The case has neither.
    """
    sides = masks_to_draw(view)
    name, regions = sides.popitem()
    title, reference = f"{view.case_id}, {name}", sides.get("reference")
    return planes_figure(view.shown(), regions, view.grid, title=title, reference=reference)


def planes_figure(
    images: Mapping[str, Image],
    regions: RegionMasks,
    grid: Grid,
    *,
    title: str = "",
    reference: RegionMasks | None = None,
    centre: Triple | None = None,
) -> Figure:
    """Draw axial, coronal and sagittal sections, a row for each image, with the regions outlined.

    The legend has the volume of each region.

    Args:
        images: Images `(X, Y, Z)` by modality, 0 outside the brain.
        regions: Region masks `(3, X, Y, Z)`.
        grid: Size and directions of the voxels.
        title: Title; one of regions that are all empty says so.
        reference: Region masks whose Dice with the regions is in the legend.
        centre: Voxel that the sections go through; by default the middle of the largest tumour.
    """
    figure = sections.dark_figure(9, 3.3 * len(images))
    centre = centre or sections.centre_of(regions, next(iter(images.values())))
    rows = figure.subplots(len(images), len(PLANES), squeeze=False)
    for row, (modality, image) in zip(rows, images.items(), strict=True):
        _draw_planes(row, image, centre, grid, MODALITY_NAMES[modality])
        for axes, axis in zip(row, PLANES.values(), strict=True):
            sections.draw_outlines(axes, regions, axis, centre[axis])
    if title:
        sections.add_title(figure, title if regions[0].any() else f"{title}: no tumour")
    sections.add_dark_legend(figure, sections.region_key(_region_texts(regions, grid, reference)))
    return figure


def uncertainty_figure(view: CaseView) -> Figure:
    """Draw the outlines of a prediction, and below them its uncertainty in colours over FLAIR.

    The lower row has the outline of the predicted whole tumour, and that of the reference if there
    is one: a useful uncertainty is high where they differ.

    The view must have both, the prediction and its uncertainty.
    """
    bits, sides, grid = np.asarray(view.uncertainty), masks_to_draw(view), view.grid
    regions, high = sides["prediction"], bits > _HIGH_BITS
    ((background, image),) = view.shown([_BACKGROUND]).items()
    centre = sections.centre_of(regions if regions[0].any() else np.stack([high] * 3), image)
    figure = sections.dark_figure(9.6, 6.9)
    upper, lower = figure.subplots(2, len(PLANES))
    _draw_planes(upper, image, centre, grid, MODALITY_NAMES[background])
    _draw_planes(lower, image, centre, grid, "uncertainty")
    for above, below, axis in zip(upper, lower, PLANES.values(), strict=True):
        sections.draw_outlines(above, regions, axis, centre[axis])
        section = np.asarray(sections.take_section(bits, axis, centre[axis]), float)
        sections.draw_overlay(below, section, cmap=_HEAT, vmin=0, vmax=1, interpolation="bilinear")
        for name, masks in sides.items():
            mask = sections.take_section(masks[0], axis, centre[axis])
            sections.draw_outline(below, mask, *_WT_LINES[name])
    _add_colour_bar(figure, [*upper, *lower])
    ml = np.count_nonzero(high) * grid.voxel_ml
    title = f"uncertainty of the prediction: {ml:.1f} ml above {_HIGH_BITS:g} bits"
    sections.add_title(figure, f"{view.case_id}, {title}")
    entries = sections.region_key(_region_texts(regions, grid, sides.get("reference")))
    entries += [
        sections.line_key(f"WT of the {name}, lower row", *_WT_LINES[name])
        for name, masks in sides.items()
        if masks[0].any()
    ]
    sections.add_dark_legend(figure, entries)
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
    intensities; the difference is drawn over the width of that scale. Nothing is shown outside the
    brain.

    Args:
        image: Modalities `(4, X, Y, Z)` in the order of `MODALITIES`, 0 outside the brain.
        reconstruction: Their reconstructions `(4, X, Y, Z)`.
        case_id: Id of the case, for the title.
        spacing_mm: Edges of a voxel; None draws cubes, and no scale bar.
    """
    brain = (image != 0).any(axis=0)
    index = int(brain.sum(axis=(0, 1)).argmax())
    figure = sections.dark_figure(7, 9)
    grid = Grid(spacing_mm=spacing_mm or (1.0, 1.0, 1.0))
    rows = figure.subplots(len(MODALITIES), 3)
    for row, modality, before, output in zip(rows, MODALITIES, image, reconstruction, strict=True):
        after = np.where(before == 0, 0, output)
        difference = np.abs(after.astype(float) - before)
        error = difference[..., index][before[..., index] != 0]
        rmse = float(np.sqrt(np.mean(error**2))) if error.size else 0.0
        low, high = limits = sections.grey_limits(before)
        for axes, shown, ends, title in (
            (row[0], before, limits, MODALITY_NAMES[modality]),
            (row[1], after, limits, "reconstruction"),
            (row[2], difference, (0.0, high - low), f"difference, RMSE here {rmse:.3g}"),
        ):
            sections.draw_section(axes, shown, AXIAL, index, grid, limits=ends, brain=brain)
            axes.set_title(title, color="white", fontsize="small")
            if spacing_mm:
                sections.draw_scale_bar(axes, spacing_mm[0])
    sections.add_title(figure, f"{case_id}, axial {index}")
    figure.supxlabel(sections.SMALL_PRINT, color="grey", fontsize="x-small")
    return figure


def tissue_colours(convention: LabelConvention) -> dict[int, str]:
    """Return the colour of each label value.

    The first tissue that belongs to a region and to no smaller one has the colour of the region: it
    is the visible part where regions are painted over each other.
    """
    colours: dict[int, str] = {}
    regions = [*zip(sections.REGION_COLOURS, convention.regions, strict=True)]
    for value, _ in convention.meanings:
        inside = [colour for colour, values in regions if value in values]
        choices = (*inside[-1:], *sections.OTHER_TISSUE_COLOURS)
        colours[value] = next(colour for colour in choices if colour not in colours.values())
    return colours


def _subtract_background(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Return a volume whose background is 0, whatever constant its file has there."""
    background = background_of(array)
    return np.where(array == background, 0, array) if background else array


def _draw_panel(axes: Any, image: Image, axis: int, index: int, grid: Grid, text: str) -> None:
    """Draw a section with a title."""
    sections.draw_section(axes, image, axis, index, grid)
    # a fixed height: to look for the labels of axes that are off takes an eighth of the time
    axes.set_title(text, color="white", fontsize="small", y=1.0)


def _draw_planes(row: Iterable[Any], image: Image, centre: Triple, grid: Grid, text: str) -> None:
    """Draw the three sections of an image through a voxel, to one scale."""
    panels = [*zip(row, PLANES.values(), strict=True)]
    for (axes, axis), plane in zip(panels, PLANES, strict=True):
        _draw_panel(axes, image, axis, centre[axis], grid, f"{text}, {plane} {centre[axis]}")
    sections.draw_to_one_scale(panels, grid)
    for axes, axis in panels:
        sections.draw_scale_bar(axes, grid.spacing_mm[1 if axis == 0 else 0])


def _region_texts(regions: RegionMasks, grid: Grid, reference: RegionMasks | None) -> list[str]:
    """Return the volume of each region and, with a reference, its Dice."""
    ml = [np.count_nonzero(mask) * grid.voxel_ml for mask in regions]
    # a volume that is not 0 does not become 0
    numbers = [f"{value:.1f}" if value == 0 or value >= 0.05 else f"{value:.1g}" for value in ml]
    texts = [f"{name.upper()} {text} ml" for name, text in zip(REGIONS, numbers, strict=True)]
    if reference is None:
        return texts
    counts = count_regions(regions, reference, "")
    is_scored = counts.in_prediction + counts.in_reference > 0
    return [
        f"{text} (Dice {score:.3f})" if scored else f"{text} (none in the reference)"
        for text, score, scored in zip(texts, dice(counts), is_scored, strict=True)
    ]


def _add_colour_bar(figure: Figure, panels: list[Any]) -> None:
    bar = figure.colorbar(ScalarMappable(Normalize(0, 1), _HEAT), ax=panels, shrink=0.5, pad=0.01)
    bar.set_label("entropy (bits)", color="white", fontsize="small")
    bar.ax.tick_params(colors="white", labelsize="small")
    bar.ax.set_facecolor("black")


def _draw_tissues(axes: Any, labelled: Labelled, index: int) -> list[Artist]:
    """Paint the tissues of an axial section over it, and return their legend entries."""
    section = sections.take_section(labelled.label_map, AXIAL, index)
    convention, colours = labelled.convention, tissue_colours(labelled.convention)
    picture, entries = np.zeros((*section.shape, 4)), []
    for value, tissue in convention.meanings:
        if (section == value).any():
            picture[section == value] = to_rgba(colours[value], _OPACITY)
            inside = zip(REGIONS, convention.regions, strict=True)
            regions = ", ".join(region.upper() for region, values in inside if value in values)
            text = f"{tissue}: label {value}, in {regions or 'no region'}"
            entries.append(sections.line_key(text, colours[value], 8, "-"))
    sections.draw_overlay(axes, picture)
    return entries
