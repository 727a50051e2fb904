"""Test which settings a run gets when neither a preset nor a file of settings is given."""

from pathlib import Path

import pytest
import torch
from torch import nn

from brats_seg.config import Config
from brats_seg.config_text import load_config
from brats_seg.errors import ConfigError
from brats_seg.models.build import build_model
from brats_seg.presets import NETWORKS, PRESETS
from brats_seg.runtime.device import Device, gpu_named
from brats_seg.training import chosen_settings, memory_plan
from brats_seg.training.chosen_settings import choose_settings
from brats_seg.training.memory_plan import PlanRow

ON_CPU = {"training.device": "cpu"}
SMALL = ["model.widths=4,8"]


def begun(tmp_path: Path, config: Config) -> Path:
    """Make the folder of a run that has a checkpoint."""
    run = tmp_path / "fold0"
    run.mkdir()
    (run / "config.yaml").write_text(config.to_yaml())
    (run / "last.pt").write_bytes(b"a checkpoint")
    return run


def test_a_cpu_gets_its_preset_and_is_told_why() -> None:
    chosen = choose_settings(values=ON_CPU)

    assert chosen.config == load_config(preset="cpu", values=ON_CPU)
    assert chosen.reason.startswith("preset cpu, because training.device is cpu (--preset takes")
    assert "unet of 16 to 160 channels, patch 64x64x64 in " in chosen.reason


def test_without_a_gpu_the_reason_says_that_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)

    chosen = choose_settings(values={"patch.size": "32,32,32"})

    assert "because torch finds no GPU here" in chosen.reason
    assert "patch 32x32x32 as given" in chosen.reason


@pytest.mark.parametrize(
    ("gpu", "preset", "precision"),
    [("t4", "kaggle-t4", "fp16"), ("p100", "kaggle-t4", "fp16"), ("a100", "full", "bf16")],
)
def test_a_gpu_gets_a_preset_by_its_memory(gpu: str, preset: str, precision: str) -> None:
    chosen = choose_settings(gpu=gpu_named(gpu))

    expected = load_config(preset=preset, values={"training.memory": "auto"})
    assert chosen.config == expected
    assert f"patch 128x128x128 in {precision}, about " in chosen.reason


@pytest.mark.parametrize(
    ("device", "preset", "gib"), [("auto", "kaggle-t4", "16.0"), ("cuda:1", "full", "40.0")]
)
def test_of_several_gpus_the_one_with_least_memory_decides_for_all_ranks(
    monkeypatch: pytest.MonkeyPatch, device: str, preset: str, gib: str
) -> None:
    sizes = {0: 16 * 2**30, 1: 40 * 2**30}
    row = PlanRow(
        patch=(128, 128, 128),
        micro_batch=1,
        precision="bf16",
        checkpointing="top",
        predicted_mib=2000,
        fits=True,
    )
    where = Device(torch_device=torch.device("cuda" if device == "auto" else device))
    monkeypatch.setattr(chosen_settings, "choose_device", lambda *_: where)
    monkeypatch.setattr(chosen_settings, "total_memory", lambda one: sizes[one.index])
    monkeypatch.setattr(chosen_settings, "largest_patch", lambda *_, **__: row)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(sizes))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "a card")

    chosen = choose_settings(values={"training.device": device})

    assert chosen.config.training.memory == "auto"
    assert chosen.reason.startswith(f"preset {preset}, for a card with {gib} GiB")
    assert chosen.reason.endswith("MiB, with checkpointing top")


def test_on_a_small_gpu_the_largest_patch_that_fits_is_taken() -> None:
    chosen = [choose_settings(assignments=SMALL, gpu=gpu_named(f"{mib}MiB")) for mib in (2000, 700)]

    assert chosen[0].config.patch.size == (128, 128, 128)
    assert chosen[1].config.patch.size == (96, 96, 96)
    assert "patch 96x96x96 instead of 128x128x128 in fp16, about " in chosen[1].reason


