"""Test the epoch loop: the files of a run, and that nothing is lost when it is interrupted."""

import logging
import os
import re
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn

from brats_seg import build_model, load_model
from brats_seg.cases.folds import read_split
from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData
from brats_seg.errors import BratsError, ConfigError, EnvironmentalError, ResumeError, UsageError
from brats_seg.labels import MODALITY_SUBSETS
from brats_seg.progress import _SCREEN, tracked, untracked
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import load_trained, read_checkpoint, run_locked
from brats_seg.training import run_plan
from brats_seg.training.losses import RunningSums, overlap_columns
from brats_seg.training.optimisation import Schedule
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_folder import RunFolder
from brats_seg.training.run_plan import plan_run
from brats_seg.training.state import Progress, RunState, read_state
from brats_seg.training.trainer import Outcome, Trainer, case_predictor, check_unchanged
from tests.builders import Run, write_case
from tests.training_builders import (
    TINY,
    StopAtCheck,
    check_same_runs,
    same,
    tiny_settings,
    train,
    weights,
)

SETTINGS = [
    "patch.per_case=2",
    "patch.foreground=0.5",
    "optimizer.lr=0.01",
    "training.n_epochs=2",
    "training.effective_batch=3",
]


def settings(*changes: str) -> Config:
    return tiny_settings(*SETTINGS, *changes)


@pytest.fixture(scope="module")
def finished(data: FoldData, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Outcome]:
    """A run of two epochs that nothing interrupted, with the settings of these tests."""
    run_path = tmp_path_factory.mktemp("finished") / "run"
    return run_path, Trainer(data=data, config=settings(), run_path=run_path).run(track=untracked)


@pytest.fixture
def copied(finished: tuple[Path, Outcome], tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished[0], tmp_path / "run"))


def test_a_run_writes_what_it_promises(data: FoldData, finished: tuple[Path, Outcome]) -> None:
    run_path, outcome = finished
    names = "best.pt last.pt config.yaml environment.json history.csv history.png split.csv"
    assert {path.name for path in run_path.iterdir()} == {".training.lock", *names.split()}
    assert outcome.finished
    assert read_split(run_path / "split.csv") == data.split
    history = pd.read_csv(run_path / "history.csv")
    assert history["epoch"].tolist() == [1, 2]
    assert history["step"].tolist() == [3, 6]
    assert load_config(text=(run_path / "config.yaml").read_text()) == settings()
    best = read_state(run_path / "best.pt")
    assert "optimizer" not in torch.load(run_path / "best.pt", weights_only=True)
    assert best.progress.best == history["val_dice"].max() == outcome.best
    assert best.card.identity.conventions == ("brats2017",)
    assert best.card.identity.modalities == ("t1n", "t1c", "t2w", "t2f")
    assert best.card.identity.subsets == ()
    # saved with the voxel counts of their validation
    assert sorted(best.progress.sums.counts) == list(data.split.validation)
    assert overlap_columns(best.progress.sums)["dice"] == outcome.best


def test_the_best_value_is_the_best_finite_one() -> None:
    kept: dict[str, list[float]] = {"val_dice": [], "val_loss": []}
    for watch, values in kept.items():
        trainer = Mock(state=Mock(progress=Progress()))
        trainer.plan.config = settings(f"validation.watch={watch}")
        trainer.folder.save_best = lambda state, _, own=values: own.append(state.progress.best)
        for value in (np.nan, 0.4, 0.4, 0.6, np.inf, 0.5, 0.3, -np.inf):
            Trainer._keep_if_best(trainer, value, RunningSums())
    assert kept == {"val_dice": [0.4, 0.6], "val_loss": [0.4, 0.3]}


NORM = nn.InstanceNorm3d(4, track_running_stats=True)
RESUMED = ["training.augment=full", "training.modality_dropout=0.5"]
QUICK = {("plateau", 4), ("cosine", 11)}
"""Stops between batches, and before the last case of the validation."""
STOPS = [
    pytest.param(name, n, marks=[] if (name, n) in QUICK else [pytest.mark.slow])
    for name in ("plateau", "cosine")
    for n in range(1, 12)
]


