"""The optimizer Muon, and the learning rate over a run."""

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ScheduleConfig
from brats_seg.training.optimisation import COEFFICIENTS, N_ITERATIONS, Muon, Schedule, orthogonal


def drawn(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def test_the_iteration_is_that_of_newton_and_schulz_and_the_result_about_orthogonal() -> None:
    matrix = drawn(24, 200)
    expected = matrix.double() / matrix.double().norm()
    a, b, c = COEFFICIENTS
    for _ in range(N_ITERATIONS):
        product = expected @ expected.T
        expected = a * expected + (b * product + c * product @ product) @ expected
    torch.testing.assert_close(orthogonal(matrix).double(), expected, atol=1e-4, rtol=0)
    torch.testing.assert_close(orthogonal(1e3 * matrix.T), expected.T.float(), atol=1e-4, rtol=0)
    values = torch.linalg.svdvals(expected)
    assert 0.5 < values.min() <= values.max() < 1.3
    assert torch.equal(orthogonal(torch.zeros(8, 12)), torch.zeros(8, 12))


def updated(optimizer: type[torch.optim.Optimizer], *shape: int, **options: object) -> Tensor:
    parameter = nn.Parameter(drawn(*shape, seed=9))
    stepper = optimizer([parameter], lr=0.1, weight_decay=0.1, **options)
    for seed in range(4):
        # small enough to show what is added to the denominator
        parameter.grad = 1e-7 * drawn(*shape, seed=seed)
        stepper.step()
    return parameter.detach()


def test_a_matrix_is_updated_as_by_torch() -> None:
    expected = updated(torch.optim.Muon, 16, 40, adjust_lr_fn="match_rms_adamw")
    found = updated(Muon, 16, 40)
    # a filter is the matrix of its output channels
    assert torch.equal(updated(Muon, 16, 5, 2, 2, 2).flatten(1), found)
    # torch iterates in bfloat16, with seven bits after the first
    assert (found - expected).abs().max() < 0.02 * (found - drawn(16, 40, seed=9)).abs().max()


@pytest.mark.parametrize("shape", [(5,), (7, 16, 1, 1, 1), (12, 7)])
def test_a_parameter_that_is_no_filter_is_updated_as_by_adamw(shape: tuple[int, ...]) -> None:
    torch.testing.assert_close(updated(Muon, *shape), updated(torch.optim.AdamW, *shape))


def test_a_closure_makes_the_gradient_of_a_step() -> None:
    parameter = nn.Parameter(torch.ones(3))
    optimizer = Muon([parameter], lr=0.1)

    def closure() -> Tensor:
        loss = parameter.square().sum()
        loss.backward()
        return loss.detach()

    assert float(optimizer.step(closure)) == 3
    assert (parameter < 1).all()


def scheduled(n_steps: int | None = None, lr: float = 1.0, **config: object) -> Schedule:
    optimizer = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = Schedule(optimizer, ScheduleConfig.model_validate(config))
    schedule.set_length(n_steps)
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
        # a run may end with it
        ({"name": "cosine", "warmup_steps": 3}, 3, [0.25, 0.5, 0.75]),
    ],
)
def test_the_rate_follows_its_curve(config, n_steps, expected):
    for rate, value in zip(rates(n_steps, **config), expected, strict=True):
        assert value is None or rate == pytest.approx(value)
    lowered = scheduled(n_steps, **config)
    lowered.lower_to(0.3)
    assert rate_of(lowered) == pytest.approx(0.3 * expected[0])
    # and does not fall below the lowest, unless the settings have a lower one
    assert rates(1, lr=1e-8, name="constant") == [1e-8]
    assert min(rates(50, lr=1e-7, name="cosine")) == pytest.approx(1e-7)


def test_once_the_length_of_the_run_is_known_the_rate_is_that_of_the_step() -> None:
    schedule, found = scheduled(name="polynomial", warmup_steps=1), []
    for step in range(6):
        found.append(rate_of(schedule))
        schedule.optimizer.step()
        schedule.after_step()
        if step == 1:
            schedule.set_length(4)
    # after its end the rate stays the lowest
    assert found == pytest.approx([0.5, 1, (2 / 3) ** 0.9, (1 / 3) ** 0.9, 1e-7, 1e-7])


def test_a_plateau_lowers_the_rate_after_more_than_patience_validations() -> None:
    schedule, found = scheduled(name="plateau", patience=2), []
    # a gain of less than a ten thousandth is none
    for loss in (1, 0.99995, 2, 2, 2, 2, 2):
        schedule.after_validation(loss)
        found.append(rate_of(schedule))
    assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.01])
    # no other schedule does
    other = scheduled(name="constant", patience=0)
    for loss in (1, 2):
        other.after_validation(loss)
    assert rate_of(other) == 1


def test_a_plateau_ends_in_a_cool_down_to_zero_from_the_rate_that_it_has() -> None:
    schedule, found = scheduled(10, name="plateau", patience=0, cool_down=0.5), []
    for step in range(10):
        found.append(rate_of(schedule))
        if step == 2:
            for loss in (1, 2):
                schedule.after_validation(loss)
        schedule.optimizer.step()
        schedule.after_step()
    assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.08, 0.06, 0.04, 0.02])
    assert rate_of(schedule) == pytest.approx(1e-7)
    # without one it keeps its rate
    assert rates(10, name="plateau", cool_down=0) == pytest.approx([1] * 10)
