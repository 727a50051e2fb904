"""Test stop requests, the expected duration of a run, and the epochs that its hours hold."""

import logging
import os
import signal
import threading
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from brats_seg.config import Config
from brats_seg.errors import ResumeError, UsageError
from brats_seg.training import timing
from brats_seg.training.losses import RunningSums
from brats_seg.training.state import Progress
from brats_seg.training.timing import Clock, StopRequest
from tests.training_builders import StopAtCheck, check_same_runs, tiny_settings, train


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_instead_of_ending_the_process(number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)
    with stop.listening():
        assert stop.reason is None
        os.kill(os.getpid(), number)
        assert (stop.reason, stop.signal) == (f"{number.name} was received", number)
        if number is signal.SIGINT:
            with pytest.raises(KeyboardInterrupt):
                os.kill(os.getpid(), number)
    assert signal.getsignal(number) is before


def test_the_hours_of_a_run_limit_all_its_sessions_together() -> None:
    stop, reasons = StopRequest(max_hours=5), []
    stop.limit_sessions(2, spent_before_s=7190)
    assert (stop.is_used_up, stop.reason) == (False, None)
    stop.limit_sessions(2, spent_before_s=7200)
    assert (stop.is_used_up, stop.reason) == (True, "the time of the run, 2 h, is used up")
    stop.limit_sessions(None, spent_before_s=7200)
    assert stop.reason is StopRequest(max_hours=1).reason is StopRequest().reason is None

    def work() -> None:
        """In another thread the deadline counts too."""
        late = StopRequest(max_hours=0)
        with late.listening():
            reasons.append(late.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert reasons == ["the time of this session is used up"]


class Session:
    """A run of epochs of 10 patches in batches of two; a validation costs half an epoch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, every: int = 2, **progress: Any) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr(timing, "time", SimpleNamespace(monotonic=lambda: self.now_s))
        plan = SimpleNamespace(
            n_patches=10,
            validation_cost=0.5,
            validate_every=every,
            config=Config.model_validate({"training": {"effective_batch": 2}}),
            is_validated=lambda epoch, n: n is None or epoch + 1 == n or (epoch + 1) % every == 0,
        )
        self.progress = Progress(**{"n_epochs": 4, **progress})
        stop = StopRequest()
        stop.limit_sessions(None, self.progress.spent_s)
        self.clock = Clock(plan=plan, progress=self.progress, stop=stop)  # type: ignore[arg-type]
        self.clock.begin_epoch()

    def train(self, n_batches: int, batch_s: float = 4.0) -> None:
        for _ in range(n_batches):
            self.now_s += batch_s
            self.progress.n_batches += 1
            self.clock.after_batch(2)

    def end_epoch(self, rest_s: float = 0.0) -> None:
        self.now_s += rest_s
        self.clock.end_epoch()
        self.progress.epoch, self.progress.n_batches = self.progress.epoch + 1, 0
        self.clock.begin_epoch()


def test_the_first_step_alone_gives_no_remaining_time(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Session(monkeypatch)
    run.train(1, batch_s=60)
    assert run.clock.left_s is None
    assert run.clock.expectation() is None
    run.train(1)
    # 36 patches at 2 s, and two validations of half an epoch
    assert run.clock.left_s == 36 * 2 + 2 * 10
    # later steps correct it
    run.train(3, batch_s=1)
    assert run.clock.left_s < 30 * 1.5 + 2 * 10
    resumed = Session(monkeypatch, epoch=3, n_batches=2)
    resumed.train(2)
    assert resumed.clock.left_s == 2 * 2 + 10
    # the expectation names its parts once
    long = Session(monkeypatch, n_epochs=400)
    long.train(2)
    assert long.clock.expectation() is None, "too early"
    long.train(2)
    assert [long.clock.expectation() for _ in range(2)] == [
        "about 2 h 45 min to the end of epoch 400, of which validation takes 33 min",
        None,
    ]


def test_what_is_measured_replaces_what_was_expected(monkeypatch: pytest.MonkeyPatch) -> None:
    run = Session(monkeypatch)
    run.train(5)
    run.end_epoch(rest_s=3)
    # of three epochs, two are validated
    assert run.clock.left_s == 30 * 2 + 2 * 10 + 3
    run.train(5)
    run.now_s += 6
    assert run.clock.left_s == 20 * 2 + 2 * 10 - 6 + 3
    run.end_epoch(rest_s=24)
    assert run.clock.left_s == 20 * 2 + 30 + 3
    run.train(5)
    run.end_epoch()
    run.train(5)
    run.end_epoch()
    assert run.clock.left_s is None


def test_an_epoch_has_the_time_that_it_took_before_an_interruption(monkeypatch) -> None:
    """The epochs that hours hold are judged by it."""
    run = Session(monkeypatch, sums=RunningSums(seconds=30), spent_s=100)
    run.train(2)
    assert run.clock.epoch_s == 38
    run.clock.before_saving()
    assert (run.progress.sums.seconds, run.progress.spent_s) == (38, 108)


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("left_s", [0, 20, 31, 39, 100, 1234.5])
def test_epochs_fit_into_hours(monkeypatch: pytest.MonkeyPatch, every: int, left_s: float) -> None:
    """The first epoch takes 20 s and its validation 7 s; a tenth of what is left then stays free."""
    run = Session(monkeypatch, every, n_epochs=None, spent_s=600.0)
    run.train(5)
    run.now_s += 4
    # the run is stopped, and goes on with the validation
    run.clock.before_saving()
    run.clock.begin_epoch()
    run.now_s += 3
    run.clock.end_epoch()

    def run_s(n_epochs: int) -> float:
        validated = {epoch for epoch in range(2, n_epochs + 1) if epoch % every == 0}
        return 20 * (n_epochs - 1) + 7 * len(validated | ({n_epochs} if n_epochs > 1 else set()))

    found = run.clock.epochs_in((627 + left_s / 0.9) / 3600)
    assert found == max(n for n in range(1, 500) if run_s(n) <= left_s + 1e-6)


def test_the_hours_that_a_message_asks_for_are_enough(monkeypatch: pytest.MonkeyPatch) -> None:
    for spent_s in range(0, 10_000, 300):
        run = Session(monkeypatch, spent_s=spent_s)
        run.train(3)
        message = run.clock.missing_hours(1e-3) or ""
        hours = float(message.partition("at least ")[2].partition(" h;")[0])
        assert run.clock.missing_hours(hours) is None


def settings(*changes: str) -> Config:
    return tiny_settings("schedule.name=cosine", "training.effective_batch=2", *changes)


def test_the_epochs_that_hours_hold_are_kept(data, tmp_path, monkeypatch, caplog):
    hours = settings("training.hours=1")
    monkeypatch.setattr(Clock, "epochs_in", lambda *_: 3)
    train(data, tmp_path / "undisturbed", hours)
    stopped = train(data, tmp_path / "run", hours, StopAtCheck(2))
    train(data, tmp_path / "run", hours, StopAtCheck(4))
    monkeypatch.setattr(Clock, "epochs_in", lambda *_: 7)
    with caplog.at_level(logging.INFO):
        resumed = train(data, tmp_path / "run", settings("training.hours=2"))
    assert (stopped.finished, resumed.finished, len(resumed.history)) == (False, True, 3)
    assert "training.hours changes from 1.0 to 2.0" in caplog.text
    check_same_runs(tmp_path / "run", tmp_path / "undisturbed")
    # the rate falls from the second epoch on
    rates = [row["lr"] for row in resumed.history]
    assert rates == sorted(rates, reverse=True)
    assert rates[0] == hours.optimizer.lr
    with pytest.raises(ResumeError, match=r"training\.n_epochs: 100 -> 5\n"):
        train(data, tmp_path / "run", settings("training.hours=2", "training.n_epochs=5"))
    train(data, tmp_path / "plain", settings("training.n_epochs=1"))
    # without hours there would be no number of epochs before the first one ends
    with pytest.raises(ResumeError, match=r"training\.hours: 2\.0 -> None\n.*--fresh"):
        train(data, tmp_path / "run", settings())
    with pytest.raises(ResumeError, match=r"training\.hours: None -> 1\.0\n.*--fresh"):
        train(data, tmp_path / "plain", settings("training.n_epochs=1", "training.hours=1"))


def test_hours_limit_a_real_run(data, tmp_path, monkeypatch):
    """Too few hours are refused in the first epoch; what all sessions have taken ends the run."""
    monkeypatch.setattr(timing, "SAID_AFTER_S", 0)
    with pytest.raises(UsageError, match="not one epoch fits"):
        train(data, tmp_path / "short", settings("training.hours=1e-6"), StopAtCheck(99))
    config, path = settings("training.hours=1"), tmp_path / "run" / "last.pt"
    train(data, tmp_path / "run", config, StopAtCheck(3))
    content = torch.load(path, weights_only=True)
    assert content["progress"]["spent_s"] > 0
    content["progress"] |= {"spent_s": 3601.0, "n_epochs": 2}
    torch.save(content, path)
    outcome = train(data, tmp_path / "run", config)
    assert (outcome.finished, outcome.reason) == (False, "the time of the run, 1 h, is used up")
    assert torch.load(path, weights_only=True)["progress"]["spent_s"] > 3601
    assert train(data, tmp_path / "run", settings("training.hours=2")).finished
