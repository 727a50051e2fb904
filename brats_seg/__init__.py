"""Train and use brain-tumour segmentation on the hardware people really have.

    from pathlib import Path
    from brats_seg import Trainer, load_config, open_fold

    config = load_config(preset="kaggle-t4", assignments=["training.n_epochs=20"])
    data = open_fold(Path("data/BraTS2021"), fold=0, config=config)
    Trainer(data=data, config=config, run_path=Path("runs/fold0")).run()

Research use only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from brats_seg.config import Config, load_config
    from brats_seg.data.fold import FoldData, open_fold
    from brats_seg.models.build import build_model
    from brats_seg.training.accumulation import Accumulator, StepResult
    from brats_seg.training.gradient import MicroBatch
    from brats_seg.training.losses import DiceBce
    from brats_seg.training.trainer import Outcome, Trainer

# importing torch takes seconds: a name is fetched when it is first used, so that the command
# line can show its help at once
_HOMES = {
    "Accumulator": "brats_seg.training.accumulation",
    "Config": "brats_seg.config",
    "DiceBce": "brats_seg.training.losses",
    "FoldData": "brats_seg.data.fold",
    "MicroBatch": "brats_seg.training.gradient",
    "Outcome": "brats_seg.training.trainer",
    "StepResult": "brats_seg.training.accumulation",
    "Trainer": "brats_seg.training.trainer",
    "build_model": "brats_seg.models.build",
    "load_config": "brats_seg.config",
    "open_fold": "brats_seg.data.fold",
}

__all__ = [
    "Accumulator",
    "Config",
    "DiceBce",
    "FoldData",
    "MicroBatch",
    "Outcome",
    "StepResult",
    "Trainer",
    "build_model",
    "load_config",
    "open_fold",
]


def __getattr__(name: str) -> object:
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES[name]), name)
