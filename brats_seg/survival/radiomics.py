"""Measure a tumour: size, shape and position of its regions, and statistics of the intensities.

The scan is `(X, Y, Z)` in the axes of BraTS; the box around brain and tumour is `(x, y, z)`, at the
spacing of the files. Surfaces are those of the surface distances (see `voxels.shapes`). Intensities
are those of the input of networks, so that scanners can be compared. Ten of the statistics and the
means of slabs are those of the Kaggle notebook, here without the air around the head.
"""

from collections.abc import Callable
from dataclasses import dataclass
from math import nan, pi, prod

import numpy as np
import numpy.typing as npt
from scipy import stats

from brats_seg.cases.nifti import Volume
from brats_seg.inference.method import Scan
from brats_seg.inference.predict import measure
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.voxels.box import Box, Mask, bounding_box
from brats_seg.voxels.grids import MM3_PER_ML, Spacing
from brats_seg.voxels.shapes import surface_mm2

N_SLABS = 15
"""Number of slabs of the brain, from right to left, whose means are features; as in the notebook."""

_RATIOS = (("tc", "wt"), ("et", "wt"), ("et", "tc"), ("wt", "brain"))
_PERCENTILES = (5, 50, 95)
_FEWEST_FOR_MOMENTS = 3

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
    spacing_mm: Spacing

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
    """Combine a scan with its label map (X, Y, Z), in the axes of BraTS; labels anywhere are kept."""
    image = scan.on_scan_spacing(scan.image)
    # a scan that was resampled comes back whole
    box = scan.box if scan.resampling is None else Box.at((0, 0, 0), labels.geometry.shape)
    labelled = bounding_box(labels.array > 0)
    joined = box if labelled is None else box.joined(labelled)
    whole = np.zeros((len(image), *joined.shape), dtype=np.float32)
    whole[(slice(None), *box.seen_from(joined.start).slices)] = image
    return Tumour(
        image=whole,
        label_map=np.ascontiguousarray(labels.array[joined.slices]),
        convention=convention,
        spacing_mm=labels.geometry.spacing_mm,
    )


def measure_shape(tumour: Tumour) -> dict[str, float]:
    """Measure size, shape and position of the regions of a tumour; NaN where a region is missing.

    Sphericity and its cube, the compactness, are 1 for a ball and less for any other shape. Steps of
    voxels enlarge the surface, so that a ball of cubic voxels has a sphericity of 0.92.
    """
    brain, spacing_mm = tumour.brain, tumour.spacing_mm
    parts = measure(tumour.label_map, tumour.convention, tumour.voxel_mm3)
    ml = {part.name: part.ml for part in parts}
    ml["brain"] = np.count_nonzero(brain) * tumour.voxel_mm3 / MM3_PER_ML
    features: dict[str, float] = {f"{name}_ml": value for name, value in ml.items()}
    features |= {f"{part.name}_components": part.n_components for part in parts}
    features |= {f"{a}_{b}_ratio": ml[a] / ml[b] if ml[b] else nan for a, b in _RATIOS}
    centre_mm = _centroid_mm(brain, spacing_mm)
    for name, region in zip(REGIONS, tumour.regions, strict=True):
        surface = surface_mm2(region, spacing_mm)
        sphericity = distance = nan
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
    """Measure the intensities of every modality in the brain, in WT, TC and ET, and in slabs.

    All features of a missing region are NaN.
    """
    brain = tumour.brain
    masks = {"brain": brain}
    masks |= {name: region & brain for name, region in zip(REGIONS, tumour.regions, strict=True)}
    features: dict[str, float] = {}
    for modality, image in zip(MODALITIES, tumour.image, strict=True):
        for name, mask in masks.items():
            statistics = _statistics(image, mask)
            if name == "brain":
                # they are 0 and 1 by the normalisation
                del statistics["mean"], statistics["std"]
            features |= {f"{modality}_{name}_{key}": value for key, value in statistics.items()}
        slabs = zip(np.array_split(image, N_SLABS), np.array_split(brain, N_SLABS), strict=True)
        for number, (slab, mask) in enumerate(slabs):
            mean = float(slab[mask].mean(dtype=np.float64)) if mask.any() else nan
            features[f"{modality}_slab{number:02d}_mean"] = mean
    return features


def _centroid_mm(mask: Mask, spacing_mm: Spacing) -> Values:
    """Return the mean position (3,) of the voxels of a mask."""
    return np.argwhere(mask).mean(axis=0) * spacing_mm


def _statistics(image: npt.NDArray[np.float32], mask: Mask) -> dict[str, float]:
    values = image[mask].astype(np.float64)
    n = len(values) or nan
    mean, std = (float(values.mean()), float(values.std())) if len(values) else (nan, nan)
    above, below = values[values > mean], values[values < mean]
    skew, skew_above, skew_below = (_moment(stats.skew, part) for part in (values, above, below))
    # between neighbours along the third axis
    both = mask[:, :, 1:] & mask[:, :, :-1]
    differences = (image[:, :, 1:][both] - image[:, :, :-1][both]).astype(np.float64)
    levels = np.percentile(values, _PERCENTILES) if len(values) else np.full(3, nan)
    return {
        "skew": skew,
        "kurtosis": _moment(stats.kurtosis, values),
        "diff_skew": _moment(stats.skew, differences),
        "intensive_share": len(above) / n,
        "intensive_skew": skew_above,
        "non_intensive_share": len(below) / n,
        "non_intensive_skew": skew_below,
        "intensive_skew_difference": skew - skew_above,
        "non_intensive_skew_difference": skew - skew_below,
        "more_intensive_share": np.count_nonzero(values > mean + std) / n,
        "mean": mean,
        "std": std,
        **{f"p{p:02d}": float(level) for p, level in zip(_PERCENTILES, levels, strict=True)},
    }


def _moment(moment: Callable[[Values], float], values: Values) -> float:
    """Return skewness or kurtosis; NaN for fewer than three values, or equal ones."""
    is_degenerate = len(values) < _FEWEST_FOR_MOMENTS or values.min() == values.max()
    return nan if is_degenerate else float(moment(values))