@pytest.fixture(scope="module")
def undisturbed(request: Any, data: FoldData, tmp_path_factory: Any) -> tuple[Path, Config]:
    run_path = tmp_path_factory.mktemp("undisturbed") / "run"
    config = settings(f"schedule.name={request.param}", *RESUMED)
    train(data, run_path, config)
    return run_path, config


@pytest.mark.parametrize(("undisturbed", "n_checks"), STOPS, indirect=["undisturbed"])
def test_a_stopped_run_ends_as_an_undisturbed_one(data, tmp_path, undisturbed, n_checks):
    """The run is stopped before every batch and every validation case of two epochs in turn."""
    expected_path, config = undisturbed
    stopped = train(data, tmp_path / "run", config, StopAtCheck(n_checks))
    resumed = train(data, tmp_path / "run", config)
    assert (stopped.finished, resumed.finished) == (False, True)
    check_same_runs(tmp_path / "run", expected_path)
    assert load_trained(tmp_path / "run" / "best.pt").card.identity.subsets == MODALITY_SUBSETS


def test_forgets_optimizer(data: FoldData, tmp_path: Path, finished: tuple[Path, Outcome]) -> None:
    """The negative control: the weights of the test above do depend on what is restored."""
    train(data, tmp_path / "run", settings(), StopAtCheck(4))
    content = torch.load(tmp_path / "run" / "last.pt", weights_only=True)
    content["optimizer"]["state"] = {}
    torch.save(content, tmp_path / "run" / "last.pt")
    train(data, tmp_path / "run", settings())
    assert not same(weights(finished[0] / "last.pt"), weights(tmp_path / "run" / "last.pt"))


def test_a_network_and_a_loss_by_dotted_name(data: FoldData, tmp_path: Path, run: Run) -> None:
    channels = {"in_channels": 4, "out_channels": 3, "features": [4, 4, 8, 8, 8, 4]}
    assignments = [*TINY, *SETTINGS, "training.n_epochs=1", "patch.size=[32, 32, 32]"]
    values = {"model.name": "monai.networks.nets.BasicUNet", "model.arguments": channels}
    values |= {"loss.name": "monai.losses.DiceFocalLoss", "loss.arguments": {"sigmoid": True}}
    config = load_config(assignments=assignments, values=values)
    assert np.isfinite(train(data, tmp_path / "run", config).history[0]["val_loss"])
    device = Device(torch_device=torch.device("cpu"))
    (member,) = load_model([tmp_path / "run"], device).members
    image = torch.randn(1, 4, 32, 32, 32)
    built = build_model(config.model, (32, 32, 32)).eval()
    built.load_state_dict(weights(tmp_path / "run" / "best.pt"))
    with torch.inference_mode():
        assert torch.equal(member.network(image), built(image))
    write_case(tmp_path / "scans", labelled=False)
    done = run("predict", tmp_path / "scans", "-o", "out", "--model", tmp_path / "run")
    assert (done.code, (tmp_path / "out" / "BraTS2021_00000.nii.gz").exists()) == (0, True)


def test_a_stop_that_cannot_be_saved_is_asked_for_once(data, tmp_path, monkeypatch):
    """Other ranks have stopped then, and do not answer."""
    answers: list[bool] = []
    monkeypatch.setattr(Ranks, "any", lambda _, flag: answers.append(flag) or flag)
    monkeypatch.setattr(RunFolder, "save", Mock(side_effect=EnvironmentalError("disk full")))
    with pytest.raises(EnvironmentalError, match="disk full"):
        train(data, tmp_path, settings(), StopAtCheck(0))
    assert answers == [True]


