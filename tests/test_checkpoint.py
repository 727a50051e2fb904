"""Checkpoints: what is read is what was written, and a failed write leaves the old file."""

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from brats_seg.errors import EnvironmentalError, ResumeError
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.training.checkpoints import Checkpoint, load_checkpoint, save_checkpoint
from brats_seg.training.state import Position
from brats_seg.training.tasks import RunningSums

CPU = torch.device("cpu")


def make_checkpoint() -> Checkpoint:
    sums = RunningSums(loss_sum=1.5, n_patches=2)
    sums.add("a", [[1, 2, 3]] * 4)
    return Checkpoint(
        model={"weight": torch.arange(3.0)},
        identity=ModelIdentity(conventions=("brats2017",), patch=(8, 8, 8), fingerprint="f"),
        config={"training": {"seed": 1}},
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
    """Whoever has only torch can use the weights."""
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

    with pytest.raises(ResumeError, match=r"other\.pt: found schema version .*; expected 2"):
        load_checkpoint(tmp_path / "other.pt", CPU)


def test_a_checkpoint_of_schema_version_1_is_read(tmp_path: Path) -> None:
    """Runs that were begun before batches, sums and fallback had these names go on."""
    written = make_checkpoint()
    save_checkpoint(written, tmp_path / "new.pt")
    content = torch.load(tmp_path / "new.pt", weights_only=True)
    content["schema_version"] = 1
    content["tally"] = content.pop("sums")
    content["ladder"] = content.pop("fallback")
    content["position"] = {"epoch": 3, "n_windows": 2, "n_steps": 11}
    torch.save(content, tmp_path / "last.pt")

    read = load_checkpoint(tmp_path / "last.pt", CPU)

    empty = {"model": {}, "optimizer": None}
    assert replace(read, **empty) == replace(written, **empty)


def test_what_was_fitted_to_the_weights_does_not_stop_a_run(tmp_path: Path) -> None:
    """An entry that only prediction reads."""
    save_checkpoint(make_checkpoint(), tmp_path / "last.pt")
    content = torch.load(tmp_path / "last.pt", weights_only=True)
    torch.save({**content, "prediction": {"window": "whole"}}, tmp_path / "last.pt")

    assert load_checkpoint(tmp_path / "last.pt", CPU).best == 0.5