def test_where_nothing_fits_the_preset_stays_and_the_reason_says_so(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(memory_plan, "_CUBES", (32,))

    chosen = choose_settings(assignments=SMALL, gpu=gpu_named("512MiB"))

    assert chosen.config.patch.size == (128, 128, 128)
    assert "not predicted to fit in 512 MiB: lower model.widths" in chosen.reason


def test_what_is_given_wins() -> None:
    assignments = ["optimizer.lr=0.5", "model.widths=4,8"]

    chosen = choose_settings(assignments=assignments, values={**ON_CPU, "patch.size": "16,16,16"})

    assert chosen.config.optimizer.lr == 0.5
    assert chosen.config.model.widths == (4, 8)
    assert chosen.config.patch.size == (16, 16, 16)
    assert chosen.config.validation.every == PRESETS["cpu"]["validation"]["every"]


def test_whole_brains_stay_whole() -> None:
    chosen = choose_settings(values={**ON_CPU, "model.name": "autoencoder"})

    assert chosen.config.patch.size == "whole"
    assert "autoencoder, whole brains" in chosen.reason


class NeedsValues(nn.Conv3d):
    """A network whose course depends on the values of its input."""

    def __init__(self) -> None:
        super().__init__(4, 3, 1)

    def forward(self, image: torch.Tensor) -> torch.Tensor:
        return super().forward(image if float(image.mean()) > 0 else -image)


def test_a_network_that_cannot_be_counted_keeps_the_preset() -> None:
    values = {"model.name": f"{__name__}.NeedsValues"}

    chosen = choose_settings(values=values, gpu=gpu_named("t4"))

    assert "whose memory cannot be counted for model.name" in chosen.reason
    assert chosen.config.patch.size == (128, 128, 128)
    assert chosen.config.training.memory is None


def test_a_network_that_cannot_be_built_is_refused_before_anything_is_prepared() -> None:
    with pytest.raises(ConfigError, match=r"cannot be built with model\.arguments"):
        choose_settings(values={**ON_CPU, "model.name": "torch.nn.Conv3d"})
    with pytest.raises(ConfigError, match=r"patch\.size 30x30x30 does not fit model\.name 'unet'"):
        choose_settings(values={**ON_CPU, "patch.size": "30,30,30"})


@pytest.mark.parametrize("name", NETWORKS)
def test_every_network_can_be_built_for_the_patch_that_is_chosen(name: str) -> None:
    for preset in ("cpu", "kaggle-t4", "full"):
        config = load_config(preset=preset, values={"model.name": name})
        if config.patch.size != "whole":
            # the constructor of Swin-UNETR needs values, which the device meta lacks
            with torch.device("cpu" if name == "swin-unetr" else "meta"):
                build_model(config.model, config.patch.size)


def test_a_run_that_was_begun_keeps_its_settings_whatever_the_device_has(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = load_config(preset="demo", values={**ON_CPU, "patch.size": (48, 48, 48)})
    monkeypatch.setattr(chosen_settings, "total_memory", lambda _: 0)
    run = begun(tmp_path, before)

    chosen = choose_settings(run_paths=[tmp_path / "missing", run])

    assert chosen.config == before
    assert chosen.reason == f"settings of {run / 'config.yaml'}, which the run began with"


def test_what_is_given_wins_over_the_settings_of_a_run(tmp_path: Path) -> None:
    run = begun(tmp_path, load_config(preset="demo"))

    assert choose_settings(assignments=["training.n_epochs=99"], run_paths=[run]).config == (
        load_config(preset="demo", values={"training.n_epochs": 99})
    )


def test_a_run_without_a_checkpoint_has_not_begun(tmp_path: Path) -> None:
    run = begun(tmp_path, load_config(preset="demo"))
    (run / "last.pt").unlink()

    chosen = choose_settings(values=ON_CPU, run_paths=[run])

    assert chosen.config == load_config(preset="cpu", values=ON_CPU)


@pytest.mark.parametrize("damage", [b"\xff\xfe", None, b"training: [", b"seed: 3"])
def test_settings_of_a_run_that_cannot_be_read_are_named(
    tmp_path: Path, damage: bytes | None
) -> None:
    path = begun(tmp_path, Config()) / "config.yaml"
    path.unlink()
    if damage is not None:
        path.write_bytes(damage)

    with pytest.raises(ConfigError, match=r"config\.yaml"):
        choose_settings(run_paths=[path.parent])
