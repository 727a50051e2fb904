"""Test the expected duration of a run: from its first steps, corrected by what was measured."""

from types import SimpleNamespace
from typing import Any

import pytest

from brats_seg.training import duration
from brats_seg.training.duration import RunDuration


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Any:
    own = SimpleNamespace(now=1000.0, monotonic=lambda: own.now)
    monkeypatch.setattr(duration, "time", own)
    return own


def a_run(n_epochs: int = 4) -> RunDuration:
    """Epochs of 10 patches; every other one is validated, at half the cost of an epoch."""
    return RunDuration(
        n_epochs=n_epochs,
        n_patches=10,
        is_validated=lambda epoch: epoch % 2 == 1,
        validation_cost=0.5,
    )


def train(run: RunDuration, clock: Any, n_batches: int, *, batch_s: float = 4.0) -> None:
    """Train on batches of two patches."""
    for _ in range(n_batches):
        clock.now += batch_s
        run.after_batch(2)


def test_nothing_is_expected_from_the_first_step_alone(clock: Any) -> None:
    run = a_run()
    run.begin(0, 0)
    train(run, clock, 1, batch_s=60)
    assert run.left_s is None
    assert run.expectation() is None

    train(run, clock, 1)
    # 36 patches at 2 s, and two validations of half an epoch
    assert run.left_s == 36 * 2 + 2 * 10


def test_a_measured_validation_replaces_its_expectation(clock: Any) -> None:
    run = a_run()
    run.begin(0, 0)
    train(run, clock, 5)
    run.end_epoch()
    train(run, clock, 5)
    assert run.left_s == 20 * 2 + 2 * 10
    clock.now += 6
    assert run.left_s == 20 * 2 + 2 * 10 - 6
    clock.now += 24
    run.end_epoch()

    assert run.left_s == 20 * 2 + 30
    train(run, clock, 5)
    run.end_epoch()
    train(run, clock, 5)
    run.end_epoch()
    assert run.left_s is None


def test_the_time_after_an_epoch_without_validation_counts(clock: Any) -> None:
    run = a_run()
    run.begin(0, 0)
    train(run, clock, 5)
    clock.now += 3
    run.end_epoch()

    assert run.left_s == 30 * 2 + 2 * 10 + 1 * 3


def test_a_run_that_is_resumed_expects_the_rest(clock: Any) -> None:
    run = a_run()
    run.begin(3, 4)
    train(run, clock, 2)

    assert run.left_s == 2 * 2 + 10


def test_later_steps_correct_the_expectation(clock: Any) -> None:
    run = a_run(n_epochs=1000)
    run.begin(0, 0)
    train(run, clock, 5)
    run.end_epoch()
    slow = run.left_s
    for _ in range(20):
        train(run, clock, 5, batch_s=1)
        run.end_epoch()

    assert slow is not None
    assert run.left_s is not None
    assert run.left_s < 0.3 * slow


def test_the_expectation_names_its_parts(clock: Any) -> None:
    run = a_run(n_epochs=400)
    run.begin(0, 0)
    train(run, clock, 2)
    assert run.expectation() is None, "too early"
    train(run, clock, 2)

    assert run.expectation() == (
        "about 2 h 45 min to the end of epoch 400, of which validation takes 33 min; expected from "
        "the first 4 steps"
    )
