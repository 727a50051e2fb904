"""Test the out-of-memory fallback: the batch is repeated, and the weights are the same."""

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ModelConfig
from brats_seg.data.loader import Sample
from brats_seg.errors import EnvironmentalError
from brats_seg.models.build import build_model
from brats_seg.models.interface import ActivationCheckpointing
from brats_seg.training import accumulation
from brats_seg.training.losses import BatchDiceBce, DiceBce, count_voxels
from brats_seg.training.run_plan import Batch
from tests.builders import ROOT, start, write_case
from tests.training_builders import same
from tests.training_builders import weights as saved_weights

WIDTHS = (4, 8)


class Fuse:
    def __init__(self, n: int) -> None:
        self.n_left = n

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")


def network() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(widths=WIDTHS), (8, 8, 8))


def samples(n: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    images = torch.randn(n, 4, 8, 8, 8, generator=generator)
    targets = (torch.rand(n, 3, 8, 8, 8, generator=generator) > 0.6).to(torch.uint8)
    pairs = enumerate(zip(images, targets, strict=True))
    return Batch(samples=tuple(Sample(image=i, target=t, case_id=str(n)) for n, (i, t) in pairs))


class Steps:
    def __init__(self, model: nn.Module, criterion: nn.Module, micro_batch: int = 1) -> None:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        self.accumulator = accumulation.Accumulator(model, criterion, optimizer)
        # a fuse counts the passes of training, not those that ask whether the network mixes patches
        fuses = dict(model._forward_pre_hooks)
        model._forward_pre_hooks.clear()
        independence = self.accumulator._gradient.independence
        independence.check(torch.zeros(1, 4, 8, 8, 8), self.accumulator.device)
        model._forward_pre_hooks.update(fuses)
        self.fallback = accumulation.step_fallback(self.accumulator, micro_batch)

    def step(self, n: int = 4) -> accumulation.StepResult:
        return accumulation.make_step(self.accumulator, self.fallback, samples(n), count_voxels)


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


def dropping() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Conv3d(4, 8, 1), nn.Dropout3d(0.5), nn.Conv3d(8, 3, 1))


@pytest.mark.parametrize("make", [network, dropping])
@pytest.mark.parametrize(
    ("criterion", "n"),
    [*((DiceBce(), n) for n in range(1, 5)), *((BatchDiceBce(), n) for n in range(1, 8))],
)
def test_oom_changes_no_bit(criterion: nn.Module, n: int, make: Callable[[], nn.Module]) -> None:
    """Four micro-batches: four forward passes for one loss, seven for the other. Dropout, too."""
    results, fuse, undisturbed, disturbed = [], Fuse(n), make(), make()
    disturbed.register_forward_pre_hook(fuse)
    for model in (undisturbed, disturbed):
        steps = Steps(model, criterion)
        if make is dropping:
            # a network that has no checkpointing; the random state must be restored
            steps.fallback.modes = (accumulation.MemoryMode(micro_batch=1),) * 2
        torch.manual_seed(7)
        results.append(steps.step())
    assert fuse.n_left < 0
    assert steps.fallback.index == 1
    if make is network:
        expected = accumulation.MemoryMode(micro_batch=1, checkpointing=ActivationCheckpointing.TOP)
        assert steps.fallback.mode == expected
    assert same(undisturbed.state_dict(), disturbed.state_dict())
    assert results[0].loss == results[1].loss
    assert torch.equal(results[0].measured, results[1].measured)


def test_gradients_that_are_not_dropped_would_be_noticed() -> None:
    """The negative control: keeping the gradients of the failed attempt changes the weights."""
    kept, undisturbed = network(), network()
    steps = Steps(kept, DiceBce())
    steps.accumulator.leaves.drop_gradients = lambda: None  # type: ignore[method-assign]
    kept.register_forward_pre_hook(Fuse(3))
    steps.step()
    Steps(undisturbed, DiceBce()).step()
    assert not torch.allclose(weights(kept), weights(undisturbed), rtol=1e-3)


