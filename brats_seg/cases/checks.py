"""What is wrong with the volumes of a case: their number, grids and voxels."""

from collections.abc import Sequence

import nibabel as nib
import numpy as np

from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.errors import CaseError
from brats_seg.labels import MODALITIES

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
