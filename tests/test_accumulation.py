"""The exact step: any way to cut a batch gives the gradient of the whole batch.

Measured from a trained state with tumours of unlike size and regions that are empty, because at
random weights every patch looks alike and ordinary accumulation would pass too.
"""

import weakref
from collections.abc import Callable, Iterator, Sequence
from copy import deepcopy
from functools import cache
from threading import Barrier, get_ident
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from brats_seg import MicroBatch, build_model, phantom_patches
from brats_seg.config import ModelConfig
from brats_seg.errors import ConfigError
from brats_seg.models import interface
from brats_seg.runtime.device import Device
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.losses import BatchDiceBce, DiceBce, count_voxels, whole_loss
from brats_seg.training.ranks import Ranks

Criterion = Callable[..., Tensor]
Gradient = tuple[Tensor, float]
PARTITIONS = [(6,), (1, 2, 3), (4, 2), (1, 1, 1, 1, 1, 1), (5, 1)]
SHORT = [(1,), (2,), (3,), (3, 1), (3, 2), (3, 3), (3, 3, 1), (3, 3, 2)]
"""Micro-batches of three, with one, two or three patches in the last, as at the end of an epoch."""


def finest(output: Tensor | interface.TrainingOutput) -> Tensor:
    return output.logits[0] if isinstance(output, interface.TrainingOutput) else output


def bce(logits: Tensor, target: Tensor) -> Tensor:
    function = nn.functional.binary_cross_entropy_with_logits
    return function(logits, target.to(logits.dtype), reduction="none")


def flat_dice(output: Tensor | interface.TrainingOutput, target: Tensor) -> Tensor:
    """A loss that declares nothing: Dice over the whole batch."""
    probabilities = torch.sigmoid(finest(output))
    return 1 - 2 * (probabilities * target).sum() / (probabilities.sum() + target.sum() + 1)


# methods of a loss of sums that are not declared: nobody calls them
flat_dice.sums = flat_dice.of_sums = None


