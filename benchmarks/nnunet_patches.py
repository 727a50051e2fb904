"""Prepare cases, make patches and train with nnU-Net, as its users do: its planner, loader and trainer."""

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.folds import Split
from brats_seg.models.unet import level_strides

_DATASET = "Dataset501_BraTS"
_CONFIGURATION = "3d_fullres"
_MODALITIES = ("T1", "T1c", "T2", "FLAIR")
_EPOCHS = 16
"""Epochs of a training, after each of which nnU-Net lowers its rate."""


def is_installed() -> bool:
    """Return whether nnU-Net can be imported; print a line if it cannot."""
    found = importlib.util.find_spec("nnunetv2") is not None
    if not found:
        print("nnU-Net is not installed: its rows are left out (see benchmarks/peers.txt)")
    return found


def preprocess(
    index: CaseIndex,
    folder: Path,
    size: tuple[int, int, int] | None,
    widths: Sequence[int] | None = None,
) -> None:
    """Let nnU-Net plan and preprocess the cases of an index, in its own processes.

    Args:
        index: Labelled cases of BraTS, whose scans are `.nii.gz`.
        folder: Folder for all files of nnU-Net.
        size: Voxels of a training patch in the plans; None plans, and preprocesses no case.
        widths: Channels of each level of the network; None leaves the planned one.
    """
    raw = folder / "raw" / _DATASET
    for name in ("imagesTr", "labelsTr"):
        (raw / name).mkdir(parents=True)
    for case in index.cases:
        _write_raw(index, case, raw)
    description = {
        "channel_names": dict(enumerate(_MODALITIES)),
        "labels": {"background": 0, "wt": [1, 2, 3], "tc": [1, 3], "et": [3]},
        "regions_class_order": [2, 1, 3],
        "numTraining": len(index.cases),
        "file_ending": ".nii.gz",
    }
    (raw / "dataset.json").write_text(json.dumps(description))
    _set_folders(folder)
    if size is None:
        _run("--no_pp")
        return
    _run()
    plans = json.loads(plans_path(folder).read_text())
    plan = plans["configurations"][_CONFIGURATION]
    plan["patch_size"] = list(size)
    if widths is not None:
        set_network(plan, widths, level_strides(size, len(widths)))
    plans_path(folder).write_text(json.dumps(plans))


def set_network(
    plan: dict[str, Any], widths: Sequence[int], strides: Sequence[Sequence[int]]
) -> None:
    """Set the network of a configuration of the plans: channels and strides of its levels."""
    plan["architecture"]["arch_kwargs"] |= {
        "n_stages": len(widths),
        "features_per_stage": list(widths),
        "kernel_sizes": [[3, 3, 3]] * len(widths),
        "strides": list(strides),
        "n_conv_per_stage": [2] * len(widths),
        "n_conv_per_stage_decoder": [2] * (len(widths) - 1),
    }


def train(folder: Path, split: Split, n_patches: int, model: Path) -> None:
    """Train on the cases of a split with nnU-Net's recipe; `model` is then a folder that it predicts with.

    The rate falls by nnU-Net's polynomial to the end of the given number of patches.
    """
    splits = plans_path(folder).with_name("splits_final.json")
    splits.write_text(json.dumps([{"train": split.train, "val": split.validation}]))
    made = trainer(folder, fold=0, n_epochs=_EPOCHS)
    made.num_iterations_per_epoch = n_patches // (_EPOCHS * made.batch_size)
    made.num_val_iterations_per_epoch = 1
    made.output_folder_base, made.output_folder = str(model), str(model / "fold_0")
    (model / "fold_0").mkdir(parents=True, exist_ok=True)
    made.run_training()


def trainer(folder: Path, *, fold: int | str = "all", n_epochs: int = 1000) -> Any:
    """Return nnU-Net's trainer of the preprocessed cases, which loads in this process."""
    _set_folders(folder)
    import torch
    from nnunetv2.training.nnUNetTrainer.nnUNetTrainer import nnUNetTrainer

    plans = {**json.loads(plans_path(folder).read_text()), "continue_training": False}
    description = json.loads((plans_path(folder).parent / "dataset.json").read_text())
    made = nnUNetTrainer(plans, _CONFIGURATION, fold, description, torch.device("cpu"))
    made.num_epochs = n_epochs
    made.initialize()
    # 0 processes, which means this one, are refused by the planner
    os.environ.update(nnUNet_n_proc_DA="0")
    return made


