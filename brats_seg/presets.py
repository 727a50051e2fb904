"""Settings to start from, and the names that settings may have; those of a file only if they are known.

Help and completion of the command line show them without importing pydantic.
"""

import re
import reprlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from pathlib import Path
from typing import Any, Literal, get_args

from brats_seg.errors import UsageError

TaskName = Literal["segmentation", "reconstruction"]
ConventionName = Literal["brats2017", "brats2023", "brats2024", "brats2024-ped", "msd"]
FileFormat = Literal["safetensors", "bundle", "onnx"]
"""Formats of an exported model: weights alone, or with a MONAI bundle or ONNX files beside them."""
NETWORKS = ("unet", "notebook", "segresnet", "dynunet", "swin-unetr", "autoencoder")
"""Networks with a short name; any other is given by its dotted name."""
MONAI_NETWORKS = (
    *("AttentionUnet", "BasicUNet", "DynUNet", "HighResNet", "SegResNet", "SwinUNETR", "UNETR"),
    *("UNet", "VNet"),
)
"""Networks of MONAI that a file may name: they return logits, and none reads a file or fetches weights."""
MONAI_LOSSES = ("DiceCELoss", "DiceFocalLoss", "DiceLoss", "FocalLoss", "TverskyLoss")
"""Losses of MONAI that a file may name."""
GPU_NAMES = (
    *("t4", "p100", "v100", "v100-32gb", "l4", "a10g", "a100", "a100-80gb", "h100", "h200"),
    *("rtx3060", "rtx3090", "rtx4060", "rtx4090", "rtx5090"),
)
"""GPUs that can be planned for without having one; `runtime.device` knows their memory."""
LEARNING_RATES = {"adam": 1e-3, "adamw": 1e-3, "muon": 1e-2, "sgd": 1e-2}
"""Initial learning rate of each optimizer, where none is given."""
SHIPPED_START = "auto"
"""Value of `start.path` that takes the weights of the network that the package carries, where they fit; a run
starts from them where none are given."""
KINDS = (
    *("sample", "montage", "preview", "uncertainty"),
    *("scores", "distributions", "history"),
)
"""Kinds of figures that the command `figure` draws."""
SHORT = {
    "--network": ("model.name", f"Network: {', '.join(NETWORKS)}, or a dotted name"),
    "--patch": ("patch.size", "Voxels of a patch, X,Y,Z, or whole"),
    "--epochs": ("training.n_epochs", "Epochs to train"),
    "--hours": ("training.hours", "Hours to train for, in all sessions of the run"),
    "--effective-batch": ("training.effective_batch", "Patches per step: 8, or '{0: 8, 40: 16}'"),
    "--micro-batch": ("training.micro_batch", "Patches per forward pass"),
    "--seed": ("training.seed", "Seed of the run"),
    "--device": ("training.device", "Device: auto, cpu, cuda, cuda:1 or mps"),
    "--precision": ("training.precision", "Precision: auto, fp32, fp16 or bf16"),
    "--start-from": ("start.path", "Run or exported model to start from, none or auto"),
    "--convention": ("cases.labels", f"Label convention: {', '.join(get_args(ConventionName))}"),
    "--label-files": ("cases.label_files", "Pattern of label maps, such as '*_tumour.nii.gz'"),
    "--skip-bad": ("cases.skip_bad", "Skip cases with problems"),
}
"""Options that are short forms of settings: the key of each, and its help."""

