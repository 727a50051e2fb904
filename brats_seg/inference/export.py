"""Export trained networks to a folder that can be shared and runs no code when it is loaded.

model.json             identity and settings of each network, tables of labels, checksums
member0.safetensors    weights of the first network, and so on
README.md              the model card
"""

import json
import re
from collections.abc import Mapping, Sequence
from contextlib import suppress
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save

from brats_seg.errors import UsageError
from brats_seg.files import alone_at, whole_file, whole_folder
from brats_seg.inference.model import build_single, read_together
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, convention_named
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import (
    FORMAT_VERSION,
    MODEL_NAME,
    NOT_FITTED,
    PREDICTION,
    ExportedModel,
    ExportedNetwork,
    TrainedModel,
    fingerprint_of,
    read_exported,
    sha256_of,
)

CARD_NAME = "README.md"
_MEMBER = re.compile(r"member\d+\.safetensors")
_WORDS = {"wt": "whole tumour", "tc": "tumour core", "et": "enhancing tumour"}


def export_model(runs: Sequence[Path], folder: Path, *, replace: bool = False) -> ExportedModel:
    """Export runs as one ensemble to a folder.

    Args:
        runs: Runs, checkpoints or exported folders.
        folder: Folder to write; empty or missing.
        replace: Whether an exported model may be there already. It is kept if it holds the same
            networks, and replaced as a whole otherwise.

    Returns:
        The networks and their fingerprint.

    Raises:
        UsageError: The runs cannot be averaged, the folder holds something else, or another process
            exports to it.
        EnvironmentalError: The folder cannot be written.
    """
    if replace:
        check_replaceable(folder)
    networks = read_together(runs)
    for network in networks:
        # raises if the weights do not fit the network of the settings
        build_single(network, choose_device("cpu", "fp32"))
    exported = ExportedModel(networks=networks, fingerprint=fingerprint_of(networks))
    if not replace:
        _check_free(folder)
        with alone_at(folder, is_folder=True):
            write_exported(networks, exported.fingerprint, folder)
    elif not _holds(folder, exported.fingerprint):
        when_full = "Free some space and start the same command again."
        with whole_folder(folder, when_full=when_full) as beside:
            write_exported(networks, exported.fingerprint, beside)
    return exported


def check_replaceable(folder: Path) -> None:
    """Raise `UsageError` if a folder is there that is not an exported model."""
    if folder.exists() and not (folder / MODEL_NAME).exists():
        msg = f"{folder} exists and holds no exported model. Move it away, or choose another --output."
        raise UsageError(msg)


def write_exported(networks: Sequence[TrainedModel], fingerprint: str, folder: Path) -> None:
    """Write networks to a folder that is empty or missing; the description comes last.

    If they cannot all be written, the folder is empty again. What a killed process has left there is
    replaced.

    Raises:
        UsageError: The folder holds something.
        EnvironmentalError: It cannot be written.
    """
    _check_free(folder)
    for path in _visible(folder):
        path.unlink()
    try:
        _write(networks, fingerprint, folder)
    except BaseException:
        for path in _visible(folder):
            with suppress(OSError):
                path.unlink()
        raise


def _check_free(folder: Path) -> None:
    if folder.exists() and not (folder.is_dir() and _is_free(_visible(folder))):
        msg = f"{folder} exists already. Choose another folder, or remove it first."
        raise UsageError(msg)


def _is_free(files: Sequence[Path]) -> bool:
    """Return whether a folder with these files is empty, or an export that did not end."""
    own = [path for path in files if _MEMBER.fullmatch(path.name) and path.is_file()]
    rest = {path.name for path in files} - {path.name for path in own}
    return not files or (bool(own) and rest <= {CARD_NAME})


def _visible(folder: Path) -> list[Path]:
    """Return what a folder holds besides locks and temporary files."""
    if not folder.is_dir():
        return []
    return [path for path in folder.iterdir() if not path.name.startswith(".")]


def _write(networks: Sequence[TrainedModel], fingerprint: str, folder: Path) -> None:
    members = [_written(network, place, folder) for place, network in enumerate(networks)]
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


def model_card(networks: Sequence[TrainedModel], fingerprint: str) -> str:
    """Return the text of the model card, in Markdown."""
    identity = networks[0].identity
    return "\n".join(
        [
            *_use_lines(networks),
            "",
            *_region_lines(networks),
            "",
            *_training_lines(networks, fingerprint),
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


def _holds(folder: Path, fingerprint: str) -> bool:
    try:
        return folder.exists() and read_exported(folder).fingerprint == fingerprint
    except UsageError:
        # damaged, or of another version
        return False


def _written(network: TrainedModel, place: int, folder: Path) -> dict[str, Any]:
    """Write the weights of a network, and return its entry of `model.json`."""
    name = f"member{place}.safetensors"
    with whole_file(folder / name) as beside:
        # in memory first: `save_file` reports a full disk in an error of its own
        beside.write_bytes(
            save({key: value.contiguous() for key, value in network.weights.items()})
        )
    entry = ExportedNetwork(
        weights=name,
        sha256=sha256_of(folder / name),
        identity=network.identity,
        prediction=network.fitted,
        config=network.config,
    )
    # so that earlier versions can read the model of a run that was not tuned
    left_out = {PREDICTION} if network.fitted == NOT_FITTED else None
    return entry.model_dump(mode="json", exclude=left_out)


def _table(convention: LabelConvention) -> Mapping[str, Any]:
    wt, tc, et = convention.regions
    return {
        "meanings": {str(value): meaning for value, meaning in convention.meanings},
        "regions": {"wt": wt, "tc": tc, "et": et},
    }


def _use_lines(networks: Sequence[TrainedModel]) -> list[str]:
    names = sorted({network.config.model.name for network in networks})
    n_weights = sum(value.numel() for value in networks[0].weights.values())
    spacing = "x".join(f"{mm:g}" for mm in networks[0].identity.spacing_mm)
    return [
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
        f"{spacing} mm. Output: a label map on the grid of the scan.",
    ]


def _training_lines(networks: Sequence[TrainedModel], fingerprint: str) -> list[str]:
    identity = networks[0].identity
    return [
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
    ]


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
