"""Each wing can be deleted: the rest of the package is imported, and does its work without it."""

import shutil
import sys
from pathlib import Path

import pytest

from tests.builders import ROOT, start, write_case
from tests.inference_builders import write_run

WINGS = ("quality", "interop", "dicom", "pages", "survival")
PROGRAM = """
import importlib
import pkgutil
import sys
from importlib.util import find_spec
from pathlib import Path

gone, wings, copy, folder = sys.argv[1], sys.argv[2].split(), Path(sys.argv[3]), Path(sys.argv[4])
sys.path.insert(0, str(copy))
# an editable installation would find the wing in its own folder
sys.meta_path[:] = [one for one in sys.meta_path if "editable" not in str(one).lower()]
import brats_seg
assert find_spec(f"brats_seg.{gone}") is None
assert Path(brats_seg.__file__).is_relative_to(copy), brats_seg.__file__
for module in pkgutil.walk_packages(brats_seg.__path__, "brats_seg."):
    if module.name.split(".")[1] not in {*wings, "__main__"}:
        importlib.import_module(module.name)
from brats_seg import PredictionSettings, predict_folder
from brats_seg.cases.index import index_cases
from brats_seg.evaluation.evaluate import evaluate_pairs, find_pairs
from brats_seg.evaluation.protocols import protocol_named

index = index_cases(folder / "scans")
assert [case.usable for case in index.cases] == [True], index.cases[0].problems
settings = PredictionSettings(device="cpu", preview=False)
outcome = predict_folder([folder / "scans"], [folder / "run"], copy / "out", settings)
assert (len(outcome.predicted), outcome.failures) == (1, ()), outcome
evaluation = evaluate_pairs(find_pairs(folder / "scans", copy / "out"), protocol_named("legacy"))
assert (len(evaluation.scores), evaluation.failures) == (3, ()), evaluation

# the command finds the case finished; it ends the program
from brats_seg.cli import main

command = f"predict {folder}/scans -o {copy}/out --model {folder}/run --device cpu"
sys.argv[1:] = [*command.split(), "--set", "preview=false"]
main()
"""


@pytest.fixture(scope="module")
def inputs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("inputs")
    write_case(folder / "scans")
    write_run(folder / "run")
    return folder


@pytest.mark.slow
@pytest.mark.parametrize("wing", WINGS)
def test_the_core_works_without_a_wing(wing: str, inputs: Path, tmp_path: Path) -> None:
    leave_out = shutil.ignore_patterns("__pycache__", wing)
    shutil.copytree(ROOT / "brats_seg", tmp_path / "brats_seg", ignore=leave_out)
    assert not (tmp_path / "brats_seg" / wing).exists()
    program = [sys.executable, "-W", "ignore", "-c", PROGRAM]
    done = start([*program, wing, " ".join(WINGS), tmp_path, inputs], tmp_path)
    assert done.returncode == 0, done.stderr[-3000:]
