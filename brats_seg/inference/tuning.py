"""Tune the decoding on predictions of held-out cases.

One setting is fitted after another, the inner regions first because the outer ones contain them: the
threshold of each region, its smallest component, and the probability that some voxel of ET must reach and
the volume that it must have in all, or else it is necrosis.
The score is the mean of Dice, which a false speck hardly changes, and of the lesion-wise Dice of 2023, which
counts it as a lesion. A default is replaced only where the gain is more than chance (`evaluation.significance`).
Several runs are tuned together, because an ensemble has one decoding; each case is predicted by the run
that it was held out of. The result is stored with the weights of each run.
"""

import logging
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import TypeAlias, TypeVar

import numpy as np
import numpy.typing as npt
from pydantic import JsonValue

from brats_seg.cases.many import map_cases
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import CaseProblemsError, counted, some_of
from brats_seg.evaluation import significance
from brats_seg.evaluation.lesions import Scale, group_lesions, score_lesions
from brats_seg.evaluation.metrics import RegionCounts, count_regions, dice
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import SubsetScores, pool_scores
from brats_seg.inference import held_out
from brats_seg.progress import Track, untracked
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import FittedPrediction, ModelCard, run_locked
from brats_seg.voxels.regions import Decoding
from brats_seg.wings import find_wing

log = logging.getLogger(__name__)

_LEARNT = "%s: its first weights had learnt from %s: what was fitted to these is too good"
THRESHOLDS = (0.5, 0.45, 0.55, 0.4, 0.6, 0.35, 0.65, 0.3, 0.7, 0.25, 0.75, 0.8)
"""Thresholds to try, the default and its neighbours first; none is below `LOWEST_PROBABILITY`."""
SMALLEST_MM3 = (0.0, 10.0, 25.0, 50.0, 100.0, 200.0, 500.0)
"""Smallest components to try, the default first."""
SUREST_ET = (0.0, 0.9, 0.99, 0.999, 0.9999, 0.99999, 0.999999)
"""Probabilities to try for the surest voxel of ET, the default first."""
SMALLEST_ET_MM3 = (0.0, 25.0, 50.0, 100.0, 200.0, 350.0, 500.0, 1000.0)
"""Smallest volumes of all ET to try, the default first."""
_TUNED = (
    ("thresholds", 2, "threshold of ET", THRESHOLDS),
    ("thresholds", 1, "threshold of TC", THRESHOLDS),
    ("thresholds", 0, "threshold of WT", THRESHOLDS),
    ("smallest_mm3", 2, "smallest component of ET, mm3", SMALLEST_MM3),
    ("smallest_mm3", 1, "smallest component of TC, mm3", SMALLEST_MM3),
    ("smallest_mm3", 0, "smallest component of WT, mm3", SMALLEST_MM3),
    ("surest_et", None, "ET less sure than this is necrosis", SUREST_ET),
    ("smallest_et_mm3", None, "less ET than this is necrosis, mm3", SMALLEST_ET_MM3),
)
"""Fields of `Decoding` in the order of fitting, the innermost region first: the index of the region,
the words for the table of results, and the values to try."""
_PROTOCOL = protocol_named("lesionwise2023")

