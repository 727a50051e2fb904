"""Compare the weights after an epoch of gradient accumulation with those of whole batches.

Ten patches at an effective batch of four make batches of 4, 4 and 2. Each method gets them one
patch at a time, in order, with plain SGD, from weights that Adam has trained for a while: at random
weights all patches look alike, and the error is small. The radii of tumours grow fourfold, and four
patches in ten lack enhancing tumour. It prints ||theta - whole|| / ||whole - start||: the distance
of the weights from those of whole batches, as a share of the distance that these have moved.

The other frameworks need an environment of their own, because they may change the version of torch:

    python -m venv peers
    peers/bin/pip install -c constraints.txt . lightning accelerate pytorch-ignite
    peers/bin/python benchmarks/accumulation_error.py

Frameworks that are missing are listed as not installed.
"""

import logging
import warnings
from collections.abc import Callable, Iterator
from copy import deepcopy
from dataclasses import dataclass
from functools import partial

import torch
from comparison import options_of
from machine import version_of
from monai.networks.nets import UNet
from torch import Tensor, nn
from torch.nn.utils import parameters_to_vector
from torch.utils.data import DataLoader

from brats_seg.config import LossConfig
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import BatchDiceBce, Criterion, DiceBce, whole_loss

N_PATCHES, EFFECTIVE_BATCH = 10, 4
LR = 0.03
"""Learning rate. At a lower one, steps would vanish in the rounding of float32."""
CRITERIA: dict[str, Criterion] = {
    "BCE": DiceBce(LossConfig(dice=0)),
    "patch Dice + BCE": DiceBce(),
    "batch Dice + BCE": BatchDiceBce(),
}
PACKAGES = ("torch", "lightning", "accelerate", "monai", "pytorch-ignite")


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """Network, optimizer, loss and patches that every method is given."""

    network: nn.Module
    optimizer: torch.optim.Optimizer
    criterion: Criterion
    patches: MicroBatch

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss of a batch, a scalar."""
        return whole_loss(self.criterion, output, target)

    def batches(self, size: int) -> Iterator[MicroBatch]:
        """Yield the patches in batches of a size; the last may be smaller."""
        parts = (part.split(size) for part in (self.patches.image, self.patches.target))
        return (MicroBatch(*pair) for pair in zip(*parts, strict=True))

    def micro_batches(self) -> Iterator[list[MicroBatch]]:
        """Yield the micro-batches of each effective batch."""
        for batch in self.batches(EFFECTIVE_BATCH):
            parts = zip(batch.image.split(1), batch.target.split(1), strict=True)
            yield [MicroBatch(*pair) for pair in parts]

    def loader(self) -> DataLoader[tuple[Tensor, Tensor]]:
        """Return a loader of single patches, for frameworks."""
        return DataLoader(list(zip(self.patches.image, self.patches.target, strict=True)))


Way = Callable[[Epoch], None]


def main() -> None:
    """Print a table for each precision."""
    arguments = options_of(__doc__, size=24, warm_steps=150)
    torch.set_num_threads(1)
    # the other frameworks log a lot
    warnings.simplefilter("ignore")
    logging.disable(logging.WARNING)
    print(", ".join(f"{package} {version_of(package)}" for package in PACKAGES))
    patches = phantom_patches(N_PATCHES, (arguments.size,) * 3)
    network = _warm(patches, arguments.warm_steps)
    for dtype in (torch.float32, torch.float64):
        start = deepcopy(network).to(dtype)
        images = MicroBatch(patches.image.to(dtype), patches.target.to(dtype))
        print(f"\n{dtype}, {arguments.size}^3, {arguments.warm_steps} steps of Adam before")
        print(f"{'':34}  steps  {'  '.join(f'{name:>16}' for name in CRITERIA)}")
        for name, way in WAYS.items():
            cells = [_cell(way, start, criterion, images) for criterion in CRITERIA.values()]
            n_steps = cells[0][0]
            print(f"{name:34}  {n_steps:>5}  {'  '.join(f'{text:>16}' for _, text in cells)}")


def ours(epoch: Epoch) -> None:
    """Give each batch to the accumulator."""
    accumulator = Accumulator(epoch.network, epoch.criterion, epoch.optimizer)
    for batch in epoch.micro_batches():
        accumulator.step(batch)


def whole_batch(epoch: Epoch) -> None:
    """Compute each batch in one forward pass, as the reference."""
    for part in epoch.batches(EFFECTIVE_BATCH):
        epoch.optimizer.zero_grad()
        epoch.loss(epoch.network(part.image), part.target).backward()
        epoch.optimizer.step()


def loop(epoch: Epoch, *, divide_by: int = 0, drop_tail: bool = False) -> None:
    """Divide by a number, or by the patches in the batch, and step; or not after the short last batch."""
    for batch in epoch.micro_batches():
        for part in batch:
            loss = epoch.loss(epoch.network(part.image), part.target)
            (loss / (divide_by or len(batch))).backward()
        if len(batch) == EFFECTIVE_BATCH or not drop_tail:
            epoch.optimizer.step()
            epoch.optimizer.zero_grad()


def lightning(epoch: Epoch) -> None:
    """Lightning's `accumulate_grad_batches`."""
    import lightning

    class Module(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.network = epoch.network

        def training_step(self, batch: list[Tensor]) -> Tensor:
            image, target = batch
            return epoch.loss(self.network(image), target)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return epoch.optimizer

    trainer = lightning.Trainer(
        accelerator="cpu", max_epochs=1, accumulate_grad_batches=EFFECTIVE_BATCH, barebones=True
    )
    trainer.fit(Module(), epoch.loader())


def accelerate(epoch: Epoch) -> None:
    """Accelerate's `accumulate`."""
    from accelerate import Accelerator

    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=EFFECTIVE_BATCH)
    network, optimizer, loader = accelerator.prepare(epoch.network, epoch.optimizer, epoch.loader())
    for image, target in loader:
        with accelerator.accumulate(network):
            accelerator.backward(epoch.loss(network(image), target))
            optimizer.step()
            optimizer.zero_grad()


