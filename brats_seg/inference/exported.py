"""A model to hand out: one folder of weights and JSON, which runs no code when it is opened.

model.json             what the networks were taught, their settings, tables of labels, check sums
member0.safetensors    the weights of the first network, and so on
README.md              the model card
"""

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError
from safetensors.torch import load_file, save_file

from brats_seg.config import Config
from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.inference.card import model_card
from brats_seg.labels import LabelConvention, convention_named
from brats_seg.models.trained import ModelIdentity, TrainedModel

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
        members.append(
            {
                "weights": name,
                "sha256": _sha256(folder / name),
                "identity": asdict(network.identity),
                "config": network.config.model_dump(mode="json"),
            }
        )
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
            TrainedModel(weights=load_file(path), identity=member.identity, config=member.config)
        )
    return ExportedModel(networks=tuple(networks), fingerprint=description.fingerprint)


def _read_description(path: Path) -> _Description:
    try:
        content = json.loads(path.read_bytes())
        found = content["format_version"]
        if found == FORMAT_VERSION:
            return TypeAdapter(_Description).validate_python(content)
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
