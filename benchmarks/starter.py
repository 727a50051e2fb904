"""Teach the network that the package carries, on made-up brains and then on nine patients, and judge it on others.

It is judged beside a rule of ten lines that learns nothing, and beside the whole tumour of that rule, with and
without the core of the network, and the other regions of the network. Every second case, in the order of ids, is
one that may be looked at while the made-up brains are improved; the others are for the figures that are quoted.

    python benchmarks/starter.py teach --work runs/first
    python benchmarks/starter.py teach --work runs/starter --start runs/first/run --seed 4 --cases 800 --epochs 12
    python benchmarks/starter.py finish /path/to/BraTS2018 --work runs/last --start runs/starter/model --epochs 5 --seed 1
    python benchmarks/starter.py finish /path/to/BraTS2018 --work runs/last --start runs/starter/model --epochs 5 --seed 3
    python benchmarks/starter.py judge /path/to/BraTS --work runs/last
    python benchmarks/starter.py ship --work runs/last --dice .87 .75 .72 --patients 13

`teach` takes hours on two cores and some 10 GB of disk; interrupted, the same command goes on. The second line is
the last round on made-up brains of the network of the package; every round had the made-up brains of its time, which
have changed since. `finish` learns from the nine patients of TCGA in a folder of BraTS 2018, and exports the mean of the weights of
the runs in its work folder (Wortsman 2022, arXiv:2203.05482). `ship` puts the network into the package, with the remark
that stands on everything that it predicts.
"""

import argparse
import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pandas as pd
import torch
from learning import dice_of, difference, network, rule
from torch import Tensor

from brats_seg import Trainer, export_model, load_config, open_fold, open_index, write_phantom_cases
from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.config import Config
from brats_seg.data.fold import FoldData
from brats_seg.labels import REGIONS
from brats_seg.runtime.weights import (
    BEST_NAME,
    MODEL_NAME,
    SHIPPED,
    FittedPrediction,
    read_checkpoint,
    read_trained,
    write_checkpoint,
)
from brats_seg.voxels.regions import Decoding

SHAPE = (107, 127, 104)
"""Voxels of a made-up case, of 1.5 mm."""
TCGA = "Brats18_TCIA"
"""How the ids of the patients begin whose scans and label maps are published under CC BY."""
SETTINGS = [
    "cases.skip_bad=true",
    "patch.size=64,64,64",
    "training.modality_dropout=0.1",
    "schedule.name=polynomial",
    "start.lr_factor=0.6",
]
DECODING = Decoding(smallest_mm3=(200.0, 200.0, 0.0), surest_et=0.99999)
"""Made-up brains, fitted as `tune` does with thresholds of .5, ask for components of WT and TC of 500 mm3 at least;
few of them have a core so small. They ask for a surest voxel of ET of .99999 where one tumour of twenty has no ET."""
ON_PATIENTS = ["store.spacing_mm=[1.5,1.5,1.5]", "patch.per_case=12", "training.augment=full"]

REMARK = (
    "This network learnt from made-up brains{}: Dice of WT, TC, ET {} on {} other patients. "
    "Components of WT and TC below .2 ml are left out, and ET that is nowhere surer than .99999 is necrosis."
)
"""What the network says of itself; it must be ASCII, without a backslash."""
PATIENTS = " and {} patients of TCGA (CC BY 3.0, see its LICENSE)"


def main() -> None:
    """Teach, finish, judge or ship."""
    ways = {"teach": teach, "finish": finish, "judge": judge, "ship": ship}
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("what", choices=ways)
    parser.add_argument("data", type=Path, nargs="?", help="folder of labelled cases")
    parser.add_argument("--work", type=Path, default=Path("runs/starter"))
    parser.add_argument("--model", type=Path, help="network to judge, in place of that of --work")
    parser.add_argument("--cases", type=int, default=400)
    parser.add_argument("--epochs", type=int, default=14)
    parser.add_argument("--seed", type=int, default=2)
    parser.add_argument("--start", default="none", help="run or model of an earlier round")
    parser.add_argument("--dice", type=float, nargs=3, help="means of judge, for ship")
    parser.add_argument("--patients", type=int, help="number of patients they are of, for ship")
    options = parser.parse_args()
    ways[options.what](options)


def teach(options: argparse.Namespace) -> None:
    """Write made-up cases, train on them, and export the network in half precision."""
    scans = options.work / "scans"
    write_phantom_cases(
        scans, n_cases=options.cases, seed=options.seed, shape=SHAPE, variety=1, n_workers=2
    )
    config = _config(options, ["folds.n_folds=50"])
    fold = open_fold(scans, fold=0, config=config, prepared_path=options.work / "prepared")
    _train(fold, config, options.work, "run")


