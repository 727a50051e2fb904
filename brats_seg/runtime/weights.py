"""Read trained networks from disk: their weights, and the card that says what they are.

A run holds checkpoints, and an exported model (see `inference.export`) holds several networks. A
checkpoint is a dictionary of plain values and tensors, read with `weights_only=True`, so that opening
one runs no code. Prediction reads two of its entries: `model`, the state dict of the network, and
`card`, a `ModelCard`.
"""

import hashlib
import json
import pickle
import reprlib
import zipfile
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Annotated, Any, ClassVar, TypeAlias, cast

import numpy as np
import torch
from pydantic import ConfigDict, Field, JsonValue, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor, nn
from torch.nn.modules.module import register_module_parameter_registration_hook

from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.cases.nifti import VOXEL_EDGES_MM
from brats_seg.config import Config, Section, Size, validation_problems
from brats_seg.data.fold import NO_RECORD, TrainingCases
from brats_seg.errors import ResumeError, UsageError, some_of
from brats_seg.evaluation.scores import AllSubsetScores
from brats_seg.files import check_regular, locked, read_bounded, whole_file
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS, REGIONS
from brats_seg.presets import TaskName, check_stored
from brats_seg.voxels.regions import Decoding

BEST_NAME = "best.pt"
"""Checkpoint of a run with the best score on its held-out cases."""
RUN_LOCK_NAME = ".training.lock"
"""Lock on the folder of a run."""
MODEL_NAME = "model.json"
"""Description of the networks in an exported folder."""
SCHEMA_VERSION = 3
"""Version of checkpoints."""
FORMAT_VERSION = 2
"""Version of exported folders."""
SHIPPED = Path(__file__).parents[1] / "weights"
"""Exported network that the package carries; an installation may lack its weights."""
_INVALID = (KeyError, TypeError, AttributeError, ValueError, RecursionError)
"""Errors of content that has other parts than expected; `ValidationError` is a `ValueError`."""
_MOST_NETWORKS = 64
"""Networks of an ensemble; cross-validation exports five."""
_LARGEST_DESCRIPTION = 1 << 24
"""Bytes of the longest `model.json`; a network takes about 2,000."""
_COPY_AGAIN = "Copy or export the model again."
_READ_BY = "Read it with the version of brats_seg that wrote it."

Edge = Annotated[float, Field(ge=VOXEL_EDGES_MM[0], le=VOXEL_EDGES_MM[1])]
"""Edge of a voxel in mm."""
Remark = Annotated[str, Field(max_length=400, pattern=r"^[ -\[\]-~]*$")]
"""Plain text on one line, without the backslash that separates values in DICOM."""
Spacing: TypeAlias = tuple[Edge, Edge, Edge]

RUN_AGAIN = "Copy the file again; without a whole copy, train the run again with --fresh."
"""Advice where a checkpoint of a run cannot be read."""
_MOST_VALUES = 1_000_000
"""Values of a checkpoint besides the tensors, counted as often as they are referred to."""
_DEEPEST = 32
"""Levels of lists and dictionaries in a checkpoint; ours have six."""
_LONGEST_REASON = 300
_NUMPY_SCALARS: list[Callable[..., Any] | tuple[Callable[..., Any], str]] = [
    np.dtype,
    *(type(np.dtype(kind)) for kind in ("f4", "f8", "i4", "i8", "?")),
    *(
        (cast("Callable[..., Any]", np.float64(0).__reduce__()[0]), f"numpy.{module}.scalar")
        for module in ("core.multiarray", "_core.multiarray")
    ),
]
"""Classes of single numbers of numpy, which other programs keep in checkpoints: plain values."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ModelIdentity:
    """Data that a network was trained on and how they were prepared; it never changes.

    Example:
        >>> identity = ModelIdentity(
        ...     conventions=("brats2023",), patch=(64, 64, 64), fingerprint="my training set"
        ... )
        >>> identity.regions
        ('wt', 'tc', 'et')
    """

    __pydantic_config__: ClassVar[ConfigDict] = ConfigDict(extra="forbid", allow_inf_nan=False)

    conventions: Annotated[tuple[str, ...], Field(max_length=_MOST_NETWORKS)]
    """Label conventions of the training cases; each case's regions were made by its own."""
    patch: Size
    """Voxels of a training patch."""
    fingerprint: str
    """Hash of the training set: ids and prepared contents."""
    modalities: tuple[str, ...] = MODALITIES
    """Input channels, in order."""
    regions: tuple[str, ...] = REGIONS
    """Output channels, in order."""
    normalisation: str = "z-score of each modality inside the brain, background 0"
    """Normalisation of the intensities."""
    spacing_mm: Spacing = (1.0, 1.0, 1.0)
    """Voxel size of the training cases."""
    subsets: Annotated[tuple[tuple[str, ...], ...], Field(max_length=len(MODALITY_SUBSETS))] = ()
    """Subsets of the modalities that training patches were cut to; none without modality dropout."""


