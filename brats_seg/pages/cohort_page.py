"""Make the page of a folder of predictions: a table of all cases, with pictures, scores and warnings.

The table is sorted and filtered in the page by a script of its own. Cases with a reference come
first, those with the lowest mean Dice at the top; then those with most warnings. A picture of each
case lies in the page, so that 2,000 made-up cases took 7 MB.
"""

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image, UnidentifiedImageError

from brats_seg.cases.many import Failure
from brats_seg.cpu_threads import available_cpus
from brats_seg.evaluation.scores import RegionSummary
from brats_seg.figures.charts import FEWEST_SCORED, dice_figure, volume_figure
from brats_seg.labels import REGIONS
from brats_seg.pages.case import Fact
from brats_seg.pages.html import data_uri, picture_uri, write_page
from brats_seg.progress import Track, untracked

_AXIAL_FLAIR = (0.02, 0.51, 0.32, 0.9)
"""Part of a preview that is shown: left, top, right and bottom as shares of its size."""
_PICTURE_WIDTH = 160
"""Width of the picture of a case, in pixels."""
_QUALITY = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class CohortCase:
    """A predicted case of a cohort."""

    case_id: str
    ml: tuple[float, ...]
    """Volume of each of `REGIONS`."""
    warnings: tuple[str, ...] = ()
    dice: tuple[float, ...] = ()
    """Dice of each of `REGIONS`; empty without a reference."""
    preview: Path | None = None
    """Picture of the case in three planes, as `predict` writes it."""
    page: str = ""
    """Page of the case, relative to that of the cohort; empty without one."""

    @property
    def mean_dice(self) -> float | None:
        """Mean over the regions; None without a reference."""
        return float(np.mean(self.dice)) if self.dice else None


@dataclass(frozen=True, kw_only=True, slots=True)
class Cohort:
    """Predicted cases, and those that could not be predicted."""

    cases: tuple[CohortCase, ...]
    failures: tuple[Failure, ...] = ()
    summaries: tuple[RegionSummary, ...] = ()
    """Means of the scores of those cases that have a reference, by region."""
    facts: tuple[Fact, ...] = ()
    """Origin of the predictions."""
    remarks: tuple[str, ...] = ()
    """Sentences on all cases, or on cases that could not be scored."""

    @property
    def worst_first(self) -> tuple[CohortCase, ...]:
        """The cases by their mean Dice, those without a reference last and by their warnings."""
        return tuple(sorted(self.cases, key=_badness))

    @property
    def n_with_warnings(self) -> int:
        """Number of cases that have a warning."""
        return sum(bool(case.warnings) for case in self.cases)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Row:
    """A case and its picture, a URI; empty if there is none."""

    case: CohortCase
    picture: str


def write_cohort_page(
    cohort: Cohort, output: Path, *, title: str, track: Track = untracked
) -> None:
    """Write the page of a cohort.

    Args:
        cohort: Its cases.
        output: The page, a `.html`.
        title: Heading of the page.
        track: Shows the progress of reading the pictures.

    Raises:
        UsageError: The name of the page has another ending.
        EnvironmentalError: The page cannot be written.
    """
    ordered = cohort.worst_first
    with ThreadPoolExecutor(available_cpus()) as pool:
        pictures = pool.map(_thumbnail, [case.preview for case in ordered])
        shown = track(pictures, what="reading pictures", total=len(ordered))
        rows = [_Row(case=c, picture=uri) for c, uri in zip(ordered, shown, strict=True)]
    write_page(
        output,
        "cohort_page.html",
        title=title,
        cohort=cohort,
        rows=rows,
        regions=REGIONS,
        has_scores=any(case.dice for case in cohort.cases),
        has_pictures=any(row.picture for row in rows),
        summaries=[(one.region, one.n_cases, _mean_text(one)) for one in cohort.summaries],
        charts=[(words, picture_uri(figure)) for words, figure in _charts(cohort)],
    )


def dice_by_case(scores: pd.DataFrame) -> dict[str, tuple[float, ...]]:
    """Return the Dice of each of `REGIONS` by case; cases that lack a region are left out."""
    by_case = scores.pivot(index="case_id", columns="region", values="dice")
    complete = by_case.reindex(columns=list(REGIONS)).dropna()
    return {
        str(case_id): tuple(row)
        for case_id, row in zip(complete.index, complete.to_numpy().tolist(), strict=True)
    }


def _mean_text(summary: RegionSummary) -> str:
    return summary.spread("dice").mean_text(summary.n_cases)


def _badness(case: CohortCase) -> tuple[bool, float, int, str]:
    """Return the key by which the cases that need a look come first."""
    mean = case.mean_dice
    return mean is None, 0.0 if mean is None else mean, -len(case.warnings), case.case_id


def _thumbnail(preview: Path | None) -> str:
    """Return the axial FLAIR of a preview as a URI; empty without one that can be read."""
    if preview is None:
        return ""
    small = BytesIO()
    try:
        with Image.open(preview) as image:
            left, top, right, bottom = _AXIAL_FLAIR
            width, height = image.size
            box = (left * width, top * height, right * width, bottom * height)
            part = image.crop(box).convert("RGB")
    except (OSError, UnidentifiedImageError):
        # a picture was removed or is damaged: the case is shown without it
        return ""
    size = (_PICTURE_WIDTH, round(_PICTURE_WIDTH * part.height / part.width))
    part.resize(size, Image.Resampling.LANCZOS, reducing_gap=2.0).save(
        small, format="WEBP", quality=_QUALITY
    )
    return data_uri(small.getvalue(), "image/webp")


def _charts(cohort: Cohort) -> Iterator[tuple[str, Figure]]:
    """Yield the distributions over the cases, each with its words for those who cannot see it."""
    scored = [case.dice for case in cohort.cases if case.dice]
    if len(scored) >= FEWEST_SCORED:
        yield "Dice of every case by region", dice_figure(scored)
    if cohort.cases:
        volumes = {
            region: [case.ml[place] for case in cohort.cases]
            for place, region in enumerate(REGIONS)
        }
        yield "Predicted volume of every case by region", volume_figure(volumes)
