"""Time training patches of the prepared store beside those of MONAI's dictionary pipeline and nnU-Net.

All run in turn in one process and one thread, with files in the page cache; for two workers, the time
of all processes is counted. MONAI transforms patches as often and as much as ours; its rotation fills
the corners of a patch, where ours reads the voxels around it. nnU-Net runs on cases that it has
planned and preprocessed itself, with its own loader and its default transforms, which also make the
targets of deep supervision. Transforms are drawn anew for each patch, so that the ratios of full
augmentation vary between rounds.

    python benchmarks/patches.py --size 128 --cases 2 --rounds 5 --json comparisons.jsonl

It generates phantom cases of full size.
"""

import argparse
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import count, cycle, islice
from pathlib import Path

import monai_patches
import nnunet_patches
import torch
from comparison import Comparison, compare_with_first, options_of, report, seconds_in_turn
from machine import version_of
from monai.data import CacheDataset, PersistentDataset
from monai.data import Dataset as PlainDataset
from torch.utils.data import DataLoader, RandomSampler

from brats_seg.cases.case import CaseIndex
from brats_seg.cases.index import index_cases
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import PatchConfig, StoreConfig
from brats_seg.data.loader import PatchDataset, PatchKey, patch_loader
from brats_seg.data.prepare import prepare_cases
from brats_seg.data.store import Buffers, open_case
from brats_seg.data.transforms import SpatialTransform, read_transformed, training_transforms
from brats_seg.voxels.box import Box, Triple