class FittedPrediction(Section):
    """Settings of prediction that `tune` fitted to a network on its held-out cases."""

    decoding: Decoding = Decoding()


NOT_FITTED = FittedPrediction()


class ModelCard(Section):
    """Everything that is known of a network beside its weights."""

    identity: ModelIdentity
    config: Config
    """Settings of its run."""
    fitted: FittedPrediction = NOT_FITTED
    subset_scores: AllSubsetScores = ()
    """Scores without some modalities; none before they are measured, or without modality dropout."""
    remark: Remark = ""
    """Sentence for everyone who sees a prediction of the network."""
    notes: dict[str, JsonValue] = Field(default_factory=dict)
    """Values of the optional parts of the package, each of which reads its own."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class TrainedModel:
    """Weights of a network, and its card."""

    weights: dict[str, Tensor]
    """State dict of the network."""
    card: ModelCard
    cases: TrainingCases = NO_RECORD


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ExportedModel:
    """Networks of an exported folder."""

    networks: tuple[TrainedModel, ...]
    fingerprint: str
    """Fingerprint that they were exported with."""


class ExportedNetwork(Section):
    """One entry of `members` in `model.json`."""

    weights: str
    """Name of the file of weights."""
    sha256: str
    """Check sum of that file."""
    card: ModelCard
    cases: TrainingCases = NO_RECORD
    """Without ids if any may identify a patient, unless the user asked for them; no hashes, because these
    could be found by trying all ids."""


class ModelDescription(Section):
    """Content of `model.json`."""

    format_version: int
    brats_seg: str
    fingerprint: str
    labels: dict[str, dict[str, Any]]
    members: Annotated[list[ExportedNetwork], Field(min_length=1, max_length=_MOST_NETWORKS)]


def read_trained(path: Path) -> tuple[TrainedModel, ...]:
    """Read the networks of a run's folder, a checkpoint or an exported folder."""
    try:
        if (path / MODEL_NAME).exists():
            return read_exported(path).networks
        file = path / BEST_NAME if path.is_dir() else path
        # an exported folder has its weights in a file of another format, without what they are
        is_there = file.is_file() and file.suffix != ".safetensors"
    except OSError as error:
        msg = f"{path} cannot be read as a model: {error.strerror}. Check its name and permissions."
        raise UsageError(msg) from None
    if is_there:
        return (load_trained(file),)
    names = sorted(file.name for file in path.glob("*"))
    found = f"a folder with {some_of(names)}" if names else "no folder and no checkpoint"
    msg = f"{path} holds no model: found {found}; expected one with {MODEL_NAME}, or with {BEST_NAME} of a validated run."
    raise UsageError(msg)


def shipped_network() -> Path | None:
    """Return the folder of the network that the package carries, or None without its weights."""
    return SHIPPED if any(SHIPPED.glob("*.safetensors")) else None