def training_patches(made: Any) -> tuple[Callable[[], object], int]:
    """Return a function that makes the batch of a training step, and its number of patches."""
    loader, _ = made.get_dataloaders()
    return lambda: next(loader), made.batch_size


def cropped_patches(made: Any) -> tuple[Callable[[], object], int]:
    """Return a function that makes a batch of patches that are read and not augmented."""
    _, validation = made.get_dataloaders()
    loader = validation.data_loader
    loader.transforms = None
    return lambda: next(loader), made.batch_size


def case_preparer(folder: Path, *, labels: bool) -> Callable[..., np.ndarray | None]:
    """Return a function that preprocesses a case, with its labels as nnU-Net does before training.

    The function writes the case to the folder `output`; without one it returns the modalities
    (4, X, Y, Z).
    """
    preprocessor, plan = _preprocessor(folder)
    raw = folder / "raw" / _DATASET

    def prepare(case: Case, *, output: Path | None) -> np.ndarray | None:
        files = [str(path) for path in sorted((raw / "imagesTr").glob(f"{case.case_id}_*"))]
        label_map = str(raw / "labelsTr" / f"{case.case_id}.nii.gz") if labels else None
        if output is None:
            image: np.ndarray = preprocessor.run_case(files, label_map, *plan)[0]
            return image.transpose(0, 3, 2, 1)
        preprocessor.run_case_save(str(output / case.case_id), files, label_map, *plan)
        return None

    return prepare


def _write_raw(index: CaseIndex, case: Case, raw: Path) -> None:
    link_scans(case, raw / "imagesTr")
    image = nib.load(index.root / case.label.path)
    labels = np.asarray(image.dataobj).astype(np.uint8)
    # nnU-Net wants consecutive labels
    labels[labels == 4] = 3
    written = nib.Nifti1Image(labels, image.affine)
    nib.save(written, raw / "labelsTr" / f"{case.case_id}.nii.gz")


def link_scans(case: Case, folder: Path) -> None:
    """Link the scans of a case in a folder, under the names of nnU-Net."""
    for channel, scan in enumerate(case.images):
        name = f"{case.case_id}_{channel:04d}.nii.gz"
        (folder / name).symlink_to(case.path_of(scan).resolve())


def _preprocessor(folder: Path) -> tuple[Any, tuple[Any, Any, Any]]:
    """Return nnU-Net's preprocessor, and its arguments: plans, configuration and data set."""
    _set_folders(folder)
    from nnunetv2.preprocessing.preprocessors.default_preprocessor import DefaultPreprocessor
    from nnunetv2.utilities.plans_handling.plans_handler import PlansManager

    plans = PlansManager(json.loads(plans_path(folder).read_text()))
    description = json.loads((plans_path(folder).parent / "dataset.json").read_text())
    configuration = plans.get_configuration(_CONFIGURATION)
    return DefaultPreprocessor(verbose=False), (plans, configuration, description)


def plans_path(folder: Path) -> Path:
    """Return the file of the plans that `preprocess` has made."""
    return folder / "preprocessed" / _DATASET / "nnUNetPlans.json"


def _set_folders(folder: Path) -> None:
    """Set what nnU-Net reads from the environment when it is imported."""
    for name in ("raw", "preprocessed", "results"):
        os.environ[f"nnUNet_{name}"] = str(folder / name)
    os.environ.update(nnUNet_n_proc_DA="1", nnUNet_compile="f")


def _run(*options: str) -> None:
    entry = "from nnunetv2.experiment_planning.plan_and_preprocess_entrypoints import *; "
    command = [sys.executable, "-c", f"{entry}plan_and_preprocess_entry()"]
    processes = ["-c", _CONFIGURATION, "-npfp", "1", "-np", "1"]
    subprocess.run(
        [*command, "-d", "501", *processes, *options], check=True, stdout=subprocess.DEVNULL
    )
