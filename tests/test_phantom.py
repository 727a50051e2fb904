"""Phantoms look like the brains of patients to everything that reads them."""

import functools
from importlib.resources import files

import nibabel as nib
import numpy as np
import pytest
from scipy import ndimage

from brats_seg.cases import anatomy
from brats_seg.cases.anatomy import EXTENT_MM, Anatomy, Focus, Glioma, Voxels
from brats_seg.cases.clinical import read_clinical_files
from brats_seg.cases.index import index_cases
from brats_seg.cases.phantom import (
    Phantom,
    make_phantom,
    write_phantom_cases,
    write_phantom_survival,
)
from brats_seg.errors import EnvironmentalError
from brats_seg.labels import BRATS2017, MODALITIES, regions_of

SHAPE = (32, 38, 31)
"""Voxels of 5 mm."""
SEEDS = range(8)
GRID = Voxels.around_brain((48, 57, 47))
T1N, T1C, T2W, T2F = range(len(MODALITIES))


@functools.cache
def make(seed: int, *, with_et: bool = True, variety: float = 0.3) -> Phantom:
    rng = np.random.default_rng([3, seed])
    return make_phantom(rng, GRID.shape, with_et=with_et, variety=variety)


@functools.cache
def brain_and_tumour(
    seed: int, *, with_et: bool = True, variety: float = 1
) -> tuple[Anatomy, Glioma]:
    rng = np.random.default_rng([3, seed])
    positions = anatomy.random_positions(rng, GRID)
    foci = anatomy.place_foci(rng, GRID, positions)
    brain = anatomy.make_brain(rng, GRID, positions + anatomy.displacement(rng, GRID, foci))
    return brain, anatomy.make_tumour(rng, GRID, brain, foci, with_et=with_et, variety=variety)


def contrast(modality: int, label: int) -> float:
    """Return the signal of a label as a multiple of that of the rest of the brain, over the seeds."""
    ratios = []
    for phantom in map(make, SEEDS):
        image, inside = phantom.images[modality], phantom.label_map == label
        healthy = image[(phantom.images[0] > 0) & (phantom.label_map == 0)]
        ratios += [image[inside].mean() / np.median(healthy)] if inside.any() else []
    return float(np.mean(ratios))


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo")
    write_phantom_cases(folder, n_cases=5, seed=1, shape=SHAPE)
    return folder


def test_files_have_names_geometry_and_types_of_brats_2021(root):
    """The origin is the voxel that is farthest towards right, front and feet, as in BraTS."""
    paths = sorted(root.glob("*/*"))
    assert [path.relative_to(root).as_posix() for path in paths] == [
        f"BraTS2021_0000{n}/BraTS2021_0000{n}_{suffix}.nii.gz"
        for n in range(5)
        for suffix in ("flair", "seg", "t1", "t1ce", "t2")
    ]
    for path in paths:
        image = nib.load(path)
        assert image.shape == SHAPE
        np.testing.assert_allclose(image.affine[:3, :3], np.diag([-5, -5, 5]))
        assert nib.aff2axcodes(image.affine) == tuple("LPS")
        assert (image.header["qform_code"], image.header["sform_code"]) == (1, 1)
        is_label = path.name.endswith("seg.nii.gz")
        assert image.get_data_dtype() == (np.uint8 if is_label else np.int16)
        if is_label:
            # every fourth case has no ET
            assert (4 in np.unique(image.dataobj)) == ("00003" not in path.name)


@pytest.mark.parametrize("shape", [SHAPE, (240, 240, 155), (40, 44, 36)])
def test_voxels_are_as_large_as_a_brain_needs(shape):
    spacing_mm = Voxels.around_brain(shape).spacing_mm
    spare_mm = np.multiply(shape, spacing_mm) - EXTENT_MM
    assert spare_mm.min() == pytest.approx(0, abs=1e-3)
    assert 1 <= spacing_mm < 5.1


