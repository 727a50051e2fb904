"""The memory format of a run: what is chosen, what stays as it was, and that it is kept."""

import logging
from copy import deepcopy
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.errors import ConfigError, ResumeError
from brats_seg.models.build import build_model
from brats_seg.models.output import as_output
from brats_seg.runtime import memory_format
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.memory_format import (
    CHANNELS_LAST,
    CONTIGUOUS,
    channels_last_gain,
    format_to_predict,
    memory_format_of,
    set_memory_format,
)
from brats_seg.training import state as states
from brats_seg.training.checkpoints import load_checkpoint, save_checkpoint
from brats_seg.training.losses import DiceBce
from brats_seg.training.ranks import Ranks
from brats_seg.training.state import RunState, build_state, choose_memory_format, format_to_count
from tests.training_builders import StopAtCheck, open_six, tiny_settings, train

CPU = torch.device("cpu")
PATCH = (16, 16, 16)
LARGE = (64, 64, 64)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    return open_six(tmp_path_factory, tiny_settings())


def make_state(*changes: str, network: nn.Module | None = None) -> tuple[RunState, Config]:
    config = tiny_settings("patch.size=16,16,16", "model.widths=4,8,8", *changes)
    torch.manual_seed(0)
    own = network or build_model(config.model, PATCH)
    device = Device(torch_device=CPU)
    state = build_state(own, DiceBce(), config, device=device, ranks=Ranks(), n_steps=1)
    return state, config


def gradients(network: nn.Module, image: Tensor) -> list[Tensor]:
    network.zero_grad()
    sum(level.square().mean() for level in as_output(network(image)).logits).backward()
    return [
        parameter.grad.clone() for parameter in network.parameters() if parameter.grad is not None
    ]


def test_both_formats_compute_the_same_to_rounding() -> None:
    state, _ = make_state("model.deep_supervision=true")
    network, image = state.network.double(), torch.randn(2, 4, *PATCH, dtype=torch.float64)

    contiguous = gradients(network, image)
    set_memory_format(network, CHANNELS_LAST)
    last = gradients(network, image)

    assert len(last) == len(list(network.parameters()))
    assert all(
        torch.allclose(a, b, rtol=1e-9, atol=1e-12) for a, b in zip(last, contiguous, strict=True)
    )
    assert all(a.stride() == b.stride() for a, b in zip(last, contiguous, strict=True))


