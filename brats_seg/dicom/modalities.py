"""Sort the series of an examination into t1n, t1c, t2w and t2f, with the reason for each.

The description of a series is asked first, then the contrast agent that its header names, then echo,
repetition and inversion time. Where description and times contradict each other, or no series shows
contrast agent, nothing is guessed: a person says it with an override.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from brats_seg.cases.layouts import modality_named
from brats_seg.dicom.series import Series
from brats_seg.errors import UsageError, counted
from brats_seg.labels import MODALITIES

OVERRIDE = (
    "Export what is missing, or name the series of a modality: --series MODALITY=NUMBER, or a part of "
    "its description."
)
"""Next step where a modality has no series, or one that cannot be converted."""

_FEWEST_SLICES = 8
"""Slices of a series that can hold a whole brain: with 5 mm there are 25 or more."""
_T1 = "t1"
"""Weighting of t1n and t1c."""
_WEIGHTINGS = (
    ("t2f", r"flair|dark.?fluid|t2.?tirm|tirm.?t2"),
    (_T1, r"t1|mprage|spgr|bravo|\bvibe|tfl.?3d|3d.?tfl"),
    ("t2w", r"t2(?!\*|.?star|.?gre)"),
)
"""Weighting, and what descriptions of such series contain."""
_OTHERS = (
    ("a localiser", r"\bloc|locali[sz]er|scout|survey|plane.?loc|aahead|\b3.?pl\b"),
    ("diffusion", r"dwi|diff|\bdti|adc|trace|tensor|\bb.?[1-9]\d{2,3}\b|ep2d|\bfa.?map|resolve"),
    ("perfusion", r"perf|\bdsc|\bdce|\basl\b|\bcb[fv]\b|\bmtt\b|\bttp\b|\bpwi\b|twist|tmax"),
    (
        "susceptibility",
        r"\bswi|\bswan|suscep|t2.?\*|t2.?star|t2.{0,6}gre|hemo|veno|\bphase\b|min.?ip",
    ),
    ("angiography", r"\btof|angio|\bmra\b|\bmrv\b|\bmip\b|\bpc.?3d"),
    ("a difference image", r"subtr|\bsub\b"),
    ("spectroscopy", r"spectro|\bcsi\b|\bsvs\b|\bmrs\b"),
    ("balanced steady state", r"ciss|fiesta|trufi|b.?tfe"),
    ("fat suppression by a short inversion time", r"\bstir\b"),
    ("proton density", r"\bpd|proton"),
    ("functional", r"\bbold\b|fmri|resting"),
)
"""Kinds of series that are none of the four modalities, and what their descriptions contain."""
_DERIVED_KINDS = (
    r"LOCALIZER|ADC|TRACEW|FA|DIFFUSION|PERFUSION|CSA REPORT|SUBTRACTION|PROJECTION IMAGE|MIP"
    r"|MINIMUM|T1 MAP|T2 MAP|PHASE|SCREEN SAVE|CBF|CBV"
)
"""Words of the image type of series that are none of the four modalities."""
_BEFORE = r"\bpre\b(?!.?op)|pre.?(?:con|gd|gad|km|ce\b)|nativ|without|\bw/?o\b|\bohne\b|non.?con|unenh|\bplain\b|\bt1n"
_AFTER = r"post(?!.?op|.?surg|.?rt\b|erior)|\+\s?c\b|\bc\s?\+|\bgd|gad|\bce\b|\bkm\b|contrast|t1.?c\b|t1.?ce|t1.?gd|\+gd|enhanced"


@dataclass(frozen=True, kw_only=True, slots=True)
class SortedSeries:
    """A series, with the modality that it is taken for."""

    series: Series
    modality: str
    """`t1n`, `t1c`, `t2w`, `t2f`, or empty if it is not used."""
    reason: str
    is_chosen: bool = False
    """Whether a user chose it."""

    def __str__(self) -> str:
        """Return a line of the table that a user sees."""
        return f"{self.modality or 'not used'}: {self.series}, {self.reason}"


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Return the series that a user chose for a modality, from texts such as `t1c=5`.

    Raises:
        UsageError: A text has another form, or two name the same modality.
    """
    chosen: dict[str, str] = {}
    for text in texts:
        word, _, wanted = text.partition("=")
        modality = modality_named(word.strip())
        if not modality or not wanted.strip() or modality in chosen:
            msg = (
                f"--series {text!r}: expected MODALITY=NUMBER or MODALITY=PART OF THE DESCRIPTION, "
                f"once for each of {', '.join(MODALITIES)}"
            )
            raise UsageError(msg)
        chosen[modality] = wanted.strip()
    return chosen


def sort_series(
    series: Sequence[Series], overrides: Mapping[str, str] | None = None
) -> tuple[SortedSeries, ...]:
    """Return every series with the modality that it is, or why it is none.

    Of several series of one modality the one is taken that can be converted, is no reformatted
    image, has the thinnest slices, and is the latest, in that order.

    Args:
        series: The series of one examination.
        overrides: Series by modality that a user chose: its number, or a part of its description.
    """
    judged = [_overridden(one, overrides or {}) or _judged(one) for one in series]
    best = {
        modality: max((one for one in judged if one.modality == modality), key=_rank, default=None)
        for modality in MODALITIES
    }
    return tuple(
        one
        if not one.modality or one is best[one.modality]
        else SortedSeries(series=one.series, modality="", reason=_second(one, best[one.modality]))
        for one in judged
    )


