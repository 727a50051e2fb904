"""Export trained networks to a folder that can be shared and runs no code when it is loaded.

model.json             identity and settings of each network, tables of labels, checksums
member0.safetensors    weights of the first network, and so on
README.md, card.json   the model card and its facts

A MONAI bundle or ONNX files stand beside them if they are asked for.
"""

import logging
import shutil
from collections.abc import Callable, Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from typing import Any

from safetensors.torch import save

from brats_seg.errors import UsageError
from brats_seg.files import alone_at, whole_file, whole_folder, write_json
from brats_seg.inference.model import assemble, read_together
from brats_seg.inference.model_card import CARD_NAME, write_card
from brats_seg.inference.model_facts import (
    CrossValidationScores,
    ModelFacts,
    facts_of,
    read_facts,
)
from brats_seg.labels import LabelConvention, convention_named
from brats_seg.presets import FileFormat
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.torch_files import sha256_of
from brats_seg.runtime.weights import (
    FORMAT_VERSION,
    MODEL_NAME,
    ExportedModel,
    ExportedNetwork,
    TrainedModel,
    fingerprint_of,
    read_exported,
)
from brats_seg.wings import interop

log = logging.getLogger(__name__)


def export_model(
    runs: Sequence[Path],
    folder: Path,
    *,
    replace: bool = False,
    license_name: str = "",
    case_ids: bool | None = None,
    scores: CrossValidationScores | None = None,
    file_format: FileFormat = "safetensors",
) -> ExportedModel:
    """Export runs as one ensemble to a folder.

    Args:
        runs: Runs, checkpoints or exported folders.
        folder: Folder to write; empty or missing.
        replace: Whether an exported model may be there already. It is kept if it holds the same
            networks, with a new card if that differs, and replaced as a whole otherwise.
        license_name: Licence of the weights, for the model card.
        case_ids: Whether the model card names the cases by their ids; by default if all ids are of
            public releases. Other ids may identify patients.
        scores: Scores of a cross-validation with the runs, for the model card; without them it has
            those of the validation during training.
        file_format: `bundle` writes a MONAI bundle too, and `onnx` a file of ONNX for each network;
            this package reads the same folder in any case.

    Returns:
        The networks and their fingerprint.

    Raises:
        UsageError: The runs cannot be averaged, the folder holds something else, or another process
            exports to it.
        FoldError: The split of a run is damaged.
        EnvironmentalError: The folder cannot be written.
    """
    if replace:
        check_replaceable(folder)
    elif folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        msg = f"{folder} exists already. Choose another folder, or remove it first."
        raise UsageError(msg)
    write_more = _writer(file_format)
    networks = read_together(runs)
    for network in networks:
        # raises if the weights do not fit the network of the settings
        assemble([network], choose_device("cpu", "fp32"))
    exported = ExportedModel(networks=networks, fingerprint=fingerprint_of(networks))
    facts = facts_of(runs, license_name=license_name, case_ids=case_ids, scores=scores)
    is_there = replace and _holds(folder, exported.fingerprint)
    if is_there and _has_card(folder, facts):
        return exported
    with alone_at(folder):
        # of processes that were killed
        for leftover in folder.parent.glob(f".*-new-{folder.name}"):
            shutil.rmtree(leftover)
        if is_there:
            write_card(exported, facts, folder)
        else:
            when_full = "Free some space and start the same command again."
            with whole_folder(folder, when_full=when_full) as beside:
                _write(exported, facts, beside)
                write_more(exported, beside)
    _log_card(facts)
    return exported


def check_replaceable(folder: Path) -> None:
    """Raise `UsageError` if a folder is there that is not an exported model."""
    if folder.exists() and not (folder / MODEL_NAME).exists():
        msg = f"{folder} exists and holds no exported model. Move it away, or choose another --output."
        raise UsageError(msg)


def _writer(file_format: FileFormat) -> Callable[[ExportedModel, Path], None]:
    """Return the function that writes the files of another program beside the weights."""
    if file_format == "safetensors":
        return lambda _exported, _folder: None
    wing = interop()
    if wing is None:
        msg = f"--format {file_format} needs brats_seg.interop, which is missing: install it"
        raise UsageError(msg)
    writer: Callable[[ExportedModel, Path], None] = wing.writer_of(file_format)
    return writer


def _write(exported: ExportedModel, facts: ModelFacts, folder: Path) -> None:
    networks = exported.networks
    conventions = sorted({name for network in networks for name in network.identity.conventions})
    description = {
        "format_version": FORMAT_VERSION,
        "brats_seg": version("brats_seg"),
        "fingerprint": exported.fingerprint,
        "labels": {name: _table(convention_named(name)) for name in conventions},
        "members": [_write_member(network, i, folder) for i, network in enumerate(networks)],
    }
    write_card(exported, facts, folder)
    write_json(folder / MODEL_NAME, description)


def _holds(folder: Path, fingerprint: str) -> bool:
    try:
        return folder.exists() and read_exported(folder).fingerprint == fingerprint
    except UsageError:
        # damaged, or of another version
        return False


def _has_card(folder: Path, facts: ModelFacts) -> bool:
    """Tell whether the model card of an exported folder has these facts."""
    try:
        stored = read_facts(folder)
    except UsageError:
        return False
    return stored is not None and facts.is_alike(stored) and (folder / CARD_NAME).exists()


def _log_card(facts: ModelFacts) -> None:
    """Log what to know about the model card before the model is handed out."""
    if facts.has_ids:
        log.info("The model card has the ids of the cases; --count-cases leaves them out.")
    elif facts.knows_cases:
        log.info("The model card counts the cases without their ids; --name-cases names them.")
    if not facts.license:
        log.info("The model card states no licence; --license names one.")


def _write_member(network: TrainedModel, index: int, folder: Path) -> dict[str, Any]:
    """Write the weights of a network, and return its entry of `model.json`."""
    name = f"member{index}.safetensors"
    with whole_file(folder / name) as beside:
        # in memory first: `save_file` reports a full disk in an error of its own
        beside.write_bytes(
            save({key: value.contiguous() for key, value in network.weights.items()})
        )
    entry = ExportedNetwork(
        weights=name,
        sha256=sha256_of(folder / name),
        card=network.card,
    )
    return entry.model_dump(mode="json")


def _table(convention: LabelConvention) -> Mapping[str, Any]:
    wt, tc, et = convention.regions
    return {
        "meanings": {str(value): meaning for value, meaning in convention.meanings},
        "regions": {"wt": wt, "tc": tc, "et": et},
    }