def hardest_voxels(output: Tensor | interface.TrainingOutput, target: Tensor) -> Tensor:
    """A loss that is no function of sums over patches: the mean over the hardest voxels."""
    losses = bce(finest(output), target)
    return losses.flatten().topk(losses.numel() // 100).values.mean()


def marked_voxels(output: Tensor | interface.TrainingOutput, target: Tensor) -> Tensor:
    """A loss that ignores voxels, more of them in one patch than in another: a mean over the rest."""
    losses = bce(finest(output), target)
    counts = (target.sum(1, keepdim=True) > 0) | (torch.arange(8) < 1)
    return (losses * counts).sum() / (3 * counts.sum())


CRITERIA: dict[str, Criterion] = {
    "patch Dice": DiceBce(),
    "batch Dice": BatchDiceBce(),  # type: ignore[dict-item]
    "undeclared Dice": flat_dice,
    "hardest voxels": hardest_voxels,
    "marked voxels": marked_voxels,
}


def small_network(dropout: float = 0.0) -> nn.Module:
    return nn.Sequential(
        nn.Conv3d(2, 6, 3, padding=1),
        nn.InstanceNorm3d(6, affine=True),
        nn.LeakyReLU(),
        nn.Dropout3d(dropout),
        nn.Conv3d(6, 3, 1),
    )


class TwoLevels(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_network()[:-1]
        self.fine, self.coarse = nn.Conv3d(6, 3, 1), nn.Conv3d(6, 3, 2, stride=2)

    def forward(self, image: Tensor) -> interface.TrainingOutput:
        features = self.body(image)
        return interface.TrainingOutput(logits=(self.fine(features), self.coarse(features)))


def patches(n: int, dtype: torch.dtype) -> MicroBatch:
    """Cubes of growing size; every other patch lacks the third region."""
    generator = torch.Generator().manual_seed(0)
    target = torch.zeros(n, 3, 8, 8, 8)
    for i in range(n):
        for region in range(2 if i % 2 else 3):
            target[i, region, 1 : 3 + i - region, 1:4, 1 : 4 + i // 2] = 1
    image = torch.randn(n, 2, 8, 8, 8, generator=generator) * 0.5
    image[:, :1] += target.sum(1, keepdim=True)
    return MicroBatch(image.to(dtype), target)


def cut(batch: MicroBatch, sizes: Sequence[int]) -> list[MicroBatch]:
    return list(map(MicroBatch, *(part.split(list(sizes)) for part in batch)))


@cache
def _trained(make: Callable[[], nn.Module], dtype: torch.dtype) -> nn.Module:
    torch.manual_seed(1)
    network = make()
    for parameter in network.parameters():
        nn.init.normal_(parameter, std=0.3)
    network.to(dtype)
    accumulator = Accumulator(network, DiceBce(), torch.optim.Adam(network.parameters(), lr=0.02))
    batch = patches(6, dtype)
    for _ in range(60):
        accumulator.step([batch])
    return network


def trained(dtype: torch.dtype, make: Callable[[], nn.Module] = small_network) -> nn.Module:
    return deepcopy(_trained(make, dtype))


def gradient(network: nn.Module) -> Tensor:
    return torch.cat([p.grad.flatten() for p in network.parameters() if p.grad is not None])


def modules_of(network: nn.Module, criterion: object) -> list[nn.Module]:
    has_parameters = isinstance(criterion, nn.Module) and list(criterion.parameters())
    return [network, criterion] if has_parameters else [network]


def all_parameters(network: nn.Module, criterion: object) -> list[nn.Parameter]:
    return [p for module in modules_of(network, criterion) for p in module.parameters()]


def accumulator_of(network: nn.Module, criterion: Criterion, **options: Any) -> Accumulator:
    optimizer = torch.optim.SGD(all_parameters(network, criterion), lr=options.pop("lr", 0.0))
    return Accumulator(network, criterion, optimizer, **options)


def accumulated_gradient(network: nn.Module, criterion: Criterion, *parts: MicroBatch) -> Gradient:
    network.zero_grad()
    loss, _ = accumulator_of(network, criterion).backward(iter(parts))
    return gradient(network), loss


def whole_gradient(network: nn.Module, criterion: Criterion, batch: MicroBatch) -> Gradient:
    network.zero_grad()
    loss = whole_loss(criterion, network(batch.image), batch.target)
    loss.backward()
    return gradient(network), loss.item()


def relative_error(found: Tensor, expected: Tensor) -> float:
    return float((found - expected).norm() / expected.norm())


@pytest.mark.parametrize("name", CRITERIA)
@pytest.mark.parametrize("sizes", [*PARTITIONS, *SHORT])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-5)])
@pytest.mark.parametrize("make", [small_network, TwoLevels])
def test_every_partition_has_the_gradient_of_the_batch(name, sizes, dtype, tolerance, make):
    network, batch = trained(dtype, make), patches(sum(sizes), dtype)
    found, loss = accumulated_gradient(network, CRITERIA[name], *cut(batch, sizes))
    expected, expected_loss = whole_gradient(network, CRITERIA[name], batch)
    assert relative_error(found, expected) <= tolerance
    assert loss == pytest.approx(expected_loss, rel=tolerance)


@pytest.mark.parametrize("name", CRITERIA)
def test_ordinary_accumulation_misses_by_far(name: str) -> None:
    """The negative control, of uneven micro-batches where the loss is a mean over patches."""
    network, batch = trained(torch.float64), patches(6, torch.float64)
    criterion, sizes = CRITERIA[name], (5, 1) if name == "patch Dice" else [1] * 6
    network.zero_grad()
    for image, target in cut(batch, sizes):
        (whole_loss(criterion, network(image), target) / len(sizes)).backward()
    ordinary = gradient(network)
    expected, _ = whole_gradient(network, criterion, batch)
    assert relative_error(ordinary, expected) > 0.1


