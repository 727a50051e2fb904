"""Write the model card: a page that says what an exported model is, was trained on and can do.

README.md    the card, in Markdown
card.json    the facts of the card that the weights do not hold, see `model_facts`
"""

import textwrap
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from brats_seg.errors import counted, printable
from brats_seg.evaluation.metrics import region_counts
from brats_seg.evaluation.scores import RegionSummary, summarise_counts, title_of
from brats_seg.evaluation.significance import CONFIDENCE
from brats_seg.evaluation.subset_scores import pooled
from brats_seg.files import whole_file
from brats_seg.inference.model import default_of
from brats_seg.inference.model_facts import FACTS_NAME, ModelFacts, NetworkFacts, ValidatedCase
from brats_seg.labels import REGIONS, convention_named
from brats_seg.runtime.weights import NOT_FITTED, ExportedModel, TrainedModel

CARD_NAME = "README.md"
_REGION_WORDS = {"wt": "whole tumour", "tc": "tumour core", "et": "enhancing tumour"}
_SHOWN = ("dice", "hd95", "lesionwise_dice", "lesionwise_hd95")
"""Scores in the card."""
_PACKAGES = ("brats_seg", "torch", "monai", "device", "precision")
"""Entries of the environment of a run that are in the card."""
_LINE_LENGTH = 100


def write_card(exported: ExportedModel, facts: ModelFacts, folder: Path) -> None:
    """Write the model card and its facts to an exported folder.

    Raises:
        EnvironmentalError: A file cannot be written.
    """
    with whole_file(folder / FACTS_NAME) as beside:
        beside.write_text(facts.model_dump_json(indent=1) + "\n", encoding="utf-8")
    with whole_file(folder / CARD_NAME) as beside:
        beside.write_text(model_card(exported, facts), encoding="utf-8")


def model_card(exported: ExportedModel, facts: ModelFacts) -> str:
    """Return the text of the model card, in Markdown."""
    networks = exported.networks
    sections = (
        _head_lines(exported, facts),
        _use_lines(networks),
        _score_lines(networks, facts),
        *([_subset_lines(networks)] if networks[0].identity.subsets else []),
        _training_lines(networks, facts),
        _case_lines(facts),
        _label_lines(_conventions(networks)),
        _limit_lines(),
    )
    return "\n\n".join("\n".join(lines) for lines in sections) + "\n"


def _head_lines(exported: ExportedModel, facts: ModelFacts) -> list[str]:
    networks = exported.networks
    names = ", ".join(sorted({network.config.model.name for network in networks}))
    sizes = sorted({sum(one.numel() for one in network.weights.values()) for network in networks})
    weights = " or ".join(f"{size:,}" for size in sizes)
    of_networks = f"one network, {names}, of {weights} weights"
    if len(networks) > 1:
        of_networks = (
            f"{len(networks)} networks, {names}, of {weights} weights each; the mean of their "
            "probabilities is taken"
        )
    return [
        "# Brain-tumour segmentation model",
        "",
        "**Research use only.** This is not a medical device, and its output is no diagnosis.",
        "",
        f"- {of_networks}",
        f"- licence: {facts.license or _NO_LICENSE}",
        f"- exported on {facts.exported} by brats_seg {facts.brats_seg}",
        f"- fingerprint: {exported.fingerprint}",
    ]


_NO_LICENSE = (
    "not stated. Those who hand the model out decide on it, within the terms of use of the cases "
    "that it was trained on"
)


def _use_lines(networks: Sequence[TrainedModel]) -> list[str]:
    spacing = "x".join(f"{mm:g}" for mm in networks[0].identity.spacing_mm)
    decoding = networks[0].fitted.decoding
    rows = zip(REGIONS, decoding.thresholds, decoding.smallest_mm3, strict=True)
    lines = [
        "## Use",
        "",
        "    brats-seg predict SCANS -o RESULTS --model THIS_FOLDER",
        "",
        "Input: T1, T1 with contrast agent, T2 and FLAIR (t1n, t1c, t2w, t2f) of one patient on one "
        f"grid, skull-stripped. They are resampled to {spacing} mm. Output: a label map on the grid "
        "of the scan, in the label convention of its release.",
        "",
        "| region | | probability above | components of at least, mm3 |",
        "|---|---|---|---|",
        *(
            f"| {region.upper()} | {_REGION_WORDS[region]} | {threshold:g} | {smallest:g} |"
            for region, threshold, smallest in rows
        ),
        "",
        f"Windows: {', '.join(dict.fromkeys(str(default_of(one)) for one in networks))}.",
    ]
    if decoding.smallest_et_mm3:
        smallest = f"{decoding.smallest_et_mm3:g}"
        lines += ["", f"Less than {smallest} mm3 of enhancing tumour in all becomes necrosis."]
    return lines


