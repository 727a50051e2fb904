"""Test stop requests: signals and the time limit."""

import os
import signal
import threading

import pytest

from brats_seg.training.time_limits import StopRequest


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