def load_trained(path: Path) -> TrainedModel:
    """Read a network from a checkpoint."""
    content = read_checkpoint(path)
    try:
        weights = checked_weights(content["model"])
        cases = _training_cases(content, path.parent / SPLIT_NAME)
    except _INVALID as error:
        raise _unreadable(path, error) from None
    card: ModelCard = content["card"]
    check_stored(path, card.config.model.name, card.config.model.arguments)
    return TrainedModel(weights=weights, card=card, cases=cases)


def _training_cases(content: Mapping[str, Any], split: Path) -> TrainingCases:
    """Return the training cases and patients of a run, and those of the weights that it started from."""
    before = content.get("started_from") or {"learnt_from": (), "is_complete": True}
    train = read_split(split).train if split.exists() else ()
    ids = tuple(sorted({*train, *content.get("patients", ()), *before["learnt_from"]}))
    return TrainingCases(ids=ids, is_complete=bool(train) and before.get("is_complete", False))


def read_exported(folder: Path) -> ExportedModel:
    """Read the networks of an exported folder."""
    description = read_description(folder / MODEL_NAME)
    networks = []
    for part in description.members:
        # the name alone: a model from elsewhere must not read files outside its folder
        path = folder / Path(part.weights).name
        _check_sum(path, part.sha256)
        model = part.card.config.model
        check_stored(folder / MODEL_NAME, model.name, model.arguments)
        networks.append(TrainedModel(weights=_load_weights(path), card=part.card, cases=part.cases))
    # the message does not tell a forger which fingerprint to write
    if fingerprint_of(networks) != description.fingerprint:
        msg = f"{folder / MODEL_NAME} is not what was exported: it has another fingerprint. {_COPY_AGAIN}"
        raise UsageError(msg)
    return ExportedModel(networks=tuple(networks), fingerprint=description.fingerprint)


def require_task(trained: TrainedModel, task: TaskName, path: Path) -> None:
    """Raise `UsageError` if the network read from `path` was trained for another task."""
    found = trained.card.config.model
    if found.task != task:
        msg = f"{path}: found a {found.task} run, model.name {found.name!r}; expected a {task} run. {_INSTEAD[task]}"
        raise UsageError(msg)


_INSTEAD: dict[TaskName, str] = {
    "segmentation": "An autoencoder gives no label maps: use it with `reconstruct` and `features`.",
    "reconstruction": "Train one with `brats-seg train --network autoencoder`.",
}
"""Advice where a run of the task is missing."""


def fingerprint_of(networks: Sequence[TrainedModel]) -> str:
    """Return a hash of weights, identities, fitted settings and architectures, in any order."""
    return hashlib.sha256("\n".join(sorted(map(_fingerprint, networks))).encode()).hexdigest()[:32]


def _fingerprint(trained: TrainedModel) -> str:
    # without defaults: entries that a later version adds do not change fingerprints of this one
    defaults = {entry.name: entry.default for entry in fields(ModelIdentity)}
    defaults |= Decoding().model_dump()
    given = {name: value for name, value in entries_of(trained).items() if value != defaults[name]}
    key = hashlib.sha256(json.dumps(given, sort_keys=True).encode())
    key.update(trained.card.config.model.model_dump_json(exclude_defaults=True).encode())
    key.update(str(trained.card.config.patch.size).encode())
    for scores in trained.card.subset_scores:
        key.update(scores.model_dump_json().encode())
    for name, weights in sorted(trained.weights.items()):
        key.update(f"{name} {weights.dtype} {tuple(weights.shape)}".encode())
        key.update(weights.detach().contiguous().cpu().reshape(-1).view(torch.uint8).numpy().data)
    return key.hexdigest()


def entries_of(trained: TrainedModel) -> dict[str, Any]:
    """Return identity and fitted settings as one mapping, for hashes and comparisons."""
    return {**asdict(trained.card.identity), **trained.card.fitted.decoding.model_dump()}