def monai(epoch: Epoch) -> None:
    """MONAI's `SupervisedTrainer`."""
    import ignite  # noqa: F401  # MONAI's engines fail without it, and only when they are made
    from monai.engines import SupervisedTrainer

    loader = [{"image": part.image, "label": part.target} for part in epoch.batches(1)]
    SupervisedTrainer(
        device=torch.device("cpu"),
        max_epochs=1,
        train_data_loader=loader,
        network=epoch.network,
        optimizer=epoch.optimizer,
        loss_function=epoch.loss,
        accumulation_steps=EFFECTIVE_BATCH,
        decollate=False,
    ).run()


WAYS: dict[str, Way] = {
    "ours": ours,
    "loop, / effective, tail dropped": partial(loop, divide_by=EFFECTIVE_BATCH, drop_tail=True),
    "loop, / effective, tail stepped": partial(loop, divide_by=EFFECTIVE_BATCH),
    "loop, / patches in the batch": loop,
    "Lightning": lightning,
    "Accelerate": accelerate,
    "MONAI SupervisedTrainer": monai,
}


def _warm(patches: MicroBatch, n_steps: int) -> nn.Module:
    torch.manual_seed(0)
    network = UNet(
        spatial_dims=3, in_channels=4, out_channels=3, channels=(8, 16, 32), strides=(2, 2)
    )
    optimizer = torch.optim.Adam(network.parameters(), lr=0.01)
    for step in range(n_steps):
        which = slice(step % N_PATCHES, step % N_PATCHES + 1)
        optimizer.zero_grad()
        whole_loss(DiceBce(), network(patches.image[which]), patches.target[which]).backward()
        optimizer.step()
    return network


def _cell(way: Way, start: nn.Module, criterion: Criterion, patches: MicroBatch) -> tuple[str, str]:
    """Return the number of optimizer steps of a method, and the error of its weights."""
    begin = parameters_to_vector(start.parameters()).detach()
    wanted, _ = _end(whole_batch, start, criterion, patches)
    try:
        found, n_steps = _end(way, start, criterion, patches)
    except ImportError:
        return "", "not installed"
    error = (found - wanted).norm() / (wanted - begin).norm()
    return str(n_steps), f"{float(error):.1e}"


def _end(
    way: Way, start: nn.Module, criterion: Criterion, patches: MicroBatch
) -> tuple[Tensor, int]:
    """Return the weights after an epoch, and the number of optimizer steps."""
    network = deepcopy(start)
    optimizer = torch.optim.SGD(network.parameters(), lr=LR)
    steps: list[None] = []
    optimizer.register_step_post_hook(lambda *_: steps.append(None))
    way(Epoch(network=network, optimizer=optimizer, criterion=criterion, patches=patches))
    return parameters_to_vector(network.parameters()).detach(), len(steps)


if __name__ == "__main__":
    main()
