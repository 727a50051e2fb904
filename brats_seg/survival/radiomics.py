"""One number about a case, and its name: `wt_ml`, `t1c_et_skew`, `latent0_017`."""

# DOC survival/tumour: A scan and its label map on one grid, which everything about a tumour is measured on.
#
# The axes are those of BraTS. Shapes: the scan is `(X, Y, Z)`, the box around brain and tumour
# `(x, y, z)`, at the spacing of the files.
#
# DOC survival/shape: Size, shape and place of the regions of a tumour.
#
# Surfaces are measured as for the surface distances of the challenges (Nikolov et al. 2018, see
# `evaluation.cells`): the surface passes half way between a voxel inside and one outside. Steps of
# voxels make it too large, by 9 % for a ball of cubic voxels, whose sphericity so is 0.92, and by more
# where voxels are long.
#
# DOC survival/intensity: How bright a tumour is: statistics of each modality in the brain and in each region.
#
# Intensities are those of the network's input, with mean 0 and standard deviation 1 in the brain, so
# that scanners can be compared. Ten of the numbers, and the means of slabs, are those of the Kaggle
# notebook, which took them over the whole volume, the air around the head included, and so measured
# mostly the size of the brain; here they are taken in the brain and in the regions, and counts are
# shares.
#

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi, prod

import numpy as np
import numpy.typing as npt

from brats_seg.cases.case import check_one_grid
from brats_seg.cases.conventions import check_values
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.inference.postprocess import measure
from brats_seg.inference.scan import Scan
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.voxels.box import Box, Mask, bounding_box
from brats_seg.voxels.surface import surface_mm2


@dataclass(frozen=True, kw_only=True, slots=True)
class Feature:
    """One number about a case."""

    name: str
    """With its unit, where it has one."""
    value: float
    """NaN where the case has no such thing, as the shape of an enhancing tumour that is not there."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tumour:
    """The tumour of a case, in its brain."""

    image: npt.NDArray[np.float32]
    """(4, x, y, z): mean 0 and standard deviation 1 inside the brain, 0 around it."""
    label_map: LabelMap
    """(x, y, z)"""
    convention: LabelConvention
    """The numbering of the label map."""
    spacing_mm: tuple[float, float, float]

    @property
    def brain(self) -> Mask:
        """The voxels (x, y, z) that are tissue."""
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
    """Put a scan and its label map together; labels outside the brain are kept.

    Raises:
        CaseError: The label map lies on another grid.
        LabelError: It holds values that its convention does not know.
    """
    check_one_grid(scan.case_id, [("the scan", scan.geometry), (labels.file, labels.geometry)])
    check_values(np.unique(labels.array).tolist(), convention, scan.case_id)
    labels = oriented(labels)
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


_MM3_PER_ML = 1000.0
_RATIOS = (("tc", "wt"), ("et", "wt"), ("et", "tc"), ("wt", "brain"))


def measure_shape(tumour: Tumour) -> tuple[Feature, ...]:
    """Measure the regions of a tumour.

    Volumes and components of every region and tissue; shares of one region in another; and for
    WT, TC and ET the surface, the sphericity and its cube the compactness (1 for a ball, less for
    all else), and how far the middle of the region is from the middle of the brain.
    """
    brain, regions = tumour.brain, tumour.regions
    parts = measure(tumour.label_map, tumour.convention, tumour.voxel_mm3)
    ml = {part.name: part.ml for part in parts}
    ml["brain"] = np.count_nonzero(brain) * tumour.voxel_mm3 / _MM3_PER_ML
    features = [Feature(name=f"{name}_ml", value=value) for name, value in ml.items()]
    features += [Feature(name=f"{p.name}_components", value=p.n_components) for p in parts]
    for one, other in _RATIOS:
        share = ml[one] / ml[other] if ml[other] else float("nan")
        features.append(Feature(name=f"{one}_{other}_ratio", value=share))
    middle = _middle(brain, tumour.spacing_mm)
    for name, region in zip(REGIONS, regions, strict=True):
        features += _shape_of(name, region, tumour.spacing_mm, middle)
    return tuple(features)


def _shape_of(
    name: str,
    mask: Mask,
    spacing_mm: tuple[float, float, float],
    middle: npt.NDArray[np.float64],
) -> Iterator[Feature]:
    surface = surface_mm2(mask, spacing_mm)
    sphericity = distance = float("nan")
    if surface:
        volume = np.count_nonzero(mask) * float(np.prod(spacing_mm))
        sphericity = pi ** (1 / 3) * (6 * volume) ** (2 / 3) / surface
        distance = float(np.linalg.norm(_middle(mask, spacing_mm) - middle))
    yield Feature(name=f"{name}_surface_mm2", value=surface)
    yield Feature(name=f"{name}_sphericity", value=sphericity)
    yield Feature(name=f"{name}_compactness", value=sphericity**3)
    yield Feature(name=f"{name}_centre_distance_mm", value=distance)


def _middle(mask: Mask, spacing_mm: tuple[float, float, float]) -> npt.NDArray[np.float64]:
    """Return the mean place of the voxels of a mask, in mm."""
    sums = (mask.sum(axis=others, dtype=np.float64) for others in ((1, 2), (0, 2), (0, 1)))
    places = [np.average(np.arange(len(weights)), weights=weights) for weights in sums]
    return np.array(places) * spacing_mm


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
