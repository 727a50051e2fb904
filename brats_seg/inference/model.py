"""Load trained networks, from runs or an exported folder, onto a device."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from brats_seg.cases.conventions import resolve
from brats_seg.cases.layouts import NNUNET, UNKNOWN
from brats_seg.config import Config
from brats_seg.errors import UsageError
from brats_seg.evaluation.subset_scores import SubsetScores
from brats_seg.inference.foreign import ForeignMethod, ForeignNetwork
from brats_seg.inference.settings import PredictionSettings
from brats_seg.interop.monai_bundle import is_bundle, read_bundle
from brats_seg.interop.nnunet_model import is_nnunet, read_nnunet
from brats_seg.labels import (
    BRATS2023,
    CONVENTIONS,
    MODALITIES,
    MODALITY_SUBSETS,
    REGIONS,
    LabelConvention,
    convention_named,
)
from brats_seg.models.build import build_model, default_window, has_centred_norms, size_multiple
from brats_seg.models.norm import check_in_place
from brats_seg.quality.expected_dice import DiceLine
from brats_seg.quality.profile import TrainingProfile, pooled
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import (
    BEST_NAME,
    MODEL_NAME,
    NOT_FITTED,
    Decoding,
    FittedPrediction,
    ModelIdentity,
    TrainedModel,
    Window,
    entries_of,
    fingerprint_of,
    read_trained,
    require_task,
)
from brats_seg.voxels.box import Triple

_CONVENTIONS = frozenset(convention.name for convention in CONVENTIONS)
_SIZED_BY_SETTINGS = frozenset({"unet", "dynunet"})
"""Networks whose number of weights depends on the widths or on the patch."""
_USUAL_WIDTH, _USUAL_AXIS = 320, 256
"""Width and length of a patch up to which every network takes less than 1 GB."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Member:
    """One network of an ensemble."""

    network: nn.Module
    name: str
    """`model.name` of the network, for messages."""
    patch: Triple
    """Voxels of a training patch."""
    window: Triple | None
    """Default sliding window; None for networks that were trained on whole brain crops."""
    channels: tuple[int, ...]
    """Place in `MODALITIES` of each input channel."""
    regions: tuple[int, ...]
    """Place among the output channels of each region of `REGIONS`."""
    multiple: Triple = (1, 1, 1)
    """Numbers that the size of an input must be a multiple of, along each axis."""
    fitted: FittedPrediction = NOT_FITTED
    """Window and decoding that were fitted to the network."""
    subsets: tuple[tuple[str, ...], ...] = ()
    """Subsets of the modalities that the network was trained for."""
    subset_scores: tuple[SubsetScores, ...] = ()
    """Scores of its held-out cases with these subsets, where they were measured."""
    has_centred_norms: bool = False
    """Whether its norms can take statistics from the centre of a crop."""


