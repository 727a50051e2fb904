"""Near copies: one scan under two ids, with other intensities or in another position."""

from collections.abc import Callable
from itertools import combinations
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy import ndimage

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import ClinicalTable, with_clinical
from brats_seg.cases.folds import make_folds
from brats_seg.cases.index import index_cases, summarise
from brats_seg.cases.nifti import Volume
from brats_seg.config import FoldConfig
from brats_seg.quality.near_copies import fingerprint_of, near_copies
from brats_seg.voxels.grids import find_orientation, reorient
from tests.builders import BRATS_AFFINE, make_case, write_arrays
from tests.check_builders import geometry, phantom

Array = npt.NDArray[np.generic]


def phantom_arrays(seed: int) -> tuple[Array, ...]:
    images, label_map = phantom(seed)
    return (*images, label_map)


def volume_of(array: Array, affine: npt.NDArray[np.float64] = BRATS_AFFINE) -> Volume:
    return Volume(array=array, geometry=geometry(array.shape, affine), file="t1.nii.gz")


def case_of(case_id: str, array: Array, *, patient_id: str | None = None) -> Case:
    fingerprint = fingerprint_of(volume_of(array))
    return make_case(case_id, patient_id=patient_id or case_id, fingerprint=fingerprint)


def noisy(array: Array) -> Array:
    return array + np.random.default_rng(0).normal(0, 0.2 * array[array > 0].std(), array.shape)


CHANGES: dict[str, Callable[[Array], Array]] = {
    "the same": lambda array: array,
    "scaled": lambda array: (1.01 * array).astype(np.int16),
    "brighter by one": lambda array: array + 1,
    "brighter brain": lambda array: np.where(array > 0, array + 1, 0),
    "other contrast": lambda array: np.where(array > 0, 1 + array.astype(float) ** 0.6, 0),
    "normalised": lambda array: np.where(array > 0, (array - 500.0) / 200, 0),
    "8 bits": lambda array: (array * (254 / array.max())).astype(np.uint8),
    "one voxel changed": lambda array: np.where(
        np.arange(array.size).reshape(array.shape) == 99999, 1, array
    ),
    "moved by one voxel": lambda array: np.roll(array, 1, axis=0),
    "moved by three voxels": lambda array: np.roll(array, (3, -3, 2), axis=(0, 1, 2)),
    "cropped": lambda array: array[4:-4, 2:-2, 3:],
    "padded": lambda array: np.pad(array, 9),
    "mirrored": lambda array: array[::-1],
    "upside down": lambda array: array[:, ::-1, ::-1],
    "transposed": lambda array: array.transpose(1, 2, 0),
    "resampled": lambda array: ndimage.zoom(array.astype(np.float32), 1.5, order=1),
    "smoothed": lambda array: ndimage.gaussian_filter(array.astype(np.float32), 0.6),
    "noisy": noisy,
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_copy_with_a_small_change_is_found(change: str) -> None:
    original = phantom_arrays(0)[0]
    cases = [case_of("a", original), case_of("b", CHANGES[change](original))]
    assert near_copies(cases) == ((0, 1),)


def test_a_reoriented_copy_has_nearly_the_same_fingerprint() -> None:
    """The array is stored along other axes, and the header says so."""
    array = phantom_arrays(0)[0]
    affine = np.array([[0, 0, 1.0, 0], [1, 0, 0, 0], [0, 1, 0, 0], [0, 0, 0, 1]])
    stored = np.linalg.inv(affine[:3, :3]) @ BRATS_AFFINE[:3, :3]
    volume = volume_of(array.transpose(np.abs(stored).argmax(axis=1)), affine)
    assert reorient(volume.array, find_orientation(affine)).shape == array.shape
    cases = [case_of("a", array), make_case("b", fingerprint=fingerprint_of(volume))]
    assert near_copies(cases) == ((0, 1),)


def test_many_cases_are_all_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pairs are those of a loop over all, in any order of the cases."""
    seeds = (0, 1, 2, 0, 1, 0)
    cases = [case_of(str(n), phantom_arrays(seed)[0]) for n, seed in enumerate(seeds)]
    expected = tuple((a, b) for a, b in combinations(range(len(seeds)), 2) if seeds[a] == seeds[b])
    monkeypatch.setattr("brats_seg.quality.near_copies._N_COMPARED", 2)
    assert near_copies(cases) == expected
    assert near_copies(cases[::-1]) == tuple(sorted((5 - b, 5 - a) for a, b in expected))


FAR_APART = np.where(np.indices((40, 40, 40)).sum(axis=0) > 60, 1, -1) * np.finfo(float).max
NO_BRAINS = {
    "empty": np.zeros((40, 40, 40), dtype=np.int16),
    "constant": np.pad(np.full((30, 30, 30), 7.0), 5),
    "tiny": np.pad(np.ones((8, 8, 8)), 1),
    "small": np.arange(1000.0).reshape(10, 10, 10),
    "beyond numbers": FAR_APART,
    "one voxel": np.ones((1, 1, 1)),
}


@pytest.mark.parametrize("name", NO_BRAINS)
def test_what_shows_no_brain_has_no_fingerprint_and_no_copies(name: str) -> None:
    cases = [case_of(case_id, NO_BRAINS[name]) for case_id in "ab"]
    assert (cases[0].facts.fingerprint, near_copies(cases)) == ("", ())


def test_the_index_names_both_of_a_pair_and_they_are_in_one_fold(tmp_path: Path) -> None:
    """00003 is 00001, scaled, moved and brighter; the others are no copies."""
    for number in range(3):
        write_arrays(tmp_path / f"BraTS2021_{number:05d}", phantom_arrays(number))
    *images, label_map = (np.roll(array, 1, axis=1) for array in phantom_arrays(1))
    brighter = [(1.01 * image + 1).astype(np.int16) for image in images]
    write_arrays(tmp_path / "BraTS2021_00003", (*brighter, label_map))
    index = index_cases(tmp_path)
    remarks = [
        " ".join(text.partition(",")[0] for text in case.remarks if "same scan" in text)
        for case in index.cases
    ]
    copies = [f"nearly the same scan as BraTS2021_0000{number}" for number in (3, 1)]
    assert remarks == ["", copies[0], "", copies[1]]
    assert f"BraTS2021_00003: {copies[1]}" in "\n".join(summarise(index))
    cases = with_clinical(index.cases, ClinicalTable(rows={}))
    for seed in range(6):
        rows = make_folds(cases, FoldConfig(n_folds=3, seed=seed)).rows
        assert rows[1].fold == rows[3].fold
        assert len({row.fold for row in rows}) == 3


def test_phantoms_of_different_patients_and_scans_of_one_are_no_copies() -> None:
    arrays = [phantom_arrays(seed)[0] for seed in range(8)]
    assert near_copies([case_of(str(seed), array) for seed, array in enumerate(arrays)]) == ()
    assert near_copies([case_of(name, arrays[0], patient_id="a") for name in ("a-1", "a-2")]) == ()
