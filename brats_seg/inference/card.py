"""The model card: what whoever is handed a model should read first."""

from collections.abc import Sequence

from brats_seg.labels import MODALITIES, REGIONS, convention_named
from brats_seg.models.trained import TrainedModel

_WORDS = {"wt": "whole tumour", "tc": "tumour core", "et": "enhancing tumour"}


def model_card(networks: Sequence[TrainedModel], fingerprint: str) -> str:
    """Return the text of the card, in Markdown."""
    identity = networks[0].identity
    names = sorted({network.config.model.name for network in networks})
    n_weights = sum(value.numel() for value in networks[0].weights.values())
    return "\n".join(
        [
            "# Brain-tumour segmentation model",
            "",
            "**Research use only.** This is not a medical device, and its output is no diagnosis.",
            "",
            f"{len(networks)} network(s) {', '.join(names)} of {n_weights:,} numbers each; where "
            "there are several, the mean of their probabilities is taken.",
            "",
            "## Use",
            "",
            "    brats-seg predict SCANS -o RESULTS --model THIS_FOLDER",
            "",
            f"Input: {', '.join(MODALITIES)} of one patient on one grid, skull-stripped, near "
            f"{'x'.join(f'{mm:g}' for mm in identity.spacing_mm)} mm. Output: a label map on the "
            "grid of the scan.",
            "",
            *_region_lines(networks),
            "",
            "## Training",
            "",
            f"- label conventions of the training cases: {', '.join(identity.conventions)}",
            f"- normalisation: {identity.normalisation}",
            *(
                f"- network {place}: patches of {'x'.join(map(str, network.identity.patch))} "
                f"voxels, training set {network.identity.fingerprint}"
                for place, network in enumerate(networks)
            ),
            f"- fingerprint of this model: {fingerprint}",
            "",
            *_label_lines(identity.conventions),
            "",
            "## Limits",
            "",
            "It learnt on the cases named above and on no others: scanners, field strengths, ages "
            "and treatments that these lack may be segmented badly without a sign of it. Look at "
            "every result. Cite BraTS for the data (Menze 2015; Bakas 2017; Baid 2021).",
            "",
        ]
    )


def _region_lines(networks: Sequence[TrainedModel]) -> list[str]:
    identity = networks[0].identity
    rows = zip(REGIONS, identity.thresholds, identity.smallest_mm3, strict=True)
    return [
        "| region | | probability above | components of at least, mm3 |",
        "|---|---|---|---|",
        *(
            f"| {region.upper()} | {_WORDS[region]} | {threshold:g} | {smallest:g} |"
            for region, threshold, smallest in rows
        ),
        "",
        f"Less than {identity.smallest_et_mm3:g} mm3 of enhancing tumour in all becomes necrosis.",
    ]


def _label_lines(conventions: Sequence[str]) -> list[str]:
    lines = ["| convention | value | tissue |", "|---|---|---|"]
    for name in conventions:
        for value, meaning in convention_named(name).meanings:
            lines.append(f"| {name} | {value} | {meaning} |")
    return lines
