"""Time reading, preparing, scoring and writing of whole cases, beside other programs.

All run in turn with one thread and files in the page cache, and CPU time counts that of their processes.
Reading is compared with nibabel, SimpleITK, MONAI and the reader of nnU-Net; reading, cropping to the
brain and normalising with MONAI and with nnU-Net, whose plans are made before; scoring with nnU-Net,
MIST and the organisers' program; writing with nibabel. MONAI normalises the voxels of a channel that are
not 0, where ours and nnU-Net take those of the whole brain: in cases with 0 inside the brain the results
differ there. Preparing is of the first case alone. Predictions are references that were moved by a voxel
or two, with a lesion that is none.

    python benchmarks/cases.py --data ../scans --cases 2 --json comparisons.jsonl

Without a folder, here or in BRATS_REAL_DATA, a phantom case of full size is generated. Programs that
are not installed are left out (`make bench` installs them).
"""

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import monai_patches
import nibabel as nib
import nnunet_patches
import numpy as np
import pandas as pd
import torch
from comparison import Comparison, compare_with_first, options_of, report, seconds_in_turn
from machine import version_of
from monai.transforms import Compose
from scorers import Scores, score_with_mist, score_with_nnunet, score_with_organisers

from brats_seg.cases.case import Case, CaseIndex, load_case
from brats_seg.cases.find import find_cases
from brats_seg.cases.nifti import Volume, read_label_map, read_volume, write_volume
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import StoreConfig
from brats_seg.data.normalisation import extract_brain
from brats_seg.data.prepare import prepare_cases
from brats_seg.data.store import open_case
from brats_seg.evaluation.evaluate import score_folders
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import score_columns
from brats_seg.voxels.box import Box

NNUNET, MONAI, NIBABEL, ITK = (
    f"{name} {version_of(name)}" for name in ("nnunetv2", "monai", "nibabel", "SimpleITK")
)
MOVED_BY = (2, 1, 1)
FALSE_LESION = 6
"""Edge in voxels of the lesion that only the prediction holds."""
OEDEMA = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class Task:
    """Something that we and other programs do with all cases."""

    name: str
    n_cases: int
    ours: Callable[[], Any]
    others: Mapping[str, Callable[[], Any]]
    """By the name of the program with its version."""
    agreement: Callable[[Any, Any], str]
    """Compares what ours and another one returned."""
    goals: Mapping[str, float] | None = None
    """Smallest ratios; None: no program is faster than ours."""


def main() -> None:
    """Print a table of all tasks, and append the comparisons."""
    arguments = options_of(__doc__, data=Path, cases=2, rounds=5)
    torch.set_num_threads(1)
    with data_folder(arguments.data) as root, tempfile.TemporaryDirectory() as name:
        index = chosen_cases(find_cases(root).cases, root, arguments.cases)
        comparisons = [
            comparison
            for task in _tasks(index, Path(name))
            for comparison in _compared(task, arguments.rounds)
        ]
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


def _tasks(index: CaseIndex, folder: Path) -> Iterator[Task]:
    has_nnunet = nnunet_patches.is_installed()
    if has_nnunet:
        nnunet_patches.preprocess(index, folder / "nnunet", None)
    yield _reading_alone(index, has_nnunet=has_nnunet)
    yield _normalising(index, folder / "nnunet", has_nnunet=has_nnunet)
    if has_nnunet:
        yield _preparing(replace(index, cases=index.cases[:1]), folder)
    yield from _scoring(index, folder)
    yield _reading(index)
    yield _writing(index, folder)


def _compared(task: Task, n_rounds: int) -> list[Comparison]:
    agreements = _agreements(task)
    seconds = seconds_in_turn({"": task.ours, **task.others}, n_rounds, n_warm_ups=0)
    each = {name: [s / task.n_cases for s in rounds] for name, rounds in seconds.items()}
    goals = dict.fromkeys(task.others, 1.0) if task.goals is None else task.goals
    return compare_with_first(f"{task.name}, per case", each, goals, agreements.__getitem__)


def _agreements(task: Task) -> dict[str, str]:
    ours = task.ours()
    return {name: task.agreement(ours, run()) for name, run in task.others.items()}


def _reading_alone(index: CaseIndex, *, has_nnunet: bool) -> Task:
    others: dict[str, Callable[[Case], Iterable[np.ndarray]]] = {
        NIBABEL: _with_nibabel,
        MONAI: partial(_with_monai, Compose(monai_patches.loaded(labels=False))),
    }
    if find_spec("SimpleITK"):
        others[ITK] = _with_itk
    if has_nnunet:
        others[f"{NNUNET}, SimpleITKIO"] = _with_nnunet
    return Task(
        name="read the four volumes",
        n_cases=len(index.cases),
        ours=partial(_each, lambda case: (volume.array for volume in _volumes(case)), index),
        others={name: partial(_each, read, index) for name, read in others.items()},
        agreement=_difference,
        goals={NIBABEL: 2.5, ITK: 0.95},
    )


