"""Settings of prediction that are fitted on out-of-fold predictions.

First the window: the training patch, larger ones, and the whole crop in one pass. Then, with the
window that is best, one after another, the inner regions first because the outer ones hold them:
the threshold of each region, its smallest component, and the volume of all ET below which it is
necrosis. A default is left only where that is more than chance (see `choice`). Several runs are
tuned together, since an ensemble has one set of thresholds; each case is predicted by the run that
never saw it.
"""

import hashlib
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.errors import CaseProblemsError, ConfigError
from brats_seg.evaluation.attempts import attempt_all
from brats_seg.evaluation.lesionwise import Scale, score_lesions
from brats_seg.evaluation.overlap import count_regions, dice
from brats_seg.evaluation.protocols import Protocol, protocol_named
from brats_seg.inference.choice import (
    LARGEST_CHANCE,
    SMALLEST_GAIN,
    best_candidate,
    gain_of,
)
from brats_seg.inference.held_out import HeldOut
from brats_seg.inference.out_of_fold import OutOfFoldCase, predict_held_out, words
from brats_seg.inference.postprocess import Decoding, decode_regions
from brats_seg.inference.tuned import Fit, Tuning, stored_tuning
from brats_seg.inference.window_kinds import ENLARGEMENTS, Windows, window_kinds
from brats_seg.labels import REGIONS
from brats_seg.models.device import Device
from brats_seg.progress import Track, untracked

THRESHOLDS = (0.45, 0.55, 0.4, 0.6, 0.35, 0.65, 0.3, 0.7, 0.25, 0.75, 0.8)
"""Tried for each region, nearest to the default first; none is below `LOWEST_PROBABILITY`."""
SMALLEST_MM3 = (10.0, 25.0, 50.0, 100.0, 200.0, 500.0)
"""Of components, tried for each region."""
SMALLEST_ET_MM3 = (25.0, 50.0, 100.0, 200.0, 350.0, 500.0, 1000.0)
"""Of all ET, tried."""
METRICS = ("dice", "lesionwise")
_INNERMOST_FIRST = (2, 1, 0)

Scores: TypeAlias = npt.NDArray[np.float64]
Cases: TypeAlias = tuple[OutOfFoldCase, ...]
Score: TypeAlias = Callable[[Cases, Sequence[Decoding]], Scores]


def metric_named(name: str, task: str) -> Protocol:
    """Return the protocol whose score is fitted to: plain Dice, or that of lesions of 2023.

    Raises:
        ConfigError: There is no such metric or task.
    """
    if name not in METRICS:
        msg = f"metric {name!r} is unknown; there are {', '.join(METRICS)}"
        raise ConfigError(msg)
    return protocol_named("legacy" if name == "dice" else "lesionwise2023", task)


def tune(
    held_out: Sequence[HeldOut],
    protocol: Protocol,
    device: Device,
    *,
    n_workers: int = 0,
    track: Track = untracked,
) -> Tuning:
    """Fit window and decoding of several runs to the mean score of their held-out cases.

    What an earlier call stored for the same weights and cases is returned as it is.

    Args:
        held_out: The runs.
        protocol: Of `metric_named`.
        device: Where the networks compute.
        n_workers: Processes that score; what is found does not depend on it.
        track: Shows how far the work is.

    Raises:
        CaseError: A case cannot be predicted.
        EnvironmentalError: A process was killed, or the disk is full.
    """
    key = _key(held_out, protocol, device)
    if (earlier := stored_tuning(held_out, key)) is not None:
        return earlier
    score: Score = partial(_scores, protocol=protocol, n_workers=n_workers, track=track)
    window_fit, windows, cases = _fit_window(held_out, device, score, track)
    before = score(cases[0], [Decoding()])[0]
    decoding, fits = _fit_decoding(cases[1], score)
    after = score(cases[1], [decoding])[0]
    return Tuning(
        key=key,
        metric=protocol.name,
        n_cases=len(cases[0]),
        runs=tuple(str(own.run) for own in held_out),
        fits=(window_fit, *fits),
        before=_triple(before.mean(axis=0)),
        after=_triple(after.mean(axis=0)),
        identities=tuple(
            replace(
                own.untuned.identity,
                window=window,
                thresholds=decoding.thresholds,
                smallest_mm3=decoding.smallest_mm3,
                smallest_et_mm3=decoding.smallest_et_mm3,
            )
            for own, window in zip(held_out, windows, strict=True)
        ),
    )


