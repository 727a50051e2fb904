"""Sort the series of an examination into t1n, t1c, t2w and t2f, with the reason for each.

The description of a series is asked first, then the contrast agent that its header names, then echo,
repetition and inversion time. Where description and times contradict each other, or no series shows
contrast agent, nothing is guessed: a person says it with an override.
"""

import re
import unicodedata
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial

from brats_seg.cases.layouts import modality_named
from brats_seg.dicom.series import Series
from brats_seg.errors import UsageError, counted
from brats_seg.files import table_beside
from brats_seg.labels import MODALITIES

OVERRIDE = "Export what is missing, or add --series MODALITY=NUMBER or =PART OF THE DESCRIPTION."
"""Next step where a modality has no series, or one that cannot be converted."""

_FEWEST_SLICES = 8
"""Slices of a series that can hold a whole brain: with 5 mm there are 25 or more."""
_T1 = "t1"
"""Weighting of t1n and t1c, and of a series that does not say which of them it is."""
_BETTER = (
    *("was chosen", "can be converted", "is no reformatted image"),
    *("has thinner slices", "is later", "has a better echo"),
)
"""What the values of `_rank` say of the series that is taken."""
_SHOWN = {"t2f": "FLAIR", "t2w": "T2", _T1: "T1"}
_WORDS = table_beside(__file__)
"""Regular expressions of what the headers of series contain."""
_BEFORE = "|".join([*_WORDS["before"], _WORDS["not_yet"] + _WORDS["agent"]])
_AFTER = "|".join([*_WORDS["after"], rf"(?:\b|t1|\bm){_WORDS['agent']}"])


def parse_overrides(texts: Sequence[str]) -> dict[str, str]:
    """Return the series that a user chose for a modality, from texts such as `t1c=5`."""
    chosen: dict[str, str] = {}
    for text in texts:
        word, _, choice = text.partition("=")
        modality = modality_named(word.strip())
        if not modality or not choice.strip() or modality in chosen:
            msg = f"--series {text!r}: expected MODALITY=NUMBER or =PART OF THE DESCRIPTION, each once"
            raise UsageError(msg)
        chosen[modality] = choice.strip()
    return chosen


def sort_series(series: Sequence[Series], overrides: Mapping[str, str] = {}) -> tuple[Series, ...]:
    """Return every series of an examination with the modality that it is, or why it is none.

    Of several series of one modality the one is taken that a user chose, that can be converted, is no
    reformatted image, has the thinnest slices, and is the latest, in that order; of several echoes of
    it the last one for T2 and FLAIR, and the first one for T1. `overrides` are the series by modality
    that a user chose: its number, or a part of its description.
    """
    series = _assign_plain_t1([_classify(item, overrides) for item in series])
    rank, chosen = partial(_rank, overrides=overrides), []
    for item in series:
        better = max((other for other in series if other.modality == item.modality), key=rank)
        if item.modality and item is not better:
            ranks = zip(_BETTER, rank(better), rank(item), strict=True)
            why = next((text for text, one, other in ranks if one != other), "is its equal")
            why = item.problem or f"series {better.number} {why}"
            item = replace(item, modality="", reason=f"{item.modality}, but {why}")
        chosen.append(item)
    return tuple(chosen)


def _assign_plain_t1(series: Sequence[Series]) -> list[Series]:
    """Take a T1 series that says nothing of contrast agent for t1n, unless there are several."""
    silent = [item for item in series if item.modality == _T1]
    whole = [item for item in silent if not item.problem and "DERIVED" not in item.image_type]
    is_known = any(item.modality == "t1n" and not item.problem for item in series)
    modality = "" if is_known or len(whole) > 1 else "t1n"
    why = "" if modality else ", and it is not the only T1 series"
    assigned = {item: replace(item, modality=modality, reason=item.reason + why) for item in silent}
    return [assigned.get(item, item) for item in series]


def missing_reasons(series: Sequence[Series], overrides: Mapping[str, str] = {}) -> Iterator[str]:
    """Yield what is missing of the four modalities, and why; nothing if an examination has them all."""
    of_modality = {item.modality: item for item in series if item.modality}
    if missing := [modality for modality in MODALITIES if modality not in of_modality]:
        yield f"no series for {', '.join(missing)}"
    for modality, choice in overrides.items():
        if modality in missing or not _fit(of_modality[modality], choice):
            yield f"nothing that is --series {modality}={choice}"
    for modality, item in of_modality.items():
        if item.problem:
            yield f"{modality} is {item}, which cannot be converted: {item.problem}"


