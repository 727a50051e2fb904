"""How bright a tumour is: statistics of each modality in the brain and in each region.

Intensities are those of the network's input, with mean 0 and standard deviation 1 in the brain, so
that scanners can be compared. Ten of the numbers, and the means of slabs, are those of the Kaggle
notebook, which took them over the whole volume, the air around the head included, and so measured
mostly the size of the brain; here they are taken in the brain and in the regions, and counts are
shares.
"""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt

from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.survival.feature import Feature
from brats_seg.survival.tumour import Mask, Tumour

Values = npt.NDArray[np.float64]

N_SLABS = 15
"""Parts of the brain from right to left whose means are taken, as many as in the notebook."""
_PERCENTILES = (5, 50, 95)
_FEWEST = 3
"""Values that a skewness can be told from."""


def measure_intensity(tumour: Tumour) -> tuple[Feature, ...]:
    """Measure every modality, in the brain and in WT, TC and ET.

    Of a region that is not there, everything is NaN.
    """
    brain = tumour.brain
    places = {"brain": brain}
    places |= {name: region & brain for name, region in zip(REGIONS, tumour.regions, strict=True)}
    features: list[Feature] = []
    for modality, image in zip(MODALITIES, tumour.image, strict=True):
        for place, mask in places.items():
            features += _statistics(f"{modality}_{place}", image, mask)
        features += _slab_means(modality, image, brain)
    return tuple(features)


def skewness(values: Values) -> float:
    """Return the third standardised moment; NaN of fewer than three values, or of equal ones."""
    if _are_alike(values):
        return float("nan")
    offsets = values - values.mean()
    squares = offsets * offsets
    return float(squares @ offsets / len(values) / squares.mean() ** 1.5)


def kurtosis(values: Values) -> float:
    """Return the fourth standardised moment less 3, 0 of a normal distribution; NaN as skewness."""
    if _are_alike(values):
        return float("nan")
    squares = (values - values.mean()) ** 2
    return float(squares @ squares / len(values) / squares.mean() ** 2) - 3


def _statistics(prefix: str, image: npt.NDArray[np.float32], mask: Mask) -> Iterator[Feature]:
    values = image[mask].astype(np.float64)
    mean, std = (values.mean(), values.std()) if len(values) else (np.nan, np.nan)
    above, below = values[values > mean], values[values < mean]
    skew, skew_above, skew_below = map(skewness, (values, above, below))
    numbers = {
        "skew": skew,
        "kurtosis": kurtosis(values),
        "diff_skew": skewness(_differences(image, mask)),
        "intensive_share": _share(above, values),
        "intensive_skew": skew_above,
        "non_intensive_share": _share(below, values),
        "non_intensive_skew": skew_below,
        "intensive_skew_difference": skew - skew_above,
        "non_intensive_skew_difference": skew - skew_below,
        "more_intensive_share": _share(values[values > mean + std], values),
    }
    if not prefix.endswith("_brain"):
        # in the brain they are 0 and 1 by the normalisation
        numbers |= {"mean": float(mean), "std": float(std)}
    levels = np.percentile(values, _PERCENTILES) if len(values) else np.full(3, np.nan)
    numbers |= {f"p{p:02d}": float(v) for p, v in zip(_PERCENTILES, levels, strict=True)}
    for name, value in numbers.items():
        yield Feature(name=f"{prefix}_{name}", value=value)


def _slab_means(modality: str, image: npt.NDArray[np.float32], brain: Mask) -> Iterator[Feature]:
    slabs = zip(np.array_split(image, N_SLABS), np.array_split(brain, N_SLABS), strict=True)
    for number, (values, inside) in enumerate(slabs):
        mean = float(values[inside].mean(dtype=np.float64)) if inside.any() else float("nan")
        yield Feature(name=f"{modality}_slab{number:02d}_mean", value=mean)


def _differences(image: npt.NDArray[np.float32], mask: Mask) -> Values:
    """Return how the values of the mask change from each voxel to the one above it."""
    both = mask[:, :, 1:] & mask[:, :, :-1]
    return (image[:, :, 1:][both] - image[:, :, :-1][both]).astype(np.float64)


def _are_alike(values: Values) -> bool:
    return len(values) < _FEWEST or bool(values.min() == values.max())


def _share(part: Values, values: Values) -> float:
    return len(part) / len(values) if len(values) else float("nan")