@dataclass(frozen=True, kw_only=True, slots=True)
class WrittenConvention:
    """Label convention that a case is written in."""

    convention: LabelConvention
    reason: str = ""
    """Reason why it is written; empty if it is that of the release of the scan."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Model:
    """One network or several whose probabilities are averaged."""

    members: tuple[Member, ...]
    identity: ModelIdentity
    """Identity of the first member; the others agree with it in all that prediction depends on."""
    fingerprint: str
    """Hash that changes with the weights and how they are used, and not with their path."""
    device: Device
    method: ForeignMethod | None = None
    """Method by which another program applies its network; None for networks of this package."""
    profile: TrainingProfile | None = None
    """Profile of the training scans of all members; None if that of one is not known."""

    @property
    def subsets(self) -> tuple[tuple[str, ...], ...]:
        """Subsets of the modalities that all networks were trained for."""
        first, *others = self.members
        return tuple(
            subset for subset in first.subsets if all(subset in own.subsets for own in others)
        )

    def decoding(self, settings: PredictionSettings) -> Decoding:
        """Return the decoding asked for, completed by the one stored with the model."""
        return settings.over(self.members[0].fitted).decoding

    @property
    def dice_lines(self) -> tuple[DiceLine, ...]:
        """Expected Dice of each region, if it was fitted to all members together."""
        first, *others = (member.fitted.predicted_dice for member in self.members)
        return first if all(lines == first for lines in others) else ()

    def written_convention(self, settings: PredictionSettings, release: str) -> WrittenConvention:
        """Return the label convention to write a case of that release in.

        Where the release allows several, it is that of the training cases, if they had only one.
        """
        found = resolve(release=release, shape=None, values=())
        own = "" if found.is_open else found.convention.name
        if settings.labels is not None:
            reason = "" if settings.labels == own else f"asked for; {_release_words(own, release)}"
            return WrittenConvention(convention=convention_named(settings.labels), reason=reason)
        if own:
            return WrittenConvention(convention=found.convention)
        taught = self.identity.conventions
        unknown = _release_words(own, release)
        if len(taught) == 1:
            reason = f"{unknown}, and the model was trained on this convention"
            return WrittenConvention(convention=convention_named(taught[0]), reason=reason)
        taught_words = ", ".join(taught) or "labels of no known convention"
        reason = f"{unknown}, and the model was trained on {taught_words}"
        return WrittenConvention(convention=BRATS2023, reason=reason)


def _release_words(convention: str, release: str) -> str:
    """Return what the names of scans show of their label convention, if anything, for a message."""
    if convention:
        return f"the release of the scans has {convention}"
    if release in {UNKNOWN, NNUNET}:
        return "the names of the scans show no release"
    return f"the release {release} exists in several conventions"


def load_model(paths: Sequence[Path], device: Device) -> Model:
    """Load runs, checkpoints or exported folders as one ensemble.

    Raises:
        UsageError: A path holds no model, or one that does not segment, or is damaged; or they
            cannot be averaged.
    """
    trained = read_together(paths)
    members = [_built(network, device) for network in trained]
    return Model(
        members=tuple(members),
        identity=trained[0].identity,
        fingerprint=fingerprint_of(trained),
        device=device,
        profile=_profile(trained),
    )


def load_any_model(paths: Sequence[Path], device: Device) -> Model:
    """Load a model as `load_model` does, or one model of nnU-Net or MONAI, for prediction.

    Raises:
        UsageError: As `load_model`, or the model of another program cannot be used here.
    """
    foreign = [(path, read) for path in paths if (read := _foreign_reader(path)) is not None]
    if not foreign:
        return load_model(paths, device)
    if len(paths) > 1:
        msg = (
            f"{foreign[0][0]} is a model of another program, which cannot be averaged with others; "
            "expected it alone. Predict with one at a time."
        )
        raise UsageError(msg)
    ((path, read),) = foreign
    return _of_foreign(read(path), device)


def _foreign_reader(path: Path) -> Callable[[Path], ForeignNetwork] | None:
    """Return the function that reads a model of another program, or None for one of this package."""
    if (path / MODEL_NAME).exists() or (path / BEST_NAME).exists():
        return None
    try:
        return next((read for is_one, read in _FOREIGN if is_one(path)), None)
    except OSError:
        return None


_FOREIGN: tuple[tuple[Callable[[Path], bool], Callable[[Path], ForeignNetwork]], ...] = (
    (is_nnunet, read_nnunet),
    (is_bundle, read_bundle),
)
"""Functions that recognise and read models of other programs."""


def _of_foreign(found: ForeignNetwork, device: Device) -> Model:
    member = Member(
        network=_on_device(found.network, device),
        name=found.name,
        patch=found.identity.patch,
        window=found.identity.patch,
        channels=tuple(range(len(MODALITIES))),
        regions=tuple(range(len(REGIONS))),
        multiple=found.multiple,
        fitted=found.fitted,
    )
    return Model(
        members=(member,),
        identity=found.identity,
        fingerprint=found.fingerprint,
        device=device,
        method=found.method,
    )


def read_together(paths: Sequence[Path]) -> tuple[TrainedModel, ...]:
    """Read the networks of runs, checkpoints or exported folders for one ensemble.

    Raises as `load_model`.
    """
    for path in paths:
        if _foreign_reader(path) is not None:
            msg = (
                f"{path} is a model of another program, which only `predict` can use; expected a run, "
                "a checkpoint or an exported folder of this package."
            )
            raise UsageError(msg)
    read = [(path, network) for path in paths for network in read_trained(path)]
    for path, network in read:
        require_task(network, "segmentation", path)
        _check_known(network.identity)
        _check_agreement(network, read[0][1])
    return tuple(network for _, network in read)


def wrap_network(
    network: nn.Module,
    identity: ModelIdentity,
    device: Device,
    *,
    multiple: Triple = (1, 1, 1),
    fitted: FittedPrediction = NOT_FITTED,
) -> Model:
    """Return a model of a network that was built elsewhere, with its weights loaded.

    Args:
        network: Turns `(1, C, X, Y, Z)` into logits `(1, R, X, Y, Z)` in evaluation mode.
        identity: Channels and regions of the network, and the data that it was trained on.
        device: Device to compute on; the network is moved there.
        multiple: Numbers that the size of an input must be a multiple of.
        fitted: Window and decoding that were fitted to the network.

    Raises:
        UsageError: It was trained on other modalities, regions or intensities than this package
            prepares.
    """
    _check_known(identity)
    member = Member(
        network=_on_device(network, device),
        name=type(network).__name__,
        patch=identity.patch,
        window=identity.patch,
        channels=_channels(identity),
        regions=_regions(identity),
        multiple=multiple,
        fitted=fitted,
        subsets=identity.subsets,
    )
    trained = TrainedModel(
        weights=network.state_dict(), identity=identity, config=Config(), fitted=fitted
    )
    return Model(
        members=(member,), identity=identity, fingerprint=fingerprint_of([trained]), device=device
    )


def build_single(trained: TrainedModel, device: Device) -> Model:
    """Build one network that has been read."""
    return Model(
        members=(_built(trained, device),),
        identity=trained.identity,
        fingerprint=fingerprint_of([trained]),
        device=device,
        profile=trained.profile,
    )


def _profile(trained: Sequence[TrainedModel]) -> TrainingProfile | None:
    known = [network.profile for network in trained if network.profile is not None]
    return pooled(known) if len(known) == len(trained) else None


def _check_known(identity: ModelIdentity) -> None:
    expected = ModelIdentity(conventions=(), patch=identity.patch, fingerprint="")
    for what, found, known in (
        ("modalities", sorted(identity.modalities), sorted(MODALITIES)),
        ("regions", sorted(identity.regions), sorted(REGIONS)),
        ("normalisation", identity.normalisation, expected.normalisation),
        ("label conventions", sorted({*identity.conventions} - _CONVENTIONS), []),
        ("subsets of the modalities", sorted({*identity.subsets} - {*MODALITY_SUBSETS}), []),
    ):
        if found != known:
            msg = (
                f"the model was trained with {what} {found}; expected {known}. Use the version of "
                "brats_seg that it was trained with."
            )
            raise UsageError(msg)


def _check_agreement(network: TrainedModel, first: TrainedModel) -> None:
    own, others = entries_of(network), entries_of(first)
    for what in ("spacing_mm", *Decoding.model_fields):
        if own[what] != others[what]:
            msg = (
                f"the models cannot be averaged: {what} is {others[what]} in one and {own[what]} "
                "in another. Tune them together, or predict with one at a time."
            )
            raise UsageError(msg)


def _built(trained: TrainedModel, device: Device) -> Member:
    identity = trained.identity
    _check_sizes(trained)
    # the initial weights are overwritten: drawing them must not advance torch's generator
    with torch.random.fork_rng(devices=[]):
        network = build_model(trained.config.model, identity.patch)
    try:
        network.load_state_dict(trained.weights)
    except RuntimeError as error:
        msg = (
            f"the weights are not those of model.name {trained.config.model.name!r}: {error}. For "
            "a network of your own, load them in Python and use Predictor.of_network."
        )
        raise UsageError(msg) from None
    return Member(
        network=_on_device(network, device),
        name=trained.config.model.name,
        patch=identity.patch,
        window=_default_window(trained),
        channels=_channels(identity),
        regions=_regions(identity),
        multiple=size_multiple(trained.config.model, identity.patch),
        fitted=trained.fitted,
        subsets=identity.subsets,
        subset_scores=trained.subset_scores,
        has_centred_norms=has_centred_norms(trained.config.model),
    )


def default_of(trained: TrainedModel) -> Window:
    """Return the window that a network predicts with where none is given or fitted."""
    return _default_window(trained) or "whole"


def _default_window(trained: TrainedModel) -> Triple | None:
    if trained.config.patch.size == "whole":
        return None
    if trained.config.model.task == "reconstruction":
        return trained.identity.patch
    return default_window(trained.config.model, trained.identity.patch)


def _check_sizes(trained: TrainedModel) -> None:
    """Raise `UsageError` if the network of the settings has other weights than those read.

    It is built without memory for its weights, because settings from elsewhere can ask for any size.
    """
    config, patch = trained.config.model, trained.identity.patch
    is_usual = max(config.widths) <= _USUAL_WIDTH and max(patch) <= _USUAL_AXIS
    if is_usual or config.name not in _SIZED_BY_SETTINGS:
        return
    with torch.device("meta"):
        expected = build_model(config, patch).state_dict()
    found = {name: tuple(value.shape) for name, value in trained.weights.items()}
    if found != {name: tuple(value.shape) for name, value in expected.items()}:
        words = f"{_n_values(expected)} weights of the network, {_n_values(trained.weights)} in the file"
        msg = (
            f"the weights are not those of model.name {config.name!r} with these settings: {words}. "
            "For a network of your own, load them in Python and use Predictor.of_network."
        )
        raise UsageError(msg)


def _n_values(weights: Mapping[str, Tensor]) -> int:
    return sum(value.numel() for value in weights.values())


def _on_device(network: nn.Module, device: Device) -> nn.Module:
    network.to(device.torch_device)
    check_in_place(network)
    return network.eval()


def _channels(identity: ModelIdentity) -> tuple[int, ...]:
    return tuple(MODALITIES.index(modality) for modality in identity.modalities)


def _regions(identity: ModelIdentity) -> tuple[int, ...]:
    return tuple(identity.regions.index(region) for region in REGIONS)
