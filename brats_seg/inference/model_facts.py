"""Collect the facts about exported networks that their weights do not hold.

They come from the runs: their splits, the validation of their best weights, the versions that they
were trained with, and the weights that they started from. An exported folder keeps them in
`card.json`, for programs and for later exports. A fact that is not known is left out.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Annotated, Any, Self

import torch
from pydantic import Field

from brats_seg.cases.conventions import release_of
from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.cases.layouts import UNKNOWN
from brats_seg.config import Section
from brats_seg.errors import ResumeError, UsageError, printable
from brats_seg.evaluation.scores import RegionSummary
from brats_seg.files import read_bounded
from brats_seg.labels import REGIONS
from brats_seg.runtime.weights import BEST_NAME, MODEL_NAME, read_checkpoint, reason_of

FACTS_NAME = "card.json"
_LARGEST_FACTS = 1 << 26
"""Bytes of the longest `card.json`; a case takes about 250."""

Count = Annotated[int, Field(ge=0)]
Share = Annotated[float, Field(ge=0, le=1)]
CountRow = tuple[Count, Count, Count]


class ValidatedCase(Section):
    """Voxel counts of a held-out case, of the validation that the weights were chosen by."""

    case_id: str = ""
    """Empty if ids are left out."""
    counts: tuple[CountRow, CountRow, CountRow, CountRow]
    """True and false positives, false and true negatives, for WT, TC and ET."""


class NetworkFacts(Section):
    """Facts about the training of one network."""

    run: str = ""
    """Name of the folder of its run."""
    training: tuple[str, ...] = ()
    """Ids of the cases that it was trained on."""
    held_out: tuple[str, ...] = ()
    """Ids of the cases that were held out."""
    n_training: Count | None = None
    """Number of those cases; None if it is not known."""
    n_held_out: Count | None = None
    epoch: Count | None = None
    """Epochs of training until the weights were saved."""
    validation: tuple[ValidatedCase, ...] = ()
    """Held-out cases as the weights were validated on them; none where they were not, or on patches."""
    mean_dice: tuple[Share, Share, Share] | None = None
    """Mean Dice of WT, TC and ET in that validation, also of runs that have not recorded its cases."""
    environment: dict[str, str] = Field(default_factory=dict)
    """Versions and device of the training."""
    started_from: str = ""
    """Name of the model whose weights it started from; empty if they were drawn at random."""
    learnt_before: tuple[str, ...] = ()
    """Ids of the cases that those weights were trained on; none if they are not known."""

    @property
    def case_ids(self) -> frozenset[str]:
        """All ids of cases."""
        validated = (case.case_id for case in self.validation if case.case_id)
        return frozenset({*self.training, *self.held_out, *self.learnt_before, *validated})

    def without_ids(self) -> Self:
        """Return the facts without the ids of cases."""
        anonymous = tuple(case.model_copy(update={"case_id": ""}) for case in self.validation)
        no_ids = dict.fromkeys(("training", "held_out", "learnt_before"), ())
        return self.model_copy(update={**no_ids, "validation": anonymous})


class CrossValidationScores(Section):
    """Scores of a cross-validation with the networks of a model."""

    protocol: str
    """Name of the scoring protocol."""
    summaries: tuple[RegionSummary, ...]


class ModelFacts(Section):
    """Content of `card.json`."""

    exported: str
    """Date of the export."""
    brats_seg: str
    """Version that exported the model."""
    license: str = ""
    """Licence of the weights; empty if none is stated."""
    networks: tuple[NetworkFacts, ...]
    scores: CrossValidationScores | None = None
    """None without a cross-validation."""

    @property
    def has_ids(self) -> bool:
        """Whether the id of any case is among the facts."""
        return any(one.case_ids for one in self.networks)

    @property
    def knows_cases(self) -> bool:
        """Whether the cases of any network are known, at least by their number."""
        return any(one.n_training is not None for one in self.networks)

    def is_alike(self, other: "ModelFacts") -> bool:
        """Tell whether other facts differ in the time of the export at most."""
        same = {"exported": other.exported, "brats_seg": other.brats_seg}
        return self.model_copy(update=same) == other


def facts_of(
    paths: Sequence[Path],
    *,
    license_name: str = "",
    case_ids: bool | None = None,
    scores: CrossValidationScores | None = None,
) -> ModelFacts:
    """Collect the facts about the networks of runs, checkpoints or exported folders.

    Args:
        paths: The same as are given to `read_together`, whose order of networks is kept.
        license_name: Licence of the weights; by default that of an exported folder given alone.
        case_ids: Whether the ids of cases are named; None names them if all are of public releases.
            Other ids may identify patients.
        scores: Scores of a cross-validation; by default those of an exported folder given alone.

    Raises:
        UsageError: The facts of an exported folder are damaged.
        ResumeError: A checkpoint is damaged.
        FoldError: The split of a run is damaged.
    """
    networks = tuple(facts for path in paths for facts in _network_facts(path))
    is_named = case_ids if case_ids is not None else all(map(_are_public, networks))
    stored = read_facts(paths[0]) if len(paths) == 1 else None
    if stored is not None:
        license_name, scores = license_name or stored.license, scores or stored.scores
    return ModelFacts(
        exported=datetime.now(UTC).date().isoformat(),
        brats_seg=version("brats_seg"),
        license=printable(license_name),
        networks=networks if is_named else tuple(one.without_ids() for one in networks),
        scores=scores,
    )


def read_facts(folder: Path) -> ModelFacts | None:
    """Read `card.json` of an exported folder; None if there is none.

    Raises:
        UsageError: The file is damaged.
    """
    path = folder / FACTS_NAME
    if not (folder / MODEL_NAME).exists() or not path.exists():
        return None
    try:
        facts = ModelFacts.model_validate(json.loads(read_bounded(path, _LARGEST_FACTS)))
        if len(facts.networks) != (n_networks := _n_networks(folder)):
            msg = f"it describes {len(facts.networks)} networks; expected {n_networks}"
            raise ValueError(msg)
    except (OSError, ValueError, RecursionError) as error:
        msg = (
            f"{path} cannot be read: {reason_of(error)}. Copy or export the model again, or remove "
            "this file: scores and cases are then not in the model card."
        )
        raise UsageError(msg) from None
    return facts


def _are_public(facts: NetworkFacts) -> bool:
    """Tell whether all cases have ids of public releases, which name no patient."""
    return all(release_of(case_id) != UNKNOWN for case_id in facts.case_ids)


def _network_facts(path: Path) -> tuple[NetworkFacts, ...]:
    """Return the facts of each network of a path, in the order of `read_trained`."""
    if (path / MODEL_NAME).exists():
        stored = read_facts(path)
        return stored.networks if stored else (NetworkFacts(),) * _n_networks(path)
    checkpoint = path / BEST_NAME if path.is_dir() else path
    content = read_checkpoint(checkpoint, torch.device("cpu"))
    try:
        return (NetworkFacts(run=path.absolute().name, **_facts_in(content, checkpoint.parent)),)
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{checkpoint} cannot be read as a model: {reason_of(error)}"
        raise ResumeError(msg) from None


def _n_networks(folder: Path) -> int:
    """Return the number of networks of an exported folder that has been read."""
    return len(json.loads((folder / MODEL_NAME).read_bytes())["members"])


def _facts_in(content: Mapping[str, Any], run: Path) -> dict[str, Any]:
    """Return the facts in a checkpoint and in the split beside it."""
    found: dict[str, Any] = {"environment": content.get("environment", {})}
    if (run / SPLIT_NAME).exists():
        split = read_split(run / SPLIT_NAME)
        found |= {"training": split.train, "held_out": split.validation}
        found |= {"n_training": len(split.train), "n_held_out": len(split.validation)}
    if start := content.get("started_from"):
        found["started_from"] = f"{Path(start['path']).name}, fingerprint {start['fingerprint']}"
        found["learnt_before"] = start["learnt_from"]
    # the latest state need not have been validated
    is_validated = "optimizer" not in content
    return {**found, **_validation_facts(content)} if is_validated else found


def _validation_facts(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the facts about the validation of the best weights, if it was on whole cases."""
    progress, found = content["progress"], dict[str, Any]()
    history = progress["history"]
    row = history[-1] if history else {}
    if "epoch" in row:
        found["epoch"] = int(row["epoch"])
    config = content["card"].config
    sums = progress["sums"]
    # on patches, each case has `per_case` of them
    is_one_each = config.patch.per_case > 1 and 0 < sums["n_patches"] == len(sums["counts"])
    if config.validation.patches_between and not is_one_each:
        return found
    columns = [f"val_dice_{region}" for region in REGIONS]
    if all(column in row for column in columns):
        found["mean_dice"] = [row[column] for column in columns]
    counts = sorted(sums["counts"].items())
    return found | {"validation": [{"case_id": name, "counts": rows} for name, rows in counts]}
