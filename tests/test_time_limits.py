"""Test stop requests, limits of time, and the number of epochs that is fitted to the hours."""

import logging
import os
import signal
import threading
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from brats_seg.config_text import load_config
from brats_seg.data.fold import open_fold
from brats_seg.errors import ResumeError, UsageError
from brats_seg.models.unet import UNet
from brats_seg.progress import untracked
from brats_seg.runtime.windows import n_windows
from brats_seg.training.checkpoints import load_checkpoint
from brats_seg.training.epoch import validation_window
from brats_seg.training.time_limits import EpochTime, StopRequest, fitted_to_hours
from brats_seg.training.trainer import Outcome, time_epoch, train_fold
from tests.builders import Run, write_case
from tests.training_builders import StopAtCheck, train


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_is_noted_instead_of_ending_the_process(number: signal.Signals) -> None:
    stop = StopRequest()
    before = signal.getsignal(number)

    with stop.listening():
        assert stop.reason is None
        os.kill(os.getpid(), number)

        assert stop.reason == f"{number.name} was received"
        assert stop.signal is number

    assert signal.getsignal(number) is before


def test_a_second_ctrl_c_is_not_held_back() -> None:
    with StopRequest().listening():
        os.kill(os.getpid(), signal.SIGINT)

        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_the_hours_given_run_out() -> None:
    assert StopRequest(max_hours=0).reason == "the time limit of 0 hours was reached"
    assert StopRequest(max_hours=1).reason is None
    assert StopRequest().reason is None


def test_in_another_thread_the_deadline_still_counts() -> None:
    reasons = []

    def work() -> None:
        stop = StopRequest(max_hours=0)
        with stop.listening():
            reasons.append(stop.reason)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()

    assert reasons == ["the time limit of 0 hours was reached"]


def test_hours_of_all_sessions_are_used_up_whatever_the_session_may_take() -> None:
    stop = StopRequest(max_hours=5)

    stop.limit_sessions(2, spent_before_s=7190)
    assert (stop.is_used_up, stop.reason) == (False, None)
    stop.limit_sessions(2, spent_before_s=7200)
    assert (stop.is_used_up, stop.reason) == (True, "the time of the run, 2 h, is used up")
    stop.limit_sessions(None, spent_before_s=7200)
    assert stop.reason is None


@pytest.mark.parametrize("every", [1, 2, 7])
@pytest.mark.parametrize("seconds", [0, 9.9, 10, 39, 100, 1234.5])
def test_as_many_epochs_fit_as_a_slow_search_finds(every: int, seconds: float) -> None:
    timed = EpochTime(training_s=3, validation_s=7, every=every)

    def run_s(n_epochs: int) -> float:
        validated = {epoch for epoch in range(1, n_epochs + 1) if epoch % every == 0}
        return 3 * n_epochs + 7 * len(validated | ({n_epochs} if n_epochs else set()))

    fitting = [n for n in range(500) if run_s(n) <= seconds]
    assert timed.n_epochs_in(seconds) == max(fitting)


def test_a_tenth_of_the_hours_and_what_is_spent_stay_free() -> None:
    config = load_config(values={"training.hours": 1})
    timed = EpochTime(training_s=9, validation_s=1, every=1)

    fitted = fitted_to_hours(config, timed, spent_s=600)

    assert fitted.training.n_epochs == 0.9 * 3000 / 10
    assert fitted.training.hours == 1


def test_hours_that_hold_no_epoch_are_refused_with_those_that_do() -> None:
    config = load_config(values={"training.hours": 0.5})
    timed = EpochTime(training_s=3000, validation_s=240, every=5)
    message = r"50 min of training, 4 min of validation, after 6 s .* Expected at least 1 h"

    with pytest.raises(UsageError, match=message):
        fitted_to_hours(config, timed, spent_s=6)