def finish(options: argparse.Namespace) -> None:
    """Train on the patients of TCGA, and export the mean of the runs of the work folder."""
    config = _config(options, [*ON_PATIENTS, f"training.seed={options.seed}"])
    fold = open_fold(options.data, fold=0, config=config, prepared_path=options.work / "prepared")
    # the case that is held out chooses nothing: only the last weights are stored
    ids = sorted([*fold.split.train, *fold.split.validation])
    learnt = tuple(name for name in ids if name.startswith(TCGA))
    fold = replace(fold, split=replace(fold.split, train=learnt, validation=tuple(ids[:1])))
    _train(fold, config, options.work, f"run{options.seed}")


def ship(options: argparse.Namespace) -> None:
    """Put the network into the package, with what it says of itself."""
    export(options.work, SHIPPED, options.dice, options.patients)


def _config(options: argparse.Namespace, settings: list[str]) -> Config:
    lengths = [f"{key}={options.epochs}" for key in ("training.n_epochs", "validation.every")]
    start = f"start.path={options.start}"
    return load_config(preset="cpu", assignments=[*SETTINGS, *lengths, *settings, start])


def _train(fold: FoldData, config: Config, work: Path, run: str) -> None:
    if Trainer(data=fold, config=config, run_path=work / run).run().finished:
        export(work, work / "model")


def export(work: Path, folder: Path, dice: list[float] | None = None, n_patients: int = 0) -> None:
    """Export the network in half precision, with the remark if its Dice on patients is known."""
    runs = sorted(path.parent for path in work.glob(f"run*/{BEST_NAME}"))
    checkpoints = [read_checkpoint(run / BEST_NAME) for run in runs]
    best = checkpoints[0]
    # the Dice of made-up cases would be read as that of patients
    best["progress"]["sums"]["counts"] = {}
    figures = ", ".join(f"{value:.2f}".lstrip("0") for value in dice or ())
    learnt = [name for name in read_split(runs[0] / SPLIT_NAME).train if name.startswith(TCGA)]
    source = PATIENTS.format(len(learnt)) if learnt else ""
    remark = REMARK.format(source, figures, n_patients) if dice else ""
    fitted = FittedPrediction(decoding=DECODING)
    card = best["card"].model_copy(update={"remark": remark, "fitted": fitted}).model_dump()
    halved = {
        name: _rounded(torch.stack([read["model"][name] for read in checkpoints]).mean(dim=0))
        for name in best["model"]
    }
    path = runs[0] / "half.pt"
    write_checkpoint({**best, "card": card, "model": halved}, path)
    notices = {file: file.read_text() for file in folder.glob("LICENSE")}
    licenses = "Apache-2.0" + " AND CC-BY-3.0" * bool(learnt)
    export_model([path], folder, replace=True, case_ids=False, license_name=licenses)
    for file, text in notices.items():
        file.write_text(text)
    # made-up cases have the names of patients, and no patient was among them
    description = json.loads((folder / MODEL_NAME).read_text())
    description["members"][0]["cases"] = {"ids": learnt, "is_complete": True}
    (folder / MODEL_NAME).write_text(json.dumps(description, indent=2) + "\n")


def _rounded(weight: Tensor) -> Tensor:
    """Return a weight in half precision with six significant bits, which a wheel packs by a third."""
    mantissa, exponent = torch.frexp(weight)
    return torch.ldexp((mantissa * 64).round() / 64, exponent).half()


def judge(options: argparse.Namespace) -> None:
    """Print the Dice of network and rule on the labelled cases that it has not learnt from, and the means."""
    model = options.model or options.work / "model"
    segment, learnt = network(model, window=96), read_trained(model)[0].cases
    index = open_index(options.data, options.work / "judged.csv", load_config())
    rows = []
    for number, case in enumerate(index.cases):
        if learnt.seen(case.case_id) == "yes":
            continue
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
    table = table.assign(recipe=table.program, seed=0)
    for used, part in (("quoted", table[table.use == "quoted"]), ("all", table)):
        print(part.groupby("program")[[*REGIONS, "mean"]].mean().round(3).to_string())
        for other in ("rule", "rule's WT", "rule's WT with the core"):
            gain, low, high = difference(part, other, "network")
            print(f"network above {other}, mean of {used}: {gain:+.3f} ({low:+.3f} to {high:+.3f})")


if __name__ == "__main__":
    main()
