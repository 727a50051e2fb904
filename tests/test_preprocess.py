"""Scans of the scanner are prepared, by doubles of greedy and deepbet, and label maps return to them."""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
from nibabel.affines import apply_affine
from scipy import ndimage
from scipy.spatial.transform import Rotation

from brats_seg.cases.case import Case
from brats_seg.cases.find import find_inputs
from brats_seg.cases.nifti import Geometry, Volume, oriented, read_volume, write_volume
from brats_seg.cases.phantom import make_phantom
from brats_seg.dicom import preprocess
from brats_seg.dicom.preprocess import ScanOptions, prepare_cases, read_source
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.inference.batch import find_scans
from brats_seg.labels import MODALITIES
from brats_seg.voxels.grids import Affine
from tests.builders import call, make_volumes, write_arrays, write_nifti
from tests.check_builders import geometry
from tests.dicom_builders import write_examination
from tests.inference_builders import write_run

ATLAS = Geometry.at(np.diag([-1.0, -1.0, 1.0, 1.0]), (44, 40, 36), qform_code=1)
MIDDLE = np.array([-22.0, -20.0, 18.0])
"""Middle of the head, in the millimetres of the atlas."""
GRIDS = {"t1n": (50, 48, 13), "t1c": (52, 46, 14), "t2w": (46, 50, 44), "t2f": (30, 52, 46)}
EDGES = {"t1n": (1, 1, 3.5), "t1c": (0.9, 1, 3), "t2w": (1.1, 1, 1), "t2f": (1.6, 1, 1)}


def rigid(angles: Sequence[float], shift: Sequence[float]) -> Affine:
    matrix = np.eye(4)
    matrix[:3, :3] = Rotation.from_euler("xyz", angles, degrees=True).as_matrix()
    matrix[:3, 3] = shift
    return matrix


TO_T1C = rigid((12, -7, 4), (60, -25, 33))
"""From the millimetres of the atlas to those of t1c."""
FROM_T1C = {
    "t1n": rigid((3, -4, 6), (4, -6, 3)),
    "t1c": np.eye(4),
    "t2w": rigid((-5, 2, 1), (-3, 5, 7)),
    "t2f": rigid((2, 8, -3), (9, 1, -2)),
}
"""To the millimetres of each modality, between which the patient has moved."""


def head(mm: npt.NDArray[np.float64]) -> npt.NDArray[np.int16]:
    """Return the signal at positions (..., 3) in the atlas: a lesion in a brain in a scalp."""
    away = np.linalg.norm((mm - MIDDLE) / (16, 14, 12), axis=-1)
    lesion = np.linalg.norm(mm - MIDDLE - (6, -4, 3), axis=-1) < 4
    return np.where(away < 0.75, 600 + 300 * lesion, 1500 * (away < 1)).astype(np.int16)


def voxels(grid: Geometry) -> npt.NDArray[np.int64]:
    return np.moveaxis(np.indices(grid.shape), 0, -1)


def write_head(folder: Path, case_id: str = "me", names: Sequence[str] = MODALITIES) -> Path:
    """Write a head as scans on tilted grids of their own, and an atlas beside their folder."""
    for name in names:
        to_native = FROM_T1C[name] @ TO_T1C
        affine = to_native @ rigid((0, 0, 9), (0, 0, 0)) @ np.diag([*EDGES[name], 1])
        affine[:3, 3] = apply_affine(to_native, MIDDLE) - affine[:3, :3] @ np.divide(GRIDS[name], 2)
        grid = Geometry.at(affine, GRIDS[name], qform_code=2)
        array = head(apply_affine(np.linalg.inv(to_native) @ affine, voxels(grid)))
        noise = np.random.default_rng(len(name + name[1])).integers(0, 20, grid.shape)
        signal = (array * (1 - 0.1 * MODALITIES.index(name)) + noise * (array > 0)).astype(np.int16)
        write_volume(folder / case_id / f"{case_id}_{name}.nii.gz", signal, grid)
    atlas = foreground_mask(head(apply_affine(ATLAS.affine, voxels(ATLAS))))
    write_volume(folder.parent / "atlas.nii.gz", atlas, ATLAS)
    return folder


def foreground_mask(array: npt.NDArray[Any]) -> npt.NDArray[Any]:
    return array * ((array > 300) & (array < 1000))


