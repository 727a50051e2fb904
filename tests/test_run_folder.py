"""Test the folder of a run: what is read is what was written, and a failed write leaves the old file."""

import logging
from dataclasses import replace
from pathlib import Path
from shutil import copy

import pytest
import torch
from torch import Tensor, nn

from brats_seg import Trainer, export_model
from brats_seg.cases.folds import Split, write_split
from brats_seg.config import Config, StartConfig
from brats_seg.data.fold import FoldData
from brats_seg.errors import EnvironmentalError, ResumeError, UsageError
from brats_seg.progress import untracked
from brats_seg.runtime.weights import read_checkpoint
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_folder import RunFolder
from brats_seg.training.run_plan import plan_run
from brats_seg.training.state import build_network, match_weights, new_state, read_state, start_from
from tests.builders import limited_files, write_case
from tests.inference_builders import IDENTITY, write_run
from tests.training_builders import (
    StopAtCheck,
    check_same_runs,
    same,
    tiny_settings,
    train,
    weights,
)

SETTINGS = ["training.n_epochs=2", "training.effective_batch=4", "validation.every=2"]
# as often as it can
SETTINGS += ["training.checkpoint_minutes=1e-9"]
N_FORWARD = {"false": 11, "true": 17}
QUICK = {("false", 1), ("true", 17)}
"""Forward passes of two epochs of one batch of four: one per micro-batch, or all but one twice."""


class DiedError(BaseException):
    """An error that no code catches, like `kill -9`."""


class Death:
    def __init__(self, n: int) -> None:
        self.n_left = n

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.n_left -= module.training
        if self.n_left == 0:
            raise DiedError


def trainer_of(data: FoldData, run_path: Path, batch_dice: str) -> Trainer:
    config = tiny_settings(*SETTINGS, f"loss.batch_dice={batch_dice}")
    return Trainer(data=data, config=config, run_path=run_path)


@pytest.fixture(scope="module")
def undisturbed(data: FoldData, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    runs = {loss: tmp_path_factory.mktemp("undisturbed") for loss in N_FORWARD}
    for batch_dice, path in runs.items():
        trainer, death = trainer_of(data, path, batch_dice), Death(N_FORWARD[batch_dice] + 1)
        trainer.state.network.register_forward_pre_hook(death)
        trainer.run(track=untracked)
        assert death.n_left == 1, "there are as many forward passes as those"
    return runs


@pytest.mark.parametrize(
    ("batch_dice", "n"),
    [
        pytest.param(loss, n, marks=[] if (loss, n) in QUICK else [pytest.mark.slow])
        for loss, count in N_FORWARD.items()
        for n in range(1, count + 1)
    ],
)
def test_a_kill_in_any_forward_pass_changes_no_bit(data, tmp_path, undisturbed, batch_dice, n):
    dying = trainer_of(data, tmp_path, batch_dice)
    dying.state.network.register_forward_pre_hook(Death(n))
    with pytest.raises(DiedError):
        dying.run(track=untracked)
    assert trainer_of(data, tmp_path, batch_dice).run(track=untracked).finished
    check_same_runs(tmp_path, undisturbed[batch_dice])


def test_a_limit_of_files_leaves_the_old_checkpoint(data: FoldData, tmp_path: Path) -> None:
    """torch reports it as a RuntimeError: "unexpected pos"."""
    state = new_state(plan_run(tiny_settings(*SETTINGS), data), ranks=Ranks())
    folder, settings = RunFolder(path=tmp_path), tmp_path / "config.yaml"
    settings.touch()
    folder.save(state)
    before = folder.last_path.read_bytes()
    with limited_files(5000), pytest.raises(EnvironmentalError, match=r"last\.pt .*ulimit -f"):
        folder.save(state)
    assert folder.last_path.read_bytes() == before
    assert {*tmp_path.iterdir()} == {settings, folder.last_path}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *((raw, "is not a checkpoint") for raw in (b"", b"not a checkpoint", b"PK\x03\x04 torn")),
        # it would run code
        ({"schema_version": 3, "model": Path("x")}, "is not a checkpoint"),
        *(
            (content, "found schema version .*; expected 3")
            for content in ({"schema_version": 99}, {"weight": torch.ones(1)}, [1])
        ),
    ],
)
def test_what_is_no_checkpoint_of_this_version_is_refused(tmp_path, content, message):
    path = tmp_path / "other.pt"
    if isinstance(content, bytes):
        path.write_bytes(content)
    else:
        torch.save(content, path)
    with pytest.raises(ResumeError, match=rf"other\.pt:? {message}"):
        read_state(path)