def _fit(series: Series, choice: str) -> int:
    """Return 2 for a choice that is the number or the description of a series, 1 for a part of that, else 0."""
    name = str(series.number) if choice.isdecimal() else series.description.lower()
    is_part = not choice.isdecimal() and choice.lower() in name
    return 2 if choice.lower() == name else int(is_part)


def _rank(series: Series, overrides: Mapping[str, str]) -> tuple[bool | float, ...]:
    fit = max((_fit(series, choice) for choice in overrides.values()), default=0)
    is_original = "DERIVED" not in series.image_type
    # the first echo of T2 shows proton density
    echo_ms = (series.echo_ms or 0) * (1 if series.modality.startswith("t2") else -1)
    return fit, not series.problem, is_original, -max(series.spacing_mm), series.number, echo_ms


def _classify(series: Series, overrides: Mapping[str, str]) -> Series:
    if overrides:
        # T2 is a part of T2 FLAIR
        closest = max(overrides.items(), key=lambda pair: (_fit(series, pair[1]), len(pair[1])))
        modality, choice = closest
        if _fit(series, choice):
            reason = f"chosen by --series {modality}={choice}"
            return replace(series, modality=modality, reason=reason)
    # without accents
    plain = unicodedata.normalize("NFKD", series.description).encode("ascii", "ignore").decode()
    text = re.sub(r"[_^,;:]", " ", plain.lower()).strip()
    reason = _exclusion_reason(series, text)
    modality, reason = ("", reason) if reason else _modality(series, text)
    return replace(series, modality=modality, reason=reason)


def _exclusion_reason(series: Series, text: str) -> str:
    """Return why a series is none of the four modalities; empty if it may be one."""
    if series.kind != "MR":
        return f"{series.kind or 'without a modality'}, not MR"
    types = sorted({word.upper() for word in series.image_type})
    if kinds := [word for word in types if re.fullmatch(_WORDS["image_types"], word)]:
        return f"its image type is {', '.join(kinds).lower()}"
    for name, pattern in _WORDS["others"].items():
        if re.search(pattern, text):
            return f"{name}, by its description"
    if series.is_diffusion or "EP" in series.techniques:
        return "diffusion or perfusion: it has a b value, or is echo planar"
    if series.n_slices < _FEWEST_SLICES and not series.problem:
        return f"only {counted(series.n_slices, 'slice')}"
    return ""


def _modality(series: Series, text: str) -> tuple[str, str]:
    """Return the modality of a series, empty if it is not clear, and the reason."""
    described, timed, times = _parse_weighting(text), _timed(series), _times(series)
    weighting = described or timed
    # the headers of some fluid-attenuated series do not state their inversion time
    if {described, timed} == {"t2f", "t2w"}:
        weighting = "t2f"
    elif described and timed and described != timed:
        return "", f"the description says {_SHOWN[described]}, {times} say {_SHOWN[timed]}"
    # at 3 T, fat is suppressed by 230 ms
    if weighting == "t2f" and 0 < (series.inversion_ms or 0) < 250:
        return "", f"the description says FLAIR, {times} say fat suppression"
    if not weighting:
        return "", f"neither its description nor {times} say what it is"
    why = "its description" if described == weighting else times
    if weighting != _T1:
        return weighting, f"by {why}"
    # of a protocol that is repeated after contrast agent, the header tells which run it is
    both = any(re.search(pattern, text) for pattern in _WORDS["both"])
    reasons = (
        ("t1n", not both and re.search(_BEFORE, text), "before contrast agent, by its description"),
        ("t1c", not both and re.search(_AFTER, text), "with contrast agent, by its description"),
        ("t1c", series.has_agent, "its header names a contrast agent"),
        (_T1, both, "with and without contrast agent, by its description"),
        (_T1, True, "no contrast agent is named"),
    )
    return next((modality, f"T1 by {why}; {agent}") for modality, is_so, agent in reasons if is_so)


def _parse_weighting(text: str) -> str:
    """Return the weighting that a description names, or nothing."""
    named = [name for name, pattern in _WORDS["weightings"].items() if re.search(pattern, text)]
    # a FLAIR sequence may have weak T1 contrast: T1 FLAIR
    if _T1 in named and "t2w" not in named:
        return _T1
    return named[0] if named else ""


def _timed(series: Series) -> str:
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
    return _T1 if echo < 40 and (400 < inversion < 1500 or repetition < 1200) else ""


def _times(series: Series) -> str:
    values = (series.echo_ms, series.repetition_ms, series.inversion_ms)
    named = zip(("echo", "repetition", "inversion"), values, strict=True)
    shown = [f"{name} {value:.4g} ms" for name, value in named if value is not None]
    return f"its times ({', '.join(shown) or 'none given'})"
