"""Choose window and overlap of a network on held-out cases: the fastest that lose no Dice.

More context than in training may help a network, or harm it, because the statistics of its
normalisation layers change; and every window costs time, most of all where windows overlap much. So
each candidate predicts the held-out cases, and `chosen_window` compares their Dice and their seconds.

`docs/learning.md` has what was measured on real patients.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.config import OVERLAP, ModelConfig
from brats_seg.errors import CaseProblemsError
from brats_seg.evaluation.significance import FEWEST_CASES, SMALLEST_GAIN, gain_of
from brats_seg.inference.out_of_fold import (
    HeldOut,
    OutOfFoldPrediction,
    WindowSetting,
    predict_held_out,
)
from brats_seg.models.build import default_window, has_centred_norms, size_multiple, size_words
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
    return WindowSetting(window=fitted.window, overlap=fitted.overlap)


def window_kinds(held_out: Sequence[HeldOut]) -> list[WindowKind]:
    """Return the candidates, the default first, without those larger than every crop."""
    if any(own.trained.config.patch.size == "whole" for own in held_out):
        return [WindowKind(name="as in training", settings=(WindowSetting(),) * len(held_out))]
    sizes = tuple(default_window(_config(own), _patch(own)) for own in held_out)
    name = " and ".join(dict.fromkeys(map(size_words, sizes)))
    default: list[Window | None] = [None for _ in held_out]
    kinds = [_kind(name, default)]
    is_small = not _cover(held_out, sizes)
    if is_small:
        kinds.append(_kind(name, default, LESS_OVERLAP))
    for factor in WINDOW_PATCHES:
        name = f"{factor:g} x the training patch" if factor != 1 else "the training patch"
        windows = tuple(_enlarged(own, factor) for own in held_out)
        if windows != sizes and not _cover(held_out, windows):
            kinds += [_kind(name, windows, overlap) for overlap in (OVERLAP, LESS_OVERLAP)]
    if is_small:
        kinds.append(_kind("the crop in one pass", ["whole" for _ in held_out]))
        if all(has_centred_norms(_config(own)) for own in held_out):
            name = "the crop in one pass, statistics of its centre"
            kinds.append(_kind(name, ["centre" for _ in held_out]))
    return kinds


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


def _kind(name: str, windows: Sequence[Window | None], overlap: float | None = None) -> WindowKind:
    settings = tuple(WindowSetting(window=window, overlap=overlap) for window in windows)
    return WindowKind(name=name, settings=settings)


def _config(own: HeldOut) -> ModelConfig:
    return own.trained.config.model


def _patch(own: HeldOut) -> Triple:
    return own.trained.identity.patch


def _enlarged(own: HeldOut, factor: float) -> Triple:
    multiple = size_multiple(_config(own), _patch(own))
    x, y, z = (ceil(n * factor) for n in _patch(own))
    return rounded_up((x, y, z), multiple)


def _cover(held_out: Sequence[HeldOut], sizes: Sequence[Triple]) -> bool:
    """Tell whether each window covers every crop of its run: it is then cut to the whole crop."""
    return all(
        all(n >= m for n, m in zip(size, own.data.largest_shape, strict=True))
        for own, size in zip(held_out, sizes, strict=True)
    )
