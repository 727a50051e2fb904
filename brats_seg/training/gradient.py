"""Compute the gradient of an effective batch from its micro-batches, equal to that of the whole batch.

The number of passes depends on the loss (see `losses.reduction_of`):

- a mean over patches takes one pass: the gradients of all patches are added, and the sum is divided
  by the number of patches in the batch.
- a function of sums over patches (batch Dice) takes two: the first adds up the sums, the second
  propagates the derivative of the loss with respect to them.
- any other loss takes two as well: the first keeps the outputs, the loss is computed once for the
  whole batch, and the second propagates its derivative with respect to each output (the idea of Gao
  2021, arXiv 2101.06983, there for contrastive losses).

A loss may depend on more than the outputs: on parameters of its own, or on the weights of the network
that it reads. In one pass these gradients are divided by the patches like all others; in two, they come
from the one computation of the loss, on one rank only.

The graph of the last micro-batch of a first pass is kept for the second, so n micro-batches take
2n - 1 forward passes at most. Only one graph exists at a time, and with a loss of the first two
kinds the device holds one micro-batch at a time, whatever the effective batch.

N patches, C channels, R regions, X Y Z voxels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models.interface import output_from, structure_of, tensors_of
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import is_out_of_memory
from brats_seg.training.independence import (
    PatchIndependence,
    RandomState,
    capture_buffers,
    check_replay,
    restore_buffers,
)
from brats_seg.training.losses import (
    Criterion,
    Measure,
    Output,
    SumsLoss,
    as_sums_loss,
    check_scalar,
    measure_nothing,
    reduction_of,
)
from brats_seg.training.ranks import Ranks

Value = TypeVar("Value")
Gradients: TypeAlias = list[Sequence[Tensor | None]]
"""For each micro-batch, the derivative with respect to each carried tensor, or None without one."""


class MicroBatch(NamedTuple):
    """The patches of one forward pass.

    Example:
        >>> import torch
        >>> image = torch.zeros(1, 4, 8, 8, 8, dtype=torch.float16)
        >>> part = MicroBatch(image, torch.zeros(1, 3, 8, 8, 8, dtype=torch.uint8))
        >>> part.to(torch.device("cpu")).image.dtype
        torch.float32
    """

    image: Tensor
    """`(N, C, X, Y, Z)` of any floating type."""
    target: Tensor
    """Target of the loss; its first axis counts patches too."""

    def to(self, device: torch.device) -> "MicroBatch":
        """Return the micro-batch on a device, in the types that networks and losses compute with.

        The image becomes float32 unless it is float64. The target becomes float32, as losses of
        torch and MONAI expect, if it is uint8 or in half precision.
        """
        # moved first, because fewer bytes cross to the device that way
        image, target = self.image.to(device), self.target.to(device)
        image = image if image.dtype == torch.float64 else image.float()
        return MicroBatch(image, target.float() if target.dtype in _STORED_TYPES else target)


_STORED_TYPES = (torch.uint8, torch.float16, torch.bfloat16)
"""Types in which targets are held on the host to save memory."""


class Carried(NamedTuple):
    """The tensors of one micro-batch that the loss of the batch is computed from."""

    tensors: tuple[Tensor, ...]
    structure: Any = None
    """The output that all tensors but the last belong to, see `structure_of`."""


class Leaves:
    """The tensors that the gradient of a batch belongs to: what network, loss and optimizer hold."""

    def __init__(
        self, network: nn.Module, criterion: Criterion, optimizer: torch.optim.Optimizer
    ) -> None:
        self._modules = [m for m in (network, criterion) if isinstance(m, nn.Module)]
        self._optimizer = optimizer
        self._is_checked = False

    @property
    def updated(self) -> list[Tensor]:
        """The tensors that the optimizer updates."""
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    @property
    def all(self) -> list[Tensor]:
        """Every tensor that requires a gradient, each once."""
        held = (parameter for module in self._modules for parameter in module.parameters())
        return [t for t in dict.fromkeys([*held, *self.updated]) if t.requires_grad]

    def drop_gradients(self) -> None:
        """Forget the gradients, also of tensors that the optimizer does not have."""
        for tensor in self.all:
            tensor.grad = None

    def divide_gradients(self, n_patches: int) -> None:
        """Turn the gradients of a sum over patches into those of their mean."""
        for tensor in self.all:
            if tensor.grad is not None:
                tensor.grad /= n_patches

    def check(self, loss: Tensor, *others: Tensor, inputs: Sequence[Tensor] = ()) -> None:
        """Look, the first time, for leaves that a loss depends on and that nobody holds.

        Args:
            loss: The loss, or losses of patches.
            others: Other tensors that it is computed from, with graphs of their own.
            inputs: Leaves that stand for those tensors in the graph of the loss.

        Raises:
            ConfigError: There is such a tensor, which would not be learnt; or the loss has no
                gradient at all.
        """
        if not loss.requires_grad:
            msg = (
                "the loss depends neither on the output of the network nor on anything else that "
                "requires a gradient: look for detach(), argmax() or no_grad() on the way to it"
            )
            raise ConfigError(msg)
        if self._is_checked:
            return
        held = {*self.all, *inputs}
        unknown = [leaf for leaf in _leaves_of(loss, *others) if leaf not in held]
        if unknown:
            msg = (
                f"the loss depends on a tensor of shape {tuple(unknown[0].shape)} that requires a "
                "gradient and would not be learnt: neither network, loss nor optimizer hold it. "
                "Make it a parameter of a loss that is a torch.nn.Module, or detach it."
            )
            raise ConfigError(msg)
        self._is_checked = True


@dataclass(frozen=True, kw_only=True, slots=True)
class BatchGradient:
    """Computes the gradient of a batch that is given as micro-batches."""

    network: nn.Module
    criterion: Criterion
    device: Device
    scale: Callable[[Tensor], Tensor]
    """Multiplies a loss before the backward pass, so that float16 gradients do not underflow."""
    ranks: Ranks
    """The processes that share each batch."""
    leaves: Leaves
    """The tensors that the gradient belongs to."""
    independence: PatchIndependence
    """Asks the network whether a batch may be cut."""

    def make(self, micro_batches: Iterable[MicroBatch], measure: Measure) -> tuple[float, Tensor]:
        """Add this rank's part of the gradient to the leaves; return loss and measurements.

        Args:
            micro_batches: This rank's share of the batch, perhaps empty. Each is moved to the
                device for its forward pass; a loss that takes two passes keeps them all.
            measure: Called with the output of each micro-batch.

        Returns:
            The loss of the patches of all ranks, and what was measured of this rank's patches. The
            sum of the ranks' gradients is the gradient of that loss.
        """
        one_pass = reduction_of(self.criterion) == "patches"
        make = self._one_pass if one_pass else self._two_passes
        loss, rows = make(micro_batches, measure)
        return loss, torch.cat(rows) if rows else torch.empty(0)

    def _one_pass(
        self, micro_batches: Iterable[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        rows: list[Tensor] = []

        def work() -> float:
            total = torch.zeros((), device=self.device.torch_device)
            for index, micro_batch in enumerate(micro_batches):
                loss = self._summed_loss(self._on_device(index, micro_batch), measure, rows)
                self.scale(loss).backward()
                total = total + loss.detach()
            return float(total)

        total = torch.tensor(self._together(work), dtype=torch.float64)
        n_patches = self._n_patches(rows)
        self.leaves.divide_gradients(n_patches)
        return float(self.ranks.sum(total)) / n_patches, rows

    def _summed_loss(self, batch: MicroBatch, measure: Measure, rows: list[Tensor]) -> Tensor:
        """Return the sum of the patches' losses, holding nothing else of the forward pass."""
        with self.device.autocast():
            output = self.network(batch.image)
            losses = self.criterion(output, batch.target)
        _check_per_patch(losses, len(batch.image))
        self.leaves.check(losses)
        rows.append(_measure_output(measure, output, batch.target))
        return losses.sum()

    def _two_passes(
        self, micro_batches: Iterable[MicroBatch], measure: Measure
    ) -> tuple[float, list[Tensor]]:
        held = tuple(micro_batches)
        reduction = loss_reduction(self.criterion, self.device, self.scale, self.ranks)
        states: list[RandomState] = []
        rows: list[Tensor] = []

        def first_pass() -> list[Carried]:
            carried = []
            for index, micro_batch in enumerate(held):
                batch = self._on_device(index, micro_batch)
                states.append(RandomState.capture(self.device.torch_device))
                with torch.set_grad_enabled(index == len(held) - 1):
                    carried.append(self._carried(reduction, batch, measure, rows))
            return carried

        carried = self._together(first_pass)
        after = RandomState.capture(self.device.torch_device)
        modules = stateful_modules(self.network, self.criterion)
        buffers = capture_buffers(*modules)
        n_patches = self._n_patches(rows)
        gathered = reduction.gather(carried)

        def differentiate() -> tuple[float, Gradients]:
            loss = reduction.loss_of(gathered, n_patches)
            last = carried[-1].tensors if carried else ()
            self.leaves.check(loss, *last, inputs=gathered.inputs)
            return float(loss.detach()), reduction.differentiate(loss, gathered, carried)

        loss, gradients = self._together(differentiate)
        self._together(lambda: self._second_pass(reduction, held, states, carried, gradients))
        after.restore()
        restore_buffers(buffers, *modules)
        return loss, rows

    def _second_pass(
        self,
        reduction: "LossReduction",
        held: Sequence[MicroBatch],
        states: Sequence[RandomState],
        carried: list[Carried],
        gradients: Gradients,
    ) -> None:
        """Compute the gradients of the leaves from those of the carried tensors."""
        if carried:
            # the graph of the last micro-batch is still there
            _backward(carried.pop(), gradients[-1])
        for index, first in enumerate(carried):
            batch = held[index].to(self.device.torch_device)
            states[index].restore()
            second = self._carried(reduction, batch, measure_nothing, [])
            check_replay(first.tensors, second.tensors)
            _backward(second, gradients[index])

    def _carried(
        self, reduction: "LossReduction", batch: MicroBatch, measure: Measure, rows: list[Tensor]
    ) -> Carried:
        with self.device.autocast():
            output = self.network(batch.image)
            rows.append(_measure_output(measure, output, batch.target))
            return reduction.carry(output, batch.target)

    def _on_device(self, index: int, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch on the device; from the second one on, the batch is cut."""
        n_patches, n_targets = len(micro_batch.image), len(micro_batch.target)
        if n_patches == 0 or n_patches != n_targets:
            msg = (
                f"micro-batch {index + 1} of the batch holds {n_patches} patches and {n_targets} "
                "targets; expected one patch at least, and a target for each"
            )
            raise ConfigError(msg)
        batch = micro_batch.to(self.device.torch_device)
        if index == 1 or self.ranks.n_ranks > 1:
            self.independence.check(batch.image, self.device)
        return batch

    def _n_patches(self, rows: Sequence[Tensor]) -> int:
        """Return the number of patches of all ranks."""
        n_patches = int(self.ranks.sum(torch.tensor(sum(map(len, rows)))))
        if n_patches == 0:
            msg = "the batch holds no micro-batch; expected at least one, on one rank at least"
            raise ConfigError(msg)
        return n_patches

    def _together(self, work: Callable[[], Value]) -> Value:
        """Return the result of this rank's work; if memory runs out on any rank, all raise."""
        error: Exception | None = None
        try:
            value = work()
        except (RuntimeError, MemoryError) as caught:
            if not is_out_of_memory(caught):
                raise
            error = caught
        if self.ranks.any(error is not None):
            raise error or torch.OutOfMemoryError("memory ran out on another rank")
        return value


def stateful_modules(network: nn.Module, criterion: Criterion) -> list[nn.Module]:
    """Return the network, and the loss if it is a module, whose buffers a forward pass may change."""
    return [module for module in (network, criterion) if isinstance(module, nn.Module)]


class Gathered(NamedTuple):
    """The tensors that were carried on all ranks."""

    inputs: Sequence[Tensor]
    """The tensors that the loss is computed from, as leaves of its graph."""
    structure: Any = None
    """The output that they belong to, see `structure_of`."""
    target: Tensor = torch.empty(0)
    own: slice = slice(None)
    """The rows that are this rank's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _SumsReduction:
    """Computes the loss of the batch from the sums of each micro-batch."""

    loss: SumsLoss
    scale: Callable[[Tensor], Tensor]
    ranks: Ranks

    def carry(self, output: Output, target: Tensor) -> Carried:
        return Carried((self.loss.sums(output, target),))

    def gather(self, carried: Sequence[Carried]) -> Gathered:
        # the sums of many patches are added in float64: the loss is a ratio of them
        own = [sums.detach().double() for (sums,), _ in carried]
        rows, _ = self.ranks.gather_rows(torch.stack(own) if own else None)
        return Gathered([rows.sum(0).requires_grad_()])

    def loss_of(self, gathered: Gathered, n_patches: int) -> Tensor:
        return check_scalar(self.loss.of_sums(gathered.inputs[0], n_patches), self.loss)

    def differentiate(
        self, loss: Tensor, gathered: Gathered, carried: Sequence[Carried]
    ) -> Gradients:
        (by_sums,) = _derivatives(self.scale(loss), gathered.inputs, self.ranks)
        return [(None if by_sums is None else by_sums.to(sums.dtype),) for (sums,), _ in carried]


@dataclass(frozen=True, kw_only=True, slots=True)
class _OutputsReduction:
    """Computes the loss of the batch from every output with its target."""

    loss: Criterion
    device: Device
    scale: Callable[[Tensor], Tensor]
    ranks: Ranks

    def carry(self, output: Output, target: Tensor) -> Carried:
        tensors = (*tensors_of(output), target)
        for tensor in tensors:
            if tensor.ndim == 0 or len(tensor) != len(target):
                msg = (
                    f"the network returned a tensor of shape {tuple(tensor.shape)} for "
                    f"{len(target)} patches; expected a row for each patch, because the loss is "
                    "computed once for all patches of the batch"
                )
                raise ConfigError(msg)
        return Carried(tensors, structure_of(output))

    def gather(self, carried: Sequence[Carried]) -> Gathered:
        kinds = [(c.structure, [tuple(t.shape[1:]) for t in c.tensors]) for c in carried]
        kinds = [kind for kinds_of_rank in self.ranks.gather(kinds) for kind in kinds_of_rank]
        _check_one_size([shapes for _, shapes in kinds])
        structure, shapes = kinds[0]
        columns = [[c.tensors[index].detach() for c in carried] for index in range(len(shapes))]
        gathered = [self.ranks.gather_rows(torch.cat(c) if c else None) for c in columns]
        *outputs, target = (rows for rows, _ in gathered)
        for tensor in outputs:
            tensor.requires_grad_(tensor.is_floating_point())
        return Gathered(outputs, structure, target, gathered[0][1])

    def loss_of(self, gathered: Gathered, n_patches: int) -> Tensor:
        output = output_from(gathered.structure, gathered.inputs)
        with self.device.autocast():
            return check_scalar(self.loss(output, gathered.target), self.loss)

    def differentiate(
        self, loss: Tensor, gathered: Gathered, carried: Sequence[Carried]
    ) -> Gradients:
        # a loss may use some outputs only, for example those of the finest level
        found = _derivatives(self.scale(loss), gathered.inputs, self.ranks)
        sizes = [len(tensors[-1]) for tensors, _ in carried]
        nothing: list[None] = [None] * len(sizes)
        columns = [nothing if grad is None else grad[gathered.own].split(sizes) for grad in found]
        return list(zip(*columns, nothing, strict=True))


LossReduction: TypeAlias = _SumsReduction | _OutputsReduction


def loss_reduction(
    criterion: Criterion, device: Device, scale: Callable[[Tensor], Tensor], ranks: Ranks
) -> LossReduction:
    """Return the reduction of a loss that takes two passes."""
    if (by_sums := as_sums_loss(criterion)) is not None:
        return _SumsReduction(loss=by_sums, scale=scale, ranks=ranks)
    return _OutputsReduction(loss=criterion, device=device, scale=scale, ranks=ranks)


def _derivatives(loss: Tensor, tensors: Sequence[Tensor], ranks: Ranks) -> list[Tensor | None]:
    """Return the derivatives of a loss, which all ranks compute alike, with respect to the tensors.

    The first rank also adds to the gradients of the other leaves that the loss depends on, such as
    parameters of its own or the weights of the network: the sum over ranks counts them once.
    """
    if ranks.is_first:
        loss.backward()
        return [tensor.grad for tensor in tensors]
    wanted = [tensor for tensor in tensors if tensor.requires_grad]
    found = iter(torch.autograd.grad(loss, wanted, allow_unused=True))
    return [next(found) if tensor.requires_grad else None for tensor in tensors]


def _leaves_of(*tensors: Tensor) -> Iterator[Tensor]:
    """Yield the leaves of the graphs that tensors were computed by."""
    seen: set[Any] = set()
    rest: list[Any] = [tensor.grad_fn for tensor in tensors]
    while rest:
        node = rest.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        if isinstance(leaf := getattr(node, "variable", None), Tensor):
            yield leaf
        rest += [following for following, _ in node.next_functions]


def _check_one_size(shapes: Sequence[Sequence[tuple[int, ...]]]) -> None:
    """Raise `ConfigError` unless the outputs and targets of all micro-batches can be joined."""
    if other := next((found for found in shapes if found != shapes[0]), None):
        msg = (
            f"the batch holds outputs and targets of {list(shapes[0])} and of {list(other)} for each "
            "patch: a loss that is computed once for all patches needs patches of one size. Use one "
            "size, or a loss that declares how it reduces over patches, see training.losses."
        )
        raise ConfigError(msg)


def _backward(carried: Carried, gradients: Sequence[Tensor | None]) -> None:
    """Propagate the derivatives with respect to the carried tensors that have one."""
    pairs = [
        (tensor, gradient)
        for tensor, gradient in zip(carried.tensors, gradients, strict=True)
        if gradient is not None and tensor.requires_grad
    ]
    if pairs:
        torch.autograd.backward(
            [tensor for tensor, _ in pairs], [gradient for _, gradient in pairs]
        )


def _measure_output(measure: Measure, output: Output, target: Tensor) -> Tensor:
    with torch.no_grad():
        return measure(output, target)


def _check_per_patch(losses: Tensor, n_patches: int) -> None:
    if losses.shape != (n_patches,):
        msg = (
            f"the loss declares reduces = 'patches', but returned the shape {tuple(losses.shape)} "
            f"for {n_patches} patches; expected ({n_patches},)"
        )
        raise ConfigError(msg)
