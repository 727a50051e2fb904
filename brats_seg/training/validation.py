"""Score a network on held-out cases during training: whole cases, or patches between those."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeAlias

import torch
from torch import Tensor, nn

from brats_seg.config import Size
from brats_seg.data.loader import PatchKey, Sample, whole_case
from brats_seg.errors import EnvironmentalError
from brats_seg.models.build import size_words
from brats_seg.models.interface import as_output
from brats_seg.progress import part
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import Fallback
from brats_seg.runtime.windows import n_windows, predict_logits
from brats_seg.training.batches import held_out_patches
from brats_seg.training.losses import whole_loss
from brats_seg.training.run_plan import RunPlan
from brats_seg.training.tasks import RunningSums

Predict: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
"""Maps an image `(4, X, Y, Z)` to the output of a network, such as logits `(3, X, Y, Z)`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Validation:
    """The samples that an epoch is validated on, and how they are computed."""

    samples: Iterator[Sample]
    n_samples: int
    predict: Predict


def validation_of(
    plan: RunPlan, case_ids: Sequence[str], epoch: int, n_epochs: int | None
) -> Validation | None:
    """Return the validation of an epoch: of whole cases, of patches between those, or None."""
    if plan.is_validated(epoch, n_epochs):
        cases = (whole_case(plan.data.folder, one, plan.task.target_of) for one in case_ids)
        return Validation(samples=cases, n_samples=len(case_ids), predict=case_predictor(plan))
    if not plan.config.validation.patches_between:
        return None
    keys = [
        PatchKey(epoch=epoch, case_id=case_id, draw=draw)
        for case_id in case_ids
        for draw in range(plan.config.patch.per_case)
    ]
    patches = held_out_patches(plan, keys)
    predict = partial(_patch_logits, plan.device)
    return Validation(samples=patches, n_samples=len(keys), predict=predict)


def validate(
    network: nn.Module, plan: RunPlan, samples: Iterable[Sample], predict: Predict
) -> RunningSums:
    """Return the sums of the losses and measurements of patches or whole cases."""
    sums, device = RunningSums(), plan.device.torch_device
    network.eval()
    with torch.inference_mode():
        for sample in samples:
            output = predict(network, sample.image)[None].to(device)
            target = sample.target[None].to(device).float()
            sums.loss_sum += float(whole_loss(plan.task.criterion, output, target))
            sums.n_patches += 1
            sums.add(sample.case_id, plan.task.measure(output, target)[0].tolist())
    network.train()
    return sums


def case_predictor(plan: RunPlan) -> Predict:
    """Return a function that computes the logits of a whole case, in the windows of prediction.

    A network that was trained on whole brain crops gets the crop in one window. If memory runs out,
    the windows become training patches, which have fitted in training.
    """
    modes = ["the windows of prediction"]
    if plan.config.patch.size != "whole":
        modes.append(f"windows of {size_words(plan.patch)}")
    fallback = Fallback(modes, plan.device.torch_device, EnvironmentalError, what="validation: ")

    def predict(network: nn.Module, image: Tensor) -> Tensor:
        x, y, z = plan.window((image.shape[1], image.shape[2], image.shape[3]))
        if fallback.index:
            x, y, z = map(min, (x, y, z), plan.patch)
        return _case_logits(plan, (x, y, z), network, image)

    return lambda network, image: fallback.run(lambda _: predict(network, image))


def _patch_logits(device: Device, network: nn.Module, image: Tensor) -> Tensor:
    with device.autocast():
        return as_output(network(image[None].to(device.torch_device).float())).logits[0][0]


def _case_logits(plan: RunPlan, window: Size, network: nn.Module, image: Tensor) -> Tensor:
    overlap, device = plan.config.validation.overlap, plan.device
    with part("windows", n_windows(image.shape[1:], window, overlap)) as after_window:

        def window_logits(voxels: Tensor) -> Tensor:
            with device.autocast():
                logits = as_output(network(voxels)).logits[0]
            after_window()
            return logits

        whole = image.to(device.torch_device).float()
        return predict_logits(window_logits, whole, window=window, overlap=overlap)
