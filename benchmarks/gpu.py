"""Measure training, inference and memory on a GPU, and test what only a GPU does.

    python benchmarks/gpu.py                        every part, on one GPU
    python benchmarks/gpu.py --parts training loading   some of them
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

import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from itertools import islice, product
from pathlib import Path

import torch
from comparison import (
    Comparison,
    append_json,
    median_time,
    options_of,
    ratios_of,
    seconds_in_turn,
    table_of,
)
from gpu_checks import half, out_of_memory, ranks, replay
from gpu_setting import CLOCK, Setting, make_step, predicted, setting_of
from machine import machine_name

from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.data.fold import open_fold
from brats_seg.models.build import size_multiple
from brats_seg.models.norm import ActivatedNorm
from brats_seg.runtime.memory import give_back_memory
from brats_seg.runtime.windows import predict_logits
from brats_seg.training.run_plan import Batch, plan_run, read_batches
from brats_seg.voxels.box import rounded_up, shape_text

FORMATS = {"contiguous": torch.contiguous_format, "channels last": torch.channels_last_3d}
SMALL_GPU_GIB = 16.0


def main() -> None:
    """Measure the parts, and print one table."""
    arguments = options_of(__doc__, parts=list(PARTS), device="cuda", tiny=False)
    setting = setting_of(arguments.device, tiny=arguments.tiny)
    print(f"{machine_name()}; torch {torch.__version__}, cuDNN {torch.backends.cudnn.version()}")
    found = []
    for name in arguments.parts:
        print(f"== {name}", flush=True)
        rows = list(PARTS[name](setting))
        # written at once: a part that fails loses no other
        append_json(rows, arguments.json)
        found += rows
        give_back_memory(setting.device)
    print(table_of(found))


def training(setting: Setting) -> Iterator[Comparison]:
    """Compare precisions and memory formats in a step of two micro-batches of one patch."""
    batch, ways = setting.batch(2), {}
    for precision, layout in product(setting.precisions, FORMATS):
        state = setting.state(precision)
        state.network.to(memory_format=FORMATS[layout])
        step = partial(make_step, state, batch)
        ways[f"{precision}, {layout}"] = setting.synchronised(step)
    task = f"training on patches of {shape_text(setting.patch)}"
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
    plan = replace(plan_run(config, data), device=state.accumulator.device)
    keys = plan.keys(0)[: setting.n_steps]
    held = setting.batch(len(keys[0]))

    def train(batches: Iterator[Batch]) -> None:
        for batch in batches:
            make_step(state, batch)

    def read() -> float:
        batches = read_batches(plan, keys)
        # a run starts its workers once: the first steps wait for them
        n_first = max(1, len(keys) // 4)
        train(islice(batches, n_first))
        return setting.seconds(partial(train, batches)) / (len(keys) - n_first)

    def repeat() -> float:
        return setting.seconds(partial(train, iter([held] * len(keys)))) / len(keys)

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
        step = partial(predicted, network, state.accumulator.device, image)
        ways[f"{precision}, {layout}"] = setting.synchronised(step)
    task = f"inference in windows of {shape_text(setting.patch)}"
    return [*_rates(setting, task, ways, 1, goals=()), _whole_scan(setting)]


def _whole_scan(setting: Setting) -> Comparison:
    state = setting.state(setting.fastest)
    network, device = state.network.eval(), state.accumulator.device
    image = torch.randn(4, *setting.scan).to(setting.device)
    window = rounded_up(setting.scan, size_multiple(setting.config().model, setting.patch))

    def predict() -> object:
        return predict_logits(network, image, window=window, overlap=0.0, device=device)

    gib = setting.peak_gib(predict)
    seconds = [setting.seconds(predict) for _ in range(setting.n_rounds)]
    return Comparison(
        task=f"a whole scan of {shape_text(setting.scan)} in one pass, {setting.fastest}",
        ours=f"{gib:.1f} GiB",
        peer="memory of a small GPU",
        theirs=f"{SMALL_GPU_GIB:.0f} GiB",
        ratios=(SMALL_GPU_GIB / gib,),
        least=setting.goal(1.0),
        agreement=f"{statistics.median(seconds):.2f} s",
    )


def norm(setting: Setting) -> Iterator[Comparison]:
    """Compare the norm that overwrites its input with the stock layers."""
    batch, states = setting.batch(2), {}
    for name, in_place in (("stock", False), ("in place", True)):
        states[name] = setting.state(setting.fastest)
        for module in states[name].network.modules():
            if isinstance(module, ActivatedNorm):
                module.in_place = in_place
    steps = {name: partial(make_step, s, batch) for name, s in states.items()}
    stock, ours = (steps[name]() for name in ("stock", "in place"))
    loss, gradient = (
        abs(getattr(ours, name) / getattr(stock, name) - 1) for name in ("loss", "gradient_norm")
    )
    ways = {name: setting.synchronised(step) for name, step in steps.items()}
    seconds = seconds_in_turn(ways, setting.n_rounds, clock=CLOCK)
    task = f"step with the norm in place, {setting.fastest}"
    yield Comparison(
        task=f"{task}: time",
        ours=median_time(seconds["in place"]),
        peer="stock InstanceNorm and LeakyReLU",
        theirs=median_time(seconds["stock"]),
        ratios=ratios_of(seconds["stock"], seconds["in place"]),
        least=setting.goal(1.0),
        agreement=f"loss differs by {loss:.1e}, norm of the gradient by {gradient:.1e}",
    )
    peaks = {name: setting.peak_gib(step) for name, step in steps.items()}
    yield Comparison(
        task=f"{task}: memory",
        ours=f"{peaks['in place']:.2f} GiB",
        peer="stock InstanceNorm and LeakyReLU",
        theirs=f"{peaks['stock']:.2f} GiB",
        ratios=(peaks["stock"] / peaks["in place"],),
        least=setting.goal(1.0),
    )


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
