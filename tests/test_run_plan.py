"""Test what is fixed before the first step: patches of every step, validations, windows."""

from math import ceil, prod
from pathlib import Path

import pandas as pd
import pytest

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import whole_case
from brats_seg.runtime.windows import predict_logits
from brats_seg.training.run_plan import VALIDATION_SHARE, RunPlan, plan_run
from tests.training_builders import StopAtCheck, open_six, tiny_settings, train


def settings(*changes: str) -> Config:
    return tiny_settings("training.effective_batch=2", "validation.every=auto", *changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    return open_six(tmp_path_factory, settings())


def window_voxels(plan: RunPlan) -> int:
    """Count the voxels that a network gets in a validation."""
    seen = []
    for case_id in plan.data.split.validation:
        image = whole_case(plan.data.folder, case_id).image.float()
        predict_logits(
            lambda window: seen.append(window[0, 0].numel()) or window[:, :3],
            image,
            window=plan.window(image.shape[1:]),
            overlap=plan.config.validation.overlap,
        )
    return sum(seen)


@pytest.mark.parametrize("overlap", [0, 0.5])
@pytest.mark.parametrize("per_case", [1, 5, 200])
def test_validations_cost_at_most_the_stated_share_of_the_training(
    data: FoldData, overlap: float, per_case: int
) -> None:
    config = settings(f"validation.overlap={overlap}", f"patch.per_case={per_case}")
    trained = 3 * len(data.split.train) * per_case * prod(config.patch.size)

    plan = plan_run(config, data)

    assert plan.validation_cost == window_voxels(plan) / trained
    assert plan.validate_every == ceil(plan.validation_cost / VALIDATION_SHARE)
    if per_case == 1:
        assert plan.validate_every > 1


def test_whole_crops_are_validated_by_their_voxels(data: FoldData) -> None:
    # four cases are learnt from at three passes each, two are held out
    assert plan_run(settings("patch.size=whole"), data).validate_every == 1
    assert plan_run(settings("patch.size=whole", "validation.every=7"), data).validate_every == 7


def test_a_run_is_validated_then_and_at_its_end(
    data: FoldData, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings("patch.per_case=12", "validation.overlap=0", "training.n_epochs=5")
    assert plan_run(config, data).validate_every == 2

    with caplog.at_level("INFO", logger="brats_seg"):
        train(data, tmp_path / "run", config, StopAtCheck(60))
        train(data, tmp_path / "run", config)

    history = pd.read_csv(tmp_path / "run" / "history.csv")
    assert history["val_dice"].isna().tolist() == [True, False, True, False, False]
    assert "whole cases are validated every 2 epochs, and after the last one" in caplog.text


def test_the_steps_of_a_run_are_counted_and_hold_every_patch_once(data: FoldData) -> None:
    plan = plan_run(settings("training.effective_batch={0: 4, 1: 9}", "patch.per_case=3"), data)

    assert plan.n_patches == 12
    assert [plan.n_steps(n) for n in range(4)] == [0, 3, 5, 7]
    for epoch, sizes in ((0, [4, 4, 4]), (1, [9, 3])):
        keys = plan.keys(epoch)
        assert [len(batch) for batch in keys] == sizes
        assert len({key for batch in keys for key in batch}) == 12
        assert keys == plan.keys(epoch)


def test_a_network_by_dotted_name_gets_whole_cases_in_multiples_of_32(data: FoldData) -> None:
    plan = plan_run(settings("patch.size=whole", "model.name=torch.nn.Conv3d"), data)

    assert all(n % 32 == 0 for n in plan.patch)
