"""Ten cases that cannot be predicted, each for another reason."""

import os
from pathlib import Path

import nibabel as nib
import numpy as np

from tests.builders import BRATS_AFFINE, SHAPE, make_volumes, write_case, write_nifti

_FOUND = [
    "no t2w",
    "an empty file",
    "a gzip file that is cut off",
    "no NIfTI header",
    "24x24x14 voxels",
    "24x24x16 voxels of 1.00x1.00x1.00 mm, axes RAS",
    "a constant volume",
    "NaN or infinity in 1 voxel",
    "the same voxels for t1n and t2w",
    "a sheared grid",
]
BAD_CASES = {f"BraTS2021_{90_000 + number}": found for number, found in enumerate(_FOUND)}
"""What the message about each case says was found."""


def break_in_ten_ways(root: Path) -> None:

    def path_of(number: int, name: str) -> Path:
        case_id = list(BAD_CASES)[number]
        return write_case(root, case_id, labelled=False, seed=number) / f"{case_id}_{name}.nii.gz"

    images = make_volumes()
    path_of(0, "t2").unlink()
    path_of(1, "t1").write_bytes(b"")
    path = path_of(2, "t1ce")
    os.truncate(path, path.stat().st_size - 100)
    path_of(3, "flair").write_bytes(b"this is not an image at all" * 30)
    write_nifti(path_of(4, "t2"), images[2][:, :, 2:])
    write_nifti(path_of(5, "t2"), images[2], np.diag([1.0, 1.0, 1.0, 1.0]))
    write_nifti(path_of(6, "flair"), np.zeros(SHAPE, np.int16))
    broken = images[0].astype(np.float32)
    broken[5, 5, 5] = np.inf
    write_nifti(path_of(7, "t1"), broken)
    path = path_of(8, "t1")
    path.with_name(path.name.replace("t1.nii", "t2.nii")).write_bytes(path.read_bytes())
    sheared = BRATS_AFFINE.copy()
    sheared[0, 1] = 0.2
    for path in path_of(9, "t1").parent.iterdir():
        sheared_scan = nib.Nifti1Image(nib.load(path).get_fdata(), sheared)
        sheared_scan.set_qform(None, code=0)
        nib.save(sheared_scan, path)