def test_dropout_draws_the_same_after_a_restart(data: FoldData, tmp_path: Path) -> None:
    for name, stops in {"undisturbed": [None], "run": [StopAtCheck(2), None]}.items():
        for stop in stops:
            torch.manual_seed(3)
            layers = nn.Conv3d(4, 6, 3, padding=1), nn.Dropout3d(0.5), nn.Conv3d(6, 3, 1)
            train(data, tmp_path / name, settings(), stop, network=nn.Sequential(*layers))
    check_same_runs(tmp_path / "run", tmp_path / "undisturbed")


class InDouble(nn.Sequential):
    def __init__(self) -> None:
        torch.manual_seed(0)
        super().__init__(nn.Conv3d(4, 6, 3, padding=1), nn.InstanceNorm3d(6), nn.Conv3d(6, 3, 1))
        self.double()

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image.double())


@pytest.mark.parametrize("batch_dice", ["true", "false"])
def test_the_micro_batch_changes_nothing(data: FoldData, tmp_path: Path, batch_dice: str) -> None:
    five = (data.split.train * 2)[:5]
    ten = replace(data, split=replace(data.split, train=five))
    updates = []
    for micro_batch in (1, 2, 4):
        # Adam divides by the size of the gradient: where it is almost zero, rounding dominates
        changes = ("training.n_epochs=1", "training.effective_batch=4", "optimizer.name=sgd")
        changes += (f"training.micro_batch={micro_batch}", f"loss.batch_dice={batch_dice}")
        config, network = settings(*changes), InDouble()
        before = nn.utils.parameters_to_vector(network.parameters()).detach().clone()
        outcome = train(ten, tmp_path / f"run{micro_batch}", config, network=network)
        assert outcome.history[0]["step"] == 3
        updates.append(nn.utils.parameters_to_vector(network.parameters()).detach() - before)
    for update in updates[1:]:
        assert float((update - updates[0]).norm() / updates[0].norm()) <= 1e-12


def test_other_settings_cases_and_networks_are_refused(data: FoldData, tmp_path: Path) -> None:
    run_path, cosine = tmp_path / "run", ("schedule.name=cosine", "start.path=none")
    train(data, run_path, settings(*cosine), StopAtCheck(2))
    # this schedule looks ahead
    for key, change in (("optimizer.lr", "0.01 -> 0.02"), ("training.n_epochs", "2 -> 3")):
        with pytest.raises(ResumeError, match=f"{key}: {change}\n.*--fresh"):
            train(data, run_path, settings(*cosine, f"{key}={change.split()[-1]}"))
    with pytest.raises(ResumeError, match="trained on other cases"):
        train(replace(data, fingerprint="other"), run_path, settings(*cosine))
    with pytest.raises(ResumeError, match="another network"):
        train(data, run_path, settings(*cosine), network=nn.Conv3d(4, 3, 1))
    # what does not change the result may change, and these schedules do not look ahead
    changes = ("training.micro_batch=2", "training.n_epochs=3", "training.n_workers=1")
    changes += ("training.device=cpu", "training.checkpoint_minutes=1")
    changes += ("cases.skip_bad=true", "cases.label_files='*_seg.nii.gz'")
    for name in ("plateau", "constant"):
        schedule, run_path = f"schedule.name={name}", tmp_path / name
        train(data, run_path, settings(schedule), StopAtCheck(2))
        resumed = Trainer(data=data, config=settings(schedule, *changes), run_path=run_path)
        assert len(resumed.run(track=untracked).history) == 3
        assert resumed.state.fallback.mode.micro_batch == 2


def test_a_run_that_is_given_more_epochs_leaves_its_cool_down_at_once(data, tmp_path: Path) -> None:
    cool_down = ("schedule.name=plateau", "schedule.cool_down=1")
    train(data, tmp_path, settings(*cool_down, "training.n_epochs=1"))
    train(data, tmp_path, settings(*cool_down, "training.n_epochs=4"), StopAtCheck(0))
    (group,) = read_checkpoint(tmp_path / "last.pt")["optimizer"]["param_groups"]
    assert group["lr"] == pytest.approx(0.01 * 3 / 4)


