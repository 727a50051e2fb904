"""Score one drawn case by all protocols: the table and the picture of docs/scores.md.

python benchmarks/scores.py --picture docs/scores.png
"""

import tempfile
from pathlib import Path

import matplotlib.pyplot as plt
import nibabel as nib
import numpy as np
import pandas as pd
from comparison import options_of

from brats_seg.evaluation.evaluate import score_folders
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.labels import LabelMap

BALLS = {
    # x, y, radius, value; later ones lie on top
    "reference": (
        *((30, 48, 18, 2), (30, 48, 11, 3), (30, 48, 5, 1)),
        *((70, 18, 4, 3), (70, 30, 4, 3), (70, 56, 2, 3)),
    ),
    "prediction": (
        *((32, 48, 18, 2), (32, 48, 11, 3), (32, 48, 5, 1), (70, 80, 2, 3)),
        *((70, y, 4, 3) for y in range(18, 31)),
    ),
}
NAMES = {"1": (30, 70), "2, 3": (80, 24), "4 missed": (70, 64), "5 invented": (70, 88)}
"""Words in the picture, and where they stand."""
PROTOCOLS = (
    *("legacy GLI", "lesionwise2023 GLI", "lesionwise2023 MET", "lesionwise2024 GLI"),
    *("lesionwise2024 MET", "brats2025 GLI", "brats2025 MET"),
)
COLUMNS = (
    *("dice", "hd95", "lesionwise_dice", "lesionwise_hd95"),
    *("n_lesions", "n_false_negative", "n_false_positive", "f1"),
)


def main() -> None:
    """Print the table, and draw the picture."""
    arguments = options_of(__doc__, picture=Path("scores.png"))
    maps, rows = {name: paint(name) for name in BALLS}, {}
    with tempfile.TemporaryDirectory() as folder:
        paths = [Path(folder) / f"{name}.nii.gz" for name in maps]
        for path, label_map in zip(paths, maps.values(), strict=True):
            nib.save(nib.Nifti1Image(label_map, np.eye(4)), path)
        for words in PROTOCOLS:
            protocol = protocol_named(*words.split())
            found = score_folders(*paths, Path(folder) / "scores.csv", protocol)
            rows[words] = found.scores.set_index("region").loc["wt"].reindex(COLUMNS)
    table = pd.DataFrame(rows).T.astype(float)
    print(table.round(3).to_string())
    draw(maps["reference"], maps["prediction"], table, arguments.picture)


def paint(name: str) -> LabelMap:
    """Return a label map of balls in its middle section."""
    label_map = np.zeros((96, 96, 40), np.uint8)
    for x, y, radius, value in BALLS[name]:
        centre = np.reshape((x, y, 20), (3, 1, 1, 1))
        label_map[((np.indices(label_map.shape) - centre) ** 2).sum(axis=0) <= radius**2] = value
    return label_map


def draw(reference: LabelMap, prediction: LabelMap, table: pd.DataFrame, path: Path) -> None:
    """Draw the reference with the outline of the prediction, and the Dice of each protocol."""
    figure, (section, bars) = plt.subplots(1, 2, figsize=(9, 3.4), layout="constrained")
    shown = np.ma.masked_equal(reference[:, :, 20].T, 0)
    section.imshow(shown, cmap="Set2", origin="lower", vmin=1, vmax=8)
    section.contour(prediction[:, :, 20].T > 0, [0.5], colors="black", linewidths=1)
    for words, place in NAMES.items():
        section.text(*place, words, ha="center", va="center", fontsize=9)
    section.set(xticks=[], yticks=[], title="reference (filled), prediction (outline)")
    dice = table["lesionwise_dice"].fillna(table["dice"])
    bars.bar_label(bars.barh(dice.index, dice, color="tab:blue"), fmt="%.2f", padding=3)
    bars.invert_yaxis()
    bars.set(xlim=(0, 1.1), title="Dice of the whole tumour, or of its lesions")
    figure.savefig(path, dpi=80)


if __name__ == "__main__":
    main()
