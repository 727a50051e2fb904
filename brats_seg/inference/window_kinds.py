"""Windows that are worth trying: that of training, larger ones, and the whole crop in one pass.

A network that learnt on patches may do better with more around a voxel than it ever saw, or worse,
because its norms take other statistics: which of the two is measured.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from math import ceil
from typing import TypeAlias

from brats_seg.inference.held_out import HeldOut
from brats_seg.models.build import size_multiple
from brats_seg.models.trained import Window

ENLARGEMENTS = (1.5, 2.0)
"""Windows tried, in training patches along each axis; the whole crop is tried besides."""

Windows: TypeAlias = tuple[Window, ...]
"""One for each run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WindowKind:
    """One way to choose a window."""

    name: str
    windows: Windows
    """What comes of it in each run."""


def window_kinds(held_out: Sequence[HeldOut]) -> list[WindowKind]:
    """Return the windows to try, that of training first; none that is larger than every crop."""
    if any(own.trained.config.patch.size == "whole" for own in held_out):
        learnt: Windows = tuple(
            "whole" if own.trained.config.patch.size == "whole" else own.trained.identity.patch
            for own in held_out
        )
        return [WindowKind(name="as in training", windows=learnt)]
    kinds = [
        WindowKind(
            name=f"{factor:g} x the training patch" if factor != 1 else "the training patch",
            windows=tuple(_enlarged(own, factor) for own in held_out),
        )
        for factor in (1.0, *ENLARGEMENTS)
    ]
    smaller = [kind for kind in kinds[1:] if not _all_covered(held_out, kind.windows)]
    whole: Windows = tuple("whole" for _ in held_out)
    return [kinds[0], *smaller, WindowKind(name="the whole crop", windows=whole)]


def _enlarged(own: HeldOut, factor: float) -> tuple[int, int, int]:
    patch = own.trained.identity.patch
    multiple = size_multiple(own.trained.config.model, patch)
    x, y, z = (ceil(n * factor / m) * m for n, m in zip(patch, multiple, strict=True))
    return x, y, z


def _all_covered(held_out: Sequence[HeldOut], windows: Windows) -> bool:
    """Tell whether each window holds every crop of its run: that is the whole crop, and padding."""
    return all(
        window == "whole"
        or all(n >= m for n, m in zip(window, own.data.largest_shape, strict=True))
        for own, window in zip(held_out, windows, strict=True)
    )