def test_a_measurement_for_which_memory_is_missing_ends_no_run(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def without_memory(*_: object) -> float:
        raise torch.OutOfMemoryError

    monkeypatch.setattr(memory_format, "_seconds", without_memory)
    state, config = make_state()
    caplog.set_level(logging.INFO)

    choose_memory_format(state, config, LARGE)

    assert state.memory_format == CONTIGUOUS
    assert "memory or kernels are missing" in caplog.text


def test_features_keep_the_format_through_the_network() -> None:
    """No layer copies them to the other format."""
    state, _ = make_state()
    set_memory_format(state.network, CHANNELS_LAST)
    found = []
    blocks = [m for m in state.network.modules() if type(m).__name__ == "Block"]
    for block in blocks:
        block.norm.register_forward_hook(lambda _m, _i, output: found.append(output))

    # a small single patch is convolved by other kernels
    state.network(torch.randn(2, 4, *PATCH))

    assert len(found) == len(blocks)
    assert all(f.is_contiguous(memory_format=torch.channels_last_3d) for f in found)


def test_logits_of_prediction_are_contiguous() -> None:
    state, _ = make_state()
    set_memory_format(state.network, CHANNELS_LAST)

    assert state.network.eval()(torch.randn(1, 4, *PATCH)).is_contiguous()


@pytest.mark.parametrize(("gain", "expected"), [(1.3, CHANNELS_LAST), (1.04, CONTIGUOUS)])
def test_auto_takes_channels_last_if_it_is_clearly_faster(
    gain: float, expected: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    state, config = make_state()
    monkeypatch.setattr(states, "channels_last_gain", lambda *_: gain)

    with caplog.at_level(logging.INFO):
        choose_memory_format(state, config, LARGE)

    assert state.memory_format == expected
    assert f"memory format {expected}" in caplog.text


def test_auto_measures_nothing_for_small_patches(monkeypatch: pytest.MonkeyPatch) -> None:
    state, config = make_state()
    monkeypatch.delattr(states, "channels_last_gain")

    choose_memory_format(state, config, (40, 40, 40))

    assert state.memory_format == CONTIGUOUS


def test_all_ranks_compute_in_the_format_of_the_first(monkeypatch: pytest.MonkeyPatch) -> None:
    state, config = make_state()
    monkeypatch.setattr(states, "channels_last_gain", lambda *_: 1.5)
    monkeypatch.setattr(Ranks, "gather", lambda _, own: [1.0, own])

    choose_memory_format(state, config, LARGE)

    assert state.memory_format == CONTIGUOUS


def test_the_average_of_the_weights_computes_in_the_same_format() -> None:
    state, config = make_state("optimizer.ema=0.9", "training.memory_format=channels_last")

    choose_memory_format(state, config, PATCH)

    assert memory_format_of(state.evaluated) == memory_format_of(state.network) == CHANNELS_LAST


def test_a_network_without_the_choice_is_contiguous_or_refused() -> None:
    state, config = make_state(network=nn.Conv3d(4, 3, 1))
    choose_memory_format(state, config, LARGE)

    assert state.memory_format == CONTIGUOUS
    asked = tiny_settings("training.memory_format=channels_last")
    with pytest.raises(ConfigError, match=r"training\.memory_format is 'channels_last'"):
        choose_memory_format(state, asked, LARGE)


def test_measuring_leaves_network_and_random_state_as_they_were() -> None:
    state, _ = make_state()
    before, random_state = deepcopy(state.network.state_dict()), torch.get_rng_state()

    gain = channels_last_gain(state.network, 4, PATCH, choose_device("cpu", "fp32"))

    assert gain > 0
    assert torch.equal(torch.get_rng_state(), random_state)
    assert all(torch.equal(t, before[name]) for name, t in state.network.state_dict().items())
    assert all(parameter.grad is None for parameter in state.network.parameters())


def test_a_resumed_run_goes_on_in_its_format_bit_for_bit(data: FoldData, tmp_path: Path) -> None:
    config = tiny_settings("training.n_epochs=2", "training.memory_format=channels_last")
    train(data, tmp_path / "whole", config)
    train(data, tmp_path / "stopped", config, StopAtCheck(3))
    train(data, tmp_path / "stopped", config)

    whole, resumed = (
        load_checkpoint(tmp_path / name / "last.pt", CPU) for name in ("whole", "stopped")
    )
    assert whole.memory_format == resumed.memory_format == CHANNELS_LAST
    assert all(torch.equal(t, resumed.model[name]) for name, t in whole.model.items())
    with pytest.raises(ResumeError, match=r"training\.memory_format"):
        train(data, tmp_path / "whole", tiny_settings("training.n_epochs=2"))


def test_an_older_checkpoint_resumes_in_contiguous_format(data: FoldData, tmp_path: Path) -> None:
    """Its run was computed so, whatever is faster here."""
    path = tmp_path / "run" / "last.pt"
    train(data, tmp_path / "run", tiny_settings("training.n_epochs=2"), StopAtCheck(3))
    content = torch.load(path, weights_only=True)
    del content["memory_format"]
    torch.save(content, path)

    assert load_checkpoint(path, CPU).memory_format == CONTIGUOUS


def test_an_unknown_format_in_a_checkpoint_is_refused(data: FoldData, tmp_path: Path) -> None:
    path = tmp_path / "run" / "last.pt"
    train(data, tmp_path / "run", tiny_settings("training.n_epochs=1"))
    save_checkpoint(replace(load_checkpoint(path, CPU), memory_format="blocked"), path)

    with pytest.raises(ResumeError, match="not a checkpoint of a run"):
        load_checkpoint(path, CPU)


@pytest.mark.parametrize(
    ("setting", "patch", "expected"),
    [
        ("auto", LARGE, CHANNELS_LAST),
        ("auto", PATCH, CONTIGUOUS),
        ("contiguous", LARGE, CONTIGUOUS),
        ("channels_last", PATCH, CHANNELS_LAST),
    ],
)
def test_memory_is_counted_in_the_format_that_takes_most(
    setting: str, patch: tuple[int, int, int], expected: str
) -> None:
    config = tiny_settings(f"training.memory_format={setting}")

    assert format_to_count(config, patch) == expected


def test_large_windows_are_predicted_channels_last_on_a_cpu() -> None:
    assert format_to_predict(CPU, LARGE) == CHANNELS_LAST
    assert format_to_predict(CPU, (40, 40, 40)) == CONTIGUOUS
    assert format_to_predict(torch.device("cuda"), LARGE) == CONTIGUOUS
