"""Measure how exact the accumulated gradient is for a given network, loss, precision and device.

The gradient of a batch cut into micro-batches is compared with that of the same patches in one
batch, which plain torch computes without the accumulator. Ordinary accumulation, which divides the
loss of each micro-batch by their number, is measured for comparison.

The network has trained weights, and the patches have tumours of different size, some without
enhancing tumour: with random weights all patches look alike, and every accumulation seems exact.
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import asdict, dataclass
from math import atan2, ceil, degrees, isfinite
from pathlib import Path
from typing import TypeAlias

import torch
from monai.losses import GeneralizedDiceLoss
from torch import Tensor, nn

from brats_seg.config import Config, LossConfig, Size
from brats_seg.data.loader import PatchDataset
from brats_seg.data.manifest import MANIFEST_NAME, prepared_ids
from brats_seg.data.patches import epoch_patches
from brats_seg.errors import BratsError, ConfigError, EnvironmentalError, ResumeError, UsageError
from brats_seg.files import whole_file
from brats_seg.labels import REGIONS
from brats_seg.models.build import build_model, size_multiple, size_words
from brats_seg.models.interface import as_output, output_from, structure_of, tensors_of
from brats_seg.progress import Track, part, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory import is_out_of_memory
from brats_seg.runtime.weights import load_trained, require_task
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.checkpoints import Run, environment_of
from brats_seg.training.epoch import Batch
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.independence import PatchIndependence, RandomState
from brats_seg.training.losses import (
    BatchDiceBce,
    Criterion,
    DiceBce,
    Output,
    build_criterion,
    parameters_of,
    whole_loss,
)

Backward: TypeAlias = Callable[[nn.Module, Criterion, Sequence[MicroBatch], Device], None]
"""Leaves the gradient of a batch, times the loss scale, in the parameters."""

_LOSS_SCALE = 2.0**10
"""Loss scale in float16, so that the derivative with respect to a single logit does not underflow."""
LONGEST_AXIS = 64
"""Voxels along an axis of a measured patch; a longer one costs more and shows the same."""
_SHORTEST_BELOW = 3
"""Voxels along an axis of the lowest level: at 2, oneDNN of torch 2.13 fails in bf16 on the CPU."""

_N_WARM_STEPS, _WARM_LR = 40, 1e-2
"""Steps of training after which the gradients of phantom patches differ, and their learning rate."""
_CANDIDATES = 4
"""Patches that are read for each one that is taken."""
_LACKING_ET = (0, 2)
"""Indices, in every five phantom patches, of those without enhancing tumour."""
# contrast of regions WT, TC, ET in t1n, t1c, t2w, t2f
_SIGNAL = ((0.2, 0.1, 0.3, 1.0), (-0.2, 0.2, 0.3, -0.3), (0.1, 1.0, -0.3, 0.1))
_NOISE = 0.7

PATCH_DICE = "patch Dice + BCE"
BATCH_DICE = "batch Dice + BCE"
UNDECLARED = "generalized Dice, undeclared"
"""MONAI's generalized Dice over the whole batch: a loss that does not declare how it reduces."""

