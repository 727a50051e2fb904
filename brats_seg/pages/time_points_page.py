"""Make the page that compares two time points of a patient: both scans and the change of each region.

Where both scans have one grid, as those of BraTS have, they are shown in the same sections, and the
voxels that only one label map has are drawn too. Otherwise only the volumes are compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import numpy as np
from matplotlib.colors import to_rgb
from matplotlib.figure import Figure

from brats_seg.cases.case import have_one_grid
from brats_seg.evaluation.lesions import list_lesions
from brats_seg.figures.cases import SHOWN, planes_figure
from brats_seg.figures.sections import (
    PLANES,
    centre_of,
    draw_overlay,
    draw_section,
    draw_section_bar,
    section_of,
)
from brats_seg.figures.style import (
    FIRST_COLOUR,
    LEFT_IS_RIGHT,
    MODALITY_NAMES,
    RESEARCH_USE,
    SECOND_COLOUR,
    add_dark_legend,
    dark_figure,
    filled_key,
    outline_key,
)
from brats_seg.figures.view import CaseView, drawn_of
from brats_seg.labels import MODALITIES, REGIONS, RegionMasks
from brats_seg.pages.case import CasePage, viewer_values
from brats_seg.pages.embedded import embedded
from brats_seg.pages.html import (
    niivue_licence,
    packed_niivue,
    picture_uri,
    write_page,
)
from brats_seg.voxels.box import Mask, Triple

LEAST_OVERLAP = 0.95
"""Least Dice of the brains of two registered scans of one patient."""
_DRAWN = (("wt", "t2f"), ("et", "t1c"))
"""Regions whose changed voxels are drawn, and the modality that shows each."""
_CHANGE_WORDS = ("only in the later scan", "only in the earlier scan")
_CHANGE_COLOURS = (SECOND_COLOUR, FIRST_COLOUR)
_OPACITY = 0.75
"""Opacity of the changed voxels."""
_SMALL_PRINT = f"{RESEARCH_USE}; {LEFT_IS_RIGHT}"


@dataclass(frozen=True, kw_only=True, slots=True)
class RegionChange:
    """Volumes of a region at two time points."""

    region: str
    earlier_ml: float
    later_ml: float
    earlier_mm2: float
    """Sum of the products of the RANO diameters of the measurable lesions."""
    later_mm2: float
    gained_ml: float | None
    """Volume that only the later label map has; None unless both scans have one grid."""
    lost_ml: float | None
    """Volume that only the earlier one has."""

    @property
    def change_ml(self) -> float:
        """Growth; negative where the region has become smaller."""
        return self.later_ml - self.earlier_ml

    @property
    def change_percent(self) -> float | None:
        """Growth in per cent of the earlier volume; None if that is 0."""
        return 100 * self.change_ml / self.earlier_ml if self.earlier_ml else None


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimePoint:
    """A case with the label map that is compared."""

    view: CaseView
    side: str
    """Whether that is its `prediction` or its `reference`."""
    regions: RegionMasks
    """(3, X, Y, Z)"""

    @property
    def brain(self) -> Mask:
        """Voxels (X, Y, Z) in which any modality has a value."""
        return (self.view.images != 0).any(axis=0)

    @property
    def products_mm2(self) -> list[float]:
        """Sum over the measurable lesions of each region of the product of their RANO diameters."""
        lists = list_lesions(self.regions, self.view.affine)
        return [
            sum(one.axial.product_mm2 for one in own.lesions if one.is_measurable) for own in lists
        ]

    @property
    def region_ml(self) -> list[float]:
        """Volume of each region."""
        return [float(np.count_nonzero(mask)) * self.view.grid.voxel_ml for mask in self.regions]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TimePoints:
    """Two time points of a patient, and how they differ."""

    earlier: TimePoint
    later: TimePoint
    changes: tuple[RegionChange, ...]
    """One for each of `REGIONS`."""
    brain_overlap: float | None
    """Dice of the brains; None unless both scans have one grid."""

    @property
    def one_grid(self) -> bool:
        """Whether voxels of equal index are at one position in both scans."""
        return self.brain_overlap is not None


def write_time_points_page(earlier: CasePage, later: CasePage, output: Path) -> TimePoints:
    """Compare two cases of a patient, and write the page.

    Raises:
        UsageError: The name of the page has another ending than `.html`.
        CaseError: A case has no label map.
        EnvironmentalError: The page cannot be written.
    """
    cases = (earlier, later)
    found = compare_time_points(earlier.view, later.view)
    grids = [embedded(case.view) for case in cases]
    flags = [f"{case.view.case_id}: {flag}" for case in cases for flag in case.flags]
    write_page(
        output,
        "time_points_page.html",
        title=f"{earlier.view.case_id} and {later.view.case_id}",
        found=found,
        remarks=(*time_point_remarks(found), *flags),
        earlier_picture=picture_uri(_case_figure(found, found.earlier)),
        later_picture=picture_uri(_case_figure(found, found.later)),
        change_picture=picture_uri(change_figure(found)) if found.one_grid else None,
        viewers=[viewer_values(c.view, grid) for c, grid in zip(cases, grids, strict=True)],
        layers=[[one.name for one in g.volumes if one.name not in MODALITIES] for g in grids],
        scans=[[(n, MODALITY_NAMES[n]) for n in case.view.modalities] for case in cases],
        facts=[case.facts for case in cases],
        niivue=packed_niivue(),
        niivue_licence=niivue_licence(),
    )
    return found


def compare_time_points(earlier: CaseView, later: CaseView) -> TimePoints:
    """Measure how the regions of two cases differ, by the predictions where there are any.

    Raises:
        CaseError: A case has neither prediction nor reference.
    """
    before, after = (_time_point(view) for view in (earlier, later))
    one_grid = have_one_grid(earlier.geometry, later.geometry)
    return TimePoints(
        earlier=before,
        later=after,
        changes=tuple(_changes(before, after, one_grid=one_grid)),
        brain_overlap=_overlap(before.brain, after.brain) if one_grid else None,
    )


def time_point_remarks(found: TimePoints) -> tuple[str, ...]:
    """Return sentences on what limits the comparison of two time points."""
    return tuple(_remarks(found))


def change_figure(found: TimePoints) -> Figure:
    """Draw the voxels that whole tumour and enhancing tumour have gained and lost.

    They are drawn over the later scan in three planes. Both scans must have one grid.
    """
    view, centre = found.later.view, _centre(found)
    figure = dark_figure(9, 3.3 * len(_DRAWN))
    rows = figure.subplots(len(_DRAWN), len(PLANES))
    for row, (region, modality) in zip(rows, _DRAWN, strict=True):
        before, after = (p.regions[REGIONS.index(region)] for p in (found.earlier, found.later))
        ((name, image),) = view.shown([modality]).items()
        for axes, (plane, axis) in zip(row, PLANES, strict=True):
            draw_section(axes, image, axis, centre[axis], view.grid)
            draw_section_bar(axes, axis, view.grid)
            changed = (after & ~before, before & ~after)
            draw_overlay(axes, _painted([section_of(c, axis, centre[axis]) for c in changed]))
            words = f"{region.upper()} over {MODALITY_NAMES[name]}, {plane} {centre[axis]}"
            axes.set_title(words, color="white", fontsize="small")
    add_dark_legend(figure, filled_key(_CHANGE_WORDS, _CHANGE_COLOURS), _SMALL_PRINT)
    return figure


def _time_point(view: CaseView) -> TimePoint:
    side, regions = drawn_of(view)[-1]
    return TimePoint(view=view, side=side, regions=regions)


def _changes(before: TimePoint, after: TimePoint, *, one_grid: bool) -> Iterator[RegionChange]:
    ml = list(zip(before.region_ml, after.region_ml, strict=True))
    mm2 = list(zip(before.products_mm2, after.products_mm2, strict=True))
    for place, region in enumerate(REGIONS):
        earlier_ml, later_ml = ml[place]
        shared_ml = None
        if one_grid:
            both = np.count_nonzero(before.regions[place] & after.regions[place])
            shared_ml = int(both) * after.view.grid.voxel_ml
        yield RegionChange(
            region=region,
            earlier_ml=earlier_ml,
            later_ml=later_ml,
            earlier_mm2=mm2[place][0],
            later_mm2=mm2[place][1],
            gained_ml=None if shared_ml is None else later_ml - shared_ml,
            lost_ml=None if shared_ml is None else earlier_ml - shared_ml,
        )


def _overlap(one: Mask, other: Mask) -> float:
    """Return the Dice of two masks that are not both empty."""
    total = np.count_nonzero(one) + np.count_nonzero(other)
    return 2 * np.count_nonzero(one & other) / total


def _remarks(found: TimePoints) -> Iterator[str]:
    before, after = found.earlier, found.later
    if before.side != after.side:
        yield (
            f"{before.view.case_id} is shown by its {before.side} and {after.view.case_id} by its "
            f"{after.side}: part of the change may be the difference between the two."
        )
    if found.brain_overlap is None:
        yield (
            "The two scans have different grids, so that only their volumes are compared, and each is "
            "shown in sections of its own. Register the later scan to the earlier one to see which "
            "voxels changed."
        )
    elif found.brain_overlap < LEAST_OVERLAP:
        yield (
            f"The brains of the two scans overlap with a Dice of {found.brain_overlap:.2f}; registered "
            f"scans of one patient have {LEAST_OVERLAP:g} or more. Check that both are of one patient "
            "and registered. The volumes do not depend on that, but the changed voxels do."
        )
    if found.brain_overlap == 1 and np.array_equal(before.view.images, after.view.images):
        yield "Both time points have the same voxels: one is a copy of the other."


def _centre(found: TimePoints) -> Triple:
    """Return the voxel that the sections of both scans go through."""
    either = found.earlier.regions | found.later.regions
    return centre_of(either, found.later.view.images[0])


def _case_figure(found: TimePoints, point: TimePoint) -> Figure:
    view = point.view
    figure = planes_figure(
        view.shown(SHOWN),
        point.regions,
        view.grid.spacing_mm,
        directions=view.grid.directions,
        centre=_centre(found) if found.one_grid else None,
    )
    words = [f"{r.upper()} {ml:.1f} ml" for r, ml in zip(REGIONS, point.region_ml, strict=True)]
    add_dark_legend(figure, outline_key(words, [ml > 0 for ml in point.region_ml]), _SMALL_PRINT)
    return figure


def _painted(sections: list[Mask]) -> np.ndarray[tuple[int, ...], np.dtype[np.float64]]:
    """Return gained and lost voxels (rows, columns) in colours (rows, columns, 4)."""
    picture = np.zeros((*sections[0].shape, 4))
    for section, colour in zip(sections, _CHANGE_COLOURS, strict=True):
        picture[section] = (*to_rgb(colour), _OPACITY)
    return picture
