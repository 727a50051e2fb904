"""Start a run from weights that there are: take what fits by name and shape, and hold it for a while.

Weights are taken layer by layer: a layer whose weights are all there, in the same shapes, gets them,
and any other keeps those that were drawn from the seed. The names of a wrapper around a network
(`module.`, `network.`) do not count. The encoder of an autoencoder is taken for that of a U-Net.
"""

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.config import StartConfig
from brats_seg.data.fold import FoldData
from brats_seg.data.normalisation import spacing_text
from brats_seg.errors import UsageError, some_of
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.models.autoencoder import encoder_for_unet
from brats_seg.models.build import size_words
from brats_seg.models.unet import UNet
from brats_seg.runtime.torch_files import sha256_of
from brats_seg.runtime.weights import (
    BEST_NAME,
    ModelIdentity,
    TrainedModel,
    fingerprint_of,
    read_checkpoint,
    read_trained,
    read_weights,
)

log = logging.getLogger(__name__)

STARTED_FROM = "started_from"
"""Entry of a checkpoint that holds `StartedFrom`."""
_WRAPPERS = ("module.", "network.", "_orig_mod.")
"""Prefixes of names in averaged, wrapped and compiled networks."""
_CHOOSE = "Choose other weights, or leave out --start-from."


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedFrom:
    """The weights that a run started from, as its checkpoints store them."""

    path: str
    """Run, exported model or file that they were read from."""
    fingerprint: str
    """Hash of all weights that are there."""
    taken: tuple[str, ...]
    """Names of the weights that were taken, in the network of the run."""
    learnt_from: tuple[str, ...] = ()
    """Cases that these weights were trained on, and those that they started from, where it is known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """Weights that a run may start from."""

    path: Path
    weights: Mapping[str, Tensor]
    fingerprint: str
    trained: TrainedModel | None
    """The trained network; None for a file that holds weights alone."""
    learnt_from: tuple[str, ...] | None
    """Cases that it was trained on; None where it is not known."""

    @property
    def name(self) -> str:
        """Path and kind of network, for messages."""
        if self.trained is None:
            return f"{self.path} (weights alone)"
        return f"{self.path} (model.name {self.trained.config.model.name!r})"


def read_source(path: Path) -> Source:
    """Read the weights of a run, an exported model of one network, a checkpoint or a file of weights.

    Raises:
        UsageError: The path holds no weights, those of several networks, or damaged ones; or their
            network takes other inputs than this version prepares.
    """
    alone = read_weights(path) if path.is_file() else None
    if alone is not None:
        return Source(
            path=path,
            weights=alone,
            fingerprint=sha256_of(path)[:32],
            trained=None,
            learnt_from=None,
        )
    trained, *others = read_trained(path)
    if others:
        msg = (
            f"{path} holds {len(others) + 1} networks; expected one. Start from one of them, such as "
            f"{path / 'member0.safetensors'}."
        )
        raise UsageError(msg)
    _check_identity(trained.identity, path)
    return Source(
        path=path,
        weights=trained.weights,
        fingerprint=fingerprint_of([trained]),
        trained=trained,
        learnt_from=_cases_of(path),
    )


def check_start(config: StartConfig, run_path: Path, *, begins: bool) -> None:
    """Raise `UsageError` if a run cannot start from the weights of the settings.

    Args:
        config: Settings of the start.
        run_path: Folder of the run.
        begins: Whether the run begins; a run that is resumed reads no other weights.
    """
    if config.path is None:
        return
    path, own = Path(config.path), run_path.resolve()
    if own in (path.resolve(), *path.resolve().parents):
        msg = (
            f"the run {run_path} cannot start from itself (start.path {config.path}). Give the new "
            "run another folder with --run; without --start-from the same command resumes it."
        )
        raise UsageError(msg)
    if begins:
        read_source(path)


def start_from(network: nn.Module, config: StartConfig, data: FoldData) -> StartedFrom | None:
    """Give a network the weights of the settings that fit, log which, and return where they are from.

    Raises:
        UsageError: The weights cannot be read, nothing fits, or all of it fits and would be held.
    """
    if config.path is None:
        return None
    source = read_source(Path(config.path))
    fit = match_weights(network, _offered(source, network))
    if not fit.has_matrices:
        raise UsageError(_nothing_fits(source, fit))
    _check_hold(network, fit, config)
    _check_finite(fit, source)
    with torch.no_grad():
        state = network.state_dict()
        for name, weight in fit.taken.items():
            state[name].copy_(weight)
    _log_fit(source, fit, network)
    _log_differences(source, data)
    if config.hold_epochs:
        log.info("  they are held, and learn from epoch %d on", config.hold_epochs + 1)
    return StartedFrom(
        path=config.path,
        fingerprint=source.fingerprint,
        taken=tuple(fit.taken),
        learnt_from=source.learnt_from or (),
    )


@contextmanager
def holding(
    network: nn.Module, started_from: StartedFrom | None, n_epochs: int
) -> Iterator[Callable[[int], None]]:
    """Provide a function that holds the weights that were taken in the first epochs.

    It is called with the index of each epoch. Afterwards all weights learn as before.
    """
    taken = set(() if started_from is None or not n_epochs else started_from.taken)
    held = [p for name, p in network.named_parameters() if name in taken and p.requires_grad]

    def in_epoch(epoch: int) -> None:
        if epoch == n_epochs and held:
            log.info("the layers that were taken learn from now on")
        for parameter in held:
            parameter.requires_grad_(epoch >= n_epochs)

    try:
        yield in_epoch
    finally:
        for parameter in held:
            parameter.requires_grad_()


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fit:
    """Weights that fit a network, and the layers of both sides that do not."""

    taken: Mapping[str, Tensor]
    """Weights that fit, by their name in the network."""
    layers: Sequence[str]
    """Layers of the network that get weights."""
    missing: Sequence[str]
    """Layers of the network that are not there by name."""
    differing: Mapping[str, str]
    """Layers of another shape, with both shapes in words."""
    left: Sequence[str]
    """Layers of the other side that have no counterpart in the network."""

    @property
    def has_matrices(self) -> bool:
        """Whether a convolution or another matrix fits: a bias or a norm alone starts nothing."""
        return any(weight.ndim > 1 for weight in self.taken.values())


def match_weights(network: nn.Module, offered: Mapping[str, Tensor]) -> Fit:
    """Return which of the offered weights fit the layers of a network, by name and shape.

    Example:
        >>> network = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 3, 1))
        >>> other = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 5, 1))
        >>> match_weights(network, other.state_dict()).layers
        ['0']
    """
    there = {_bare(name): weight for name, weight in offered.items()}
    own = {n: w for n, w in network.state_dict().items() if isinstance(w, Tensor)}
    taken: dict[str, Tensor] = {}
    layers, missing, differing = [], [], {}
    for layer, names in _by_layer(own).items():
        found = {name: there[_bare(name)] for name in names if _bare(name) in there}
        other = [name for name in found if found[name].shape != own[name].shape]
        if len(found) < len(names):
            missing.append(layer)
        elif other:
            here, its = (size_words(w.shape) for w in (own[other[0]], found[other[0]]))
            differing[layer] = f"{here} here, {its} there"
        else:
            layers.append(layer)
            taken |= found
    used = {_bare(name) for name in own}
    left = _by_layer([name for name in there if name not in used])
    return Fit(taken=taken, layers=layers, missing=missing, differing=differing, left=list(left))


def _bare(name: str) -> str:
    """Return the name of a weight without the wrappers around its network."""
    for prefix in _WRAPPERS:
        if name.startswith(prefix):
            return _bare(name.removeprefix(prefix))
    return name


def _by_layer(names: Sequence[str] | Mapping[str, Tensor]) -> dict[str, list[str]]:
    """Group names by layer; a weight of the network itself is a layer of its own."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def _offered(source: Source, network: nn.Module) -> Mapping[str, Tensor]:
    is_autoencoder = source.trained and source.trained.config.model.name == "autoencoder"
    if is_autoencoder and isinstance(network, UNet):
        return encoder_for_unet(source.weights)
    return source.weights


