"""Measure how time and memory grow with the number of cases, from 10 to 10,000.

The volumes are tiny, so that what is shown is the cost of the tables around the voxels: index, folds,
prepared cases, a fold that is opened again, scores, and the records of a batch of predictions. Each size
is measured in a process of its own. Linear means that the time of a case stays, and near copies are the
exception: new scans are compared with all others.

    python benchmarks/scale.py --sizes 10 100 1000 10000
"""

import resource
import tempfile
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time

from comparison import Comparison, append_json, in_a_process, options_of

from brats_seg.cases.index import read_index
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.config import load_config
from brats_seg.data.fold import open_fold, open_index, prepare_data
from brats_seg.evaluation.evaluate import score_folders
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.inference.results import OutputFolder, Record
from brats_seg.inference.settings import DEFAULT_SETTINGS
from brats_seg.voxels.regions import PARTS, PartVolume

EDGE = 24
"""Voxels of a phantom along each axis."""
LEAST_GROWTH = 0.67
"""Smallest ratio of the time of a case among few to that among ten times as many."""


def main() -> None:
    """Print the time of a case by stage and size, and how much it grows."""
    arguments = options_of(__doc__, sizes=[10, 100, 1000])
    found = {size: _costs_of(size) for size in arguments.sizes}
    sizes = list(found)
    print(f"{'ms of CPU a case; peak MB added':34}" + "".join(f"{n:>16,}" for n in sizes))
    for stage in found[sizes[0]]:
        cells = (f"{found[n][stage][0]:9.2f} {found[n][stage][1]:6.0f}" for n in sizes)
        print(f"{stage:34}" + "".join(map("{:>16}".format, cells)))
    append_json(_growth(found), arguments.json)


def _costs_of(size: int) -> dict[str, tuple[float, float]]:
    with tempfile.TemporaryDirectory() as folder:
        return in_a_process(_measured, Path(folder), size)


def _measured(folder: Path, size: int) -> dict[str, tuple[float, float]]:
    """Return the milliseconds a case and the peak memory in MB that each stage adds."""
    data = folder / "data"
    write_phantom_cases(data, n_cases=size, seed=0, shape=(EDGE, EDGE, EDGE))
    config = load_config(values={"folds.n_folds": 2})
    table, ready = folder / "cases.csv", folder / "prepared"
    results = OutputFolder(folder / "results")
    results.path.mkdir()
    index = partial(open_index, data, table, config)
    stages: dict[str, Callable[[], object]] = {
        "index": index,
        "index, nothing changed": index,
        "read the table of cases": partial(read_index, table, data),
        "folds and prepare": partial(prepare_data, data, config=config, prepared_path=ready),
        "open a fold that is prepared": partial(
            open_fold, data, fold=0, config=config, prepared_path=ready
        ),
        "score": partial(
            score_folders, data, data, folder / "scores.csv", protocol_named("legacy")
        ),
        "append records of a batch": partial(_append, results, size),
        "read records": lambda: OutputFolder(results.path).records(),
        "tables of a batch": partial(results.write_tables, ()),
    }
    return {stage: _cost(run, size) for stage, run in stages.items()}


def _cost(run: Callable[[], object], size: int) -> tuple[float, float]:
    before_kb, started_s = _peak_kb(), process_time()
    run()
    return 1e3 * (process_time() - started_s) / size, (_peak_kb() - before_kb) / 1e3


def _peak_kb() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def _append(results: OutputFolder, size: int) -> None:
    """Append a record of each case, as `predict` does."""
    volumes = tuple(PartVolume(name=part, ml=1.0, n_components=1) for part in PARTS)
    for number in range(size):
        case_id = f"BraTS2021_{number:05d}"
        results.append(
            Record(
                case_id=case_id,
                key=f"{number:032x}",
                inputs=(f"{number:064x}",) * 4,
                model="0" * 16,
                settings=DEFAULT_SETTINGS,
                outputs=(f"{case_id}.nii.gz",),
                convention="brats2017",
                volumes=volumes,
                files={},
                seconds=1.0,
                peak_memory_mb=1.0,
                device="cpu",
                version="0",
            )
        )


def _growth(found: dict[int, dict[str, tuple[float, float]]]) -> list[Comparison]:
    """Compare the time of a case at the largest size with that at a tenth of it or less."""
    *smaller, largest = sorted(found)
    if not smaller:
        return []
    size = max((n for n in smaller if 10 * n <= largest), default=smaller[0])
    return [
        Comparison(
            task=f"{stage}, {largest:,} cases",
            ours=f"{found[largest][stage][0]:.2f} ms a case",
            peer=f"brats_seg, {size:,} cases",
            theirs=f"{found[size][stage][0]:.2f} ms a case",
            ratios=(found[size][stage][0] / found[largest][stage][0],),
            least=LEAST_GROWTH,
        )
        for stage in found[largest]
    ]


if __name__ == "__main__":
    main()