def missing_words(found: Sequence[SortedSeries], overrides: Mapping[str, str] | None = None) -> str:
    """Return what is missing of the four modalities, and why; empty if nothing is."""
    of_modality = {one.modality: one for one in found if one.modality}
    missing = [modality for modality in MODALITIES if modality not in of_modality]
    words = [f"no series for {', '.join(missing)}"] if missing else []
    words += [
        f"nothing that is --series {modality}={wanted}"
        for modality, wanted in (overrides or {}).items()
        if not any(one.modality == modality and one.is_chosen for one in found)
    ]
    words += [
        f"{modality} is {one.series}, which cannot be converted: {one.series.problem}"
        for modality, one in of_modality.items()
        if one.series.problem
    ]
    return "; ".join(words)


def _overridden(series: Series, overrides: Mapping[str, str]) -> SortedSeries | None:
    for modality, wanted in overrides.items():
        if wanted == str(series.number) or (
            not wanted.isdecimal() and wanted.lower() in series.description.lower()
        ):
            reason = f"chosen by --series {modality}={wanted}"
            return SortedSeries(series=series, modality=modality, reason=reason, is_chosen=True)
    return None


def _judged(series: Series) -> SortedSeries:
    reason = _excluded(series)
    if reason:
        return SortedSeries(series=series, modality="", reason=reason)
    by_words, by_times = _by_words(series.description), _by_times(series)
    weighting = by_words or by_times
    # the headers of some fluid-attenuated series do not state their inversion time
    if {by_words, by_times} == {"t2f", "t2w"}:
        weighting = "t2f"
    elif by_words and by_times and by_words != by_times:
        reason = f"the description says {_shown(by_words)}, {_times(series)} say {_shown(by_times)}"
        return SortedSeries(series=series, modality="", reason=reason)
    if not weighting:
        reason = f"neither its description nor {_times(series)} say what it is"
        return SortedSeries(series=series, modality="", reason=reason)
    why = "its description" if by_words == weighting else _times(series)
    if weighting != _T1:
        return SortedSeries(series=series, modality=weighting, reason=f"by {why}")
    modality, agent = _contrast(series)
    return SortedSeries(series=series, modality=modality, reason=f"T1 by {why}; {agent}")


def _excluded(series: Series) -> str:
    """Return why a series is none of the four modalities; empty if it may be one."""
    if series.kind != "MR":
        return f"{series.kind or 'without a modality'}, not MR"
    types = sorted({word.upper() for word in series.image_type})
    if kinds := [word for word in types if re.fullmatch(_DERIVED_KINDS, word)]:
        return f"its image type is {', '.join(kinds).lower()}"
    text = _words(series.description)
    for name, pattern in _OTHERS:
        if re.search(pattern, text):
            return f"{name}, by its description"
    if series.is_diffusion or "EP" in series.techniques:
        return "diffusion or perfusion: it has a b value, or is echo planar"
    if series.n_slices < _FEWEST_SLICES and not series.problem:
        return f"only {counted(series.n_slices, 'slice')}"
    return ""


def _words(description: str) -> str:
    """Return a description in lower case, with spaces for what joins words in it."""
    return re.sub(r"[_^,;:]", " ", description.lower())


def _by_words(description: str) -> str:
    text = _words(description)
    found = [name for name, pattern in _WEIGHTINGS if re.search(pattern, text)]
    # a FLAIR sequence may have weak T1 contrast: T1 FLAIR
    if _T1 in found and "t2w" not in found:
        return _T1
    return found[0] if found else ""


def _by_times(series: Series) -> str:
    """Return the weighting that echo, repetition and inversion time (ms) show, or nothing."""
    echo, repetition, inversion = series.echo_ms, series.repetition_ms, series.inversion_ms or 0
    if echo is None or repetition is None:
        return ""
    if "GR" in series.techniques and "IR" not in series.techniques:
        return _T1 if echo < 10 and repetition < 100 else ""
    if inversion > 1500 and echo > 60:
        return "t2f"
    if echo > 60 and repetition > 2000 and not inversion:
        return "t2w"
    is_inverted = 400 < inversion < 1500 and echo < 40
    return _T1 if is_inverted or (echo < 40 and repetition < 1200) else ""


def _contrast(series: Series) -> tuple[str, str]:
    """Return t1c or t1n, and the reason."""
    text = _words(series.description)
    if re.search(_BEFORE, text):
        return "t1n", "before contrast agent, by its description"
    if re.search(_AFTER, text):
        return "t1c", "with contrast agent, by its description"
    if series.has_agent:
        return "t1c", "its header names a contrast agent"
    return "t1n", "no contrast agent is named"


def _rank(one: SortedSeries) -> tuple[bool, bool, bool, float, int]:
    series = one.series
    return (
        one.is_chosen,
        not series.problem,
        "DERIVED" not in series.image_type,
        -max(series.spacing_mm),
        series.number,
    )


def _second(one: SortedSeries, best: SortedSeries | None) -> str:
    if one.series.problem:
        return f"{one.modality}, but {one.series.problem}"
    number = "" if best is None else f" {best.series.number}"
    return f"{one.modality} too, but series{number} has thinner slices, is later, or was chosen"


def _shown(weighting: str) -> str:
    return {"t2f": "FLAIR", "t2w": "T2", _T1: "T1"}[weighting]


def _times(series: Series) -> str:
    named = (
        ("echo", series.echo_ms),
        ("repetition", series.repetition_ms),
        ("inversion", series.inversion_ms),
    )
    shown = [f"{name} {value:.4g} ms" for name, value in named if value is not None]
    return f"its times ({', '.join(shown) or 'none given'})"
