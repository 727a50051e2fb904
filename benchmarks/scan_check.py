"""Count false alarms and noticed faults of the checks of scans, with limits of the same and of other patients.

    python benchmarks/scan_check.py /data/one /data/other

Three limits are tried on every scan: those of the package; those of the other folder; and those of
random scans. A limit of scans is halfway between the scans as they are and a fault.
"""

import argparse
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt
from machine import version_of
from scipy.ndimage import distance_transform_edt, gaussian_filter, shift, zoom

from brats_seg.cases.case import load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.quality import scan as checks
from brats_seg.voxels.box import bounding_box, brain_mask

Images: TypeAlias = npt.NDArray[np.float32]
Change: TypeAlias = Callable[[Images], Images]

MARGIN = 12
N_SPLITS = 200
AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])


class Measured(NamedTuple):
    """A scan, as it is or damaged."""

    values: dict[str, dict[str, float]]
    is_reported: bool
    """Whether the order of the modalities, contrast agent or skull are reported."""


def brain_of(images: Images) -> npt.NDArray[np.bool_]:
    """Return the voxels that are not background."""
    return (images != 0).any(axis=0)


def each(change: Change, places: Iterable[int] = range(4)) -> Change:
    """Return a fault that changes some modalities inside the brain."""

    def fault(images: Images) -> Images:
        inside, changed = brain_of(images), images.copy()
        for place in places:
            changed[place] = change(images[place]) * inside
        return changed

    return fault


def blurred(mm: float) -> Change:
    """Return a function that blurs an image."""
    return lambda image: gaussian_filter(image, mm)


def zoomed(*factors: float) -> Change:
    """Return a fault that writes voxels of another size as if they had 1 mm."""
    return lambda images: zoom(images, (1, *factors), order=1)


def moved(mm: int) -> Change:
    """Return a fault that shifts t2f."""
    return lambda images: np.stack([*images[:3], shift(images[3], (0, mm, 0), order=0)])


def cut(axis: int, mm: int) -> Change:
    """Return a fault that cuts off the end of the brain."""

    def fault(images: Images) -> Images:
        box, changed = bounding_box(brain_of(images)), images.copy()
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


def noisy(share: float) -> Change:
    """Return a function that adds noise, in standard deviations of the brain."""

    def change(image: Images) -> Images:
        scale = share * image[image != 0].std()
        return image + np.random.default_rng(0).normal(0, scale, image.shape).astype(np.float32)

    return change


def ranked(image: Images) -> Images:
    """Return an image with equalised histogram."""
    result, inside = np.zeros_like(image), image != 0
    order = np.argsort(np.argsort(image[inside], kind="stable"), kind="stable")
    result[inside] = 1 + 100 * order / order.size
    return result


def without_agent(images: Images) -> Images:
    """Return images whose t1c is a second t1n, with noise of its own."""
    return np.stack([images[0], noisy(0.15)(images[0]) * brain_of(images), *images[2:]])


def with_scalp(images: Images) -> Images:
    """Return images with bright tissue around the brain."""
    changed, inside = images.copy(), brain_of(images)
    mm = distance_transform_edt(~inside)
    for image in changed:
        dark, bright = np.percentile(image[inside], [5, 95])
        image[(mm > 0) & (mm < 9)] = bright
        image[(mm > 0) & (mm <= 3)] = dark
    return changed


def swapped(*order: int) -> Change:
    """Return a fault that reorders the modalities."""
    return lambda images: images[list(order)]


NONE = "none"
FAULTS: dict[str, Change] = {
    NONE: lambda images: images,
    "t1n and t1c swapped": swapped(1, 0, 2, 3),
    "t1n and t2w swapped": swapped(2, 1, 0, 3),
    "t1n and t2f swapped": swapped(3, 1, 2, 0),
    "t1c and t2w swapped": swapped(0, 2, 1, 3),
    "t1c and t2f swapped": swapped(0, 3, 2, 1),
    "t2w and t2f swapped": swapped(0, 1, 3, 2),
    "no contrast agent": without_agent,
    "t2f shifted by 5 mm": moved(5),
    "t2f shifted by 10 mm": moved(10),
    "scaled to 0.8": zoomed(0.8, 0.8, 0.8),
    "scaled to 1.25": zoomed(1.25, 1.25, 1.25),
    "height scaled to 0.75": zoomed(1, 1, 0.75),
    "scalp not stripped": with_scalp,
    "20 mm of the top cut off": cut(2, 20),
    "20 mm of the back cut off": cut(1, 20),
    "front to back": lambda images: images[:, :, ::-1],
    "upside down": lambda images: images[..., ::-1],
    "blurred, sigma 1 mm": each(blurred(1)),
    "blurred, sigma 2 mm": each(blurred(2)),
    "t1c alone blurred, sigma 2 mm": each(blurred(2), [1]),
    "noise of 0.3 standard deviations": each(noisy(0.3)),
    "slices of 5 mm, interpolated": each(thick),
    "histogram equalised": each(ranked),
    "square root of intensities": each(lambda image: np.sqrt(np.maximum(image, 0))),
    "intensities x 1000 + 500": each(lambda image: 1000 * image + 500),
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


def measured(images: Images) -> Measured:
    """Return what the checks measure in a scan."""
    grid = Geometry.at(AFFINE, images.shape[1:])
    volumes = [Volume(array=image, geometry=grid, file="") for image in images]
    sample = checks.sample_brain(volumes)
    assert sample is not None
    reported = [*checks.skull_remarks(sample), *checks.order_remarks(sample)]
    return Measured(checks.measures_of(volumes, sample), bool(reported))


def limits_of(scans: Sequence[dict[str, Measured]]) -> list[checks.Limit]:
    """Return limits halfway between scans as they are and the nearest of them with a fault."""
    limits = []
    for limit in checks.LIMITS:
        for side, outer, inner in (("low", min, max), ("high", max, min)):
            fault = NEAREST.get((limit.measure, side))
            if fault and np.isfinite(getattr(limit, side)):
                usual, wrong = (
                    [outer(scan[name].values[limit.measure].values()) for scan in scans]
                    for name in (NONE, fault)
                )
                limit = limit._replace(**{side: (outer(usual) + inner(wrong)) / 2})
        limits.append(limit)
    return limits


def share(
    scans: Iterable[dict[str, Measured]], fault: str, limits: Sequence[checks.Limit]
) -> float:
    """Return the share of scans that are reported."""
    damaged = [scan[fault] for scan in scans]
    return float(
        np.mean([one.is_reported or any(checks.remarks(limits, one.values)) for one in damaged])
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
    print(f"scipy {version_of('scipy')}, numpy {version_of('numpy')}")
    print(f"| fault | all {len(one) + len(other)}, limits of the package ", end="")
    print(f"| {len(other)}, limits of the others | {len(one)}, limits of the others |")
    print("|---|---|---|---|")
    for name in FAULTS:
        tried = (one + other, checks.LIMITS), (other, limits_of(one)), (one, limits_of(other))
        print("|", name, *(f"| {share(scans, name, limits):.0%}" for scans, limits in tried), "|")
    rng = np.random.default_rng(0)
    for n in (8, 12, 16, 20):
        alarms = []
        for _ in range(N_SPLITS):
            scans = rng.permutation(np.array(one + other, dtype=object)).tolist()
            alarms.append(share(scans[n:], NONE, limits_of(scans[:n])))
        print(f"limits of {n} random scans: {np.mean(alarms):.1%} of the others are reported")


if __name__ == "__main__":
    main()
