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
from brats_seg.cases.case import have_one_grid
from brats_seg.cases.nifti import (
    Geometry,
    Volume,
    planned_resampling,
    read_label_map,
    read_volume,
    resampled,
    write_volume,
)
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


def has_spacing(geometry: Geometry, wanted_mm: Spacing) -> bool:
    """Return whether voxels have the wanted edges, to a few per cent."""
    return Resampling.needed(geometry.shape, geometry.spacing_mm, wanted_mm) is None


def has_skull(volumes: Sequence[Volume], *, is_registered: bool = True) -> bool:
    """Return whether the skull does not seem to be stripped; unknown without the checks of scans.

    Args:
        volumes: The modalities, in the axes of their files.
        is_registered: Whether they are on one grid; each is judged by itself otherwise.
    """
    judges = wings.judges()
    if judges is None:
        return False
    groups = [volumes] if is_registered else [[volume] for volume in volumes]
    return any(map(judges.has_skull, groups))


def missing_tools() -> tuple[str, ...]:
    """Return a sentence for each program of preprocessing that is not there, with the remedy."""
    missing = []
    if not _greedy():
        missing.append(f"greedy is not installed: {INSTALL_PREPROCESS}")
    if shutil.which("hd-bet") is None:
        missing.append(f"hd-bet is not installed: {INSTALL_PREPROCESS}")
    elif not (Path.home() / WEIGHTS).is_file():
        missing.append(
            f"hd-bet has no weights in {Path.home() / WEIGHTS}; it downloads them when it first "
            "runs, so run it once yourself (hd-bet -i SCAN.nii.gz -o OUT.nii.gz), or copy them there"
        )
    return tuple(missing)


def check_tools() -> None:
    """Raise `EnvironmentalError` if a program of preprocessing is not there."""
    if missing := missing_tools():
        msg = f"--preprocess cannot run: {'; '.join(missing)}"
        raise EnvironmentalError(msg)


def how_to_prepare(folder: Path) -> str:
    """Return the next step for scans, converted to a folder, that are not as BraTS provides them."""
    own = f"prepare the converted files in {folder} with programs of your own, and predict those"
    if missing := missing_tools():
        return f"To have it done, install what --preprocess needs ({'; '.join(missing)}), or {own}."
    return f"Add --preprocess to have it done by greedy and HD-BET, or {own}."


def prepare(case_id: str, volumes: Sequence[Volume]) -> tuple[list[Volume], tuple[str, ...]]:
    """Register, resample and skull-strip the modalities of a case where they need it.

    Args:
        case_id: Id for messages.
        volumes: The four modalities in the order of `MODALITIES`, each on its own grid.

    Returns:
        The modalities on one grid of 1 mm, in the place of t1c, and the steps that were taken.

    Raises:
        CaseError: A program failed.
    """
    t1c = volumes[_REFERENCE]
    with tempfile.TemporaryDirectory(prefix="brats-seg-") as name:
        folder = Path(name)
        if all(have_one_grid(volume.geometry, t1c.geometry) for volume in volumes):
            done, steps = [_at_one_mm(volume, case_id) for volume in volumes], ["resampled to 1 mm"]
        else:
            done = _registered(case_id, volumes, folder)
            steps = ["t1c resampled to 1 mm, the others registered to it by greedy (rigid)"]
        if has_skull(done):
            mask = _brain(case_id, done[_REFERENCE], folder)
            done = [
                replace(v, array=np.where(mask.array > 0, v.array, 0).astype(v.array.dtype))
                for v in done
            ]
            steps.append("brain of t1c found by HD-BET")
    for step in steps:
        log.info("%s: %s", case_id, step)
    return done, tuple(steps)


def _at_one_mm(volume: Volume, case_id: str) -> Volume:
    resampling = planned_resampling(volume, ONE_MM, case_id=case_id)
    return volume if resampling is None else resampled(volume, resampling)


def _registered(case_id: str, volumes: Sequence[Volume], folder: Path) -> list[Volume]:
    """Return all modalities on the grid of t1c at 1 mm."""
    fixed = _at_one_mm(volumes[_REFERENCE], case_id)
    write_volume(folder / "fixed.nii", fixed.array, fixed.geometry)
    done = []
    for index, volume in enumerate(volumes):
        if index == _REFERENCE:
            done.append(fixed)
            continue
        write_volume(folder / "moving.nii", volume.array, volume.geometry)
        rigid = "-a -dof 6 -m NMI -ia-identity -n 100x50x10 -i fixed.nii moving.nii -o rigid.mat"
        _run(case_id, [*_greedy(), f"-d 3 -V 0 -seed 1 {rigid}"], folder)
        reslice = "-rf fixed.nii -rt float -rm moving.nii moved.nii -r rigid.mat"
        _run(case_id, [*_greedy(), f"-d 3 -V 0 {reslice}"], folder)
        moved = read_volume(folder / "moved.nii", case_id=case_id)
        # with exactly the header of the grid
        done.append(replace(moved, geometry=fixed.geometry))
    return done


def _brain(case_id: str, t1c: Volume, folder: Path) -> Volume:
    """Return the mask of the brain that HD-BET finds."""
    write_volume(folder / "t1c.nii.gz", t1c.array, t1c.geometry)
    device = ("cuda",) if shutil.which("nvidia-smi") else ("cpu", "--disable_tta")
    options = ("-i", "t1c.nii.gz", "-o", "brain.nii.gz", "--save_bet_mask", "-device", *device)
    _run(case_id, ["hd-bet", *options], folder)
    return read_label_map(folder / "brain_bet.nii.gz", case_id=case_id)


def _greedy() -> list[str]:
    """Return the command that runs greedy with its options in one argument, or nothing."""
    if importlib.util.find_spec("picsl_greedy"):
        return [sys.executable, "-c", _GREEDY]
    if shutil.which("greedy"):
        return ["sh", "-c", "greedy $0"]
    return []


def _run(case_id: str, command: Sequence[str], folder: Path) -> None:
    """Run a program in a folder; raise `CaseError` with the end of what it printed if it fails."""
    try:
        done = subprocess.run(
            command, cwd=folder, capture_output=True, text=True, check=False, timeout=_TIMEOUT_S
        )
        code, said = done.returncode, (done.stderr or done.stdout).strip().splitlines()
    except subprocess.TimeoutExpired:
        code, said = -1, [f"no result after {_TIMEOUT_S} s"]
    if code:
        name = "greedy" if command[0] != "hd-bet" else "hd-bet"
        last = said[-1] if said else "no message"
        raise CaseError(
            case_id,
            "(all)",
            f"{name} failed with exit code {code}: {last}",
            "registered and skull-stripped scans",
            "Prepare the scans with programs of your own.",
        )