def _normalising(index: CaseIndex, folder: Path, *, has_nnunet: bool) -> Task:
    steps = Compose(monai_patches.deterministic(labels=False))
    others: dict[str, Callable[[Case], Iterable[np.ndarray]]] = {MONAI: partial(_with_monai, steps)}
    if has_nnunet:
        prepare = nnunet_patches.case_preparer(folder, labels=False)
        others[f"{NNUNET}, DefaultPreprocessor"] = partial(prepare, output=None)
    return Task(
        name="read, crop and normalise",
        n_cases=len(index.cases),
        ours=partial(_each, _normalised, index),
        others={name: partial(_each, read, index) for name, read in others.items()},
        agreement=_difference,
        goals={MONAI: 4, f"{NNUNET}, DefaultPreprocessor": 3},
    )


def _each(read: Callable[[Case], Iterable[np.ndarray]], index: CaseIndex) -> list[np.ndarray]:
    """Return the volumes (X, Y, Z) of all cases."""
    return [array for case in index.cases for array in read(case)]


def _volumes(case: Case) -> list[Volume]:
    return [read_volume(case.path_of(scan), case_id=case.case_id) for scan in case.images]


def _normalised(case: Case) -> np.ndarray:
    return extract_brain(case.case_id, _volumes(case), None).image


def _with_nibabel(case: Case) -> list[np.ndarray]:
    return [np.asanyarray(nib.load(case.path_of(scan)).dataobj) for scan in case.images]


def _with_monai(steps: Compose, case: Case) -> np.ndarray:
    array: np.ndarray = steps(monai_patches.item(case, labels=False))["image"].numpy()
    return array


def _with_itk(case: Case) -> list[np.ndarray]:
    import SimpleITK

    images = (SimpleITK.ReadImage(str(case.path_of(scan))) for scan in case.images)
    # the axes of ITK are Z, Y, X
    return [SimpleITK.GetArrayFromImage(image).transpose() for image in images]


def _with_nnunet(case: Case) -> list[np.ndarray]:
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    arrays, _ = SimpleITKIO().read_images([str(case.path_of(scan)) for scan in case.images])
    return [array.transpose() for array in arrays]


def _preparing(index: CaseIndex, folder: Path) -> Task:
    prepare = nnunet_patches.case_preparer(folder / "nnunet", labels=True)
    name = f"{NNUNET}, DefaultPreprocessor"

    def theirs(*, writes: bool) -> list[np.ndarray]:
        # it cannot replace what it has written
        output = Path(tempfile.mkdtemp(dir=folder)) if writes else None
        images = [prepare(case, output=output) for case in index.cases]
        return [image for image in images if image is not None]

    return Task(
        name="prepare",
        n_cases=len(index.cases),
        ours=partial(_prepare, index, folder / "ours"),
        others={
            f"{name}, writes nothing": partial(theirs, writes=False),
            name: partial(theirs, writes=True),
        },
        # what nnU-Net writes is not read again
        agreement=lambda ours, others: _difference(ours(), others) if others else "",
    )


def _prepare(index: CaseIndex, folder: Path) -> Callable[[], list[np.ndarray]]:
    """Prepare the cases in a new folder; return a function that reads them."""
    folder.mkdir(exist_ok=True)
    output = Path(tempfile.mkdtemp(dir=folder))
    failures = prepare_cases(index.cases, output, StoreConfig())
    if failures:
        raise RuntimeError(failures[0].message)

    def read() -> list[np.ndarray]:
        cases = (open_case(output, case.case_id) for case in index.cases)
        return [Box.at((0, 0, 0), case.shape).read(case.image) for case in cases]

    return read