def test_a_run_goes_on_in_the_memory_mode_that_it_had(data: FoldData, tmp_path: Path) -> None:
    def stopped(n_checks: int, *changes: str, index: int = 0) -> str:
        trainer = Trainer(data=data, config=settings(*changes), run_path=tmp_path)
        trainer.state.fallback.index = index
        trainer.run(stop=StopAtCheck(n_checks), track=untracked)
        return str(trainer.state.fallback.mode)

    least = stopped(1, index=2)
    assert stopped(0) == least == "micro-batch 1, checkpointing all"
    assert stopped(0, "training.micro_batch=2") == "micro-batch 2"
    # that of another machine
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    torch.save({**content, "mode": "micro-batch 2, checkpointing host"}, tmp_path / "last.pt")
    assert stopped(0, "training.micro_batch=2") == "micro-batch 2"


def test_a_run_goes_on_where_the_native_precision_is_another(data, tmp_path, monkeypatch) -> None:
    """Only float16 has a loss scale to resume."""
    scales = []
    for dtype in (None, torch.float16, torch.float16, None):
        device = Device(torch_device=torch.device("cpu"), autocast_dtype=dtype)
        monkeypatch.setattr(run_plan, "choose_device", lambda *_, device=device: device)
        train(data, tmp_path, settings(), StopAtCheck(1))
        scales.append(read_checkpoint(tmp_path / "last.pt").get("scaler", {}).get("scale"))
    assert scales == [None, scales[1], scales[1], None]
    assert scales[1] > 1


def test_a_session_that_is_shorter_than_a_validation_goes_on_with_it(data, tmp_path) -> None:
    """Each session has time for one of two held-out cases."""
    config = settings("training.n_epochs=1")
    train(data, tmp_path / "undisturbed", config)
    stops = (StopAtCheck(5), StopAtCheck(2))
    assert [train(data, tmp_path / "run", config, stop).finished for stop in stops] == [False, True]
    check_same_runs(tmp_path / "run", tmp_path / "undisturbed")


def test_best_weights_that_were_lost_are_replaced(data, tmp_path, caplog) -> None:
    """Of a run in a new place, for example, to which last.pt alone was copied."""
    same_all_the_time = settings("optimizer.lr=1e-30")
    train(data, tmp_path, same_all_the_time, StopAtCheck(8))
    (tmp_path / "best.pt").unlink()
    best = train(data, tmp_path, same_all_the_time).best
    assert best == read_state(tmp_path / "best.pt").progress.best
    assert "best.pt is missing: the next validation writes it" in caplog.text


def test_a_run_does_not_end_before_its_first_validation(data: FoldData, tmp_path: Path) -> None:
    seldom = ("training.n_epochs=4", "validation.every=4")
    train(data, tmp_path, settings(*seldom), StopAtCheck(14))
    lacking = r"1 of 1 epochs and lacks best\.pt: .* more --epochs if sched"
    with pytest.raises(ResumeError, match=lacking):
        train(data, tmp_path, settings("training.n_epochs=1", "validation.every=4"))
    assert "n_epochs: 4" in (tmp_path / "config.yaml").read_text()
    assert train(data, tmp_path, settings(*seldom)).finished


def test_a_run_whose_last_state_was_lost_is_not_overwritten(data, copied) -> None:
    (copied / "last.pt").unlink()
    before = (copied / "best.pt").read_bytes()
    with pytest.raises(ResumeError, match=r"has a history and lacks last\.pt.*copy it back"):
        train(data, copied, settings())
    assert (copied / "best.pt").read_bytes() == before


def test_fresh_does_not_rename_a_folder_without_a_name(data, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "last.pt").touch()
    trainer = Trainer(data=data, config=settings(), run_path=Path())
    with pytest.raises(UsageError, match=r"renames the folder of a run, and \. is not its name"):
        trainer.run(fresh=True, track=untracked)


