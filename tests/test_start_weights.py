"""Test what a run takes from existing weights, and what is refused."""

import logging
import re
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import nn

from brats_seg.config import Config, ModelConfig, StartConfig
from brats_seg.data.fold import FoldData
from brats_seg.errors import UsageError
from brats_seg.inference.export import export_model
from brats_seg.models.autoencoder import Autoencoder, encoder_for_unet
from brats_seg.models.build import build_model
from brats_seg.runtime.weights import read_checkpoint
from brats_seg.training.run_folder import match_weights, read_source, start_from
from brats_seg.training.state import build_network, read_state
from tests.inference_builders import IDENTITY, write_run
from tests.training_builders import StopAtCheck, open_six, same, tiny_settings, train, weights

SETTINGS = [
    "optimizer.lr=0.01",
    "optimizer.ema=0.9",
    "schedule.name=cosine",
    "training.n_epochs=2",
    "training.effective_batch=2",
]


def settings(*changes: str) -> Config:
    return tiny_settings(*SETTINGS, *changes)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    """Two batches an epoch."""
    return open_six(tmp_path_factory, settings())


@pytest.fixture(scope="module")
def parent(data: FoldData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    path = tmp_path_factory.mktemp("parent") / "run"
    train(data, path, settings("training.n_epochs=1"))
    return path


def test_layers_are_taken_whole_by_name_and_shape() -> None:
    """A bias that fits beside a convolution that does not is not taken."""
    network = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(2, 3, 1), nn.Conv3d(3, 3, 1))
    other = nn.Sequential(nn.Conv3d(4, 2, 1), nn.Conv3d(9, 3, 1))

    loaded, unfit = match_weights(network, other.state_dict())

    assert set(loaded) == {"0.weight", "0.bias"}
    wrapped = {f"module._orig_mod.{name}": weight for name, weight in other.state_dict().items()}
    assert match_weights(nn.ModuleDict({"network": network}), wrapped)[0].keys() == {
        "network.0.weight",
        "network.0.bias",
    }
    assert unfit == ["1 (3x2x1x1x1 here, 3x9x1x1x1 there)", "2 (not among them)"]


def test_the_encoder_of_an_autoencoder_fits_the_unet_of_its_widths() -> None:
    autoencoder = Autoencoder(n_channels=4, latent=64)
    unet = build_model(ModelConfig(widths=(16, 32, 64, 128, 160)), (64, 64, 64))

    loaded, _ = match_weights(unet, encoder_for_unet(autoencoder.state_dict()))

    layers = dict.fromkeys(name.rpartition(".")[0] for name in loaded)
    convolutions = [name for name in layers if name.endswith("convolution")]
    assert convolutions == [
        *("encoder.0.0.convolution", "encoder.1.0.convolution", "encoder.2.0.convolution"),
        *("encoder.3.0.convolution", "encoder.3.1.convolution"),
    ]


