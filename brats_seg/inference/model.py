"""Load trained networks, from runs, an exported folder or another program, onto a device.

The settings of prediction are those of the user, those fitted to a model, and defaults.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path

import torch
from torch import nn

from brats_seg.config import OVERLAP, Config
from brats_seg.data.fold import Seen, TrainingCases
from brats_seg.errors import CaseError, ConfigError, UsageError
from brats_seg.evaluation.scores import SubsetScores, absent_from, pool_scores
from brats_seg.inference.method import Method, standard_method
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.labels import CONVENTIONS, MODALITIES, MODALITY_SUBSETS, REGIONS
from brats_seg.models.build import ImportedNetwork, build_model, default_window, size_multiple
from brats_seg.models.norm import check_in_place
from brats_seg.runtime import weights
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory import keep_freed_memory
from brats_seg.runtime.windows import Window
from brats_seg.voxels.box import Triple, rounded_up, shape_text
from brats_seg.voxels.regions import Decoding
from brats_seg.wings import Notes, find_wing


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Member:
    """One network of an ensemble, of this package or another, and how it is applied to a scan."""

    network: nn.Module
    name: str
    """`model.name` of the network, or that of its architecture, for messages."""
    identity: weights.ModelIdentity
    method: Method
    window: Window
    """The window of the network, until `load_model` puts that of the settings in its place."""
    regions: tuple[int, ...]
    """Indices of the output channels in the order in which the method takes them: that of `REGIONS`, of an
    autoencoder that of `MODALITIES`; a method of another program has its own."""
    multiple: Triple
    """Numbers that the size of an input must be a multiple of, along each axis."""
    channels: tuple[int, ...] = tuple(range(len(MODALITIES)))
    """Index of each input channel in the image that the method makes."""
    decoding: Decoding = field(default_factory=Decoding)
    """Decoding that was fitted to the network, until that of the settings replaces it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """One network or several whose probabilities are averaged; all agree in how they are applied."""

    members: tuple[Member, ...]
    fingerprint: str
    """Hash that changes with the weights and how they are used, and not with their path."""
    device: Device
    settings: PredictionSettings = DEFAULT_SETTINGS
    """Settings that windows and decoding were resolved with."""
    subsets: tuple[tuple[str, ...], ...] = ()
    """Subsets of the modalities that all networks were trained for."""
    subset_scores: tuple[SubsetScores, ...] = ()
    """Scores of held-out cases with these subsets, where they were measured."""
    remarks: tuple[str, ...] = ()
    """Sentences for everyone who sees a prediction."""
    notes: tuple[Notes, ...] = ()
    """Notes in the card of each member; none for networks of other programs."""
    training_cases: tuple[TrainingCases, ...] = ()
    """Training cases of each member; none for networks of other programs."""

    @property
    def method(self) -> Method:
        """The way in which the networks are applied to a scan."""
        return self.members[0].method

    @property
    def identity(self) -> weights.ModelIdentity:
        """Identity of the first network; the others agree with it in all that prediction depends on."""
        return self.members[0].identity

    @property
    def decoding(self) -> Decoding:
        """Thresholds and smallest volumes."""
        return self.members[0].decoding

    def seen(self, *ids: str) -> Seen:
        """Return whether any network was trained on the patient with these ids."""
        # the alphabet orders the answers: no, unknown, yes
        return max((cases.seen(*ids) for cases in self.training_cases), default="unknown")

    def require(self, case_id: str, modalities: Sequence[str], file: str = "(all)") -> None:
        """Raise `CaseError` unless the networks were trained for these modalities alone."""
        if tuple(modalities) in (MODALITIES, *self.subsets):
            return
        if not self.subsets:
            expected = f"{', '.join(MODALITIES)}, as the model was trained with all four modalities"
        else:
            subsets = "; ".join(", ".join(subset) for subset in self.subsets)
            expected = f"all four modalities, or one of the sets that it was trained for: {subsets}"
        problem = f"no {', '.join(absent_from(modalities))}"
        next_step = "Add the missing files, or use a model trained with training.modality_dropout."
        raise CaseError(case_id, file, problem, expected, next_step)


