"""Make the page of a training run: history, scores of the held-out cases, the worst ones, settings."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pandas as pd
from matplotlib.figure import Figure

from brats_seg.figures.cases import SHOWN, planes_figure
from brats_seg.figures.charts import FEWEST_SCORED, dice_figure
from brats_seg.figures.history import PHASES, curves_of, history_figure
from brats_seg.figures.sections import Grid, centre_of
from brats_seg.labels import MODALITIES, REGIONS, RegionMasks
from brats_seg.pages.case import Fact
from brats_seg.pages.html import picture_uri, write_page
from brats_seg.voxels.grids import Spacing

_SIDES = ("reference", "prediction")


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutScore:
    """Scores of a held-out case, each for the regions of `REGIONS`."""

    case_id: str
    dice: tuple[float, ...]
    reference_ml: tuple[float, ...]
    prediction_ml: tuple[float, ...]

    @property
    def mean_dice(self) -> float:
        """Mean over the regions."""
        return float(np.mean(self.dice))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class HeldOutPicture:
    """A held-out case to draw, on the grid of the prepared cases."""

    score: HeldOutScore
    image: npt.NDArray[np.float32]
    """(4, x, y, z), 0 outside the brain."""
    reference: RegionMasks
    """(3, x, y, z)"""
    prediction: RegionMasks
    """(3, x, y, z)"""
    spacing_mm: Spacing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class RunReport:
    """Contents of the page of a run."""

    name: str
    history: pd.DataFrame
    """A row for each epoch; see `training.history`."""
    best_epoch: int | None
    """Epoch of the weights that prediction uses; None before the first validation."""
    facts: tuple[Fact, ...]
    """Network, cases and progress of the run."""
    settings: Mapping[str, tuple[object, object]]
    """Settings that are not the defaults, by dotted name: the default and the value of the run."""
    settings_text: str
    """All settings, as YAML."""
    environment: Mapping[str, str]
    train: tuple[str, ...]
    """Cases that the network has learnt from."""
    validation: tuple[str, ...]
    """Cases that were held out."""
    scores: tuple[HeldOutScore, ...] = ()
    """Held-out cases that have been scored; none if that was not asked for."""
    pictures: tuple[HeldOutPicture, ...] = ()
    """The worst of them."""
    remarks: tuple[str, ...] = ()

    @property
    def worst_first(self) -> tuple[HeldOutScore, ...]:
        """The scores by mean Dice."""
        return tuple(sorted(self.scores, key=lambda one: (one.mean_dice, one.case_id)))


def write_run_page(report: RunReport, output: Path) -> None:
    """Write the page of a run.

    Raises:
        UsageError: The name of the page does not end in `.html`.
        EnvironmentalError: The page cannot be written.
    """
    shown = _shown_epochs(report)
    write_page(
        output,
        "run_page.html",
        title=f"Run {report.name}",
        report=report,
        regions=REGIONS,
        history=picture_uri(history_figure(report.history)),
        epochs=shown["epoch"].tolist(),
        values=tuple(_epochs(shown)),
        chart=picture_uri(dice_figure([one.dice for one in report.scores]))
        if len(report.scores) >= FEWEST_SCORED
        else None,
        pictures=[
            (case.score, *(picture_uri(_case_figure(case, side)) for side in _SIDES))
            for case in report.pictures
        ],
    )


def _shown_epochs(report: RunReport) -> pd.DataFrame:
    """Return the rows of the best and the last epoch, or one row if they are the same."""
    history = report.history
    best = history[history["epoch"] == report.best_epoch]
    return pd.concat([best, history.tail(1)]).drop_duplicates("epoch")


def _epochs(shown: pd.DataFrame) -> Iterator[tuple[str, list[float]]]:
    """Yield each value of the history, by its name, in the epochs that are shown."""
    for phase, words in PHASES.items():
        for curve in curves_of(shown.columns):
            names = {f"{phase}_{curve.name}": f"{curve.title}, {words}"}
            names |= {
                f"{phase}_{curve.name}_{part}": f"{curve.title} {part.upper()}, {words}"
                for part in curve.parts
            }
            for column, name in names.items():
                if column in shown:
                    yield name, shown[column].tolist()


def _case_figure(case: HeldOutPicture, side: str) -> Figure:
    """Draw the reference or the prediction in the sections that both are drawn in."""
    regions = {"reference": case.reference, "prediction": case.prediction}
    images = {name: case.image[MODALITIES.index(name)] for name in SHOWN}
    # through the tumour, and not through what was predicted elsewhere
    centre = centre_of(case.reference, images[SHOWN[0]])
    grid = Grid(spacing_mm=case.spacing_mm)
    return planes_figure(images, regions[side], grid, centre=centre)
