"""A process that dies at any moment of a window: the run that goes on ends with the same weights."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import load_config
from brats_seg.data.fold import FoldData, open_fold
from brats_seg.progress import untracked
from brats_seg.training.checkpoints import load_checkpoint
from brats_seg.training.trainer import Trainer
from tests.builders import write_case

SETTINGS = [
    "folds.n_folds=3",
    "patch.size=[8, 8, 8]",
    "model.widths=[4, 8]",
    "training.n_epochs=2",
    "training.effective_batch=4",
    "training.n_workers=0",
    "training.precision=fp32",
    "validation.every=2",
    # as often as it can
    "training.checkpoint_minutes=1e-9",
]
N_FORWARD = {"false": 8, "true": 14}
"""Of two epochs with one window of four: each micro-batch once, or all but the last twice."""


class DiedError(BaseException):
    """What nothing catches, as nothing catches `kill -9`."""


class Death:
    """Comes in the n-th forward pass of training."""

    def __init__(self, n: int) -> None:
        self.n_left = n

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.n_left -= module.training
        if self.n_left == 0:
            raise DiedError


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    """Six patients in three folds: four patches an epoch."""
    root = tmp_path_factory.mktemp("scans")
    for number in range(6):
        write_case(root, f"BraTS2021_{number:05d}", seed=number)
    config = load_config(assignments=SETTINGS)
    return open_fold(root, fold=0, config=config, prepared_path=tmp_path_factory.mktemp("prepared"))


def trainer_of(data: FoldData, run_path: Path, batch_dice: str) -> Trainer:
    config = load_config(assignments=[*SETTINGS, f"loss.batch_dice={batch_dice}"])
    return Trainer(data=data, config=config, run_path=run_path)


@pytest.fixture(scope="module")
def undisturbed(data: FoldData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {loss: tmp_path_factory.mktemp("undisturbed") for loss in N_FORWARD}
    for batch_dice, path in runs.items():
        trainer_of(data, path, batch_dice).run(track=untracked)
    return runs


@pytest.mark.parametrize(
    ("batch_dice", "n"),
    [(loss, n) for loss, count in N_FORWARD.items() for n in range(1, count + 1)],
)
def test_death_in_any_forward_pass_changes_no_bit(
    data: FoldData, tmp_path: Path, undisturbed: dict[str, Path], batch_dice: str, n: int
) -> None:
    dying = trainer_of(data, tmp_path, batch_dice)
    dying.network.register_forward_pre_hook(Death(n))
    with pytest.raises(DiedError):
        dying.run(track=untracked)

    outcome = trainer_of(data, tmp_path, batch_dice).run(track=untracked)

    assert outcome.finished
    expected = load_checkpoint(undisturbed[batch_dice] / "last.pt", torch.device("cpu"))
    found = load_checkpoint(tmp_path / "last.pt", torch.device("cpu"))
    assert all(torch.equal(found.model[key], expected.model[key]) for key in expected.model)


def test_there_are_no_more_forward_passes_than_those(data: FoldData, tmp_path: Path) -> None:
    for batch_dice, count in N_FORWARD.items():
        trainer = trainer_of(data, tmp_path / batch_dice, batch_dice)
        death = Death(count + 1)
        trainer.network.register_forward_pre_hook(death)
        trainer.run(track=untracked)
        assert death.n_left == 1
