"""Measure a tumour: sizes, shapes and places of its regions, and statistics of intensities.

Shapes: the scan is `(X, Y, Z)` in the axes of BraTS; the box around brain and tumour `(x, y, z)`, at
the spacing of the files.

Surfaces are measured as for the surface distances of the challenges (Nikolov et al. 2018, see
`voxels.shapes`): the surface passes half way between a voxel inside and one outside. Steps of voxels
make it too large, by 9 % for a ball of cubic voxels, whose sphericity therefore is 0.92, and by more
for anisotropic voxels.

Intensities are those of the network's input, with mean 0 and standard deviation 1 in the brain, so
that scanners can be compared. Ten of the statistics, and the means of slabs, are those of the Kaggle
notebook, which computed them over the whole volume including the air around the head, so that they
mostly depended on the size of the brain. Here they are computed in the brain and in the regions, and
counts are divided by the number of voxels.
"""

from dataclasses import dataclass
from math import pi, prod

import numpy as np
import numpy.typing as npt
from scipy import stats

from brats_seg.cases.nifti import Volume
from brats_seg.inference.decode import measure
from brats_seg.inference.method import Scan
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.voxels.box import Box, Mask, bounding_box
from brats_seg.voxels.grids import MM3_PER_ML
from brats_seg.voxels.shapes import surface_mm2

N_SLABS = 15
"""Number of slabs of the brain, from right to left, whose means are features; as in the notebook."""

_RATIOS = (("tc", "wt"), ("et", "wt"), ("et", "tc"), ("wt", "brain"))
_PERCENTILES = (5, 50, 95)
_FEWEST_FOR_SKEWNESS = 3

Values = npt.NDArray[np.float64]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tumour:
    """The image and the label map of a case on one grid, cropped to brain and tumour."""

    image: npt.NDArray[np.float32]
    """(4, x, y, z): mean 0 and standard deviation 1 inside the brain, 0 around it."""
    label_map: LabelMap
    """(x, y, z)"""
    convention: LabelConvention
    """Convention of the label map."""
    spacing_mm: tuple[float, float, float]

    @property
    def brain(self) -> Mask:
        """Mask (x, y, z) of the brain."""
        return (self.image != 0).any(axis=0)

    @property
    def regions(self) -> RegionMasks:
        """(3, x, y, z) in the order of `REGIONS`."""
        return regions_of(self.label_map, self.convention)

    @property
    def voxel_mm3(self) -> float:
        """Volume of a voxel."""
        return prod(self.spacing_mm)


def tumour_of(scan: Scan, labels: Volume, convention: LabelConvention) -> Tumour:
    """Combine a scan with its label map; labels outside the brain are kept.

    Args:
        scan: A scan as networks are given it.
        labels: Label map (X, Y, Z) on the grid of the scan, in the axes of BraTS.
        convention: Convention of the label map.
    """
    image = scan.on_scan_spacing(scan.image)
    x, y, z = labels.geometry.shape
    # a scan that was resampled comes back whole
    own = scan.box if scan.resampling is None else Box.at((0, 0, 0), (x, y, z))
    labelled = bounding_box(labels.array > 0)
    box = own if labelled is None else own.joined(labelled)
    placed = np.zeros((len(image), *box.shape), dtype=np.float32)
    placed[(slice(None), *own.seen_from(box.start).slices)] = image
    return Tumour(
        image=placed,
        label_map=np.ascontiguousarray(labels.array[box.slices]),
        convention=convention,
        spacing_mm=labels.geometry.spacing_mm,
    )


