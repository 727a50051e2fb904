"""Two runs of a command on one folder at once: one waits or is refused by name, the results are whole.

The first is stopped at a moment of its work while the second starts; then both go on.
"""

import signal
from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.programs import At, Running, pause
from tests.faults.stages import COMMANDS, TRAIN, Stages, differences, results

PROMISE = "two runs on one folder: one waits or is refused, results as of one"
OTHERS = "two runs with other settings: one is refused, results of the other"
ALONE_S = 2.0
"""Time that the second run has while the first is stopped."""
SHARES = (0.0, 0.4, 0.9)
"""Moments at which the first run is stopped, as shares of the changes that it makes."""
PAIRS = {
    "train": (f"{TRAIN} --fold 0", f"{TRAIN} --fold 0 --set optimizer.lr=0.01", "prepared"),
    "export": ("export runs/fold0 -o model", "export runs/fold1 -o model", "trained"),
    "predict": (
        "predict scans -o out --model runs/fold0 --precision fp32",
        "predict scans -o out --model runs/fold1 --precision fp32",
        "trained",
    ),
}
"""Two command lines that write different results to one folder, and the stage that they start from."""


def two_at_once(first_words: str, second_words: str, folder: Path, moment: int) -> tuple[str, ...]:
    """Run a command while another is stopped at a moment; return the problems of both."""
    first = Running(first_words, folder, At(moment, pause))
    stopped = first.wait_until_paused()
    second = Running(second_words, folder)
    second.wait_until_ended(ALONE_S)
    first.signal(signal.SIGCONT)
    ends = first.wait(), second.wait()
    refused = [ended for ended in ends if ended.code == 2]
    return (
        "" if stopped else "the first ended before it could be stopped",
        *(ended.expect(0, 2) for ended in ends),
        "both were refused" if len(refused) == 2 else "",
        *("" if "another" in one.shown else f"refused as: {one.shown}" for one in refused),
    )


@pytest.mark.slow
@pytest.mark.parametrize("name", COMMANDS)
def test_the_results_are_those_of_one(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    command = COMMANDS[name]
    alone = stages.undisturbed(command.words, command.stage, place / "alone")
    with campaign(PROMISE) as tries:
        for share in SHARES:
            folder = stages.start(command.stage, place / f"at{share}")
            problems = two_at_once(command.words, command.words, folder, alone.moment(share))
            tries.note(f"{name} at {share}", *problems, differences(results(folder), alone.results))


@pytest.mark.slow
@pytest.mark.parametrize("name", PAIRS)
def test_other_settings_do_not_mix(
    name: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    first, second, stage = PAIRS[name]
    alone, other = (
        stages.undisturbed(words, stage, place / f"alone{n}")
        for n, words in enumerate((first, second))
    )
    with campaign(OTHERS) as tries:
        for share in SHARES:
            folder = stages.start(stage, place / f"at{share}")
            problems = two_at_once(first, second, folder, alone.moment(share))
            files = results(folder)
            is_either = files in (alone.results, other.results)
            mixed = "" if is_either else differences(files, alone.results)
            tries.note(f"{name} at {share}", *problems, mixed)


def test_a_second_prediction_into_a_folder_is_refused_by_name(
    stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    command = COMMANDS["predict"]
    folder = stages.start(command.stage, place / "two")
    with campaign(PROMISE) as tries:
        problems = two_at_once(command.words, command.words, folder, 12)
        tries.note("predict", *problems)
