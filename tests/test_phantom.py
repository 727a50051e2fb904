"""Phantom cases look like BraTS to everything that reads them."""

import functools

import nibabel as nib
import numpy as np
import pytest
from scipy.ndimage import binary_dilation, binary_erosion

from brats_seg.cases.clinical import read_clinical_files
from brats_seg.cases.phantom import (
    Phantom,
    make_phantom,
    write_phantom_cases,
    write_phantom_survival,
)
from brats_seg.errors import EnvironmentalError
from brats_seg.labels import BRATS2017, MODALITIES, regions_of
from tests.builders import BRATS_AFFINE

SHAPE = (32, 32, 28)


@functools.cache
def make(seed: int, *, with_et: bool = True) -> Phantom:
    return make_phantom(np.random.default_rng(seed), with_et=with_et)


def mean_signal(phantom: Phantom, modality: str, mask: np.ndarray) -> float:
    return float(phantom.images[MODALITIES.index(modality)][mask].mean())


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_phantom_cases(folder, n_cases=5, seed=1, shape=SHAPE)
    return folder


def test_files_have_names_geometry_and_types_of_brats_2021(root):
    paths = sorted(root.glob("*/*"))

    assert [path.relative_to(root).as_posix() for path in paths] == [
        f"BraTS2021_0000{n}/BraTS2021_0000{n}_{suffix}.nii.gz"
        for n in range(5)
        for suffix in ("flair", "seg", "t1", "t1ce", "t2")
    ]
    for path in paths:
        image = nib.load(path)
        assert image.shape == SHAPE
        np.testing.assert_array_equal(image.affine, BRATS_AFFINE)
        assert (image.header["qform_code"], image.header["sform_code"]) == (1, 1)
        is_label = path.name.endswith("seg.nii.gz")
        assert image.get_data_dtype() == (np.uint8 if is_label else np.int16)
        if is_label:
            # every fourth case has no ET
            values = {0, 1, 2} if "00003" in path.name else {0, 1, 2, 4}
            assert set(np.unique(image.dataobj)) == values


def test_the_files_hold_the_modalities_and_are_the_same_however_many_are_asked_for(root, tmp_path):
    phantom = make_phantom(np.random.default_rng([1, 1]), SHAPE, with_et=True)
    write_phantom_cases(tmp_path, n_cases=2, seed=1, shape=SHAPE)
    for path in tmp_path.glob("*/*.nii.gz"):
        assert path.read_bytes() == (root / path.relative_to(tmp_path)).read_bytes()
    for suffix, image in zip(("t1", "t1ce", "t2", "flair"), phantom.images, strict=True):
        path = root / "BraTS2021_00001" / f"BraTS2021_00001_{suffix}.nii.gz"
        np.testing.assert_array_equal(nib.load(path).dataobj, image)


@pytest.mark.parametrize("seed", range(6))
def test_regions_are_nested_in_a_brain_on_black_and_large_enough_to_learn_from(seed):
    phantom = make(seed)
    wt, tc, et = regions_of(phantom.label_map, BRATS2017)
    brain = phantom.images > 0
    assert phantom.images.dtype == np.int16
    assert (brain == brain[0]).all()
    assert 0.3 < brain[0].mean() < 0.5
    assert brain[0][wt].all()
    assert wt.sum() > tc.sum() > et.sum() > 40
    assert 0.005 < wt.sum() / brain[0].sum() < 0.3


@pytest.mark.parametrize("seed", range(3))
def test_tissues_contrast_as_they_do_in_patients(seed):
    """ET is bright after contrast, necrosis dark; oedema is bright on T2 and brighter on FLAIR."""
    phantom = make(seed)
    labels = phantom.label_map
    # the fluid around the brain is brighter than everything on T2, and darker on T1
    inner = binary_erosion(phantom.images[0] > 0, iterations=5)
    healthy = inner & ~binary_dilation(labels > 0, iterations=2)

    def contrast(modality: str, value: int) -> float:
        inside = mean_signal(phantom, modality, labels == value)
        return inside / mean_signal(phantom, modality, healthy)

    assert contrast("t1c", 4) > 1.1 > contrast("t1n", 4)
    assert contrast("t1c", 1) < 0.9
    assert contrast("t2w", 2) > 1.4
    assert contrast("t2f", 2) > 1.6
    assert contrast("t1n", 2) < 0.95


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("with_et", "value"), [(True, 4), (False, 1)])
def test_only_et_takes_up_contrast(seed, with_et, value):
    """The gain of the scanner and the bias field differ between scans, by tenths."""
    phantom = make(seed, with_et=with_et)
    tumour, brain = phantom.label_map == value, phantom.images[0] > 0

    def uptake(mask: np.ndarray) -> float:
        return mean_signal(phantom, "t1c", mask) / mean_signal(phantom, "t1n", mask)

    assert (uptake(tumour) / uptake(brain) > 1.5) is with_et


def test_tumours_differ_in_size_and_place():
    tumours = [make(seed).label_map > 0 for seed in range(6)]
    volumes = [tumour.sum() for tumour in tumours]
    centres = np.array([np.argwhere(tumour).mean(axis=0) for tumour in tumours])
    assert max(volumes) > 3 * min(volumes)
    assert (np.ptp(centres, axis=0) > 12).all()


def test_survival_is_read_as_a_table_of_the_challenge_with_all_that_occurs_there(tmp_path):
    write_phantom_survival(tmp_path / "survival.csv", n_cases=12, seed=0)

    table = read_clinical_files([tmp_path / "survival.csv"])

    rows = [table.row(f"BraTS2021_{number:05d}") for number in range(12)]
    assert [row.survival_censored for row in rows].count(True) == 1
    assert [row.survival_days for row in rows].count(None) == 1
    assert all(20 < row.age_years < 100 for row in rows)
    for name, seed in (("a", 0), ("b", 0), ("c", 1)):
        write_phantom_survival(tmp_path / name, n_cases=5, seed=seed)
    a, b, c = ((tmp_path / name).read_bytes() for name in "abc")
    assert a == b != c


def test_a_folder_that_cannot_be_written_to_is_told(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(EnvironmentalError, match="file cannot be written"):
        write_phantom_cases(tmp_path / "file", n_cases=1, seed=0, shape=SHAPE)
