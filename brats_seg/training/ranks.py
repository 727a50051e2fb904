"""Exchange values and gradients between the processes of one run, one per device.

`torchrun` starts the processes and sets their number in the environment; without it a run has one
process, and nothing is exchanged. Gradients are not averaged by torch's DDP: ranks hold
unequal shares of a batch, and a loss of sums needs the sums of all ranks between its two passes, so
the one exchange of gradients that a batch needs is made here.
"""

import importlib
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, distributed, nn

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.runtime.device import use_gpu

Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ranks:
    """Index of this process, and number of processes of the run."""

    rank: int = 0
    n_ranks: int = 1

    @property
    def is_first(self) -> bool:
        """Whether this is the process that writes files and logs."""
        return self.rank == 0

    def share(self, items: Sequence[Item]) -> Sequence[Item]:
        """Return this rank's part of the items; the parts of all ranks in their order are `items`."""
        start, stop = (len(items) * rank // self.n_ranks for rank in (self.rank, self.rank + 1))
        return items[start:stop]

    def sum(self, tensor: Tensor) -> Tensor:
        """Return the sum over ranks."""
        if self.n_ranks == 1:
            return tensor
        total = tensor.clone()
        distributed.all_reduce(total)
        return total

    def any(self, flag: bool) -> bool:
        """Return whether the flag is set on any rank."""
        return bool(self.sum(torch.tensor(float(flag))))

    def gather(self, value: Item) -> list[Item]:
        """Return the value of every rank, in their order."""
        if self.n_ranks == 1:
            return [value]
        values: list[Any] = [None] * self.n_ranks
        distributed.all_gather_object(values, value)
        return values

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace the gradient of each parameter by its sum over ranks, in one exchange."""
        if self.n_ranks == 1:
            return
        has_gradient = [p.grad is not None for p in parameters]
        flags = torch.tensor(has_gradient, device=parameters[0].device, dtype=parameters[0].dtype)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in parameters]
        bucket = torch.cat([flags, *(gradient.flatten() for gradient in gradients)])
        distributed.all_reduce(bucket)
        used, *sums = bucket.split([len(parameters), *(p.numel() for p in parameters)])
        for parameter, is_used, total in zip(parameters, used.tolist(), sums, strict=True):
            # a parameter that no rank used keeps no gradient, as in one process
            parameter.grad = total.view_as(parameter).to(parameter) if is_used else None

    def broadcast(self, *modules: nn.Module) -> None:
        """Give every rank the weights and buffers of the first."""
        if self.n_ranks > 1:
            for tensor in (t for module in modules for t in module.state_dict().values()):
                distributed.broadcast(tensor, 0)

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block on the first rank while the others wait, then on the others."""
        if not self.is_first:
            distributed.barrier()
        yield
        if self.is_first and self.n_ranks > 1:
            distributed.barrier()


def world_size() -> str:
    """Return how many processes `torchrun` started together, as it writes it; `1` without it."""
    return os.environ.get("WORLD_SIZE") or "1"


def check_one_process(command: str) -> None:
    """Raise `UsageError` under `torchrun`, whose processes share the work of `train` alone."""
    if world_size() != "1":
        msg = f"{command} is one process: `train` each fold under torchrun, then start {command} alone, which keeps the runs"
        raise UsageError(msg)


@contextmanager
def joined_ranks(device: str = "auto") -> Iterator[Ranks]:
    """Join the processes that `torchrun` started together; all but the first log errors only.

    Without `torchrun` there is one rank. Each takes another GPU, unless the device is the CPU.
    """
    n_ranks = world_size()
    if n_ranks == "1":
        yield Ranks()
        return
    # The first step of an optimizer imports this module, which keeps a group that exists then alive
    # for ever. Its threads would still run when Python ends, and abort the process now and then.
    importlib.import_module("torch._dynamo")
    try:
        on_gpus = device != "cpu" and use_gpu(int(os.environ.get("LOCAL_RANK", "0")))
        # NCCL takes no tensors of the CPU; the first process may prepare cases for hours
        backend = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        distributed.init_process_group(backend, timeout=timedelta(days=1))
    except ValueError as error:  # of a variable that `torchrun` sets
        msg = f"WORLD_SIZE is {n_ranks}: {error}. Start the processes with torchrun, or unset WORLD_SIZE"
        raise EnvironmentalError(msg) from None
    log = logging.getLogger("brats_seg")
    level = log.level
    ranks = Ranks(rank=distributed.get_rank(), n_ranks=int(n_ranks))
    if not ranks.is_first:
        log.setLevel(logging.ERROR)
    try:
        yield ranks
    except RuntimeError as error:
        # gloo has no error of its own
        if not (isinstance(error, distributed.DistError) or "gloo" in str(error)):
            raise
        # the first sentence, which general advice follows
        msg = f"another process has ended, and may say why: {str(error).partition('. ')[0]}. Start the same command again."
        raise EnvironmentalError(msg) from error
    finally:
        log.setLevel(level)
        distributed.destroy_process_group()
