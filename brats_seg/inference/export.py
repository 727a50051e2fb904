"""Export trained networks to a folder that can be shared and runs no code when it is loaded.

model.json             identity and settings of each network, tables of labels, checksums
member0.safetensors    weights of the first network, and so on
README.md              the model card: what the model is, was trained on and can do

A MONAI bundle or ONNX files are added on request.
"""

import logging
from collections import ChainMap
from collections.abc import Mapping, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from importlib.metadata import version
from itertools import starmap
from pathlib import Path
from typing import Annotated, Any, TypeAlias

import numpy as np
from pydantic import Field
from safetensors.torch import save

from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.cases.releases import UNKNOWN, release_of
from brats_seg.config import Section
from brats_seg.data.fold import NO_RECORD
from brats_seg.errors import ResumeError, UsageError, printable
from brats_seg.evaluation.metrics import region_counts
from brats_seg.evaluation.scores import RegionSummary, score_title, summarise_counts
from brats_seg.evaluation.significance import CONFIDENCE
from brats_seg.files import alone_at, remove_leftovers, whole_file, whole_folder, write_json
from brats_seg.inference.model import Model, assemble, read_together
from brats_seg.inference.results import TEMPLATES
from brats_seg.labels import REGIONS, LabelConvention, convention_named
from brats_seg.presets import FileFormat
from brats_seg.runtime import weights
from brats_seg.runtime.device import choose_device
from brats_seg.wings import find_wing

log = logging.getLogger(__name__)

CARD_NAME = "README.md"
_PACKAGES = ("brats_seg", "torch", "monai", "device", "precision")
"""Entries of the environment of a run that are in the card."""

Count = Annotated[int, Field(ge=0)]
CountRow = tuple[Count, Count, Count]
CaseCounts: TypeAlias = dict[str, tuple[CountRow, CountRow, CountRow, CountRow]]
"""True and false positives, false and true negatives, for WT, TC and ET, by case id."""


class NetworkFacts(Section):
    """Facts about the training of one network that its card does not hold."""

    run: str = ""
    """Name of the folder of its run; empty for a network that was exported before."""
    n_training: Count | None = None
    """Cases that it was trained on; None if the number is not known."""
    n_held_out: Count | None = None
    epoch: Count | None = None
    """Epochs of training until the weights were saved."""
    validation: CaseCounts = Field(default_factory=dict)
    """Voxels of the held-out cases in the validation that the weights were chosen by; none where
    they were not validated, or on patches."""
    environment: str = ""
    """Versions and device of the training, as words."""
    started_from: str = ""
    """Name of the model whose weights it started from; empty if they were drawn at random."""
    seen: tuple[str, ...] = ()
    """Held-out cases that those weights had learnt from, which have no scores here."""


class CrossValidationScores(Section):
    """Scores of a cross-validation with the networks of a model."""

    protocol: str
    """Name of the scoring protocol."""
    summaries: tuple[RegionSummary, ...]


