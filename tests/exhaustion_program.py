"""A run in a process of its own, whose address space may be limited: see `test_out_of_memory.py`.

    python -m tests.exhaustion_program SCANS RUN LIMIT_MB [SETTING ...]

LIMIT_MB is what the run may take beside what the process holds before it; 0 is no limit. Prints
what it took at most, in MB, and the modes that it was on.
"""

import json
import resource
import sys
from pathlib import Path

import numpy as np
import torch
from torch import nn

from brats_seg import Trainer, load_config, open_fold
from brats_seg.progress import untracked
from brats_seg.runtime.memory import MEGABYTE, keep_to_limit_of_address_space


def space_mb(name: str) -> float:
    return int(Path("/proc/self/status").read_text().partition(f"{name}:")[2].split()[0]) / 1024


def warm_up() -> None:
    """Load kernels and start threads, whose memory is not that of a run."""
    image = torch.zeros(2, 4, 8, 8, 8)
    nn.Sequential(nn.Conv3d(4, 4, 3), nn.Conv3d(4, 4, 2, 2))(image).sum().backward()
    # numpy's linear algebra takes its buffers once
    np.corrcoef(np.eye(64))


def main() -> None:
    scans, run_path, limit_mb, *settings = sys.argv[1:]
    torch.set_num_threads(1)
    if float(limit_mb):
        # as under `ulimit -v`, where a run finds a limit before its first kernel
        resource.setrlimit(resource.RLIMIT_AS, (2**46, resource.RLIM_INFINITY))
        keep_to_limit_of_address_space()
    config = load_config(assignments=settings)
    data = open_fold(Path(scans), fold=0, config=config, prepared_path=Path(scans) / "prepared")
    trainer = Trainer(data=data, config=config, run_path=Path(run_path))
    warm_up()
    before_mb = space_mb("VmSize")
    if float(limit_mb):
        most = int((before_mb + float(limit_mb)) * MEGABYTE)
        resource.setrlimit(resource.RLIMIT_AS, (most, most))
    outcome = trainer.run(track=untracked)
    taken_mb = space_mb("VmPeak") - before_mb
    mode = str(trainer.state.fallback.mode)
    result = {"taken_mb": taken_mb, "mode": mode, "finished": outcome.finished}
    sys.stdout.write(json.dumps(result))


if __name__ == "__main__":
    main()