def _scoring(index: CaseIndex, folder: Path) -> Iterator[Task]:
    reference, prediction = folder / "reference", folder / "prediction"
    for path in (reference, prediction):
        path.mkdir()
    for case_id, label in _label_maps(index):
        # enhancing tumour is 3 since 2023
        array = np.where(label.array == 4, 3, label.array).astype(np.uint8)
        write_volume(reference / f"{case_id}.nii.gz", array, label.geometry)
        write_volume(prediction / f"{case_id}.nii.gz", _moved(array), label.geometry)
    ours = partial(_score, reference, prediction, folder / "scores.csv")
    mist = partial(score_with_mist, reference, prediction, folder / "mist.csv")
    whole: dict[str, Callable[[], Scores]] = {}
    lesions: dict[str, Callable[[], Scores]] = {}
    matched: dict[str, Callable[[], Scores]] = {}
    if find_spec("nnunetv2"):
        scored = partial(score_with_nnunet, reference, prediction)
        whole[f"{NNUNET}, compute_metrics, Dice only"] = scored
    if find_spec("mist"):
        name = f"mist-medical {version_of('mist-medical')}, Evaluator"
        whole[name] = partial(mist, lesions=False)
        lesions[name] = partial(mist, lesions=True)
    if find_spec("brats_evaluation"):
        name = f"brats-evaluation {version_of('brats-evaluation')}"
        matched[name] = partial(score_with_organisers, reference, prediction, folder)
    for title, protocol, others in (
        ("score whole regions, Dice and HD95", "legacy", whole),
        ("score whole regions and lesions, Dice and HD95", "lesionwise2023", lesions),
        ("score regions and matched lesions, Dice, HD95 and NSD", "brats2025", matched),
    ):
        yield Task(
            name=title,
            n_cases=len(index.cases),
            ours=partial(ours, protocol),
            others=others,
            agreement=_score_difference,
        )


def _label_maps(index: CaseIndex) -> Iterator[tuple[str, Volume]]:
    for case in index.cases:
        if case.label is not None:
            yield case.case_id, read_label_map(case.path_of(case.label), case_id=case.case_id)


def _moved(labels: np.ndarray) -> np.ndarray:
    """Return a prediction that differs a little from a label map."""
    predicted = np.roll(labels, MOVED_BY, axis=(0, 1, 2))
    corner = [n // 4 for n in labels.shape]
    predicted[tuple(slice(start, start + FALSE_LESION) for start in corner)] = OEDEMA
    return predicted


def _score(reference: Path, prediction: Path, output: Path, protocol: str) -> Scores:
    found = score_folders(reference, prediction, output, protocol_named(protocol))
    if found.failures:
        raise RuntimeError(found.failures[0].message)
    return {
        (row["case_id"], row["region"], column): row[column]
        for row in found.scores.to_dict("records")
        for column in score_columns(found.scores)
    }


def _score_difference(ours: Scores, theirs: Scores) -> str:
    """Return the three scores that differ most, of those that both have, in mm for HD95."""
    sides = pd.DataFrame({"ours": ours, "theirs": theirs}).loc[list(theirs)]
    # a score that is no number, or infinite, on one side alone shows
    gaps = sides.replace({np.nan: -1.0, np.inf: 1e9}).diff(axis=1)["theirs"].abs()
    largest = gaps.groupby(level=2).max().nlargest(3)
    return ", ".join(f"{name} differs by at most {gap:.1e}" for name, gap in largest.items())


def _reading(index: CaseIndex) -> Task:
    return Task(
        name="read and check the scans to predict",
        n_cases=len(index.cases),
        ours=partial(_each, _checked, index),
        others={f"{NIBABEL}, dataobj, no checks": partial(_each, _with_nibabel, index)},
        agreement=_difference,
    )


def _checked(case: Case) -> Iterator[np.ndarray]:
    return (volume.array for volume in load_case(case, with_label=False).volumes)


def _writing(index: CaseIndex, folder: Path) -> Task:
    label_maps = [label for _, label in _label_maps(index)]
    return Task(
        name="write a label map",
        n_cases=len(label_maps),
        ours=partial(_write, label_maps, folder / "ours.nii.gz"),
        others={f"{NIBABEL}, save": partial(_write_nibabel, label_maps, folder / "nibabel.nii.gz")},
        agreement=_files_difference,
    )


def _write(label_maps: Sequence[Volume], path: Path) -> Path:
    for label in label_maps:
        write_volume(path, label.array, label.geometry)
    return path


def _write_nibabel(label_maps: Sequence[Volume], path: Path) -> Path:
    for label in label_maps:
        nib.save(nib.Nifti1Image(label.array, label.geometry.affine), path)
    return path


def _files_difference(ours: Path, theirs: Path) -> str:
    arrays = [[np.asanyarray(nib.load(path).dataobj)] for path in (ours, theirs)]
    share = ours.stat().st_size / theirs.stat().st_size
    return f"{_difference(*arrays)}, {share:.2f} of its bytes"


def _difference(ours: Sequence[np.ndarray], theirs: Sequence[np.ndarray]) -> str:
    largest = 0.0
    for one, other in zip(ours, theirs, strict=True):
        if one.shape != other.shape:
            return f"another crop: {other.shape} instead of {one.shape}"
        largest = max(largest, float(np.abs(one.astype(np.float64) - other).max()))
    return f"largest difference {largest:.1e}"


if __name__ == "__main__":
    main()
