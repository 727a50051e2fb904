"""The optimizer Muon: orthogonal updates of filters, AdamW for everything else."""

import copy

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ModelConfig
from brats_seg.models.build import build_model
from brats_seg.training.muon import COEFFICIENTS, N_ITERATIONS, Muon, orthogonal


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("shape", [(16, 108), (108, 16), (32, 32)])
def test_the_update_of_a_filter_is_about_orthogonal(shape: tuple[int, int]) -> None:
    values = torch.linalg.svdvals(orthogonal(drawn(*shape)))

    assert values.min() > 0.5
    assert values.max() < 1.3


def test_the_iteration_is_that_of_newton_and_schulz() -> None:
    matrix = drawn(24, 200)
    expected = matrix.double() / matrix.double().norm()
    a, b, c = COEFFICIENTS
    for _ in range(N_ITERATIONS):
        product = expected @ expected.T
        expected = a * expected + (b * product + c * product @ product) @ expected

    torch.testing.assert_close(orthogonal(matrix).double(), expected, atol=1e-4, rtol=0)


def test_a_gradient_of_zeros_changes_nothing() -> None:
    assert torch.equal(orthogonal(torch.zeros(8, 12)), torch.zeros(8, 12))


def stepped(optimizer: torch.optim.Optimizer, parameter: nn.Parameter, n_steps: int) -> Tensor:
    for seed in range(n_steps):
        parameter.grad = drawn(*parameter.shape, seed=seed)
        optimizer.step()
    return parameter.detach()


def test_a_matrix_is_updated_as_by_torch() -> None:
    ours, theirs = (nn.Parameter(drawn(16, 40, seed=9)) for _ in range(2))
    reference = torch.optim.Muon([theirs], lr=0.1, weight_decay=0.1, adjust_lr_fn="match_rms_adamw")

    expected = stepped(reference, theirs, 4)
    found = stepped(Muon([ours], lr=0.1, weight_decay=0.1), ours, 4)

    # torch iterates in bfloat16, with seven bits after the first
    assert (found - expected).abs().max() < 0.02 * (found - drawn(16, 40, seed=9)).abs().max()


@pytest.mark.parametrize("shape", [(5,), (3, 16, 1, 1, 1), (12, 4)])
def test_a_parameter_that_is_no_filter_is_updated_as_by_adamw(shape: tuple[int, ...]) -> None:
    ours, theirs = (nn.Parameter(drawn(*shape, seed=9)) for _ in range(2))

    expected = stepped(torch.optim.AdamW([theirs], lr=0.1, weight_decay=0.1), theirs, 4)
    found = stepped(Muon([ours], lr=0.1, weight_decay=0.1), ours, 4)

    torch.testing.assert_close(found, expected)


def test_a_saved_state_continues_bit_for_bit() -> None:
    network = build_model(ModelConfig(widths=(8, 16)), (8, 8, 8))
    optimizer = Muon(network.parameters(), lr=1e-2)

    def step(network: nn.Module, optimizer: Muon, seed: int) -> None:
        optimizer.zero_grad()
        network(drawn(1, 4, 8, 8, 8, seed=seed)).logits[0].square().mean().backward()
        optimizer.step()

    step(network, optimizer, 0)
    resumed = copy.deepcopy(network)
    other = Muon(resumed.parameters(), lr=1e-2)
    other.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    step(network, optimizer, 1)
    step(resumed, other, 1)

    for left, right in zip(network.parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right)


def test_an_update_does_not_depend_on_the_scale_of_the_gradient() -> None:
    """Clipping and loss scaling change how long a gradient is, not where it points."""
    small, large = (nn.Parameter(drawn(8, 8, 3, 3, 3, seed=9)) for _ in range(2))
    for parameter, scale in ((small, 1e-3), (large, 1e3)):
        parameter.grad = scale * drawn(8, 8, 3, 3, 3)
        Muon([parameter], lr=1e-2).step()

    torch.testing.assert_close(small, large)
