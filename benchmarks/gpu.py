"""Measure training, inference and memory on a GPU, and test what only a GPU does.

    python benchmarks/gpu.py                        every part, on one GPU
    python benchmarks/gpu.py training loading       some of them
    python benchmarks/gpu.py --device cpu --tiny    every part on a tiny network, to test the program

Times are those of the clock, with the device synchronised. The goals of images a second are for an
H200; the others hold on any GPU. Where an error is compared with a tolerance, the ratio is the
tolerance divided by the error.

    training        a step in each precision and memory format
    loading         the same steps with patches that are read and augmented, and with patches held
    inference       windows a second, and a whole scan in one pass in under 16 GiB
    norm            the norm in place against the stock layers: time, memory, values
    out-of-memory   memory is limited to less than a step takes, and the run goes on
    half            float16 with its loss scale against float32
    replay          the difference of two passes, against what the guard of two-pass losses accepts
    ranks           two processes on one GPU against one process
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise, product
from pathlib import Path

import torch
from comparison import (
    Comparison,
    add_json_option,
    append_json,
    ratios_of,
    seconds_in_turn,
    table_of,
)
from machine import machine_name
from torch import Tensor, distributed, nn
from torch.nn.utils import parameters_to_vector

from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import Config
from brats_seg.config_text import load_config
from brats_seg.data.fold import open_fold
from brats_seg.data.loader import Sample
from brats_seg.models.build import size_multiple
from brats_seg.models.norm import ActivatedNorm
from brats_seg.runtime.device import Device, native_dtype
from brats_seg.runtime.memory import give_back_memory, peak_memory_mb, reset_peak_memory
from brats_seg.runtime.sliding_window import predict_logits
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.epoch import Batch, epoch_batches, read_batches
from brats_seg.training.independence import LARGEST_TOLERANCE, REPLAY_TOLERANCE, ReplayError
from brats_seg.training.ranks import Ranks
from brats_seg.training.state import RunState, build_network, build_state
from brats_seg.training.tasks import count_voxels, task_of
from brats_seg.voxels.box import Triple, rounded_up

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
PLAIN = "optimizer.name=sgd"
"""Where weights are compared: Muon and Adam turn rounding of small gradients into large updates."""
SMALL_GPU_GIB = 16.0
CLOCK = time.perf_counter


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The device, and the size of what is computed on it."""

    device: torch.device
    patch: Triple = (128, 128, 128)
    scan: Triple = (240, 240, 155)
    model: tuple[str, ...] = ()
    """Settings in which the network differs from the default."""
    n_rounds: int = 7
    n_scans: int = 4
    n_steps: int = 100
    """Steps that patches are loaded for."""
    n_half_steps: int = 20
    """Steps of training in float16."""

    @property
    def precisions(self) -> list[str]:
        """Precisions that the device computes natively."""
        half = native_dtype(self.device)
        on_gpu = self.device.type == "cuda"
        return [
            name
            for name, dtype in DTYPES.items()
            if dtype in (None, half) or (on_gpu and dtype is torch.float16)
        ]

    @property
    def fastest(self) -> str:
        """The native half precision, in which most is measured; fp32 without one."""
        return self.precisions[1] if len(self.precisions) > 1 else "fp32"

    def config(self, *changes: str) -> Config:
        """Return the settings of a run."""
        size = f"patch.size={','.join(map(str, self.patch))}"
        return load_config(assignments=[size, *self.model, *changes])

    def state(self, precision: str, *changes: str, ranks: Ranks | None = None) -> RunState:
        """Return a run at its beginning; its weights depend on the seed alone."""
        config = self.config(*changes)
        return build_state(
            build_network(config, self.patch),
            task_of(config).criterion,
            config,
            device=Device(torch_device=self.device, autocast_dtype=DTYPES[precision]),
            ranks=ranks or Ranks(),
            n_steps=1000,
        )

    def synchronised(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a function that waits for the device."""

        def waiting() -> object:
            result = run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return result

        return waiting

    def goal(self, least: float) -> float | None:
        """Return a goal that is one of GPUs only."""
        return least if self.device.type == "cuda" else None


def main() -> None:
    """Measure the parts, and print one table."""
    arguments = _arguments()
    size = TINY if arguments.tiny else {}
    device = torch.device(arguments.device)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    setting = Setting(device=device, **size)
    if arguments.rank_program is not None:
        _rank_program(setting, arguments.rank_program, arguments.backend)
        return
    print(f"{machine_name()}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    found = []
    for name in arguments.parts or PARTS:
        print(f"== {name}", flush=True)
        found += PARTS[name](setting)
        give_back_memory(setting.device)
    print(table_of(found))
    append_json(found, arguments.json)
    sys.exit(any(comparison.is_met is False for comparison in found))


TINY = {
    "patch": (16, 16, 16),
    "scan": (32, 32, 20),
    "model": ("model.widths=[4,8,16]", "training.n_workers=0"),
    "n_rounds": 2,
    "n_scans": 4,
    "n_steps": 4,
    "n_half_steps": 4,
}


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("parts", nargs="*", metavar="PART", help="see above; all by default")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="test the program")
    parser.add_argument("--rank-program", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--backend", help=argparse.SUPPRESS)
    add_json_option(parser)
    arguments = parser.parse_args()
    if unknown := sorted(set(arguments.parts) - set(PARTS)):
        parser.error(f"there is no part {', '.join(unknown)}; expected some of {', '.join(PARTS)}")
    return arguments


def training(setting: Setting) -> Iterator[Comparison]:
    """Compare precisions and memory formats in a step of two micro-batches of one patch."""
    batch, ways = _batch(setting, 2), {}
    for precision, layout in product(setting.precisions, FORMATS):
        state = setting.state(precision)
        state.network.to(memory_format=FORMATS[layout])
        step = partial(state.fallback.step, batch, count_voxels)
        ways[f"{precision}, {layout}"] = setting.synchronised(step)
    task = f"training on patches of {_size(setting.patch)}"
    yield from _rates(setting, task, ways, len(batch.samples), goals=(62.0, 100.0))


def loading(setting: Setting) -> Iterator[Comparison]:
    """Compare steps on patches that are read and augmented with steps on patches that are held."""
    for augment in ("light", "full"):
        with tempfile.TemporaryDirectory() as name:
            yield _loaded_against_held(setting, Path(name), augment)


def _loaded_against_held(setting: Setting, folder: Path, augment: str) -> Comparison:
    write_phantom_cases(folder / "scans", n_cases=setting.n_scans, seed=0, shape=setting.scan)
    per_case = -(-4 * setting.n_steps // setting.n_scans)
    config = setting.config(
        f"training.augment={augment}", "folds.n_folds=2", f"patch.per_case={per_case}"
    )
    data = open_fold(folder / "scans", fold=0, config=config, prepared_path=folder / "prepared")
    state = setting.state(setting.fastest)
    keys = epoch_batches(config, data.split.train, epoch=0)[: setting.n_steps]
    held = _batch(setting, len(keys[0]))

    def train(batches: Iterator[Batch]) -> None:
        for batch in batches:
            state.fallback.step(batch, count_voxels)

    def read() -> float:
        batches = read_batches(data, config, keys, state.accumulator.device)
        # a run starts its workers once: the first steps wait for them
        n_first = max(1, len(keys) // 4)
        train(islice(batches, n_first))
        return _seconds(setting, partial(train, batches)) / (len(keys) - n_first)

    def repeat() -> float:
        return _seconds(setting, partial(train, iter([held] * len(keys)))) / len(keys)

    rounds = [(repeat(), read()) for _ in range(3)]
    without, with_loading = zip(*rounds, strict=True)
    return Comparison(
        task=f"training with {augment} augmentation, {setting.fastest}",
        ours=f"{len(keys[0]) / statistics.median(with_loading):.1f} images/s, read",
        peer="the same steps on a batch that is held",
        theirs=f"{len(keys[0]) / statistics.median(without):.1f} images/s",
        ratios=ratios_of(without, with_loading),
        least=setting.goal(0.95),
    )


@torch.inference_mode()
def inference(setting: Setting) -> list[Comparison]:
    """Compare precisions and memory formats in windows, and predict a whole scan in one pass."""
    ways = {}
    for precision, layout in product(setting.precisions, FORMATS):
        state = setting.state(precision)
        network = state.network.eval().to(memory_format=FORMATS[layout])
        image = torch.randn(1, 4, *setting.patch, device=setting.device)
        step = partial(_predicted, network, state.accumulator.device, image)
        ways[f"{precision}, {layout}"] = setting.synchronised(step)
    task = f"inference in windows of {_size(setting.patch)}"
    return [*_rates(setting, task, ways, 1, goals=()), _whole_scan(setting)]


def _whole_scan(setting: Setting) -> Comparison:
    state = setting.state(setting.fastest)
    network, device = state.network.eval(), state.accumulator.device
    image = torch.randn(4, *setting.scan).to(setting.device)
    window = rounded_up(setting.scan, size_multiple(setting.config().model, setting.patch))

    def predict() -> object:
        return predict_logits(
            partial(_predicted, network, device), image, window=window, overlap=0.0
        )

    gib = _peak_gib(setting, predict)
    seconds = [_seconds(setting, predict) for _ in range(setting.n_rounds)]
    return Comparison(
        task=f"a whole scan of {_size(setting.scan)} in one pass, {setting.fastest}",
        ours=f"{gib:.1f} GiB",
        peer="memory of a small GPU",
        theirs=f"{SMALL_GPU_GIB:.0f} GiB",
        ratios=(SMALL_GPU_GIB / gib,),
        least=setting.goal(1.0),
        agreement=f"{statistics.median(seconds):.2f} s",
    )


def _predicted(network: nn.Module, device: Device, image: Tensor) -> Tensor:
    with device.autocast():
        logits: Tensor = network(image)
    return logits


def norm(setting: Setting) -> Iterator[Comparison]:
    """Compare the norm that overwrites its input with the stock layers."""
    batch, states = _batch(setting, 2), {}
    for name, in_place in (("stock", False), ("in place", True)):
        states[name] = setting.state(setting.fastest)
        for module in states[name].network.modules():
            if isinstance(module, ActivatedNorm):
                module.in_place = in_place
    steps = {name: partial(s.fallback.step, batch, count_voxels) for name, s in states.items()}
    stock, ours = (steps[name]() for name in ("stock", "in place"))
    loss, gradient = (
        abs(getattr(ours, name) / getattr(stock, name) - 1) for name in ("loss", "gradient_norm")
    )
    ways = {name: setting.synchronised(step) for name, step in steps.items()}
    seconds = seconds_in_turn(ways, setting.n_rounds, clock=CLOCK)
    task = f"step with the norm in place, {setting.fastest}"
    yield Comparison(
        task=f"{task}: time",
        ours=_ms(seconds["in place"]),
        peer="stock InstanceNorm and LeakyReLU",
        theirs=_ms(seconds["stock"]),
        ratios=ratios_of(seconds["stock"], seconds["in place"]),
        least=setting.goal(1.0),
        agreement=f"loss differs by {loss:.1e}, norm of the gradient by {gradient:.1e}",
    )
    peaks = {name: _peak_gib(setting, step) for name, step in steps.items()}
    yield Comparison(
        task=f"{task}: memory",
        ours=f"{peaks['in place']:.2f} GiB",
        peer="stock InstanceNorm and LeakyReLU",
        theirs=f"{peaks['stock']:.2f} GiB",
        ratios=(peaks["stock"] / peaks["in place"],),
        least=setting.goal(1.0),
    )


def out_of_memory(setting: Setting) -> Iterator[Comparison]:
    """Limit memory to less than a micro-batch of four takes, and compare the steps that follow."""
    batch = _batch(setting, 4)
    state = setting.state("fp32", PLAIN, "training.micro_batch=1")
    start = _weights(state.network)
    gib = _peak_gib(setting, partial(state.fallback.step, batch, count_voxels))
    expected = _weights(state.network)
    state = setting.state("fp32", PLAIN, "training.micro_batch=4")
    with _limited_memory(setting, state.network, 1.5 * gib):
        state.fallback.step(batch, count_voxels)
        found = _weights(state.network)
        state.fallback.step(batch, count_voxels)
    ran_out = state.fallback.place > 0
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
    batch = _batch(setting, 2)
    state = setting.state("fp16")
    results = [state.fallback.step(batch, count_voxels) for _ in range(setting.n_half_steps)]
    n_skipped = sum(result.skipped for result in results)
    scale = state.accumulator.scaler.get_scale()
    state = setting.state("fp32")
    # as many steps as were not skipped to find the scale
    for _ in range(len(results) - n_skipped):
        expected = state.fallback.step(batch, count_voxels)
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
        image = _batch(setting, 1).samples[0].image[None].float().to(setting.device)
        with torch.no_grad():
            passes = [
                _predicted(state.network.eval(), state.accumulator.device, image) for _ in range(5)
            ]
        state.network.train()
        n_refused = sum(_is_refused(state, _batch(setting, 4)) for _ in range(3))
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
        state.fallback.step(batch, count_voxels)
    except ReplayError:
        return True
    return False


def ranks(setting: Setting) -> Iterator[Comparison]:
    """Let two processes on one device share a batch, by NCCL if it takes two on one GPU."""
    backends = ("nccl", "gloo") if setting.device.type == "cuda" else ("gloo",)
    for backend in backends:
        with tempfile.TemporaryDirectory() as name:
            found = Path(name) / "found.json"
            command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
            command += [__file__, "--device", str(setting.device), "--backend", backend]
            command += ["--rank-program", str(found), *(["--tiny"] if setting.model else [])]
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
    batch, weights, seconds = _batch(setting, 4), [], []
    for members in (Ranks(), own):
        state = setting.state("fp32", PLAIN, ranks=members)
        start = _weights(state.network)
        share = Batch(samples=tuple(members.share(batch.samples)))
        step = setting.synchronised(partial(state.fallback.step, share, count_voxels))
        seconds.append(_seconds(setting, step))
        weights.append(_weights(state.network))
    alone, together = weights
    error = float((together - alone).norm() / (alone - start).norm())
    if own.is_first:
        path.write_text(json.dumps([error, seconds[1], seconds[0]]))
    distributed.barrier()
    distributed.destroy_process_group()


def _rates(
    setting: Setting,
    task: str,
    ways: dict[str, Callable[[], object]],
    n_images: int,
    goals: Sequence[float],
) -> Iterator[Comparison]:
    """Measure ways in turn; compare each with the first, and the fastest with goals."""
    seconds = seconds_in_turn(ways, setting.n_rounds, n_warm_ups=2, clock=CLOCK)
    rates = {name: n_images / statistics.median(own) for name, own in seconds.items()}
    first, *others = seconds
    for name in others:
        yield Comparison(
            task=f"{task}: {name}",
            ours=f"{rates[name]:.1f} images/s",
            peer=first,
            theirs=f"{rates[first]:.1f} images/s",
            ratios=ratios_of(seconds[first], seconds[name]),
        )
    best = max(rates, key=lambda name: rates[name])
    for goal in goals:
        yield Comparison(
            task=f"{task}: {best}",
            ours=f"{rates[best]:.1f} images/s",
            peer="goal on an H200",
            theirs=f"{goal:.0f} images/s",
            ratios=tuple(n_images / own / goal for own in seconds[best]),
            least=setting.goal(1.0),
        )


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


def _batch(setting: Setting, n_patches: int) -> Batch:
    """Make phantom patches in the types in which patches are read."""
    images, targets = phantom_patches(n_patches, setting.patch)
    pairs = zip(images.half(), targets.to(torch.uint8), strict=True)
    return Batch(samples=tuple(Sample(image=i, target=t, case_id="") for i, t in pairs))


def _seconds(setting: Setting, run: Callable[[], object]) -> float:
    started_s = CLOCK()
    setting.synchronised(run)()
    return CLOCK() - started_s


def _peak_gib(setting: Setting, run: Callable[[], object]) -> float:
    """Return the peak memory of torch on a GPU during a run; on the CPU that of the process."""
    give_back_memory(setting.device)
    reset_peak_memory(setting.device)
    setting.synchronised(run)()
    return peak_memory_mb(setting.device) / 1024


def _weights(network: nn.Module) -> Tensor:
    return parameters_to_vector(network.parameters()).detach().clone()


def _ms(seconds: Sequence[float]) -> str:
    return f"{1e3 * statistics.median(seconds):.0f} ms"


def _size(shape: Triple) -> str:
    return "x".join(map(str, shape))


PARTS: dict[str, Callable[[Setting], Iterator[Comparison] | list[Comparison]]] = {
    "training": training,
    "loading": loading,
    "inference": inference,
    "norm": norm,
    "out-of-memory": out_of_memory,
    "half": half,
    "replay": replay,
    "ranks": ranks,
}


if __name__ == "__main__":
    main()