Scores: TypeAlias = npt.NDArray[np.float64]
Cases: TypeAlias = Sequence[held_out.HeldOutCase]
Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class FittedSetting:
    """Result for one setting."""

    setting: str
    default: str
    chosen: str
    """Value to use; the default if no other is significantly better."""
    best: str
    """Value with the highest score, significant or not."""
    gain: significance.Gain
    """Gain of the best value over the default."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Tuning:
    """Result of tuning."""

    n_cases: int
    runs: tuple[str, ...] = ()
    fits: tuple[FittedSetting, ...]
    before: tuple[tuple[float, ...], ...]
    """Mean Dice of WT, TC, ET with the default decoding, and mean lesion-wise Dice."""
    after: tuple[tuple[float, ...], ...]
    """The same with the chosen settings, on the cases that they were chosen on, hence optimistic."""
    fitted: FittedPrediction
    """Settings stored with the weights of each run."""
    notes: dict[str, JsonValue] = field(default_factory=dict)
    """Notes for the cards of the networks."""
    subset_scores: tuple[SubsetScores, ...] = ()
    """Scores of held-out cases without some modalities; none without modality dropout."""


def tune_runs(
    runs: Sequence[Path],
    *,
    prepared_path: Path,
    device: str = "auto",
    precision: str = "auto",
    track: Track = untracked,
) -> Tuning:
    """Fit thresholds and smallest volumes on held-out cases, and store them with the weights.

    For runs with modality dropout, the loss without some modalities is measured and stored too.

    Args:
        runs: Folders of runs that are to be averaged; each predicts the cases held out of it. Of a case
            that several runs hold out, the last prediction is taken.
        prepared_path: Folder of the prepared cases that the runs were trained on.
        device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.
        precision: `auto`, `fp32`, `fp16` or `bf16`.
        track: Shows the progress.

    Raises:
        UsageError: A folder is not a run, the runs were trained on other cases, or another process
            trains or tunes one of them.
        CaseError: A case cannot be predicted.
        EnvironmentalError: The device is not available, a process was killed, or the disk is full.
    """
    torch_device = choose_device(device, precision)
    folders = list({run.resolve(): run for run in runs}.values())
    with ExitStack() as locks:
        for run in folders:
            held_out.check_is_run(run)
            # a training would replace the weights that the settings are fitted to
            locks.enter_context(run_locked(run))
        opened = [held_out.open_held_out(run, prepared_path) for run in folders]
        _warn_of_few(len({name for run in opened for name in run.data.split.validation}))
        # cases that an earlier call predicted with the same weights are read
        predict = partial(held_out.predict_held_out, device=torch_device, track=track)
        # once where several runs hold it out: four predictions of a patient are no four patients
        cases = {case.case_id: case for run in opened for case in predict(run)}
        tuning = fit_cases([*cases.values()], n_workers=available_cpus(), track=track)
        for one in opened:
            if seen := one.trained.cases.seen_among([name] for name in one.data.split.validation):
                log.warning(_LEARNT, one.run, some_of(seen))
            one.store(tuned_card(one.trained.card, tuning.fitted, tuning.notes))
        # read again, because the subsets are measured with the settings that are stored now
        opened = [held_out.open_held_out(run, prepared_path) for run in folders]
        scores = [s for run in opened for s in held_out.measure_subsets(run, torch_device, track)]
    return replace(tuning, runs=tuple(map(str, folders)), subset_scores=pool_scores(scores))


def fit_cases(cases: Cases, *, n_workers: int = 0, track: Track = untracked) -> Tuning:
    """Fit the decoding to cases that were held out, and predict their Dice."""

    def on_cases(
        function: Callable[[held_out.HeldOutCase], Result], what: str
    ) -> tuple[Result, ...]:
        done = map_cases(function, cases, what, n_workers=n_workers, track=track)
        if done.failures:
            raise CaseProblemsError([failure.message for failure in done.failures])
        return done.results

    def score(decodings: Sequence[Decoding]) -> Scores:
        return np.stack(on_cases(partial(_score_case, decodings=decodings), "fitting"), axis=1)

    decoding, fits = _fit_decoding(score)
    means = score([Decoding(), decoding]).mean(axis=1).tolist()
    before, after = (tuple(map(tuple, rows)) for rows in means)
    notes: dict[str, JsonValue] = {}
    if (checks := find_wing("quality.result")) is not None:
        count = partial(_count_case, decoding=decoding)
        probabilities, counts = zip(*on_cases(count, "fitting the predicted Dice"), strict=True)
        notes = checks.notes_of_held_out(probabilities, counts)
    return Tuning(
        n_cases=len(cases),
        fits=tuple(fits),
        before=before,
        after=after,
        fitted=FittedPrediction(decoding=decoding),
        notes=notes,
    )


def tuned_card(
    card: ModelCard, fitted: FittedPrediction, notes: Mapping[str, JsonValue]
) -> ModelCard:
    """Return a card with fitted settings and notes, without the scores of other settings."""
    tuned = card.model_copy(update={"fitted": fitted, "notes": {**card.notes, **notes}})
    return card if tuned == card else tuned.model_copy(update={"subset_scores": ()})


def _warn_of_few(n_cases: int) -> None:
    """Warn before cases are predicted that are too few for any gain to be significant."""
    if n_cases < significance.FEWEST_CASES:
        log.warning(
            "%s cannot change a setting: a gain in every one of them has the p value %.3g, and at most "
            "%g is needed, which takes %d cases. It takes the runs of more folds, or more cases.",
            *(counted(n_cases, "held-out case"), 0.5**n_cases),
            *(significance.LARGEST_CHANCE, significance.FEWEST_CASES),
        )


def _fit_decoding(
    score: Callable[[Sequence[Decoding]], Scores],
) -> tuple[Decoding, list[FittedSetting]]:
    """Fit one setting after another to the mean of scores (decodings, cases, 2, regions)."""
    decoding, fits = Decoding(), []
    for name, region, label, values in _TUNED:
        candidates = [_change(decoding, name, region, value) for value in values]
        means = score(candidates).mean(axis=(2, 3))
        chosen = significance.best_candidate(means)
        best = chosen or int(np.argmax(means.mean(axis=1)))
        texts = [f"{value:g}" for value in values]
        fits.append(
            FittedSetting(
                setting=label,
                default=texts[0],
                chosen=texts[chosen],
                best=texts[best],
                gain=significance.gain_of(means[0], means[best]),
            )
        )
        decoding = candidates[chosen]
    return decoding, fits


def _change(decoding: Decoding, name: str, region: int | None, value: float) -> Decoding:
    """Return a decoding with another value of a setting, of one region or of all."""
    changed: object = value
    if region is not None:
        values = getattr(decoding, name)
        changed = (*values[:region], value, *values[region + 1 :])
    return decoding.model_copy(update={name: changed})


def _score_case(case: held_out.HeldOutCase, decodings: Sequence[Decoding]) -> Scores:
    """Return the Dice and the lesion-wise Dice of each region (decodings, 2, 3) of a case."""
    stored = case.read()
    scale = Scale(spacing_mm=stored.spacing_mm, penalty_mm=0, with_distances=False)
    references, rows = group_lesions(stored.reference, _PROTOCOL), dict[bytes, Scores]()
    keyed = [(masks.tobytes(), masks) for masks in map(stored.regions, decodings)]
    for key, masks in keyed:
        # many settings change nothing in a case
        if key not in rows:
            whole = dice(count_regions(masks, stored.reference, case.case_id))
            of_lesions = score_lesions(references, masks, _PROTOCOL, scale)["lesionwise_dice"]
            rows[key] = np.array([whole, of_lesions])
    return np.array([rows[key] for key, _ in keyed])


def _count_case(case: held_out.HeldOutCase, decoding: Decoding) -> tuple[Scores, RegionCounts]:
    """Return the mean probability of each region of a case, and its voxel counts."""
    stored, checks = case.read(), find_wing("quality.result")
    assert checks is not None
    regions = stored.regions(decoding)
    counts = count_regions(regions, stored.reference, case.case_id)
    return checks.mean_probabilities(stored.values, regions), counts