def test_a_smaller_micro_batch_learns_the_same_to_rounding() -> None:
    undisturbed, disturbed = network(), network()
    Steps(undisturbed, DiceBce(), micro_batch=4).step(6)
    disturbed.register_forward_pre_hook(Fuse(2))
    steps = Steps(disturbed, DiceBce(), micro_batch=4)
    steps.step(6)
    assert steps.fallback.mode == accumulation.MemoryMode(micro_batch=2)
    update, expected = (weights(model) - weights(network()) for model in (disturbed, undisturbed))
    assert float((update - expected).norm() / expected.norm()) <= 1e-5


def test_in_the_last_mode_the_error_says_what_to_lower(caplog: pytest.LogCaptureFixture) -> None:
    def always(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model = network()
    model.register_forward_pre_hook(always)
    steps = Steps(model, DiceBce(), micro_batch=5)
    assert [(mode.micro_batch, mode.checkpointing.value) for mode in steps.fallback.modes] == [
        *((n, "none") for n in (5, 3, 2, 1)),
        *((1, kind) for kind in ("top", "all")),
    ]
    tried = r"micro-batch 5; .*checkpointing all\), at a peak of .* Lower patch\.size"
    with pytest.raises(EnvironmentalError, match=tried):
        steps.step()
    assert "memory ran out with micro-batch 5: CUDA out of memory" in caplog.text
    assert torch.equal(weights(model), weights(network()))


def test_memory_that_runs_out_in_the_update_is_fatal() -> None:
    steps = Steps(network(), DiceBce())

    def fail(closure: object = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    steps.accumulator.optimizer.step = fail  # type: ignore[method-assign,assignment]
    with pytest.raises(EnvironmentalError, match=r"may be half updated.*last checkpoint"):
        steps.step()


LIMITED_SETTINGS = (
    "folds.n_folds=3 patch.size=48,48,48 patch.per_case=2 model.widths=16,32 "
    # a high rate magnifies the last digits, in which sums of micro-batches differ
    "optimizer.name=adamw optimizer.lr=3e-4 training.n_epochs=2 training.effective_batch=8 "
    "training.micro_batch=8 training.precision=fp32 training.n_workers=0 training.device=cpu"
)


def limited_run(scans: Path, run_path: Path, limit_mb: float) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "tests.exhaustion_program", scans, run_path, str(limit_mb)]
    return start([*program, *LIMITED_SETTINGS.split()], ROOT)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read on Linux")
def test_a_run_under_half_of_what_it_takes_learns_the_same(tmp_path: Path) -> None:
    scans, weights = tmp_path / "scans", {}
    for number in range(6):
        write_case(scans, f"BraTS2021_{number:05d}", seed=number, shape=(64, 64, 56))
    free = limited_run(scans, tmp_path / "free", 0)
    assert free.returncode == 0, free.stderr
    outcome = json.loads(free.stdout)
    assert outcome["mode"] == "micro-batch 8"
    half = limited_run(scans, tmp_path / "half", outcome["taken_mb"] / 2)
    none = limited_run(scans, tmp_path / "none", 60)
    assert half.returncode == 0, half.stderr
    limited = json.loads(half.stdout)
    assert limited["finished"]
    assert limited["taken_mb"] <= outcome["taken_mb"] / 2
    assert limited["mode"] in {"micro-batch 2", "micro-batch 1"}
    assert "memory ran out with micro-batch 8" in half.stderr
    for name in ("free", "half"):
        saved = saved_weights(tmp_path / name / "last.pt").values()
        weights[name] = torch.cat([tensor.flatten() for tensor in saved])
    assert float((weights["half"] - weights["free"]).norm() / weights["free"].norm()) <= 1e-5
    assert none.returncode == 1
    assert "memory ran out in every mode (micro-batch 8; micro-batch 4" in none.stderr
    assert "Lower patch.size or model.widths" in none.stderr
