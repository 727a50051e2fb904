"""Time cases and training patches of the prepared store, and those of MONAI's dictionary pipeline.

All run in turn in one process and one thread, with files in the page cache. A table shows the
median CPU time per patch over rounds, and the median over rounds of its ratio to the first line.
MONAI transforms patches as often and as much; its rotation fills the corners of a patch, where ours
reads the voxels around it.

The last table replaces one of our transforms at a time by MONAI's: it shows the CPU time of either,
and the ratio of the mean time of a whole patch with MONAI's transform to that with ours.

    python benchmarks/patches.py --size 128 --cases 2 --rounds 5

It generates phantom cases of full size.
"""

import argparse
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import count, cycle
from pathlib import Path
from time import process_time

import monai_patches as peer
import numpy as np
import torch
from machine import matrix_product_rate
from monai.data import CacheDataset, PersistentDataset
from monai.data import Dataset as PlainDataset
from monai.transforms import Compose

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.index import index_cases
from brats_seg.cases.nifti import read_volume
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import PatchConfig, StoreConfig
from brats_seg.data import transforms
from brats_seg.data.brain import extract_brain
from brats_seg.data.intensities import BrainMask
from brats_seg.data.loader import PatchDataset
from brats_seg.data.patches import PatchKey
from brats_seg.data.prepare import prepare_cases
from brats_seg.data.store import Buffers, PreparedCase, open_case
from brats_seg.voxels.box import Box


@dataclass(frozen=True, kw_only=True, slots=True)
class Contender:
    """A way to make patches, or cases."""

    name: str
    make: Callable[[], object]
    n_made: int
    """Number that is made in a round."""


def main() -> None:
    """Print a table for each kind of patch."""
    arguments = _arguments()
    torch.set_num_threads(1)
    size = (arguments.size,) * 3
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        write_phantom_cases(
            folder / "scans", n_cases=arguments.cases, seed=0, shape=(240, 240, 155)
        )
        index = index_cases(folder / "scans")
        for compressed in (False, True):
            store = folder / f"compressed-{compressed}"
            prepare_cases(index.cases, store, StoreConfig(compressed=compressed), n_workers=0)
        print(
            f"patches of {size}, {len(index.cases)} cases, "
            f"matrix product {matrix_product_rate() / 1e9:.0f} GFLOP/s"
        )
        print(f"difference of a case from MONAI's: {_largest_difference(index):.1e}")
        n = arguments.patches
        tables = {
            "a case from its scans": _cases(index),
            "crop": _crops(folder, index, size, n),
            "light augmentation": _light(folder, index, size, n),
            "full augmentation": _full(folder, index, size, n),
        }
        for title, contenders in tables.items():
            _print_table(title, contenders, arguments.rounds)
        _print_exchanges(folder / "compressed-False", index, size, n)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--size", type=int, default=128, help="voxels along each axis of a patch")
    parser.add_argument("--cases", type=int, default=2)
    parser.add_argument("--patches", type=int, default=24, help="per round and contender")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _print_table(title: str, contenders: Sequence[Contender], rounds: int) -> None:
    seconds = _measured(contenders, rounds)
    first = seconds[contenders[0].name]
    print(f"\n{title:42}  CPU ms  a second   ratio")
    for contender in contenders:
        own = seconds[contender.name]
        ratio = statistics.median(a / b for a, b in zip(own, first, strict=True))
        median = statistics.median(own)
        print(f"{contender.name:42}  {1e3 * median:6.1f}  {1 / median:8.1f}  {ratio:6.2f}x")


def _measured(contenders: Sequence[Contender], rounds: int) -> dict[str, list[float]]:
    """Return the CPU seconds for one patch or case of every contender, in every round."""
    for contender in contenders:
        contender.make()
    seconds: dict[str, list[float]] = {contender.name: [] for contender in contenders}
    for _ in range(rounds):
        for contender in contenders:
            start = process_time()
            for _ in range(contender.n_made):
                contender.make()
            seconds[contender.name].append((process_time() - start) / contender.n_made)
    return seconds


def _cases(index: CaseIndex) -> list[Contender]:
    ours, theirs = cycle(index.cases), cycle(peer.items(index, labels=False))
    pipeline = Compose(peer.deterministic(labels=False))
    return [
        Contender(name="ours", make=lambda: _normalised(index, next(ours)), n_made=2),
        Contender(name="MONAI", make=lambda: pipeline(next(theirs)), n_made=2),
    ]


def _normalised(index: CaseIndex, case: Case) -> np.ndarray:
    volumes = [read_volume(index.root / scan.path, case_id=case.case_id) for scan in case.images]
    return extract_brain(case.case_id, volumes, None).image


def _largest_difference(index: CaseIndex) -> float:
    theirs = Compose(peer.deterministic(labels=False))(peer.items(index, labels=False)[0])[
        "image"
    ].numpy()
    return float(np.abs(_normalised(index, index.cases[0]) - theirs).max())


