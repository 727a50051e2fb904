"""Time the reading of the four volumes of a case, and its crop and normalisation, beside other programs.

All run in turn in one process and one thread, with files in the page cache. Reading is compared with
nibabel, SimpleITK, MONAI and the reader of nnU-Net; reading, cropping to the brain and normalising
with MONAI and with the preprocessing of nnU-Net, which plans for the cases before. MONAI normalises
the voxels of a channel that are not 0, where ours and nnU-Net take those of the whole brain: in cases
with 0 inside the brain the results differ there.

    python benchmarks/read_case.py --data ../scans --cases 3 --json comparisons.jsonl

Without a folder, here or in BRATS_REAL_DATA, a phantom case of full size is generated.
"""

import os
import statistics
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import monai_patches
import nibabel as nib
import nnunet_patches
import numpy as np
import torch
from comparison import Comparison, options_of, ratios_of, report, seconds_in_turn
from machine import version_of
from monai.transforms import Compose

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.find import find_cases
from brats_seg.cases.nifti import read_volume
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.data.normalisation import extract_brain

Read = Callable[[CaseIndex, Case], object]
"""Reads a case in whatever form a program has for it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Way:
    """A way to read a case."""

    read: Read
    arrays: Callable[[Any], Sequence[np.ndarray]]
    """The volumes (X, Y, Z) of what was read."""
    least: float | None = None
    """Goal: its time over ours."""


def main() -> None:
    """Print a line for each program, and append the comparisons."""
    arguments = options_of(__doc__, data=Path, cases=2, rounds=5)
    torch.set_num_threads(1)
    with data_folder(arguments.data) as root, tempfile.TemporaryDirectory() as name:
        index = chosen_cases(find_cases(root).cases, root, arguments.cases)
        for task, ways in (
            ("read the four volumes of a case", _readers()),
            ("read, crop and normalise a case", _preparers(index, Path(name))),
        ):
            comparisons = _compared(task, ways, index, arguments.rounds)
            report(comparisons, arguments.json)


@contextmanager
def data_folder(given: Path | None) -> Iterator[Path]:
    """Yield a folder of scans, or one of a phantom case of full size if none is given."""
    if folder := given or os.environ.get("BRATS_REAL_DATA"):
        yield Path(folder)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_phantom_cases(Path(folder), n_cases=1, seed=0, shape=(240, 240, 155))
        yield Path(folder)


def chosen_cases(cases: Iterable[Case], root: Path, n_cases: int) -> CaseIndex:
    """Return an index of some labelled cases in compressed files, which all programs can read."""
    chosen = [
        case
        for case in cases
        if case.usable
        and case.label is not None
        and all(scan.volume is None and scan.path.suffix == ".gz" for scan in case.images)
    ]
    return CaseIndex(root=root, cases=tuple(chosen[:n_cases]))


def _compared(
    task: str, ways: Mapping[str, Way], index: CaseIndex, n_rounds: int
) -> list[Comparison]:
    """Time the ways, and compare all others with the first, which is ours."""
    runs = {name: partial(_read_all, way.read, index) for name, way in ways.items()}
    found = seconds_in_turn(runs, n_rounds)
    costs = {
        name: f"{1e3 * statistics.median(seconds) / len(index.cases):.0f} ms"
        for name, seconds in found.items()
    }
    ours, *others = ways
    return [
        Comparison(
            task=task,
            ours=costs[ours],
            peer=name,
            theirs=costs[name],
            ratios=ratios_of(found[name], found[ours]),
            least=ways[name].least,
            agreement=_agreement(ways[ours], ways[name], index),
        )
        for name in others
    ]


def _read_all(read: Read, index: CaseIndex) -> None:
    for case in index.cases:
        read(index, case)


def _agreement(ours: Way, theirs: Way, index: CaseIndex) -> str:
    case = index.cases[0]
    pairs = list(zip(*(way.arrays(way.read(index, case)) for way in (ours, theirs)), strict=True))
    if any(one.shape != other.shape for one, other in pairs):
        return f"another crop: {pairs[0][1].shape} instead of {pairs[0][0].shape}"
    largest = max(float(np.abs(one.astype(np.float64) - other).max()) for one, other in pairs)
    return f"largest difference {largest:.1e}"


def _readers() -> dict[str, Way]:
    read_monai = partial(_apply, Compose(monai_patches.loaded(labels=False)))
    ways = {
        "ours": Way(read=_read_ours, arrays=list),
        f"nibabel {version_of('nibabel')}": Way(read=_read_nibabel, arrays=list, least=2.5),
        f"monai {version_of('monai')}": Way(read=read_monai, arrays=_of_monai),
    }
    if find_spec("SimpleITK"):
        name = f"SimpleITK {version_of('SimpleITK')}"
        ways[name] = Way(read=_read_itk, arrays=_turned, least=0.95)
    if nnunet_patches.is_installed():
        name = f"nnunetv2 {version_of('nnunetv2')}, SimpleITKIO"
        ways[name] = Way(read=_read_nnunet, arrays=_turned)
    return ways


def _preparers(index: CaseIndex, folder: Path) -> dict[str, Way]:
    steps = partial(_apply, Compose(monai_patches.deterministic(labels=False)))
    ways = {
        "ours": Way(read=_normalised, arrays=list),
        f"monai {version_of('monai')}": Way(read=steps, arrays=_of_monai, least=4),
    }
    if find_spec("nnunetv2"):
        nnunet_patches.preprocess(index, folder, None)
        name = f"nnunetv2 {version_of('nnunetv2')}, DefaultPreprocessor"
        read = nnunet_patches.case_reader(folder)
        ways[name] = Way(read=read, arrays=_turned, least=3)
    return ways


def _read_ours(index: CaseIndex, case: Case) -> list[np.ndarray]:
    return [read_volume(index.root / scan.path, case_id=case.case_id).array for scan in case.images]


def _normalised(index: CaseIndex, case: Case) -> np.ndarray:
    volumes = [read_volume(index.root / scan.path, case_id=case.case_id) for scan in case.images]
    return extract_brain(case.case_id, volumes, None).image


def _read_nibabel(index: CaseIndex, case: Case) -> list[np.ndarray]:
    return [np.asanyarray(nib.load(index.root / scan.path).dataobj) for scan in case.images]


def _read_itk(index: CaseIndex, case: Case) -> list[np.ndarray]:
    import SimpleITK

    paths = (str(index.root / scan.path) for scan in case.images)
    return [SimpleITK.GetArrayFromImage(SimpleITK.ReadImage(path)) for path in paths]


def _read_nnunet(index: CaseIndex, case: Case) -> np.ndarray:
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    return SimpleITKIO().read_images([str(index.root / scan.path) for scan in case.images])[0]


def _apply(steps: Compose, index: CaseIndex, case: Case) -> dict[str, Any]:
    return steps(monai_patches.item(index, case, labels=False))


def _of_monai(data: dict[str, Any]) -> list[np.ndarray]:
    return list(data["image"].numpy())


def _turned(volumes: Sequence[np.ndarray]) -> list[np.ndarray]:
    """Return volumes (X, Y, Z) of those of ITK, whose axes are Z, Y, X."""
    return [volume.transpose() for volume in volumes]


if __name__ == "__main__":
    main()
