"""Compute on a card that is not there what a GPU would compute; `test_card.py` runs these tests.

What is compared with the CPU may differ by rounding: there, one small image is convolved otherwise.
"""

import pickle
from collections import Counter
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, distributed, nn

from brats_seg import MicroBatch, build_model, load_config, phantom_patches
from brats_seg.config import Config
from brats_seg.inference.method import input_of_crop
from brats_seg.inference.probabilities import PredictionFallback, apply_model
from brats_seg.models.interface import ActivationCheckpointing, set_activation_checkpointing
from brats_seg.models.norm import ActivatedNorm, check_in_place
from brats_seg.presets import PRESETS
from brats_seg.runtime.device import Device, gpu_named
from brats_seg.training import independence, memory_plan, ranks
from brats_seg.training.accumulation import Accumulator, StepResult
from brats_seg.training.losses import DiceBce, build_task
from brats_seg.training.optimisation import build_optimizer
from tests.card import COUNTS, NAME, CardTensor, a_card
from tests.inference_builders import CONFIG, IDENTITY, make_model
from tests.training_builders import StopAtCheck, tiny_settings, train

HALF, BF16 = torch.float16, torch.bfloat16
PATCH = (16, 16, 16)
NARROW = "model.widths=4,8"


@pytest.fixture(autouse=True)
def card() -> Iterator[None]:
    with a_card():
        yield


class Step:
    def __init__(
        self,
        where: str,
        *settings: str,
        dtype: torch.dtype | None = None,
        mode: str = "none",
        criterion: nn.Module | None = None,
        ranks: ranks.Ranks | None = None,
    ) -> None:
        config = load_config(assignments=["patch.size=16,16,16", NARROW, *settings])
        device = Device(torch_device=torch.device(where), autocast_dtype=dtype)
        torch.manual_seed(0)
        self.network = build_model(config.model, PATCH).to(device.torch_device).train()
        check_in_place(self.network)
        set_activation_checkpointing(self.network, ActivationCheckpointing(mode))
        self.task = build_task(config)
        self.accumulator = Accumulator(
            self.network,
            criterion or self.task.criterion,
            build_optimizer(self.network.parameters(), config.optimizer),
            device=device,
            clip_norm=config.optimizer.clip_norm,
            ranks=ranks,
        )
        image, target = phantom_patches(2, PATCH)
        pair = (image, {"image": image, "label": target.to(torch.uint8)}[self.task.target_key])
        parts = [part.split(1) for part in pair]
        self.batch = [MicroBatch(*both) for both in zip(*parts, strict=True)]

    def __call__(self, n_times: int = 1) -> tuple[StepResult, Counter[str]]:
        for _ in range(n_times):
            COUNTS.clear()
            result = self.accumulator.step(self.batch, self.task.measure)
            result.measured.tolist()
        return result, Counter(COUNTS)


DICE_CE = ("loss.name=monai.losses.DiceCELoss", "loss.arguments={sigmoid: true}")
STEPS: dict[str, tuple[tuple[str, ...], dict[str, Any], int]] = {
    "one pass": (("optimizer.name=adamw",), {}, 3),
    "sums": (("loss.batch_dice=true", "optimizer.name=muon"), {}, 4),
    "outputs": ((*DICE_CE, "optimizer.name=sgd"), {}, 4),
    "offloaded": (("loss.batch_dice=true",), {"dtype": HALF, "mode": "host"}, 5),
    "bf16": ((), {"dtype": BF16, "mode": "all"}, 3),
    "notebook": (("model.name=notebook",), {"mode": "top"}, 3),
    "autoencoder": (("model.name=autoencoder", "optimizer.name=adamw"), {}, 3),
}
"""Settings and ways to compute, and the values that the host reads in a step."""
SLOW = ("notebook", "autoencoder")