MONAI, NNUNET = (f"{name} {version_of(name)}" for name in ("monai", "nnunetv2"))
N_WORKERS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to make patches."""

    make: Callable[[], object]
    """Makes `n_made` patches."""
    n_made: int
    n_calls: int = 1
    """Calls in a round."""
    least: float | None = None
    """Goal: time of this way over ours."""

    def run(self) -> None:
        """Make the patches of a round."""
        for _ in range(self.n_calls):
            self.make()


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """The cases that all programs make patches of."""

    folder: Path
    index: CaseIndex
    size: Triple
    n_patches: int
    """Patches of ours in a round."""
    nnunet: object | None
    """Trainer of nnU-Net on its own preprocessed cases; None if it is not installed."""


def main() -> None:
    """Print a table for each kind of patch, and append the comparisons."""
    arguments = options_of(__doc__, size=128, cases=2, patches=16, rounds=5)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as name:
        bench = _prepared(Path(name), arguments)
        for task, ways in (
            ("crop", _crops(bench)),
            ("light augmentation", _light(bench)),
            ("full augmentation", _full(bench)),
            (f"light augmentation, {N_WORKERS} workers", _by_workers(bench)),
        ):
            task = f"a patch of {arguments.size}^3, {task}"
            report(_compared(task, ways, arguments.rounds), arguments.json)


def _prepared(folder: Path, arguments: argparse.Namespace) -> Bench:
    size = (arguments.size,) * 3
    write_phantom_cases(folder / "scans", n_cases=arguments.cases, seed=0, shape=(240, 240, 155))
    index = index_cases(folder / "scans")
    prepare_cases(index.cases, folder / "prepared", StoreConfig(), n_workers=0)
    trainer = None
    if nnunet_patches.is_installed():
        nnunet_patches.preprocess(index, folder / "nnunet", size)
        trainer = nnunet_patches.trainer(folder / "nnunet")
    return Bench(folder=folder, index=index, size=size, n_patches=arguments.patches, nnunet=trainer)


def _compared(task: str, ways: Mapping[str, Way], n_rounds: int) -> list[Comparison]:
    """Time the ways, and compare all others with the first, which is ours."""
    seconds = seconds_in_turn({name: way.run for name, way in ways.items()}, n_rounds)
    each = {
        name: [spent / (ways[name].n_made * ways[name].n_calls) for spent in seconds[name]]
        for name in ways
    }
    goals = {name: way.least for name, way in ways.items() if way.least is not None}
    return compare_with_first(task, each, goals)


def _crops(bench: Bench) -> dict[str, Way]:
    case = open_case(bench.folder / "prepared", bench.index.cases[0].case_id)
    box, buffers, n = Box.at((5, 7, 3), bench.size), Buffers(), bench.n_patches
    still = SpatialTransform(mirrored=(False, False, False), matrix=None)
    cached = _cached(bench, monai_patches.crop(bench.size), labels=False)
    makes = {
        "ours": lambda: read_transformed(case, box, still, buffers),
        f"{MONAI} CacheDataset, image alone": cached,
    }
    ways = {name: Way(make=make, n_made=1, n_calls=n) for name, make in makes.items()}
    if bench.nnunet is not None:
        make, n_made = nnunet_patches.cropped_patches(bench.nnunet)
        ways[f"{NNUNET} loader"] = Way(make=make, n_made=n_made, n_calls=max(n // 4, 1), least=10)
    return ways


def _light(bench: Bench) -> dict[str, Way]:
    random = [*monai_patches.crop(bench.size), *monai_patches.light()]
    scans = monai_patches.items(bench.index, labels=True)
    steps, n = [*monai_patches.deterministic(labels=True), *random], bench.n_patches
    persistent = PersistentDataset(scans, steps, bench.folder / "persistent")
    cached = _cached(bench, random, labels=True)
    return {
        "ours": Way(make=_ours(bench, "light"), n_made=1, n_calls=n),
        f"{MONAI} CacheDataset": Way(make=cached, n_made=1, n_calls=n // 2, least=2.5),
        f"{MONAI} PersistentDataset": Way(
            make=_each(persistent), n_made=1, n_calls=max(n // 6, 1), least=6
        ),
    }


def _full(bench: Bench) -> dict[str, Way]:
    n = bench.n_patches
    cached = _cached(bench, [*monai_patches.crop(bench.size), *monai_patches.full()], labels=True)
    ways = {
        "ours": Way(make=_ours(bench, "full"), n_made=1, n_calls=2 * n),
        f"{MONAI} CacheDataset": Way(make=cached, n_made=1, n_calls=n // 2),
    }
    if bench.nnunet is not None:
        make, n_made = nnunet_patches.training_patches(bench.nnunet)
        name = f"{NNUNET}, its loader and default transforms"
        ways[name] = Way(make=make, n_made=n_made, n_calls=max(n // 4, 1), least=3)
    return ways


def _by_workers(bench: Bench) -> dict[str, Way]:
    """Return ways that hand patches from worker processes to this one, with the start of them."""
    n_ours, n_theirs = 4 * bench.n_patches, bench.n_patches
    steps = [
        *monai_patches.deterministic(labels=True),
        *monai_patches.crop(bench.size),
        *monai_patches.light(),
    ]
    scans = monai_patches.items(bench.index, labels=True)
    dataset = CacheDataset(scans, steps, progress=False)
    sampler = RandomSampler(dataset, replacement=True, num_samples=n_theirs)
    ours, keys = _dataset(bench, "light"), _keys(bench)

    def run_ours() -> None:
        for sample in patch_loader(ours, islice(keys, n_ours), N_WORKERS):
            del sample

    def run_theirs() -> None:
        for sample in DataLoader(dataset, sampler=sampler, num_workers=N_WORKERS):
            del sample

    return {
        "ours": Way(make=run_ours, n_made=n_ours),
        f"{MONAI} CacheDataset, DataLoader of torch": Way(make=run_theirs, n_made=n_theirs),
    }


def _ours(bench: Bench, augment: str) -> Callable[[], object]:
    dataset, keys = _dataset(bench, augment), _keys(bench)
    return lambda: dataset[next(keys)]


def _dataset(bench: Bench, augment: str) -> PatchDataset:
    folder, patch = bench.folder / "prepared", PatchConfig(size=bench.size)
    return PatchDataset(training_transforms(folder, patch=patch, augment=augment), seed=0)


def _keys(bench: Bench) -> Iterator[PatchKey]:
    return (
        PatchKey(epoch=0, case_id=case.case_id, draw=draw)
        for draw in count()
        for case in bench.index.cases
    )


def _cached(bench: Bench, random: Sequence[Callable], *, labels: bool) -> Callable[[], object]:
    steps = [*monai_patches.deterministic(labels=labels), *random]
    scans = monai_patches.items(bench.index, labels=labels)
    return _each(CacheDataset(scans, steps, progress=False))


def _each(dataset: PlainDataset) -> Callable[[], object]:
    indices: Iterator[int] = cycle(range(len(dataset)))
    return lambda: dataset[next(indices)]


if __name__ == "__main__":
    main()
