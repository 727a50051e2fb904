"""Measure how exact the accumulated gradient is for a given network, loss, precision and device.

The gradient of a batch cut into micro-batches is compared with that of the same patches in one
batch, which plain torch computes without the accumulator. Ordinary accumulation, which divides the
loss of each micro-batch by their number, is measured for comparison. The network has trained weights,
and the patches have tumours of different size, some without enhancing tumour: with random weights all
patches look alike, and every accumulation seems exact.
"""

from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from math import ceil, isfinite
from pathlib import Path

import torch
from monai.losses import GeneralizedDiceLoss
from torch import Tensor, nn
from torch.nn.modules.dropout import _DropoutNd

from brats_seg.config import Config, LossConfig, Size
from brats_seg.errors import BratsError, ConfigError, EnvironmentalError, ResumeError, UsageError
from brats_seg.labels import REGIONS
from brats_seg.models.build import build_model, size_multiple
from brats_seg.presets import check_stored
from brats_seg.progress import Track, part, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory import is_out_of_memory
from brats_seg.runtime.weights import build_with, load_trained, require_task
from brats_seg.training import losses
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.independence import PassState
from brats_seg.training.run_folder import RunFolder
from brats_seg.training.state import build_network, check_network
from brats_seg.voxels.box import shape_text, triple

_LOSS_SCALE = 2.0**10
"""Loss scale in float16, so that the derivative with respect to a single logit does not underflow."""
LONGEST_AXIS = 64
"""Voxels along an axis of a measured patch; a longer one costs more and shows the same."""
_SHORTEST_BELOW = 3
"""Voxels along an axis of the lowest level: at 2, oneDNN of torch 2.13 fails in bf16 on the CPU."""
_N_WARM_STEPS, _WARM_LR = 40, 1e-2
"""Steps of training after which the gradients of phantom patches differ, and their learning rate."""
_LACKING_ET = (0, 2)
"""Indices, in every five phantom patches, of those without enhancing tumour."""
# contrast of regions WT, TC, ET in t1n, t1c, t2w, t2f
_SIGNAL = ((0.2, 0.1, 0.3, 1.0), (-0.2, 0.2, 0.3, -0.3), (0.1, 1.0, -0.3, 0.1))
_NOISE = 0.7

PATCH_DICE = "patch Dice + BCE"
BATCH_DICE = "batch Dice + BCE"
UNDECLARED = "generalized Dice, undeclared"
"""MONAI's generalized Dice over the whole batch: a loss that does not declare how it reduces."""

_METHODS = ("whole", "exact", "ordinary")
"""Methods of `gradient_by`; the others are compared with the first."""

FLOAT64_LIMIT, ROUNDING_LIMIT = 1e-9, 0.05
"""Largest relative errors due to rounding, in float64 and in less; a wrong sum has a larger one."""


@dataclass(frozen=True, kw_only=True, slots=True)
class CertificateRow:
    """Distance of one way to accumulate from the whole batch, for one loss in one precision."""

    loss: str
    """Name of the loss."""
    own: bool
    """Whether it is the loss of the settings."""
    method: str
    """`exact`, by the accumulator, or `ordinary`."""
    precision: str
    n_patches: int
    """Patches in the batch; each is a micro-batch."""
    relative_error: float
    """Norm of the difference to the gradient of the whole batch, divided by the norm of that."""

    @property
    def passed(self) -> bool:
        """Whether the error is rounding."""
        limit = FLOAT64_LIMIT if self.precision == "fp64" else ROUNDING_LIMIT
        return self.relative_error <= limit


@dataclass(frozen=True, kw_only=True, slots=True)
class Certificate:
    """The measurements of all losses, and what they were made on."""

    network: str
    """Source of the weights."""
    patches: str
    """Number, size and source of the patches, and how many lack enhancing tumour."""
    rows: tuple[CertificateRow, ...]

    @property
    def exact(self) -> bool:
        """Whether the error of the accumulator is rounding in every row."""
        return all(row.passed for row in self.rows if row.method == "exact")


