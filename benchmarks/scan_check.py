"""Count false alarms and noticed faults of the checks of scans, with limits of the same and of other patients.

    python benchmarks/scan_check.py /data/one /data/other

Every scan is tried with two sets of limits: those of the package, and those of the scans of the other folder. The
latter are halfway between these scans as they are and with a fault.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from scipy.ndimage import gaussian_filter, zoom
from scipy.stats import rankdata

from brats_seg.cases.case import load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.labels import MODALITIES
from brats_seg.quality import scan as checks
from brats_seg.voxels.box import bounding_box, brain_mask

Images: TypeAlias = npt.NDArray[np.float32]
Change: TypeAlias = Callable[[Images], Images]
Measured: TypeAlias = dict[str, tuple[dict[str, dict[str, float]], bool]]
"""Values of a scan with each fault, and whether order, contrast agent or skull are reported."""

MARGIN = 12
AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])


def foreground_mask(images: Images) -> npt.NDArray[np.bool_]:
    """Return the voxels that are not background."""
    return (images != 0).any(axis=0)


def each(change: Change, indices: Iterable[int] = range(4)) -> Change:
    """Return a fault that changes some modalities inside the brain."""

    def fault(images: Images) -> Images:
        inside, changed = foreground_mask(images), images.copy()
        for index in indices:
            changed[index] = change(images[index]) * inside
        return changed

    return fault


def zoomed(*factors: float) -> Change:
    """Return a fault that writes voxels of another size as if they had 1 mm."""
    return lambda images: zoom(images, (1, *factors), order=1)


def swapped(one: int, other: int) -> Change:
    """Return a fault that exchanges two modalities."""
    order = [{one: other, other: one}.get(i, i) for i in range(4)]
    return lambda images: images[order]


def cut(axis: int, mm: int) -> Change:
    """Return a fault that cuts off the end of the brain."""

    def fault(images: Images) -> Images:
        box, changed = bounding_box(foreground_mask(images)), images.copy()
        assert box is not None
        np.moveaxis(changed, axis + 1, 0)[box.stop[axis] - mm :] = 0
        return changed

    return fault


def thick(image: Images, n: int = 5) -> Images:
    """Return an image of thick slices that were interpolated to thin ones."""
    whole = image[..., : image.shape[2] // n * n]
    slices = whole.reshape(*whole.shape[:2], -1, n).mean(axis=-1)
    missing = image.shape[2] - whole.shape[2]
    return np.pad(zoom(slices, (1, 1, n), order=1), ((0, 0), (0, 0), (0, missing)))


def noisy(image: Images, share: float = 0.3) -> Images:
    """Return an image with noise, in standard deviations of the brain."""
    scale = share * image[image != 0].std()
    return image + np.random.default_rng(0).normal(0, scale, image.shape).astype(np.float32)


def ranked(image: Images) -> Images:
    """Return an image with equalised histogram."""
    return rankdata(image, method="ordinal").reshape(image.shape).astype(np.float32)


def without_agent(images: Images) -> Images:
    """Return images whose t1c is a second t1n, with noise of its own."""
    return np.stack([images[0], noisy(images[0], 0.15) * foreground_mask(images), *images[2:]])


NONE = "none"
FAULTS: dict[str, Change] = {
    NONE: lambda images: images,
    **{
        f"{MODALITIES[a]} and {MODALITIES[b]} swapped": swapped(a, b)
        for a, b in combinations(range(4), 2)
    },
    "no contrast agent": without_agent,
    "t2f shifted by 5 mm": lambda images: np.stack([*images[:3], np.roll(images[3], 5, 1)]),
    "t2f shifted by 10 mm": lambda images: np.stack([*images[:3], np.roll(images[3], 10, 1)]),
    "scaled to 0.8": zoomed(0.8, 0.8, 0.8),
    "scaled to 1.25": zoomed(1.25, 1.25, 1.25),
    "height scaled to 0.75": zoomed(1, 1, 0.75),
    "20 mm of the top cut off": cut(2, 20),
    "20 mm of the back cut off": cut(1, 20),
    "front to back": lambda images: images[:, :, ::-1],
    "upside down": lambda images: images[..., ::-1],
    "blurred, sigma 1 mm": each(partial(gaussian_filter, sigma=1)),
    "blurred, sigma 2 mm": each(partial(gaussian_filter, sigma=2)),
    "t1c alone blurred, sigma 2 mm": each(partial(gaussian_filter, sigma=2), [1]),
    "noise of 0.3 standard deviations": each(noisy),
    "slices of 5 mm, interpolated": each(thick),
    "histogram equalised": each(ranked),
    "square root of intensities": each(lambda image: np.sqrt(np.maximum(image, 0))),
}
NEAREST = {
    (checks.LENGTH, "low"): "scaled to 0.8",
    (checks.LENGTH, "high"): "scaled to 1.25",
    (checks.PROPORTION, "high"): "height scaled to 0.75",
    (checks.END, "high"): "20 mm of the back cut off",
    (checks.ASYMMETRY, "high"): "upside down",
    (checks.DARKEST, "high"): "histogram equalised",
    (checks.DISPLACEMENT, "high"): "t2f shifted by 10 mm",
    (checks.DETAIL, "low"): "blurred, sigma 1 mm",
    (checks.DETAIL, "high"): "noise of 0.3 standard deviations",
}
"""Fault that each limit is set with; the others are those of the package."""


def read_images(root: Path) -> Iterator[Images]:
    """Yield the images of each case below a folder, cut to the brain with a margin, and 0 around it."""
    for case in find_cases(root).cases:
        arrays = [volume.array for volume in load_case(case, with_label=False).volumes]
        mask = brain_mask(arrays)
        box = bounding_box(mask)
        assert box is not None
        inside = mask[box.slices]
        images = np.stack([array[box.slices] * inside for array in arrays]).astype(np.float32)
        yield np.pad(images, ((0, 0), *[(MARGIN, MARGIN)] * 3))


def measured(images: Images) -> tuple[dict[str, dict[str, float]], bool]:
    """Return what the checks measure in a scan, and whether they report something else."""
    grid = Geometry.at(AFFINE, images.shape[1:])
    volumes = {
        modality: Volume(array=image, geometry=grid, file="")
        for modality, image in zip(MODALITIES, images, strict=True)
    }
    sample = checks.sample_brain([*volumes.values()])
    assert sample is not None
    reported = [*checks.skull_remarks(sample), *checks.order_remarks(sample)]
    return checks.measures_of(volumes, sample), bool(reported)


def limits_of(scans: Sequence[Measured]) -> list[checks.Limit]:
    """Return limits halfway between scans as they are and the nearest of them with a fault."""
    limits = list(checks.LIMITS)
    for (measure, side), fault in NEAREST.items():
        outer, inner = (min, max) if side == "low" else (max, min)
        usual, wrong = (
            [outer(scan[name][0][measure].values()) for scan in scans] for name in (NONE, fault)
        )
        halfway = (outer(usual) + inner(wrong)) / 2
        limits = [
            limit._replace(**{side: halfway}) if limit.measure == measure else limit
            for limit in limits
        ]
    return limits


def share(scans: Iterable[Measured], fault: str, limits: Sequence[checks.Limit]) -> float:
    """Return the share of scans that are reported."""
    damaged = [scan[fault] for scan in scans]
    return float(
        np.mean(
            [is_reported or any(checks.remarks(limits, values)) for values, is_reported in damaged]
        )
    )


def main() -> None:
    """Print the shares of false alarms and of noticed faults."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folders", type=Path, nargs=2)
    one, other = (
        [
            {name: measured(fault(images)) for name, fault in FAULTS.items()}
            for images in read_images(folder)
        ]
        for folder in parser.parse_args().folders
    )
    print("| fault | all, limits of the package | second, of the first | first, of the second |")
    print("|---|---|---|---|")
    for name in FAULTS:
        tried = (one + other, checks.LIMITS), (other, limits_of(one)), (one, limits_of(other))
        print("|", name, *(f"| {share(scans, name, limits):.0%}" for scans, limits in tried), "|")


if __name__ == "__main__":
    main()
