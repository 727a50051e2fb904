"""Test Muon, orthogonal updates of filters and AdamW for everything else, and the schedules."""

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import OptimizerConfig, ScheduleConfig
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
    assert torch.equal(orthogonal(torch.zeros(8, 12)), torch.zeros(8, 12))


def updated(optimizer: type[torch.optim.Optimizer], *shape: int, **options: object) -> Tensor:
    """Return a parameter after four steps."""
    parameter = nn.Parameter(drawn(*shape, seed=9))
    stepper = optimizer([parameter], lr=0.1, weight_decay=0.1, **options)
    for seed in range(4):
        parameter.grad = drawn(*shape, seed=seed)
        stepper.step()
    return parameter.detach()


def test_a_matrix_is_updated_as_by_torch() -> None:
    expected = updated(torch.optim.Muon, 16, 40, adjust_lr_fn="match_rms_adamw")
    found = updated(Muon, 16, 40)

    # torch iterates in bfloat16, with seven bits after the first
    assert (found - expected).abs().max() < 0.02 * (found - drawn(16, 40, seed=9)).abs().max()


@pytest.mark.parametrize("shape", [(5,), (3, 16, 1, 1, 1), (12, 4)])
def test_a_parameter_that_is_no_filter_is_updated_as_by_adamw(shape: tuple[int, ...]) -> None:
    torch.testing.assert_close(updated(Muon, *shape), updated(torch.optim.AdamW, *shape))


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
    config = OptimizerConfig.model_validate({"name": name})
    network(drawn(1, 4, 2, 2, 2)).sum().backward()

    build_optimizer(network.parameters(), config).step()

    assert not torch.equal(before, network.weight)


def scheduled(n_steps: int | None = None, lr: float = 1.0, **config: object) -> Schedule:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = Schedule(optimizer, ScheduleConfig.model_validate(config))
    schedule.n_steps = n_steps
    schedule.optimizer = optimizer
    return schedule


def rate_of(schedule: Schedule) -> float:
    return float(schedule.optimizer.param_groups[0]["lr"])


def rates(n_steps: int, lr: float = 1.0, **config: object) -> list[float]:
    schedule, found = scheduled(n_steps, lr, **config), []
    for _ in range(n_steps):
        found.append(rate_of(schedule))
        schedule.optimizer.step()
        schedule.after_step()
    return found


@pytest.mark.parametrize(
    ("config", "n_steps", "expected"),
    [
        ({"name": "constant"}, 3, [1.0, 1.0, 1.0]),
        ({"name": "cosine"}, 4, [1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2]),
        # the exponent of nnU-Net
        ({"name": "polynomial"}, 4, [1.0, 0.75**0.9, 0.5**0.9, 0.25**0.9]),
        # warm-up rises to the full rate, and leaves the rest to the curve
        ({"name": "cosine", "warmup_steps": 3}, 7, [0.25, 0.5, 0.75, 1.0, None, 0.5, None]),
    ],
)
def test_the_rate_follows_its_curve(
    config: dict[str, object], n_steps: int, expected: list[float | None]
) -> None:
    for rate, value in zip(rates(n_steps, **config), expected, strict=True):
        assert value is None or rate == pytest.approx(value)
    # and does not fall below the lowest
    assert min(rates(50, lr=1e-7, name="cosine")) == pytest.approx(1e-7)


def test_until_the_length_of_the_run_is_known_the_rate_does_not_fall() -> None:
    schedule, found = scheduled(name="polynomial", warmup_steps=1), []
    for step in range(4):
        found.append(rate_of(schedule))
        schedule.n_steps = 4 if step == 2 else schedule.n_steps
        schedule.optimizer.step()
        schedule.after_step()

    assert found == pytest.approx([0.5, 1, 1, (1 - 2 / 3) ** 0.9])


def test_a_plateau_lowers_the_rate_after_more_than_patience_validations() -> None:
    schedule, found = scheduled(name="plateau", patience=2), []
    for loss in (1, 2, 2, 2, 2, 2, 2):
        schedule.after_validation(loss)
        found.append(rate_of(schedule))

    assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01])


@pytest.mark.parametrize("name", ["plateau", "cosine"])
def test_a_schedule_goes_on_from_its_state(name: str) -> None:
    found = []
    for is_interrupted in (False, True):
        schedule, rates_of_run = scheduled(10, name=name, patience=0), []
        for step in range(10):
            if is_interrupted and step == 5:
                states = schedule.state_dict(), schedule.optimizer.state_dict()
                schedule = scheduled(10, name=name, patience=0)
                schedule.optimizer.load_state_dict(states[1])
                schedule.load_state_dict(states[0])
            schedule.optimizer.step()
            schedule.after_step()
            schedule.after_validation(abs(step - 4.5))
            rates_of_run.append(rate_of(schedule))
        found.append(rates_of_run)

    assert found[0] == found[1]
    assert len(set(found[0])) > 1