def certify_run(
    run_path: Path,
    *,
    n_patches: int = 4,
    device: str | None = None,
    precision: str | None = None,
    track: Track = untracked,
) -> Certificate:
    """Measure with the weights and the loss of a run.

    Device and precision are those of the run unless given.
    """
    folder = RunFolder(path=run_path)
    path = next((file for file in (folder.last_path, folder.best_path) if file.exists()), None)
    if path is None:
        msg = f"{run_path} holds neither last.pt nor best.pt; expected the folder of a run"
        raise UsageError(msg)
    trained = load_trained(path)
    require_task(trained, "segmentation", run_path)
    config, patch = trained.card.config, trained.card.identity.patch
    check_stored(path, config.loss.name, config.loss.arguments)
    try:
        network = build_with(partial(build_model, config.model, patch), trained.weights)
    except (RuntimeError, ValueError):
        msg = f"{path} holds another network than its settings build: use `certify` in Python"
        raise ResumeError(msg) from None
    used = choose_device(device or config.training.device, precision or config.training.precision)
    patches = phantom_patches(n_patches, _measured_size(network, config, patch, used))
    return certify(network, config.loss, patches, used, str(path), track)


def certify_settings(
    config: Config, *, n_patches: int = 4, track: Track = untracked
) -> Certificate:
    """Measure with the network of the settings, after a few steps of training on phantom patches."""
    if config.model.task != "segmentation":
        msg = f"model.name is {config.model.name!r}; expected a network that segments"
        raise ConfigError(msg)
    device = choose_device(config.training.device, config.training.precision)
    patch = (LONGEST_AXIS,) * 3 if config.patch.size == "whole" else config.patch.size
    network = build_network(config, patch)
    patches = phantom_patches(n_patches, _measured_size(network, config, patch, device))
    warm_up(network, patches, device, track)
    source = f"{config.model.name}, trained for {_N_WARM_STEPS} steps"
    return certify(network, config.loss, patches, device, source, track)


def certify(
    network: nn.Module,
    config: LossConfig,
    patches: MicroBatch,
    device: Device,
    source: str,
    track: Track = untracked,
) -> Certificate:
    """Measure losses of each kind in the precision of the device, and in float64 where it has that.

    The network is not changed; its dropout layers are left out.

    Args:
        network: Network with trained weights.
        config: Loss of the settings; its row is marked as own.
        patches: Phantom patches of one batch, with tumours of different size and empty regions.
        device: Device and precision.
        source: Source of the weights, which the certificate names.
        track: Shows the progress.
    """
    network = deepcopy(network).to(device.torch_device).train()
    for module in network.modules():
        if isinstance(module, _DropoutNd):
            module.eval()
    what = f"{len(patches.image)} patches of {shape_text(patches.image.shape[2:])}"
    try:
        rows = _rows(network, config, patches, device, track)
        if device.torch_device.type != "mps":  # computes no float64
            in_float64 = Device(torch_device=device.torch_device)
            doubled = patches._replace(image=patches.image.double())
            rows += _rows(network.double(), config, doubled, in_float64, track)
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        msg = f"{what} in one batch do not fit in memory. Give fewer --patches, or --device cpu."
        raise EnvironmentalError(msg) from error
    lacks_et = patches.target[:, REGIONS.index("et")].sum((1, 2, 3)) == 0
    found = f"{what} from phantoms, {lacks_et.sum()} without ET"
    return Certificate(network=source, patches=found, rows=rows)


def warm_up(network: nn.Module, patches: MicroBatch, device: Device, track: Track) -> None:
    """Train a network, on its device, on patches for a few steps, so that its gradients differ."""
    optimizer = torch.optim.Adam(network.parameters(), lr=_WARM_LR)
    accumulator = Accumulator(network, losses.DiceBce(), optimizer, device=device)
    parts = _single(patches)
    steps = range(_N_WARM_STEPS)
    for step in track(steps, what="training on phantom patches", total=_N_WARM_STEPS):
        accumulator.step([parts[step % len(parts)]])


def phantom_patches(n_patches: int, size: Size, seed: int = 0) -> MicroBatch:
    """Make phantom patches with spherical tumours: radii grow fourfold, two in five lack ET."""
    generator = torch.Generator().manual_seed(seed)
    axes = [torch.linspace(-1, 1, n) for n in size]
    points = torch.stack(torch.meshgrid(*axes, indexing="ij"))
    targets = []
    for i in range(n_patches):
        radius = 0.2 * 4 ** (i / max(n_patches - 1, 1))
        centre = torch.empty(3, 1, 1, 1).uniform_(-0.2, 0.2, generator=generator)
        distance = (points - centre).norm(dim=0) / radius
        has_et = i % 5 not in _LACKING_ET
        targets.append(torch.stack([distance < 1, distance < 0.75, (distance < 0.5) & has_et]))
    target = torch.stack(targets).float()
    image = _NOISE * torch.randn(n_patches, 4, *size, generator=generator)
    image += torch.einsum("nrxyz,rc->ncxyz", target, torch.tensor(_SIGNAL))
    return MicroBatch(image, target)