@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=[pytest.mark.slow] if n in SLOW else []) for n in STEPS]
)
def test_a_step_is_that_of_the_cpu_and_waits_for_few_values(name: str) -> None:
    """One read each for loss, norm and measurements, one for a loss scale, one for a patch passed twice."""
    settings, ways, n_reads = STEPS[name]
    step = Step(NAME, *settings, **ways)
    result, counts = step(2)
    in_fp32 = {**ways, "dtype": None} | ({"mode": "all"} if "mode" in ways else {})
    expected, _ = Step("cpu", *settings, **in_fp32)(2)
    assert counts["read"] == n_reads
    # patches and targets, and what the loss is made of
    assert counts["to card"] <= (18 if ways.get("mode") == "host" else 11)
    assert counts["to host"] == (10 if ways.get("mode") == "host" else 0)
    assert result.loss == pytest.approx(expected.loss, rel=5e-3)
    assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=2e-2)
    assert all(
        type(p) is CardTensor and p.grad.device.type == NAME for p in step.network.parameters()
    )
    norms = [module for module in step.network.modules() if isinstance(module, ActivatedNorm)]
    assert all(module.in_place for module in norms)


class WeighedOnHost(DiceBce):
    def forward(self, output: Any, target: Tensor) -> Tensor:
        return super().forward(output, target) * torch.ones(1)


class ReadsItself(DiceBce):
    def forward(self, output: Any, target: Tensor) -> Tensor:
        loss = super().forward(output, target)
        return loss if float(loss.detach().sum()) > 0 else -loss


def test_a_tensor_on_the_host_and_a_read_in_the_loop_are_found() -> None:
    """The negative controls."""
    with pytest.raises(RuntimeError, match="found card:0 and cpu"):
        Step(NAME, criterion=WeighedOnHost())()
    assert Step(NAME, criterion=ReadsItself())(2)[1]["read"] == 3 + 2
    with pytest.raises(TypeError, match="can't convert card:0"):
        torch.ones(2, device=NAME).numpy()


@pytest.mark.parametrize("precision", [pytest.param("fp32", marks=pytest.mark.slow), "fp16"])
def test_a_run_is_stopped_and_resumed_and_validated_as_on_the_cpu(data, tmp_path, precision):
    # few windows: a simulated operation takes a millisecond
    changes = ["training.n_epochs=2", "validation.every=1", "patch.size=16,16,16"]
    changes += ["loss.batch_dice=true", "validation.overlap=0.5", "optimizer.name=adamw"]
    on_card = tiny_settings(*changes, "training.device=card", f"training.precision={precision}")
    train(data, tmp_path / "card", on_card, StopAtCheck(2))
    COUNTS.clear()
    found = train(data, tmp_path / "card", on_card).history
    expected = train(data, tmp_path / "cpu", tiny_settings(*changes, "training.device=cpu")).history
    # two for each held-out case; Adam's number of steps would be one for each parameter
    assert COUNTS["read"] < 60
    for row, as_on_cpu in zip(found, expected, strict=True):
        assert row["train_loss"] == pytest.approx(as_on_cpu["train_loss"], rel=2e-3)
        assert row["val_dice"] == pytest.approx(as_on_cpu["val_dice"], abs=5e-3)
        assert row["peak_memory_mb"] == 3


@pytest.mark.parametrize("on_host", [False, True])
def test_windows_are_added_up_on_the_card_and_mirror_images_and_members_on_the_host(rng, on_host):
    networks = [build_model(CONFIG.model, IDENTITY.patch) for _ in range(2)]
    given = input_of_crop(rng.normal(size=(4, 12, 8, 8)).astype(np.float32))
    results = []
    for where in ("cpu", NAME):
        fallback = PredictionFallback("a", Device(torch_device=torch.device(where)))
        fallback.index = int(on_host and where == NAME)
        results.append(apply_model(make_model(*networks), given, fallback, tta=True))
    np.testing.assert_allclose(*results, atol=2e-5)
    assert COUNTS["read"] == 0
    n_windows = 2
    # the weights of a network stay on the card
    assert COUNTS["to host"] == 2 * 8 * (n_windows if on_host else 1)