def _score_lines(networks: Sequence[TrainedModel], facts: ModelFacts) -> list[str]:
    lines = ["## Scores", ""]
    of_single = (
        "" if len(networks) == 1 else " These are scores of single networks, not of their mean."
    )
    if facts.scores is not None:
        return [
            *lines,
            f"Cross-validation, scored by the protocol {facts.scores.protocol}: each case was "
            f"predicted by the network that was not trained on it.{of_single}",
            "",
            *_table_lines(facts.scores.summaries),
            "",
            "Weights and thresholds were chosen on the same cases: expect slightly lower "
            "scores on new cases.",
        ]
    tables = list(_validations(facts.networks))
    if not tables:
        return [*lines, *_mean_lines(facts.networks)]
    by = "the network" if len(networks) == 1 else "the network that was not trained on it"
    lines += [
        f"Validation during training: each held-out case was predicted by {by}, on the prepared "
        f"scan, with thresholds of 0.5 and the default window.{of_single}",
    ]
    for title, summaries in tables:
        lines += ["", *([f"{title}:", ""] if title else []), *_table_lines(summaries)]
    remark = "The epoch of the weights was chosen on the same cases"
    if any(network.fitted != NOT_FITTED for network in networks):
        remark += ", and later the thresholds above"
    return [*lines, "", f"{remark}: expect other, most likely lower, scores on new cases."]


def _subset_lines(networks: Sequence[TrainedModel]) -> list[str]:
    """Return the table of the Dice of held-out cases without some modalities."""
    n_subsets = min(len(network.identity.subsets) for network in networks)
    head = [
        "## Missing modalities",
        "",
        f"Trained with modality dropout: besides all four modalities, {n_subsets} subsets of them are "
        "accepted.",
        "",
    ]
    scores = pooled(one for network in networks for one in network.card.subset_scores)
    if not scores:
        return [*head, "The loss of Dice was not measured; `brats-seg tune` measures it."]
    by = " Each case was predicted by the network that was not trained on it."
    return [
        *head,
        f"| predicted from | {' | '.join(region.upper() for region in REGIONS)} | cases |",
        "|---" * (len(REGIONS) + 2) + "|",
        *(
            f"| {', '.join(one.modalities)} | {' | '.join(one.texts())} | {one.n_cases} |"
            for one in scores
        ),
        "",
        "Mean Dice of held-out cases and, in brackets, its change against the Dice from all four "
        f"modalities.{by if len(networks) > 1 else ''}",
    ]


def _mean_lines(networks: Sequence[NetworkFacts]) -> list[str]:
    """Return the mean scores of networks whose runs did not record the scores of each case."""
    means = [
        f"- network {place}: "
        + ", ".join(f"{name.upper()} {x:.3f}" for name, x in zip(REGIONS, dice, strict=True))
        for place, dice in ((place, one.mean_dice) for place, one in enumerate(networks))
        if dice is not None
    ]
    if not means:
        return ["Not known: no validation of the networks on whole cases is recorded."]
    return [
        "Mean Dice of the held-out cases in the validation during training. The epoch of the weights "
        "was chosen on the same cases. Intervals are not known: the scores of each case were not "
        "recorded.",
        "",
        *means,
    ]


def _validations(
    networks: Sequence[NetworkFacts],
) -> Iterator[tuple[str, tuple[RegionSummary, ...]]]:
    """Yield the scores of all held-out cases together, if each was held out once, or by network."""
    all_cases = [case for network in networks for case in network.validation]
    ids = [case.case_id for case in all_cases]
    is_complete = all(network.validation for network in networks)
    if is_complete and all(ids) and len({*ids}) == len(ids):
        yield "", _summarised(all_cases)
        return
    for place, network in enumerate(networks):
        if network.validation:
            title = f"Network {place}" if len(networks) > 1 else ""
            yield title, _summarised(network.validation)


def _summarised(cases: Sequence[ValidatedCase]) -> tuple[RegionSummary, ...]:
    counts = [region_counts(case.case_id, case.counts) for case in cases]
    return summarise_counts(counts, np.random.default_rng(0))


