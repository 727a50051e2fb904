"""Test on a GPU what only a GPU does: memory that runs out, float16, kernels that vary, two ranks.

`gpu.py` runs these. Each compares an error with its tolerance. The program itself is what torchrun
starts for the part `ranks`.
"""

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path

import torch
from comparison import Comparison
from gpu_setting import Setting, make_step, predicted, setting_of
from torch import Tensor, distributed, nn
from torch.nn.utils import parameters_to_vector

from brats_seg.runtime.memory import give_back_memory
from brats_seg.training.independence import LARGEST_TOLERANCE, REPLAY_TOLERANCE, ReplayError
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_plan import Batch
from brats_seg.training.state import RunState

PLAIN = "optimizer.name=sgd"
"""Where weights are compared: Muon and Adam turn rounding of small gradients into large updates."""


def out_of_memory(setting: Setting) -> Iterator[Comparison]:
    """Limit memory to less than a micro-batch of four takes, and compare the steps that follow."""
    batch = setting.batch(4)
    state = setting.state("fp32", PLAIN, "training.micro_batch=1")
    start = _weights(state.network)
    gib = setting.peak_gib(partial(make_step, state, batch))
    expected = _weights(state.network)
    state = setting.state("fp32", PLAIN, "training.micro_batch=4")
    with _limited_memory(setting, state.network, 1.5 * gib):
        make_step(state, batch)
        found = _weights(state.network)
        make_step(state, batch)
    ran_out = state.fallback.index > 0
    error = float((found - expected).norm() / (expected - start).norm())
    yield _within(
        "a step in which memory ran out, against one of single patches",
        error if ran_out else float("inf"),
        0.02,
        f"the run went on with {state.fallback.mode}" if ran_out else "memory did not run out",
    )


@contextmanager
def _limited_memory(setting: Setting, network: nn.Module, gib: float) -> Iterator[None]:
    """Limit the memory of the GPU; on the CPU, refuse more than two patches in its place."""
    if setting.device.type != "cuda":
        hook = network.register_forward_pre_hook(_refuse)
        yield
        hook.remove()
        return
    give_back_memory(setting.device)
    total = torch.cuda.get_device_properties(setting.device).total_memory
    torch.cuda.set_per_process_memory_fraction(min(1.0, gib * 2**30 / total), setting.device)
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0, setting.device)


def _refuse(_: nn.Module, given: tuple[Tensor, ...]) -> None:
    if len(given[0]) > 2:
        msg = "out of memory, as the benchmark wants it"
        raise torch.OutOfMemoryError(msg)


def half(setting: Setting) -> Iterator[Comparison]:
    """Train in float16 with its loss scale, and in float32, on the same batch."""
    batch = setting.batch(2)
    state = setting.state("fp16")
    results = [make_step(state, batch) for _ in range(setting.n_half_steps)]
    n_skipped = sum(result.skipped for result in results)
    scale = state.accumulator.scaler.get_scale()
    state = setting.state("fp32")
    # as many steps as were not skipped to find the scale
    for _ in range(len(results) - n_skipped):
        expected = make_step(state, batch)
    losses = (results[-1].loss, expected.loss)
    yield _within(
        f"loss after {len(results)} steps in fp16, against fp32",
        abs(losses[0] / losses[1] - 1),
        0.05,
        f"{losses[0]:.4f} and {losses[1]:.4f}; {n_skipped} skipped, scale {scale:.0f}",
    )


def replay(setting: Setting) -> Iterator[Comparison]:
    """Compare outputs of the same patch, with kernels that cuDNN chooses by trying them."""
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        state = setting.state(setting.fastest, "loss.batch_dice=true")
        image = setting.batch(1).samples[0].image[None].float().to(setting.device)
        with torch.no_grad():
            passes = [
                predicted(state.network.eval(), state.accumulator.device, image) for _ in range(5)
            ]
        state.network.train()
        n_refused = sum(_is_refused(state, setting.batch(4)) for _ in range(3))
    finally:
        torch.backends.cudnn.benchmark = before
    scale = max(1.0, float(passes[0].abs().max()))
    differences = [float((a - b).abs().max()) / scale for a, b in pairwise(passes)]
    accepted = min(REPLAY_TOLERANCE * torch.finfo(passes[0].dtype).eps, LARGEST_TOLERANCE)
    yield _within(
        f"difference of two passes over a patch, {setting.fastest}",
        float("inf") if n_refused else max(differences),
        accepted,
        f"{n_refused} of 3 steps of batch Dice were refused",
    )


def _is_refused(state: RunState, batch: Batch) -> bool:
    try:
        make_step(state, batch)
    except ReplayError:
        return True
    return False


def ranks(setting: Setting) -> Iterator[Comparison]:
    """Let two processes on one device share a batch, by NCCL if it takes two on one GPU."""
    backends = ("cpu:gloo,cuda:nccl", "gloo") if setting.device.type == "cuda" else ("gloo",)
    for backend in backends:
        with tempfile.TemporaryDirectory() as name:
            found = Path(name) / "found.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            command += [__file__, str(found), "--device", str(setting.device)]
            command += ["--backend", backend, *(["--tiny"] if setting.model else [])]
            done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=600)
            if not found.exists():
                lines = done.stderr.strip().splitlines()
                print(f"two processes on one device by {backend}: {lines[-1] if lines else ''}")
                continue
            error, seconds, alone_s = json.loads(found.read_text())
        words = f"{1e3 * seconds:.0f} ms a step, one process {1e3 * alone_s:.0f} ms"
        yield _within(
            f"weights after a step of two processes on one device by {backend}", error, 0.02, words
        )


def _rank_program(setting: Setting, path: Path, backend: str) -> None:
    """Make a step in one process and the same step in two, and write how they differ."""
    if setting.device.type == "cuda":
        torch.cuda.set_device(0)
    distributed.init_process_group(backend)
    own = Ranks(rank=distributed.get_rank(), n_ranks=2)
    batch, weights, seconds = setting.batch(4), [], []
    for members in (Ranks(), own):
        state = setting.state("fp32", PLAIN, ranks=members)
        start = _weights(state.network)
        share = Batch(samples=tuple(members.share(batch.samples)))
        step = setting.synchronised(partial(make_step, state, share))
        seconds.append(setting.seconds(step))
        weights.append(_weights(state.network))
    alone, together = weights
    error = float((together - alone).norm() / (alone - start).norm())
    if own.is_first:
        path.write_text(json.dumps([error, seconds[1], seconds[0]]))
    distributed.barrier()
    distributed.destroy_process_group()


def _within(task: str, error: float, tolerance: float, agreement: str) -> Comparison:
    return Comparison(
        task=task,
        ours=f"{error:.1e}",
        peer="tolerance",
        theirs=f"{tolerance:g}",
        # equal results are not infinitely better
        ratios=(tolerance / max(error, 1e-3 * tolerance),),
        least=1.0,
        agreement=agreement,
    )


def _weights(network: nn.Module) -> Tensor:
    return parameters_to_vector(network.parameters()).detach().clone()


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=_rank_program.__doc__)
    parser.add_argument("found", type=Path)
    parser.add_argument("--device", required=True)
    parser.add_argument("--backend", required=True)
    parser.add_argument("--tiny", action="store_true")
    given = parser.parse_args()
    _rank_program(setting_of(given.device, tiny=given.tiny), given.found, given.backend)
