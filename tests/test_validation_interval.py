"""Test how often a run is validated when the settings leave it to the program."""

from math import ceil, prod
from pathlib import Path

import pandas as pd
import pytest

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import whole_case
from brats_seg.runtime.windows import predict_logits
from brats_seg.training.epoch import validation_window
from brats_seg.training.validation_interval import VALIDATION_SHARE, validation_interval
from tests.training_builders import StopAtCheck, open_six, tiny_settings, train


def settings(*changes: str) -> Config:
    return tiny_settings("training.effective_batch=2", "validation.every=auto", *changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    return open_six(tmp_path_factory, settings())


def window_voxels(data: FoldData, config: Config) -> int:
    """Count the voxels that a network gets in a validation."""
    seen = []
    for case_id in data.split.validation:
        image = whole_case(data.folder, case_id).image.float()
        predict_logits(
            lambda window: seen.append(window[0, 0].numel()) or window[:, :3],
            image,
            window=validation_window(config, config.patch.size, image.shape[1:]),
            overlap=config.validation.overlap,
        )
    return sum(seen)


@pytest.mark.parametrize("overlap", [0, 0.5])
@pytest.mark.parametrize("per_case", [1, 5, 200])
def test_validations_cost_at_most_the_stated_share_of_the_training(
    data: FoldData, overlap: float, per_case: int
) -> None:
    config = settings(f"validation.overlap={overlap}", f"patch.per_case={per_case}")
    trained = 3 * len(data.split.train) * per_case * prod(config.patch.size)

    every = validation_interval(data, config)

    assert every == ceil(window_voxels(data, config) / (VALIDATION_SHARE * trained))
    if per_case == 1:
        assert every > 1


def test_whole_crops_are_validated_by_their_voxels(data: FoldData) -> None:
    # four cases are learnt from at three passes each, two are held out
    assert validation_interval(data, settings("patch.size=whole")) == 1
    assert validation_interval(data, settings("patch.size=whole", "patch.per_case=2")) == 1


def test_a_number_is_taken_as_it_is(data: FoldData) -> None:
    assert validation_interval(data, settings("validation.every=7")) == 7


def test_a_run_is_validated_then_and_at_its_end(
    data: FoldData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings("patch.per_case=12", "validation.overlap=0", "training.n_epochs=5")
    assert validation_interval(data, config) == 2

    with caplog.at_level("INFO", logger="brats_seg"):
        train(data, tmp_path / "run", config, StopAtCheck(60))
        train(data, tmp_path / "run", config)

    history = pd.read_csv(tmp_path / "run" / "history.csv")
    assert history["val_dice"].isna().tolist() == [True, False, True, False, False]
    assert "whole cases are validated every 2 epochs, and after the last one" in caplog.text
