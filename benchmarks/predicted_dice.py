"""Measure the predicted Dice on held-out cases: interval, error, and rank correlation.

Each case is predicted by the run that it was held out of, and its Dice is told by a fit to the other
cases. Give the runs of all folds of one recipe.

    python benchmarks/predicted_dice.py --prepared prepared/BraTS runs/fold0 runs/fold1 runs/fold2
"""

import argparse
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np
from scipy.stats import spearmanr

from brats_seg.evaluation.metrics import RegionCounts, count_regions, dice
from brats_seg.inference.held_out import open_held_out, predict_held_out
from brats_seg.labels import REGIONS
from brats_seg.progress import tracked
from brats_seg.quality.result import Values, fit_predicted_dice, mean_probabilities, predicted_dice
from brats_seg.runtime.device import choose_device
from brats_seg.voxels.regions import Decoding


def counted_cases(runs: Sequence[Path], prepared: Path) -> Iterator[tuple[Values, RegionCounts]]:
    """Yield the mean probability of each region and the voxel counts of every held-out case."""
    for run in runs:
        held_out = open_held_out(run, prepared)
        for case in predict_held_out(held_out, choose_device("auto", "auto"), tracked):
            stored = case.read()
            regions = stored.regions(Decoding())
            counts = count_regions(regions, stored.reference, case.case_id)
            yield mean_probabilities(stored.values, regions), counts


def main() -> None:
    """Print one line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", type=Path, nargs="+")
    parser.add_argument("--prepared", type=Path, required=True)
    given = parser.parse_args()
    cases = list(counted_cases(given.runs, given.prepared))
    inside, errors, qualities = [], [], []
    for index, (probabilities, counts) in enumerate(cases):
        rest = cases[:index] + cases[index + 1 :]
        expected = predicted_dice(fit_predicted_dice(*zip(*rest, strict=True)), probabilities)
        true = dict(zip(REGIONS, dice(counts), strict=True))
        inside += [part.low <= true[part.region] <= part.high for part in expected]
        errors += [abs(part.dice - true[part.region]) for part in expected]
        qualities.append(np.mean([part.dice for part in expected]) if expected else 0.0)
    mean_dice = np.array([dice(counts).mean() for _, counts in cases])
    correlation = spearmanr(qualities, mean_dice).statistic
    print(
        f"{len(cases)} cases: {np.mean(inside):.0%} of {len(inside)} regions in the interval, mean error "
        f"{np.mean(errors):.3f}; rank correlation with the true mean Dice {correlation:.2f}"
    )


if __name__ == "__main__":
    main()