FLOAT64_LIMIT, ROUNDING_LIMIT = 1e-9, 0.05
"""Largest relative errors due to rounding, in float64 and in less; a wrong sum has a larger one."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Probe:
    """A network with trained weights, and the patches of one batch."""

    network: nn.Module
    config: Config
    """Settings of the network."""
    network_from: str
    """Source of the weights, in words."""
    patches: MicroBatch
    patches_from: str
    """Source of the patches, in words."""


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
    angle_deg: float
    """Angle between the two gradients."""

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
    environment: dict[str, str]
    """Versions, device and precision."""
    rows: tuple[CertificateRow, ...]

    @property
    def exact(self) -> bool:
        """Whether the error of the accumulator is rounding in every row."""
        return all(row.passed for row in self.rows if row.method == "exact")


def certify_run(
    run_path: Path,
    prepared_path: Path,
    *,
    n_patches: int = 4,
    device: str | None = None,
    precision: str | None = None,
    track: Track = untracked,
) -> Certificate:
    """Measure with the weights, loss and cases of a run, and write `certificate.json` into it.

    Args:
        run_path: Folder of the run.
        prepared_path: Folder of the prepared cases; if it has none, phantom patches are used.
        n_patches: Patches in the batch, each a micro-batch.
        device: As `training.device`; that of the run by default.
        precision: As `training.precision`; that of the run by default.
        track: Shows the progress.

    Raises:
        BratsError: As `probe_run` and `certify`.
    """
    probe = probe_run(run_path, prepared_path, n_patches)
    own = probe.config.training
    where = choose_device(device or own.device, precision or own.precision)
    certificate = certificate_of(probe, where, track)
    with whole_file(run_path / "certificate.json") as beside:
        beside.write_text(json.dumps(asdict(certificate), indent=2) + "\n")
    return certificate


def certify_settings(
    config: Config, *, n_patches: int = 4, track: Track = untracked
) -> Certificate:
    """Measure with the network of the settings, after a few steps of training on phantom patches.

    Raises:
        BratsError: As `probe_settings` and `certify`.
    """
    where = choose_device(config.training.device, config.training.precision)
    return certificate_of(probe_settings(config, n_patches, where, track), where, track)


def certificate_of(probe: Probe, device: Device, track: Track = untracked) -> Certificate:
    """Measure with the network and the patches of a probe.

    Raises:
        BratsError: As `certify`.
    """
    et = probe.patches.target[:, REGIONS.index("et")].flatten(1)
    n_lacking = int((et.sum(1) == 0).sum())
    size = size_words(probe.patches.image.shape[2:])
    return Certificate(
        network=probe.network_from,
        patches=f"{len(et)} patches of {size} from {probe.patches_from}, {n_lacking} without ET",
        environment=environment_of(device),
        rows=certify(probe.network, probe.config.loss, probe.patches, device, track),
    )


def certify(
    network: nn.Module,
    config: LossConfig,
    patches: MicroBatch,
    device: Device,
    track: Track = untracked,
) -> tuple[CertificateRow, ...]:
    """Measure losses of each kind in the precision of the device, and in float64 where it has that.

    If the patches do not fit in memory as one batch, fewer are taken; float64 is left out if not even
    two fit. The network is not changed.

    Args:
        network: Network with trained weights.
        config: Loss of the settings; its row is marked as own.
        patches: Patches of one batch, with tumours of different size and empty regions.
        device: Device and precision.
        track: Shows the progress.

    Raises:
        ConfigError: The network mixes patches, or changes in every pass, see `independence`.
        EnvironmentalError: Not even two patches fit in memory.
        BratsError: A gradient is zero or not finite.
    """
    rows = _rows_that_fit(deepcopy(network), config, patches, device, track)
    if not rows:
        size = size_words(patches.image.shape[2:])
        msg = (
            f"two patches of {size} in one batch do not fit in memory here, and without a "
            "whole batch there is nothing to compare with. Try --device cpu."
        )
        raise EnvironmentalError(msg)
    if device.torch_device.type == "mps":  # computes no float64
        return rows
    in_float64 = Device(torch_device=device.torch_device)
    patches = patches._replace(image=patches.image.double())
    return rows + _rows_that_fit(deepcopy(network).double(), config, patches, in_float64, track)


def probe_run(path: Path, prepared: Path, n_patches: int) -> Probe:
    """Return the network of a run, with patches of the prepared cases if there are any, else phantoms.

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
            f"{file} holds another network than its settings build. Certify your own network in "
            "Python, with brats_seg.training.certificate.certify."
        )
        raise ResumeError(msg) from None
    size = _measured_size(trained.config, trained.identity.patch)
    there = any(prepared.glob(f"*/{MANIFEST_NAME}"))
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
    """Build the network of the settings, and train it on phantom patches for a few steps.

    Raises:
        ConfigError: The network does not segment.
    """
    if config.model.task != "segmentation":
        msg = (
            f"model.name is {config.model.name!r}; expected a network that segments, as the losses "
            "that are measured do. The loss of an autoencoder is a mean over patches, like patch Dice"
        )
        raise ConfigError(msg)
    longest = (LONGEST_AXIS, LONGEST_AXIS, LONGEST_AXIS)
    size = longest if config.patch.size == "whole" else _measured_size(config, config.patch.size)
    torch.manual_seed(config.training.seed)
    network = build_model(config.model, size).to(device.torch_device)
    patches = phantom_patches(n_patches, size)
    optimizer = torch.optim.Adam(network.parameters(), lr=_WARM_LR)
    accumulator = Accumulator(network, DiceBce(), optimizer, device=device)
    for step in track(
        range(_N_WARM_STEPS), what="training on phantom patches", total=_N_WARM_STEPS
    ):
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
    case_ids = prepared_ids(folder)
    n_candidates = _CANDIDATES * n_patches
    dataset = PatchDataset(
        folder,
        patch=config.patch.model_copy(update={"size": size, "foreground": 0.5}),
        multiple=size,
        augment="none",
        seed=config.training.seed,
    )
    per_case = ceil(n_candidates / len(case_ids))
    keys = epoch_patches(case_ids, 0, per_case, config.training.seed)[:n_candidates]
    samples = sorted((dataset[key] for key in keys), key=lambda sample: int(sample.target.sum()))
    chosen = [samples[i * (len(samples) - 1) // (n_patches - 1)] for i in range(n_patches)]
    (patches,) = Batch(samples=tuple(chosen)).micro_batches(n_patches)
    return patches.to(torch.device("cpu"))


def phantom_patches(n_patches: int, size: Size, seed: int = 0) -> MicroBatch:
    """Make phantom patches with spherical tumours: radii grow fourfold, two in five lack ET."""
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


def gradient_of(
    backward: Backward,
    network: nn.Module,
    criterion: Criterion,
    micro_batches: Sequence[MicroBatch],
    device: Device,
) -> Tensor:
    """Return the gradient of a backward pass, `(n_parameters,)`, in float64 on the CPU.

    Parameters of the loss come after those of the network. Each call draws the same random numbers
    as the one before it.
    """
    parameters = [*network.parameters(), *parameters_of(criterion)]
    for parameter in parameters:
        parameter.grad = None
    before = RandomState.capture(device.torch_device)
    backward(network, criterion, [part.to(device.torch_device) for part in micro_batches], device)
    before.restore()
    parts = [
        torch.zeros_like(p, device="cpu") if p.grad is None else p.grad.cpu() for p in parameters
    ]
    return torch.cat([part.flatten().double() for part in parts]) / _loss_scale(device)


def whole(
    network: nn.Module, criterion: Criterion, micro_batches: Sequence[MicroBatch], device: Device
) -> None:
    """Compute the gradient of all patches in one batch, without the accumulator."""
    image, target = (torch.cat(parts) for parts in zip(*micro_batches, strict=True))
    with device.autocast():
        if _has_random_layers(network, micro_batches[0], device):
            # random layers draw patch by patch, as they do in micro-batches
            outputs = [network(part.image) for part in micro_batches]
            columns = zip(*map(tensors_of, outputs), strict=True)
            output = output_from(structure_of(outputs[0]), [torch.cat(parts) for parts in columns])
        else:
            output = network(image)
        loss = whole_loss(criterion, output, target)
    (_loss_scale(device) * loss).backward()


def exact(
    network: nn.Module, criterion: Criterion, micro_batches: Sequence[MicroBatch], device: Device
) -> None:
    """Compute the gradient with the accumulator."""
    optimizer = torch.optim.SGD([*network.parameters(), *parameters_of(criterion)])
    accumulator = Accumulator(network, criterion, optimizer, device=device)
    accumulator.scaler = torch.amp.GradScaler(
        device.torch_device.type, init_scale=_LOSS_SCALE, enabled=device.needs_scaler
    )
    accumulator.backward(micro_batches)


def ordinary(
    network: nn.Module, criterion: Criterion, micro_batches: Sequence[MicroBatch], device: Device
) -> None:
    """Add up the gradients of the micro-batches, each loss divided by their number."""
    for micro_batch in micro_batches:
        with device.autocast():
            loss = whole_loss(criterion, network(micro_batch.image), micro_batch.target)
        (_loss_scale(device) * loss / len(micro_batches)).backward()


WHOLE = "whole batch"
_METHODS = {WHOLE: whole, "exact": exact, "ordinary": ordinary}


def _rows_that_fit(
    network: nn.Module, config: LossConfig, patches: MicroBatch, device: Device, track: Track
) -> tuple[CertificateRow, ...]:
    """Return the rows of one precision, or none if not even two patches fit in memory."""
    network.to(device.torch_device).train()
    for independence in track([PatchIndependence(network)], what="checking the network", total=1):
        independence.check(patches.image[:1].to(device.torch_device), device)
    n_all = n_patches = len(patches.image)
    while n_patches > 1:
        # the first and the last differ most
        places = [i * (n_all - 1) // (n_patches - 1) for i in range(n_patches)]
        micro_batches = [MicroBatch(*(part[i : i + 1] for part in patches)) for i in places]
        try:
            return tuple(_rows(network, config, micro_batches, device, track))
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
        n_patches //= 2
    return ()


def _rows(
    network: nn.Module,
    config: LossConfig,
    micro_batches: list[MicroBatch],
    device: Device,
    track: Track,
) -> Iterator[CertificateRow]:
    own = config.name or (BATCH_DICE if config.batch_dice else PATCH_DICE)
    precision = "fp64" if micro_batches[0].image.dtype.itemsize == 8 else device.precision
    criteria = _criteria(config)
    gradients = _gradients(network, criteria, micro_batches, device)
    n_gradients = len(criteria) * len(_METHODS)
    for name, method, found in track(gradients, what=f"gradients, {precision}", total=n_gradients):
        if method == WHOLE:
            expected = found
            _check_comparable(expected, name)
            continue
        yield CertificateRow(
            loss=name,
            own=name == own,
            method=method,
            precision=precision,
            n_patches=len(micro_batches),
            relative_error=float((found - expected).norm() / expected.norm()),
            angle_deg=_angle_deg(found, expected),
        )


def _gradients(
    network: nn.Module,
    criteria: Mapping[str, Criterion],
    micro_batches: list[MicroBatch],
    device: Device,
) -> Iterator[tuple[str, str, Tensor]]:
    """Yield the name of each loss with each method and its gradient, that of the whole batch first."""
    for name, criterion in criteria.items():
        if isinstance(criterion, nn.Module):
            criterion.to(micro_batches[0].image.dtype).to(device.torch_device)
        for method, backward in _METHODS.items():
            with part(f"{method}, {name}", 0):
                found = gradient_of(backward, network, criterion, micro_batches, device)
            yield name, method, found


def _criteria(config: LossConfig) -> dict[str, Criterion]:
    """Return a loss of each kind: a mean over patches, a function of sums, and an undeclared one."""
    generalized = GeneralizedDiceLoss(sigmoid=True, batch=True)

    def undeclared(output: Output, target: Tensor) -> Tensor:
        logits = as_output(output).logits[0]
        # sums over millions of voxels: half precision would round them away
        logits = logits.float() if logits.dtype.itemsize < 4 else logits
        loss: Tensor = generalized(logits, target.to(logits.dtype))
        return loss

    criteria: dict[str, Criterion] = {
        PATCH_DICE: DiceBce(config),
        BATCH_DICE: BatchDiceBce(config),
        UNDECLARED: undeclared,
    }
    return criteria if config.name is None else {**criteria, config.name: build_criterion(config)}


def _check_comparable(gradient: Tensor, loss: str) -> None:
    length = float(gradient.norm())
    if length == 0 or not isfinite(length):
        msg = (
            f"the gradient of the whole batch has length {length} for {loss}: there is nothing to "
            "compare with. Weights diverge, and kernels fail, sooner in half precision: try "
            "--precision fp32, or another run."
        )
        raise BratsError(msg)


def _angle_deg(one: Tensor, other: Tensor) -> float:
    """Return the angle between two vectors, without the cancellation of the arc cosine."""
    one, other = one / one.norm(), other / other.norm()
    return degrees(2 * atan2(float((one - other).norm()), float((one + other).norm())))


def _measured_size(config: Config, patch: Size) -> Size:
    """Return the patch, or a smaller one that the network takes too."""
    multiple = size_multiple(config.model, patch)
    x, y, z = (
        min(n, m * max(_SHORTEST_BELOW, ceil(LONGEST_AXIS / m)))
        for n, m in zip(patch, multiple, strict=True)
    )
    return x, y, z


def _loss_scale(device: Device) -> float:
    return _LOSS_SCALE if device.needs_scaler else 1.0


def _has_random_layers(network: nn.Module, micro_batch: MicroBatch, device: Device) -> bool:
    """Return whether a forward pass draws random numbers; the generators are restored."""
    before = RandomState.capture(device.torch_device)
    with torch.no_grad():
        network(micro_batch.image)
    after = RandomState.capture(device.torch_device)
    before.restore()
    return not torch.equal(_bytes(before), _bytes(after))


def _bytes(state: RandomState) -> Tensor:
    return state.cpu if state.cuda is None else torch.cat([state.cpu, state.cuda])