def run_locked(run: Path) -> AbstractContextManager[None]:
    """Keep other processes from training or tuning a run; its folder is created."""
    msg = f"another process trains or tunes {run}: wait for it, or choose another --run."
    return locked(run / RUN_LOCK_NAME, when_taken=UsageError(msg))


def store_card(path: Path, card: ModelCard) -> None:
    """Store a card in a checkpoint, whose other entries stay."""
    write_checkpoint({**read_checkpoint(path), "card": card.model_dump()}, path)


def read_checkpoint(path: Path) -> dict[str, Any]:
    """Read the entries of a checkpoint onto the host; `card` is a `ModelCard`."""
    content = read_plain(path)
    version = content.get("schema_version") if isinstance(content, dict) else None
    if version != SCHEMA_VERSION:
        msg = f"{path}: found schema version {reprlib.repr(version)}; expected {SCHEMA_VERSION}, as in {BEST_NAME} of a run. {_READ_BY}"
        raise ResumeError(msg)
    try:
        return {**content, "card": ModelCard.model_validate(content["card"])}
    except _INVALID as error:
        raise _unreadable(path, error) from None


def _unreadable(path: Path, error: Exception, next_step: str = RUN_AGAIN) -> ResumeError:
    msg = f"{path} is not a checkpoint that can be read: {reason_of(error)}. {next_step}"
    return ResumeError(msg)


def read_weights(path: Path) -> dict[str, Tensor]:
    """Read the weights of another program from a state dict that torch saved."""
    content = read_plain(path, "Copy it again, or save the state_dict() of its network.")
    if isinstance(content, dict):
        # the entries that torch's own examples, Lightning and MONAI store the weights in
        content = content.get("state_dict", content.get("model", content))
    try:
        return checked_weights(content)
    except _INVALID as error:
        msg = f"{path} holds no weights: {reason_of(error)}; expected a state dict."
        raise UsageError(msg) from None


def read_description(path: Path) -> ModelDescription:
    """Read a `model.json` without the weights that it describes."""
    try:
        content = json.loads(read_bounded(path, _LARGEST_DESCRIPTION))
        found = content["format_version"]
        if found == FORMAT_VERSION:
            return ModelDescription.model_validate(content)
    except (OSError, *_INVALID) as error:
        msg = f"{path} cannot be read as a model: {reason_of(error)}. {_COPY_AGAIN}"
        raise UsageError(msg) from None
    msg = f"{path}: found format version {found!s:.50}; expected {FORMAT_VERSION}. {_READ_BY}"
    raise UsageError(msg)


def _check_sum(path: Path, expected: str) -> None:
    try:
        check_regular(path)
        found = f"the check sum {sha256_of(path)}"
    except (OSError, ValueError) as error:
        found = f"no file that can be read ({reason_of(error)})"
    if found != f"the check sum {expected}":
        msg = f"{path} is damaged: found {found}, expected the check sum {expected}. {_COPY_AGAIN}"
        raise UsageError(msg)


def _load_weights(path: Path) -> dict[str, Tensor]:
    try:
        return checked_weights(load_file(path))
    except (SafetensorError, OSError, TypeError, ValueError, RuntimeError) as error:
        msg = f"{path} holds no weights that can be read: {reason_of(error)}. {_COPY_AGAIN}"
        raise UsageError(msg) from None


def read_plain(path: Path, next_step: str = RUN_AGAIN) -> Any:
    """Return the values and tensors that `torch.save` has written, read without running code.

    Args:
        path: File to read.
        next_step: Advice of the message if it cannot be read.
    """
    try:
        check_regular(path)
        _check_entries(path)
        with torch.serialization.safe_globals(_NUMPY_SCALARS):
            content = torch.load(path, map_location="cpu", weights_only=True)
        _check_values(content)
    except Exception as error:  # noqa: BLE001 - torch raises errors of many kinds for a damaged file
        raise _unreadable(path, error, next_step) from None
    return content