def test_fresh_sets_the_earlier_run_aside_and_locks_both(data, tmp_path, monkeypatch):
    """Another process may hold the old lock of the renamed folder open."""
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    train(data, tmp_path / "run", settings("training.n_epochs=1"))
    trainer = Trainer(data=data, config=settings("training.n_epochs=1"), run_path=tmp_path / "run")
    refused = set()

    def try_both(*_: object) -> None:
        for name in ("run", "run.1"):
            with pytest.raises(UsageError), run_locked(tmp_path / name):
                pytest.fail("both train")
            refused.add(name)
        hook.remove()

    hook = trainer.state.network.register_forward_pre_hook(try_both)
    trainer.run(fresh=True, track=untracked)
    with pytest.raises(UsageError, match="trained already: make a new Trainer"):
        trainer.run(fresh=True, track=untracked)
    assert refused == {path.name for path in tmp_path.iterdir()} == {"run", "run.1"}
    check_same_runs(tmp_path / "run", tmp_path / "run.1")
    with run_locked(tmp_path / "run"), run_locked(tmp_path / "run.1"):
        pass


def test_a_lost_history_is_written_when_a_run_opens(data: FoldData, copied: Path) -> None:
    expected = (copied / "history.csv").read_bytes()
    (copied / "history.png").unlink()
    (copied / "history.csv").write_bytes(b"")
    Trainer(data=data, config=settings(), run_path=copied).run(track=untracked)
    assert (copied / "history.csv").read_bytes() == expected
    assert (copied / "history.png").exists()


LEARNT = "loss.name=tests.test_accumulation.LearntWeights"


@pytest.mark.parametrize(
    "n_checks", [4, *(pytest.param(n, marks=pytest.mark.slow) for n in (1, 7))]
)
def test_a_loss_by_dotted_name_is_resumed(data: FoldData, tmp_path: Path, n_checks: int) -> None:
    """Bit for bit, with the state of the optimizer that belongs to its parameters."""
    train(data, tmp_path / "undisturbed", settings(LEARNT))
    train(data, tmp_path / "run", settings(LEARNT), StopAtCheck(n_checks))
    train(data, tmp_path / "run", settings(LEARNT))
    check_same_runs(tmp_path / "run", tmp_path / "undisturbed")
    last, best = (torch.load(tmp_path / "run" / name) for name in ("last.pt", "best.pt"))
    assert not torch.equal(last["criterion"]["loss.s"], torch.linspace(-0.5, 0.5, 3))
    assert "criterion" not in best


class Hungry(nn.Module):
    n_refused = 0

    def forward(self, image: Tensor) -> Tensor:
        if image.shape[-1] > 8:
            self.n_refused += 1
            raise torch.OutOfMemoryError("CUDA out of memory")
        return image[:, :3]


def test_memory_runs_out_in_validation(data: FoldData, caplog: pytest.LogCaptureFixture) -> None:
    network = Hungry()
    predict = case_predictor(network, plan_run(settings(), data))
    image = torch.rand(4, 20, 18, 16)
    for _ in range(2):
        torch.testing.assert_close(predict(image), image[:3])
    assert network.n_refused == 1
    assert "validation: memory ran out with the windows of prediction: CUDA" in caplog.text
    assert "with windows of 8x8x8" in caplog.text


class WithAuxiliary(nn.Conv3d):
    """Returns the logits with others, as the networks of torchvision do."""

    def forward(self, image: Tensor) -> dict[str, Tensor]:
        logits = super().forward(image)
        return {"aux": nn.functional.avg_pool3d(logits, 2), "out": logits}


def auxiliary_loss(output: dict[str, Tensor] | Tensor, target: Tensor) -> Tensor:
    bce = nn.functional.binary_cross_entropy_with_logits
    if isinstance(output, Tensor):  # in validation
        return bce(output, target)
    return bce(output["out"], target) + bce(output["aux"], nn.functional.max_pool3d(target, 2))