class Doubles:
    """Programs that know the transforms of the head of `write_head`; `calls` names those that ran."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.run = preprocess.run
        self.fails_on = ""
        self.finds_nothing = False
        self.turns = False

    def __call__(self, command: Sequence[str], folder: Path) -> Any:
        if command[0] != sys.executable:
            return self.run(command, folder)
        program = "deepbet" if "deepbet" in command[2] else "greedy"
        self.calls.append(program)
        if program == self.fails_on:
            return subprocess.CompletedProcess(command, 9, "", "out of memory")
        if program == "deepbet":
            image = read_volume(folder / "head.nii.gz", case_id="me")
            grid = image.geometry
            known = head(apply_affine(np.linalg.inv(TO_T1C) @ grid.affine, voxels(grid)))
            mask = (foreground_mask(known) > 0) if known.any() else image.array > 0
            mask &= not self.finds_nothing
            write_volume(folder / "brain_bet.nii.gz", mask.astype(np.uint8), grid)
        else:
            shape = read_volume(folder / "moving.nii", case_id="me").geometry.shape
            names = [name for name in MODALITIES if GRIDS[name] == shape]
            known = FROM_T1C[names[0]] if names else TO_T1C
            # the head of a DICOM examination is another one
            is_known = names or shape == (47, 46, 42)
            matrix = known if is_known else np.loadtxt(folder / "start.mat")
            np.savetxt(folder / "rigid.mat", np.diag([1, -1, -1, 1]) if self.turns else matrix)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def doubles(monkeypatch: pytest.MonkeyPatch) -> Doubles:
    programs = Doubles()
    monkeypatch.setattr(preprocess, "run", programs)
    monkeypatch.setattr(preprocess, "find_spec", lambda name: name)
    return programs


def prepared(root: Path) -> tuple[Case, ...]:
    options = ScanOptions(atlas=str(root / "atlas.nii.gz"))
    return prepare_cases(find_inputs([root / "native"]), root / "ready", options)


def test_scans_are_placed_in_the_atlas_and_label_maps_return_exactly(tmp_path, doubles):
    write_head(tmp_path / "native")
    (case,) = prepared(tmp_path)
    assert case.usable
    assert sorted(doubles.calls) == ["deepbet", *["greedy"] * 4]
    truth = foreground_mask(head(apply_affine(ATLAS.affine, voxels(ATLAS))))
    inside = ndimage.binary_erosion(truth > 0, iterations=3)
    for index, scan in enumerate(case.images):
        volume = read_volume(case.path_of(scan), case_id="me")
        assert volume.geometry == ATLAS
        assert np.mean((volume.array > 0) != (truth > 0)) < 0.02
        lesion = ndimage.center_of_mass(inside & (volume.array > 750 * (1 - 0.1 * index)))
        np.testing.assert_allclose(lesion, ndimage.center_of_mass(truth > 800), atol=1.2)
    source = read_source(case.root / case.folder)
    assert source is not None
    label_map = np.random.default_rng(0).integers(0, 5, ATLAS.shape, dtype=np.uint8)
    for name, labels, grid in source.on_native_grids("me", label_map, ATLAS):
        assert grid == read_volume(tmp_path / f"native/me/me_{name}.nii.gz", case_id="me").geometry
        np.testing.assert_array_equal(labels, returned(label_map, name, grid))
        assert np.any(labels)
        # another modality has moved otherwise
        other = returned(label_map, "t2w" if name == "t2f" else "t2f", grid)
        assert np.mean(labels != other) > 0.1


def returned(label_map: npt.NDArray[np.uint8], name: str, grid: Geometry) -> npt.NDArray[np.uint8]:
    """Look up each voxel of a scan at its position in the atlas."""
    result = np.zeros(grid.shape, np.uint8)
    to_atlas = np.linalg.inv(ATLAS.affine) @ np.linalg.inv(FROM_T1C[name] @ TO_T1C) @ grid.affine
    positions = np.floor(apply_affine(to_atlas, voxels(grid)) + 0.5).astype(int)
    is_inside = ((positions >= 0) & (positions < ATLAS.shape)).all(axis=-1)
    result[is_inside] = label_map[tuple(positions[is_inside].T)]
    return result


def test_a_case_that_fails_does_not_end_the_others_and_finished_ones_are_kept(tmp_path, doubles):
    write_head(tmp_path / "native")
    write_head(tmp_path / "native", "without", ("t2w", "t2f"))
    write_nifti(tmp_path / "native/flat/flat_t1c.nii.gz", np.ones((9, 9), np.int16), np.eye(4))
    flat, me, without = prepared(tmp_path)
    assert me.usable
    assert "2-D" in flat.problems[0]
    assert "no t1c and no t1n" in without.problems[0]
    doubles.calls.clear()
    assert prepared(tmp_path) == (flat, me, without)
    assert doubles.calls == []
    (tmp_path / "native/me/me_t1n.nii.gz").touch()
    doubles.fails_on = "deepbet"
    assert "deepbet failed with exit code 9: out of memory" in prepared(tmp_path)[1].problems[0]
    doubles.fails_on, doubles.finds_nothing = "", True
    assert "no brain (deepbet)" in prepared(tmp_path)[1].problems[0]
    doubles.finds_nothing, doubles.turns = False, True
    assert "found a scan that greedy would turn by more" in prepared(tmp_path)[1].problems[0]


def test_what_an_interrupted_batch_has_prepared_is_not_taken_for_scans(tmp_path, doubles):
    write_head(tmp_path / "native")
    options = ScanOptions(atlas=str(tmp_path / "atlas.nii.gz"))
    native = tmp_path / "native"
    first, second = (find_scans([native], native / "out", options) for _ in "ab")
    assert second == first
    assert [case.usable for case in first] == [True]


def test_scans_without_skull_keep_every_voxel_of_the_brain(tmp_path, doubles):
    """Of one grid and of 1 mm they are left alone; others are registered, and nothing is cut away."""
    write_head(tmp_path / "native")
    write_arrays(tmp_path / "native/ready", make_volumes(), ATLAS.affine)
    for name in MODALITIES:
        path = tmp_path / f"native/me/me_{name}.nii.gz"
        scan = read_volume(path, case_id="me")
        write_volume(path, np.where(scan.array < 1000, scan.array, 0), scan.geometry)
    before = find_inputs([tmp_path / "native"])
    me, ready = prepared(tmp_path)
    assert ready == before[1]
    assert "the skull had been stripped" in me.remarks[0]
    assert doubles.calls.count("deepbet") == 1


def test_what_is_missing_is_named_before_any_work(tmp_path, monkeypatch):
    write_head(tmp_path / "native")
    install = r"pip install 'brats_seg\[preprocess\]'"
    monkeypatch.setattr(preprocess, "find_spec", lambda name: None)
    with pytest.raises(EnvironmentalError, match=f"greedy and deepbet not installed: {install}"):
        prepared(tmp_path)
    monkeypatch.setattr(preprocess, "find_spec", lambda name: name)
    large = np.zeros((160, 160, 160), np.int16)
    large[5:-5, 5:-5, 5:-5] = 1 + np.arange(150)
    write_nifti(tmp_path / "atlas.nii.gz", large, np.eye(4))
    with pytest.raises(UsageError, match="seems to have a skull; expected sri24, mni"):
        prepared(tmp_path)


@pytest.mark.parametrize("name", preprocess.ATLASES)
def test_the_brain_of_an_atlas_lies_in_its_grid_as_brains_of_brats_do(name: str) -> None:
    image, grid = preprocess.load_atlas(name)
    assert grid.spacing_mm == (1, 1, 1)
    turned = oriented(replace(image, geometry=grid)).geometry
    assert (grid.qform_code, turned.qform_code) == {"sri24": (1, 1), "mni": (4, 4)}[name]
    brain = replace(image, array=1.0 * (image.array > 0))
    on_grid = preprocess.on_grid(brain, np.eye(4), grid).array > 0.5
    assert 1.7e6 < on_grid.sum() < 2e6
    assert not any(on_grid.take(end, axis).any() for axis in (0, 1) for end in (0, -1))
    # those of ten cases of BraTS, for the grid of SRI24
    middle = {"sri24": (120, 135, 75), "mni": (98, 120, 82)}[name]
    np.testing.assert_allclose(ndimage.center_of_mass(on_grid), middle, atol=2)
    # the cerebellum lies behind
    assert np.median(np.argwhere(on_grid[:, :, :40])[:, 1]) > middle[1] + 8


def test_what_is_no_file_is_not_read_as_the_source_of_a_case(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "source.json")
    assert read_source(tmp_path) is None


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["nifti", "dicom"])
def test_label_maps_of_a_batch_are_on_the_grids_of_the_scanner(tmp_path, doubles, kind):
    write_run(tmp_path / "run")
    write_head(tmp_path / "native")
    if kind == "dicom":
        pytest.importorskip("dcm2niix")
        write_examination(tmp_path / "dicom", edge_mm=2)
    inputs = {"nifti": "native", "dicom": "dicom"}[kind]
    line = ["predict", inputs, "-o", "out", "--model", "run", "--atlas", "atlas.nii.gz", "--report"]
    first = call(tmp_path, *line)
    assert first.code == 0, first.out
    case_id = {"nifti": "me", "dicom": "dicom"}[kind]
    said = f"prepared from the files of the scanner: look at scans/prepared/{case_id}/steps.png"
    assert said in first.out
    page = (tmp_path / f"out/reports/{case_id}.html").read_text()
    assert (said in page, "How the scans were prepared" in page) == (True, True)
    assert str(tmp_path) not in page
    folder = tmp_path / {"nifti": "native/me", "dicom": "out/scans/dicom"}[kind]
    for name in MODALITIES:
        (path,) = folder.glob(f"*{name}.nii.gz")
        label_map = read_volume(tmp_path / f"out/native/{case_id}_{name}.nii.gz", case_id=case_id)
        assert label_map.geometry == read_volume(path, case_id=case_id).geometry
        assert label_map.array.dtype == np.uint8
    assert (tmp_path / "out/dicom.dcm").exists() == (kind == "dicom")
    doubles.calls.clear()
    assert "1 finished before" in call(tmp_path, *line).out
    (tmp_path / f"out/native/{case_id}_t1n.nii.gz").unlink()
    assert "1 predicted" in call(tmp_path, *line).out
    assert doubles.calls == []


@pytest.mark.parametrize(
    ("edges_mm", "n_slices", "reasons"),
    [
        ([1, 1, 1, 1], 16, []),
        ([1.03, 1.03, 1.03, 1.03], 16, []),
        ([2, 2, 2, 2], 16, ["the voxels measure 2.00x2.00x2.00 mm, not 1 mm"]),
        ([9, 9, 9, 9], 16, ["the skull does not seem", "the voxels measure 9.00"]),
        ([1, 1, 1, 1], 17, ["are not on one grid"]),
        ([9, 1, 1, 1], 16, ["are not on one grid", "the skull", "the voxels measure 9.00"]),
    ],
)
def test_raw_scans_are_detected(edges_mm: list[float], n_slices: int, reasons: list[str]) -> None:
    """The volumes are given by their edges in mm and the slices of the last one."""
    scans = []
    for index, edge_mm in enumerate(edges_mm):
        shape = (24, 24, n_slices if index == 3 else 16)
        grid = geometry(shape, np.diag([-edge_mm, -edge_mm, edge_mm, 1.0]))
        scans.append(Volume(array=make_volumes(shape)[index], geometry=grid, file="scan.nii.gz"))
    found = [*preprocess.unready_reasons(scans)]
    assert len(found) == len(reasons)
    assert all(reason in text for reason, text in zip(reasons, found, strict=True))


SHELLS = [(0, 3, (120, 130, 900, 150)), (3, 9, (40, 45, 60, 50)), (9, 16, (900, 950, 700, 500))]
"""Fluid, bone and fat: from and to how many mm outside the brain, with the signals of each modality."""


@pytest.mark.slow
def test_the_programs_find_the_brain_of_a_head_and_undo_its_motion(tmp_path: Path) -> None:
    pytest.importorskip("picsl_greedy")
    pytest.importorskip("deepbet")
    rng = np.random.default_rng(3)
    phantom = make_phantom(rng, (160, 190, 155), with_et=True)
    images = np.pad(phantom.images, ((0, 0), *[(30, 30)] * 3))
    brain = (images != 0).any(axis=0)
    depth = ndimage.distance_transform_edt(~brain)
    grid = geometry(brain.shape)
    moves = dict(zip(MODALITIES, (0.5, 0, -1, 1), strict=True))
    for index, (name, move) in enumerate(moves.items()):
        head = images[index].astype(np.float32)
        for low, high, signals in SHELLS:
            head[(depth > low) & (depth <= high)] = signals[index]
        head *= rng.normal(1, 0.05, head.shape)
        affine = grid.affine @ np.diag([0.9, 0.9, 5, 1])
        to_t1c = rigid((3 * move, -2 * move, 4 * move), (4 * move, -6 * move, 3 * move))
        shape = tuple(np.ceil(np.divide(head.shape, (0.9, 0.9, 5))).astype(int))
        matrix = np.linalg.inv(grid.affine) @ to_t1c @ affine
        scan = ndimage.affine_transform(head, matrix, output_shape=shape, order=1)
        write_nifti(tmp_path / f"native/me/me_{name}.nii.gz", scan.astype(np.int16), affine)
    cases = find_inputs([tmp_path / "native"])
    (case,) = prepare_cases(cases, tmp_path / "ready", ScanOptions(atlas="sri24"))
    assert case.usable, case.problems
    source = read_source(case.root / case.folder)
    assert source is not None
    to_t1c = np.array(source.natives["t1c"].to_native)
    for name, move in moves.items():
        # mm of the atlas, by way of this modality and back by what is known, are those of t1c
        known = rigid((3 * move, -2 * move, 4 * move), (4 * move, -6 * move, 3 * move))
        middle = np.linalg.inv(to_t1c) @ grid.affine @ [*np.divide(brain.shape, 2), 1]
        by_way = known @ np.array(source.natives[name].to_native) @ middle
        np.testing.assert_allclose(by_way, to_t1c @ middle, atol=1)
    prepared_t1c = read_volume(case.path_of(case.files["t1c"]), case_id="me")
    known = replace(prepared_t1c, array=1.0 * brain, geometry=grid)
    truth = preprocess.on_grid(known, to_t1c, prepared_t1c.geometry).array > 0.5
    found = prepared_t1c.array != 0
    assert 2 * np.sum(truth & found) / (truth.sum() + found.sum()) > 0.94
