"""Test the validation on whole cases."""

from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config_text import load_config
from brats_seg.runtime.device import Device
from brats_seg.training.trainer import case_predictor

PATCH = (8, 8, 8)


class Hungry(nn.Module):
    """Has memory for training patches only."""

    def __init__(self) -> None:
        super().__init__()
        self.n_refused = 0

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[-1] > PATCH[-1]:
            self.n_refused += 1
            msg = "CUDA out of memory"
            raise torch.OutOfMemoryError(msg)
        return image[:, :3]


def test_memory_that_runs_out_in_validation_costs_the_window_and_not_the_run(
    caplog: pytest.LogCaptureFixture,
) -> None:
    plan = SimpleNamespace(
        config=load_config(assignments=["patch.size=8,8,8", "model.widths=4,8"]),
        device=Device(torch_device=torch.device("cpu")),
        patch=PATCH,
        window=lambda shape: (12, 12, 12),
    )
    predict, network = case_predictor(plan), Hungry()  # type: ignore[arg-type]
    image = torch.rand(4, 20, 18, 16)

    logits = [predict(network, image) for _ in range(2)]

    for found in logits:
        torch.testing.assert_close(found, image[:3])
    assert network.n_refused == 1
    assert "validation: memory ran out with the windows of prediction: CUDA" in caplog.text
    assert "with windows of 8x8x8" in caplog.text
