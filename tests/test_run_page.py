"""The page of a training run, from its folder and from its held-out cases."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from brats_seg.inference.window_choice import window_in_use

from brats_seg.data.fold import FoldData
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.inference.decode import decode_regions
from brats_seg.inference.held_out import open_held_out, predict_held_out
from brats_seg.pages.run import _with_scores, run_report, write_run
from brats_seg.pages.run_page import write_run_page
from brats_seg.progress import untracked
from brats_seg.runtime.weights import run_locked
from tests.browser import Page
from tests.inference_builders import CPU
from tests.test_case_page import outside
from tests.training_builders import StopAtCheck, open_six, tiny_settings, train

CONFIG = tiny_settings("training.n_epochs=2", "optimizer.lr=0.003")


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    return open_six(tmp_path_factory, CONFIG)


@pytest.fixture(scope="module")
def trained(data: FoldData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run = tmp_path_factory.mktemp("runs") / "fold0"
    train(data, run, CONFIG)
    return run


def test_it_says_what_the_folder_of_the_run_says(trained: Path, data: FoldData) -> None:
    report = run_report(trained)

    facts = {fact.name: fact.words for fact in report.facts}
    assert facts["Epochs"] == "2 of 2"
    assert facts["Cases"] == "4 to train on, 2 held out"
    assert facts["Training set"] == data.fingerprint
    assert report.settings["optimizer.lr"][1] == 0.003
    assert report.environment["device"] == "cpu"
    assert report.validation == data.split.validation
    assert report.remarks == ()


def test_held_out_cases_are_scored_and_the_worst_are_drawn(trained: Path, data: FoldData) -> None:
    held_out = open_held_out(trained, data.folder)
    window = window_in_use(held_out)

    report = _with_scores(run_report(trained), held_out, CPU, untracked)

    expected = {}
    for case in predict_held_out(held_out, [window], CPU, untracked)[window]:
        stored = case.read()
        regions = decode_regions(stored.probabilities, held_out.trained.fitted.decoding, 1.0)
        expected[case.case_id] = dice(count_regions(regions, stored.reference, case.case_id))
    assert {one.case_id: one.dice for one in report.scores} == {
        name: tuple(values) for name, values in expected.items()
    }
    means = [one.mean_dice for one in report.worst_first]
    assert means == sorted(means)
    assert [one.score for one in report.pictures] == list(report.worst_first)


def test_a_picture_has_the_prediction_at_its_place(trained: Path, data: FoldData) -> None:
    """The stored prediction is cut to a box, whose place only the reference tells."""
    held_out = open_held_out(trained, data.folder)

    report = _with_scores(run_report(trained), held_out, CPU, untracked)

    for picture in report.pictures:
        counts = count_regions(picture.prediction, picture.reference, picture.score.case_id)
        assert tuple(dice(counts)) == picture.score.dice
        assert picture.image.shape[1:] == picture.reference.shape[1:]


def test_its_page_asks_for_nothing_from_outside(
    browser: Page, trained: Path, data: FoldData
) -> None:
    page = write_run(trained, prepared=data.folder)

    browser.open(page)

    rows = "[...document.querySelectorAll('#cases tbody tr .name')].map((cell) => cell.textContent)"
    assert page == trained / "report.html"
    assert sorted(browser.run(rows)) == sorted(data.split.validation)
    assert browser.run("[...document.images].every((i) => i.complete && i.naturalWidth > 100)")
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    assert (browser.complaints, outside(browser)) == ([], [])


def test_names_cannot_add_tags(trained: Path, tmp_path: Path) -> None:
    hostile = "</pre><script>alert(1)</script>"
    report = replace(run_report(trained), name=hostile, settings_text=hostile, train=(hostile,))

    write_run_page(report, tmp_path / "a.html")

    assert "<script>alert" not in (tmp_path / "a.html").read_text()


def test_a_run_that_was_stopped_has_a_page_that_says_so(data: FoldData, tmp_path: Path) -> None:
    train(data, tmp_path / "run", CONFIG, StopAtCheck(8))

    report = run_report(tmp_path / "run")

    assert report.remarks[0] == "1 of 2 epochs are done; training was stopped."


def test_a_run_that_is_being_trained_has_a_page_without_scores(
    data: FoldData, tmp_path: Path
) -> None:
    train(data, tmp_path / "run", CONFIG, StopAtCheck(8))

    with run_locked(tmp_path / "run"):
        assert "it is being trained now" in run_report(tmp_path / "run").remarks[0]


def test_it_is_as_good_without_an_environment(trained: Path, tmp_path: Path) -> None:
    for name in ("config.yaml", "split.csv", "history.csv", "best.pt"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())

    assert run_report(tmp_path).environment == {}


def _remove(name: str) -> Callable[[Path], None]:
    return lambda run: (run / name).unlink()


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (_remove("history.csv"), "history.csv does not exist; expected the folder of a run"),
        (_remove("config.yaml"), r"config.yaml cannot be read .* expected the folder of a run"),
    ],
)
def test_a_folder_that_is_no_run_is_refused(
    trained: Path, tmp_path: Path, damage: Callable[[Path], None], words: str
) -> None:
    for name in ("config.yaml", "split.csv", "history.csv", "best.pt"):
        (tmp_path / name).write_bytes((trained / name).read_bytes())
    damage(tmp_path)

    with pytest.raises(UsageError, match=words):
        run_report(tmp_path)


def test_the_history_of_the_best_and_the_last_epoch_is_shown(trained: Path, tmp_path: Path) -> None:
    report = replace(run_report(trained), best_epoch=1)

    write_run_page(report, tmp_path / "a.html")

    text = (tmp_path / "a.html").read_text()
    best, last = (report.history["train_loss"].iloc[k] for k in (0, 1))
    assert f'<td class="n">{best:.3f}</td><td class="n">{last:.3f}</td>' in text
    assert np.isfinite([best, last]).all()