def load_model(
    paths: Sequence[Path], device: Device, settings: PredictionSettings = DEFAULT_SETTINGS
) -> Model:
    """Load runs, checkpoints or exported folders as one ensemble, or one model of another program.

    Args:
        paths: Runs, checkpoints or exported folders, or one model of nnU-Net v2 or MONAI bundle; none
            for the network that the package carries.
        device: Device to compute on.
        settings: Settings of prediction: windows, thresholds and smallest volumes.

    Raises:
        UsageError: A path holds no model, or one that does not segment, or is damaged; or they
            cannot be averaged.
        ConfigError: A network cannot take the window of the settings.
    """
    if not paths:
        if (shipped := weights.shipped_network()) is None:
            msg = "this installation carries no network: give a run or an exported model (--model)"
            raise UsageError(msg)
        paths = [shipped]
    read = _foreign_reader(paths[0]) if len(paths) == 1 else None
    if read is None:
        return assemble(read_together(paths), device, settings)
    if settings.precision == "auto" and device.torch_device.type == "cpu":
        # as the other programs compute on a CPU
        device = choose_device("cpu", "fp32")
    return _as_model([read(paths[0])], [], device, settings)


def _foreign_reader(path: Path) -> Callable[[Path], Member] | None:
    """Return the function that reads a model of another program, or None for one of this package."""
    is_known = (path / weights.MODEL_NAME).exists() or (path / weights.BEST_NAME).exists()
    return None if is_known or (wing := find_wing("interop")) is None else wing.reader_of(path)


def read_together(paths: Sequence[Path]) -> tuple[weights.TrainedModel, ...]:
    """Read the networks of runs, checkpoints or exported folders for one ensemble."""
    for path in paths:
        if _foreign_reader(path) is not None:
            msg = f"{path} is of another program: only `predict` takes it, and alone; expected runs"
            raise UsageError(msg)
    read = [(path, network) for path in paths for network in weights.read_trained(path)]
    for path, network in read:
        weights.require_task(network, "segmentation", path)
        _check_known(network.card.identity)
        _check_agreement(network, read[0][1])
    return tuple(network for _, network in read)


def assemble(
    networks: Sequence[weights.TrainedModel],
    device: Device,
    settings: PredictionSettings = DEFAULT_SETTINGS,
) -> Model:
    """Build networks that have been read as one ensemble."""
    return _as_model([_build(trained) for trained in networks], networks, device, settings)


def wrap_network(
    network: nn.Module,
    identity: weights.ModelIdentity,
    settings: PredictionSettings,
    multiple: Triple,
) -> Model:
    """Return a model of a network that was built elsewhere, with its weights loaded."""
    _check_known(identity)
    device = choose_device(settings.device, settings.precision)
    card = weights.ModelCard(identity=identity, config=Config())
    trained = weights.TrainedModel(weights=network.state_dict(), card=card)
    name = type(network).__name__
    # other logits than those of the regions are refused: a fourth channel would be left out without a word
    member = _member(trained, ImportedNetwork(network, name), name, multiple)
    # as in its validation: it may take its patch only
    member = replace(member, window=Window(size=identity.patch, overlap=OVERLAP))
    return _as_model([member], [trained], device, settings)


def _build(trained: weights.TrainedModel) -> Member:
    config, patch = trained.card.config.model, trained.card.identity.patch
    try:
        # the initial weights are overwritten: drawing them must not advance torch's generator
        with torch.random.fork_rng(devices=[]):
            network = weights.build_with(partial(build_model, config, patch), trained.weights)
    except (RuntimeError, ValueError) as error:
        advice = "For a network of your own, load them in Python: Predictor.of_network"
        msg = f"the weights are not those of model.name {config.name!r}: {error}. {advice}"
        raise UsageError(msg) from None
    return _member(trained, network, config.name, size_multiple(config, patch))


