"""Compare training recipes on labelled cases, at a budget of patches.

Each run trains a recipe on one fold with one seed, predicts the held-out cases whole, and adds rows to
two tables in the work folder:

runs.csv    recipe, budget, fold and seed; mean Dice by region; CPU seconds of training and of
            prediction, wall seconds, peak memory
cases.csv   the Dice of each held-out case

Runs that are in the tables are not repeated, so that an interrupted comparison continues. At the end
every recipe is compared with the first, case by case, for the same folds and seeds. The interval is a
bootstrap over patients and seeds; with one seed it does not contain the chance of training.

    python benchmarks/learning.py /path/to/BraTS --recipes default rule start.path=auto "loss.bce=0.3 patch.foreground=0.67"

A recipe is the settings in which it differs from the default. The rule is a threshold that learns nothing.
The default network is small (patches of 64^3, 16 to 160 channels), so that two CPU cores are enough.
`--size patch.size=128,128,128 model.widths=[32,64,128,256,320,320]` compares on a GPU.
"""

import argparse
import json
import resource
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import nibabel
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from scipy import ndimage

from brats_seg import PredictionSettings, Predictor, Trainer, load_config, open_fold
from brats_seg.cases.case import Case, ScanFile
from brats_seg.cases.index import read_index
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.labels import MODALITIES, REGIONS, RegionMasks, convention_named, regions_of
from brats_seg.progress import untracked
from brats_seg.voxels.box import Mask

Image = npt.NDArray[np.float32]

SIZE = ["patch.size=64,64,64", "model.widths=[16,32,64,128,160]", "start.path=none"]
"""The network and patch of the comparison, and no weights to start from; see `--size`."""
EPOCH_PATCHES = 64
"""Patches of an epoch, about."""
WITHOUT_SETTINGS = ("default", "rule")
"""Recipes that are the default, and the rule, which learns nothing."""


