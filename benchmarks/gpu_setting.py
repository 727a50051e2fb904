"""Hold what benchmarks of steps share: the device, the sizes, and runs at their beginning."""

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

from brats_seg.cases.folds import Split
from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData
from brats_seg.data.loader import Sample
from brats_seg.errors import BratsError
from brats_seg.runtime.device import Device, choose_device, native_dtype
from brats_seg.runtime.memory import give_back_memory, peak_memory_mb, reset_peak_memory
from brats_seg.training import accumulation
from brats_seg.training.certificate import phantom_patches
from brats_seg.training.losses import build_task, count_voxels
from brats_seg.training.ranks import Ranks
from brats_seg.training.run_plan import Batch, RunPlan
from brats_seg.training.state import RunState, new_state
from brats_seg.voxels.box import Triple

DTYPES = {"fp32": None, "bf16": torch.bfloat16, "fp16": torch.float16}
CLOCK = time.perf_counter


def make_step(state: RunState, batch: Batch) -> accumulation.StepResult:
    """Make one optimizer step of a run."""
    return accumulation.make_step(state.accumulator, state.fallback, batch, count_voxels)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """The device, and the size of what is computed on it."""

    device: torch.device
    patch: Triple = (128, 128, 128)
    scan: Triple = (240, 240, 155)
    model: tuple[str, ...] = ()
    """Settings in which the network differs from the default."""
    n_rounds: int = 7
    n_scans: int = 4
    n_steps: int = 100
    """Steps that patches are loaded for."""
    n_half_steps: int = 20
    """Steps of training in float16."""

    @property
    def precisions(self) -> list[str]:
        """Precisions that the device computes natively."""
        half = native_dtype(self.device)
        on_gpu = self.device.type == "cuda"
        return [
            name
            for name, dtype in DTYPES.items()
            if dtype in (None, half) or (on_gpu and dtype is torch.float16)
        ]

    @property
    def fastest(self) -> str:
        """The native half precision, in which most is measured; fp32 without one."""
        return self.precisions[1] if len(self.precisions) > 1 else "fp32"

    def config(self, *changes: str) -> Config:
        """Return the settings of a run."""
        size = f"patch.size={','.join(map(str, self.patch))}"
        return load_config(assignments=[size, *self.model, *changes])

    def state(self, precision: str, *changes: str, ranks: Ranks | None = None) -> RunState:
        """Return a run at its beginning; its weights depend on the seed alone."""
        config = self.config(*changes)
        data = FoldData(
            folder=Path(),
            split=Split(train=(), validation=()),
            conventions=(),
            fingerprint="",
            largest_shape=self.patch,
        )
        plan = RunPlan(
            config=config,
            data=data,
            device=Device(torch_device=self.device, autocast_dtype=DTYPES[precision]),
            patch=self.patch,
            multiple=(1, 1, 1),
            task=build_task(config),
            window_size=self.patch,
        )
        return new_state(plan, ranks=ranks or Ranks())

    def synchronised(self, run: Callable[[], object]) -> Callable[[], object]:
        """Return a function that waits for the device."""

        def waiting() -> object:
            result = run()
            if self.device.type == "cuda":
                torch.cuda.synchronize()
            return result

        return waiting

    def goal(self, least: float) -> float | None:
        """Return a goal that is one of GPUs only."""
        return least if self.device.type == "cuda" else None

    def batch(self, n_patches: int) -> Batch:
        """Make phantom patches in the types in which patches are read."""
        patches = phantom_patches(n_patches, self.patch)
        pairs = zip(patches.image.half(), patches.target.to(torch.uint8), strict=True)
        return Batch(samples=tuple(Sample(image=i, target=t, case_id="") for i, t in pairs))

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds of a run."""
        started_s = CLOCK()
        self.synchronised(run)()
        return CLOCK() - started_s

    def peak_gib(self, run: Callable[[], object]) -> float:
        """Return the peak memory of torch on a GPU during a run; on the CPU that of the process."""
        give_back_memory(self.device)
        reset_peak_memory(self.device)
        self.synchronised(run)()
        return peak_memory_mb(self.device) / 1024


TINY = {
    "patch": (16, 16, 16),
    "scan": (32, 32, 20),
    "model": ("model.widths=[4,8,16]", "training.n_workers=0"),
    "n_rounds": 2,
    "n_steps": 4,
    "n_half_steps": 4,
}


def setting_of(device_name: str, *, tiny: bool) -> Setting:
    """Return the setting of a device, or a tiny one that tests the programs."""
    device = torch.device(device_name)
    if device.type == "cuda" and device.index is None:
        device = torch.device("cuda", 0)
    try:
        choose_device(str(device), "fp32")
    except BratsError as error:
        msg = f"{error} --tiny, which tests the program"
        raise SystemExit(msg) from None
    return Setting(device=device, **(TINY if tiny else {}))


def predicted(network: nn.Module, device: Device, image: Tensor) -> Tensor:
    """Return the logits of images on the device, in its precision."""
    with device.autocast():
        logits: Tensor = network(image)
    return logits
