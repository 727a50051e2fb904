"""Test the out-of-memory fallback: the batch is repeated, and the weights are the same."""

import json
import logging
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ModelConfig
from brats_seg.data.loader import Sample
from brats_seg.errors import EnvironmentalError
from brats_seg.models.build import build_model
from brats_seg.models.interface import ActivationCheckpointing
from brats_seg.runtime.memory import Fallback
from brats_seg.training.accumulation import (
    Accumulator,
    HalfUpdatedError,
    MemoryMode,
    StepResult,
    make_step,
    mode_entries,
    resume_mode,
    step_fallback,
)
from brats_seg.training.losses import BatchDiceBce, DiceBce, Measure, count_voxels
from brats_seg.training.run_plan import Batch
from tests.builders import write_case
from tests.training_builders import weights as saved_weights

WIDTHS = (4, 8)


class Fuse:
    """Runs out of memory in the n-th forward pass, once."""

    def __init__(self, n: int, error: BaseException | None = None) -> None:
        self.n_left = n
        self.error = error or torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    def __call__(self, module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        self.n_left -= 1
        if self.n_left == 0:
            raise self.error


def network() -> nn.Module:
    torch.manual_seed(0)
    return build_model(ModelConfig(widths=WIDTHS), (8, 8, 8))


def samples(n: int) -> Batch:
    generator = torch.Generator().manual_seed(1)
    return Batch(
        samples=tuple(
            Sample(
                image=torch.randn(4, 8, 8, 8, generator=generator),
                target=(torch.rand(3, 8, 8, 8, generator=generator) > 0.6).to(torch.uint8),
                case_id=str(number),
            )
            for number in range(n)
        )
    )


@dataclass
class Steps:
    """An accumulator whose steps fall back."""

    accumulator: Accumulator
    fallback: Fallback[MemoryMode]

    def step(self, batch: Batch, measure: Measure) -> StepResult:
        return make_step(self.accumulator, self.fallback, batch, measure)

    @property
    def mode(self) -> MemoryMode:
        return self.fallback.mode


def fallback_of(
    model: nn.Module, criterion: nn.Module, micro_batch: int = 1, lr: float = 0.1
) -> Steps:
    accumulator = Accumulator(model, criterion, torch.optim.SGD(model.parameters(), lr=lr))
    # a fuse counts the passes of training, not those that ask whether the network mixes patches
    fuses = dict(model._forward_pre_hooks)
    model._forward_pre_hooks.clear()
    accumulator._gradient.independence.check(torch.zeros(1, 4, 8, 8, 8), accumulator.device)
    model._forward_pre_hooks.update(fuses)
    return Steps(accumulator, step_fallback(accumulator, micro_batch))


def weights(model: nn.Module) -> Tensor:
    return nn.utils.parameters_to_vector(model.parameters()).detach()


@pytest.mark.parametrize(
    ("criterion", "n"),
    [*((DiceBce(), n) for n in range(1, 5)), *((BatchDiceBce(), n) for n in range(1, 8))],
)
def test_memory_that_runs_out_in_any_forward_pass_changes_no_bit(
    criterion: nn.Module, n: int
) -> None:
    """Four micro-batches: four forward passes for one loss, seven for the other."""
    undisturbed, disturbed = network(), network()
    expected = fallback_of(undisturbed, criterion).step(samples(4), count_voxels)
    fuse = Fuse(n)
    disturbed.register_forward_pre_hook(fuse)
    fallback = fallback_of(disturbed, criterion)

    found = fallback.step(samples(4), count_voxels)

    assert fuse.n_left < 0
    assert fallback.mode == MemoryMode(micro_batch=1, checkpointing=ActivationCheckpointing.TOP)
    assert torch.equal(weights(undisturbed), weights(disturbed))
    assert found.loss == expected.loss
    assert torch.equal(found.measured, expected.measured)


def test_gradients_that_are_not_dropped_would_be_noticed() -> None:
    """The negative control: keeping the gradients of the failed attempt changes the weights."""
    kept, undisturbed = network(), network()
    fallback = fallback_of(kept, DiceBce())
    batch = samples(4)
    fallback.accumulator._leaves.drop_gradients = lambda: None  # type: ignore[method-assign]
    kept.register_forward_pre_hook(Fuse(3))

    fallback.step(batch, count_voxels)
    fallback_of(undisturbed, DiceBce()).step(batch, count_voxels)

    assert not torch.allclose(weights(kept), weights(undisturbed), rtol=1e-3)


def test_dropout_draws_the_same_in_the_next_mode() -> None:
    def dropping() -> nn.Module:
        torch.manual_seed(0)
        return nn.Sequential(nn.Conv3d(4, 8, 1), nn.Dropout3d(0.5), nn.Conv3d(8, 3, 1))

    undisturbed, disturbed = dropping(), dropping()
    disturbed.register_forward_pre_hook(Fuse(3))
    for model in (undisturbed, disturbed):
        torch.manual_seed(7)
        fallback = fallback_of(model, DiceBce(), micro_batch=2)
        # the random state of the failed attempt must be restored
        fallback.fallback.modes = (MemoryMode(micro_batch=1), MemoryMode(micro_batch=1))
        fallback.step(samples(4), count_voxels)

    assert torch.equal(weights(undisturbed), weights(disturbed))


def test_the_modes_go_from_smaller_micro_batches_to_checkpointing() -> None:
    fallback = fallback_of(network(), DiceBce(), micro_batch=5)

    assert [str(mode) for mode in fallback.fallback.modes] == [
        "micro-batch 5",
        "micro-batch 3",
        "micro-batch 2",
        "micro-batch 1",
        "micro-batch 1, checkpointing top",
        "micro-batch 1, checkpointing all",
    ]


def test_a_smaller_micro_batch_learns_the_same_to_rounding() -> None:
    undisturbed, disturbed = network(), network()
    fallback_of(undisturbed, DiceBce(), micro_batch=4).step(samples(6), count_voxels)
    disturbed.register_forward_pre_hook(Fuse(2))
    before = weights(network())

    fallback = fallback_of(disturbed, DiceBce(), micro_batch=4)
    fallback.step(samples(6), count_voxels)

    assert fallback.mode == MemoryMode(micro_batch=2)
    update, expected = weights(disturbed) - before, weights(undisturbed) - before
    assert float((update - expected).norm() / expected.norm()) <= 1e-5


def test_in_the_last_mode_the_error_says_what_was_tried_and_what_to_lower(
    caplog: pytest.LogCaptureFixture,
) -> None:
    def always(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2 GiB")

    model = network()
    model.register_forward_pre_hook(always)
    before = weights(model)

    with (
        caplog.at_level(logging.WARNING),
        pytest.raises(
            EnvironmentalError,
            match=r"micro-batch 2; .*checkpointing all\), at a peak of .* Lower patch\.size",
        ),
    ):
        fallback_of(model, DiceBce(), micro_batch=2).step(samples(2), count_voxels)

    assert "memory ran out with micro-batch 2: CUDA out of memory" in caplog.text
    assert torch.equal(before, weights(model))


def test_memory_that_runs_out_in_the_update_is_fatal() -> None:
    model = network()
    fallback = fallback_of(model, DiceBce())

    def fail(closure: object = None) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    fallback.accumulator.optimizer.step = fail  # type: ignore[method-assign,assignment]

    with pytest.raises(HalfUpdatedError, match=r"weights may be half updated.*last checkpoint"):
        fallback.step(samples(2), count_voxels)


def test_the_mode_is_saved_in_plain_values() -> None:
    first, second = (fallback_of(network(), DiceBce(), 2).fallback for _ in range(2))
    first.index = len(first.modes) - 1

    resume_mode(second, mode_entries(first.mode))

    assert second.mode == first.mode
    resume_mode(
        third := fallback_of(network(), DiceBce()).fallback,
        mode_entries(first.mode) | {"micro_batch": 8},
    )
    assert third.index == 0  # of another mode than those that there are
    assert mode_entries(first.mode) == {"micro_batch": 1, "checkpointing": "all"}


ROOT = Path(__file__).parent.parent
LIMITED_SETTINGS = [
    "folds.n_folds=3",
    "patch.size=[48, 48, 48]",
    "patch.per_case=2",
    "model.widths=[16, 32]",
    # a high rate magnifies the last digits, in which sums of micro-batches differ
    "optimizer.name=adamw",
    "optimizer.lr=3e-4",
    "training.n_epochs=2",
    "training.effective_batch=8",
    "training.micro_batch=8",
    "training.precision=fp32",
    "training.n_workers=0",
    "training.device=cpu",
]


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scans")
    for number in range(6):
        write_case(root, f"BraTS2021_{number:05d}", seed=number, shape=(64, 64, 56))
    return root


def limited_run(scans: Path, run_path: Path, limit_mb: float) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "tests.exhaustion_program"]
    return subprocess.run(
        [*program, str(scans), str(run_path), str(limit_mb), *LIMITED_SETTINGS],
        cwd=ROOT,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
    )


def weights_of_run(run_path: Path) -> torch.Tensor:
    return torch.cat([tensor.flatten() for tensor in saved_weights(run_path / "last.pt").values()])


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read on Linux")
def test_a_run_under_half_of_what_it_takes_learns_the_same(scans: Path, tmp_path: Path) -> None:
    free = limited_run(scans, tmp_path / "free", 0)
    assert free.returncode == 0, free.stderr
    outcome = json.loads(free.stdout)
    assert outcome["mode"] == "micro-batch 8"

    half = limited_run(scans, tmp_path / "half", outcome["taken_mb"] / 2)

    assert half.returncode == 0, half.stderr
    limited = json.loads(half.stdout)
    assert limited["finished"]
    assert limited["taken_mb"] <= outcome["taken_mb"] / 2
    assert limited["mode"] in {"micro-batch 2", "micro-batch 1"}
    assert "memory ran out with micro-batch 8" in half.stderr
    expected = weights_of_run(tmp_path / "free")
    difference = weights_of_run(tmp_path / "half") - expected
    assert float(difference.norm() / expected.norm()) <= 1e-5


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="address space is limited and read on Linux")
def test_where_no_mode_fits_the_run_says_what_to_lower(scans: Path, tmp_path: Path) -> None:
    ended = limited_run(scans, tmp_path / "run", 60)

    assert ended.returncode == 1
    assert "memory ran out in every mode (micro-batch 8; micro-batch 4" in ended.stderr
    assert "Lower patch.size or model.widths" in ended.stderr
