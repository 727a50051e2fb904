"""Compute the gradient of an effective batch from its micro-batches, equal to that of the whole batch.

The number of passes depends on the loss (see `losses.reduction_of`), `BatchGradient` says how. The idea
of the second pass is that of Gao 2021 (arXiv 2101.06983), there for contrastive losses. Only one graph
exists at a time; the device holds one micro-batch at a time, whatever the effective batch, and the
outputs of all if the loss is neither a mean over patches nor a function of sums.

N patches, C channels, R regions, X Y Z voxels.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import Tensor, nn

from brats_seg.errors import ConfigError
from brats_seg.models import interface
from brats_seg.runtime.device import Device, widest_dtype
from brats_seg.runtime.memory import is_out_of_memory
from brats_seg.training import losses
from brats_seg.training.independence import PassState, PatchIndependence, check_replay
from brats_seg.training.ranks import Ranks

Value = TypeVar("Value")
Scale: TypeAlias = Callable[[Tensor], Tensor]
"""Multiplies a loss before the backward pass, so that float16 gradients do not underflow."""
Note: TypeAlias = Callable[[losses.Output, Tensor], object]
"""Is given the output and the target of a micro-batch, without a graph."""


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
    """What the loss of the batch is computed from, of one micro-batch."""

    tensors: tuple[Tensor, ...]
    """Outputs, or sums over patches."""
    structure: Any = None
    """The output that the tensors belong to, see `interface.structure_of`."""
    target: Tensor = torch.empty(0)

    def as_inputs(self) -> "Carried":
        """Return the same values as leaves of a new graph, that of the loss of the batch."""
        tensors = tuple(t.detach().requires_grad_(t.is_floating_point()) for t in self.tensors)
        return self._replace(tensors=tensors)

    def on_host(self) -> "Carried":
        """Return the values on the host, without a graph."""
        tensors = tuple(tensor.detach().cpu() for tensor in self.tensors)
        return self._replace(tensors=tensors, target=self.target.cpu())


class FirstPass(NamedTuple):
    """The first forward pass of a micro-batch, and what its second one needs."""

    micro_batch: MicroBatch
    before: PassState
    """The random state that the pass began with."""
    carried: Carried
    inputs: Carried
    """What was carried, as leaves that the loss of the batch is computed from."""


class Leaves:
    """The tensors that the gradient of a batch belongs to: what network, loss and optimizer hold."""

    def __init__(
        self, network: nn.Module, criterion: losses.Criterion, optimizer: torch.optim.Optimizer
    ) -> None:
        self.network, self.criterion = network, criterion
        self.modules = [part for part in (network, criterion) if isinstance(part, nn.Module)]
        """The network, and the loss if it is a module, whose buffers a forward pass may change."""
        self._optimizer = optimizer
        self.is_checked = False
        """Whether a loss has passed `check`."""

    @property
    def updated(self) -> list[Tensor]:
        """The tensors that the optimizer updates."""
        return [tensor for group in self._optimizer.param_groups for tensor in group["params"]]

    @property
    def all(self) -> list[Tensor]:
        """Every tensor that requires a gradient, each once."""
        held = (parameter for module in self.modules for parameter in module.parameters())
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

    def check(self, loss: Tensor, passes: Sequence[FirstPass] = ()) -> None:
        """Check, the first time, that all leaves that a loss depends on are parameters.

        Args:
            loss: The loss, or losses of patches.
            passes: Passes whose inputs it is computed from; their graphs are a part of its graph.
        """
        if not loss.requires_grad:
            msg = "the loss depends neither on the output of the network nor on any other parameter"
            raise ConfigError(msg)
        if self.is_checked:
            return
        held = {*self.all, *(tensor for first in passes for tensor in first.inputs.tensors)}
        carried = (tensor for first in passes for tensor in first.carried.tensors)
        unknown = [leaf for leaf in _find_leaves(loss, *carried) if leaf not in held]
        if unknown:
            msg = f"the loss depends on a tensor of shape {tuple(unknown[0].shape)} that requires a gradient, and nothing holds it: make it a parameter, or detach it"
            raise ConfigError(msg)
        self.is_checked = True


class BatchGradient:
    """Computes the gradient of a batch that is given as micro-batches.

    - A mean over patches takes one pass: the gradients of all patches are added, and the sum is
      divided by the number of patches in the batch.
    - A function of sums over patches (batch Dice) takes two: the first adds up the sums, the second
      propagates the derivative of the loss with respect to them.
    - Any other loss takes two as well: the first keeps the outputs, the loss is computed once for the
      whole batch, and the second propagates its derivative with respect to each output.

    The graph of the last micro-batch of a first pass is kept for the second, so n micro-batches take
    2n - 1 forward passes at most. A loss may depend on more than the outputs: on parameters of its own,
    or on the weights of the network. In one pass these gradients are divided by the patches like all
    others; in two, they come from the one computation of the loss, on the first rank only.
    """

    def __init__(self, leaves: Leaves, device: Device, ranks: Ranks, n_at_once: int) -> None:
        """Compute with the network and the loss of the leaves.

        Args:
            leaves: The tensors that the gradient belongs to.
            device: Device and precision.
            ranks: The processes that share each batch.
            n_at_once: Micro-batches that a mean over patches computes at the same time, each in a thread.
        """
        self.leaves, self.network, self.criterion = leaves, leaves.network, leaves.criterion
        self.device, self.ranks, self.n_at_once = device, ranks, n_at_once
        self.independence = PatchIndependence(leaves.network)

    def make(
        self, micro_batches: Iterable[MicroBatch], measure: losses.Measure, scale: Scale
    ) -> tuple[float, Tensor]:
        """Add this rank's part of the gradient to the leaves; return loss and measurements.

        The loss is that of the patches of all ranks, and what is measured is this rank's. The sum of
        the ranks' gradients is the gradient of that loss.
        """
        rows: list[Tensor] = []
        is_mean = losses.reduction_of(self.criterion) == "patches"
        make = self._one_pass if is_mean else self._two_passes
        loss = make(micro_batches, lambda *pair: rows.append(measure(*pair)), scale)
        return loss, torch.cat(rows) if rows else torch.empty(0)

    def _one_pass(self, micro_batches: Iterable[MicroBatch], note: Note, scale: Scale) -> float:
        rows = self._together(lambda: [*self._differentiate(micro_batches, note, scale)])
        n_patches = self._sum_patches(sum(n for _, n in rows))
        self.leaves.divide_gradients(n_patches)
        total = sum((loss for loss, _ in rows), torch.zeros((), device=self.device.torch_device))
        return float(self.ranks.sum(torch.tensor(float(total), dtype=torch.float64))) / n_patches

    def _differentiate(
        self, micro_batches: Iterable[MicroBatch], note: Note, scale: Scale
    ) -> Iterator[tuple[Tensor, int]]:
        """Add the gradient of each micro-batch to the leaves; yield its loss and number of patches."""
        batches = (self._on_device(index, batch) for index, batch in enumerate(micro_batches))
        # activation checkpointing was set because memory ran out; the first loss is checked below
        mode = getattr(self.network, "checkpointing", interface.ActivationCheckpointing.NONE)
        is_simple = self.leaves.is_checked and mode is interface.ActivationCheckpointing.NONE
        if self.n_at_once > 1 and is_simple:
            # a list, because no probe of the network may run beside a thread
            yield from self._in_threads(list(batches), note, scale)
            return
        for batch in batches:
            by_patch = self._losses(batch, note)
            self.leaves.check(by_patch)
            loss = by_patch.sum()
            scale(loss).backward()
            yield loss.detach(), len(batch.image)

    def _in_threads(
        self, batches: Iterable[MicroBatch], note: Note, scale: Scale
    ) -> Iterator[tuple[Tensor, int]]:
        """As `_differentiate`, several at once; their gradients are added in order, so no bit differs."""
        leaves = self.leaves.all

        def differentiate(batch: MicroBatch) -> tuple[Any, ...]:
            noted: list[Any] = []
            loss = self._losses(batch, lambda *pair: noted.extend(pair)).sum()
            gradients = torch.autograd.grad(scale(loss), leaves, allow_unused=True)
            return loss.detach(), len(batch.image), noted, gradients

        one_thread = partial(torch.set_num_threads, 1)
        with ThreadPoolExecutor(self.n_at_once, initializer=one_thread) as pool:
            for loss, n_patches, noted, gradients in pool.map(differentiate, batches):
                with torch.no_grad():
                    note(*noted)
                for leaf, gradient in zip(leaves, gradients, strict=True):
                    if gradient is not None:
                        leaf.grad = gradient if leaf.grad is None else leaf.grad.add_(gradient)
                yield loss, n_patches

    def _losses(self, batch: MicroBatch, note: Note) -> Tensor:
        by_patch, n_patches = self._forward(batch, self.criterion, note), len(batch.image)
        if by_patch.shape != (n_patches,):
            shape = tuple(by_patch.shape)
            msg = f"the loss declares reduces = 'patches': found the shape {shape}; expected ({n_patches},)"
            raise ConfigError(msg)
        return by_patch

    def _two_passes(self, micro_batches: Iterable[MicroBatch], note: Note, scale: Scale) -> float:
        passes = self._together(lambda: self._first_passes([*micro_batches], note))
        after = PassState.capture(self.device.torch_device, *self.leaves.modules)
        n_patches = self._sum_patches(sum(len(first.micro_batch.image) for first in passes))
        everyone = self._gather([first.inputs for first in passes])
        loss = self._together(lambda: self._differentiate_loss(everyone, n_patches, passes, scale))
        self._together(lambda: self._second_passes(passes))
        after.restore()
        return loss

    def _first_passes(self, micro_batches: Sequence[MicroBatch], note: Note) -> list[FirstPass]:
        """Return what each micro-batch carries; the graph of the last one is kept."""
        passes = []
        for index, micro_batch in enumerate(micro_batches):
            batch = self._on_device(index, micro_batch)
            before = PassState.capture(self.device.torch_device)
            with torch.set_grad_enabled(index == len(micro_batches) - 1):
                carried = self._forward(batch, self._carry, note)
            passes.append(FirstPass(micro_batch, before, carried, carried.as_inputs()))
        return passes

    def _differentiate_loss(
        self, everyone: list[Carried], n_patches: int, passes: list[FirstPass], scale: Scale
    ) -> float:
        """Return the loss of the batch; add its derivatives to the inputs of this rank."""
        loss = self._batch_loss(everyone, n_patches)
        inputs = [t for first in passes for t in first.inputs.tensors if t.requires_grad]
        # a rank without patches has no inputs
        if passes or (self.ranks.is_first and loss.requires_grad):
            self.leaves.check(loss, passes)
            # the first rank alone adds to the gradients of parameters that the loss depends on
            scale(loss).backward(inputs=None if self.ranks.is_first else inputs)
        return float(loss.detach())

    def _second_passes(self, passes: list[FirstPass]) -> None:
        """Propagate the derivatives with respect to the inputs to the leaves, in another pass of each."""
        if passes:
            # the graph of the last micro-batch is still there
            *_, carried, inputs = passes.pop()
            _backward(carried, inputs)
        for micro_batch, before, carried, inputs in passes:
            before.restore()
            batch = micro_batch.to(self.device.torch_device)
            again = self._forward(batch, self._carry, losses.measure_nothing)
            check_replay(carried.tensors, again.tensors)
            _backward(again, inputs)

    def _carry(self, output: losses.Output, target: Tensor) -> Carried:
        """Return what the loss of the batch is computed from: sums, or outputs and targets."""
        if (by_sums := losses.as_sums_loss(self.criterion)) is not None:
            return Carried((by_sums.sums(output, target),))
        tensors = interface.tensors_of(output)
        for shape in (tuple(tensor.shape) for tensor in tensors):
            if shape[:1] != (len(target),):
                msg = f"found a tensor of shape {shape} for {len(target)} patches; expected a row for each"
                raise ConfigError(msg)
        return Carried(tensors, interface.structure_of(output), target)

    def _batch_loss(self, carried: Sequence[Carried], n_patches: int) -> Tensor:
        """Return the loss of the batch, from what all its micro-batches have carried."""
        device = self.device.torch_device
        if (by_sums := losses.as_sums_loss(self.criterion)) is not None:
            # the sums of many patches are added in float64 where there is one: the loss is a ratio of them
            parts = [item.tensors[0].to(device, widest_dtype(device)) for item in carried]
            sums = torch.stack(parts).sum(0)
            return losses.check_scalar(by_sums.of_sums(sums, n_patches), self.criterion)
        rows = [[tensor.to(device) for tensor in (*item.tensors, item.target)] for item in carried]
        _check_one_size([[tuple(tensor.shape[1:]) for tensor in row] for row in rows])
        *outputs, target = map(torch.cat, zip(*rows, strict=True))
        output = interface.output_from(carried[0].structure, outputs)
        with self.device.autocast():
            return losses.check_scalar(self.criterion(output, target), self.criterion)

    def _forward(
        self, batch: MicroBatch, compute: Callable[[losses.Output, Tensor], Value], note: Note
    ) -> Value:
        """Return what is computed from the output, holding nothing else of the forward pass."""
        with self.device.autocast():
            output = self.network(batch.image)
            result = compute(output, batch.target)
        with torch.no_grad():
            note(output, batch.target)
        return result

    def _gather(self, inputs: list[Carried]) -> list[Carried]:
        """Return the inputs of all ranks, on the host but for those of this one, which gradients reach."""
        if self.ranks.n_ranks == 1:
            return inputs
        shares = self.ranks.gather([item.on_host() for item in inputs])
        shares[self.ranks.rank] = inputs
        return [item for share in shares for item in share]

    def _on_device(self, index: int, micro_batch: MicroBatch) -> MicroBatch:
        """Return a micro-batch on the device; from the second one on, the batch is cut."""
        n_patches, n_targets = len(micro_batch.image), len(micro_batch.target)
        if n_patches == 0 or n_patches != n_targets:
            problem = f"micro-batch {index + 1} of the batch holds {n_patches} patches and {n_targets} targets"
            msg = f"{problem}; expected one patch at least, and a target for each"
            raise ConfigError(msg)
        batch = micro_batch.to(self.device.torch_device)
        if index == 1 or self.ranks.n_ranks > 1:
            self.independence.check(batch.image, self.device)
        return batch

    def _sum_patches(self, n_patches: int) -> int:
        """Return the number of patches of all ranks."""
        n_patches = int(self.ranks.sum(torch.tensor(n_patches)))
        if n_patches == 0:
            msg = "the batch holds no micro-batch; expected at least one, on one rank at least"
            raise ConfigError(msg)
        return n_patches

    def _together(self, function: Callable[[], Value]) -> Value:
        """Return the result of this rank's work; if memory runs out on any rank, all raise."""
        error: Exception | None = None
        try:
            value = function()
        except (RuntimeError, MemoryError) as caught:
            if not is_out_of_memory(caught):
                raise
            error = caught
        if self.ranks.any(error is not None):
            raise error or torch.OutOfMemoryError("memory ran out on another rank")
        return value


def _find_leaves(*tensors: Tensor) -> Iterator[Tensor]:
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
    if other := next((row for row in shapes if row != shapes[0]), None):
        advice = "use patches of one size, or a loss that declares how it reduces over patches"
        msg = f"the batch holds outputs and targets of {list(shapes[0])} and of {list(other)}: {advice}"
        raise ConfigError(msg)


def _backward(carried: Carried, inputs: Carried) -> None:
    """Propagate the derivatives with respect to the carried tensors that have one."""
    pairs = [
        (tensor, leaf.grad)
        for tensor, leaf in zip(carried.tensors, inputs.tensors, strict=True)
        if leaf.grad is not None and tensor.requires_grad
    ]
    if pairs:
        tensors, gradients = zip(*pairs, strict=True)
        torch.autograd.backward(tensors, gradients)
