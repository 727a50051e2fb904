"""Two runs of a command on one folder at once: one waits or is refused by name, the results are whole.

The first is stopped at a moment of its work while the second starts; then both go on.
"""

import signal
from functools import partial
from pathlib import Path

import pytest

from tests.faults.campaign import Campaign
from tests.faults.programs import Running, at, pause
from tests.faults.stages import COMMANDS, differences, results

ALONE_S = 2.0
"""Time that the second run has while the first is stopped."""
SHARES = (0.0, 0.4, 0.9)
"""Moments at which the first run is stopped, as shares of the changes that it makes."""
OTHER_WORDS = {
    "train": f"{COMMANDS['train'].words} --set optimizer.lr=0.01",
    "export": "export runs/fold1 -o model",
    "predict": "predict scans -o out --model runs/fold1 --precision fp32",
}
"""What writes different results to the folder of a command."""


def two_at_once(first_words: str, second_words: str, folder: Path, moment: int) -> tuple[str, ...]:
    """Run a command while another is stopped at a moment; return the problems of both."""
    first = Running(first_words, folder, partial(at, moment, pause))
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
@pytest.mark.parametrize(
    ("name", "second_words"),
    [
        # certify writes no file
        *((name, COMMANDS[name].words) for name in COMMANDS if name != "certify"),
        *OTHER_WORDS.items(),
    ],
)
def test_the_results_are_those_of_one(name: str, second_words: str, campaign: Campaign) -> None:
    """The first is stopped at moments of its work; other settings do not mix with its own."""
    first = COMMANDS[name]
    second = first._replace(words=second_words)
    alone = campaign.undisturbed(first)
    expected = alone.results, campaign.undisturbed(second).results
    for share in SHARES:
        folder = campaign.start(first.stage, f"at{share}")
        problems = two_at_once(first.words, second.words, folder, alone.moment(share))
        files = results(folder)
        mixed = "" if files in expected else differences(files, expected[0])
        campaign.note(f"{first.words} at {share}", *problems, mixed)


@pytest.mark.slow
def test_a_second_prediction_into_a_folder_is_refused_by_name(campaign: Campaign) -> None:
    words, stage = COMMANDS["predict"]
    campaign.note("predict", *two_at_once(words, words, campaign.start(stage), 12))
