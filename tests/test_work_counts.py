"""The work of the hot paths is counted, in numbers that do not depend on the machine.

Each limit is a little above the count of today and below twice that: a path that does its work twice
fails, and so does a limit that a faster path has left far behind. Costs in seconds are measured by
`benchmarks/`.
"""

import subprocess
import sys
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from brats_seg.cases.case import case_of_arrays
from brats_seg.cases.index import index_cases
from brats_seg.config import ModelConfig, StoreConfig
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import PatchDataset
from brats_seg.data.prepare import prepare_cases
from brats_seg.inference.batch import predict_folder
from brats_seg.inference.method import prepare_scan
from brats_seg.inference.predict import Predictor
from brats_seg.inference.settings import PredictionSettings
from brats_seg.models.build import build_model
from brats_seg.models.unet import UNet
from brats_seg.runtime.device import Device
from brats_seg.runtime.windows import Window
from brats_seg.training.accumulation import Accumulator
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.losses import BatchDiceBce, Criterion, DiceBce, count_voxels
from brats_seg.voxels.box import Box
from tests.builders import BRATS_AFFINE, make_volumes, write_case
from tests.inference_builders import make_model, write_run
from tests.training_builders import tiny_settings, train

IO = Path("/proc/self/io")
MEGABYTE = 1e6
SHAPE = (80, 80, 64)
"""Voxels of the scans: large enough that their files are larger than all that is read beside them."""
IDS = ((0, "BraTS2021_00000"), (1, "BraTS2021_00001"))


def check(counts: Mapping[str, float], limits: Mapping[str, float]) -> None:
    """Fail with the counts that are above their limits, or so low that twice as much would pass."""
    assert counts.keys() == limits.keys(), "expected a limit for each count that is not 0"
    for name, count in counts.items():
        assert count <= limits[name], f"more work than before: {name}"
        assert 2 * count > limits[name], f"twice the work would pass: lower the limit of {name}"


def test_more_work_and_limits_that_would_let_it_pass_are_named() -> None:
    with pytest.raises(AssertionError, match="more work than before: kernels"):
        check({"kernels": 12, "files": 4}, {"kernels": 11, "files": 4})
    with pytest.raises(AssertionError, match="lower the limit of files"):
        check({"kernels": 10, "files": 4}, {"kernels": 11, "files": 8})


class Kernels(TorchDispatchMode):
    """Counts the kernels that torch calls, and the memory that they allocate for their results."""

    def __init__(self) -> None:
        super().__init__()
        self.names: Counter[str] = Counter()
        self.n_bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        name = func.overloadpacket.__name__
        # what returns no tensor asks for a property, or reads a number
        if name == "_local_scalar_dense" or (_storages(result) and not func.is_view):
            self.names[name] += 1
            known = {storage.data_ptr() for storage in _storages(args)}
            self.n_bytes += sum(s.nbytes() for s in _storages(result) if s.data_ptr() not in known)
        return result

    def counts(self) -> dict[str, float]:
        gradients = self.names["convolution_backward"]
        convolutions = sum(n for name, n in self.names.items() if name.startswith("conv"))
        counts = {
            "kernels": self.names.total(),
            "convolutions": convolutions - gradients,
            "gradients of convolutions": gradients,
            "copies": sum(self.names[name] for name in ("copy_", "_to_copy", "clone")),
            "numbers that the host waits for": self.names["_local_scalar_dense"],
            "megabytes": self.n_bytes / MEGABYTE,
        }
        return {name: count for name, count in counts.items() if count}


def _storages(values: object) -> list[torch.UntypedStorage]:
    return [leaf.untyped_storage() for leaf in tree_leaves(values) if isinstance(leaf, Tensor)]


def step_of(criterion: Criterion, dtype: torch.dtype | None) -> Callable[[], object]:
    torch.manual_seed(0)
    patch = (16, 16, 16)
    network = build_model(ModelConfig(widths=(4, 8, 16)), patch)
    accumulator = Accumulator(
        network,
        criterion,
        torch.optim.AdamW(network.parameters()),
        device=Device(torch_device=torch.device("cpu"), autocast_dtype=dtype),
        clip_norm=12.0,
    )
    patches = phantom_patches(3, patch)
    parts = zip(patches.image.split(1), patches.target.split(1), strict=True)
    micro_batches = [MicroBatch(*pair) for pair in parts]
    # the first step checks the network, and allocates the state of the optimizer
    accumulator.step(micro_batches, count_voxels)
    return lambda: accumulator.step(micro_batches, count_voxels)


_NAMES = (
    *("kernels", "convolutions", "gradients of convolutions", "copies"),
    *("numbers that the host waits for", "megabytes"),
)
STEP_LIMITS = {
    name: {key: limit for key, limit in zip(_NAMES, limits, strict=True) if limit}
    for name, limits in {
        "fp32": (1482, 45, 45, 0, 42, 20.9),
        "bf16": (1370, 45, 45, 135, 45, 6.5),
        "fp32, batch Dice": (1720, 75, 45, 7, 50, 25.5),
        "bf16, batch Dice": (1590, 75, 45, 172, 50, 7.6),
    }.items()
}
"""Of 15 convolutions, 3 patches; batch Dice computes two of the three forward passes twice. In float32,
images are copied into slabs for a kernel that takes a tenth of the time, and whose own buffers of 27
times the image are not counted here; with AVX2 alone, zeros are added to some for their gradients."""


