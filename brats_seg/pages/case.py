"""Write the page of a case: viewer, volumes, lesions, flags, and where everything came from.

A page is one file that shows the scans with the prediction, the reference and the uncertainty, if the
case has them. Without a script or WebGL its tables and its pictures remain.
"""

import logging
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from brats_seg.evaluation.lesions import LesionList, list_lesions
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.figures.cases import (
    sample_figure,
    tissue_colours,
    uncertainty_figure,
    view_figure,
)
from brats_seg.figures.sections import MODALITY_NAMES, REGION_COLOURS, centre_of
from brats_seg.figures.view import CaseView, Labelled
from brats_seg.labels import MODALITIES, RegionMasks
from brats_seg.pages.embedded import EmbeddedVolumes, embedded
from brats_seg.pages.html import niivue_licence, packed_niivue, picture_uri, write_page

log = logging.getLogger(__name__)

LARGEST_PAGE = 15_000_000
"""Size in bytes from which a page is slow to open; those of BraTS scans are smaller."""

PART_NAMES = (
    "Whole tumour (WT)",
    "Tumour core (TC)",
    "Enhancing tumour (ET)",
    "Oedema (WT without TC)",
    "Necrosis and other core (TC without ET)",
)
"""Names of the regions and of the tissues between them."""
REGION_NAMES = {"wt": "Whole tumour", "tc": "Tumour core", "et": "Enhancing tumour"}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fact:
    """A line about the origin of a case or its prediction."""

    name: str
    words: str
    is_code: bool = False
    """Whether the words are a hash or a path."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CasePage:
    """A case, and what its page says about it."""

    view: CaseView
    flags: tuple[str, ...] = ()
    """Sentences on what speaks against the scans or the prediction."""
    facts: tuple[Fact, ...] = ()
    """Origin of the scans and of the prediction."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PartRow:
    """A row of the table of volumes."""

    name: str
    colour: str
    """Colour of a region in pictures; empty for a tissue."""
    prediction_ml: float | None
    """None without a prediction, as is the next without a reference."""
    reference_ml: float | None
    dice: float | None
    """Dice of a region that has both; None for a tissue."""


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionTable:
    """The lesions of one label map."""

    side: str
    """`prediction` or `reference`."""
    lists: tuple[LesionList, ...]
    """One for each region."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Picture:
    """A static picture of the case."""

    uri: str
    words: str
    """Description, also for readers who do not see it."""


def write_case_page(page: CasePage, path: Path) -> None:
    """Write the page of a case.

    Raises:
        UsageError: The name of the file does not end in `.html`.
        EnvironmentalError: The file cannot be written.
    """
    view = page.view
    grid = embedded(view)
    write_page(
        path,
        "case.html",
        title=view.case_id,
        flags=page.flags,
        facts=(*page.facts, *_facts_of_grid(view, grid)),
        parts=part_rows(view),
        lesion_tables=lesion_tables(view),
        legend=_legend(view),
        pictures=_pictures(view),
        viewer=viewer_values(view, grid),
        scans=[(name, MODALITY_NAMES[name]) for name in view.modalities],
        layers=[one.name for one in grid.volumes if one.name not in MODALITIES],
        region_names=REGION_NAMES,
        niivue=packed_niivue(),
        niivue_licence=niivue_licence(),
    )
    n_bytes = path.stat().st_size
    if n_bytes > LARGEST_PAGE:
        log.warning(
            "%s has %.0f MB: scans of %s voxels are too large for a quick page. Resample them to 1 mm.",
            path,
            n_bytes / 1e6,
            " x ".join(map(str, view.geometry.shape)),
        )


def part_rows(view: CaseView) -> tuple[PartRow, ...]:
    """Return the volume of every region and tissue on both sides, and the Dice of the regions."""
    prediction, reference = (
        None if side is None else side.regions for side in (view.prediction, view.reference)
    )
    scores: list[float | None] = [None] * len(PART_NAMES)
    if prediction is not None and reference is not None:
        found = dice(count_regions(prediction, reference, view.case_id)).tolist()
        scores[: len(found)] = found
    return tuple(
        PartRow(name=name, colour=colour, prediction_ml=predicted, reference_ml=drawn, dice=score)
        for name, colour, predicted, drawn, score in zip(
            PART_NAMES,
            (*REGION_COLOURS, "", ""),
            _volumes_ml(prediction, view.grid.voxel_ml),
            _volumes_ml(reference, view.grid.voxel_ml),
            scores,
            strict=True,
        )
    )


def lesion_tables(view: CaseView) -> tuple[LesionTable, ...]:
    """Return the lesions of the prediction, or without one those of the reference."""
    sides = (("prediction", view.prediction), ("reference", view.reference))
    tables = (
        LesionTable(side=name, lists=list_lesions(side.regions, view.affine))
        for name, side in sides
        if side is not None
    )
    return tuple(tables)[:1]


def viewer_values(view: CaseView, grid: EmbeddedVolumes) -> dict[str, Any]:
    """Return the JSON that `viewer.js` draws a case from."""
    regions = _first_regions(view)
    centre = centre_of(regions, view.images[0])
    place = view.affine[:3, :3] @ centre + view.affine[:3, 3]
    sides = (("prediction", view.prediction), ("reference", view.reference))
    return {
        "grid": asdict(grid),
        "centre_mm": place.tolist(),
        "tissues": {name: _tissues(side) for name, side in sides if side is not None},
    }


def _volumes_ml(regions: RegionMasks | None, voxel_ml: float) -> Sequence[float | None]:
    """Return the volume of each part of `PART_NAMES`; None for each without a label map."""
    if regions is None:
        return [None] * len(PART_NAMES)
    wt, tc, et = (int(np.count_nonzero(mask)) * voxel_ml for mask in regions)
    return [wt, tc, et, wt - tc, tc - et]


def _first_regions(view: CaseView) -> RegionMasks:
    for side in (view.prediction, view.reference):
        if side is not None and side.label_map.any():
            return side.regions
    return np.zeros((3, *view.images.shape[1:]), bool)


def _tissues(side: Labelled) -> dict[str, Any]:
    """Return the names and the colours of the label values, as NiiVue takes them."""
    colours = {value: _rgb(colour) for value, colour in tissue_colours(side.convention).items()}
    # every value up to the last one needs a colour; 0 and values without a meaning are transparent
    table = [(*colours[i], 255) if i in colours else (0, 0, 0, 0) for i in range(max(colours) + 1)]
    red, green, blue, opacity = zip(*table, strict=True)
    return {
        "names": {str(value): meaning for value, meaning in side.convention.meanings},
        "colours": {"R": red, "G": green, "B": blue, "A": opacity, "I": list(range(len(table)))},
    }


def _rgb(colour: str) -> tuple[int, int, int]:
    red, green, blue = bytes.fromhex(colour.removeprefix("#"))
    return red, green, blue


def _legend(view: CaseView) -> tuple[tuple[str, str], ...]:
    """Return the colours of the tissues, and what each means on either side."""
    words: dict[str, dict[str, None]] = {}
    for side in (view.prediction, view.reference):
        if side is not None:
            colours = tissue_colours(side.convention)
            for value, meaning in side.convention.meanings:
                words.setdefault(colours[value], {})[f"{meaning} (label {value})"] = None
    return tuple((colour, " or ".join(meanings)) for colour, meanings in words.items())


def _pictures(view: CaseView) -> Iterator[Picture]:
    if view.prediction is None and view.reference is None:
        yield Picture(uri=picture_uri(sample_figure(view)), words="The four scans in one section")
    else:
        yield Picture(
            uri=picture_uri(view_figure(view)),
            words="Three planes through the tumour, with the outlines of its regions",
        )
    if view.prediction is not None and view.uncertainty is not None:
        yield Picture(
            uri=picture_uri(uncertainty_figure(view)),
            words="Outlines of the prediction, and its uncertainty in colours",
        )


def _facts_of_grid(view: CaseView, grid: EmbeddedVolumes) -> Sequence[Fact]:
    edges = " x ".join(f"{mm:.3g}" for mm in view.geometry.spacing_mm)
    voxels = " x ".join(map(str, view.geometry.shape))
    values = (
        f"rounded to steps of at most {grid.largest_step:.2g}"
        if grid.largest_step
        else "as in the files"
    )
    return (
        Fact(name="Grid of the files", words=f"{voxels} voxels of {edges} mm"),
        Fact(name="Intensities in the viewer", words=f"{values}; the part around the brain"),
    )
