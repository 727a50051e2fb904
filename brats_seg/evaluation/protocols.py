"""What each challenge scores, and by which numbers: its regions, its lesions, its penalty.

`legacy` is how BraTS 2017 to 2022 scored whole regions; its HD95 is the one that the programs of
2023 print beside their lesion-wise scores under that name. `lesionwise2023` and `lesionwise2024` score
lesion by lesion, with parameters of their own for every task. The numbers are those of the
challenges' published programs, slips included: SNFH of the adult glioma task of 2024 was meant to
be dilated five times, and is dilated three times because its name is misspelt there.
"""

import math
from dataclasses import dataclass

from brats_seg.errors import ConfigError
from brats_seg.labels import BRATS2024_PED, REGIONS, LabelConvention

NSD_TOLERANCES_MM = (0.5, 1.0)
"""Of the normalised surface Dice of lesions."""

BRATS2024_MEN_RT = LabelConvention(
    name="brats2024-men-rt", meanings=((1, "GTV"),), regions=((1,), (1,), (1,)), painted=(1, 1, 1)
)
"""Meningioma before radiotherapy: a gross tumour volume and nothing else."""

_TISSUES = {
    "netc": frozenset({"NCR/NET", "NCR", "NET", "NETC"}),
    "snfh": frozenset({"ED", "SNFH"}),
    "ed": frozenset({"ED", "SNFH"}),
    "rc": frozenset({"RC"}),
    "cc": frozenset({"CC"}),
    "gtv": frozenset({"GTV"}),
}
"""The names that a region of one tissue goes by in the label conventions."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ScoredRegion:
    """A region, and what makes a lesion of it."""

    name: str
    """`wt`, `tc`, `et` or a tissue."""
    dilation: int = 0
    """Lesions whose dilations by so many steps touch are one; matched within as many."""
    minimum_mm3: float = 0.0
    """Lesions up to this volume are left out."""

    def values(self, convention: LabelConvention) -> tuple[int, ...]:
        """Return the voxel values that make up the region; none if the convention lacks the tissue."""
        if self.name in REGIONS:
            return convention.regions[REGIONS.index(self.name)]
        names = _TISSUES[self.name]
        return tuple(value for value, meaning in convention.meanings if meaning in names)


@dataclass(frozen=True, kw_only=True, slots=True)
class LesionRules:
    """How the lesions of a prediction are counted."""

    merges_predictions: bool
    """Whether predicted lesions are merged by dilation and dropped when small, as those of the reference."""
    joins_touching: bool = False
    """Whether lesions that touch the same lesion of another tissue are one."""
    counts_false_positives: bool = True
    """Whether lesions that only the prediction holds lower the score."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Protocol:
    """One way of scoring a case."""

    name: str
    """`legacy`, `lesionwise2023` or `lesionwise2024`."""
    task: str
    """The task of the challenge; empty where all tasks are scored alike."""
    regions: tuple[ScoredRegion, ...]
    """In the order of the table of scores."""
    penalty_mm: float | None
    """HD95 of a miss or a false alarm; None for the diagonal of the image."""
    lesions: LesionRules | None = None
    """None for whole regions only."""
    labels: LabelConvention | None = None
    """The numbering of a task that voxels cannot tell from others; None to detect it."""

    @property
    def region_names(self) -> tuple[str, ...]:
        """The names of the regions."""
        return tuple(region.name for region in self.regions)

    def hd95_penalty(self, shape: tuple[int, ...], spacing_mm: tuple[float, float, float]) -> float:
        """Return the HD95 in mm of a miss or a false alarm, on an image of that size."""
        if self.penalty_mm is not None:
            return self.penalty_mm
        return math.hypot(*(n * step for n, step in zip(shape, spacing_mm, strict=True)))


def protocol_named(name: str, task: str = "GLI") -> Protocol:
    """Return the protocol of a task, or raise `ConfigError` with those there are."""
    named = [protocol for protocol in PROTOCOLS if protocol.name == name]
    if not named:
        known = ", ".join(dict.fromkeys(protocol.name for protocol in PROTOCOLS))
        msg = f"protocol {name!r} is unknown; there are {known}"
        raise ConfigError(msg)
    for protocol in named:
        if protocol.task in ("", task.upper()):
            return protocol
    known = ", ".join(protocol.task for protocol in named)
    msg = f"protocol {name} has no task {task!r}; there are {known}"
    raise ConfigError(msg)


def _regions(names: tuple[str, ...], dilation: int, minimum_mm3: float) -> tuple[ScoredRegion, ...]:
    return tuple(
        ScoredRegion(name=name, dilation=dilation, minimum_mm3=minimum_mm3) for name in names
    )


def _of_2023(task: str, dilation: int, minimum_mm3: float) -> Protocol:
    return Protocol(
        name="lesionwise2023",
        task=task,
        regions=_regions(REGIONS, dilation, minimum_mm3),
        penalty_mm=374.0,
        lesions=LesionRules(merges_predictions=False),
    )


_ADULT_GLIOMA_2024 = Protocol(
    name="lesionwise2024",
    task="GLI",
    regions=(
        *_regions(("wt", "tc"), 3, 20),
        ScoredRegion(name="netc", dilation=5, minimum_mm3=20),
        ScoredRegion(name="snfh", dilation=3, minimum_mm3=20),
        ScoredRegion(name="et", dilation=3, minimum_mm3=10),
        ScoredRegion(name="rc", dilation=5, minimum_mm3=20),
    ),
    penalty_mm=337.0,
    lesions=LesionRules(merges_predictions=True, joins_touching=True),
)

PROTOCOLS = (
    Protocol(
        name="legacy",
        task="",
        regions=_regions(REGIONS, 0, 0),
        # the diagonal of 240 x 240 x 155 mm
        penalty_mm=373.12866,
    ),
    _of_2023("GLI", 3, 50),
    _of_2023("SSA", 3, 50),
    _of_2023("PED", 3, 50),
    _of_2023("MEN", 1, 50),
    _of_2023("MET", 1, 2),
    _ADULT_GLIOMA_2024,
    Protocol(
        name="lesionwise2024",
        task="SSA",
        regions=_regions(REGIONS, 3, 50),
        penalty_mm=374.0,
        lesions=LesionRules(merges_predictions=True),
    ),
    Protocol(
        name="lesionwise2024",
        task="PED",
        regions=_regions((*REGIONS, "netc", "cc", "ed"), 5, 10),
        penalty_mm=374.0,
        lesions=LesionRules(merges_predictions=True),
        labels=BRATS2024_PED,
    ),
    Protocol(
        name="lesionwise2024",
        task="MEN",
        regions=_regions(REGIONS, 1, 50),
        penalty_mm=374.0,
        lesions=LesionRules(merges_predictions=False),
    ),
    Protocol(
        name="lesionwise2024",
        task="MET",
        regions=_regions((*REGIONS, "rc"), 1, 2),
        penalty_mm=None,
        lesions=LesionRules(merges_predictions=True),
    ),
    Protocol(
        name="lesionwise2024",
        task="MEN-RT",
        regions=_regions(("gtv",), 1, 50),
        penalty_mm=None,
        lesions=LesionRules(merges_predictions=True, counts_false_positives=False),
        labels=BRATS2024_MEN_RT,
    ),
)
