"""Replace one transform of ours at a time by MONAI's, and show what a whole patch would take.

Shown are the CPU time of either, and the ratio of the mean time of a whole patch with MONAI's
transform to that with ours. All run in one process and one thread, with files in the page cache.

    python benchmarks/exchanged_transforms.py --size 128

It generates a phantom case of full size.
"""

import statistics
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from time import process_time

import monai_patches as peer
import numpy as np
import torch
from comparison import options_of

from brats_seg.cases.index import index_cases
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import PatchConfig, StoreConfig
from brats_seg.data import transforms
from brats_seg.data.intensities import CHANGES, BrainMask, RandIntensitiesd
from brats_seg.data.loader import PatchDataset, PatchKey
from brats_seg.data.prepare import prepare_cases
from brats_seg.data.store import Buffers, PreparedCase, open_case
from brats_seg.voxels.box import Box


def main() -> None:
    """Print a line for each transform."""
    arguments = options_of(__doc__, size=128, patches=24)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_phantom_cases(folder / "scans", n_cases=1, seed=0, shape=(240, 240, 155))
        cases = index_cases(folder / "scans").cases
        prepare_cases(cases, folder / "prepared", StoreConfig(), n_workers=0)
        case = open_case(folder / "prepared", cases[0].case_id)
        _print_exchanges(folder / "prepared", case, (arguments.size,) * 3, arguments.patches)


def _print_exchanges(
    folder: Path, case: PreparedCase, size: tuple[int, int, int], n_patches: int
) -> None:
    """Print the time that each of our transforms saves."""
    # many, because the transforms are drawn anew for each patch
    whole = {
        augment: _mean_seconds(folder, case.case_id, size, augment, 10 * n_patches)
        for augment in ("light", "full")
    }
    image = torch.from_numpy(case.read_image(Box.at((5, 7, 3), size))).float()
    brain = BrainMask.of(image)
    print(f"\n{'exchanged':20}  ours CPU ms  MONAI CPU ms  light patch  full patch")
    for exchange in (*_spatial_exchanges(case, size), *_intensity_exchanges()):
        data = {"image": image.clone(), "label": torch.zeros(1, *size, dtype=torch.uint8)}
        ours, theirs = (
            _seconds(make, data, n_patches // 4) for make in (exchange.ours, exchange.theirs)
        )
        if exchange.is_masked:
            theirs += _seconds(lambda _: image.mul_(brain.mask), data, n_patches // 4)
        added = [
            1 + _chance(list_, exchange.name) * (exchange.share * theirs - ours) / whole[name]
            for name, list_ in (("light", transforms.LIGHT), ("full", transforms.FULL))
        ]
        print(
            f"{exchange.name:20}  {1e3 * ours:11.1f}  {1e3 * theirs:12.1f}  {added[0]:10.2f}x  {added[1]:9.2f}x"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One of our transforms, and MONAI's in its place; both with probability 1."""

    name: str
    """Name of its probability in `Augmentation`, or of one of `CHANGES`."""
    ours: Callable[[dict[str, torch.Tensor]], object]
    theirs: Callable[[dict[str, torch.Tensor]], object]
    share: float = 1.0
    """Probability of MONAI's transform, as a share of that of ours."""
    is_masked: bool = True
    """Whether the background must be set to 0 after MONAI's."""


def _chance(augmentation: transforms.Augmentation, name: str) -> float:
    if name in peer.CHANGES:
        return augmentation.intensities[list(peer.CHANGES).index(name)]
    return float(getattr(augmentation, name))


def _spatial_exchanges(case: PreparedCase, size: tuple[int, int, int]) -> list[Exchange]:
    box, buffers = Box.at((5, 7, 3), size), Buffers()
    still, mirrored = (
        transforms.SpatialTransform(mirrored=(flip,) * 3, matrix=None) for flip in (False, True)
    )
    rotated = transforms.SpatialTransform(
        mirrored=(False,) * 3, matrix=transforms.rotation_matrix(np.full(3, 15.0))
    )

    def read(transform: transforms.SpatialTransform) -> Callable[[object], object]:
        return lambda _: transforms.read_transformed(case, box, transform, buffers)

    def read_and(theirs: Callable) -> Callable[[dict[str, torch.Tensor]], object]:
        return lambda data: (read(still)(data), theirs(data))

    return [
        Exchange(
            name="mirror",
            ours=read(mirrored),
            # three axes, each with a probability of one half
            theirs=read_and(peer.certain_flips()),
            is_masked=False,
        ),
        Exchange(
            name="rotation", ours=read(rotated), theirs=read_and(peer.affine(1)), is_masked=False
        ),
    ]


def _intensity_exchanges() -> list[Exchange]:
    ours = {
        name: RandIntensitiesd("image", [(change, 1.0)])
        for name, change in zip(peer.CHANGES, CHANGES, strict=True)
    }
    # MONAI changes all channels by blur and low resolution, and ours half of them
    return [
        Exchange(
            name=name,
            ours=ours[name],
            theirs=peer.change(name, prob=1),
            share=0.5 if name in {"blur", "low_resolution"} else 1.0,
            is_masked=name != "brightness",
        )
        for name in peer.CHANGES
    ]


def _mean_seconds(
    folder: Path, case_id: str, size: tuple[int, int, int], augment: str, n: int
) -> float:
    """Return the mean CPU seconds of a patch."""
    patch = PatchConfig(size=size)
    dataset = PatchDataset(folder, patch=patch, multiple=(1, 1, 1), augment=augment, seed=0)
    keys = [PatchKey(epoch=0, case_id=case_id, draw=draw) for draw in range(n + 1)]
    dataset[keys[0]]
    start = process_time()
    for key in keys[1:]:
        dataset[key]
    return (process_time() - start) / n


def _seconds(
    make: Callable[[dict[str, torch.Tensor]], object], data: dict[str, torch.Tensor], n: int
) -> float:
    """Return the median CPU seconds of a transform."""
    seconds = []
    for _ in range(max(n, 3) + 1):
        start = process_time()
        make(data)
        seconds.append(process_time() - start)
    return statistics.median(seconds[1:])


if __name__ == "__main__":
    main()