def test_a_case_is_a_function_of_seed_and_number_alone(root, tmp_path):
    phantom = make_phantom(np.random.default_rng([1, 1]), SHAPE, with_et=True)
    write_phantom_cases(tmp_path / "same", n_cases=2, seed=1, shape=SHAPE)
    write_phantom_cases(tmp_path / "other", n_cases=1, seed=2, shape=SHAPE)
    written = sorted((tmp_path / "same").glob("*/*.nii.gz"))
    assert len(written) == 10
    for path in written:
        assert path.read_bytes() == (root / path.relative_to(tmp_path / "same")).read_bytes()
    for path in (tmp_path / "other").glob("*/*.nii.gz"):
        assert path.read_bytes() != (root / path.relative_to(tmp_path / "other")).read_bytes()
    for suffix, image in zip(("t1", "t1ce", "t2", "flair"), phantom.images, strict=True):
        path = root / "BraTS2021_00001" / f"BraTS2021_00001_{suffix}.nii.gz"
        np.testing.assert_array_equal(nib.load(path).dataobj, image)


@pytest.mark.parametrize("seed", SEEDS)
def test_regions_are_nested_in_a_brain_on_black(seed):
    phantom = make(seed)
    wt, tc, et = regions_of(phantom.label_map, BRATS2017)
    brain = phantom.images > 0
    ml = GRID.spacing_mm**3 / 1000
    assert phantom.images.dtype == np.int16
    # the same voxels in every modality; all others are exactly 0
    assert (brain == brain[0]).all()
    assert phantom.images.min() == 0
    assert 900 < brain[0].sum() * ml < 2200
    assert brain[0][wt].all()
    assert wt.sum() >= tc.sum() >= et.sum() > 0
    assert 0.3 < wt.sum() * ml < 0.5 * brain[0].sum() * ml
    assert 4 not in make(seed, with_et=False).label_map


def test_tissues_contrast_as_they_do_in_patients():
    """ET is bright after contrast; oedema is dark on T1, bright on T2 and FLAIR; fluid is dark on T1."""
    assert contrast(T1C, 4) > 1.2
    assert contrast(T1C, 4) > 1.2 * max(contrast(T1N, 4), contrast(T1C, 1), contrast(T1C, 2))
    assert contrast(T1N, 2) < 1
    assert contrast(T2W, 2) > 1.1
    assert contrast(T2F, 2) > 1.15
    likeness = []
    for phantom in map(make, SEEDS):
        inside = ndimage.binary_erosion(phantom.images[0] > 0, iterations=2)
        likeness.append(np.corrcoef(phantom.images[T1N][inside], phantom.images[T2W][inside])[0, 1])
    assert np.mean(likeness) < -0.3
    # gains differ between scans: the uptake of contrast is relative to that of the brain
    uptake = {label: contrast(T1C, label) / contrast(T1N, label) for label in (1, 2, 4)}
    assert uptake[4] > 1.4
    assert all(0.75 < uptake[label] < 1.3 for label in (1, 2))


def test_a_tumour_that_enhances_is_of_one_of_three_families_and_a_ring_is_outermost():
    grown = [brain_and_tumour(seed)[1] for seed in SEEDS]
    assert {tumour.family for tumour in grown} <= {"ring", "solid", "patchy"}
    assert brain_and_tumour(0, with_et=False)[1].family == "none"
    depths = []
    for tumour in grown:
        _, core, enhancing = tumour.regions
        inner = core & ~enhancing
        if tumour.family == "ring" and inner.any():
            depth = ndimage.distance_transform_edt(core)
            depths.append(depth[inner].mean() - depth[enhancing].mean())
    assert np.mean(depths) > 0


def test_an_operation_leaves_fluid_that_is_of_no_region(monkeypatch):
    """Negative control: the demo's tumours, of less variety, are never resected."""
    monkeypatch.setattr("brats_seg.cases.anatomy._RESECTED_SHARE", 1)
    grow, signals = brain_and_tumour.__wrapped__, []
    for seed in range(5):
        brain, tumour = grow(seed)
        assert tumour.regions[2].any()
        assert not (tumour.cavity & tumour.regions[0]).any()
        assert not grow(seed, variety=0.3)[1].cavity.any()
        inside = ndimage.binary_erosion(tumour.cavity)
        if inside.any():
            images = make.__wrapped__(seed, variety=1).images[:, brain.mask]
            signals.append(images[:, inside[brain.mask]].mean(axis=1) / np.median(images, axis=1))
    t1n, _, t2w, _ = np.mean(signals, axis=0)
    assert t1n < 0.7
    assert t2w > 1.3


