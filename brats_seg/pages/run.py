"""Write the page of a training run: history, scores of the held-out cases, the worst ones, settings."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pandas as pd
from matplotlib.figure import Figure

from brats_seg.cases.folds import SPLIT_NAME, Split, read_split
from brats_seg.config import LONGEST_YAML, Config, differing_settings, load_config, read_yaml
from brats_seg.data.loader import whole_case
from brats_seg.errors import some_of
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.figures import charts
from brats_seg.figures.cases import SHOWN, planes_figure
from brats_seg.figures.sections import Grid, Image, centre_of
from brats_seg.files import read_bounded
from brats_seg.inference.held_out import HeldOut, HeldOutCase, open_held_out, predict_held_out
from brats_seg.labels import MODALITIES, REGIONS, RegionMasks
from brats_seg.pages import html
from brats_seg.progress import Track, duration_text, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.weights import BEST_NAME, run_locked
from brats_seg.training.run_folder import CONFIG_NAME, ENVIRONMENT_NAME
from brats_seg.training.state import SavedState, read_state
from brats_seg.voxels.box import Box, triple

RUN_PAGE = "report.html"
"""Page of a run, in its folder."""
_WATCHED = {"val_dice": "validation Dice", "val_loss": "validation loss"}
"""Words for the value that the best weights are chosen by."""
_N_WORST = 3
"""Held-out cases of a run that are drawn."""


class HeldOutScore(NamedTuple):
    """Scores of a held-out case, each for the regions of `REGIONS`."""

    case_id: str
    dice: tuple[float, ...]
    reference_ml: tuple[float, ...]
    prediction_ml: tuple[float, ...]

    @property
    def mean_dice(self) -> float:
        """Mean over the regions."""
        return float(np.mean(self.dice))


def is_run(path: Path) -> bool:
    """Return whether a folder is that of a run."""
    return (path / CONFIG_NAME).is_file() and (path / SPLIT_NAME).is_file()


def write_run_page(
    run: Path,
    page: Path,
    options: html.PageOptions = html.DEFAULT_OPTIONS,
    *,
    track: Track = untracked,
) -> None:
    """Write the page of a run; with the prepared cases, its worst held-out cases are drawn."""
    history = charts.read_history(run)
    config = load_config(text=read_yaml(run / CONFIG_NAME))
    split = read_split(run / SPLIT_NAME)
    best = read_state(run / BEST_NAME) if (run / BEST_NAME).exists() else None
    best_epoch = best.progress.epoch if best else None
    shown = history[history["epoch"].isin([best_epoch, history["epoch"].iloc[-1]])]
    scores: list[HeldOutScore] = []
    pictures: list[tuple[HeldOutScore, str, str]] = []
    if options.prepared is not None:
        device = choose_device(options.device, options.precision)
        with run_locked(run):
            held_out = open_held_out(run, options.prepared)
            scores, pictures = held_out_scores(held_out, device, track)
    dice_of_all = [score.dice for score in scores]
    curves = charts.history_figure(history, best_epoch=best_epoch, with_rate=True)
    html.write_page(
        page,
        "run.html",
        title=f"Run {run.resolve().name}",
        remarks=tuple(_remarks(history, config, best)),
        facts=tuple(_facts(history, config, split, best)),
        history=html.inline_svg(curves),
        panels=[*_panels(curves)],
        epochs=shown["epoch"].tolist(),
        best_epoch=best_epoch,
        values=tuple(_epochs(shown)),
        regions=REGIONS,
        scores=scores,
        chart=html.inline_svg(charts.dice_figure(dice_of_all)) if len(dice_of_all) > 1 else None,
        pictures=pictures,
        settings=differing_settings(Config(), config),
        settings_text=config.to_yaml(),
        environment=_environment(run),
        split=split,
    )


def held_out_scores(
    held_out: HeldOut, device: Device, track: Track = untracked
) -> tuple[list[HeldOutScore], list[tuple[HeldOutScore, str, str]]]:
    """Return the scores of the held-out cases, the worst first, and the worst with two pictures."""
    cases = {case.case_id: case for case in predict_held_out(held_out, device, track)}
    scores = [_score(held_out, case) for case in cases.values()]
    scores.sort(key=lambda score: (score.mean_dice, score.case_id))
    pictures = [
        (score, *_pictures(*placed_prediction(held_out, cases[score.case_id])))
        for score in scores[:_N_WORST]
    ]
    return scores, pictures


def placed_prediction(
    held_out: HeldOut, case: HeldOutCase
) -> tuple[dict[str, Image], RegionMasks, RegionMasks, Grid]:
    """Return images, reference and prediction of a held-out case on the grid of the prepared cases."""
    sample, stored = whole_case(held_out.data.folder, case.case_id), case.read()
    reference = sample.target.numpy().astype(np.bool_)
    prediction = stored.regions(held_out.trained.card.fitted.decoding)
    box = Box.at(stored.start, triple(prediction.shape[1:]))
    placed = np.stack([box.placed(region, triple(reference.shape[1:])) for region in prediction])
    images = {name: sample.image[MODALITIES.index(name)].float().numpy() for name in SHOWN}
    return images, reference, placed, Grid(spacing_mm=stored.spacing_mm)


def _panels(figure: Figure) -> Iterator[dict[str, Any]]:
    """Yield the position, the limits and the lines of each panel, which the page needs to answer the pointer."""
    for axes in figure.axes:
        entries: Iterator[tuple[Any, str]] = zip(*axes.get_legend_handles_labels(), strict=True)
        box = axes.get_position()
        yield {
            "title": axes.get_ylabel(),
            "box": (box.x0, 1 - box.y1, box.width, box.height),
            "limits": axes.get_xlim(),
            "lines": [(label, line.get_xydata().tolist()) for line, label in entries],
        }


def _score(held_out: HeldOut, case: HeldOutCase) -> HeldOutScore:
    stored = case.read()
    regions = stored.regions(held_out.trained.card.fitted.decoding)
    counts = count_regions(regions, stored.reference, case.case_id)
    voxel_ml = Grid(spacing_mm=stored.spacing_mm).voxel_ml
    volumes = (tuple((n * voxel_ml).tolist()) for n in (counts.in_reference, counts.in_prediction))
    return HeldOutScore(case.case_id, tuple(dice(counts).tolist()), *volumes)


def _pictures(
    images: dict[str, Image], reference: RegionMasks, prediction: RegionMasks, grid: Grid
) -> tuple[str, str]:
    """Return pictures of the reference and of the prediction in the same sections."""
    # through the tumour if there is one, and not through what was predicted elsewhere
    shown = reference if reference[0].any() else prediction
    centre = centre_of(shown, images[SHOWN[0]])
    first, second = (
        html.picture_uri(planes_figure(images, regions, grid, centre=centre))
        for regions in (reference, prediction)
    )
    return first, second


def _remarks(history: pd.DataFrame, config: Config, best: SavedState | None) -> Iterator[str]:
    n_done, n_epochs = int(history["epoch"].iloc[-1]), _planned_epochs(config, best)
    if n_epochs is not None and n_done < n_epochs:
        yield f"{n_done} of {n_epochs} epochs are done."
    if best is None:
        yield "The run has not been validated yet, so that it has no weights to predict with."


def _planned_epochs(config: Config, best: SavedState | None) -> int | None:
    """Return how many epochs a run has; how many its hours hold is not known without a checkpoint."""
    if config.training.hours is None:
        return config.training.n_epochs
    return best.progress.n_epochs if best else None


def _facts(
    history: pd.DataFrame, config: Config, split: Split, best: SavedState | None
) -> Iterator[html.Fact]:
    yield html.Fact("Network", config.model.name)
    n_done, n_epochs = int(history["epoch"].iloc[-1]), _planned_epochs(config, best)
    yield html.Fact("Epochs", f"{n_done} of {n_epochs}" if n_epochs else str(n_done))
    yield html.Fact("Cases", f"{len(split.train)} to train on, {len(split.validation)} held out")
    yield html.Fact("Optimizer steps", str(int(history["step"].iloc[-1])))
    yield html.Fact("Time of the epochs", duration_text(float(history["seconds"].sum())))
    yield html.Fact("Peak memory", f"{history['peak_memory_mb'].max():.0f} MB")
    if best is None:
        return
    watched = _WATCHED[config.validation.watch]
    score = "" if best.progress.best is None else f", {watched} {best.progress.best:.3f}"
    yield html.Fact("Best weights", f"epoch {best.progress.epoch}{score}")
    yield html.Fact("Training set", best.card.identity.fingerprint, is_code=True)
    yield html.Fact("Label conventions", ", ".join(best.card.identity.conventions))
    if best.started_from is not None:
        yield html.Fact("Started from", best.started_from.path, is_code=True)
        if seen := best.started_from.seen:
            text = f"{some_of(seen)}: the weights that the run started from were trained on them"
            yield html.Fact("Scores too good", text)


def _epochs(shown: pd.DataFrame) -> Iterator[tuple[str, list[float]]]:
    """Yield each value of the history, by its name, in the epochs that are shown."""
    for phase, text in charts.PHASES.items():
        for curve in charts.select_curves(shown.columns):
            for part in ("", *curve.parts):
                column = "_".join(filter(None, (phase, curve.name, part)))
                if column in shown:
                    name = " ".join(filter(None, (curve.title, part.upper())))
                    yield f"{name}, {text}", shown[column].tolist()


def _environment(run: Path) -> dict[str, str]:
    """Return the versions and the device of a run; none if their file is missing or damaged."""
    try:
        return dict(json.loads(read_bounded(run / ENVIRONMENT_NAME, LONGEST_YAML)))
    except (OSError, ValueError, TypeError, RecursionError):
        return {}
