"""Teach the network that the package carries, on made-up brains, and judge it on patients.

The network sees no patient while it learns. It is judged beside a rule of ten lines that learns nothing, and
beside the whole tumour of that rule, with and without the core of the network, and the other regions of the
network. Every second case, in the order of ids, is one that may be looked at while the made-up brains are
improved; the others are for the figures that are quoted.

    python benchmarks/starter.py teach --work runs/first
    python benchmarks/starter.py teach --work runs/starter --start runs/first/run --seed 4 --cases 800 --epochs 12
    python benchmarks/starter.py judge /path/to/BraTS --work runs/starter
    python benchmarks/starter.py ship --work runs/starter --dice .84 .65 .66 --patients 11

`teach` takes hours on two cores and some 10 GB of disk; interrupted, the same command goes on. The second line is
the last round of the network of the package; the rounds before it had the made-up brains of their time. `ship` puts the
network into the package, with the remark that stands on everything that it predicts.
"""

import argparse
import json
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from learning import dice_of, difference, network, rule
from torch import Tensor

from brats_seg import (
    Trainer,
    export_model,
    load_config,
    open_fold,
    open_index,
    write_phantom_cases,
)
from brats_seg.labels import REGIONS
from brats_seg.runtime.weights import (
    BEST_NAME,
    MODEL_NAME,
    SHIPPED,
    read_checkpoint,
    write_checkpoint,
)

SHAPE = (107, 127, 104)
"""Voxels of a made-up case, of 1.5 mm."""
SETTINGS = [
    "folds.n_folds=50",
    "cases.skip_bad=true",
    "patch.size=64,64,64",
    "training.modality_dropout=0.1",
    "schedule.name=polynomial",
]
LATER_RATE = 6e-3
"""Learning rate of a round that starts from the network of another."""


REMARK = (
    "This network was taught on made-up brains, not on patients: Dice of WT, TC, ET {} on {} patients. "
    "Train your own for better results."
)
"""What the network says of itself; it must be ASCII, without a backslash."""


def main() -> None:
    """Teach, judge or ship."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=("teach", "judge", "ship"))
    parser.add_argument("data", type=Path, nargs="?", help="folder of labelled cases, to judge on")
    parser.add_argument("--work", type=Path, default=Path("runs/starter"))
    parser.add_argument(
        "--model", type=Path, help="network to judge, if not that of the work folder"
    )
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--start", default="none", help="run or model of an earlier round")
    parser.add_argument("--dice", type=float, nargs=3, help="means of judge, for ship")
    parser.add_argument("--patients", type=int, help="number of patients they are of, for ship")
    options = parser.parse_args()
    if options.what == "teach":
        teach(options)
    elif options.what == "ship":
        export(options.work, SHIPPED, options.dice, options.patients)
    else:
        judge(options.model or options.work / "model", options.data, options.work)


def teach(options: argparse.Namespace) -> None:
    """Write made-up cases, train on them, and export the network in half precision."""
    work, scans = options.work, options.work / "scans"
    write_phantom_cases(
        scans, n_cases=options.cases, seed=options.seed, shape=SHAPE, variety=1, n_workers=2
    )
    lengths = [f"{key}={options.epochs}" for key in ("training.n_epochs", "validation.every")]
    settings = [*lengths, f"start.path={options.start}"]
    if options.start != "none":
        settings.append(f"optimizer.lr={LATER_RATE}")
    config = load_config(preset="cpu", assignments=[*SETTINGS, *settings])
    fold = open_fold(scans, fold=0, config=config, prepared_path=work / "prepared")
    Trainer(data=fold, config=config, run_path=work / "run").run()
    export(work, work / "model")


def export(work: Path, folder: Path, dice: list[float] | None = None, n_patients: int = 0) -> None:
    """Export the network in half precision, with the remark if its Dice on patients is known."""
    best = read_checkpoint(work / "run" / BEST_NAME)
    # the Dice of made-up cases would be read as that of patients
    best["progress"]["sums"]["counts"] = {}
    figures = ", ".join(f"{value:.2f}".lstrip("0") for value in dice or ())
    remark = REMARK.format(figures, n_patients) if dice else ""
    card = best["card"].model_copy(update={"remark": remark}).model_dump()
    halved = {name: _rounded(value) for name, value in best["model"].items()}
    path = work / "run" / "half.pt"
    write_checkpoint({**best, "card": card, "model": halved}, path)
    export_model([path], folder, replace=True, case_ids=False, license_name="Apache-2.0")
    # made-up cases have the names of patients, and no patient was among them
    description = json.loads((folder / MODEL_NAME).read_text())
    description["members"][0]["cases"] = {"ids": [], "is_complete": True}
    (folder / MODEL_NAME).write_text(json.dumps(description, indent=2) + "\n")


def _rounded(weight: Tensor) -> Tensor:
    """Return a weight in half precision with six significant bits, which a wheel packs by a third."""
    mantissa, exponent = torch.frexp(weight)
    return torch.ldexp((mantissa * 64).round() / 64, exponent).half()


def judge(model: Path, data: Path, work: Path) -> None:
    """Print the Dice of network and rule on labelled cases, case by case and in the mean."""
    segment = network(model, window=96)
    index = open_index(data, work / "judged.csv", load_config())
    rows = []
    for number, case in enumerate(index.cases):
        by_rule, by_network = rule(case), segment(case)
        used = "quoted" if number % 2 else "looked at"
        programs = {
            "rule": by_rule,
            "rule's WT": np.stack([by_rule[0], *by_network[1:]]),
            "rule's WT with the core": np.stack([by_rule[0] | by_network[1], *by_network[1:]]),
            "network": by_network,
        }
        for name, regions in programs.items():
            rows.append(
                {"case": case.case_id, "use": used, "program": name, **dice_of(regions, case)}
            )
    table = pd.DataFrame(rows)
    print(table.round(3).to_string(index=False))
    print(table.groupby(["use", "program"])[[*REGIONS, "mean"]].mean().round(3).to_string())
    quoted = table[table.use == "quoted"].assign(recipe=table.program, seed=0)
    for other in ("rule", "rule's WT", "rule's WT with the core"):
        gain, low, high = difference(quoted, other, "network")
        print(f"network above {other}, mean of the quoted: {gain:+.3f} ({low:+.3f} to {high:+.3f})")


if __name__ == "__main__":
    main()
