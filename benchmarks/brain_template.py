"""Make the tissue maps of the brains that phantoms show, from the maps in nilearn's wheel.

python benchmarks/brain_template.py nilearn/datasets/data brats_seg/cases/template.npz
"""

import sys
from pathlib import Path

import nibabel as nib
import numpy as np
from scipy import ndimage


def write_template(maps: Path, output: Path) -> None:
    """Write shares of grey and white matter in fifteenths, and a mask of the brain, at 2 mm."""
    names = (f"mni_icbm152_{kind}_tal_nlin_sym_09a_converted.nii.gz" for kind in ("gm", "wm", "t1"))
    stored = [np.asarray(nib.load(maps / name).dataobj)[::-1, ::-1] for name in names]
    grey, white, t1 = (array.astype(np.float32) / 255 for array in stored)
    mask = ndimage.binary_opening(ndimage.binary_fill_holes(t1 > 0.02), iterations=2)
    labels, _ = ndimage.label(mask)
    mask = labels == np.bincount(labels[mask]).argmax()
    smooth = (ndimage.gaussian_filter(1.0 * part, 0.6) for part in (15 * grey, 15 * white, mask))
    every_second = (np.rint(part[::2, ::2, ::2]).astype(np.uint8) for part in smooth)
    np.savez_compressed(output, **dict(zip(("grey", "white", "mask"), every_second, strict=True)))


if __name__ == "__main__":
    write_template(*map(Path, sys.argv[1:]))
