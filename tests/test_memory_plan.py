"""Test memory plans, the count that they are made of, and the settings that are chosen for a device."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import Config, load_config
from brats_seg.errors import ConfigError
from brats_seg.models.build import build_model
from brats_seg.models.interface import (
    ActivationCheckpointing,
    as_output,
    set_activation_checkpointing,
)
from brats_seg.presets import NETWORKS
from brats_seg.runtime.device import Device, choose_device, gpu_named
from brats_seg.runtime.memory import MEGABYTE
from brats_seg.training import memory_plan
from brats_seg.training.accumulation import MemoryMode
from brats_seg.training.losses import build_criterion
from brats_seg.training.memory_plan import (
    RESERVED_MIB,
    Footprint,
    MemoryPlan,
    PlanRow,
    UncountableError,
    choose_settings,
    plan_memory,
)
from tests.builders import Run, check_json

SMALL = ["model.widths=[8, 16]", "patch.size=[40, 40, 40]", "training.effective_batch=1"]
SMALL += ["training.precision=fp32", "training.device=cpu"]
CPU = torch.device("cpu")
FP32 = Device(torch_device=CPU)
BF16 = Device(torch_device=CPU, autocast_dtype=torch.bfloat16)
KINDS = (ActivationCheckpointing.NONE, ActivationCheckpointing.TOP, ActivationCheckpointing.ALL)
PATCH = (40, 40, 40)
OTHERS = [pytest.param(n, marks=pytest.mark.slow) for n in ("notebook", "dynunet", "segresnet")]
MEDIUM_MIB = 225
"""Enough for a patch of 48^3 of the small network, and not for 64^3."""


def settings(*assignments: str) -> Config:
    return load_config(assignments=[*SMALL, *assignments])


def plan(mib: int, *assignments: str, **options: object) -> MemoryPlan:
    return plan_memory(settings(*assignments), (RESERVED_MIB + mib) * MEGABYTE, **options)  # type: ignore[arg-type]


def test_the_largest_patch_that_fits_is_suggested(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "_CUBES", (16, 44, 48, 64))
    monkeypatch.setattr(memory_plan, "_BOXES", ())
    medium = plan(MEDIUM_MIB, "training.effective_batch=2")
    rows = [row for row in medium.rows if row.patch == PATCH]
    plain = [row for row in medium.rows if (row.micro_batch, row.checkpointing) == (1, "none")]
    by_size = [row.predicted_mib for row in sorted(plain, key=lambda row: prod(row.patch))]
    assert [(row.micro_batch, row.checkpointing) for row in rows] == [
        *((n, "none") for n in (2, 1)),
        *((1, kind) for kind in ("top", "all")),
    ]
    assert {row.fits for row in medium.rows} == {True, False}
    assert all(row.fits == (row.predicted_mib <= MEDIUM_MIB) for row in medium.rows)
    # a patch of the settings that fits makes smaller ones needless
    assert rows[0] == medium.rows[0]
    assert min(prod(row.patch) for row in medium.rows) == prod(PATCH)
    # a larger patch never needs less
    assert len(by_size) > 3
    assert by_size == sorted(by_size)
    (suggested,) = [row for row in medium.rows if row.suggested]
    fitting = [row for row in medium.rows if row.fits]
    assert medium.suggested == suggested
    assert prod(suggested.patch) == max(prod(row.patch) for row in fitting)
    # with the least checkpointing
    first = next(row for row in fitting if row.patch == suggested.patch)
    assert suggested == replace(first, suggested=True)


CHOSEN = [part for assignment in SMALL for part in ("--set", assignment)]


@pytest.mark.slow
def test_the_command_ends_with_3_if_nothing_fits(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    monkeypatch.setattr(memory_plan, "_CUBES", (32,))
    monkeypatch.setattr(memory_plan, "_BOXES", ())
    code, out, err = run("plan", *CHOSEN, "--device", "520MiB")
    assert code == 3
    assert "unet on a GPU of 520MiB (predicted): 8 MiB, plus 512 MiB for torch itself" in out
    (rows,) = check_json("plan", run("plan", *CHOSEN, "--device", "520MiB", "--json")[1])
    assert {str(row["patch"]) for row in rows} == {"[40, 40, 40]", "[32, 32, 32]"}
    assert rows[0]["patch"] == [40, 40, 40]
    least = min(row["predicted_mib"] for row in rows)
    assert "nothing fits in 8 MiB: a patch of 32x32x32 in fp32" in err
    assert f"needs {least} MiB. Lower model.widths or patch.size" in err
    code, out, _ = run("plan", *CHOSEN, "--device", "700MiB", "--preset", "kaggle-t4")
    shown = " ".join(out.split())
    assert (code, "40x40x40 1 fp32 none" in shown) == (0, True)
    assert "on a GPU of 700MiB (predicted): " in shown
    assert run("plan", *CHOSEN, "--device", "titan").code == 2


def footprint_of(config: Config, network: nn.Module | None = None) -> Footprint:
    network = network or build_model(config.model, PATCH)
    return Footprint(network, build_criterion(config.loss), config, CPU)


def chain(n_hidden: int) -> nn.Module:
    middle = [nn.Conv3d(10, 10, 1) for _ in range(n_hidden - 1)]
    return nn.Sequential(nn.Conv3d(4, 10, 1), *middle, nn.Conv3d(10, 3, 1))


def counted(network: nn.Module, *assignments: str) -> int:
    config = settings(*assignments)
    made = Footprint(network, lambda out, _: as_output(out).logits[0].mean(), config, CPU)
    return made.counted_bytes((40, 40, 40), MemoryMode(micro_batch=1), FP32)


@pytest.mark.parametrize("n_hidden", [1, 2, 5])
def test_a_chain_takes_what_it_takes_by_hand(n_hidden: int) -> None:
    sample = 4 * 2 + 3 * 1
    # as float32 on the device
    image, target = 4 * 4, 3 * 4
    hidden = 10 * 4 * n_hidden
    output, by_output, by_hidden = 3 * 4, 3 * 4, 10 * 4
    expected = (sample + image + target + hidden + output + by_output + by_hidden) * 40**3
    # and the weights, of which there are a few hundred
    assert expected < counted(chain(n_hidden)) < expected + 20_000
    # the control: without a gradient no activation is kept
    frozen = [
        nn.Sequential(*chain(n).requires_grad_(False), nn.Conv3d(3, 3, 1))
        for n in (2, 2 + n_hidden)
    ]
    assert counted(frozen[1]) - counted(frozen[0]) < 20_000


def test_the_target_of_an_autoencoder_is_the_image_itself() -> None:
    """The host holds no regions, and the device four channels of the target instead of three."""
    more = counted(chain(1), "model.name=autoencoder") - counted(chain(1))
    assert more == pytest.approx((4 * 4 - 3 * 4 - 3) * 40**3, abs=20_000)


@pytest.mark.parametrize(
    ("assignments", "n_kept"),
    [(["optimizer.name=adamw"], 4), (["optimizer.name=muon"], 3), (["optimizer.name=sgd"], 3)],
)
def test_the_state_of_the_optimizer_is_counted(assignments: list[str], n_kept: int) -> None:
    """Weights, gradients, two moments or one: each as large as the weights."""
    network = nn.Conv3d(4, 8, 25, bias=False)
    weights = 4 * 8 * 25**3 * 4
    footprint = footprint_of(settings(*assignments), network)
    # between two updates there are no gradients
    assert footprint._live.now == pytest.approx((n_kept - 1) * weights, rel=0.001)


@pytest.mark.parametrize(
    "device", [FP32, pytest.param(BF16, marks=pytest.mark.slow)], ids=["fp32", "bf16"]
)
def test_a_larger_patch_or_micro_batch_takes_more(device: Device) -> None:
    footprint = footprint_of(settings("training.effective_batch=2"))
    alone = footprint_of(settings())
    sizes = [(16, 16, 16), (16, 24, 16), PATCH]
    for kind in KINDS:
        mode = MemoryMode(micro_batch=1, checkpointing=kind)
        counts = [alone.counted_bytes(size, mode, device) for size in sizes]
        assert counts == sorted(set(counts))
    one, two = MemoryMode(micro_batch=1), MemoryMode(micro_batch=2)
    # a second micro-batch holds gradients
    both = [footprint.counted_bytes(sizes[0], mode, device) for mode in (one, two)]
    assert both[0] > alone.counted_bytes(sizes[0], one, device)
    assert footprint.counted_bytes(PATCH, two, device) > both[1]
    # a GPU that is absent is not charged for the batch on the host
    for_gpu = set()
    for effective_batch in (4, 64):
        config = settings(f"training.effective_batch={effective_batch}")
        network = build_model(config.model, PATCH)
        absent = Footprint(network, build_criterion(config.loss), config, CPU, for_gpu=True)
        for_gpu.add(absent.counted_bytes(sizes[0], one, device))
    assert len(for_gpu) == 1


@pytest.mark.parametrize("name", ["unet", *OTHERS])
def test_more_checkpointing_and_half_precision_take_less(name: str) -> None:
    footprint = footprint_of(settings(f"model.name={name}", "model.widths=4,8,12"))
    modes = [MemoryMode(micro_batch=1, checkpointing=kind) for kind in KINDS]
    least = []
    for device in (FP32, BF16):
        none, top, every = (footprint.counted_bytes(PATCH, mode, device) for mode in modes)
        assert none > top >= every
        least.append(none)
    assert name != "unet" or least[1] < 0.75 * least[0]


def test_counting_leaves_network_and_random_state_alone() -> None:
    config = settings()
    network = build_model(config.model, PATCH)
    set_activation_checkpointing(network, ActivationCheckpointing.TOP)
    weights = {name: tensor.clone() for name, tensor in network.state_dict().items()}
    state = torch.get_rng_state()
    footprint = footprint_of(config, network)
    footprint.counted_bytes(PATCH, MemoryMode(micro_batch=1, checkpointing=KINDS[-1]), BF16)
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(weights[name], now) for name, now in network.state_dict().items())
    assert all(parameter.grad is None for parameter in network.parameters())
    assert network.checkpointing is ActivationCheckpointing.TOP


class NeedsValues(nn.Conv3d):
    def __init__(self) -> None:
        super().__init__(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image if float(image.mean()) > 0 else -image)


def test_a_network_that_needs_values_is_refused_and_keeps_its_preset() -> None:
    footprint = footprint_of(settings(), NeedsValues())
    with pytest.raises(UncountableError, match=r"16x16x16: .*needs values and not only sizes"):
        footprint.counted_bytes((16, 16, 16), MemoryMode(micro_batch=1), FP32)
    values = {"model.name": f"{__name__}.NeedsValues"}
    chosen = choose_settings(values=values, gpu=gpu_named("t4"))
    assert "whose memory cannot be counted for model.name" in chosen.reason
    assert chosen.config.patch.size == (128, 128, 128)


class OfOneSize(NeedsValues):
    def forward(self, image: Tensor) -> Tensor:
        if image.shape[2:] == (48, 48, 48):
            raise ValueError
        return nn.Conv3d.forward(self, image + torch.zeros(PATCH))


def test_sizes_that_a_network_refuses_are_left_out(caplog: pytest.LogCaptureFixture) -> None:
    name = f"model.name={__name__}.OfOneSize"
    assert {row.patch for row in plan(500, name).rows} == {PATCH}
    with pytest.raises(UncountableError, match=r"a patch of 160x192x160: .*broadcast"):
        plan(500, name, "patch.size=whole")
    assert caplog.text == ""


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tensors_on_the_cpu_stand_for_those_of_a_gpu(precision: str) -> None:
    config = load_config(assignments=["patch.size=64,64,64", f"training.precision={precision}"])
    network, criterion = build_model(config.model, (64, 64, 64)), build_criterion(config.loss)
    gpu = choose_device("cuda", precision)
    own = Footprint(network, criterion, config, gpu.torch_device)
    stand_in = Footprint(network, criterion, config, CPU, for_gpu=True)
    for kind in (ActivationCheckpointing.NONE, ActivationCheckpointing.ALL):
        mode = MemoryMode(micro_batch=1, checkpointing=kind)
        expected = own.counted_bytes((64, 64, 64), mode, gpu)
        found = stand_in.counted_bytes((64, 64, 64), mode, replace(gpu, torch_device=CPU))
        assert found == pytest.approx(expected, rel=0.15)


ON_CPU = {"training.device": "cpu"}
NARROW = ["model.widths=4,8"]


@pytest.mark.parametrize(
    ("gpu", "preset", "edge", "reason"),
    [
        ("t4", "kaggle-t4", 128, "patch 128x128x128 in fp16, about "),
        ("a100", "full", 128, "patch 128x128x128 in bf16, about "),
        ("700MiB", "kaggle-t4", 96, "patch 96x96x96 instead of 128x128x128 in fp16, about "),
        pytest.param(
            *("512MiB", "kaggle-t4", 128, "not predicted to fit in 512 MiB: lower model.widths"),
            marks=pytest.mark.slow,
        ),
        (None, "cpu", 64, "preset cpu, because training.device is cpu (--preset takes"),
    ],
)
def test_a_preset_suits_the_memory(monkeypatch, gpu, preset, edge, reason) -> None:
    monkeypatch.setattr(memory_plan, "_CUBES", (32, 96, 112))
    values = {} if gpu else ON_CPU
    chosen = choose_settings(assignments=NARROW, values=values, gpu=gpu and gpu_named(gpu))
    values = values | {"patch.size": (edge,) * 3}
    assert chosen.config == load_config(preset=preset, assignments=NARROW, values=values)
    assert reason in chosen.reason


@pytest.mark.parametrize(("device", "preset"), [("auto", "kaggle-t4"), ("cuda:1", "full")])
def test_several_gpus(monkeypatch: pytest.MonkeyPatch, device: str, preset: str) -> None:
    sizes = {0: 16 * 2**30, 1: 40 * 2**30}
    size = {"patch": (128, 128, 128), "micro_batch": 1, "predicted_mib": 2000}
    row = PlanRow(**size, precision="bf16", checkpointing="top", fits=True)
    where = Device(torch_device=torch.device("cuda" if device == "auto" else device))
    monkeypatch.setattr(memory_plan, "choose_device", lambda *_: where)
    monkeypatch.setattr(memory_plan, "total_memory", lambda one: sizes[one.index])
    monkeypatch.setattr(memory_plan, "largest_patch", lambda *_, **__: row)
    monkeypatch.setattr(memory_plan, "gpus", lambda: [torch.device("cuda", n) for n in sizes])
    monkeypatch.setattr(memory_plan, "device_name", lambda _: "a card")
    chosen = choose_settings(values={"training.device": device})
    gib = 16.0 if device == "auto" else 40.0
    assert chosen.reason.startswith(f"preset {preset}, for a card with {gib} GiB")
    assert chosen.reason.endswith("MiB, with checkpointing top")


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


@pytest.fixture
def begun(tmp_path: Path) -> Path:
    before = load_config(preset="demo", values={**ON_CPU, "patch.size": (48, 48, 48)})
    (tmp_path / "fold0").mkdir()
    (tmp_path / "fold0" / "config.yaml").write_text(before.to_yaml())
    (tmp_path / "fold0" / "last.pt").write_bytes(b"a checkpoint")
    return tmp_path / "fold0"


def test_a_begun_run_keeps_its_settings(begun: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_plan, "total_memory", lambda _: 0)
    chosen = choose_settings(run_paths=[begun.with_name("missing"), begun])
    assert chosen.config == load_config(text=(begun / "config.yaml").read_text())
    assert chosen.reason == f"settings of {begun / 'config.yaml'}, which the run began with"
    given = choose_settings(assignments=["training.n_epochs=99"], run_paths=[begun]).config
    assert (given.training.n_epochs, given.patch.size) == (99, (48, 48, 48))
    (begun / "last.pt").unlink()
    monkeypatch.undo()
    anew = choose_settings(assignments=NARROW, values=ON_CPU, run_paths=[begun]).config
    assert anew == load_config(preset="cpu", assignments=NARROW, values=ON_CPU)


@pytest.mark.parametrize("damage", [b"\xff\xfe", None, b"training: [", b"seed: 3"])
def test_settings_of_a_run_that_cannot_be_read_are_named(begun: Path, damage: bytes | None) -> None:
    (begun / "config.yaml").unlink()
    if damage is not None:
        (begun / "config.yaml").write_bytes(damage)
    with pytest.raises(ConfigError, match=r"config\.yaml"):
        choose_settings(run_paths=[begun])