def gradient_by(
    method: str,
    network: nn.Module,
    criterion: losses.Criterion,
    patches: MicroBatch,
    device: Device,
) -> Tensor:
    """Return the gradient of one batch `(n_parameters,)`, in float64 on the CPU.

    Parameters of the loss come after those of the network. Each method draws the same random numbers.

    Args:
        method: `whole` computes all patches in one batch, without the accumulator; `ordinary` adds the
            gradients of the losses of the patches, divided by their number; `exact` uses the accumulator.
        network: Network, on the device.
        criterion: Loss.
        patches: Patches of the batch, each of which is a micro-batch.
        device: Device and precision.
    """
    parameters = [*network.parameters(), *losses.parameters_of(criterion)]
    scale = _LOSS_SCALE if device.needs_scaler else 1.0
    patches, before = patches.to(device.torch_device), PassState.capture(device.torch_device)
    parts = [patches] if method == "whole" else _single(patches)
    for parameter in parameters:
        parameter.grad = None
    if method == "exact":
        accumulator = Accumulator(network, criterion, torch.optim.SGD(parameters), device=device)
        accumulator.scaler = torch.amp.GradScaler(
            device.torch_device.type, init_scale=scale, enabled=device.needs_scaler
        )
        accumulator.backward(parts)
    else:
        for image, target in parts:
            with device.autocast():
                loss = losses.whole_loss(criterion, network(image), target)
            (scale * loss / len(parts)).backward()
    before.restore()
    gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
    return torch.cat([gradient.cpu().flatten().double() for gradient in gradients]) / scale


def _rows(
    network: nn.Module, config: LossConfig, patches: MicroBatch, device: Device, track: Track
) -> tuple[CertificateRow, ...]:
    loss = config.name or (BATCH_DICE if config.batch_dice else PATCH_DICE)
    dtype = patches.image.dtype
    precision = "fp64" if dtype == torch.float64 else device.precision
    pairs = [(*item, method) for item in _criteria(config).items() for method in _METHODS]
    expected, rows = torch.empty(0), []
    for name, criterion, method in track(pairs, what=f"gradients, {precision}", total=len(pairs)):
        if isinstance(criterion, nn.Module):
            criterion.to(device.torch_device, dtype)
        with part(f"{method}, {name}", 0):
            gradient = gradient_by(method, network, criterion, patches, device)
        if method == "whole":
            expected, length = gradient, float(gradient.norm())
            if length == 0 or not isfinite(length):
                msg = f"the gradient has length {length} for {name}: try --precision fp32, or another run"
                raise BratsError(msg)
            continue
        rows.append(
            CertificateRow(
                loss=name,
                own=name == loss,
                method=method,
                precision=precision,
                n_patches=len(patches.image),
                relative_error=float((gradient - expected).norm() / expected.norm()),
            )
        )
    return tuple(rows)


def _criteria(config: LossConfig) -> dict[str, losses.Criterion]:
    """Return a loss of each kind: a mean over patches, a function of sums, and an undeclared one."""
    criteria: dict[str, losses.Criterion] = {
        PATCH_DICE: losses.DiceBce(config),
        BATCH_DICE: losses.BatchDiceBce(config),
        UNDECLARED: losses.LogitsLoss(GeneralizedDiceLoss(sigmoid=True, batch=True)),
    }
    if config.name is not None:
        criteria[config.name] = losses.build_criterion(config)
    return criteria


def _single(patches: MicroBatch) -> list[MicroBatch]:
    """Return a micro-batch for each patch."""
    return [MicroBatch(*pair) for pair in zip(*(part.split(1) for part in patches), strict=True)]


def _measured_size(network: nn.Module, config: Config, patch: Size, device: Device) -> Size:
    """Return the patch, or a smaller one that the network takes too; the network goes to the device."""
    multiple = size_multiple(config.model, patch)
    most = (m * max(_SHORTEST_BELOW, ceil(LONGEST_AXIS / m)) for m in multiple)
    smaller = triple(map(min, patch, most))
    network.to(device.torch_device)
    try:
        check_network(network, config, smaller, device)
    except ConfigError:
        check_network(network, config, patch, device)
        return patch
    return smaller
