"""Test the sliding window over a volume larger than it."""

from itertools import pairwise
from math import ceil

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from monai.inferers import sliding_window_inference
from torch import Tensor, nn

from brats_seg.runtime.device import Device
from brats_seg.runtime.windows import (
    EVENLY_SPACED,
    axis_windows,
    n_windows,
    predict_logits,
    window_starts,
)

Triple = tuple[int, int, int]
CPU = torch.device("cpu")
FP32 = Device(torch_device=CPU)


def random_image(shape: Triple) -> Tensor:
    return torch.randn(4, *shape, generator=torch.Generator().manual_seed(0))


STARTS = {
    (4, 4, 0.5): (0,),
    (5, 4, 0.5): (0, 1),
    (9, 4, 0.5): (0, 2, 3, 5),
    (9, 4, 0.0): (0, 2, 5),
    (150, 64, 0.5): (0, 29, 57, 86),
    (7, 4, 0.999): (0, 1, 2, 3),
    # as nnU-Net does: half of an odd window is not rounded
    (56, 11, 0.5): (0, 5, 10, 15, 20, 25, 30, 35, 40, 45),
}


@given(length=st.integers(1, 20), rest=st.integers(0, 160), overlap=st.floats(0, 0.99))
def test_windows_cover_all_and_weigh_one_together(length: int, rest: int, overlap: float) -> None:
    assert {key: window_starts(*key) for key in STARTS} == STARTS
    starts, total = window_starts(length + rest, length, overlap), torch.zeros(length + rest)
    assert (starts[0], starts[-1]) == (0, rest)
    assert all(b - a <= ceil(max(1, length * (1 - overlap))) for a, b in pairwise(starts))
    for window, weights in axis_windows(length + rest, length, overlap, EVENLY_SPACED, CPU):
        total[window] += weights
    assert torch.allclose(total, torch.ones(length + rest), atol=1e-5)


@pytest.mark.parametrize("overlap", [0, 0.25, 0.5, 0.7])
@pytest.mark.parametrize(
    "shape", [(8, 6, 4), (13, 11, 9), (5, 3, 2), (20, 3, 4), (9, 6, 3)], ids=str
)
def test_an_identity_network_returns_its_input(shape: Triple, overlap: float) -> None:
    image, window, calls = random_image(shape).bfloat16().float(), (8, 6, 4), []
    before = image.clone()

    def network(patch: Tensor) -> Tensor:
        calls.append(tuple(patch.shape))
        return patch.bfloat16()

    logits = predict_logits(network, image, window=window, overlap=overlap, device=FP32)
    assert calls == [(1, 4, *window)] * n_windows(shape, window, overlap)
    assert (logits.shape, logits.dtype) == (image.shape, torch.float32)
    assert torch.allclose(logits, image, atol=1e-6)
    assert torch.equal(image, before)


@pytest.mark.parametrize("shape", [(24, 24, 16), (12, 18, 8)], ids=str)
def test_equals_the_sliding_window_of_monai_with_the_same_weights(shape: Triple) -> None:
    """On sizes where both place the same windows; a convolution that pads sees window borders."""
    torch.manual_seed(0)
    network = nn.Conv3d(4, 3, 5, padding=2)
    image = random_image(shape)
    window = (16, 12, 8)
    bells = [torch.exp(-0.5 * ((torch.arange(n) - (n - 1) / 2) / (n / 8)) ** 2) for n in window]
    placed = {"window": window, "overlap": 0.5, "device": FP32}
    ours = predict_logits(network, image, **placed)
    with torch.inference_mode():
        weights = torch.einsum("x,y,z->xyz", *bells)[None, None]
        options = {"overlap": 0.5, "roi_weight_map": weights}
        theirs = sliding_window_inference(image[None], window, 1, network, **options)
        assert torch.equal(predict_logits(network, image, **placed), ours)
    assert torch.allclose(ours, theirs[0], atol=1e-5)
    assert not ours.requires_grad