def _fit_window(
    held_out: Sequence[HeldOut], device: Device, score: Score, track: Track
) -> tuple[Fit, Windows, tuple[Cases, Cases]]:
    """Return the fit, the chosen windows, and the cases with the first windows and with the chosen."""
    kinds = window_kinds(held_out)
    predicted = [
        predict_held_out(own, [kind.windows[place] for kind in kinds], device, track)
        for place, own in enumerate(held_out)
    ]
    # what does not fit in memory is not among them
    kinds = [
        kind
        for kind in kinds
        if all(window in own for window, own in zip(kind.windows, predicted, strict=True))
    ]
    if not kinds:
        reasons = [f"{own.run}: no memory for the training patch" for own in held_out]
        raise CaseProblemsError(reasons)
    cases = [
        tuple(
            case
            for window, own in zip(kind.windows, predicted, strict=True)
            for case in own[window]
        )
        for kind in kinds
    ]
    scores = np.stack([score(of_kind, [Decoding()])[0] for of_kind in cases])
    names = [
        f"{kind.name} ({', '.join(dict.fromkeys(map(words, kind.windows)))})" for kind in kinds
    ]
    fit, place = _fit("window", names, scores)
    return fit, kinds[place].windows, (cases[0], cases[place])


def _fit_decoding(cases: Cases, score: Score) -> tuple[Decoding, list[Fit]]:
    decoding, fits = Decoding(), []

    def choose(setting: str, values: Sequence[float], candidates: Sequence[Decoding]) -> None:
        nonlocal decoding
        scores = score(cases, [decoding, *candidates])
        fit, place = _fit(setting, [f"{value:g}" for value in values], scores)
        fits.append(fit)
        decoding = [decoding, *candidates][place]

    for region in _INNERMOST_FIRST:
        thresholds = [_with(decoding.thresholds, region, value) for value in THRESHOLDS]
        candidates = [replace(decoding, thresholds=values) for values in thresholds]
        choose(f"threshold of {REGIONS[region].upper()}", (0.5, *THRESHOLDS), candidates)
    for region in _INNERMOST_FIRST:
        smallest = [_with(decoding.smallest_mm3, region, value) for value in SMALLEST_MM3]
        candidates = [replace(decoding, smallest_mm3=values) for values in smallest]
        setting = f"smallest component of {REGIONS[region].upper()}, mm3"
        choose(setting, (0.0, *SMALLEST_MM3), candidates)
    candidates = [replace(decoding, smallest_et_mm3=value) for value in SMALLEST_ET_MM3]
    choose("less ET than this is necrosis, mm3", (0.0, *SMALLEST_ET_MM3), candidates)
    return decoding, fits


def _fit(setting: str, names: Sequence[str], scores: Scores) -> tuple[Fit, int]:
    """Choose among candidates, the default first, by scores (candidates, cases, regions)."""
    default, *candidates = scores.mean(axis=2)
    sure = best_candidate(default, candidates)
    chosen = 0 if sure is None else sure + 1
    best = chosen or int(np.argmax(scores.mean(axis=(1, 2))))
    fit = Fit(
        setting=setting,
        default=names[0],
        chosen=names[chosen],
        best=names[best],
        gain=gain_of(default, scores[best].mean(axis=1)),
    )
    return fit, chosen


def _scores(
    cases: Cases, decodings: Sequence[Decoding], *, protocol: Protocol, n_workers: int, track: Track
) -> Scores:
    """Return scores (decodings, cases, regions)."""
    score = partial(_score_case, decodings=decodings, protocol=protocol)
    done = attempt_all(score, cases, "fitting", n_workers=n_workers, track=track)
    if done.failures:
        raise CaseProblemsError([f"{one.case_id}: {one.reason}" for one in done.failures])
    return np.stack(done.results, axis=1)


def _score_case(case: OutOfFoldCase, decodings: Sequence[Decoding], protocol: Protocol) -> Scores:
    said = case.read()
    scale = Scale(spacing_mm=said.spacing_mm, penalty_mm=0.0)
    rows = []
    for decoding in decodings:
        regions = decode_regions(said.probabilities, decoding, scale.voxel_mm3)
        if protocol.lesions is None:
            rows.append(dice(count_regions(regions, said.reference, case.case_id)))
        else:
            lesions = score_lesions(said.reference, regions, protocol, scale)
            rows.append(np.array([one.dice for one in lesions]))
    return np.stack(rows)


def _key(held_out: Sequence[HeldOut], protocol: Protocol, device: Device) -> str:
    tried = (ENLARGEMENTS, THRESHOLDS, SMALLEST_MM3, SMALLEST_ET_MM3)
    rule = (SMALLEST_GAIN, LARGEST_CHANCE)
    parts = [protocol.name, protocol.task, device.precision, str(tried), str(rule)]
    parts += [f"{own.key} {own.data.fingerprint}" for own in held_out]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


def _with(
    values: tuple[float, float, float], place: int, value: float
) -> tuple[float, float, float]:
    changed = list(values)
    changed[place] = value
    wt, tc, et = changed
    return wt, tc, et


def _triple(values: Scores) -> tuple[float, float, float]:
    wt, tc, et = map(float, values)
    return wt, tc, et