def main() -> None:
    """Run what is missing and print the comparison."""
    options = _options()
    if options.child is not None:
        _train(json.loads(options.child))
        return
    options.work.mkdir(parents=True, exist_ok=True)
    for recipe in options.recipes:
        for fold in options.folds:
            for seed in options.seeds:
                run = {
                    "recipe": recipe,
                    "patches": options.patches,
                    "fold": fold,
                    "n_folds": options.n_folds,
                    "seed": seed,
                }
                if not _is_done(options.work, run):
                    work = {"data": str(options.data), "work": str(options.work)}
                    order = {**run, **work, "size": options.size, "windows": options.windows}
                    child = [sys.executable, __file__, str(options.data)]
                    subprocess.run([*child, "--child", json.dumps(order)], check=True)
    _print_comparison(options)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("data", type=Path, help="folder of labelled cases")
    parser.add_argument("--work", type=Path, default=Path("runs/learning"))
    parser.add_argument("--recipes", nargs="+", default=WITHOUT_SETTINGS)
    parser.add_argument("--patches", type=int, default=500)
    parser.add_argument("--n-folds", type=int, default=3)
    parser.add_argument("--folds", type=int, nargs="+", default=[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[1])
    parser.add_argument(
        "--windows", type=int, nargs="+", default=[96], help="edges of the windows of prediction"
    )
    parser.add_argument("--size", nargs="+", default=SIZE)
    parser.add_argument("--child", help=argparse.SUPPRESS)
    return parser.parse_args()


def _is_done(work: Path, run: dict[str, Any]) -> bool:
    path = work / "runs.csv"
    return path.exists() and bool(len(_rows_of(pd.read_csv(path), run)))


def _rows_of(table: pd.DataFrame, run: dict[str, Any]) -> pd.DataFrame:
    return table[np.logical_and.reduce([table[key] == value for key, value in run.items()])]


def _train(order: dict[str, Any]) -> None:
    """Train and score one run, and add it to the tables."""
    keys = ("recipe", "patches", "fold", "n_folds", "seed")
    run, work = {key: order[key] for key in keys}, Path(order["work"])
    data = Path(order["data"])
    settings = [
        *order["size"],
        *(() if run["recipe"] in WITHOUT_SETTINGS else run["recipe"].split()),
        f"folds.n_folds={run['n_folds']}",
        f"training.seed={run['seed']}",
        # the cases are scored once, below
        "validation.overlap=0",
        "training.n_workers=0",
    ]
    config = load_config(assignments=settings)
    spacing = "-".join(map(str, config.store.spacing_mm or ("median",)))
    prepared = work / f"prepared-{run['n_folds']}-{spacing}"
    fold = open_fold(data, fold=run["fold"], config=config, prepared_path=prepared)
    index = read_index(prepared / "cases.csv", data)
    held_out = [case for case in index.cases if case.case_id in fold.split.validation]
    n_train = len(fold.split.train)
    per_case = max(1, round(EPOCH_PATCHES / n_train))
    n_epochs = max(1, round(run["patches"] / (n_train * per_case)))
    lengths = [f"patch.per_case={per_case}", f"training.n_epochs={n_epochs}"]
    config = load_config(assignments=[*settings, *lengths, f"validation.every={n_epochs}"])
    name = f"{run['recipe']}-{run['patches']}-{run['fold']}-{run['seed']}".replace(" ", "_")
    path = work / name
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    if run["recipe"] != "rule":
        Trainer(data=fold, config=config, run_path=path).run(fresh=True, track=untracked)
    train_cpu_s, train_s = time.process_time() - start_cpu_s, time.monotonic() - start_s
    for window in order["windows"]:
        started_s = time.process_time()
        segment = rule if run["recipe"] == "rule" else network(path, window)
        rows = [{"case": case.case_id, **dice_of(segment(case), case)} for case in held_out]
        result = {
            **run,
            "window": window,
            **{name: np.mean([row[name] for row in rows]) for name in (*REGIONS, "mean")},
            "train_cpu_s": train_cpu_s,
            "predict_cpu_s": time.process_time() - started_s,
            "train_s": train_s,
            "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
        }
        _append(work / "cases.csv", [{**run, "window": window, **row} for row in rows])
        _append(work / "runs.csv", [result])
        print(run["recipe"], *(f"{key}={result[key]:.4g}" for key in list(result)[1:]))


def network(path: Path, window: int) -> Callable[[Case], RegionMasks]:
    """Return what segments a case with a trained network, on the grid of its files."""
    predictor = Predictor.load([path], PredictionSettings(window=(window, window, window)))

    def segment(case: Case) -> RegionMasks:
        result = predictor.predict_scan(predictor.prepare(predictor.read(case)))
        return regions_of(result.label_map, result.convention)

    return segment


def rule(case: Case) -> RegionMasks:
    """Segment a case by thresholds, without anything learnt.

    WT is the largest part of the brain that is bright on FLAIR, away from its surface, without holes; ET is what
    is brighter after contrast near it, and TC is ET with what it encloses.
    """
    t1n, t1c, _, t2f = (_array(case, case.files[name]) for name in MODALITIES)
    brain = t1n > 0
    bright, before, after = (_robust(image, brain) for image in (t2f, t1n, t1c))
    inside = ndimage.distance_transform_edt(brain) > 4
    parts, _ = ndimage.label(
        ndimage.binary_opening((ndimage.gaussian_filter(bright, 1) > 1.5) & inside)
    )
    wt = (parts > 0) & (parts == np.bincount(parts[parts > 0], minlength=1).argmax())
    wt = ndimage.binary_fill_holes(ndimage.binary_closing(wt, iterations=2))
    near = ndimage.binary_dilation(wt, iterations=2) & inside
    et = (ndimage.gaussian_filter(after - before, 0.7) > 1) & near
    tc = ndimage.binary_fill_holes(ndimage.binary_closing(et, iterations=4)) | et
    return np.stack([wt | tc, tc, et])


def _robust(image: Image, brain: Mask) -> Image:
    """Return an image as deviations from the median of the brain, by the median absolute deviation."""
    values = image[brain]
    middle = np.median(values)
    return np.where(brain, (image - middle) / (1.4826 * np.median(np.abs(values - middle))), -9)


def dice_of(regions: RegionMasks, case: Case) -> dict[str, float]:
    """Return the Dice of regions against the label map of a case as it was delivered, and their mean."""
    assert case.label is not None
    reference = regions_of(
        _array(case, case.label).astype(np.uint8), convention_named(case.convention)
    )
    scores = dict(
        zip(REGIONS, dice(count_regions(regions, reference, case.case_id)).tolist(), strict=True)
    )
    return {**scores, "mean": float(np.mean(list(scores.values())))}


def _array(case: Case, file: ScanFile) -> Image:
    return np.asarray(nibabel.load(case.root / file.path).dataobj, dtype=np.float32)


def _append(path: Path, rows: Iterable[dict[str, Any]]) -> None:
    pd.DataFrame(rows).to_csv(path, mode="a", header=not path.exists(), index=False)


def _print_comparison(options: argparse.Namespace) -> None:
    """Print the mean Dice of each recipe, and its difference from the first with an interval."""
    cases = pd.read_csv(options.work / "cases.csv")
    cases = cases[cases.patches == options.patches]
    # the same recipe is predicted with the window that suits it best
    best = cases.groupby(["recipe", "window"])["mean"].mean().groupby("recipe").idxmax()
    cases = pd.concat(cases[(cases.recipe == r) & (cases.window == w)] for r, w in best)
    first = options.recipes[0]
    print(f"torch {torch.__version__}, {options.patches} patches, each with its best window")
    print(f"{'recipe':22} window runs    WT    TC    ET  mean  difference from {first}")
    for recipe in options.recipes:
        rows = cases[cases.recipe == recipe]
        n_runs = len(rows[["fold", "seed"]].drop_duplicates())
        means = " ".join(f"{rows[column].mean():.3f}" for column in (*REGIONS, "mean"))
        gain, low, high = difference(cases, first, recipe)
        window = rows.window.iloc[0] if n_runs else 0
        text = f"{recipe:22} {window:6} {n_runs:4} {means}"
        print(f"{text}  {gain:+.3f} ({low:+.3f} to {high:+.3f})")


def difference(cases: pd.DataFrame, first: str, other: str) -> tuple[float, float, float]:
    """Return the mean difference of two recipes, and its 95 % interval over patients and seeds."""
    tables = [
        cases[cases.recipe == name].pivot_table(index="case", columns="seed", values="mean")
        for name in (first, other)
    ]
    change = (tables[1] - tables[0]).dropna(how="all").to_numpy()
    if not change.size:
        return float("nan"), float("nan"), float("nan")
    rng = np.random.default_rng(0)
    n_cases, n_seeds = change.shape
    drawn = [
        np.nanmean(
            change[rng.integers(n_cases, size=n_cases)][:, rng.integers(n_seeds, size=n_seeds)]
        )
        for _ in range(2000)
    ]
    low, high = np.percentile(drawn, [2.5, 97.5])
    return float(np.nanmean(change)), float(low), float(high)


if __name__ == "__main__":
    main()
