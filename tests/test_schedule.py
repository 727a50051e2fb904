"""Test the learning rate of each step."""

import pytest
import torch

from brats_seg.config import ScheduleConfig
from brats_seg.training.optimisation import build_schedule


def rates(config: ScheduleConfig, n_steps: int, lr: float = 1.0) -> list[float]:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=lr)
    schedule = build_schedule(optimizer, config, n_steps)
    found = []
    for _ in range(n_steps):
        found.append(optimizer.param_groups[0]["lr"])
        optimizer.step()
        schedule.after_step()
    return found


def test_constant_stays() -> None:
    assert rates(ScheduleConfig(name="constant"), 3) == [1.0, 1.0, 1.0]


def test_cosine_falls_along_half_a_wave() -> None:
    found = rates(ScheduleConfig(name="cosine", minimum_lr=0), 4)

    assert found == pytest.approx([1.0, (1 + 0.5**0.5) / 2, 0.5, (1 - 0.5**0.5) / 2])


def test_polynomial_falls_with_the_exponent_of_nnunet() -> None:
    found = rates(ScheduleConfig(name="polynomial", minimum_lr=0), 4, lr=0.01)

    assert found == pytest.approx([0.01, 0.01 * 0.75**0.9, 0.01 * 0.5**0.9, 0.01 * 0.25**0.9])


def test_warm_up_rises_to_the_full_rate_and_leaves_the_rest_to_the_curve() -> None:
    found = rates(ScheduleConfig(name="cosine", minimum_lr=0, warmup_steps=3), 7)

    assert found[:4] == pytest.approx([0.25, 0.5, 0.75, 1.0])
    assert found[5] == pytest.approx(0.5)


def test_warm_up_by_share_is_that_by_steps() -> None:
    share = ScheduleConfig(name="cosine", minimum_lr=0, warmup=0.3)

    assert rates(share, 20) == rates(share.model_copy(update={"warmup": 0, "warmup_steps": 6}), 20)


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

    ours = rates(ScheduleConfig(name="cosine", minimum_lr=0, warmup=0.3), 100)

    assert ours[30:] == pytest.approx(theirs[30:], abs=0.03)


def test_no_curve_falls_below_the_minimum() -> None:
    assert min(rates(ScheduleConfig(name="cosine", minimum_lr=0.2), 50)) == pytest.approx(0.2)


@pytest.mark.parametrize(
    ("watch", "values"), [("val_loss", [1, 2, 2, 2]), ("val_dice", [1, 0, 0, 0])]
)
def test_a_plateau_lowers_the_rate_after_more_than_patience_validations(
    watch: str, values: list[float]
) -> None:
    optimizer = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=1.0)
    config = ScheduleConfig(name="plateau", watch=watch, patience=2, factor=0.1, minimum_lr=0.05)
    schedule = build_schedule(optimizer, config, 100)

    found = []
    for value in [*values, *values[1:]]:
        schedule.after_validation(value)
        found.append(optimizer.param_groups[0]["lr"])

    assert found == pytest.approx([1, 1, 1, 0.1, 0.1, 0.1, 0.05])


def test_a_schedule_goes_on_from_its_state() -> None:
    for name in ("plateau", "cosine"):
        config = ScheduleConfig(name=name, patience=0, minimum_lr=0)
        undisturbed, restarted = [], []
        for interrupt in (False, True):
            parameter = torch.nn.Parameter(torch.zeros(1))
            optimizer = torch.optim.SGD([parameter], lr=1.0)
            schedule = build_schedule(optimizer, config, 10)
            for step in range(10):
                if interrupt and step == 5:
                    state, optimizer_state = schedule.state_dict(), optimizer.state_dict()
                    optimizer = torch.optim.SGD([parameter], lr=1.0)
                    schedule = build_schedule(optimizer, config, 10)
                    optimizer.load_state_dict(optimizer_state)
                    schedule.load_state_dict(state)
                optimizer.step()
                schedule.after_step()
                schedule.after_validation(abs(step - 4.5))
                (restarted if interrupt else undisturbed).append(optimizer.param_groups[0]["lr"])

        assert undisturbed == restarted
        assert len(set(undisturbed)) > 1