def _member(
    trained: weights.TrainedModel, network: nn.Module, name: str, multiple: Triple
) -> Member:
    config, identity = trained.card.config, trained.card.identity
    return Member(
        network=network,
        name=name,
        identity=identity,
        method=standard_method(identity.spacing_mm),
        window=Window(size=default_window(config, identity.patch), overlap=OVERLAP),
        channels=tuple(map(MODALITIES.index, identity.modalities)),
        regions=tuple(map(identity.regions.index, REGIONS))
        if config.model.task == "segmentation"
        else tuple(map(identity.modalities.index, MODALITIES)),
        multiple=multiple,
        decoding=trained.card.fitted.decoding,
    )


def _as_model(
    members: Sequence[Member],
    networks: Sequence[weights.TrainedModel],
    device: Device,
    settings: PredictionSettings,
) -> Model:
    """Return a model of networks as they were read, on a device and with the settings of the user.

    Networks of another program have a fingerprint already.
    """
    if device.torch_device.type == "cpu":
        keep_freed_memory()
    for member in members:
        member.network.to(device.torch_device)
        check_in_place(member.network)
        member.network.eval()
    subsets, foreign = [m.identity.subsets for m in members], members[0].identity.fingerprint
    cards = [network.card for network in networks]
    return Model(
        members=tuple(resolve(settings, member) for member in members),
        fingerprint=weights.fingerprint_of(networks) if networks else foreign,
        device=device,
        settings=settings,
        subsets=tuple(subset for subset in subsets[0] if all(subset in each for each in subsets)),
        subset_scores=pool_scores([scores for card in cards for scores in card.subset_scores]),
        remarks=tuple({card.remark: None for card in cards if card.remark}),
        notes=tuple(card.notes for card in cards),
        training_cases=tuple(network.cases for network in networks),
    )


def resolve(settings: PredictionSettings, member: Member) -> Member:
    """Return a network with the window and the decoding of the user, else as fitted, else its defaults.

    `ConfigError` is raised if the network cannot take the window.
    """
    size = member.window.size if settings.window == "auto" else settings.window
    size = None if size == "whole" else size
    if size is not None and (above := rounded_up(size, member.multiple)) != size:
        msg = (
            f"--window {shape_text(size)} does not fit model.name {member.name!r}; expected "
            f"multiples of {shape_text(member.multiple)}. Nearest above: {','.join(map(str, above))}."
        )
        raise ConfigError(msg)
    overlap = member.window.overlap if settings.overlap is None else settings.overlap
    given = settings.model_dump(include=set(Decoding.model_fields), exclude_none=True)
    window, decoding = Window(size=size, overlap=overlap), member.decoding.model_copy(update=given)
    return replace(member, window=window, decoding=decoding)


def _check_known(identity: weights.ModelIdentity) -> None:
    expected = weights.ModelIdentity(conventions=(), patch=identity.patch, fingerprint="")
    for kind, actual, known in (
        ("modalities", sorted(identity.modalities), sorted(MODALITIES)),
        ("regions", sorted(identity.regions), sorted(REGIONS)),
        ("normalisation", identity.normalisation, expected.normalisation),
        ("label conventions", sorted({*identity.conventions} - {c.name for c in CONVENTIONS}), []),
        ("subsets of the modalities", sorted({*identity.subsets} - {*MODALITY_SUBSETS}), []),
    ):
        if actual != known:
            msg = f"the model was trained with {kind} {actual}; expected {known}. Use its version of brats_seg."
            raise UsageError(msg)


def _check_agreement(network: weights.TrainedModel, first: weights.TrainedModel) -> None:
    entries, expected = weights.entries_of(network), weights.entries_of(first)
    for key in ("spacing_mm", *Decoding.model_fields):
        if entries[key] != expected[key]:
            msg = f"the models cannot be averaged: {key} {expected[key]} and {entries[key]}; expected the same. `brats-seg tune` fits runs of one voxel size together."
            raise UsageError(msg)