def _cases_of(path: Path) -> tuple[str, ...] | None:
    """Return the cases that a run and those before it were trained on, or None where it is not known."""
    folder = path if path.is_dir() else path.parent
    if not (folder / SPLIT_NAME).exists():
        return None
    before = read_checkpoint(path / BEST_NAME if path.is_dir() else path, torch.device("cpu")).get(
        STARTED_FROM
    )
    earlier = before.get("learnt_from", ()) if isinstance(before, dict) else ()
    return tuple(sorted({*read_split(folder / SPLIT_NAME).train, *map(str, earlier)}))


def _check_identity(identity: ModelIdentity, path: Path) -> None:
    expected = ModelIdentity(conventions=(), patch=identity.patch, fingerprint="")
    for what, found, known in (
        ("modalities", identity.modalities, MODALITIES),
        ("regions", identity.regions, REGIONS),
        ("normalisation", identity.normalisation, expected.normalisation),
    ):
        if found != known:
            msg = (
                f"{path} was trained with {what} {_words(found)}; expected {_words(known)}, in this "
                f"order: its first and last layers would mean something else. {_CHOOSE}"
            )
            raise UsageError(msg)


def _words(value: str | Sequence[str]) -> str:
    return value if isinstance(value, str) else ", ".join(value)


def _check_hold(network: nn.Module, fit: Fit, config: StartConfig) -> None:
    free = [
        name for name, p in network.named_parameters() if p.requires_grad and name not in fit.taken
    ]
    if config.hold_epochs and not free:
        msg = (
            f"start.hold_epochs is {config.hold_epochs}, and all weights of the network are taken "
            f"from {config.path}: nothing would learn in these epochs. Leave out --hold-epochs."
        )
        raise UsageError(msg)


