"""Define the scoring protocols of the challenges: regions, rules for lesions and penalties.

`legacy` scores whole regions, as BraTS 2017 to 2022 did; its HD95 is the one that the programs of
2023 print under that name with their lesion-wise scores. `lesionwise2023` and `lesionwise2024`
score lesion by lesion, with separate parameters for every task; `brats2025` and `brats2026` match
lesions one to one. The numbers are those of the published programs, mistakes included: SNFH of the adult
glioma task of 2024 was meant to be dilated five times, but is dilated three times because its name is
misspelt there.
"""

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from brats_seg.errors import ConfigError, unknown_name
from brats_seg.labels import BRATS2024_PED, REGIONS, LabelConvention, tissue_named
from brats_seg.voxels.grids import Spacing

NSD_TOLERANCES_MM = (0.5, 1.0)
"""Tolerances of the normalised surface Dice of lesions."""

BRATS2024_MEN_RT = LabelConvention(
    name="brats2024-men-rt", meanings=((1, "GTV"),), regions=((1,), (1,), (1,))
)
"""Label convention of meningioma before radiotherapy: a gross tumour volume and nothing else."""


@dataclass(frozen=True, slots=True)
class ScoredRegion:
    """A region, and how its lesions are defined."""

    name: str
    """Name of the region: `wt`, `tc`, `et` or a tissue."""
    dilation: int = 0
    """Steps of dilation: lesions whose dilations touch are one, and lesions are matched within it."""
    minimum_mm3: float = 0.0
    """Volume up to which lesions are ignored."""

    def values(self, convention: LabelConvention) -> tuple[int, ...]:
        """Return the voxel values that make up the region; none if the convention lacks the tissue."""
        if self.name in REGIONS:
            return convention.regions[REGIONS.index(self.name)]
        tissue = _tissue(self.name)
        return tuple(value for value, name in convention.meanings if _tissue(name) == tissue)


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionRules:
    """Rules by which the lesions of a prediction are counted."""

    merges_predictions: bool
    """Whether predicted lesions are merged by dilation and dropped when small, as in the reference."""
    joins_touching: bool = False
    """Whether lesions that touch the same lesion of another tissue are one."""
    counts_false_positives: bool = True
    """Whether lesions that only the prediction holds lower the score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class MatchingRules:
    """Rules by which lesions are scored that are matched one to one."""

    large_mm3: float = 0.0
    """Volume from which a missed lesion counts as 0, and under which lesions are only counted as found
    or missed; 0 if the scores are means over the matched lesions alone."""
    found_dice: float = 0.0
    """Dice from which a lesion is found."""


@dataclass(frozen=True, slots=True)
class ScoringProtocol:
    """The rules by which a case is scored."""

    name: str
    """Name of the protocol, such as `legacy`; `PROGRAMS` has all of them."""
    task: str
    """Task of the challenge; empty where all tasks are scored alike."""
    regions: tuple[ScoredRegion, ...]
    """Regions in the order of the table of scores."""
    penalty_mm: float | None
    """HD95 of a missed or a false positive region; None for the diagonal of the image."""
    lesions: LesionRules | None = None
    """Rules for lesions; None if whole regions only are scored."""
    labels: LabelConvention | None = None
    """Label convention of a task that label values do not show; None to infer it."""
    matching: MatchingRules | None = None
    """Rules for lesions that are matched one to one."""

    @property
    def title(self) -> str:
        """Name and task of the protocol, with the challenge and the program that it follows."""
        return f"{self.name} {self.task}".rstrip() + f": {PROGRAMS[self.name]}"

    def hd95_penalty(self, shape: tuple[int, ...], spacing_mm: Spacing) -> float:
        """Return the HD95 in mm of a missed or a false positive region, for an image of that size."""
        if self.penalty_mm is not None:
            return self.penalty_mm
        return math.hypot(*(n * step for n, step in zip(shape, spacing_mm, strict=True)))


def protocol_named(name: str, task: str = "GLI") -> ScoringProtocol:
    """Return the protocol of a task, or raise `ConfigError` with the known ones."""
    tasks = {protocol.task: protocol for protocol in PROTOCOLS if protocol.name == name}
    if not tasks:
        raise ConfigError(unknown_name(f"protocol {name!r}", name, PROGRAMS))
    if protocol_of_all := tasks.get(""):
        tasks = dict.fromkeys((p.task for p in PROTOCOLS if p.task), protocol_of_all)
    if task.upper() not in tasks:
        msg = f"protocol {name} has no task {task!r}; there are {', '.join(tasks)}"
        raise ConfigError(msg)
    return tasks[task.upper()]


def _tissue(name: str) -> str:
    """Return one name for each tissue; cavities and a gross tumour volume have one in all releases."""
    return tissue_named(name) or name.lower()


def _regions(sizes: Mapping[str, tuple[int, float]]) -> tuple[ScoredRegion, ...]:
    """Return regions from the dilation and the largest ignored volume of each."""
    return tuple(ScoredRegion(name, *size) for name, size in sizes.items())


def _matching_protocols(name: str, metastases: MatchingRules) -> Iterator[ScoringProtocol]:
    """Yield the tasks of a year in which lesions are matched."""
    for task, names in _MATCHED_REGIONS.items():
        regions = tuple(map(ScoredRegion, names))
        matching = metastases if task == "MET" else MatchingRules()
        yield ScoringProtocol(name, task, regions, 373.0, None, _LABELS.get(task), matching)


PROGRAMS = {
    "legacy": "BraTS 2017 to 2022 as in BraTS-2023-Metrics",
    "lesionwise2023": "BraTS 2023 as in BraTS-2023-Metrics",
    "lesionwise2024": "BraTS 2024 as in BraTS-2024-Metrics",
    "brats2025": "BraTS 2025 as in brats-evaluation 0.0.10",
    "brats2026": "BraTS 2026 as in brats-evaluation 0.0.10",
}
"""Challenge and program that each protocol follows."""


_ALL_COUNT = LesionRules(merges_predictions=False)
_MERGED = LesionRules(merges_predictions=True)
_JOINED = LesionRules(merges_predictions=True, joins_touching=True)
_NO_FALSE_POSITIVES = LesionRules(merges_predictions=True, counts_false_positives=False)

_GLI_2024 = _regions(
    {"wt": (3, 20), "tc": (3, 20), "netc": (5, 20), "snfh": (3, 20), "et": (3, 10), "rc": (5, 20)}
)
_PED_2024 = _regions(dict.fromkeys((*REGIONS, "netc", "cc", "ed"), (5, 10)))
_MET_2024 = _regions(dict.fromkeys((*REGIONS, "rc"), (1, 2)))
_GTV = _regions({"gtv": (1, 50)})
_LABELS = {"PED": BRATS2024_PED, "MEN-RT": BRATS2024_MEN_RT}
_MATCHED_REGIONS: dict[str, tuple[str, ...]] = {
    "GLI": (*REGIONS, "netc", "snfh", "rc"),
    "PED": (*REGIONS, "netc", "cc", "ed"),
    "MEN": REGIONS,
    "MET": (*REGIONS, "rc"),
    "GOAT": REGIONS,
    "MEN-RT": ("gtv",),
}
_LARGE, _CLOSE, _SMALL = (
    _regions(dict.fromkeys(REGIONS, size)) for size in ((3, 50), (1, 50), (1, 2))
)

PROTOCOLS = (
    # the diagonal of 240 x 240 x 155 mm
    ScoringProtocol("legacy", "", _regions(dict.fromkeys(REGIONS, (0, 0))), 373.12866),
    ScoringProtocol("lesionwise2023", "GLI", _LARGE, 374.0, _ALL_COUNT),
    ScoringProtocol("lesionwise2023", "SSA", _LARGE, 374.0, _ALL_COUNT),
    ScoringProtocol("lesionwise2023", "PED", _LARGE, 374.0, _ALL_COUNT),
    ScoringProtocol("lesionwise2023", "MEN", _CLOSE, 374.0, _ALL_COUNT),
    ScoringProtocol("lesionwise2023", "MET", _SMALL, 374.0, _ALL_COUNT),
    ScoringProtocol("lesionwise2024", "GLI", _GLI_2024, 337.0, _JOINED),
    ScoringProtocol("lesionwise2024", "SSA", _LARGE, 374.0, _MERGED),
    ScoringProtocol("lesionwise2024", "PED", _PED_2024, 374.0, _MERGED, BRATS2024_PED),
    ScoringProtocol("lesionwise2024", "MEN", _CLOSE, 374.0, _ALL_COUNT),
    ScoringProtocol("lesionwise2024", "MET", _MET_2024, None, _MERGED),
    ScoringProtocol("lesionwise2024", "MEN-RT", _GTV, None, _NO_FALSE_POSITIVES, BRATS2024_MEN_RT),
    # the defaults of the program, and the numbers that the leaderboard of 2026 gives it
    *_matching_protocols("brats2025", MatchingRules(large_mm3=20.0, found_dice=0.1)),
    *_matching_protocols("brats2026", MatchingRules(large_mm3=27.0, found_dice=0.2)),
)
