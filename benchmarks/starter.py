"""Teach the network that the package carries, on made-up brains, and judge it on patients.

The network sees no patient while it learns. It is judged beside a rule of ten lines that learns nothing, and
beside the whole tumour of that rule with the other regions of the network. Every second case, in the order of
ids, is one that may be looked at while the made-up brains are improved; the others are for the figures that
are quoted.

    python benchmarks/starter.py teach --work runs/starter
    python benchmarks/starter.py judge /path/to/BraTS --work runs/starter

`teach` takes hours on two cores and some 10 GB of disk; interrupted, the same command goes on.
"""

import argparse
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from learning import dice_of, network, rule

from brats_seg import (
    Trainer,
    export_model,
    load_config,
    open_fold,
    open_index,
    write_phantom_cases,
)
from brats_seg.labels import REGIONS
from brats_seg.runtime.weights import BEST_NAME, read_checkpoint, write_checkpoint

SHAPE = (107, 127, 104)
"""Voxels of a made-up case, of 1.5 mm."""
SETTINGS = [
    "folds.n_folds=50",
    "cases.skip_bad=true",
    "patch.size=64,64,64",
    "training.modality_dropout=0.1",
    "validation.every=7",
]


def main() -> None:
    """Teach or judge."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("teach", "judge"))
    parser.add_argument("data", type=Path, nargs="?", help="folder of labelled cases, to judge on")
    parser.add_argument("--work", type=Path, default=Path("runs/starter"))
    parser.add_argument(
        "--model", type=Path, help="network to judge, if not that of the work folder"
    )
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=2)
    options = parser.parse_args()
    if options.what == "teach":
        teach(options.work, n_cases=options.cases, n_epochs=options.epochs, seed=options.seed)
    else:
        judge(options.model or options.work / "model", options.data)


def teach(work: Path, *, n_cases: int, n_epochs: int, seed: int) -> None:
    """Write made-up cases, train on them, and export the network in half precision."""
    scans = work / "scans"
    write_phantom_cases(scans, n_cases=n_cases, seed=seed, shape=SHAPE, variety=1, n_workers=2)
    epochs = f"training.n_epochs={n_epochs}"
    config = load_config(preset="cpu", assignments=[*SETTINGS, epochs])
    fold = open_fold(scans, fold=0, config=config, prepared_path=work / "prepared")
    Trainer(data=fold, config=config, run_path=work / "run").run()
    best = read_checkpoint(work / "run" / BEST_NAME, torch.device("cpu"))
    halved = {name: value.half() for name, value in best["model"].items()}
    write_checkpoint(
        {**best, "card": best["card"].model_dump(), "model": halved}, work / "run" / "half.pt"
    )
    export_model([work / "run" / "half.pt"], work / "model", replace=True, case_ids=False)


def judge(model: Path, data: Path) -> None:
    """Print the Dice of network and rule on labelled cases, case by case and in the mean."""
    segment = network(model, window=96)
    rows = []
    for number, case in enumerate(open_index(data).cases):
        by_rule, by_network = rule(case), segment(case)
        both = np.stack([by_rule[0] | by_network[1], *by_network[1:]])
        used = "quoted" if number % 2 else "looked at"
        programs = {"rule": by_rule, "rule's WT": both, "network": by_network}
        for name, regions in programs.items():
            rows.append(
                {"case": case.case_id, "use": used, "program": name, **dice_of(regions, case)}
            )
    table = pd.DataFrame(rows)
    print(table.round(3).to_string(index=False))
    print(table.groupby(["use", "program"])[[*REGIONS, "mean"]].mean().round(3))


if __name__ == "__main__":
    main()
