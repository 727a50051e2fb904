"""Time the reading of the four volumes of a case, and compare it with nibabel.

Both run in turn in one process and one thread, with files in the page cache. Shown are the median
CPU time over rounds, and the median over rounds of the ratio.

    python benchmarks/read_case.py ../scans --cases 5

Without a folder, here or in BRATS_REAL_DATA, a phantom case of full size is generated.
"""

import argparse
import os
import statistics
import tempfile
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import process_time

import nibabel as nib
import numpy as np

from brats_seg.cases.discovery import find_cases
from brats_seg.cases.nifti import read_volume
from brats_seg.cases.phantom import write_phantom_cases


def main() -> None:
    """Print one line per case, and one for all of them."""
    arguments = _arguments()
    with _data_folder(arguments.data) as root:
        cases = [
            [root / scan.path for scan in case.images]
            for case in find_cases(root).cases
            if case.usable and all(scan.volume is None for scan in case.images)
        ][: arguments.cases]
        print(f"{'four volumes of':28}  nibabel CPU ms  ours CPU ms   ratio")
        ratios = [_print_line(paths, arguments.rounds) for paths in cases]
    print(f"{'median':28}  {'':14}  {'':11}  {statistics.median(ratios):5.2f}x")


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", nargs="?", default=os.environ.get("BRATS_REAL_DATA"))
    parser.add_argument("--cases", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=7)
    return parser.parse_args()


@contextmanager
def _data_folder(given: str | None) -> Iterator[Path]:
    if given:
        yield Path(given)
        return
    with tempfile.TemporaryDirectory() as folder:
        write_phantom_cases(Path(folder), n_cases=1, seed=0, shape=(240, 240, 155))
        yield Path(folder)


def _print_line(paths: Sequence[Path], rounds: int) -> float:
    """Time one case and return the ratio of nibabel's time to ours."""
    for path in paths:
        # also the warm-up
        np.testing.assert_array_equal(_read_ours(path), _read_nibabel(path))
    theirs, ours = [], []
    for _ in range(rounds):
        theirs.append(_seconds(_read_nibabel, paths))
        ours.append(_seconds(_read_ours, paths))
    ratio = statistics.median(a / b for a, b in zip(theirs, ours, strict=True))
    theirs_ms, ours_ms = (1e3 * statistics.median(seconds) for seconds in (theirs, ours))
    print(f"{paths[0].parent.name[:28]:28}  {theirs_ms:14.0f}  {ours_ms:11.0f}  {ratio:5.2f}x")
    return ratio


def _seconds(read: Callable[[Path], object], paths: Sequence[Path]) -> float:
    start = process_time()
    volumes = [read(path) for path in paths]
    elapsed = process_time() - start
    del volumes
    return elapsed


def _read_nibabel(path: Path) -> np.ndarray:
    return np.asanyarray(nib.load(path).dataobj)


def _read_ours(path: Path) -> np.ndarray:
    return read_volume(path, case_id=path.parent.name).array


if __name__ == "__main__":
    main()