def _crops(
    folder: Path, index: CaseIndex, size: tuple[int, int, int], n_made: int
) -> list[Contender]:
    plain, packed = (
        open_case(folder / f"compressed-{compressed}", index.cases[0].case_id)
        for compressed in (False, True)
    )
    box, buffers = Box.at((5, 7, 3), size), Buffers()
    still = transforms.SpatialTransform(mirrored=(False, False, False), matrix=None)
    makes = {
        "ours: memory used again": lambda: transforms.read_transformed(plain, box, still, buffers),
        "ours: new arrays": lambda: _read_anew(plain, box),
        "ours: compressed": lambda: transforms.read_transformed(packed, box, still, buffers),
        "MONAI CacheDataset, image alone": _cached(index, peer.crop(size), labels=False),
    }
    return [Contender(name=name, make=make, n_made=n_made) for name, make in makes.items()]


def _read_anew(case: PreparedCase, box: Box) -> tuple[np.ndarray, np.ndarray]:
    return case.read_image(box).astype(np.float32), case.read_labels(box)


def _light(
    folder: Path, index: CaseIndex, size: tuple[int, int, int], n_made: int
) -> list[Contender]:
    random = [*peer.crop(size), *peer.light()]
    scans, steps = peer.items(index, labels=True), [*peer.deterministic(labels=True), *random]
    persistent = PersistentDataset(scans, steps, folder / "persistent")
    plain = PlainDataset(scans, Compose(steps))
    cached = _cached(index, random, labels=True)
    return [
        _ours(folder / "compressed-False", index, size, "light", n_made),
        Contender(name="MONAI CacheDataset", make=cached, n_made=n_made),
        Contender(name="MONAI PersistentDataset", make=_each(persistent), n_made=n_made // 4),
        Contender(name="MONAI Dataset", make=_each(plain), n_made=2),
    ]


def _full(
    folder: Path, index: CaseIndex, size: tuple[int, int, int], n_made: int
) -> list[Contender]:
    cached = _cached(index, [*peer.crop(size), *peer.full()], labels=True)
    return [
        _ours(folder / "compressed-False", index, size, "full", n_made),
        Contender(name="MONAI CacheDataset", make=cached, n_made=n_made),
    ]


def _print_exchanges(
    folder: Path, index: CaseIndex, size: tuple[int, int, int], n_patches: int
) -> None:
    """Print the time that each of our transforms saves."""
    whole = {}
    for augment in ("light", "full"):
        # many, because the transforms are drawn anew for each patch
        ours = _ours(folder, index, size, augment, 10 * n_patches)
        whole[augment] = _measured([ours], 1)[ours.name][0]
    case = open_case(folder, index.cases[0].case_id)
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
            1
            + (
                exchange.share * getattr(list_, exchange.name) * theirs
                - getattr(list_, exchange.name) * ours
            )
            / whole[name]
            for name, list_ in (("light", transforms.LIGHT), ("full", transforms.FULL))
        ]
        print(
            f"{exchange.name:20}  {1e3 * ours:11.1f}  {1e3 * theirs:12.1f}  {added[0]:10.2f}x  {added[1]:9.2f}x"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Exchange:
    """One of our transforms, and MONAI's in its place; both with probability 1."""

    name: str
    """Name of its probability in `Augmentation`."""
    ours: Callable[[dict[str, torch.Tensor]], object]
    theirs: Callable[[dict[str, torch.Tensor]], object]
    share: float = 1.0
    """Probability of MONAI's transform, as a share of that of ours."""
    is_masked: bool = True
    """Whether the background must be set to 0 after MONAI's."""


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
    certain = transforms.Augmentation(
        **dict.fromkeys(transforms.Augmentation.__dataclass_fields__, 1.0)
    )
    ours = dict(zip(peer.CHANGES, transforms.intensity_changes(certain), strict=True))
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


def _ours(
    folder: Path, index: CaseIndex, size: tuple[int, int, int], augment: str, n_made: int
) -> Contender:
    patch = PatchConfig(size=size)
    dataset = PatchDataset(folder, patch=patch, multiple=(1, 1, 1), augment=augment, seed=0)
    keys = (
        PatchKey(epoch=0, case_id=case.case_id, draw=draw)
        for draw in count()
        for case in index.cases
    )
    return Contender(name="ours", make=lambda: dataset[next(keys)], n_made=n_made)


def _cached(index: CaseIndex, random: Sequence[Callable], *, labels: bool) -> Callable[[], object]:
    steps = [*peer.deterministic(labels=labels), *random]
    return _each(CacheDataset(peer.items(index, labels=labels), steps, progress=False))


def _each(dataset: PlainDataset) -> Callable[[], object]:
    places: Iterator[int] = cycle(range(len(dataset)))
    return lambda: dataset[next(places)]


if __name__ == "__main__":
    main()
