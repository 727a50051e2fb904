"""Time the start of the program: help, and training to its first step.

Each way is a process of its own, measured by the CPU time of the process with its children. The first
step is compared with the smallest program that does the same with MONAI: import it, build its DynUNet,
and do one step on a random patch. nnU-Net is compared where it
is installed.

    python benchmarks/start.py --data scans
"""

import os
import resource
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from importlib.util import find_spec
from pathlib import Path

from comparison import Comparison, options_of, ratios_of, report
from machine import version_of

from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import load_config
from brats_seg.data.fold import open_fold

EDGE = 64
_WIDTHS = (16, 32, 64, 128, 160)

_MONAI_STEP = f"""
import torch
from monai.losses import DiceCELoss
from monai.networks.nets import DynUNet

n = {len(_WIDTHS)}
strides = [1] + [2] * (n - 1)
network = DynUNet(3, 4, 3, [3] * n, strides, strides[1:], filters={_WIDTHS})
optimizer = torch.optim.AdamW(network.parameters())
with torch.autocast("cpu", torch.bfloat16):
    output = network(torch.randn(1, 4, *[{EDGE}] * 3))
    target = torch.randint(2, output.shape).float()
    DiceCELoss(sigmoid=True)(output, target).backward()
optimizer.step()
"""
_OWN_STEP = """
import os, sys
from brats_seg.cli.options import importing

with importing():
    from torch.optim.optimizer import register_optimizer_step_post_hook
register_optimizer_step_post_hook(lambda *_: os._exit(0))
from brats_seg.cli import main
main()
"""
"""The hook ends the process after the first step of any optimizer."""
_NNUNET_HELP = """
from nnunetv2.run.run_training import run_training_entry
run_training_entry()
"""


def main() -> None:
    """Print a line for each way, and compare them."""
    arguments = options_of(__doc__, data=Path, rounds=5)
    with tempfile.TemporaryDirectory() as folder:
        data = arguments.data or _phantoms(Path(folder))
        ways = _ways(data, Path(folder))
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for _ in range(arguments.rounds):
            for name, run in ways.items():
                seconds[name].append(run())
    for name, spent in seconds.items():
        print(f"{statistics.median(spent):6.2f} s ({min(spent):.2f} to {max(spent):.2f})  {name}")
    report(list(_comparisons(seconds)), arguments.json)


def _ways(data: Path, folder: Path) -> dict[str, Callable[[], float]]:
    """Return what to run; each returns the CPU seconds of its process."""
    prepared, settings = folder / "prepared", ("--set", "folds.n_folds=3", "--preset", "cpu")
    open_fold(data, fold=0, config=load_config(values={"folds.n_folds": 3}), prepared_path=prepared)
    train = ("train", "--data", str(data), "--prepared", str(prepared), "--fresh", *settings)
    module = ("-m", "brats_seg")
    ways = {
        "brats-seg --help": (*module, "--help"),
        "brats-seg train --help": (*module, "train", "--help"),
        "brats-seg train to the end of its first step": (
            *("-c", _OWN_STEP, *train, "--run", str(folder / "run")),
        ),
        "MONAI: import, DynUNet, one step": ("-c", _MONAI_STEP),
    }
    if find_spec("nnunetv2") is None:
        print("nnU-Net is not installed, and is left out")
    else:
        ways["nnUNetv2_train --help"] = ("-c", _NNUNET_HELP, "--help")
    return {name: partial(_cpu_seconds, line) for name, line in ways.items()}


def _cpu_seconds(arguments: Sequence[str]) -> float:
    """Run Python, and return the CPU time that it took with its children."""
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    subprocess.run([sys.executable, *arguments], env=environment, capture_output=True, check=True)
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    return after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime


def _comparisons(seconds: dict[str, list[float]]) -> Iterator[Comparison]:
    pairs = [
        (
            f"train to the first step at {EDGE}^3",
            "brats-seg train to the end of its first step",
            "MONAI: import, DynUNet, one step",
            f"monai {version_of('monai')}, the same without data, settings or checks",
        ),
        (
            "help of train",
            "brats-seg train --help",
            "nnUNetv2_train --help",
            f"nnU-Net {version_of('nnunetv2')}",
        ),
    ]
    for task, own, other, peer in pairs:
        if other in seconds:
            yield Comparison(
                task=task,
                ours=f"{statistics.median(seconds[own]):.2f} s",
                peer=peer,
                theirs=f"{statistics.median(seconds[other]):.2f} s",
                ratios=ratios_of(seconds[other], seconds[own]),
            )


def _phantoms(folder: Path) -> Path:
    write_phantom_cases(folder / "scans", n_cases=6, seed=0, shape=(192, 224, 155))
    return folder / "scans"


if __name__ == "__main__":
    main()
