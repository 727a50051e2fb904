"""Compare training recipes on labelled cases, at budgets of patches and of cases to learn from.

Each run trains a recipe on one fold with one seed, predicts the held-out cases whole, and adds rows to
two tables in the work folder:

runs.csv    recipe, budget, fold and seed; mean Dice by region; CPU seconds of training and of
            prediction, wall seconds, peak memory
cases.csv   the Dice of each held-out case

Runs that are in the tables are not repeated, so that an interrupted comparison continues. At the end
every recipe is compared with the first, case by case, for the same folds and seeds. The interval is a
bootstrap over patients and seeds; with one seed it does not contain the chance of training. learning.png
shows the mean Dice of all runs of the work folder.

    python benchmarks/learning.py --data BraTS --recipes default rule start.path=auto "loss.bce=0.3 patch.foreground=0.67"
    python benchmarks/learning.py --data BraTS --recipes default rule nnunet --patches 128 512 --n-train 4 8 16 --n-folds 4

A recipe is the settings in which it differs from the default. The rule is a threshold that learns nothing;
nnunet is the trainer of nnU-Net, with a network and patches of the same size (peers.txt). Its model is
predicted by the package, in the same windows.
`--n-train` cases of a fold are drawn by the seed; 0 takes all. The default network is small (patches of 64^3,
16 to 160 channels), so that two CPU cores are enough.
`--size patch.size=128,128,128 model.widths=[32,64,128,256,320,320]` compares on a GPU.
"""

import argparse
import resource
import shutil
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

import nibabel
import nnunet_patches
import numpy as np
import numpy.typing as npt
import pandas as pd
import torch
from comparison import in_a_process, options_of
from matplotlib.figure import Figure
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
DEFAULT, RULE, NNUNET = "default", "rule", "nnunet"
"""Recipes without settings: the default, the rule, which learns nothing, and that of nnU-Net."""


def main() -> None:
    """Run what is missing and print the comparison."""
    options = options_of(
        __doc__,
        data=Path,
        work=Path("runs/learning"),
        recipes=[DEFAULT, RULE],
        patches=[500],
        n_train=[0],
        n_folds=3,
        folds=[0],
        seeds=[1],
        window=96,
        size=SIZE,
    )
    options.work.mkdir(parents=True, exist_ok=True)
    every = product(options.recipes, options.patches, options.n_train, options.folds, options.seeds)
    for recipe, patches, n_train, fold, seed in every:
        budget = {"recipe": recipe, "patches": patches, "n_train": n_train}
        run = {**budget, "fold": fold, "n_folds": options.n_folds, "seed": seed}
        if not _is_done(options.work, run):
            in_a_process(_train, options, run)
    for patches, n_train in product(options.patches, options.n_train):
        _print_comparison(options, patches, n_train)
    draw(pd.read_csv(options.work / "runs.csv"), options.work / "learning.png")


def _is_done(work: Path, run: dict[str, Any]) -> bool:
    path = work / "runs.csv"
    return path.exists() and bool(len(_rows_of(pd.read_csv(path), run)))


def _rows_of(table: pd.DataFrame, run: dict[str, Any]) -> pd.DataFrame:
    return table[np.logical_and.reduce([table[key] == value for key, value in run.items()])]


