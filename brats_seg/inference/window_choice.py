"""Choose window and overlap of a network on held-out cases: the fastest that lose no Dice.

More context than in training may help a network, or harm it, because the statistics of its
normalisation layers change; and every window costs time, most of all where windows overlap much. So
each candidate predicts the held-out cases, and `chosen_window` compares their Dice and their seconds.

Measured on 15 predictions of held-out real patients by U-Nets taught on patches of 64^3: see
`docs/windows.md`.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.config import OVERLAP
from brats_seg.errors import CaseProblemsError
from brats_seg.evaluation.significance import FEWEST_CASES, SMALLEST_GAIN, gain_of
from brats_seg.inference.out_of_fold import (
    HeldOut,
    OutOfFoldPrediction,
    WindowSetting,
    predict_held_out,
)
from brats_seg.models.build import default_window, has_centred_norms, size_multiple
from brats_seg.progress import Track
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import Window
from brats_seg.voxels.box import Triple, rounded_up

WINDOW_PATCHES = (1.0, 1.5, 2.0)
"""Edges of windows to try, in training patches; the default and the whole crop are tried as well."""
LESS_OVERLAP = 0.25
"""Overlap that is tried besides the default."""
LARGEST_LOSS = SMALLEST_GAIN
"""Mean score that a faster window may lose against the best: less is no gain of a setting either."""
SAME_TIME = 1.05
"""Ratio of times below which two candidates count as equally fast, and the better one is taken."""

Settings: TypeAlias = tuple[WindowSetting, ...]
"""One for each run."""
Cases: TypeAlias = tuple[OutOfFoldPrediction, ...]
Values: TypeAlias = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowKind:
    """A candidate."""

    name: str
    settings: Settings
    """Window and overlap in each run."""

    def __str__(self) -> str:
        return f"{self.name} ({'; '.join(dict.fromkeys(map(str, self.settings)))})"


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowTrial:
    """Scores and time of a candidate, for tables."""

    name: str
    score: tuple[float, float, float]
    """Mean score of WT, TC and ET."""
    seconds: float
    """Mean time of a case: CPU time on a CPU."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TriedWindows:
    """The candidates that fitted in memory, the default first, and their predictions."""

    kinds: tuple[WindowKind, ...]
    cases: tuple[Cases, ...]
    """Predictions with each candidate: the held-out cases of all runs."""
    seconds: Values
    """(candidates,) mean time of a case."""

    def trials(self, scores: Values) -> tuple[WindowTrial, ...]:
        """Return the table of scores (candidates, cases, 3)."""
        rows = zip(self.kinds, scores.mean(axis=1).tolist(), self.seconds.tolist(), strict=True)
        return tuple(
            WindowTrial(name=str(kind), score=(wt, tc, et), seconds=round(seconds, 3))
            for kind, (wt, tc, et), seconds in rows
        )


def chosen_window(scores: Values, seconds: Values) -> int:
    """Return the index of the candidate to use.

    It is the fastest of those whose mean score is within `LARGEST_LOSS` of the best; a candidate that
    is slower than the default must also score higher by more than chance. On fewer cases than
    `FEWEST_CASES`, which show neither, it is the default.

    Args:
        scores: (candidates, cases) score of each case, the default first.
        seconds: (candidates,) time of a case.
    """
    if scores.shape[1] < FEWEST_CASES:
        return 0
    means = scores.mean(axis=1)
    fair = [
        place
        for place in np.flatnonzero(means >= means.max() - LARGEST_LOSS)
        if seconds[place] <= seconds[0] or gain_of(scores[0], scores[place]).is_sure
    ]
    if not fair:
        return 0
    quickest = min(seconds[place] for place in fair)
    as_quick = [place for place in fair if seconds[place] <= SAME_TIME * quickest]
    return int(max(as_quick, key=lambda place: means[place]))


def window_in_use(held_out: HeldOut) -> WindowSetting:
    """Return the window that a run predicts with: the one that was fitted, or the default."""
    fitted = held_out.trained.fitted
    if fitted.window is None:
        (setting,) = window_kinds([held_out])[0].settings
        return setting
    return _setting(fitted.window, OVERLAP if fitted.overlap is None else fitted.overlap)


def window_kinds(held_out: Sequence[HeldOut]) -> list[WindowKind]:
    """Return the candidates, the default first, without those larger than every crop."""
    if any(own.trained.config.patch.size == "whole" for own in held_out):
        trained = tuple(
            _setting("whole" if own.trained.config.patch.size == "whole" else _patch(own), OVERLAP)
            for own in held_out
        )
        return [WindowKind(name="as in training", settings=trained)]
    default = tuple(default_window(own.trained.config.model, _patch(own)) for own in held_out)
    named = {default: "the default"}
    for factor in WINDOW_PATCHES:
        name = f"{factor:g} x the training patch" if factor != 1 else "the training patch"
        named.setdefault(tuple(_enlarged(own, factor) for own in held_out), name)
    sliding = [
        WindowKind(name=name, settings=tuple(_setting(size, overlap) for size in sizes))
        for sizes, name in named.items()
        for overlap in (OVERLAP, LESS_OVERLAP)
        if (sizes == default and overlap == OVERLAP) or not _cover(held_out, sizes)
    ]
    if _cover(held_out, default):
        return sliding
    one_pass: dict[str, Window] = {"the whole crop": "whole"}
    if all(has_centred_norms(own.trained.config.model) for own in held_out):
        one_pass["the whole crop, with statistics of its centre"] = "centre"
    return sliding + [
        WindowKind(name=name, settings=tuple(_setting(window) for _ in held_out))
        for name, window in one_pass.items()
    ]


def try_windows(held_out: Sequence[HeldOut], device: Device, track: Track) -> TriedWindows:
    """Predict the held-out cases of each run with each candidate that fits in memory.

    Raises:
        CaseError: A case cannot be predicted, or no candidate fits in memory.
    """
    kinds = window_kinds(held_out)
    predicted = [
        predict_held_out(own, [kind.settings[place] for kind in kinds], device, track)
        for place, own in enumerate(held_out)
    ]
    fitting = [
        kind
        for kind in kinds
        if all(one in own for one, own in zip(kind.settings, predicted, strict=True))
    ]
    if not fitting:
        reasons = [f"{own.run}: no memory for the default window" for own in held_out]
        raise CaseProblemsError(reasons)
    cases = tuple(
        tuple(case for one, own in zip(kind.settings, predicted, strict=True) for case in own[one])
        for kind in fitting
    )
    seconds = np.array([np.mean([case.seconds for case in of_kind]) for of_kind in cases])
    return TriedWindows(kinds=tuple(fitting), cases=cases, seconds=seconds)


def _setting(window: Window, overlap: float | None = None) -> WindowSetting:
    return WindowSetting(window=window, overlap=None if isinstance(window, str) else overlap)


def _patch(own: HeldOut) -> Triple:
    return own.trained.identity.patch


def _enlarged(own: HeldOut, factor: float) -> Triple:
    multiple = size_multiple(own.trained.config.model, _patch(own))
    x, y, z = (ceil(n * factor) for n in _patch(own))
    return rounded_up((x, y, z), multiple)


def _cover(held_out: Sequence[HeldOut], sizes: Sequence[Triple]) -> bool:
    """Tell whether each window covers every crop of its run: it is then cut to the whole crop."""
    return all(
        all(n >= m for n, m in zip(size, own.data.largest_shape, strict=True))
        for own, size in zip(held_out, sizes, strict=True)
    )