ANEW = " start anew with --fresh"


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"progress": {"epoch": "x"}}, f"epoch: expected a valid integer.*{ANEW}"),
        ({"progress": {"epoch": -3}}, f"epoch: expected greater than or equal to 0.*{ANEW}"),
        ({"progress": {"history": ("x",)}}, f"history.*{ANEW}"),
        ({"progress": {"sums": {"n_patches": "x"}}}, f"n_patches.*{ANEW}"),
        ({"progress": {"spent_s": -1.0}}, f"expected greater than or equal to 0.*{ANEW}"),
        ({"progress": 7}, f"is not a checkpoint of a run.*{ANEW}"),
        ({"started_from": 7}, f"expected a dictionary.*{ANEW}"),
        # of another run
        *(
            ({name: {}}, rf"entry {name} does not fit .* another network or loss")
            for name in ("model", "optimizer", "schedule")
        ),
    ],
)
def test_wrong_entries_are_refused(data, tmp_path, undisturbed, entries, message):
    before = torch.load(undisturbed["true"] / "last.pt", weights_only=True)
    torch.save({**before, **entries}, tmp_path / "last.pt")
    if ANEW in message:
        with pytest.raises(ResumeError, match=message):
            read_state(tmp_path / "last.pt")
        message = ANEW
    with pytest.raises(ResumeError, match=message):
        trainer_of(data, tmp_path, "true").run(track=untracked)


def test_other_scans_or_settings_are_refused_before_they_are_prepared(tiny_run, tmp_path: Path):
    """The demo and the scans of a reader both go to runs/fold0 unless a run is named."""
    run, config = RunFolder(path=tmp_path / "run"), tiny_settings("training.n_epochs=1")
    run.path.mkdir()
    write_case(tmp_path / "scans", "BraTS2021_00000")
    # phantoms have ids that real cases have as well
    for name, missing in (("demo_1", "demo_1, demo_2"), ("BraTS2021_00000", "demo_2")):
        write_split(Split(train=(name,), validation=("demo_2",)), run.path / "split.csv")
        run.check(tmp_path / "scans", config, fresh=True)
        copy(tiny_run / "last.pt", run.last_path)
        with pytest.raises(ResumeError, match=f"lacks cases of .*run: {missing}"):
            run.check(tmp_path / "scans", config)
    write_case(tmp_path / "scans", "demo_2")
    run.check(tmp_path / "scans", config)
    with pytest.raises(ResumeError, match=r"other settings:\n  store.spacing_mm: None -> \(2.0"):
        run.check(tmp_path / "scans", tiny_settings("store.spacing_mm=[2,2,2]"))


def test_a_folder_that_has_vanished_is_not_made_anew(tmp_path: Path, data: FoldData) -> None:
    state = new_state(plan_run(tiny_settings(*SETTINGS), data), ranks=Ranks())
    with pytest.raises(EnvironmentalError, match="run is not there any more: give it back"):
        RunFolder(path=tmp_path / "run").save(state)
    assert not (tmp_path / "run").exists()


def start_settings(*changes: str) -> Config:
    usual = ["optimizer.lr=0.01", "schedule.name=cosine"]
    usual += ["training.n_epochs=2", "training.effective_batch=2"]
    return tiny_settings(*usual, *changes)