@pytest.mark.parametrize("given", [{}, {"criterion": auxiliary_loss}])
def test_networks_with_dictionaries(data, tmp_path, given):
    config = settings("loss.batch_dice=true")
    outcome = train(data, tmp_path, config, network=WithAuxiliary(4, 3, 1), **given)
    assert outcome.finished
    assert np.isfinite(outcome.history[0]["val_loss"])


class OfOneSize(nn.Conv3d):
    """Takes patches of 8x8x8 alone, as transformers with learnt positions take those of one size."""

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image + torch.zeros(8, 8, 8))


def test_given_networks_and_losses_of_any_kind(data: FoldData, tmp_path: Path) -> None:
    config = settings()
    loss = {"criterion": nn.BCEWithLogitsLoss()}
    known = build_model(config.model, (8, 8, 8))
    given = ({"network": OfOneSize(4, 3, 1)}, loss, {"network": known, **loss})
    for n, kind in enumerate(given):
        assert train(data, tmp_path / str(n), config, **kind).finished


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (nn.Conv3d(1, 3, 1), r"does not take a patch \(1, 4, 8, 8, 8\).* 4 channels in and 3 out"),
        (nn.Conv3d(4, 3, 1).half(), "does not take a patch .* in float32"),
        (NORM, r"returned \(1, 4, 8.*logits of \(1, 3, 8"),
        (nn.Conv3d(4, 3, 3), r"returned \(1, 3, 6, 6, 6\).*expected logits of \(1, 3, 8, 8, 8\)"),
        (nn.Sequential(nn.AdaptiveAvgPool3d(1), nn.InstanceNorm3d(4)), "does not take .*training"),
        (nn.Conv3d(4, 3, 1).requires_grad_(False), "nothing can be trained"),
    ],
)
def test_a_network_that_cannot_be_trained_is_named_at_once(data, tmp_path, network, message):
    with pytest.raises(ConfigError, match=message):
        Trainer(data=data, config=settings(), run_path=tmp_path, network=network)


def test_lazy_layers_draw_their_weights_before_a_run_begins(data: FoldData, tmp_path: Path) -> None:
    def lazy() -> nn.Module:
        return nn.Sequential(nn.LazyConv3d(4, 1), nn.LazyBatchNorm3d(), nn.LazyConv3d(3, 1))

    config = settings("training.micro_batch=3")
    train(data, tmp_path / "stopped", config, StopAtCheck(0), network=lazy())
    for name in ("stopped", "undisturbed"):
        train(data, tmp_path / name, config, network=lazy())
    check_same_runs(tmp_path / "stopped", tmp_path / "undisturbed")


