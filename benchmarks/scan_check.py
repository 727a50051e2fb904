"""Count false alarms and caught damages of the comparison of scans with a training set.

Profiles are made from random eight cases of a folder of scans, and from all but one; the cases that are
left out are compared with them, as they are and damaged.

    python benchmarks/scan_check.py /data/BraTS
"""

import argparse
from collections import defaultdict
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import TypeAlias

import numpy as np
import numpy.typing as npt
from machine import version_of
from scipy.ndimage import gaussian_filter, shift, zoom

from brats_seg.cases.case import load_case
from brats_seg.cases.find import find_cases
from brats_seg.quality.profile import deviations, measure_crop, profile_of
from brats_seg.voxels.box import bounding_box, brain_mask, normalised

Images: TypeAlias = npt.NDArray[np.float32]
Values: TypeAlias = npt.NDArray[np.float64]

MARGIN = 12
N_SPLITS = 200
N_TRAIN = 8


def brain_of(images: Images) -> npt.NDArray[np.bool_]:
    """Return the voxels that are not background."""
    return (images != 0).any(axis=0)


def each(
    change: Callable[[Images], Images], places: Iterable[int] = range(4)
) -> Callable[[Images], Images]:
    """Return a damage that changes some modalities inside the brain."""
    chosen = set(places)

    def damage(images: Images) -> Images:
        inside = brain_of(images)
        return np.stack(
            [change(one) * inside if place in chosen else one for place, one in enumerate(images)]
        )

    return damage


def moved(place: int, mm: int) -> Callable[[Images], Images]:
    """Return a damage that shifts one modality."""

    def damage(images: Images) -> Images:
        changed = images.copy()
        changed[place] = shift(images[place], (0, mm, 0), order=0)
        return changed

    return damage


def thick(image: Images, n: int = 5) -> Images:
    """Return an image of thick slices that were interpolated to thin ones."""
    n_slices = image.shape[2] // n * n
    slices = image[..., :n_slices].reshape(*image.shape[:2], -1, n).mean(axis=-1)
    result = np.zeros_like(image)
    result[..., :n_slices] = zoom(slices, (1, 1, n), order=1)
    return result


def noisy(share: float) -> Callable[[Images], Images]:
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
    noise = noisy(0.15)(images[0]) - images[0]
    return np.stack([images[0], images[0] + noise * brain_of(images), images[2], images[3]])


def swapped(*order: int) -> Callable[[Images], Images]:
    """Return a damage that reorders the modalities."""
    return lambda images: images[list(order)]


DAMAGES: dict[str, Callable[[Images], Images]] = {
    "none": lambda images: images,
    "t1n and t1c swapped": swapped(1, 0, 2, 3),
    "t1n and t2w swapped": swapped(2, 1, 0, 3),
    "t1n and t2f swapped": swapped(3, 1, 2, 0),
    "t1c and t2w swapped": swapped(0, 2, 1, 3),
    "t1c and t2f swapped": swapped(0, 3, 2, 1),
    "t2w and t2f swapped": swapped(0, 1, 3, 2),
    "no contrast agent": without_agent,
    "t2f shifted by 5 mm": moved(3, 5),
    "t2f shifted by 10 mm": moved(3, 10),
    "t2w shifted by 20 mm": moved(2, 20),
    "scaled to 0.8": lambda images: np.stack([zoom(one, 0.8, order=1) for one in images]),
    "scaled to 1.25": lambda images: np.stack([zoom(one, 1.25, order=1) for one in images]),
    "blurred, sigma 1 mm": each(lambda image: gaussian_filter(image, 1)),
    "blurred, sigma 2 mm": each(lambda image: gaussian_filter(image, 2)),
    "t1c alone blurred, sigma 2 mm": each(lambda image: gaussian_filter(image, 2), [1]),
    "noise of 0.3 standard deviations": each(noisy(0.3)),
    "slices of 5 mm, interpolated": each(thick),
    "histogram equalised": each(ranked),
    "square root of intensities": each(lambda image: np.sqrt(np.maximum(image, 0))),
    "intensities x 1000 + 500": each(lambda image: 1000 * image + 500),
}


def read_images(root: Path) -> list[Images]:
    """Return the images of each case below a folder, cut to the brain with a margin, and 0 around it."""
    found = []
    for case in find_cases(root).cases:
        arrays = [volume.array for volume in load_case(case, with_label=False).volumes]
        mask = brain_mask(arrays)
        box = bounding_box(mask)
        assert box is not None
        inside = mask[box.slices]
        images = np.stack([array[box.slices] * inside for array in arrays]).astype(np.float32)
        found.append(np.pad(images, ((0, 0), *[(MARGIN, MARGIN)] * 3)))
    return found


def measured(images: Images) -> Values:
    """Return the measures of images that are not normalised yet."""
    inside = brain_of(images)
    box = bounding_box(inside)
    assert box is not None
    inside = inside[box.slices]
    crop = np.zeros((4, *box.shape), np.float32)
    for place, image in enumerate(images):
        crop[place][inside] = normalised(image[box.slices][inside])[0]
    values = measure_crop(crop, (1.0, 1.0, 1.0))
    assert values is not None
    return values


def shares(values: dict[str, list[Values]], splits: Iterable[list[int]]) -> dict[str, float]:
    """Return the share of left-out cases that are reported, for each damage."""
    n_cases = len(values["none"])
    reported = defaultdict(list)
    for train in splits:
        profile = profile_of(np.stack([values["none"][place] for place in train]))
        for place in set(range(n_cases)) - set(train):
            for name, of_cases in values.items():
                reported[name].append(bool(deviations(profile, of_cases[place])))
    return {name: float(np.mean(flags)) for name, flags in reported.items()}


def main() -> None:
    """Print a table of damages."""
    parser = argparse.ArgumentParser()
    parser.add_argument("scans", type=Path)
    cases = read_images(parser.parse_args().scans)
    values = {name: [measured(damage(one)) for one in cases] for name, damage in DAMAGES.items()}
    rng, n_cases = np.random.default_rng(0), len(cases)
    random = shares(values, (rng.permutation(n_cases)[:N_TRAIN].tolist() for _ in range(N_SPLITS)))
    single = shares(values, ([k for k in range(n_cases) if k != out] for out in range(n_cases)))
    print(f"scipy {version_of('scipy')}, numpy {version_of('numpy')}")
    print(f"| {n_cases} cases, damage | reported, 8 training cases | all but one |\n|---|---|---|")
    for name in DAMAGES:
        print(f"| {name} | {random[name]:.0%} | {single[name]:.0%} |")


if __name__ == "__main__":
    main()