class Counting(nn.Module):
    """A network with a random layer and a buffer that every forward pass changes."""

    def __init__(self) -> None:
        super().__init__()
        self.body = small_network(dropout=0.5)
        self.register_buffer("n_seen", torch.zeros(()))

    def forward(self, image: Tensor) -> Tensor:
        self.n_seen += len(image)
        return self.body(image)


@pytest.mark.parametrize("name", CRITERIA)
def test_a_step_draws_counts_and_measures_as_one_ordinary_pass(name: str) -> None:
    """The gradient belongs to the outputs that the loss was computed from."""
    network, criterion, batch = Counting().double(), CRITERIA[name], patches(6, torch.float64)
    micro_batches = cut(batch, (2, 3, 1))
    torch.manual_seed(5)
    output = torch.cat([network(micro_batch.image) for micro_batch in micro_batches])
    expected_loss = whole_loss(criterion, output, batch.target)
    expected_loss.backward()
    expected, state_after = gradient(network), torch.get_rng_state()
    network.n_seen.zero_()
    torch.manual_seed(5)
    accumulator = accumulator_of(network, criterion)
    result = accumulator.step(micro_batches, lambda output, _: output.mean((1, 2, 3, 4)))
    assert relative_error(gradient(network), expected) <= 1e-12
    assert result.loss == pytest.approx(expected_loss.item())
    assert torch.equal(torch.get_rng_state(), state_after)
    assert network.n_seen == 6
    # every patch once, and in order
    assert torch.allclose(result.measured, output.mean((1, 2, 3, 4)))
    assert not result.measured.requires_grad


def test_what_cannot_be_cut_is_refused_between_micro_batches_and_ranks() -> None:
    batch = patches(2, torch.float32)
    network = nn.Sequential(nn.Conv3d(2, 3, 1), nn.BatchNorm3d(3))
    accumulator_of(network, DiceBce()).step([batch])
    message = r"the layer '1' \(BatchNorm3d\) .* mixes them.* set training\.micro_batch to"
    with pytest.raises(ConfigError, match=message):
        accumulator_of(network, DiceBce()).step(cut(batch, (1, 1)))
    with pytest.raises(ConfigError, match="BatchNorm3d"):
        accumulator_of(network, DiceBce(), ranks=Ranks(rank=0, n_ranks=2)).step([batch])