def measure_shape(tumour: Tumour) -> dict[str, float]:
    """Measure size, shape and position of the regions of a tumour.

    These are volumes and numbers of components of every region and tissue; shares of one region in
    another; and for WT, TC and ET the surface, the sphericity and its cube the compactness (1 for a
    ball, less for any other shape), and the distance of the centroid from that of the brain. What the
    case does not have, such as the shape of a missing enhancing tumour, is NaN.
    """
    brain, spacing_mm = tumour.brain, tumour.spacing_mm
    parts = measure(tumour.label_map, tumour.convention, tumour.voxel_mm3)
    ml = {part.name: part.ml for part in parts}
    ml["brain"] = np.count_nonzero(brain) * tumour.voxel_mm3 / MM3_PER_ML
    features: dict[str, float] = {f"{name}_ml": value for name, value in ml.items()}
    features |= {f"{part.name}_components": part.n_components for part in parts}
    features |= {
        f"{one}_{other}_ratio": ml[one] / ml[other] if ml[other] else float("nan")
        for one, other in _RATIOS
    }
    centre_mm = _centroid_mm(brain, spacing_mm)
    for name, region in zip(REGIONS, tumour.regions, strict=True):
        surface = surface_mm2(region, spacing_mm)
        sphericity = distance = float("nan")
        if surface:
            volume = np.count_nonzero(region) * tumour.voxel_mm3
            sphericity = pi ** (1 / 3) * (6 * volume) ** (2 / 3) / surface
            distance = float(np.linalg.norm(_centroid_mm(region, spacing_mm) - centre_mm))
        features |= {
            f"{name}_surface_mm2": surface,
            f"{name}_sphericity": sphericity,
            f"{name}_compactness": sphericity**3,
            f"{name}_centre_distance_mm": distance,
        }
    return features


def measure_intensity(tumour: Tumour) -> dict[str, float]:
    """Measure the intensities of every modality, in the brain and in WT, TC and ET.

    All features of a missing region are NaN.
    """
    brain = tumour.brain
    masks = {"brain": brain}
    masks |= {name: region & brain for name, region in zip(REGIONS, tumour.regions, strict=True)}
    features: dict[str, float] = {}
    for modality, image in zip(MODALITIES, tumour.image, strict=True):
        for name, mask in masks.items():
            statistics = _statistics(image, mask, is_brain=name == "brain")
            features |= {f"{modality}_{name}_{key}": value for key, value in statistics.items()}
        slabs = zip(np.array_split(image, N_SLABS), np.array_split(brain, N_SLABS), strict=True)
        features |= {
            f"{modality}_slab{number:02d}_mean": float(values[inside].mean(dtype=np.float64))
            if inside.any()
            else float("nan")
            for number, (values, inside) in enumerate(slabs)
        }
    return features


def skewness(values: Values) -> float:
    """Return the third standardised moment; NaN for fewer than three values, or equal ones."""
    return float("nan") if _is_degenerate(values) else float(stats.skew(values))


def kurtosis(values: Values) -> float:
    """Return the fourth standardised moment less 3, which is 0 for a normal distribution.

    It is NaN for fewer than three values, or equal ones.
    """
    return float("nan") if _is_degenerate(values) else float(stats.kurtosis(values))


def _centroid_mm(mask: Mask, spacing_mm: tuple[float, float, float]) -> Values:
    """Return the mean position (3,) of the voxels of a mask."""
    sums = (mask.sum(axis=others, dtype=np.float64) for others in ((1, 2), (0, 2), (0, 1)))
    places = [np.average(np.arange(len(weights)), weights=weights) for weights in sums]
    return np.array(places) * spacing_mm


def _statistics(image: npt.NDArray[np.float32], mask: Mask, *, is_brain: bool) -> dict[str, float]:
    values = image[mask].astype(np.float64)
    mean, std = (values.mean(), values.std()) if len(values) else (np.nan, np.nan)
    above, below = values[values > mean], values[values < mean]
    skew, skew_above, skew_below = map(skewness, (values, above, below))
    statistics = {
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
    if not is_brain:
        # in the brain they are 0 and 1 by the normalisation
        statistics |= {"mean": float(mean), "std": float(std)}
    levels = np.percentile(values, _PERCENTILES) if len(values) else np.full(3, np.nan)
    return statistics | {f"p{p:02d}": float(v) for p, v in zip(_PERCENTILES, levels, strict=True)}


def _differences(image: npt.NDArray[np.float32], mask: Mask) -> Values:
    """Return the differences (n,) between neighbours along the third axis, both in the mask."""
    both = mask[:, :, 1:] & mask[:, :, :-1]
    return (image[:, :, 1:][both] - image[:, :, :-1][both]).astype(np.float64)


def _is_degenerate(values: Values) -> bool:
    return len(values) < _FEWEST_FOR_SKEWNESS or bool(values.min() == values.max())


def _share(part: Values, values: Values) -> float:
    return len(part) / len(values) if len(values) else float("nan")