def _check_finite(fit: Fit, source: Source) -> None:
    broken = [name for name, weight in fit.taken.items() if not weight.isfinite().all()]
    if broken:
        msg = (
            f"{source.path} has weights that are not finite numbers: {some_of(broken)}. Its training "
            f"has failed. {_CHOOSE}"
        )
        raise UsageError(msg)


def _nothing_fits(source: Source, fit: Fit) -> str:
    lines = [f"nothing fits of {source.name}: no layer has the same name and shape."]
    if fit.differing:
        lines.append(f"  another shape: {_shapes(fit)}")
    if fit.missing:
        lines.append(f"  not there: {some_of(fit.missing)}")
    if fit.left:
        lines.append(f"  there, and not in this network: {some_of(fit.left)}")
    lines.append(_advice(source))
    return "\n".join(lines)


def _advice(source: Source) -> str:
    """Return the settings with which the weights would fit, as far as they are known."""
    if source.trained is None:
        return f"Train the network that the weights are from. {_CHOOSE}"
    model = source.trained.config.model
    if model.name == "autoencoder":
        return (
            "The encoder of an autoencoder fits --network unet with model.widths that begin with "
            f"16,32,64,128. {_CHOOSE}"
        )
    widths = f" --set model.widths={','.join(map(str, model.widths))}"
    its_widths = widths if model.name in {"unet", "dynunet"} else ""
    return f"It fits --model {model.name}{its_widths}. {_CHOOSE}"


def _shapes(fit: Fit) -> str:
    return some_of([f"{layer} ({shapes})" for layer, shapes in fit.differing.items()])


def _log_fit(source: Source, fit: Fit, network: nn.Module) -> None:
    n_layers = len(fit.layers) + len(fit.missing) + len(fit.differing)
    n_taken = sum(weight.numel() for weight in fit.taken.values())
    n_own = sum(w.numel() for w in network.state_dict().values() if isinstance(w, Tensor))
    log.info(
        "started from %s: %d of %d layers taken, %s of %s weights",
        source.name,
        len(fit.layers),
        n_layers,
        f"{n_taken:,}",
        f"{n_own:,}",
    )
    if len(fit.layers) < n_layers:
        log.info("  taken: %s", _parts(fit.layers, [*fit.layers, *fit.missing, *fit.differing]))
    if fit.differing:
        log.info("  not taken, of another shape: %s", _shapes(fit))
    if fit.missing:
        log.info("  not taken, not there: %s", some_of(fit.missing))
    if fit.left:
        log.info("  left there: %s", some_of(fit.left))


def _parts(layers: Sequence[str], of_all: Sequence[str]) -> str:
    """Return how many layers of each part of the network there are, as `encoder 9 of 20`."""
    counts, totals = (Counter(_bare(x).partition(".")[0] for x in xs) for xs in (layers, of_all))
    return ", ".join(f"{part} {n} of {totals[part]}" for part, n in counts.items())


def _log_differences(source: Source, data: FoldData) -> None:
    """Log what the weights learnt from, where it may matter to this run."""
    if source.trained is None:
        log.warning(
            "%s does not say what its weights were trained on: images of %s in this order, and %s, "
            "are assumed",
            source.path,
            ", ".join(MODALITIES),
            "regions of " + ", ".join(REGIONS),
        )
    else:
        _log_identity(source.path, source.trained.identity, data)
    held_out = set(data.split.validation)
    if source.learnt_from is None:
        log.info(
            "%s does not name its training cases; if some are held out here, scores will be too good",
            source.path,
        )
    elif seen := sorted(held_out.intersection(source.learnt_from)):
        log.warning(
            "%s has learnt from %d of the %d cases that are held out here (%s): their scores will "
            "be too good. Start from a run that holds them out as well.",
            source.path,
            len(seen),
            len(held_out),
            some_of(seen),
        )


def _log_identity(path: Path, identity: ModelIdentity, data: FoldData) -> None:
    if set(identity.conventions) != set(data.conventions):
        theirs, ours = (" and ".join(names) for names in (identity.conventions, data.conventions))
        log.info("%s learnt from label maps of %s; these are of %s", path, theirs, ours)
    if tuple(identity.spacing_mm) != tuple(data.spacing_mm):
        theirs, ours = map(spacing_text, (identity.spacing_mm, data.spacing_mm))
        log.warning(
            "%s learnt at voxels of %s mm; these are of %s mm. Prepare with store.spacing_mm as "
            "there to keep the scale.",
            path,
            theirs,
            ours,
        )
