"""What a case is: ids, release and the file of each modality."""

# DOC cases/checks: What is wrong with the volumes of a case: their number, grids and voxels.

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import nibabel as nib
import numpy as np

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanFile:
    """The place of one volume: a file, or one volume of a 4-D file."""

    path: Path
    """Relative to the data folder."""
    volume: int | None = None
    """Index along the fourth axis, for releases that keep all modalities in one file."""

    def __str__(self) -> str:
        """Return the form of `cases.csv`: `a/b.nii.gz`, or `a/b.nii.gz#2` for a volume of a 4-D file."""
        name = self.path.as_posix()
        return name if self.volume is None else f"{name}#{self.volume}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote."""
        name, hash_sign, volume = text.rpartition("#")
        if hash_sign and volume.isdigit():
            return cls(path=Path(name), volume=int(volume))
        return cls(path=Path(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One imaging time point."""

    case_id: str
    patient_id: str
    timepoint: str = ""
    """Part of the case id, where the release has time points."""
    release: str
    """For example `brats2021`, `brats2024-gli`, `msd`, or `unknown`."""
    label_convention: str = ""
    """Name of the convention, confirmed from the voxels; empty without a label map."""
    t1n: ScanFile | None = None
    t1c: ScanFile | None = None
    t2w: ScanFile | None = None
    t2f: ScanFile | None = None
    label: ScanFile | None = None
    problems: tuple[str, ...] = ()
    """Why the case cannot be used; empty when it can."""
    remarks: tuple[str, ...] = ()
    """What was unusual and could be dealt with, such as a label file with a foreign name."""
    label_values: tuple[int, ...] = ()
    """Voxel values that occur in the label map."""
    grade: str = ""
    """`HGG` or `LGG` where the release says so."""
    age_years: float | None = None
    tumour_ml: float | None = None
    """Volume of the whole tumour in the label map."""
    voxel_hash: str = ""
    """Hash of the voxels of the first modality: equal for one scan under two ids."""
    files_key: str = ""
    """Changes when a file of the case is replaced: names, sizes and times of change."""

    @property
    def images(self) -> tuple[ScanFile, ...]:
        """The files of the modalities there are, in the order of `MODALITIES`."""
        found = (getattr(self, modality) for modality in MODALITIES)
        return tuple(scan for scan in found if scan is not None)

    @property
    def usable(self) -> bool:
        """Whether the case has no problem."""
        return not self.problems


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseIndex:
    """The cases of a data folder, sorted by id."""

    root: Path
    """The folder that file names are relative to."""
    cases: tuple[Case, ...]

    @property
    def usable(self) -> tuple[Case, ...]:
        """The cases without problems."""
        return tuple(case for case in self.cases if case.usable)

    @property
    def trainable(self) -> tuple[Case, ...]:
        """The cases without problems that have a label map."""
        return tuple(case for case in self.usable if case.label is not None)


AFFINE_TOLERANCE = 1e-3
"""How far two affines of one grid may differ in any entry, in mm: what rounding leaves behind."""


def check_volumes(case_id: str, volumes: Sequence[Volume], label: Volume | None) -> None:
    """Raise `CaseError` unless the modalities and the label map can be worked on.

    There must be all four modalities, on one grid with the label map, finite and not constant.
    """
    if len(volumes) != len(MODALITIES):
        files = ", ".join(volume.file for volume in volumes)
        found, expected = f"{len(volumes)} modalities", f"the four {', '.join(MODALITIES)}"
        raise CaseError(case_id, files, found, expected, "Add what is missing.")
    all_volumes = [*volumes, label] if label else list(volumes)
    check_one_grid(case_id, [(volume.file, volume.geometry) for volume in all_volumes])
    for volume in volumes:
        check_voxels(case_id, volume)


def check_one_grid(case_id: str, grids: Sequence[tuple[str, Geometry]]) -> None:
    """Raise `CaseError` unless all files, given by name and geometry, have the grid of the first."""
    if not grids:
        return
    first_file, first = grids[0]
    others = [(file, grid) for file, grid in grids if not have_one_grid(grid, first)]
    if others:
        raise CaseError(
            case_id,
            " and ".join(file for file, _ in others),
            " and ".join(_described(grid, first) for _, grid in others),
            f"the grid of {first_file}: {_described(first, first)}",
            "Register and resample all files of the case to one grid (for BraTS the SRI24 atlas "
            "at 1 mm, without the skull).",
        )


def have_one_grid(one: Geometry, other: Geometry) -> bool:
    """Tell whether voxels of equal index lie in equal places."""
    return one.shape == other.shape and np.allclose(
        one.affine, other.affine, rtol=0, atol=AFFINE_TOLERANCE
    )


def check_voxels(case_id: str, volume: Volume) -> None:
    """Raise `CaseError` if a modality has voxels that are not finite, or only one value."""
    low, high = volume.array.min(), volume.array.max()
    # a NaN among the voxels is the minimum and the maximum
    if not (np.isfinite(low) and np.isfinite(high)):
        n_broken = int(np.count_nonzero(~np.isfinite(volume.array)))
        found, expected = f"{n_broken} voxels that are NaN or infinite", "finite intensities"
        raise CaseError(case_id, volume.file, found, expected, "Repair or convert the scan again.")
    if low == high:
        found, expected = f"a constant volume, {low} everywhere", "a scan"
        raise CaseError(case_id, volume.file, found, expected, "Copy or convert the scan again.")


def _described(grid: Geometry, first: Geometry) -> str:
    voxels = "x".join(map(str, grid.shape))
    spacing = "x".join(f"{mm:.2f}" for mm in grid.spacing_mm)
    axes = "".join(nib.aff2axcodes(grid.affine))
    origin = ", ".join(f"{mm:.2f}" for mm in grid.affine[:3, 3])
    off = np.abs(grid.affine - first.affine).max()
    # may be all there is to see: the other numbers are rounded
    apart = f", affine off by up to {off:.3g}" if grid.shape == first.shape and off else ""
    return f"{voxels} voxels of {spacing} mm, axes {axes}, origin ({origin}){apart}"
