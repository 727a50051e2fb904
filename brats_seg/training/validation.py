"""Score a network on held-out cases during training."""

import logging
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

import torch
from torch import Tensor, nn

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import Sample, whole_case
from brats_seg.data.patches import PatchKey
from brats_seg.models.build import size_words
from brats_seg.models.interface import as_output
from brats_seg.progress import part
from brats_seg.runtime.device import Device
from brats_seg.runtime.memory import give_back_memory, is_out_of_memory
from brats_seg.runtime.windows import n_windows, predict_logits
from brats_seg.training.epoch import held_out_patches, patch_shape, validation_window
from brats_seg.training.losses import whole_loss
from brats_seg.training.tasks import RunningSums, Task, task_of
from brats_seg.training.validation_interval import is_validated_whole
from brats_seg.voxels.box import Triple

log = logging.getLogger(__name__)

Predict: TypeAlias = Callable[[nn.Module, Tensor], Tensor]
"""Maps an image `(4, X, Y, Z)` to the output of a network, such as logits `(3, X, Y, Z)`."""


def validate(
    network: nn.Module,
    task: Task,
    samples: Iterable[Sample],
    device: Device,
    predict: Predict,
) -> RunningSums:
    """Return the sums of the losses and measurements of samples.

    Args:
        network: Network to score.
        task: Its loss and measurements.
        samples: Patches or whole cases.
        device: Device of the network.
        predict: Returns the output for a sample.
    """
    sums = RunningSums()
    network.eval()
    with torch.inference_mode():
        for sample in samples:
            predicted = predict(network, sample.image)
            target = sample.target[None].to(device.torch_device).float()
            output = predicted[None].to(device.torch_device)
            sums.loss_sum += float(whole_loss(task.criterion, output, target))
            sums.n_patches += 1
            sums.add(sample.case_id, task.measure(output, target)[0].tolist())
    network.train()
    return sums


@dataclass(frozen=True, kw_only=True, slots=True)
class ValidationPlan:
    """The samples that an epoch is validated on."""

    samples: Iterator[Sample]
    n_samples: int
    predict: Predict


def plan_validation(
    data: FoldData, config: Config, case_ids: Sequence[str], epoch: int, device: Device, every: int
) -> ValidationPlan | None:
    """Return the samples that an epoch is validated on, or None if it is not.

    They are whole cases after `every` epochs (see `validation_interval`) and in the last epoch, and
    patches in the others if `validation.patches_between` is set.
    """
    if is_validated_whole(config, every, epoch):
        target_of = task_of(config).target_of
        return ValidationPlan(
            samples=(whole_case(data.folder, case_id, target_of) for case_id in case_ids),
            n_samples=len(case_ids),
            predict=case_predictor(config, device, patch_shape(config, data)),
        )
    if not config.validation.patches_between:
        return None
    keys = [
        PatchKey(epoch=epoch, case_id=case_id, draw=draw)
        for case_id in case_ids
        for draw in range(config.patch.per_case)
    ]
    return ValidationPlan(
        samples=held_out_patches(data, config, keys, device),
        n_samples=len(keys),
        predict=patch_predictor(device),
    )


def patch_predictor(device: Device) -> Predict:
    """Return a function that computes the logits of a patch."""

    def predict(network: nn.Module, image: Tensor) -> Tensor:
        with device.autocast():
            return as_output(network(image[None].to(device.torch_device).float())).logits[0][0]

    return predict


def case_predictor(config: Config, device: Device, patch: Triple) -> Predict:
    """Return a function that computes the logits of a whole case, in the windows of prediction.

    A network that was trained on whole brain crops gets the crop in one window. If memory runs out,
    the windows become training patches, which have fitted in training; a line of the log says so.
    """
    has_less = False

    def logits_in(window: Triple, network: nn.Module, image: Tensor) -> Tensor:
        overlap = config.validation.overlap
        with part("windows", n_windows(image.shape[1:], window, overlap)) as after_window:

            def window_logits(voxels: Tensor) -> Tensor:
                with device.autocast():
                    logits = as_output(network(voxels)).logits[0]
                after_window()
                return logits

            whole = image.to(device.torch_device).float()
            return predict_logits(window_logits, whole, window=window, overlap=overlap)

    def predict(network: nn.Module, image: Tensor) -> Tensor:
        nonlocal has_less
        window = validation_window(config, patch, (image.shape[1], image.shape[2], image.shape[3]))
        x, y, z = map(min, window, patch)
        if has_less or window == (x, y, z) or config.patch.size == "whole":
            return logits_in((x, y, z) if has_less else window, network, image)
        try:
            return logits_in(window, network, image)
        except (RuntimeError, MemoryError) as error:
            if not is_out_of_memory(error):
                raise
            has_less = True
        # the error is gone here, and with it the tensors of its traceback
        give_back_memory(device.torch_device)
        words = size_words(window), size_words((x, y, z))
        log.warning("memory ran out in validation with windows of %s; they are %s now", *words)
        return logits_in((x, y, z), network, image)

    return predict