def _train(options: argparse.Namespace, run: dict[str, Any]) -> None:
    """Train and score one run, and add it to the tables."""
    recipe, data, work = run["recipe"], options.data, options.work
    settings = [
        *options.size,
        *(() if recipe in (DEFAULT, RULE, NNUNET) else recipe.split()),
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
    drawn = np.random.default_rng(run["seed"]).permutation(fold.split.train).tolist()
    split = replace(fold.split, train=tuple(sorted(drawn[: run["n_train"] or None])))
    fold, n_train = replace(fold, split=split), len(split.train)
    per_case = max(1, round(EPOCH_PATCHES / n_train))
    n_epochs = max(1, round(run["patches"] / (n_train * per_case)))
    lengths = [f"patch.per_case={per_case}", f"training.n_epochs={n_epochs}"]
    config = load_config(assignments=[*settings, *lengths, f"validation.every={n_epochs}"])
    path = work / "-".join(map(str, run.values())).replace(" ", "_")
    if recipe == NNUNET and not (folder := work / "nnunet").exists():
        # whole or not there
        shutil.rmtree(unfinished := work / "nnunet-unfinished", ignore_errors=True)
        nnunet_patches.preprocess(index, unfinished, config.patch.size, config.model.widths)
        unfinished.rename(folder)
    start_s, start_cpu_s = time.monotonic(), time.process_time()
    if recipe == NNUNET:
        nnunet_patches.train(folder, split, run["patches"], path)
    elif recipe != RULE:
        Trainer(data=fold, config=config, run_path=path).run(fresh=True, track=untracked)
    train_cpu_s, train_s = time.process_time() - start_cpu_s, time.monotonic() - start_s
    started_s = time.process_time()
    segment = rule if recipe == RULE else network(path, options.window)
    rows = [{"case": case.case_id, **dice_of(segment(case), case)} for case in held_out]
    result = {
        **run,
        **{name: np.mean([row[name] for row in rows]) for name in (*REGIONS, "mean")},
        "train_cpu_s": train_cpu_s,
        "predict_cpu_s": time.process_time() - started_s,
        "train_s": train_s,
        "peak_memory_mib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024,
    }
    _append(work / "cases.csv", [{**run, **row} for row in rows])
    _append(work / "runs.csv", [result])
    print(recipe, *(f"{key}={result[key]:.4g}" for key in list(result)[1:]))


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
    opened = ndimage.binary_opening((ndimage.gaussian_filter(bright, 1) > 1.5) & inside)
    parts, _ = ndimage.label(opened)
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


def _print_comparison(options: argparse.Namespace, patches: int, n_train: int) -> None:
    """Print the mean Dice of each recipe, and its difference from the first with an interval."""
    cases = _rows_of(
        pd.read_csv(options.work / "cases.csv"), {"patches": patches, "n_train": n_train}
    )
    first = options.recipes[0]
    of = f"{n_train} cases" if n_train else "all cases of a fold"
    print(f"torch {torch.__version__}, {patches} patches of {of}")
    print(f"{'recipe':22} runs    WT    TC    ET  mean  difference from {first}")
    for recipe in options.recipes:
        rows = cases[cases.recipe == recipe]
        n_runs = len(rows[["fold", "seed"]].drop_duplicates())
        means = " ".join(f"{rows[column].mean():.3f}" for column in (*REGIONS, "mean"))
        gain, low, high = difference(cases, first, recipe)
        print(f"{recipe:22} {n_runs:4} {means}  {gain:+.3f} ({low:+.3f} to {high:+.3f})")


def draw(runs: pd.DataFrame, path: Path) -> None:
    """Draw the mean Dice of each recipe against patches, a panel for each number of cases."""
    by_size = runs.groupby("n_train")
    figure = Figure(figsize=(3.5 * len(by_size), 3.5), layout="constrained")
    panels = figure.subplots(1, len(by_size), sharey=True, squeeze=False)[0]
    for panel, (n_train, own) in zip(panels, by_size, strict=True):
        for recipe, rows in own.groupby("recipe"):
            means = rows.groupby("patches")["mean"].mean()
            panel.plot(means.index, means, marker="o", label=recipe)
        panel.set(title=f"{n_train or 'all'} cases to learn from", xlabel="patches", xscale="log")
        panel.minorticks_off()
        panel.set_xticks(sorted(set(own.patches)), labels=sorted(set(own.patches)))
        panel.legend()
    panels[0].set_ylabel("mean Dice of held-out cases")
    figure.savefig(path)


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