def rate_of(run_path: Path) -> float:
    return float(read_checkpoint(run_path / "last.pt")["optimizer"]["param_groups"][0]["lr"])


def test_layers_are_taken_whole_by_name_and_shape() -> None:
    """A bias that fits beside a convolution that does not is not taken."""
    network = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 3, 1), nn.Conv3d(3, 3, 1))
    other = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(9, 3, 1))
    loaded, unfit = match_weights(network, other.state_dict())
    assert set(loaded) == {"0.weight", "0.bias"}
    wrapped = {f"module._orig_mod.{name}": weight for name, weight in other.state_dict().items()}
    taken, _ = match_weights(nn.ModuleDict({"network": network}), wrapped)
    assert set(taken) == {"network.0.weight", "network.0.bias"}
    assert unfit == ["1 (3x2x1x1x1 here, 3x9x1x1x1 there)", "2 (not among them)"]


def test_a_run_starts_with_the_best_weights_of_its_parent(data, tiny_run, tmp_path, caplog):
    config = start_settings(f"start.path={tiny_run}")
    with caplog.at_level(logging.INFO):
        train(data, tmp_path / "run", config, StopAtCheck(0))
    assert same(weights(tmp_path / "run" / "last.pt"), weights(tiny_run / "best.pt"))
    saved = read_state(tmp_path / "run" / "last.pt")
    assert saved.started_from.path == str(tiny_run)
    assert saved.started_from.learnt_from == data.split.train
    assert str(tiny_run) in (tmp_path / "run" / "config.yaml").read_text()
    loaded = "model.name 'unet', model.widths 4,8): 14 of 14 layers loaded, learning rate times 0.3"
    assert loaded in caplog.text
    assert rate_of(tmp_path / "run") == pytest.approx(0.3 * config.optimizer.lr)
    assert "held out here" not in caplog.text


def test_held_out_cases_that_a_parent_has_learnt_from_are_named(data, tiny_run, tmp_path, caplog):
    config = start_settings(f"start.path={tiny_run}", "training.n_epochs=1")
    train(data, tmp_path / "child", config)
    ids = data.split.train
    (tmp_path / "child" / "split.csv").write_text("case_id,role\nanother,train\nmore,validation\n")
    split = replace(data.split, train=data.split.validation, validation=ids)
    seen = replace(data, split=split, conventions=("brats2023",), spacing_mm=(2.0, 2.0, 2.0))
    network = build_network(config, (8, 8, 8))
    with caplog.at_level(logging.INFO):
        started = start_from(network, StartConfig(path=str(tmp_path / "child")), seen)
    assert started.learnt_from == tuple(sorted({*ids, "another"}))
    assert f"learnt from 4 of 4 cases that are held out here: {', '.join(ids)}" in caplog.text
    assert "learnt at voxels of 1x1x1 mm; these are of 2x2x2 mm" in caplog.text


def test_a_run_starts_from_the_shipped_network(data, tiny_run, tmp_path, monkeypatch, caplog):
    caplog.set_level(logging.INFO)
    export_model([tiny_run], tmp_path / "shipped")
    shipped = "brats_seg.runtime.weights.SHIPPED"
    monkeypatch.setattr(shipped, tmp_path / "shipped")
    config = start_settings("start.path=auto")
    train(data, tmp_path / "run", config, StopAtCheck(0))
    entries = read_checkpoint(tmp_path / "run" / "last.pt")
    assert same(entries["model"], weights(tiny_run / "best.pt"))
    assert entries["started_from"]["path"].startswith("brats_seg ")
    (said,) = (x for x in caplog.text.splitlines() if "network that brats_seg carries" in x)
    assert "--start-from none" in said
    assert "held out here" not in caplog.text
    # another split, whose held-out cases it has learnt from
    ids = data.split.train
    other = replace(data, split=replace(data.split, train=data.split.validation, validation=ids))
    start_from(build_network(config, (8, 8, 8)), StartConfig(), other)
    assert f"anew) learnt from {len(ids)} of {len(ids)} cases that are held out here" in caplog.text
    # a run that was begun goes on without it
    monkeypatch.setattr(shipped, tmp_path / "nothing")
    assert train(data, tmp_path / "run", config).finished
    assert read_state(tmp_path / "run" / "last.pt").started_from is not None