def write_checkpoint(content: Mapping[str, Any], path: Path) -> None:
    """Write the entries of a checkpoint as a whole: a reader finds the old file or the new one."""
    with whole_file(path) as temporary, temporary.open("wb") as file:
        try:
            torch.save(content, file)
        except RuntimeError as error:
            # torch reports a full disk as "unexpected pos", while the error of the system is handled
            if isinstance(error.__context__, OSError):
                raise error.__context__ from None
            raise


def checked_weights(state: Any) -> dict[str, Tensor]:
    """Return a state dict, if all its entries are tensors whose values are in the file."""
    if not isinstance(state, dict):
        msg = f"found {type(state).__name__} in place of the weights"
        raise TypeError(msg)
    for name, value in state.items():
        is_dense = isinstance(value, Tensor) and value.layout == torch.strided
        if not isinstance(name, str) or not is_dense or value.is_complex():
            msg = f"the weight {reprlib.repr(name)} is no tensor of real numbers"
            raise TypeError(msg)
        # a tensor can repeat a few stored values without end
        if value.nbytes > value.untyped_storage().nbytes():
            msg = f"the weight {name} has more values than the file holds"
            raise ValueError(msg)
        if not value.isfinite().all():
            msg = f"the weight {name} is not finite"
            raise ValueError(msg)
    return state


def build_with(make: Callable[[], nn.Module], state: Any) -> nn.Module:
    """Build a network that a file describes; raise `ValueError` if it has more weights than the file."""
    weights = checked_weights(state)
    n_left = sum(value.numel() for value in weights.values())

    def count(_module: nn.Module, name: str, parameter: nn.Parameter) -> None:
        nonlocal n_left
        n_left -= max(1, parameter.numel())
        if n_left < 0:
            msg = f"the network that is described has more weights than the file, such as {name}"
            raise ValueError(msg)

    with register_module_parameter_registration_hook(count):
        network = make().eval()
    # half precision is a way to store weights, and not to compute with them
    values = {key: w.float() if w.is_floating_point() else w for key, w in weights.items()}
    network.load_state_dict(values, assign=True)
    return network


def reason_of(error: Exception) -> str:
    """Return what an error says about content that cannot be read, as one line for a message."""
    if isinstance(error, ValidationError):
        return some_of(validation_problems(error))
    if isinstance(error, pickle.UnpicklingError):
        # the message of torch recommends to run the code
        return "it holds something else than weights and plain values"
    if isinstance(error, KeyError):
        return f"it has no entry {error}"
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{error}".split())[:_LONGEST_REASON] or "it ends too soon"


def sha256_of(path: Path) -> str:
    """Return the check sum of a file."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _check_values(content: Any) -> None:
    """Raise `ValueError` if nested values are too deep or too many, as lists that hold each other."""
    pending = [(content, 0)]
    n_values = 0
    while pending:
        value, depth = pending.pop()
        below: Collection[Any] = ()
        if isinstance(value, Mapping):
            below = value.values()
        elif isinstance(value, list | tuple | set):
            below = value
        n_values += len(below)
        if depth > _DEEPEST or n_values > _MOST_VALUES:
            msg = "its values are too many, or nested too deeply"
            raise ValueError(msg)
        pending += [(item, depth + 1) for item in below]


def _check_entries(path: Path) -> None:
    """Raise `BadZipFile` if a byte has changed: torch writes check sums but does not verify them.

    Entries of `torch.save` are not compressed, and cannot unpack to more than the file holds.
    """
    with zipfile.ZipFile(path) as archive:
        entries = archive.infolist()
        if any(Path(entry.filename).name == "constants.pkl" for entry in entries):
            msg = "it is a program of TorchScript, not weights"
            raise zipfile.BadZipFile(msg)
        if sum(entry.file_size for entry in entries) > path.stat().st_size:
            msg = "its entries are compressed or overlap"
            raise zipfile.BadZipFile(msg)
        damaged = archive.testzip()
    if damaged is not None:
        msg = f"its entry {damaged} is damaged"
        raise zipfile.BadZipFile(msg)
