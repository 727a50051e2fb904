from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.case import load_case
from brats_seg.cases.index import index_cases
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.data.spacing import (
    at_spacing,
    choose_spacing,
    grid_of,
    resampled_labels,
    spacing_line,
)
from brats_seg.labels import BRATS2017, BRATS2024, regions_of
from brats_seg.voxels.grids import Resampling
from tests.builders import write_case

ONE, TWO = (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)
FINER = Resampling(before=(4, 1, 1), after=(8, 1, 1))


def line_of(*values: int) -> Volume:
    """Return a label map (n, 1, 1)."""
    geometry = Geometry(
        shape=(len(values), 1, 1), affine=np.eye(4), qform=np.eye(4), qform_code=1, sform_code=1
    )
    array = np.array(values, dtype=np.uint8)[:, None, None]
    return Volume(array=array, geometry=geometry, file="seg.nii")


@pytest.mark.parametrize(
    ("spacings", "chosen"),
    [
        ([], ONE),
        ([ONE] * 3, ONE),
        ([(0.99999994, 1.0000001, 1.0)], ONE),
        ([(0.96, 1.0, 1.04)], ONE),
        ([ONE, TWO, TWO], TWO),
        ([TWO, ONE], ONE),
        ([ONE, TWO, ONE, TWO], ONE),
        ([(0.9375, 0.9375, 5.0)] * 2 + [(0.5, 0.5, 6.0)], (0.94, 0.94, 5.0)),
        ([(1000.0, 1000.0, 1000.0), TWO, TWO], TWO),
    ],
)
def test_the_spacing_is_the_median_along_each_axis(spacings, chosen) -> None:
    assert choose_spacing(spacings) == chosen
    assert choose_spacing(spacings[::-1]) == chosen


def test_shape_and_spacing_are_in_the_axes_of_brats() -> None:
    """X of this grid points to the head, Y to the left and Z to the back."""
    affine = np.zeros((4, 4))
    affine[2, 0], affine[0, 1], affine[1, 2], affine[3, 3] = 5.0, -0.9, -0.8, 1.0
    stored = Geometry(shape=(20, 30, 40), affine=affine, qform=affine, qform_code=1, sform_code=1)

    assert grid_of(stored) == ((30, 40, 20), (0.9, 0.8, 5.0))


def test_a_case_of_nearly_the_spacing_is_not_touched(tmp_path: Path) -> None:
    write_case(tmp_path)
    loaded = load_case(index_cases(tmp_path).cases[0])

    assert at_spacing(loaded, (1.04, 1.0, 0.97)) == (loaded, None)


def test_image_and_labels_are_resampled_to_one_grid(tmp_path: Path) -> None:
    write_case(tmp_path)
    loaded = load_case(index_cases(tmp_path).cases[0])

    there, resampling = at_spacing(loaded, (0.5, 0.5, 0.5))

    assert resampling is not None
    assert there.label is not None
    grids = [volume.geometry for volume in (*there.volumes, there.label)]
    assert all(grid == grids[0] for grid in grids)
    assert grids[0].spacing_mm == (0.5, 0.5, 0.5)
    assert there.volumes[0].array.shape == there.label.array.shape == resampling.after
    assert there.geometry == loaded.geometry


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ((0, 2, 2, 0), [0, 0, 2, 2, 2, 2, 0, 0]),
        ((4, 2, 0, 0), [4, 4, 2, 2, 0, 0, 0, 0]),
        ((4, 1, 2, 0), [4, 4, 1, 1, 2, 2, 0, 0]),
    ],
)
def test_labels_keep_their_regions(values: tuple[int, ...], expected: list[int]) -> None:
    finer = resampled_labels(line_of(*values), BRATS2017, FINER)

    assert finer.array[:, 0, 0].tolist() == expected


@pytest.mark.parametrize("seed", range(5))
def test_resampled_regions_are_nested(seed: int) -> None:
    rng = np.random.default_rng(seed)
    array = rng.choice(np.array([0, 1, 2, 3, 4], dtype=np.uint8), (9, 8, 7))
    label = replace(line_of(0), array=array)
    resampling = Resampling.needed(array.shape, ONE, tuple(rng.uniform(0.4, 2.5, 3)))
    assert resampling is not None

    wt, tc, et = regions_of(resampled_labels(label, BRATS2024, resampling).array, BRATS2024)

    assert not (tc & ~wt).any()
    assert not (et & ~tc).any()


def test_cases_of_1_mm_are_not_worth_a_line() -> None:
    assert spacing_line([ONE, (0.98, 1.0, 1.0)], ONE) is None


def test_another_spacing_is_said() -> None:
    assert spacing_line([TWO] * 3, TWO) == "cases are prepared at 2x2x2 mm"


def test_a_mixture_is_said_in_one_line() -> None:
    spacings = [ONE] * 3 + [TWO] * 2 + [(0.5, 0.5, 5.0), (3.0, 3.0, 3.0), (4.0, 4.0, 4.0)]

    assert spacing_line(spacings, ONE) == (
        "cases are prepared at 1x1x1 mm; 5 of 8 are resampled: 2 from 2x2x2 mm, "
        "1 from 0.5x0.5x5 mm, 1 from 3x3x3 mm and 1 from other spacings"
    )
