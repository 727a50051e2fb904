"""Test the folder of a run: what is read is what was written, and a failed write leaves the old file."""

import os
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.cases.folds import Split, write_split
from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.errors import EnvironmentalError, ResumeError
from brats_seg.progress import untracked
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_folder import RunFolder
from brats_seg.training.run_plan import plan_run
from brats_seg.training.state import new_state, read_state
from brats_seg.training.trainer import Trainer
from tests.builders import limited_files, write_case
from tests.training_builders import check_same_runs, open_six, same, tiny_settings

SETTINGS = [
    "training.n_epochs=2",
    "training.effective_batch=4",
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
    """Four patches an epoch."""
    return open_six(tmp_path_factory, tiny_settings(*SETTINGS))


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
        pytest.param(loss, n, marks=[] if n in {1, 7, count} else [pytest.mark.slow])
        for loss, count in N_FORWARD.items()
        for n in range(1, count + 1)
    ],
)
def test_death_in_any_forward_pass_changes_no_bit(
    data: FoldData, tmp_path: Path, undisturbed: dict[str, Path], batch_dice: str, n: int
) -> None:
    dying = trainer_of(data, tmp_path, batch_dice)
    dying.state.network.register_forward_pre_hook(Death(n))
    with pytest.raises(DiedError):
        dying.run(track=untracked)

    outcome = trainer_of(data, tmp_path, batch_dice).run(track=untracked)

    assert outcome.finished
    check_same_runs(tmp_path, undisturbed[batch_dice])


def test_the_state_is_its_checkpoint(
    data: FoldData, tmp_path: Path, undisturbed: dict[str, Path]
) -> None:
    """A state that is loaded and saved again is the same, and its weights can be used with torch alone."""
    path, config = undisturbed["true"], tiny_settings(*SETTINGS, "loss.batch_dice=true")
    state, other = (new_state(plan_run(config, data), ranks=Ranks()) for _ in range(2))

    (tmp_path / "config.yaml").touch()
    with RunFolder(path=path).opened(state, fresh=False):
        RunFolder(path=tmp_path).save(state)

    before, after = (torch.load(run / "last.pt", weights_only=True) for run in (path, tmp_path))
    assert before.keys() == after.keys()
    for key in before.keys() - {"environment"}:
        assert same(before[key], after[key]), key
    other.network.load_state_dict(after["model"])
    assert read_state(path / "last.pt").progress == state.progress


@pytest.mark.parametrize("limit", [None, 1000, 5000, 10_000])
def test_a_full_disk_or_a_limit_of_files_leaves_the_old_checkpoint(
    data: FoldData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, limit: int | None
) -> None:
    """torch reports a limit as a RuntimeError: "unexpected pos"."""
    state = new_state(plan_run(tiny_settings(*SETTINGS), data), ranks=Ranks())
    folder, settings = RunFolder(path=tmp_path), tmp_path / "config.yaml"
    settings.touch()
    folder.save(state)
    before = folder.last_path.read_bytes()

    def full(descriptor: int) -> None:
        raise OSError(28, os.strerror(28))

    if limit is None:
        monkeypatch.setattr(os, "fsync", full)
        with pytest.raises(EnvironmentalError, match=r"disk is full: .*last\.pt"):
            folder.save(state)
    else:
        with limited_files(limit), pytest.raises(EnvironmentalError, match=r"last\.pt .*ulimit -f"):
            folder.save(state)

    assert folder.last_path.read_bytes() == before
    assert {*tmp_path.iterdir()} == {settings, folder.last_path}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        *(
            (raw, "is not a checkpoint")
            for raw in (b"", b"not a checkpoint", b"PK\x03\x04 torn", None)
        ),
        # it would run code
        ({"schema_version": 3, "model": Path("x")}, "is not a checkpoint"),
        *(
            (content, "found schema version .*; expected 3")
            for content in ({"schema_version": 99}, {"weight": torch.ones(1)}, [1])
        ),
    ],
)
def test_what_is_damaged_or_no_checkpoint_of_this_version_is_refused(
    tmp_path: Path, undisturbed: dict[str, Path], content: object, message: str
) -> None:
    path = tmp_path / "other.pt"
    if content is None:
        path.write_bytes((undisturbed["true"] / "last.pt").read_bytes()[:-100])
    elif isinstance(content, bytes):
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
def test_a_checkpoint_with_wrong_entries_is_refused_with_a_next_step(
    data: FoldData,
    tmp_path: Path,
    undisturbed: dict[str, Path],
    entries: dict[str, object],
    message: str,
) -> None:
    before = torch.load(undisturbed["true"] / "last.pt", weights_only=True)
    torch.save({**before, **entries}, tmp_path / "last.pt")

    if ANEW in message:
        with pytest.raises(ResumeError, match=message):
            read_state(tmp_path / "last.pt")
        message = ANEW
    with pytest.raises(ResumeError, match=message):
        trainer_of(data, tmp_path, "true").run(track=untracked)


def test_scans_of_other_cases_are_refused_before_they_are_prepared(tmp_path: Path) -> None:
    """The demo and the scans of a reader both go to runs/fold0 unless a run is named."""
    run = RunFolder(path=tmp_path / "run")
    run.path.mkdir()
    write_split(Split(train=("demo_1",), validation=("demo_2",)), run.path / "split.csv")
    write_case(tmp_path / "scans", "BraTS2021_00000")
    run.check_scans(tmp_path / "scans", Config())

    run.last_path.touch()

    with pytest.raises(ResumeError, match=r"lacks cases of .*run: demo_1, demo_2"):
        run.check_scans(tmp_path / "scans", Config())
    # phantoms have ids that real cases have as well
    write_split(Split(train=("BraTS2021_00000",), validation=("demo_2",)), run.path / "split.csv")
    with pytest.raises(ResumeError, match=r"lacks cases of .*: demo_2"):
        run.check_scans(tmp_path / "scans", Config())
    write_case(tmp_path / "scans", "demo_2")
    run.check_scans(tmp_path / "scans", Config())


def test_a_folder_that_has_vanished_is_not_made_anew(tmp_path: Path, data: FoldData) -> None:
    state = new_state(plan_run(tiny_settings(*SETTINGS), data), ranks=Ranks())

    with pytest.raises(EnvironmentalError, match="run is not there any more: give it back"):
        RunFolder(path=tmp_path / "run").save(state)

    assert not (tmp_path / "run").exists()