SETTINGS = [
    "folds.n_folds=3",
    "patch.size=[8, 8, 8]",
    "model.widths=[4, 8]",
    "schedule.name=cosine",
    "schedule.warmup=0.25",
    "training.effective_batch=2",
    "training.precision=fp32",
    "training.n_workers=0",
    "validation.overlap=0",
]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Six patients in three folds: four to train on, in two batches an epoch."""
    root = tmp_path_factory.mktemp("scans")
    for number in range(6):
        write_case(root, f"BraTS2021_{number:05d}", seed=number)
    return root


def test_an_epoch_is_timed_without_a_trace(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Slowed down by 0.05 s a patch and 0.15 s a case, it takes at least that time."""
    config = load_config(assignments=SETTINGS)
    data = open_fold(scans, fold=0, config=config, prepared_path=tmp_path / "prepared")
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setattr("brats_seg.training.time_limits.SHORTEST_TRIAL_S", 0.5)
    window = validation_window(config, (8, 8, 8), data.largest_shape)
    of_case = n_windows(data.largest_shape, window, 0)

    def slow_down(network: nn.Module, inputs: object) -> None:
        if isinstance(network, UNet):
            time.sleep(0.05 if network.training else 0.15 / of_case)

    hook = nn.modules.module.register_module_forward_pre_hook(slow_down)
    try:
        timed = time_epoch(data, config)
    finally:
        hook.remove()

    assert timed.training_s > 4 * 0.05
    # the second held-out case is reckoned by its voxels
    assert timed.validation_s > 1.5 * 0.15
    assert not list((tmp_path / "here").iterdir())


def test_the_epochs_that_were_fitted_to_the_hours_are_kept_when_a_run_is_interrupted(
    scans: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Another time, or other hours, change them no more; the weights are those of an undisturbed run."""
    epochs_s = iter([100.0, 1.0])

    def timed(*_: object) -> EpochTime:
        return EpochTime(training_s=next(epochs_s), validation_s=0, every=1)

    def call(hours: float | None, max_hours: float | None = None, name: str = "run") -> Outcome:
        length = "training.n_epochs=3" if hours is None else f"training.hours={hours}"
        return train_fold(
            scans,
            0,
            config=load_config(assignments=[*SETTINGS, length]),
            run_path=tmp_path / name,
            prepared_path=tmp_path / "prepared",
            max_hours=max_hours,
            track=untracked,
        )

    monkeypatch.setattr("brats_seg.training.trainer.time_epoch", timed)
    with caplog.at_level(logging.INFO):
        stopped = call(350 / 3600, max_hours=0)
        resumed, again = call(350 / 3600), call(1)
    call(None, name="plain")

    assert not stopped.finished
    assert resumed.finished
    assert again.finished
    assert len(resumed.history) == 3
    assert "training.n_epochs is 3: 0.0972222 h, less a margin of 10 %" in caplog.text
    assert "n_epochs: 3\n  hours: 1.0" in (tmp_path / "run" / "config.yaml").read_text()
    cpu = torch.device("cpu")
    found, plain = (
        load_checkpoint(tmp_path / name / "last.pt", cpu).model for name in ("run", "plain")
    )
    assert all(torch.equal(found[name], plain[name]) for name in plain)
    with pytest.raises(ResumeError, match=r"begun without --hours, for 3 epochs\. .*--fresh"):
        call(1, name="plain")


def test_what_all_sessions_have_taken_is_stored_and_ends_the_run(
    scans: Path, tmp_path: Path
) -> None:
    config = load_config(assignments=[*SETTINGS, "training.n_epochs=3", "training.hours=1"])
    data = open_fold(scans, fold=0, config=config, prepared_path=tmp_path / "prepared")
    train(data, tmp_path / "run", config, StopAtCheck(4))
    path = tmp_path / "run" / "last.pt"
    content = torch.load(path, weights_only=True)
    assert 0 < content["spent_s"] < 300
    torch.save({**content, "spent_s": 3601.0}, path)

    outcome = train(data, tmp_path / "run", config)

    assert not outcome.finished
    assert outcome.reason == "the time of the run, 1 h, is used up"
    assert torch.load(path, weights_only=True)["spent_s"] > 3601
    assert train(
        data,
        tmp_path / "run",
        load_config(assignments=[*SETTINGS, "training.n_epochs=3", "training.hours=2"]),
    ).finished


def test_epochs_and_hours_together_are_refused(run: Run) -> None:
    code, _, error = run("train", "--epochs", "3", "--hours", "1.5")

    assert code == 2
    assert "--epochs 3 and --hours 1.5 are given; expected one of them" in error
