"""Define the order of modalities, the label conventions of all BraTS releases, and regions.

A label map is an integer array `(X, Y, Z)`. Region masks are boolean `(3, X, Y, Z)` in the order
of `REGIONS`: the enhancing tumour is inside the tumour core, the core inside the whole tumour. The
conventions are those of BraTS 2017-2025 and of the Medical Segmentation Decathlon.
"""

import re
from dataclasses import dataclass
from itertools import chain, combinations
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from brats_seg.errors import ConfigError, unknown_name

MODALITIES = ("t1n", "t1c", "t2w", "t2f")
"""The order of modalities everywhere in the package."""

MODALITY_SUBSETS = tuple(chain.from_iterable(combinations(MODALITIES, n) for n in (3, 2, 1)))
"""The subsets of one to three modalities, which a model may be trained to take; larger ones first."""

REGIONS = ("wt", "tc", "et")
"""Whole tumour, tumour core, enhancing tumour: the order of regions everywhere."""

LabelMap: TypeAlias = npt.NDArray[np.uint8]
RegionMasks: TypeAlias = npt.NDArray[np.bool_]


@dataclass(frozen=True, kw_only=True, slots=True)
class LabelConvention:
    """Meaning of the voxel values of a release."""

    name: str
    """Name that is stored with cases and checkpoints."""
    meanings: tuple[tuple[int, str], ...]
    """Voxel value and tissue, without background."""
    regions: tuple[tuple[int, ...], ...]
    """Voxel values of WT, TC and ET."""

    @property
    def painted(self) -> tuple[int, ...]:
        """Value written for each region, in the order WT, TC, ET: later ones overwrite earlier ones.

        It is the first that the next region does not have.
        """
        pairs = zip(self.regions, (*self.regions[1:], ()), strict=True)
        return tuple(next((n for n in outer if n not in inner), outer[0]) for outer, inner in pairs)

    @property
    def values(self) -> frozenset[int]:
        """All values that may occur, including background."""
        return frozenset({0, *(value for value, _ in self.meanings)})

    def __str__(self) -> str:
        """Return the name and the values that are written, such as `brats2017 (1 NCR/NET, 2 ED, 4 ET)`."""
        meanings = dict(self.meanings)
        written = ", ".join(f"{value} {meanings[value]}" for value in sorted(self.painted))
        return f"{self.name} ({written})"


BRATS2017 = LabelConvention(
    name="brats2017",
    meanings=((1, "NCR/NET"), (2, "ED"), (4, "ET")),
    regions=((1, 2, 4), (1, 4), (4,)),
)
BRATS2023 = LabelConvention(
    name="brats2023",
    meanings=((1, "NCR"), (2, "ED"), (3, "ET")),
    regions=((1, 2, 3), (1, 3), (3,)),
)
BRATS2024 = LabelConvention(
    name="brats2024",
    meanings=((1, "NETC"), (2, "SNFH"), (3, "ET"), (4, "RC")),
    regions=((1, 2, 3), (1, 3), (3,)),
)
BRATS2024_PED = LabelConvention(
    name="brats2024-ped",
    meanings=((1, "ET"), (2, "NETC"), (3, "CC"), (4, "ED")),
    regions=((1, 2, 3, 4), (1, 2, 3), (1,)),
)
MSD = LabelConvention(
    name="msd",
    meanings=((1, "ED"), (2, "NET"), (3, "ET")),
    regions=((1, 2, 3), (2, 3), (3,)),
)
CONVENTIONS = (BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD)

# tissue or region, words that name it, and parts of words that do; the first that fits counts
_TISSUE_WORDS = (
    # before necrosis: its name in BraTS since 2023 is "surrounding non-enhancing FLAIR hyperintensity"
    ("ed", {"ed", "snfh"}, ("edema", "flair")),
    ("ncr", {"ncr", "net", "netc"}, ("nonenh", "necro")),
    ("et", {"et"}, ("enhanc",)),
    ("tc", {"tc"}, ("core",)),
    ("wt", {"wt"}, ("whole",)),
)


def convention_named(name: str, source: str = "") -> LabelConvention:
    """Return the convention of a name; raise `ConfigError` with the known names if there is none.

    The message begins with `source`, such as the table that has the name.

    Example:
        >>> convention_named("brats2017").regions
        ((1, 2, 4), (1, 4), (4,))
    """
    known = {convention.name: convention for convention in CONVENTIONS}
    if name not in known:
        raise ConfigError(source + unknown_name(f"label convention {name!r}", name, known))
    return known[name]


def tissue_named(name: str) -> str:
    """Return `ncr`, `ed` or `et` for the name of a tissue, `wt`, `tc` or `et` for one of a region.

    Example:
        >>> tissue_named("Non-enhancing tumour"), tissue_named("SNFH"), tissue_named("liver")
        ('ncr', 'ed', '')
    """
    letters = re.sub(r"[^a-z]+", " ", name.lower())
    words, joined = set(letters.split()), letters.replace(" ", "")
    for tissue, names, parts in _TISSUE_WORDS:
        if words & names or any(part in joined for part in parts):
            return tissue
    return ""


def regions_of(
    label_map: LabelMap, convention: LabelConvention, out: RegionMasks | None = None
) -> RegionMasks:
    """Convert a label map `(X, Y, Z)` to region masks `(3, X, Y, Z)`.

    Args:
        label_map: Label map in the values of the convention.
        convention: Convention of the label map.
        out: Array to write to, which saves allocating one.

    Example:
        >>> masks = regions_of(np.array([[[0, 1, 2, 4]]], dtype=np.uint8), BRATS2017)
        >>> masks[:, 0, 0].astype(int).tolist()
        [[0, 1, 1, 1], [0, 1, 0, 1], [0, 0, 0, 1]]
    """
    masks = np.empty((len(REGIONS), *label_map.shape), dtype=np.bool_) if out is None else out
    inside: tuple[int, ...] = ()
    # comparisons are ten times as fast as a lookup table. Each value is compared once, because a
    # region contains the next one
    for region in reversed(range(len(REGIONS))):
        first, *rest = (value for value in convention.regions[region] if value not in inside)
        np.equal(label_map, first, out=masks[region])
        for value in rest:
            masks[region] |= label_map == value
        if inside:
            masks[region] |= masks[region + 1]
        inside = convention.regions[region]
    return masks


def label_map_of(regions: RegionMasks, convention: LabelConvention) -> LabelMap:
    """Convert region masks `(3, X, Y, Z)` to a label map `(X, Y, Z)`.

    This is the inverse of `regions_of` for conventions of three tissues. Tissues that the regions do
    not distinguish (the resection cavity, the cystic component) are not restored.
    """
    label_map = np.zeros(regions.shape[1:], dtype=np.uint8)
    for mask, value in zip(regions, convention.painted, strict=True):
        label_map[mask] = value
    return label_map