@pytest.mark.parametrize("name", CRITERIA)
def test_the_device_never_holds_the_whole_batch(name: str) -> None:
    """The host holds it in float16; each micro-batch is moved to the device, and then freed."""
    network, batch = trained(torch.float32), patches(6, torch.float16)
    accumulator = accumulator_of(network, CRITERIA[name])
    accumulator.step(cut(batch, [1] * 6))
    living: weakref.WeakSet[Tensor] = weakref.WeakSet()
    n_living = []

    def note(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        living.add(inputs[0])
        n_living.append(len(living))

    network.register_forward_pre_hook(note)
    accumulator.step(cut(batch, [1] * 6))
    assert len(n_living) == (6 if name == "patch Dice" else 11)
    # the graph of the previous micro-batch is freed only when the next one has its own
    assert max(n_living) <= 2


def test_clipping_sees_the_gradient_of_the_whole_batch() -> None:
    network, batch = trained(torch.float64), patches(6, torch.float64)
    expected, _ = whole_gradient(network, DiceBce(), batch)
    before = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
    result = accumulator_of(network, DiceBce(), lr=1.0, clip_norm=1e-3).step(cut(batch, [1] * 6))
    after = nn.utils.parameters_to_vector(network.parameters()).detach()
    assert result.gradient_norm == pytest.approx(float(expected.norm()), rel=1e-10)
    assert float((after - before).norm()) == pytest.approx(1e-3, rel=1e-2)


IN_FLOAT16 = Device(torch_device=torch.device("cpu"), autocast_dtype=torch.float16)


@pytest.mark.parametrize("device", [None, IN_FLOAT16])
@pytest.mark.parametrize("name", CRITERIA)
def test_an_infinite_value_leaves_the_weights_alone(name: str, device: Device | None) -> None:
    """The loss scale of float16 falls once for a batch."""
    network = trained(torch.float32)
    before = [p.detach().clone() for p in network.parameters()]
    micro_batches = cut(patches(3, torch.float32), (1, 1, 1))
    micro_batches[1].image[0, 0, 0, 0, 0] = float("inf")
    accumulator = accumulator_of(network, CRITERIA[name], lr=1.0, device=device)
    scale = accumulator.scaler.get_scale()
    assert accumulator.step(micro_batches).skipped
    assert all(torch.equal(b, p) for b, p in zip(before, network.parameters(), strict=True))
    assert accumulator.scaler.get_scale() == (scale / 2 if device else scale)


def test_an_infinite_value_leaves_running_statistics_alone() -> None:
    """They would stay infinite, and with them every later validation."""
    network = nn.Sequential(nn.BatchNorm3d(2), nn.Conv3d(2, 3, 1))
    before, batch = deepcopy(network.state_dict()), patches(2, torch.float32)
    batch.image[0, 0, 0, 0, 0] = float("inf")
    assert accumulator_of(network, DiceBce(), lr=1.0).step([batch]).skipped
    torch.testing.assert_close(network.state_dict(), before, rtol=0, atol=0)


class LearntWeights(nn.Module):
    """Weighs the regions by learnt uncertainties (Kendall 2018), for all patches together."""

    def __init__(self) -> None:
        super().__init__()
        self.s = nn.Parameter(torch.linspace(-0.5, 0.5, 3))

    def per_region(self, output: Tensor, target: Tensor) -> Tensor:
        losses = bce(output, target).mean((2, 3, 4))
        return losses * torch.exp(-self.s) + self.s

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.per_region(output, target).square().mean().sqrt()


class LearntPatchWeights(LearntWeights):
    """The same as one number for each patch, with a penalty on the weights of the loss."""

    reduces = "patches"

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.per_region(output, target).sum(1) + self.s.square().sum()


class LearntTversky(nn.Module):
    """A function of sums with learnt exponents, both inside the sums and of them."""

    reduces = "sums"

    def __init__(self) -> None:
        super().__init__()
        self.sharpness = nn.Parameter(torch.tensor(1.5))
        self.balance = nn.Parameter(torch.tensor([0.3, 0.8]))

    def sums(self, output: Tensor, target: Tensor) -> Tensor:
        probabilities = torch.sigmoid(self.sharpness * output)
        both = (probabilities * target).sum((0, 2, 3, 4))
        return torch.stack([both, probabilities.sum((0, 2, 3, 4)), target.sum((0, 2, 3, 4))])

    def of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        both, predicted, reference = sums
        missed = self.balance[0] * (predicted - both) + self.balance[1] * (reference - both)
        return 1 - (both / (both + missed + 1)).mean() + self.balance.square().sum()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        raise NotImplementedError


class Penalised(nn.Module):
    def __init__(self, network: nn.Module, loss: Criterion) -> None:
        super().__init__()
        self.read = [network]  # in a list, so that its parameters are not those of the loss
        self.loss = loss
        if hasattr(loss, "reduces"):
            self.reduces = loss.reduces
        if hasattr(loss, "of_sums"):
            self.sums, self.of_sums = loss.sums, self._of_sums

    def penalty(self) -> Tensor:
        return sum(100 * p.square().sum() for p in self.read[0].parameters())

    def _of_sums(self, sums: Tensor, n_patches: int) -> Tensor:
        return self.loss.of_sums(sums, n_patches) + self.penalty()

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        return self.loss(output, target) + self.penalty()


LEARNT: dict[str, Callable[[nn.Module], Criterion]] = {
    "weights, two passes": lambda network: LearntWeights(),
    "weights, one pass": lambda network: LearntPatchWeights(),
    "weights, sums": lambda network: LearntTversky(),
    "penalty, two passes": lambda network: Penalised(network, flat_dice),
    "penalty, one pass": lambda network: Penalised(network, DiceBce()),
    "penalty, sums": lambda network: Penalised(network, BatchDiceBce()),
    "penalty and weights": lambda network: Penalised(network, LearntWeights()),
}
"""Losses that learn, or read the network, for a network."""


@pytest.mark.parametrize("name", LEARNT)
@pytest.mark.parametrize("sizes", PARTITIONS)
def test_parameters_of_a_loss_have_the_whole_gradient(name: str, sizes: tuple[int, ...]) -> None:
    network, batch = trained(torch.float64), patches(6, torch.float64)
    criterion = LEARNT[name](network)
    if isinstance(criterion, nn.Module):
        criterion.double()
    whole_loss(criterion, network(batch.image), batch.target).backward()
    expected = [gradient(module) for module in modules_of(network, criterion)]
    result = accumulator_of(network, criterion).step(cut(batch, sizes))
    found = [gradient(module) for module in modules_of(network, criterion)]
    for part, expected_part in zip(found, expected, strict=True):
        assert relative_error(part, expected_part) <= 1e-12
    assert result.gradient_norm == pytest.approx(float(torch.cat(expected).norm()), rel=1e-12)


@pytest.mark.parametrize("name", [*CRITERIA, *(name for name in LEARNT if "penalty" not in name)])
def test_in_float16_the_step_is_that_of_the_whole_batch_to_its_rounding(name: str) -> None:
    batch, clip_norm = patches(4, torch.float32), 1e-2
    moved = []
    for sizes in ((4,), (1, 1, 1, 1)):
        network = trained(torch.float32)
        criterion = CRITERIA[name] if name in CRITERIA else LEARNT[name](nn.Identity())
        parameters = all_parameters(network, criterion)
        before = nn.utils.parameters_to_vector(parameters).detach().clone()
        options = {"device": IN_FLOAT16, "clip_norm": clip_norm}
        accumulator = accumulator_of(network, criterion, lr=0.1, **options)
        accumulator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10)
        assert not accumulator.step(cut(batch, sizes)).skipped
        moved.append(nn.utils.parameters_to_vector(parameters).detach() - before)
    assert 0 < float(moved[0].norm()) <= 1.01 * 0.1 * clip_norm
    assert relative_error(moved[1], moved[0]) < 0.02
    if name not in CRITERIA:
        n_network = sum(p.numel() for p in network.parameters())
        assert relative_error(moved[1][n_network:], moved[0][n_network:]) < 0.02