class Group:
    """A process group of two that hold the same; it refuses what torch and NCCL refuse."""

    def __init__(self, patched: pytest.MonkeyPatch) -> None:
        self.used: set[tuple[str, str]] = set()
        patched.setenv("WORLD_SIZE", "2")
        patched.setattr(ranks, "use_gpu", lambda _: True)
        for name in ("init_process_group", "all_reduce", "broadcast", "all_gather_object"):
            patched.setattr(distributed, name, getattr(self, name))
        for name in ("get_rank", "barrier", "destroy_process_group"):
            patched.setattr(distributed, name, lambda: 0)

    def init_process_group(self, backend: str, **_: object) -> None:
        self.backends = dict(pair.split(":") for pair in backend.split(","))

    def broadcast(self, tensor: Tensor, _: int = 0) -> None:
        device = tensor.device.type.replace(NAME, "cuda")
        if device not in self.backends or not tensor.is_contiguous():
            raise RuntimeError(f"No backend for {device}, or not contiguous")
        self.used.add((device, self.backends[device]))

    def all_reduce(self, tensor: Tensor) -> None:
        self.broadcast(tensor)
        tensor.mul_(2)

    def all_gather_object(self, values: list[Any], value: Any) -> None:
        self.broadcast(torch.empty(0))
        before = COUNTS["to host"]
        values[:] = [value, pickle.loads(pickle.dumps(value))]
        # a tensor of a GPU would arrive on that of the other process
        assert COUNTS["to host"] == before


@pytest.mark.parametrize("name", ["one pass", "outputs"])
def test_two_processes_exchange_gradients_on_the_card_and_values_on_the_host(monkeypatch, name):
    group = Group(monkeypatch)
    with ranks.joined_ranks() as two, two.first_alone():
        step = Step(NAME, *STEPS[name][0], ranks=two)
        two.broadcast(step.network)
        result, _ = step()
    alone = Step(NAME, *STEPS[name][0])
    alone.batch *= 2
    expected, _ = alone()
    assert group.used == {("cuda", "nccl"), ("cpu", "gloo")}
    assert result.n_patches == 4
    assert result.loss == pytest.approx(expected.loss, rel=1e-5)
    assert result.gradient_norm == pytest.approx(expected.gradient_norm, rel=1e-4)
    # the negative control: NCCL alone
    group.init_process_group("cuda:nccl")
    strided = torch.ones(2, 3, device=NAME).T
    for refused in (step, lambda: two.gather(1), lambda: two.any(True), lambda: two.sum(strided)):
        with pytest.raises(RuntimeError, match="No backend for"):
            refused()


def peak_of_step(config: Config, checkpointing: str) -> float:
    """Return the MiB of a GPU that the first step of a run takes, of two micro-batches."""
    task, live = build_task(config), memory_plan._LiveBytes(NAME)
    device = Device(torch_device=torch.device(NAME), autocast_dtype=HALF)
    image = torch.zeros(1, 4, *config.patch.size, dtype=HALF)
    target = {"image": image, "label": image[:, :3].byte()}[task.target_key]
    batch = [MicroBatch(image, target)] * 2
    with a_card("meta"), live:
        with device.torch_device:
            network = build_model(config.model, config.patch.size).train()
        set_activation_checkpointing(network, ActivationCheckpointing(checkpointing))
        optimizer = build_optimizer(network.parameters(), config.optimizer)
        Accumulator(network, task.criterion, optimizer, device=device, clip_norm=1.0).step(batch)
    return live.peak / 2**20


@pytest.mark.parametrize(
    "preset", ["narrow", *(pytest.param(preset, marks=pytest.mark.slow) for preset in PRESETS)]
)
def test_a_planned_peak_is_at_least_what_a_step_takes_and_not_much_more(monkeypatch, preset):
    is_narrow = preset == "narrow"
    config = load_config(preset="demo" if is_narrow else preset, assignments=[NARROW] * is_narrow)
    counter = memory_plan._Counter.of(config, gpu_named("t4"), None)
    planned = {row.checkpointing: row.predicted_mib for row in counter.rows(config.patch.size, 1)}
    peaks = {kind: peak_of_step(config, kind) for kind in ("none", "all")}
    ratios = [planned[kind] / peak for kind, peak in peaks.items()]
    assert 1.0 <= min(ratios) <= max(ratios) <= 1.4, ratios
    if is_narrow:
        # the negative control: the check of the network passes two whole patches
        monkeypatch.setattr(independence, "parts_to_probe", lambda image: [image[:1]])
        assert peak_of_step(config, "all") > 1.2 * peaks["all"]
