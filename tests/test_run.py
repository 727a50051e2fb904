"""The page of a training run, from its folder and from its held-out cases."""

import os
import shutil
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.cases.folds import read_split
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.inference.held_out import open_held_out, predict_held_out
from brats_seg.pages.run import _environment, held_out_scores, placed_prediction, write_run_page
from brats_seg.pages.write import write_report
from brats_seg.progress import untracked
from brats_seg.runtime.weights import read_checkpoint, write_checkpoint
from brats_seg.training.run_folder import ENVIRONMENT_NAME
from tests.builders import SHAPE, write_nifti
from tests.inference_builders import CASES, CPU, write_fold
from tests.prepared import prepare

FILES = ("config.yaml", "split.csv", "history.csv", "best.pt")


@pytest.fixture
def run_copy(tiny_run: Path, tmp_path: Path) -> Path:
    (tmp_path / "fold0").mkdir()
    for name in FILES:
        shutil.copy(tiny_run / name, tmp_path / "fold0" / name)
    return tmp_path / "fold0"


def test_it_says_what_the_folder_of_the_run_says(tiny_run: Path, tmp_path: Path) -> None:
    write_run_page(tiny_run, tmp_path / "a.html")
    page = (tmp_path / "a.html").read_text()
    loss = pd.read_csv(tiny_run / "history.csv")["train_loss"].iloc[-1]
    for words in (
        "<dd>1 of 1</dd>",
        "4 to train on, 2 held out",
        "training.n_epochs",
        "<dt>device</dt><dd>cpu</dd>",
        f'<td class="n">{loss:.3f}</td>',
    ):
        assert words in page, words
    assert 'class="flags"' not in page


def test_the_worst_held_out_cases_are_drawn_in_place_also_without_tumour(brats_root, tmp_path):
    write_nifti(brats_root / CASES[1] / f"{CASES[1]}_seg.nii.gz", np.zeros(SHAPE, np.uint8))
    prepare(brats_root, folder := tmp_path / "prepared")
    held_out = open_held_out(write_fold(tmp_path / "run", folder, CASES[:2]), folder)
    scores, pictures = held_out_scores(held_out, CPU)
    # the one without tumour has the worst score
    for case, score in zip(predict_held_out(held_out, CPU, untracked), scores[::-1], strict=True):
        images, reference, prediction, _ = placed_prediction(held_out, case)
        assert tuple(dice(count_regions(prediction, reference, case.case_id))) == score.dice
        assert images["t1c"].shape == reference.shape[1:]
    assert [score for score, _, _ in pictures] == scores


@pytest.mark.parametrize(
    ("settings", "has_best", "epochs", "remark"),
    [
        # a run that was finished, and given another epoch
        ("n_epochs: 2", True, "1 of 2", "1 of 2 epochs are done."),
        ("n_epochs: 2", False, "1 of 2", "The run has not been validated yet"),
        ("n_epochs: 9\n  hours: 1", True, "1 of 1", ""),
        ("n_epochs: 9\n  hours: 1", False, "1", "The run has not been validated yet"),
    ],
)
def test_the_page_says_how_many_epochs_are_done(run_copy, settings, has_best, epochs, remark):
    config = (run_copy / "config.yaml").read_text().replace("  hours: null\n", "")
    (run_copy / "config.yaml").write_text(config.replace("n_epochs: 1", settings))
    if not has_best:
        (run_copy / "best.pt").unlink()
    (page,) = write_report([run_copy]).results
    assert page == run_copy / "report.html"
    assert f"<dt>Epochs</dt><dd>{epochs}</dd>" in page.read_text()
    assert remark in page.read_text()
    assert ('class="flags"' in page.read_text()) == bool(remark)


def test_held_out_cases_that_the_first_weights_learnt_are_named(run_copy: Path) -> None:
    held_out = read_split(run_copy / "split.csv").validation[0]
    best = read_checkpoint(run_copy / "best.pt")
    before = {"path": "old", "fingerprint": "a", "seen": (held_out,)}
    best |= {"card": best["card"].model_dump(), "started_from": before}
    write_checkpoint(best, run_copy / "best.pt")
    (page,) = write_report([run_copy]).results
    assert f"<dd>{held_out}: the weights that the run started from" in page.read_text()


@pytest.mark.parametrize("text", ["{", "null", "[1]", "[" * 9000])
def test_a_damaged_environment_is_not_shown(tmp_path: Path, text: str) -> None:
    (tmp_path / ENVIRONMENT_NAME).write_text(text)
    assert _environment(tmp_path) == {}
    (tmp_path / ENVIRONMENT_NAME).unlink()
    os.mkfifo(tmp_path / ENVIRONMENT_NAME)
    assert _environment(tmp_path) == {}


@pytest.mark.parametrize("name", ["history.csv", "config.yaml"])
def test_a_folder_that_is_no_run_is_refused(run_copy: Path, name: str) -> None:
    (run_copy / name).unlink()
    with pytest.raises(UsageError, match=f"{name} "):
        write_run_page(run_copy, run_copy / "a.html")