def test_oedema_spreads_along_white_matter_and_spares_fluid():
    shares = []
    for seed in SEEDS:
        brain, tumour = brain_and_tumour(seed)
        wt, tc, _ = tumour.regions
        if (wt & ~tc).any():
            healthy = brain.tissue[:, brain.mask & ~wt].mean(axis=1)
            shares.append(brain.tissue[:, wt & ~tc].mean(axis=1) / healthy)
            assert brain.tissue[0, wt & ~tc].max() < 0.7
    fluid, _, white = np.mean(shares, axis=0)
    assert fluid < 0.7
    assert white > 1.2


def test_a_tumour_pushes_its_surroundings_outwards_and_leaves_what_is_far():
    focus = Focus(position=np.array([30, 0, 10], np.float32), radius_mm=20)
    offset = GRID.positions() - np.reshape(focus.position, (3, 1, 1, 1))
    distance = np.linalg.norm(offset, axis=0)
    shifts = [anatomy.displacement(np.random.default_rng(seed), GRID, [focus]) for seed in SEEDS]
    assert np.mean([np.linalg.norm(shift, axis=0)[distance < 25].max() for shift in shifts]) > 2
    for shift in shifts:
        # each voxel shows what was nearer to the centre
        assert ((shift * offset).sum(axis=0) <= 0).all()
        assert np.abs(shift[:, distance > 90]).max() < 0.05
    assert not anatomy.displacement(np.random.default_rng(0), GRID, []).any()


@pytest.mark.slow
def test_more_variety_makes_scans_differ_more():
    """Negative control: without variety, all scans have much the same grain and slices."""

    def spread(variety: float) -> float:
        grains = []
        for seed in SEEDS:
            images = make(seed, with_et=False, variety=variety).images.astype(np.float64)
            steps = np.abs(np.diff(images, axis=3)).mean(axis=(1, 2, 3))
            grains.append(np.log(steps / images.mean(axis=(1, 2, 3))))
        return float(np.std(grains, axis=0).mean())

    assert spread(1) > 1.3 * spread(0)


@pytest.mark.parametrize("seed", range(3))
def test_a_brain_stands_upright_and_looks_to_the_front(seed):
    """The stem is below, narrow and in the middle; the cerebellum is behind; ventricles are symmetric."""
    brain, _ = brain_and_tumour(seed)
    x, y, z = GRID.positions()
    rows = np.flatnonzero(brain.mask.any(axis=(0, 1)))
    areas = brain.mask.sum(axis=(0, 1))
    lowest = brain.mask & (z < z[0, 0, rows[2]])
    assert areas[rows[:3]].max() < 0.4 * areas.max()
    assert np.abs(x[lowest]).mean() < 40
    # below the temporal lobes there is nothing in front
    assert y[brain.mask & (z < -45)].mean() > 5
    ventricles = brain.mask & (brain.ventricle_mm < brain.ventricle_mm.min() + 0.5)
    assert brain.tissue[0][ventricles].mean() > 0.5
    assert np.abs(x[ventricles].mean()) < 12
    assert 0.2 < (x[ventricles] > 0).mean() < 0.8


@pytest.mark.slow
def test_the_checks_have_no_remarks_on_the_phantoms_of_the_demo(tmp_path):
    write_phantom_cases(tmp_path, n_cases=12, seed=0)
    cases = index_cases(tmp_path).cases
    assert [(case.case_id, case.remarks) for case in cases if case.remarks] == []
    assert len(cases) == 12


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


def test_the_template_is_installed_with_its_notice():
    folder = files("brats_seg.cases")
    with np.load(str(folder / "template.npz")) as stored:
        assert {name: stored[name].max() for name in stored} == {"grey": 15, "white": 15, "mask": 1}
    assert "Montreal Neurological Institute" in (folder / "template.LICENSE").read_text()
    assert (folder / "template.npz").stat().st_size < 1_000_000
