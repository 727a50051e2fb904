"""Prepare scans as BraTS provides them, by programs of others: registered, 1 mm, without the skull.

t1c is resampled to 1 mm, `greedy` registers the other modalities to it (rigid, normalised mutual
information), and HD-BET finds the brain in t1c. No atlas is involved: the scans keep the place of
t1c. Nothing is downloaded: HD-BET would fetch its weights when it first runs, so that it is not
started before they are there.
"""

import importlib.util
import logging
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from brats_seg import wings
from brats_seg.cases import nifti
from brats_seg.cases.case import have_one_grid
from brats_seg.cases.nifti import Volume
from brats_seg.errors import CaseError, EnvironmentalError
from brats_seg.labels import MODALITIES
from brats_seg.voxels.grids import Resampling, Spacing

log = logging.getLogger(__name__)

INSTALL_PREPROCESS = "pip install 'brats_seg[preprocess]'"
"""Command that installs the programs."""
ONE_MM: Spacing = (1.0, 1.0, 1.0)
"""Voxel size of BraTS."""
WEIGHTS = "hd-bet_params/release_2.0.0/fold_all/checkpoint_final.pth"
"""File below the home folder in which HD-BET 2 keeps its weights."""

_TIMEOUT_S = 3600
_REFERENCE = MODALITIES.index("t1c")
"""Modality that the others are registered to: the tumour core is outlined in it."""
_GREEDY = "import sys, picsl_greedy; picsl_greedy.Greedy3D().execute(sys.argv[1])"
_RIGID = "-a -dof 6 -m NMI -ia-identity -n 100x50x10 -i fixed.nii moving.nii -o rigid.mat"
_RESLICE = "-rf fixed.nii -rt float -rm moving.nii moved.nii -r rigid.mat"


def unready_words(volumes: Sequence[Volume]) -> tuple[str, ...]:
    """Return why scans are not as BraTS provides them: registered, skull-stripped, of 1 mm.

    `volumes` are the four modalities, each on its own grid.
    """
    words = []
    if not _have_one_grid(volumes):
        words.append("the modalities are not on one grid, so that they are not registered")
    if _has_skull(volumes):
        words.append("the skull does not seem to be stripped")
    grids = [volume.geometry for volume in volumes]
    other = [g.spacing_mm for g in grids if Resampling.needed(g.shape, g.spacing_mm, ONE_MM)]
    if other:
        edges = "x".join(f"{mm:.2f}" for mm in other[0])
        words.append(f"the voxels measure {edges} mm, not 1 mm")
    return tuple(words)


def check_tools() -> None:
    """Raise `EnvironmentalError` if a program of preprocessing is not there."""
    missing = []
    if importlib.util.find_spec("picsl_greedy") is None:
        missing.append(f"greedy is not installed: {INSTALL_PREPROCESS}")
    if shutil.which("hd-bet") is None:
        missing.append(f"hd-bet is not installed: {INSTALL_PREPROCESS}")
    elif not (Path.home() / WEIGHTS).is_file():
        fetch = (
            "copy them there, or run hd-bet -i SCAN.nii.gz -o OUT.nii.gz once, which fetches them"
        )
        missing.append(f"hd-bet has no weights in {Path.home() / WEIGHTS}: {fetch}")
    if missing:
        msg = f"--preprocess cannot run: {'; '.join(missing)}"
        raise EnvironmentalError(msg)


def prepare(case_id: str, volumes: Sequence[Volume]) -> tuple[Sequence[Volume], tuple[str, ...]]:
    """Register, resample and skull-strip the modalities of a case where they need it.

    Returns the modalities on one grid of 1 mm, in the place of t1c, and the steps that were taken.
    `CaseError` is raised if a program fails.
    """
    with tempfile.TemporaryDirectory(prefix="brats-seg-") as name:
        folder = Path(name)
        if _have_one_grid(volumes):
            steps = ["resampled to 1 mm"]
            volumes = [_at_one_mm(volume, case_id) for volume in volumes]
        else:
            steps = ["t1c resampled to 1 mm, the others registered to it by greedy (rigid)"]
            fixed = _at_one_mm(volumes[_REFERENCE], case_id)
            nifti.write_volume(folder / "fixed.nii", fixed.array, fixed.geometry)
            volumes = [
                fixed if index == _REFERENCE else _registered(case_id, volume, fixed, folder)
                for index, volume in enumerate(volumes)
            ]
        if _has_skull(volumes):
            steps.append("brain of t1c found by HD-BET")
            outside = _brain(case_id, volumes[_REFERENCE], folder).array == 0
            volumes = [replace(v, array=np.where(outside, 0, v.array)) for v in volumes]
    for step in steps:
        log.info("%s: %s", case_id, step)
    return volumes, tuple(steps)


def _have_one_grid(volumes: Sequence[Volume]) -> bool:
    return all(have_one_grid(volume.geometry, volumes[0].geometry) for volume in volumes)


def _has_skull(volumes: Sequence[Volume]) -> bool:
    """Return whether the skull does not seem to be stripped; unknown without the checks of scans."""
    judges = wings.judges("scan")
    if judges is None:
        return False
    groups = [volumes] if _have_one_grid(volumes) else [[volume] for volume in volumes]
    return any(map(judges.has_skull, groups))


def _at_one_mm(volume: Volume, case_id: str) -> Volume:
    resampling = nifti.planned_resampling(volume, ONE_MM, case_id=case_id)
    return volume if resampling is None else nifti.resampled(volume, resampling)


def _registered(case_id: str, volume: Volume, fixed: Volume, folder: Path) -> Volume:
    """Return a modality on the grid of `fixed`, which is in the folder."""
    nifti.write_volume(folder / "moving.nii", volume.array, volume.geometry)
    for options in (f"-d 3 -V 0 -seed 1 {_RIGID}", f"-d 3 -V 0 {_RESLICE}"):
        _run(case_id, "greedy", [sys.executable, "-c", _GREEDY, options], folder)
    moved = nifti.read_volume(folder / "moved.nii", case_id=case_id)
    # with exactly the header of the grid
    return replace(moved, geometry=fixed.geometry)


def _brain(case_id: str, t1c: Volume, folder: Path) -> Volume:
    """Return the mask of the brain that HD-BET finds."""
    nifti.write_volume(folder / "t1c.nii.gz", t1c.array, t1c.geometry)
    device = "cuda" if shutil.which("nvidia-smi") else "cpu --disable_tta"
    command = f"hd-bet -i t1c.nii.gz -o brain.nii.gz --save_bet_mask -device {device}"
    _run(case_id, "hd-bet", command.split(), folder)
    return nifti.read_label_map(folder / "brain_bet.nii.gz", case_id=case_id)


def _run(case_id: str, name: str, command: Sequence[str], folder: Path) -> None:
    """Run a program in a folder; raise `CaseError` with the end of what it printed if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        code, lines = done.returncode, (done.stderr or done.stdout).strip().splitlines()
    except subprocess.TimeoutExpired:
        code, lines = -1, [f"no result after {_TIMEOUT_S} s"]
    if code:
        found = f"{name} failed with exit code {code}: {lines[-1] if lines else 'no message'}"
        next_step = "Prepare the scans with programs of your own."
        raise CaseError(case_id, "(all)", found, "registered, skull-stripped scans", next_step)
