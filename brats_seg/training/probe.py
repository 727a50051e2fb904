"""What a gradient is measured on: trained weights, and patches that ask for different things."""

from dataclasses import dataclass
from math import ceil
from pathlib import Path

import torch
from torch import nn

from brats_seg.cases.folds import read_folds
from brats_seg.config import Config
from brats_seg.data.dataset import PatchDataset
from brats_seg.data.patches import epoch_draws
from brats_seg.errors import ConfigError, ResumeError, UsageError
from brats_seg.models.build import build_model, size_multiple
from brats_seg.models.device import Device
from brats_seg.models.trained import load_trained, require_task
from brats_seg.progress import Track
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.epoch import MicroBatches
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import DiceBce
from brats_seg.training.run import Run

LONGEST_AXIS = 64
"""Voxels; a longer patch costs more and shows the same."""
_SHORTEST_BELOW = 3
"""Voxels that stay at the lowest level: at 2, oneDNN of torch 2.13 fails in bf16 on the CPU."""

_N_WARM_STEPS, _WARM_LR = 40, 1e-2
"""Until patches differ in what they ask for."""
_CANDIDATES = 4
"""Patches looked at for each that is taken."""
_LACKING_ET = (0, 2)
"""Of every five phantom patches."""
# from region WT, TC, ET to t1n, t1c, t2w, t2f
_SIGNAL = ((0.2, 0.1, 0.3, 1.0), (-0.2, 0.2, 0.3, -0.3), (0.1, 1.0, -0.3, 0.1))
_NOISE = 0.7

Size = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """A network at trained weights, with patches of one window."""

    network: nn.Module
    config: Config
    """Its settings."""
    network_from: str
    """Where the weights come from, for the reader."""
    patches: MicroBatch
    patches_from: str


def probe_run(path: Path, prepared: Path, n_patches: int) -> Probe:
    """Take the weights of a run, and patches of the prepared cases if there are any, else phantoms.

    Raises:
        UsageError: The run has no checkpoint, or does not segment.
        ResumeError: Its checkpoint is damaged, or of a network that the settings cannot build.
    """
    run = Run(path=path)
    file = next((file for file in (run.last_path, run.best_path) if file.exists()), None)
    if file is None:
        msg = f"{path} holds neither last.pt nor best.pt: give the folder of a run, or a --preset"
        raise UsageError(msg)
    trained = load_trained(file)
    require_task(trained, "segmentation", path)
    network = build_model(trained.config.model, trained.identity.patch)
    try:
        network.load_state_dict(trained.weights)
    except RuntimeError:
        msg = (
            f"{file} holds another network than its settings build. One of your own is measured in "
            "Python, by brats_seg.training.certificate.certify."
        )
        raise ResumeError(msg) from None
    size = _measured_size(trained.config, trained.identity.patch)
    there = (prepared / "folds.csv").exists()
    return Probe(
        network=network,
        config=trained.config,
        network_from=str(file),
        patches=prepared_patches(prepared, trained.config, size, n_patches)
        if there
        else phantom_patches(n_patches, size),
        patches_from=str(prepared) if there else "phantoms",
    )


def probe_settings(config: Config, n_patches: int, device: Device, track: Track) -> Probe:
    """Build the network of the settings, and train it for a moment on phantom patches.

    Raises:
        ConfigError: The network does not segment.
    """
    if config.model.task != "segmentation":
        msg = (
            f"model.name is {config.model.name!r}; expected a network that segments, as the losses "
            "that are measured do. An autoencoder's is a mean over patches, like that of patch Dice"
        )
        raise ConfigError(msg)
    longest = (LONGEST_AXIS, LONGEST_AXIS, LONGEST_AXIS)
    size = longest if config.patch.size == "whole" else _measured_size(config, config.patch.size)
    torch.manual_seed(config.training.seed)
    network = build_model(config.model, size).to(device.torch_device)
    patches = phantom_patches(n_patches, size)
    optimizer = torch.optim.Adam(network.parameters(), lr=_WARM_LR)
    accumulator = Accumulator(network, DiceBce(), optimizer, device=device)
    for step in track(range(_N_WARM_STEPS), what="warming up", total=_N_WARM_STEPS):
        which = slice(step % n_patches, step % n_patches + 1)
        accumulator.step([MicroBatch(patches.image[which], patches.target[which])])
    return Probe(
        network=network,
        config=config,
        network_from=f"{config.model.name}, trained for {_N_WARM_STEPS} steps",
        patches=patches,
        patches_from="phantoms",
    )


def prepared_patches(folder: Path, config: Config, size: Size, n_patches: int) -> MicroBatch:
    """Return patches of prepared cases, from the least tumour to the most."""
    case_ids = [row.case_id for row in read_folds(folder / "folds.csv").rows]
    n_candidates = _CANDIDATES * n_patches
    dataset = PatchDataset(
        folder,
        patch=config.patch.model_copy(update={"size": size, "foreground": 0.5}),
        multiple=size,
        augment="none",
        seed=config.training.seed,
    )
    per_case = ceil(n_candidates / len(case_ids))
    draws = epoch_draws(case_ids, 0, per_case, config.training.seed)[:n_candidates]
    samples = sorted((dataset[draw] for draw in draws), key=lambda sample: int(sample.target.sum()))
    chosen = [samples[i * (len(samples) - 1) // (n_patches - 1)] for i in range(n_patches)]
    (window,) = MicroBatches(chosen, n_patches)
    return window


def phantom_patches(n_patches: int, size: Size, seed: int = 0) -> MicroBatch:
    """Make patches with a ball of tumour each, its radius growing fourfold; two in five lack ET."""
    generator = torch.Generator().manual_seed(seed)
    axes = [torch.linspace(-1, 1, n) for n in size]
    places = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    targets = []
    for i in range(n_patches):
        radius = 0.2 * 4 ** (i / max(n_patches - 1, 1))
        centre = torch.empty(3, 1, 1, 1).uniform_(-0.2, 0.2, generator=generator)
        distance = (places - centre).norm(dim=0) / radius
        has_et = i % 5 not in _LACKING_ET
        targets.append(torch.stack([distance < 1, distance < 0.75, (distance < 0.5) & has_et]))
    target = torch.stack(targets).float()
    image = _NOISE * torch.randn(n_patches, 4, *size, generator=generator)
    image += torch.einsum("nrxyz,rc->ncxyz", target, torch.tensor(_SIGNAL))
    return MicroBatch(image, target)


def _measured_size(config: Config, patch: Size) -> Size:
    """Return the patch, or a smaller one that the network takes too."""
    if config.model.name == "vae-unet":  # its autoencoder has one size
        return patch
    multiple = size_multiple(config.model, patch)
    x, y, z = (
        min(n, m * max(_SHORTEST_BELOW, ceil(LONGEST_AXIS / m)))
        for n, m in zip(patch, multiple, strict=True)
    )
    return x, y, z