def test_an_infinite_loss(data: FoldData, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    def infinite(output: Tensor, target: Tensor) -> Tensor:
        return output.sum() * float("inf")

    config, network = settings("training.n_epochs=99"), nn.Conv3d(4, 3, 1)
    with pytest.raises(BratsError, match=r"50 steps in a row .* Lower optimizer\.lr"):
        train(data, tmp_path / "run", config, network=network, criterion=infinite)
    assert "its gradient was not finite" in caplog.text
    progress = Progress()
    for skipped in (True, True, False):
        RunState.after_batch(Mock(progress=progress), Mock(skipped=skipped, loss=1.0, n_patches=1))
    # 50 in a row are too many; others are forgotten
    assert (progress.n_batches, progress.n_skipped) == (3, 0)


def test_between_validations_a_plateau_watches_the_same_patches(data, tmp_path, monkeypatch):
    watched: list[float] = []
    monkeypatch.setattr(Schedule, "after_validation", lambda _, loss: watched.append(loss))
    rate = "optimizer.lr=1e-30"  # the network stays as it is
    every = ("training.n_epochs=3", "validation.every=2", rate)
    train(data, tmp_path / "plateau", settings(*every, "schedule.name=plateau"))
    train(data, tmp_path / "whole", settings(*every, "validation.every=1", "schedule.name=plateau"))
    train(data, tmp_path / "cosine", settings(*every, "schedule.name=cosine"))
    histories = (tmp_path / name / "history.csv" for name in ("plateau", "whole", "cosine"))
    patches, whole, cosine = map(pd.read_csv, histories)
    # the last epoch is always validated
    assert patches["val_dice"].isna().tolist() == [True, False, False]
    columns = patches["patch_loss"], whole["val_loss"], cosine["val_loss"].dropna()
    assert watched == pytest.approx([loss for column in columns for loss in column])
    assert len({f"{loss:.6f}" for loss in patches["patch_loss"]}) == 1
    assert abs(watched[0] - watched[3]) > 1e-4
    assert "patch_loss" not in {*whole, *cosine}


@pytest.mark.parametrize("augment", ["none", "full"])
def test_the_first_losses_are_those_on_record(data: FoldData, tmp_path: Path, augment: str) -> None:
    """A refactoring must not move them; processors differ in the last digits only."""
    changes = (f"training.augment={augment}", "optimizer.name=adamw", "schedule.name=constant")
    table = pd.read_csv(Path(__file__).parent / "golden" / "fold0_losses.csv")
    recorded = table[table["augment"] == augment]
    outcome = train(data, tmp_path / "run", settings(*changes, "optimizer.lr=1e-3"))
    for column in ("train_loss", "val_loss"):
        found = [row[column] for row in outcome.history]
        assert found == pytest.approx(recorded[column].tolist(), rel=1e-4), column


def test_cases_that_were_replaced_since_they_were_opened_are_refused(data: FoldData) -> None:
    check_unchanged(data)
    with pytest.raises(UsageError, match="another process has prepared the cases in"):
        check_unchanged(replace(data, fingerprint="another"))


def test_what_goes_without_saying_is_not_logged(data, copied, tmp_path, caplog):
    often = settings("validation.every=auto", "patch.per_case=1000")
    with caplog.at_level(logging.INFO):
        train(data, copied, settings("training.n_epochs=2"))
        train(data, tmp_path / "often", often, StopAtCheck(0))
    assert not re.search("resuming|whole cases are validated", caplog.text)


def test_log_and_bar_show_loss_best_value_and_the_end(data, tmp_path, caplog, monkeypatch):
    bars: list[tuple[str, str]] = []

    def note(work: Any) -> None:
        bars.append((work.what, work.text() if work.text else ""))

    monkeypatch.setattr(_SCREEN, "refresh", note)
    monkeypatch.setattr("brats_seg.training.timing.SAID_AFTER_S", 0)
    trainer = Trainer(data=data, config=settings("training.n_epochs=3"), run_path=tmp_path / "run")
    with caplog.at_level(logging.INFO):
        trainer.run(track=tracked)
    said = [line for line in caplog.messages if re.match(r"about|epoch \d/3", line)]
    assert re.match(r"about .* to the end of epoch 3, of which validation takes", said[0])
    left = [r"epoch 1/3 .*, about .* left$", r"epoch 2/3 .*, about .* left$", r"epoch 3/3 .*\d$"]
    assert all(map(re.search, left, said[1:]))
    # nothing is known before the first batch is done
    first, later = ([t for what, t in bars if what == f"epoch {n}/3" and t] for n in (1, 2))
    assert re.fullmatch(r"loss \d\.\d{3}", first[0])
    assert re.fullmatch(r"loss \d\.\d{3}, best Dice 0\.\d{3}, about .* left", later[-1])
    assert [what for what, _ in bars].count("validation") > 4, "windows are counted too"
    with trainer._stop.listening():
        os.kill(os.getpid(), signal.SIGINT)
    assert trainer._progress_text() == "stopping soon; a second Ctrl-C does not save"