NETWORK_DEFAULTS: dict[str, dict[str, Any]] = {
    # the autoencoder encodes whole brains; augmentation would have to be reconstructed as well
    "autoencoder": {
        "patch": {"size": "whole", "foreground": 0.0, "per_case": 1},
        # the rate of the optimizer that is used, and not that of a preset
        "optimizer": {"name": "adamw", "lr": None},
        "schedule": {"patience": 5},
        "training": {"effective_batch": 2, "augment": "none"},
        "validation": {"watch": "val_loss"},
    }
}
"""Defaults of single networks, applied over any preset."""
PRESETS: dict[str, dict[str, Any]] = {
    # phantom cases on two CPU cores, a few minutes
    "demo": {
        "folds": {"n_folds": 3},
        "patch": {"size": [40, 40, 40], "foreground": 0.5, "per_case": 4},
        "model": {"widths": [12, 24, 48]},
        "training": {"n_epochs": 16},
        "validation": {"every": 2},
    },
    # two to eight CPU cores, hours
    "cpu": {
        "patch": {"size": [64, 64, 64]},
        "model": {"widths": [16, 32, 64, 128, 160]},
        "validation": {"every": "auto", "overlap": 0.25},
    },
    # one 16 GB GPU without bf16, sessions of 12 hours
    "kaggle-t4": {
        "patch": {"size": [128, 128, 128], "per_case": 2},
        "validation": {"every": 5},
    },
    # the network and recipe of the Kaggle notebook, on patches instead of whole volumes
    "notebook": {
        "folds": {"n_folds": 7, "scheme": "notebook"},
        "patch": {"size": [128, 128, 128], "foreground": 0.0},
        "model": {"name": "notebook"},
        "optimizer": {"name": "adam", "lr": 5e-4, "weight_decay": 0.0, "clip_norm": None},
        "schedule": {"patience": 2, "cool_down": 0.0},
        "training": {"n_epochs": 50, "effective_batch": 4, "augment": "none"},
        "validation": {"watch": "val_loss"},
    },
    # the training recipe of nnU-Net
    "full": {
        "patch": {"size": [128, 128, 128], "per_case": 2},
        "optimizer": {"name": "sgd", "weight_decay": 3e-5},
        "schedule": {"name": "polynomial"},
        "training": {"n_epochs": 300, "effective_batch": 8, "augment": "full"},
        "validation": {"every": 10},
    },
}

_KNOWN = {
    *(None, *NETWORKS),
    *(f"monai.networks.nets.{name}" for name in MONAI_NETWORKS),
    *(f"monai.losses.{name}" for name in MONAI_LOSSES),
}
_ADDRESS = re.compile(r"^(pretrained|url|checkpoint)|(url|path|file|dir)$")
"""Names of arguments that say where something is read from."""
_MOST, _LARGEST = 256, 8192
"""Values of a list, and the largest number, in the arguments of a network or loss."""
TRUSTED: ContextVar[tuple[str, ...]] = ContextVar("trusted", default=())
"""Names of code that a person has typed; they are stored nowhere."""


@contextmanager
def trusting(*names: str) -> Iterator[None]:
    """Let files name these networks and losses too, because a person has typed their names."""
    token = TRUSTED.set((*TRUSTED.get(), *names))
    try:
        yield
    finally:
        TRUSTED.reset(token)


def check_stored(path: Path, name: str | None, arguments: Mapping[str, Any]) -> None:
    """Raise `UsageError` if a network, loss or transform that a file names is code that is not known."""
    if name in TRUSTED.get() or (name in _KNOWN and is_plain(arguments)):
        return
    msg = (
        f"{path} asks for code to be run: {name} with {reprlib.repr(arguments)}. Of the code that a "
        "file names, only known networks and losses of MONAI are called, with plain arguments. If you know whose "
        f"code this is, and trust it: brats-seg --trust-code {name} COMMAND"
    )
    raise UsageError(msg)


def is_plain(value: object, levels: int = 10) -> bool:
    """Return whether an argument from a file is made of numbers and words, without any address.

    Lists and mappings may have so many levels: a text of brackets must not exhaust the stack.
    """
    if isinstance(value, dict):
        has_address = any(_ADDRESS.search(str(name)) for name in value)
        return not has_address and is_plain([*value.values()], levels)
    if isinstance(value, list | tuple):
        return levels > 0 and len(value) <= _MOST and all(is_plain(v, levels - 1) for v in value)
    if isinstance(value, str):
        return bool(re.fullmatch(r"[\w-]*", value))
    return value is None or (isinstance(value, int | float) and abs(value) <= _LARGEST)
