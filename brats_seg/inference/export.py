"""A model to hand out: one folder of weights and JSON, which runs no code when it is opened.

model.json             what the networks were taught, their settings, tables of labels, check sums
member0.safetensors    the weights of the first network, and so on
README.md              the model card
"""

# DOC inference/card: The model card: what whoever is handed a model should read first.

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, ValidationError
from safetensors.torch import load_file, save_file

from brats_seg.config import Config
from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, convention_named
from brats_seg.runtime.weights import (
    NOT_FITTED,
    PREDICTION,
    FittedPrediction,
    ModelIdentity,
    TrainedModel,
    separate_fitted,
)

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
    decoding = networks[0].fitted.decoding
    rows = zip(REGIONS, decoding.thresholds, decoding.smallest_mm3, strict=True)
    return [
        "| region | | probability above | components of at least, mm3 |",
        "|---|---|---|---|",
        *(
            f"| {region.upper()} | {_WORDS[region]} | {threshold:g} | {smallest:g} |"
            for region, threshold, smallest in rows
        ),
        "",
        f"Less than {decoding.smallest_et_mm3:g} mm3 of enhancing tumour in all becomes necrosis.",
    ]


def _label_lines(conventions: Sequence[str]) -> list[str]:
    lines = ["| convention | value | tissue |", "|---|---|---|"]
    for name in conventions:
        for value, meaning in convention_named(name).meanings:
            lines.append(f"| {name} | {value} | {meaning} |")
    return lines


MODEL_NAME = "model.json"
CARD_NAME = "README.md"
FORMAT_VERSION = 1


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportedModel:
    """The networks of an exported folder."""

    networks: tuple[TrainedModel, ...]
    fingerprint: str
    """As it was when they were exported."""


class _Part(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Member(_Part):
    weights: str
    sha256: str
    identity: ModelIdentity
    prediction: FittedPrediction = NOT_FITTED
    config: Config


class _Description(_Part):
    """The content of `model.json`."""

    format_version: int
    brats_seg: str
    fingerprint: str
    labels: dict[str, dict[str, Any]]
    members: list[_Member]


def write_exported(networks: Sequence[TrainedModel], fingerprint: str, folder: Path) -> None:
    """Write networks to a folder that is empty or not there; its description comes last.

    Raises:
        UsageError: The folder holds something.
        EnvironmentalError: It cannot be written.
    """
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        msg = f"{folder} is there already. Choose another place, or remove it first."
        raise UsageError(msg)
    members = []
    for place, network in enumerate(networks):
        name = f"member{place}.safetensors"
        with whole_file(folder / name) as beside:
            save_file({key: value.contiguous() for key, value in network.weights.items()}, beside)
        member = _Member(
            weights=name,
            sha256=_sha256(folder / name),
            identity=network.identity,
            prediction=network.fitted,
            config=network.config,
        )
        # an earlier version can read the model of a run that was not tuned
        untuned = {PREDICTION} if network.fitted == NOT_FITTED else None
        members.append(member.model_dump(mode="json", exclude=untuned))
    conventions = sorted({name for network in networks for name in network.identity.conventions})
    description = {
        "format_version": FORMAT_VERSION,
        "brats_seg": version("brats_seg"),
        "fingerprint": fingerprint,
        "labels": {name: _table(convention_named(name)) for name in conventions},
        "members": members,
    }
    with whole_file(folder / CARD_NAME) as beside:
        beside.write_text(model_card(networks, fingerprint))
    with whole_file(folder / MODEL_NAME) as beside:
        beside.write_text(json.dumps(description, indent=1) + "\n")


def read_exported(folder: Path) -> ExportedModel:
    """Read what `write_exported` wrote.

    Raises:
        UsageError: The folder was written by another version, or a file of it is damaged.
    """
    description = _read_description(folder / MODEL_NAME)
    networks = []
    for member in description.members:
        # a name alone: what is handed out must not reach for other files
        path = folder / Path(member.weights).name
        _check_sum(path, member.sha256)
        networks.append(
            TrainedModel(
                weights=load_file(path),
                identity=member.identity,
                config=member.config,
                fitted=member.prediction,
            )
        )
    return ExportedModel(networks=tuple(networks), fingerprint=description.fingerprint)


def _read_description(path: Path) -> _Description:
    try:
        content = json.loads(path.read_bytes())
        found = content["format_version"]
        if found == FORMAT_VERSION:
            members = [separate_fitted(member) for member in content["members"]]
            return _Description.model_validate({**content, "members": members})
    except (OSError, ValueError, KeyError, TypeError, ValidationError) as error:
        msg = f"{path} cannot be read as a model: {error}. Copy or export the model again."
        raise UsageError(msg) from None
    msg = (
        f"{path}: found format version {found}; expected {FORMAT_VERSION}. Read it with the "
        "version of brats_seg that wrote it."
    )
    raise UsageError(msg)


def _check_sum(path: Path, expected: str) -> None:
    found = _sha256(path) if path.is_file() else "no such file"
    if found != expected:
        msg = (
            f"{path} is damaged: found the check sum {found}, expected {expected}. Copy or export "
            "the model again."
        )
        raise UsageError(msg)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _table(convention: LabelConvention) -> Mapping[str, Any]:
    wt, tc, et = convention.regions
    return {
        "meanings": {str(value): meaning for value, meaning in convention.meanings},
        "regions": {"wt": wt, "tc": tc, "et": et},
    }