def test_a_run_starts_with_the_best_weights_of_its_parent(
    data: FoldData, parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """The averaged weights too; config.yaml and the checkpoints name the parent."""
    config = settings(f"start.path={parent}")

    with caplog.at_level(logging.INFO):
        train(data, tmp_path / "run", config, StopAtCheck(0))

    assert same(weights(tmp_path / "run" / "last.pt"), weights(parent / "best.pt"))
    entries = read_checkpoint(tmp_path / "run" / "last.pt", torch.device("cpu"))
    assert same(entries["ema"], entries["model"])
    saved = read_state(tmp_path / "run" / "last.pt")
    assert saved.started_from is not None
    assert saved.started_from.path == str(parent)
    assert saved.started_from.learnt_from == data.split.train
    assert str(parent) in (tmp_path / "run" / "config.yaml").read_text()
    assert re.search(r"model.name 'unet', model.widths 4,8\): 14 of 14 layers loaded", caplog.text)
    assert "held out here" not in caplog.text


def test_held_out_cases_that_the_parent_or_its_parent_has_learnt_from_are_named(
    data: FoldData, parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings(f"start.path={parent}", "training.n_epochs=1")
    train(data, tmp_path / "child", config)
    ids = data.split.train
    (tmp_path / "child" / "split.csv").write_text("case_id,role\nanother,train\nmore,validation\n")
    split = replace(data.split, train=data.split.validation, validation=ids)
    seen = replace(data, split=split, conventions=("brats2023",), spacing_mm=(2.0, 2.0, 2.0))
    network = build_network(config, (8, 8, 8))

    with caplog.at_level(logging.INFO):
        started = start_from(network, StartConfig(path=str(tmp_path / "child")), seen)

    assert started is not None
    assert started.learnt_from == tuple(sorted({*ids, "another"}))
    assert f"learnt from 4 of 4 cases that are held out here: {', '.join(ids)}" in caplog.text
    assert "learnt at voxels of 1x1x1 mm; these are of 2x2x2 mm" in caplog.text


def test_an_exported_model_and_files_of_weights_are_started_from(
    data: FoldData, parent: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    export_model([parent], tmp_path / "exported")
    plain = weights(parent / "best.pt")
    torch.save(plain, tmp_path / "plain.pt")
    torch.save({"state_dict": plain, "epoch": 3}, tmp_path / "lightning.ckpt")

    for name in ("exported", "exported/member0.safetensors", "plain.pt", "lightning.ckpt"):
        network = build_network(settings(), (8, 8, 8))
        start_from(network, StartConfig(path=str(tmp_path / name)), data)
        assert same(network.state_dict(), plain), name
    assert caplog.text.count("does not say what its weights were trained on") == 3


NAN = {"weight": torch.full((3, 4, 1, 1, 1), torch.nan), "bias": torch.zeros(3)}


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda path: None, r"holds no model: .*found nothing"),
        (lambda path: path.write_bytes(b"text"), r"not a checkpoint that can be read: .*Copy it"),
        (lambda path: torch.save(nn.Conv3d(4, 3, 1), path), r"save the state_dict\(\)"),
        (lambda path: torch.save([1, 2], path), "holds no weights: found list"),
        (lambda path: torch.save({}, path), "nothing fits"),
        # a bias that fits starts nothing
        (lambda path: torch.save({"bias": torch.zeros(3)}, path), "nothing fits"),
        (lambda path: torch.save(NAN, path), "the weight weight is not finite"),
    ],
)
def test_files_that_are_no_weights_are_refused(
    data: FoldData, tmp_path: Path, write: Callable[[Path], object], message: str
) -> None:
    write(tmp_path / "other.pt")

    with pytest.raises(UsageError, match=message):
        start_from(nn.Conv3d(4, 3, 1), StartConfig(path=str(tmp_path / "other.pt")), data)


def test_a_network_of_other_widths_is_refused_with_shapes_and_the_settings_that_fit(
    data: FoldData, parent: Path, tmp_path: Path
) -> None:
    """Before anything is written, and before --fresh renames the earlier run."""
    train(data, tmp_path / "run", settings("training.n_epochs=1"))
    before = sorted(tmp_path.rglob("*"))

    with pytest.raises(UsageError, match=r"widths 4,8\).*8x4x3x3x3 here, 4x4x3x3x3 there"):
        train(data, tmp_path / "new", settings(f"start.path={parent}", "model.widths=[8, 16]"))
    with pytest.raises(UsageError, match="cannot start from itself"):
        train(data, tmp_path / "run", settings(f"start.path={tmp_path / 'run' / 'best.pt'}"))

    assert sorted(tmp_path.rglob("*")) == before


def test_several_networks_and_modalities_in_another_order_are_refused(tmp_path: Path) -> None:
    runs = [write_run(tmp_path / str(seed), seed=seed) for seed in range(2)]
    export_model(runs, tmp_path / "exported")
    write_run(tmp_path / "run", identity=replace(IDENTITY, modalities=("t2f", "t1n", "t1c", "t2w")))

    with pytest.raises(UsageError, match=r"holds 2 networks; expected one.*member0\.safetensors"):
        read_source(tmp_path / "exported")
    with pytest.raises(UsageError, match=r"modalities \('t2f', 't1n', .*; expected \('t1n', "):
        read_source(tmp_path / "run")