@pytest.mark.parametrize("name", CRITERIA)
def test_gradients_outside_the_optimizer_neither_pile_up_nor_count(name: str) -> None:
    """Only the last layer is fine-tuned: its clipped steps are those of a network frozen below."""
    found = []
    for is_frozen in (False, True):
        network, batch = trained(torch.float64), patches(4, torch.float64)
        if is_frozen:
            network[:-1].requires_grad_(requires_grad=False)
        optimizer = torch.optim.SGD(network[-1].parameters(), lr=0.5)
        accumulator = Accumulator(network, CRITERIA[name], optimizer, clip_norm=1e-2)
        norms = [accumulator.step(cut(batch, [1] * 4)).gradient_norm for _ in range(4)]
        found.append((norms, nn.utils.parameters_to_vector(network[-1].parameters()).detach()))
    (norms, weights), (expected_norms, expected) = found
    assert norms == pytest.approx(expected_norms, rel=1e-12)
    assert relative_error(weights, expected) <= 1e-12


class Nested(NamedTuple):
    logits: Tensor
    more: dict[str, tuple[Tensor, None]]


class Several(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = small_network().double()

    def forward(self, image: Tensor) -> Nested:
        logits = self.body(image)
        return Nested(logits, {"size": (logits.square().mean((1, 2, 3, 4)), None)})


@pytest.mark.parametrize("one_pass", [False, True])
def test_a_loss_gets_the_structure_that_the_network_gave(one_pass: bool) -> None:
    """One number for each patch is one of the outputs; voxels are counted of the logits."""
    torch.manual_seed(0)
    network, batch = Several(), patches(4, torch.float64)

    def each(output: Nested, target: Tensor) -> Tensor:
        return DiceBce()(output.logits, target) + output.more["size"][0]

    def together(output: Nested, target: Tensor) -> Tensor:
        return each(output, target).square().mean()

    each.reduces = "patches"
    criterion = each if one_pass else together
    expected, _ = whole_gradient(network, criterion, batch)
    result = accumulator_of(network, criterion).step(cut(batch, (1, 2, 1)), count_voxels)
    assert relative_error(gradient(network), expected) <= 1e-12
    assert result.measured.shape == (4, 4, 3)


def none_of(n: int, size: int = 8) -> MicroBatch:
    return MicroBatch(torch.zeros(n, 2, size, size, size), torch.zeros(n, 3, size, size, size))


def detached(output: Tensor, target: Tensor) -> Tensor:
    return flat_dice(output.detach(), target)


def outer(output: Tensor, target: Tensor) -> Tensor:
    return flat_dice(OUTSIDE * output, target)


OUTSIDE = nn.Parameter(torch.ones(3, 1, 1, 1))


def declaring(what: str) -> Callable[[Tensor, Tensor], Tensor]:
    def declared(output: Tensor, target: Tensor) -> Tensor:
        return flat_dice(output, target)

    declared.reduces = what
    return declared


@pytest.mark.parametrize(
    ("criteria", "micro_batches", "message"),
    [
        ((DiceBce(), BatchDiceBce(), flat_dice), [], "the batch holds no micro-batch"),
        ((DiceBce(), BatchDiceBce(), flat_dice), [none_of(1), none_of(0)], "micro-batch 2 .* 0 p"),
        ([DiceBce()], [MicroBatch(none_of(2).image, none_of(1).target)], "2 patches and 1 targets"),
        ([bce], [none_of(2)], r"bce returned the shape \(2, 3, 8, 8, 8\); expected a sc"),
        ([flat_dice], [none_of(1), none_of(1, size=4)], "use patches of one size"),
        ([detached], [none_of(2)], "depends neither on the output of the network nor"),
        ([outer], [none_of(1), none_of(1)], r"a tensor of shape \(3, 1, 1, 1\) that requires"),
        ([declaring("patches")], [none_of(6)], r"expected \(6,\)"),
        ([declaring("sums")], [none_of(2)], r"lacks the methods .* of_sums"),
        ([declaring("mean")], [none_of(2)], r"reduces = 'mean'; expected 'patches' or 'sums'"),
    ],
)
def test_what_is_no_batch_or_no_loss_is_named(criteria, micro_batches, message):
    for criterion in criteria:
        with pytest.raises(ConfigError, match=message):
            accumulator_of(small_network(), criterion).step(micro_batches)


def test_parameters_of_a_loss_need_an_optimizer(caplog: pytest.LogCaptureFixture) -> None:
    network, scale = small_network(), OUTSIDE.detach().clone()
    optimizer = torch.optim.SGD([*network.parameters(), OUTSIDE], lr=0.1)
    Accumulator(network, outer, optimizer).step(cut(patches(2, torch.float32), (1, 1)))
    assert not torch.equal(OUTSIDE, scale)
    Accumulator(network, LearntWeights(), optimizer)
    assert "LearntWeights has parameters that the optimizer was not given" in caplog.text
    with pytest.raises(ConfigError, match="the optimizer has no parameter of the network"):
        Accumulator(small_network(), outer, optimizer)


def test_patches_of_two_sizes_classes_as_targets_and_outputs_without_a_row_for_each_patch() -> None:
    for criterion in (DiceBce(), BatchDiceBce()):
        accumulated_gradient(small_network(), criterion, none_of(1), none_of(1, size=4))
    flat = nn.Sequential(Several(), nn.Identity())
    flat.register_forward_hook(lambda module, inputs, output: (output[0], output[0].mean()))
    with pytest.raises(ConfigError, match=r"a tensor of shape \(\) for 2 patches"):
        accumulated_gradient(flat, lambda o, y: flat_dice(o[0], y), patches(2, torch.float64))
    network, batch = trained(torch.float64), patches(4, torch.float64)
    batch = batch._replace(target=batch.target[:, 0].long())
    weighted = nn.CrossEntropyLoss(weight=torch.tensor([1.0, 5.0, 2.0]).double())
    found, _ = accumulated_gradient(network, weighted, *cut(batch, [1] * 4))
    assert relative_error(found, whole_gradient(network, weighted, batch)[0]) <= 1e-12


def test_micro_batches_in_threads_change_no_bit() -> None:
    networks = [unet_for_threads() for _ in range(2)]
    accumulators = [
        Accumulator(network, DiceBce(), torch.optim.SGD(network.parameters(), lr=0.1), n_at_once=n)
        for n, network in enumerate(networks, 1)
    ]
    meeting = Barrier(2)

    def meet(*_: object) -> None:
        meeting.wait(timeout=60)

    for step in range(3):
        batch = cut(phantom_patches(4, (8, 8, 8)), (1, 1, 1, 1))
        alone, together = (one.step(batch, count_voxels) for one in accumulators)
        assert (alone.loss, alone.gradient_norm) == (together.loss, together.gradient_norm)
        assert torch.equal(alone.measured, together.measured)
        assert all(map(torch.equal, *(list(network.parameters()) for network in networks)))
        if step == 0:
            # a lone thread would wait in vain
            networks[1].register_forward_pre_hook(meet)


@pytest.mark.parametrize("checkpointing", [False, True])
def test_an_error_in_a_thread_leaves_everything_as_it_was(checkpointing: bool) -> None:
    """With activation checkpointing, which memory that ran out calls for, there is one at a time."""
    network = unet_for_threads()
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    accumulator = Accumulator(network, DiceBce(), optimizer, n_at_once=2)
    patches_of_unet = phantom_patches(4, (8, 8, 8))
    accumulator.step(cut(patches_of_unet, (2, 2)))
    before, calls = deepcopy(network.state_dict()), []
    if checkpointing:
        interface.set_activation_checkpointing(network, interface.ActivationCheckpointing.ALL)

    def fail(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        calls.append(get_ident())
        if torch.equal(inputs[0], marked.image):
            raise torch.OutOfMemoryError("no memory")

    parts = cut(patches_of_unet, (1, 1, 2))
    marked = parts[1]
    network.register_forward_pre_hook(fail)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator.step(parts)
    assert (get_ident() in calls) == checkpointing
    assert all(torch.equal(network.state_dict()[name], before[name]) for name in before)
    assert all(parameter.grad is None for parameter in network.parameters())


@pytest.mark.parametrize("name", CRITERIA)
def test_memory_that_runs_out_between_micro_batches_is_told_to_all_ranks(name, monkeypatch):
    def micro_batches() -> Iterator[MicroBatch]:
        yield none_of(1)
        raise torch.OutOfMemoryError("no memory")

    told: list[bool] = []
    monkeypatch.setattr(Ranks, "any", lambda self, flag: told.append(flag) or flag)
    with pytest.raises(torch.OutOfMemoryError):
        accumulator_of(small_network(), CRITERIA[name]).step(micro_batches())
    assert told == [True]


def unet_for_threads() -> nn.Module:
    torch.manual_seed(3)
    return build_model(ModelConfig(widths=(4, 8)), (8, 8, 8))