@pytest.mark.parametrize("name", STEP_LIMITS)
def test_a_training_step_calls_no_more_kernels_and_allocates_no_more_memory(name: str) -> None:
    criterion: Criterion = BatchDiceBce() if "batch Dice" in name else DiceBce()
    step = step_of(criterion, torch.bfloat16 if "bf16" in name else None)
    with Kernels() as kernels:
        step()
    check(kernels.counts(), STEP_LIMITS[name])


@contextmanager
def counted_calls(
    monkeypatch: pytest.MonkeyPatch, owner: type, name: str, counts: Counter[str]
) -> Iterator[None]:
    """Count the calls of a method as `Owner.name`, and the bytes of the arrays that it returns."""
    method, key = getattr(owner, name), f"{owner.__name__}.{name}"

    def counting(self: object, *args: object, **kwargs: object) -> object:
        result = method(self, *args, **kwargs)
        counts[key] += 1
        counts[f"bytes of {key}"] += getattr(result, "nbytes", 0)
        return result

    with monkeypatch.context() as patched:
        patched.setattr(owner, name, counting)
        yield


_listeners: list[tuple[str, Counter[str]]] = []
"""An audit hook cannot be removed: this one does nothing unless a test listens."""


def _hear(event: str, arguments: tuple[object, ...]) -> None:
    for start, counts in _listeners if event == "open" else ():
        if str(arguments[0]).startswith(start):
            counts[str(arguments[0])] += 1


@pytest.fixture(scope="module", autouse=True)
def _hook() -> None:
    sys.addaudithook(_hear)


@contextmanager
def opened_below(folder: Path) -> Iterator[Counter[str]]:
    listener = f"{folder}/", Counter[str]()
    _listeners.append(listener)
    try:
        yield listener[1]
    finally:
        _listeners.remove(listener)


def bytes_read() -> int:
    if not IO.exists():
        pytest.skip("this system does not count the bytes that a process reads")
    return int(IO.read_text().split()[1])


def size_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def check_files(work: Callable[[], object], scans: Path, output: Path, *limits: float) -> None:
    """Check the files that the work on the scans of a case opens and reads, results left out."""
    before, size = bytes_read(), size_of(output)
    with opened_below(scans) as opened, opened_below(output) as written:
        work()
    n_read = bytes_read() - before - (size_of(output) - size)
    counts = {"scans opened": opened.total(), "files of the output opened": written.total()}
    counts["bytes read per byte of the scans"] = n_read / size_of(scans)
    check(counts, dict(zip(counts, limits, strict=True)))


def test_work_of_an_epoch(data: FoldData, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four cases, two patches each, and a validation of the two held-out cases in windows."""
    config = tiny_settings("training.n_epochs=1", "patch.per_case=2", "training.effective_batch=4")
    counts = Counter[str]()
    with (
        counted_calls(monkeypatch, PatchDataset, "__getitem__", counts),
        counted_calls(monkeypatch, Box, "read", counts),
        counted_calls(monkeypatch, UNet, "forward", counts),
        opened_below(data.folder) as opened,
    ):
        train(data, tmp_path / "run", config)
    limits = {
        "PatchDataset.__getitem__": 8,
        # one for each patch, three to test that patches are independent, eight windows a case
        "UNet.forward": 8 + 3 + 2 * 8,
        "Box.read": 28,
        "bytes of Box.read": 192_000,
        "prepared files opened": 160,
    }
    counts["prepared files opened"] = opened.total()
    check({name: counts[name] for name in limits}, limits)


def test_preparing_a_case_opens_and_reads_no_more_files(tmp_path: Path) -> None:
    folders = [write_case(tmp_path / "scans", name, shape=SHAPE, seed=n) for n, name in IDS]
    first, second = index_cases(tmp_path / "scans").cases
    prepare = partial(
        prepare_cases, folder=tmp_path / "prepared", config=StoreConfig(), n_workers=0
    )
    prepare([first])
    check_files(partial(prepare, [second]), folders[1], tmp_path / "prepared", 9, 21, 3.0)


def test_predicting_a_case_opens_and_reads_no_more_files(tmp_path: Path) -> None:
    first, second = (write_case(tmp_path / name, name, shape=SHAPE).parent for _, name in IDS)
    settings = PredictionSettings(window="whole", preview=False)
    rest = [write_run(tmp_path / "run")], tmp_path / "out", settings
    predict_folder([first], *rest)
    check_files(lambda: predict_folder([second], *rest), second, tmp_path / "out", 6, 18, 2.6)


def test_predicting_a_case_calls_no_more_kernels_and_allocates_no_more_memory() -> None:
    """A crop of 23 x 23 x 15 in 2 x 2 windows of 16 x 16 x 16, by a small U-Net."""
    torch.manual_seed(0)
    network = build_model(ModelConfig(widths=(4, 8)), (16, 16, 16))
    scan = prepare_scan(case_of_arrays("case", make_volumes(), BRATS_AFFINE), (1.0, 1.0, 1.0))
    model = make_model(network, window=Window(size=(16, 16, 16), overlap=0.5))
    Predictor(model=model).predict_scan(scan)
    with Kernels() as kernels:
        Predictor(model=model).predict_scan(scan)
    check(kernels.counts(), {"kernels": 390, "convolutions": 36, "copies": 9, "megabytes": 8.2})


def test_help_imports_few_modules() -> None:
    program = (
        "import sys; from brats_seg.cli import app; app(['--help'], standalone_mode=False); "
        "print(len(sys.modules))"
    )
    shown = subprocess.check_output([sys.executable, "-c", program], text=True)
    check({"modules": int(shown.split()[-1])}, {"modules": 400})
