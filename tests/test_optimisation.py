"""The optimizer Muon: orthogonal updates of filters, AdamW for everything else."""

import copy

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ModelConfig, OptimizerConfig, ScheduleConfig
from brats_seg.models.build import build_model
from brats_seg.training.optimisation import (
    COEFFICIENTS,
    N_ITERATIONS,
    Muon,
    Schedule,
    build_optimizer,
    orthogonal,
)


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


@pytest.mark.parametrize("name", ["adam", "adamw", "muon", "sgd"])
def test_every_optimizer_of_the_settings_moves_the_weights(name: str) -> None:
    network = nn.Conv3d(4, 3, 1)
    before = network.weight.detach().clone()
    optimizer = build_optimizer(
        network.parameters(), OptimizerConfig.model_validate({"name": name})
    )
    network(drawn(1, 4, 2, 2, 2)).sum().backward()

    optimizer.step()

    assert not torch.equal(before, network.weight)


def rates(config: ScheduleConfig, n_steps: int, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = Schedule(optimizer, config, n_steps)
    found = []
    for _ in range(n_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
    return found


def test_constant_stays() -> None:
    assert rates(ScheduleConfig(name="constant"), 3) == [1.0, 1.0, 1.0]


def test_cosine_falls_along_half_a_wave() -> None:
    found = rates(ScheduleConfig(name="cosine"), 4)

    assert found == pytest.approx([1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])


def test_polynomial_falls_with_the_exponent_of_nnunet() -> None:
    found = rates(ScheduleConfig(name="polynomial"), 4, lr=0.01)

    assert found == pytest.approx([0.01, 0.01 * 0.75**0.9, 0.01 * 0.5**0.9, 0.01 * 0.25**0.9])


def test_warm_up_rises_to_the_full_rate_and_leaves_the_rest_to_the_curve() -> None:
    found = rates(ScheduleConfig(name="cosine", warmup_steps=3), 7)

    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[5] == pytest.approx(0.5)


def test_until_the_length_of_the_run_is_known_the_rate_does_not_fall() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(optimizer, ScheduleConfig(name="polynomial", warmup_steps=1))

    found = []
    for step in range(4):
        found.append(optimizer.param_groups[0]["lr"])
        schedule.n_steps = 4 if step == 2 else schedule.n_steps
        optimizer.step()
        schedule.after_step()

    assert found == pytest.approx([0.5, 1, 1, (1 - 2 / 3) ** 0.9])


def test_a_rise_and_a_cosine_are_the_one_cycle_of_torch() -> None:
    """So that there is no schedule of that name; torch ends at the initial rate / 1e4."""
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    cycle = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, max_lr=1.0, total_steps=100, cycle_momentum=False, final_div_factor=1e8
    )
    theirs = []
    for _ in range(100):
        theirs.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        cycle.step()

    ours = rates(ScheduleConfig(name="cosine", warmup_steps=30), 100)

    assert ours[30:] == pytest.approx(theirs[30:], abs=0.03)


def test_no_curve_falls_below_the_lowest_rate() -> None:
    assert min(rates(ScheduleConfig(name="cosine"), 50, lr=1e-7)) == pytest.approx(1e-7)


def test_a_plateau_lowers_the_rate_after_more_than_patience_validations() -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    schedule = Schedule(optimizer, ScheduleConfig(name="plateau", patience=2))

    found = []
    for loss in (1, 2, 2, 2, 2, 2, 2):
        schedule.after_validation(loss)
        found.append(optimizer.param_groups[0]["lr"])

    assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01])


def test_a_schedule_goes_on_from_its_state() -> None:
    for name in ("plateau", "cosine"):
        config = ScheduleConfig(name=name, patience=0)
        undisturbed, restarted = [], []
        for interrupt in (False, True):
            parameter = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            schedule = Schedule(optimizer, config, 10)
            for step in range(10):
                if interrupt and step == 5:
                    state, optimizer_state = schedule.state_dict(), optimizer.state_dict()
                    optimizer = torch.optim.SGD([parameter], lr=1.0)
                    schedule = Schedule(optimizer, config, 10)
                    optimizer.load_state_dict(optimizer_state)
                    schedule.load_state_dict(state)
                optimizer.step()
                schedule.after_step()
                schedule.after_validation(abs(step - 4.5))
                (restarted if interrupt else undisturbed).append(optimizer.param_groups[0]["lr"])

        assert undisturbed == restarted
        assert len(set(undisturbed)) > 1