def _table_lines(summaries: Sequence[RegionSummary]) -> list[str]:
    columns = [spread.column for spread in summaries[0].spreads if spread.column in _SHOWN]
    interval = f"[{100 * CONFIDENCE:g} % interval over cases]"
    heads = ["region", *(f"mean {title_of(column)} {interval}" for column in columns)]
    lines = [
        f"| {' | '.join([*heads, 'cases', 'reference empty'])} |",
        "|---" * (len(heads) + 2) + "|",
    ]
    for summary in summaries:
        n_cases = summary.n_cases
        means = (summary.spread(column).mean_text(n_cases) for column in columns)
        cells = (summary.region.upper(), *means, str(n_cases), str(summary.n_reference_empty))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _training_lines(networks: Sequence[TrainedModel], facts: ModelFacts) -> list[str]:
    environments = dict.fromkeys(
        ", ".join(
            f"{name} {one.environment[name]}" for name in _PACKAGES if name in one.environment
        )
        for one in facts.networks
    )
    rows = [
        (
            str(place),
            printable(one.run).replace("|", "\\|") or "-",
            _number(one.n_training),
            _number(one.n_held_out),
            _number(one.epoch),
            "x".join(map(str, network.identity.patch)),
            network.identity.fingerprint,
        )
        for place, (network, one) in enumerate(zip(networks, facts.networks, strict=True))
    ]
    return [
        "## Training",
        "",
        "| network | run | cases trained on | held out | epochs | patch, voxels | training set |",
        "|---|---|---|---|---|---|---|",
        *(f"| {' | '.join(row)} |" for row in rows),
        "",
        f"- label conventions of the cases: {', '.join(_conventions(networks))}",
        f"- normalisation: {networks[0].identity.normalisation}",
        *(f"- trained with {printable(words)}" for words in environments if words),
        *(
            f"- network {place} started from the weights of {printable(one.started_from)}"
            for place, one in enumerate(facts.networks)
            if one.started_from
        ),
    ]


def _number(count: int | None) -> str:
    return "not known" if count is None else str(count)


def _case_lines(facts: ModelFacts) -> list[str]:
    lines = ["## Cases"]
    roles = _roles(facts.networks)
    if not roles:
        why = "Their ids are left out." if facts.knows_cases else "The cases are not recorded."
        return [*lines, "", why]
    for words, case_ids in roles.items():
        n_cases = counted(len(case_ids), "case")
        text = textwrap.wrap(
            ", ".join(case_ids), _LINE_LENGTH, break_long_words=False, break_on_hyphens=False
        )
        # as code: ids may hold characters that Markdown interprets
        lines += ["", f"{words} ({n_cases}):", "", *(f"    {line}" for line in text)]
    return lines


def _roles(networks: Sequence[NetworkFacts]) -> dict[str, list[str]]:
    """Return the ids of the cases that have the same part in every network, by words for the part."""
    parts: dict[str, list[list[int]]] = {}
    for place, network in enumerate(networks):
        sides = (network.held_out, network.training, network.learnt_before)
        for side, case_ids in enumerate(sides):
            for case_id in case_ids:
                parts.setdefault(printable(case_id), [[], [], []])[side].append(place)
    grouped: dict[str, list[str]] = {}
    for case_id, part in sorted(parts.items(), key=lambda item: (item[1], item[0])):
        words = [
            words[0] if len(networks) == 1 else f"{words[1]} {_networks(places)}"
            for words, places in zip(_SIDES, part, strict=True)
            if places
        ]
        text = "; ".join(words)
        grouped.setdefault(text[:1].upper() + text[1:], []).append(case_id)
    return grouped


_SIDES = (
    ("held out", "held out of"),
    ("trained on", "trained on by"),
    ("trained on before, by the weights that it started from", "trained on before the start of"),
)
"""Parts of a case in the training of one network, and of several."""


def _networks(places: Sequence[int]) -> str:
    return f"network{'s' * (len(places) > 1)} {', '.join(map(str, places))}"


def _conventions(networks: Sequence[TrainedModel]) -> list[str]:
    return sorted({name for network in networks for name in network.identity.conventions})


def _label_lines(conventions: Sequence[str]) -> list[str]:
    lines = ["## Labels", "", "| convention | value | tissue |", "|---|---|---|"]
    for name in conventions:
        for value, meaning in convention_named(name).meanings:
            lines.append(f"| {name} | {value} | {meaning} |")
    return lines


def _limit_lines() -> list[str]:
    return [
        "## Limits",
        "",
        "Scanners, field strengths, ages and treatments that the training cases lack may be "
        "segmented badly without a sign of it: look at every result.",
        "",
        "If the training cases are of BraTS, cite Menze 2015 (doi:10.1109/TMI.2014.2377694), Bakas "
        "2017 (doi:10.1038/sdata.2017.117) and Baid 2021 (arXiv:2107.02314).",
    ]