def test_other_and_given_networks_keep_their_weights(data, tiny_run, tmp_path, monkeypatch):
    auto, wide = StartConfig(path="auto"), start_settings("model.widths=[8, 16]")
    export_model([tiny_run], tmp_path / "shipped")
    monkeypatch.setattr("brats_seg.runtime.weights.SHIPPED", tmp_path / "shipped")
    for config, start in ((wide, auto), (start_settings(), StartConfig(path="none"))):
        network, before = build_network(config, (8, 8, 8)), build_network(config, (8, 8, 8))
        before.load_state_dict(network.state_dict())
        assert start_from(network, start, data) is None
        assert same(network.state_dict(), before.state_dict())
    settings, run_path = start_settings("start.path=auto"), tmp_path / "run"
    train(data, run_path, settings, StopAtCheck(0))
    given, before = build_network(wide, (8, 8, 8)), build_network(wide, (8, 8, 8))
    trainer = Trainer(data=data, config=settings, run_path=run_path, network=given)
    with pytest.raises(ResumeError, match="of another network"):
        trainer.run()
    trainer.run(fresh=True, stop=StopAtCheck(0))
    assert rate_of(run_path) == settings.optimizer.lr
    name = "encoder.0.0.convolution.weight"
    assert torch.equal(weights(run_path / "last.pt")[name], before.state_dict()[name])


def test_what_holds_no_weights_that_fit_is_refused(data, tiny_run, tmp_path):
    (tmp_path / "other.pt").write_bytes(b"text")
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    export_model(runs, tmp_path / "exported")
    write_run(tmp_path / "run", identity=replace(IDENTITY, modalities=("t2f", "t1n", "t1c", "t2w")))
    for path, message in (
        (tmp_path / "nothing.pt", "holds no model: .*found no folder and no checkpoint"),
        (tmp_path, "holds no model: found a folder with 0, 1, exported, other.pt, run; expected"),
        (tmp_path / "exported/member0.safetensors", "found no folder and no checkpoint"),
        (tmp_path / "other.pt", "not a checkpoint that can be read"),
        (tiny_run, "nothing fits of .*model.widths 4,8"),
        (tmp_path / "exported", "holds 2 networks; expected one"),
        (tmp_path / "run", r"modalities \('t2f', 't1n', .*; expected \('t1n', "),
    ):
        with pytest.raises(UsageError, match=message):
            start_from(nn.Conv3d(4, 3, 1), StartConfig(path=str(path)), data)
    # the norm of the first block fits, and starts nothing
    norm = nn.Sequential()
    norm.add_module("norm", nn.InstanceNorm3d(4, affine=True))
    network = nn.ModuleDict({"encoder": nn.Sequential(nn.Sequential(norm))})
    with pytest.raises(UsageError, match="nothing fits of"):
        start_from(network, StartConfig(path=str(tiny_run)), data)


def test_other_widths_are_refused_with_shapes(data, tiny_run, tmp_path):
    train(data, tmp_path / "run", start_settings("training.n_epochs=1"))
    before = sorted(tmp_path.rglob("*"))
    config = start_settings(f"start.path={tiny_run}", "model.widths=[8, 16]")
    with pytest.raises(UsageError, match=r"widths 4,8\).*8x4x3x3x3 here, 4x4x3x3x3 there"):
        train(data, tmp_path / "new", config)
    with pytest.raises(UsageError, match="cannot start from itself"):
        train(data, tmp_path / "run", start_settings(f"start.path={tmp_path / 'run' / 'best.pt'}"))
    assert sorted(tmp_path.rglob("*")) == before
