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
import numpy.typing as npt
import pandas as pd
from learning import rule_of_ten_lines

from brats_seg import (
    PredictionSettings,
    Predictor,
    Trainer,
    export_model,
    load_case,
    load_config,
    open_fold,
    write_phantom_cases,
)
from brats_seg.cases.find import find_cases
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.labels import REGIONS, convention_named, regions_of

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
    parser.add_argument("--model", type=Path, help="network to judge, if not that of the work folder")
    parser.add_argument("--cases", type=int, default=500)
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
    write_phantom_cases(
        scans, n_cases=n_cases, seed=seed, shape=SHAPE, variety=1, n_workers=2
    )
    epochs = f"training.n_epochs={n_epochs}"
    config = load_config(preset="cpu", assignments=[*SETTINGS, epochs])
    fold = open_fold(scans, fold=0, config=config, prepared_path=work / "prepared")
    Trainer(config, fold, work / "run").train()
    export_model([work / "run"], work / "model", replace=True, half=True)


def judge(model: Path, data: Path) -> None:
    """Print the Dice of network and rule on labelled cases, case by case and in the mean."""
    predictor = Predictor.load([model], settings=PredictionSettings(preview=False))
    rows = []
    for number, case in enumerate(sorted(find_cases(data).cases, key=lambda case: case.case_id)):
        loaded = load_case(case)
        reference = regions_of(loaded.label.data, loaded.convention)
        predicted = predictor.predict(case)
        network = regions_of(predicted.label_map, convention_named(predicted.labels))
        rule = rule_of_ten_lines(np.stack([volume.data for volume in loaded.volumes]))
        both = np.stack([rule[0] | network[1], *network[1:]])
        used = "quoted" if number % 2 else "looked at"
        for name, regions in (("rule", rule), ("rule's WT", both), ("network", network)):
            scores = dice(count_regions(regions, reference))
            rows.append((case.case_id, used, name, *scores, scores.mean()))
    table = pd.DataFrame(rows, columns=["case", "use", "program", *REGIONS, "mean"])
    print(table.round(3).to_string(index=False))
    print(table.groupby(["use", "program"])[[*REGIONS, "mean"]].mean().round(3))


if __name__ == "__main__":
    main()
