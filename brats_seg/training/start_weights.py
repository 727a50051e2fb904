"""Start a run from existing weights: those that fit a layer by name and shape are loaded.

A layer whose weights are all offered, in the same shapes, gets them, and any other keeps those that were
drawn from the seed. The names of a wrapper around a network (`module.`, `network.`) do not count. The
encoder of an autoencoder is offered to that of a U-Net.
"""

import logging
from collections.abc import Iterable, Mapping
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
from brats_seg.runtime import weights

log = logging.getLogger(__name__)

_WRAPPERS = ("module.", "network.", "_orig_mod.")
"""Prefixes of names in averaged, wrapped and compiled networks."""
_CHOOSE = "Choose other weights, or leave out --start-from."


@dataclass(frozen=True, kw_only=True, slots=True)
class StartedFrom:
    """The weights that a run started from, as its checkpoints store them."""

    path: str
    """Run, exported model or file that they were read from."""
    fingerprint: str
    """Hash of all offered weights."""
    learnt_from: tuple[str, ...] = ()
    """Cases that these weights were trained on, and those that they started from, where it is known."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Source:
    """Weights that a run may start from."""

    path: Path
    offered: Mapping[str, Tensor]
    fingerprint: str
    trained: weights.TrainedModel | None = None
    """The trained network; None for a file that holds weights alone."""
    learnt_from: tuple[str, ...] | None = None
    """Cases that it was trained on; None where it is not known."""

    @property
    def name(self) -> str:
        """Path and network, for messages."""
        if self.trained is None:
            return f"{self.path} (weights alone)"
        model = self.trained.config.model
        return f"{self.path} (model.name {model.name!r}, model.widths {','.join(map(str, model.widths))})"


def read_source(path: Path) -> Source:
    """Read the weights of a run, an exported model of one network, a checkpoint or a file of weights."""
    alone = weights.read_weights(path) if path.is_file() else None
    if alone is not None:
        return Source(path=path, offered=alone, fingerprint=weights.sha256_of(path)[:32])
    trained, *others = weights.read_trained(path)
    if others:
        member = path / "member0.safetensors"
        msg = f"{path} holds {len(others) + 1} networks; expected one, such as {member}"
        raise UsageError(msg)
    _check_identity(trained.identity, path)
    return Source(
        path=path,
        offered=trained.weights,
        fingerprint=weights.fingerprint_of([trained]),
        trained=trained,
        learnt_from=_cases_of(path),
    )


def check_start(config: StartConfig, run_path: Path, *, begins: bool) -> None:
    """Raise `UsageError` if a run that begins cannot start from the weights of the settings."""
    if config.path is None:
        return
    path = Path(config.path)
    if run_path.resolve() in (path.resolve(), *path.resolve().parents):
        way = "give another --run, or resume it without --start-from"
        msg = f"the run {run_path} cannot start from itself (start.path {config.path}): {way}"
        raise UsageError(msg)
    if begins:
        read_source(path)


def start_from(network: nn.Module, config: StartConfig, data: FoldData) -> StartedFrom | None:
    """Give a network the weights of the settings that fit, log which, and return where they are from."""
    if config.path is None:
        return None
    source = read_source(Path(config.path))
    offered = source.offered
    if source.trained and source.trained.config.model.name == "autoencoder":
        offered = encoder_for_unet(offered) if isinstance(network, UNet) else offered
    loaded, unfit = match_weights(network, offered)
    # a bias or a norm alone starts nothing
    if not any(weight.ndim > 1 for weight in loaded.values()):
        what = f"nothing fits of {source.name}. Not loaded: {some_of(unfit)}"
        way = "Choose the network that they are of (an autoencoder fits a unet of widths 16,32,64,128)"
        msg = f"{what}. {way}, or leave out --start-from."
        raise UsageError(msg)
    broken = [name for name, weight in loaded.items() if not weight.isfinite().all()]
    if broken:
        msg = f"{source.path} has weights that are not finite numbers: {some_of(broken)}. {_CHOOSE}"
        raise UsageError(msg)
    network.load_state_dict(loaded, strict=False)
    n_layers = len(_by_layer(network.state_dict()))
    what = "started from %s: %d of %d layers loaded"
    log.info(what, source.name, len(_by_layer(loaded)), n_layers)
    if unfit:
        log.info("  not loaded: %s", some_of(unfit))
    _log_differences(source, data)
    return StartedFrom(
        path=config.path, fingerprint=source.fingerprint, learnt_from=source.learnt_from or ()
    )


def match_weights(
    network: nn.Module, offered: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], list[str]]:
    """Return the offered weights of the layers that they fit, and the other layers in words.

    Example:
        >>> network = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 3, 1))
        >>> other = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 5, 1))
        >>> loaded, unfit = match_weights(network, other.state_dict())
        >>> sorted(loaded), unfit
        (['0.bias', '0.weight'], ['1 (3x2x1x1x1 here, 5x2x1x1x1 there)'])
    """
    by_name = {_bare(name): weight for name, weight in offered.items()}
    state = {n: w for n, w in network.state_dict().items() if isinstance(w, Tensor)}
    loaded: dict[str, Tensor] = {}
    unfit = []
    for layer, names in _by_layer(state).items():
        fitting = {name: by_name[_bare(name)] for name in names if _bare(name) in by_name}
        shapes = [(state[name].shape, weight.shape) for name, weight in fitting.items()]
        differing = next((pair for pair in shapes if pair[0] != pair[1]), None)
        if len(fitting) < len(names):
            unfit.append(f"{layer} (not among them)")
        elif differing is not None:
            unfit.append("{} ({} here, {} there)".format(layer, *map(size_words, differing)))
        else:
            loaded |= fitting
    return loaded, unfit


def _bare(name: str) -> str:
    """Return the name of a weight without the wrappers around its network."""
    for prefix in _WRAPPERS:
        if name.startswith(prefix):
            return _bare(name.removeprefix(prefix))
    return name


def _by_layer(names: Iterable[str]) -> dict[str, list[str]]:
    """Group names by layer; a weight of the network itself is a layer of its own."""
    layers: dict[str, list[str]] = {}
    for name in names:
        layers.setdefault(name.rpartition(".")[0] or name, []).append(name)
    return layers


def _cases_of(path: Path) -> tuple[str, ...] | None:
    """Return the cases that a run and those before it were trained on, or None where it is not known."""
    folder = path if path.is_dir() else path.parent
    if not (folder / SPLIT_NAME).exists():
        return None
    file = path / weights.BEST_NAME if path.is_dir() else path
    before = weights.read_checkpoint(file, torch.device("cpu")).get("started_from")
    earlier = before.get("learnt_from", ()) if isinstance(before, dict) else ()
    return tuple(sorted({*read_split(folder / SPLIT_NAME).train, *map(str, earlier)}))


def _check_identity(identity: weights.ModelIdentity, path: Path) -> None:
    expected = weights.ModelIdentity(conventions=(), patch=identity.patch, fingerprint="")
    for what in ("modalities", "regions", "normalisation"):
        value, known = getattr(identity, what), getattr(expected, what)
        if value != known:
            msg = f"{path} was trained with {what} {value}; expected {known}, in this order. {_CHOOSE}"
            raise UsageError(msg)


def _log_differences(source: Source, data: FoldData) -> None:
    """Log what the weights learnt from, where it may matter to this run."""
    path = source.path
    if source.trained is None:
        what = "%s does not say what its weights were trained on: %s and %s, in this order, are assumed"
        log.warning(what, path, ", ".join(MODALITIES), ", ".join(REGIONS))
    else:
        identity = source.trained.identity
        if set(identity.conventions) != set(data.conventions):
            what = "%s learnt from label maps of %s; these are of %s"
            log.info(what, path, *map(" and ".join, (identity.conventions, data.conventions)))
        if tuple(identity.spacing_mm) != tuple(data.spacing_mm):
            what = "%s learnt at voxels of %s mm; these are of %s mm. Prepare with store.spacing_mm as there."
            log.warning(what, path, *map(spacing_text, (identity.spacing_mm, data.spacing_mm)))
    if source.learnt_from is None:
        what = "%s does not name its training cases; if some are held out here, scores will be too good"
        log.info(what, path)
    elif seen := sorted({*data.split.validation}.intersection(source.learnt_from)):
        what = "%s learnt from %d of %d cases that are held out here: %s. Scores will be too good"
        log.warning(what, path, len(seen), len(data.split.validation), some_of(seen))
