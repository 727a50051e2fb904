"""Test which cases were held out of a run, and the folders that are refused."""

from dataclasses import replace
from pathlib import Path

import pytest

from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.data.fold import open_split
from brats_seg.errors import FoldError, UsageError
from brats_seg.inference.held_out import open_held_out
from brats_seg.runtime.weights import Decoding, FittedPrediction
from tests.inference_builders import IDENTITY, write_run
from tests.prepared import write_prepared

CASES = [f"BraTS2021_{number:05d}" for number in range(4)]


@pytest.fixture
def prepared(tmp_path: Path) -> Path:
    return write_prepared(tmp_path, n_cases=4)


def write_run_of(path: Path, prepared: Path, held_out: tuple[str, ...]) -> Path:
    """Write a run that was trained on all cases but some."""
    train = tuple(case_id for case_id in CASES if case_id not in held_out)
    split = Split(train=train, validation=held_out)
    fingerprint = open_split(prepared, split).fingerprint
    write_run(path, identity=replace(IDENTITY, fingerprint=fingerprint))
    write_split(split, path / SPLIT_NAME)
    return path


def test_held_out_cases_come_from_the_split_of_the_run(tmp_path: Path, prepared: Path) -> None:
    run = write_run_of(tmp_path / "run", prepared, (CASES[1], CASES[3]))

    held_out = open_held_out(run, prepared)

    assert held_out.data.split.validation == (CASES[1], CASES[3])
    assert held_out.data.split.train == (CASES[0], CASES[2])


def test_another_split_and_other_prepared_cases_are_refused(tmp_path: Path, prepared: Path) -> None:
    """A case that was trained on must not pass for one that was held out."""
    run = write_run_of(tmp_path / "run", prepared, (CASES[1],))
    path = run / SPLIT_NAME

    with pytest.raises(UsageError, match=r"found other cases, .* Give --data or --prepared"):
        open_held_out(run, tmp_path / "nowhere")
    path.write_text(path.read_text().replace(f"{CASES[0]},train", f"{CASES[0]},validation"))
    with pytest.raises(UsageError, match="was not trained on the cases prepared in"):
        open_held_out(run, prepared)
    path.unlink()
    with pytest.raises(FoldError, match=r"split\.csv does not exist"):
        open_held_out(run, prepared)


def test_what_is_no_run_is_refused(tmp_path: Path) -> None:
    (tmp_path / "exported").mkdir()
    (tmp_path / "exported" / "model.json").touch()

    with pytest.raises(UsageError, match=r"found an exported model; expected the folder of a run"):
        open_held_out(tmp_path / "exported", tmp_path)
    with pytest.raises(UsageError, match=r"found no best\.pt; expected the folder of a run"):
        open_held_out(tmp_path, tmp_path)


def test_the_key_changes_with_the_weights_and_not_with_what_is_fitted(
    tmp_path: Path, prepared: Path
) -> None:
    first = open_held_out(write_run_of(tmp_path / "run", prepared, (CASES[1],)), prepared)
    decoding = Decoding(thresholds=(0.4, 0.5, 0.6), smallest_et_mm3=5.0)
    fitted = FittedPrediction(decoding=decoding)
    card = first.trained.card.model_copy(update={"fitted": fitted})
    same = replace(first, trained=replace(first.trained, card=card))
    weights = {name: value + 1 for name, value in first.trained.weights.items()}
    other = replace(first, trained=replace(first.trained, weights=weights))

    assert same.key == first.key
    assert other.key != first.key
