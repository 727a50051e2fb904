"""Checkpoints: what is read is what was written, and a failed write leaves the old file."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.cases.folds import Split, write_split
from brats_seg.config import Config
from brats_seg.config_text import load_config
from brats_seg.data.fold import FoldData, open_fold
from brats_seg.errors import EnvironmentalError, ResumeError
from brats_seg.progress import untracked
from brats_seg.runtime.weights import ModelCard, ModelIdentity
from brats_seg.training.checkpoints import Checkpoint, Run, load_checkpoint, save_checkpoint
from brats_seg.training.state import Position
from brats_seg.training.tasks import RunningSums
from brats_seg.training.trainer import Trainer
from tests.builders import limited_files, write_case

CPU = torch.device("cpu")


def make_checkpoint() -> Checkpoint:
    sums = RunningSums(loss_sum=1.5, n_patches=2)
    sums.add("a", [[1, 2, 3]] * 4)
    return Checkpoint(
        model={"weight": torch.arange(3.0)},
        card=ModelCard(
            identity=ModelIdentity(conventions=("brats2017",), patch=(8, 8, 8), fingerprint="f"),
            config=Config(),
            notes={"part": [1, {"value": None}]},
        ),
        position=Position(epoch=3, n_batches=2, n_steps=11),
        sums=sums,
        history=({"epoch": 1, "val_dice": 0.5},),
        best=0.5,
        optimizer={"state": {0: {"exp_avg": torch.ones(3)}}, "param_groups": [{"lr": 0.1}]},
    )


def test_a_checkpoint_comes_back_as_it_was(tmp_path: Path) -> None:
    written = make_checkpoint()

    save_checkpoint(written, tmp_path / "last.pt")
    read = load_checkpoint(tmp_path / "last.pt", CPU)

    assert torch.equal(read.model["weight"], written.model["weight"])
    empty = {"model": {}, "optimizer": None}
    assert replace(read, **empty) == replace(written, **empty)


def test_the_entry_model_is_the_plain_state_dict(tmp_path: Path) -> None:
    """The weights can be used with torch alone."""
    save_checkpoint(make_checkpoint(), tmp_path / "last.pt")

    content = torch.load(tmp_path / "last.pt", weights_only=True)

    assert torch.equal(content["model"]["weight"], torch.arange(3.0))


def test_a_full_disk_leaves_the_old_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(make_checkpoint(), path)
    before = path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(EnvironmentalError, match=r"disk is full: .*last\.pt"):
        save_checkpoint(replace(make_checkpoint(), best=0.9), path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


def test_a_checkpoint_above_the_limit_of_files_leaves_the_old_one(tmp_path: Path) -> None:
    """torch reports it as a RuntimeError: "unexpected pos"."""
    path = tmp_path / "last.pt"
    save_checkpoint(make_checkpoint(), path)
    before = path.read_bytes()
    larger = replace(make_checkpoint(), model={"weight": torch.zeros(100_000)})

    for limit in (1000, 5000, 100_000, 400_000):
        with (
            limited_files(limit),
            pytest.raises(EnvironmentalError, match=r"last\.pt could not be written: .*ulimit -f"),
        ):
            save_checkpoint(larger, path)

    assert path.read_bytes() == before
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("content", [b"", b"not a checkpoint", b"PK\x03\x04 torn"])
def test_a_damaged_file_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "last.pt").write_bytes(content)

    with pytest.raises(ResumeError, match=r"last\.pt is not a checkpoint"):
        load_checkpoint(tmp_path / "last.pt", CPU)


def test_a_torn_file_is_named(tmp_path: Path) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(make_checkpoint(), path)
    path.write_bytes(path.read_bytes()[:-100])

    with pytest.raises(ResumeError, match=r"last\.pt is not a checkpoint"):
        load_checkpoint(path, CPU)


def test_a_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    torch.save({"schema_version": 1, "model": Path("x")}, tmp_path / "last.pt")

    with pytest.raises(ResumeError, match=r"last\.pt is not a checkpoint"):
        load_checkpoint(tmp_path / "last.pt", CPU)


@pytest.mark.parametrize("content", [{"schema_version": 99}, {"weight": torch.ones(1)}, [1]])
def test_another_schema_is_refused(tmp_path: Path, content: object) -> None:
    torch.save(content, tmp_path / "other.pt")

    with pytest.raises(ResumeError, match=r"other\.pt: found schema version .*; expected 3"):
        load_checkpoint(tmp_path / "other.pt", CPU)


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
N_FORWARD = {"false": 11, "true": 17}
"""Forward passes of two epochs of one batch of four: one per micro-batch, or all but one twice."""


class DiedError(BaseException):
    """An error that no code catches, like `kill -9`."""


class Death:
    """Raises it in the n-th forward pass of training."""

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


@pytest.mark.parametrize(
    ("entries", "message"),
    [
        ({"position": {"epoch": "x"}}, "epoch: expected a whole number"),
        ({"position": {"epoch": -3}}, "epoch: expected a number greater than or equal to 0"),
        ({"history": ("x",)}, "expected key: value"),
        ({"sums": {"other": 1}}, "unexpected keyword argument 'other'"),
        ({"started_from": 7}, "expected key: value"),
        ({"spent_s": -1.0}, "expected a number greater than or equal to 0"),
        ({"history": 7, "position": 7}, "is not a checkpoint of a run"),
    ],
)
def test_a_checkpoint_with_wrong_entries_is_refused_with_a_next_step(
    tmp_path: Path, entries: dict[str, object], message: str
) -> None:
    path = tmp_path / "last.pt"
    save_checkpoint(make_checkpoint(), path)
    torch.save({**torch.load(path, weights_only=True), **entries}, path)

    with pytest.raises(ResumeError, match=rf"{message}.* start anew with --fresh"):
        load_checkpoint(path, torch.device("cpu"))


def test_scans_of_other_cases_are_refused_before_they_are_prepared(tmp_path: Path) -> None:
    """The demo and the scans of a reader both go to runs/fold0 unless a run is named."""
    run = Run(path=tmp_path / "run")
    run.path.mkdir()
    write_split(Split(train=("demo_1",), validation=("demo_2",)), run.path / "split.csv")
    write_case(tmp_path / "scans", "BraTS2021_00000")
    run.check_scans(tmp_path / "scans", Config())

    run.last_path.touch()

    with pytest.raises(
        ResumeError, match=r"2 of the 2 cases that .* are not in .*: demo_1, demo_2"
    ):
        run.check_scans(tmp_path / "scans", Config())
    # phantoms have ids that real cases have as well
    write_split(Split(train=("BraTS2021_00000",), validation=("demo_2",)), run.path / "split.csv")
    with pytest.raises(ResumeError, match=r"1 of the 2 cases that .* is not in .*: demo_2"):
        run.check_scans(tmp_path / "scans", Config())
    write_case(tmp_path / "scans", "BraTS2021_00001")
    ids = ("BraTS2021_00000",), ("BraTS2021_00001",)
    write_split(Split(train=ids[0], validation=ids[1]), run.path / "split.csv")
    run.check_scans(tmp_path / "scans", Config())