def export_model(
    runs: Sequence[Path],
    folder: Path,
    *,
    replace: bool = False,
    license_name: str = "",
    case_ids: bool = False,
    scores: CrossValidationScores | None = None,
    file_format: FileFormat = "safetensors",
) -> weights.ExportedModel:
    """Export runs as one ensemble to a folder.

    Args:
        runs: Runs, checkpoints or exported folders.
        folder: Folder to write; empty or missing.
        replace: Whether an exported model may be there already, which is replaced as a whole.
        license_name: Licence of the weights, for the model card.
        case_ids: Whether `model.json` names the cases that it was trained on, whose ids may identify
            patients, so that scores of these cases are marked. It does if all are of public releases.
        scores: Scores of a cross-validation with the runs, for the model card; without them it has
            those of the validation during training.
        file_format: `bundle` writes a MONAI bundle too, and `onnx` a file of ONNX for each network;
            this package reads the folder in all three.

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
    wing = find_wing("interop")
    if wing is None and file_format != "safetensors":
        msg = f"--format {file_format} needs brats_seg.interop, which is missing: install it"
        raise UsageError(msg)
    networks = read_together(runs)
    # raises if the weights do not fit the network of the settings
    model = assemble(networks, choose_device("cpu", "fp32"))
    exported = weights.ExportedModel(networks=networks, fingerprint=model.fingerprint)
    facts = [fact for path in runs for fact in _read_facts(path)]
    card = _card(model, networks, facts, license_name, scores)
    with alone_at(folder):
        # of processes that were killed
        remove_leftovers(folder.parent, folders=True, name=f"new-{folder.name}")
        with whole_folder(folder) as new_folder:
            _write(exported, card, new_folder, case_ids=case_ids)
            if wing is not None and file_format != "safetensors":
                wing.writer_of(file_format)(model, new_folder)
    if not license_name:
        log.info("The model card states no licence; `brats-seg export --license` names one.")
    return exported


def check_replaceable(folder: Path) -> None:
    """Raise `UsageError` if a folder is there that is not an exported model."""
    if folder.exists() and not (folder / weights.MODEL_NAME).exists():
        msg = f"{folder} exists and holds no exported model. Move it away, or choose another --output."
        raise UsageError(msg)


def _write(exported: weights.ExportedModel, card: str, folder: Path, *, case_ids: bool) -> None:
    networks = exported.networks
    ids = {case_id for network in networks for case_id in network.cases.ids}
    # those of public releases identify no patient
    if not case_ids and any(release_of(case_id) == UNKNOWN for case_id in ids):
        networks = tuple(replace(network, cases=NO_RECORD) for network in networks)
    labels = {
        convention.name: {
            "meanings": {str(value): meaning for value, meaning in convention.meanings},
            "regions": dict(zip(REGIONS, convention.regions, strict=True)),
        }
        for convention in _conventions(networks)
    }
    description = {
        "format_version": weights.FORMAT_VERSION,
        "brats_seg": version("brats_seg"),
        "fingerprint": exported.fingerprint,
        "labels": labels,
        "members": [_write_member(network, i, folder) for i, network in enumerate(networks)],
    }
    with whole_file(folder / CARD_NAME) as new_file:
        new_file.write_text(card, encoding="utf-8")
    write_json(folder / weights.MODEL_NAME, description)


def _write_member(network: weights.TrainedModel, index: int, folder: Path) -> dict[str, Any]:
    """Write the weights of a network, and return its entry of `model.json`."""
    path = folder / f"member{index}.safetensors"
    with whole_file(path) as new_file:
        # in memory first: `save_file` reports a full disk as another error; copies, because it
        # refuses weights under two names, as `DynUNet` has them
        tensors = {key: value.contiguous().clone() for key, value in network.weights.items()}
        new_file.write_bytes(save(tensors))
    entry = weights.ExportedNetwork(
        weights=path.name, sha256=weights.sha256_of(path), card=network.card, cases=network.cases
    )
    # the weights that a run started from lie in a folder of the user
    return entry.model_dump(mode="json", exclude={"card": {"config": {"start"}}})


def _card(
    model: Model,
    networks: Sequence[weights.TrainedModel],
    facts: Sequence[NetworkFacts],
    license_name: str,
    scores: CrossValidationScores | None,
) -> str:
    """Return the text of the model card, in Markdown."""
    sizes = {sum(value.numel() for value in network.weights.values()) for network in networks}
    names = {"score_title": score_title, "confidence": 100 * CONFIDENCE}
    return TEMPLATES.get_template("model_card.md", globals=names).render(
        model=model,
        networks=networks,
        facts=facts,
        license=printable(license_name),
        scores=scores,
        exported=datetime.now(UTC).date().isoformat(),
        version=version("brats_seg"),
        sizes=" or ".join(f"{size:,}" for size in sorted(sizes)),
        validations=_validations(facts),
        is_fitted=any(network.card.fitted != weights.NOT_FITTED for network in networks),
        conventions=_conventions(networks),
    )


def _conventions(networks: Sequence[weights.TrainedModel]) -> list[LabelConvention]:
    names = {name for network in networks for name in network.card.identity.conventions}
    return [convention_named(name) for name in sorted(names)]


def _validations(facts: Sequence[NetworkFacts]) -> list[tuple[str, tuple[RegionSummary, ...]]]:
    """Return the scores of all held-out cases together, if each was held out once, or by network."""
    of_networks = [
        {name: counts for name, counts in fact.validation.items() if name not in fact.seen}
        for fact in facts
    ]
    validations = {f"Network {index}": counts for index, counts in enumerate(of_networks) if counts}
    together = dict(ChainMap(*of_networks))
    if all(of_networks) and len(together) == sum(map(len, of_networks)):
        validations = {"": together}
    return [
        (title, summarise_counts(starmap(region_counts, counts.items()), np.random.default_rng(0)))
        for title, counts in validations.items()
    ]


def _read_facts(path: Path) -> list[NetworkFacts]:
    """Return the facts about each network of a path, in the order of `read_trained`."""
    if (path / weights.MODEL_NAME).exists():
        return [NetworkFacts() for _ in weights.read_description(path / weights.MODEL_NAME).members]
    checkpoint = path / weights.BEST_NAME if path.is_dir() else path
    content = weights.read_checkpoint(checkpoint)
    try:
        return [NetworkFacts(run=path.absolute().name, **_facts_in(content, checkpoint.parent))]
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{checkpoint} cannot be read as a model: {weights.reason_of(error)}"
        raise ResumeError(msg) from None


def _facts_in(content: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return the facts in a checkpoint and in the split of its folder."""
    versions = content.get("environment", {})
    known = (f"{name} {versions[name]}" for name in _PACKAGES if name in versions)
    facts: dict[str, Any] = {"environment": ", ".join(known)}
    if (run / SPLIT_NAME).exists():
        split = read_split(run / SPLIT_NAME)
        facts |= {"n_training": len(split.train), "n_held_out": len(split.validation)}
    if start := content.get("started_from"):
        facts["started_from"] = f"{Path(start['path']).name}, fingerprint {start['fingerprint']}"
        facts["seen"] = start.get("seen", ())
    if "optimizer" in content:
        # the latest state need not have been validated
        return facts
    progress = content["progress"]
    last_row = (progress["history"] or [{}])[-1]
    return facts | {"epoch": last_row.get("epoch"), "validation": progress["sums"]["counts"]}
