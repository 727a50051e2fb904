"""What looks unusual about a scan, and that nothing does about usual ones."""

from itertools import permutations
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.inputs import find_inputs
from brats_seg.cases.nifti import Geometry
from brats_seg.cases.phantom import make_phantom
from brats_seg.inference.scan import _CORRELATIONS, findings, likeliest_order, read_scan
from brats_seg.labels import MODALITIES

BRATS_AFFINE = np.diag([-1.0, -1.0, 1.0, 1.0])


def geometry(affine: np.ndarray = BRATS_AFFINE) -> Geometry:
    return Geometry(shape=(9, 9, 9), affine=affine, qform=affine, qform_code=1, sform_code=1)


def typical_values(seed: int = 0) -> np.ndarray:
    """Return values (4, n) that are correlated as those of a median brain."""
    rng = np.random.default_rng(seed)
    root = np.linalg.cholesky(_CORRELATIONS + np.eye(4))
    return (root @ rng.standard_normal((4, 20_000))).astype(np.float32)


@pytest.mark.parametrize("order", list(permutations(range(4))))
def test_every_mix_up_of_a_typical_brain_is_seen(order: tuple[int, ...]) -> None:
    # enhancement gives T1 with contrast agent a tail of bright voxels
    values = typical_values()
    values[1] = np.where(values[1] > 1.5, values[1] * 2, values[1])

    assert likeliest_order(values[list(order)]) == tuple(MODALITIES[place] for place in order)


def test_modalities_that_do_not_resemble_each_other_are_left_in_peace() -> None:
    noise = np.random.default_rng(0).standard_normal((4, 1000)).astype(np.float32)

    assert likeliest_order(noise) == MODALITIES
    assert likeliest_order(np.ones((4, 1000), dtype=np.float32)) == MODALITIES
    assert likeliest_order(np.ones((4, 1), dtype=np.float32)) == MODALITIES


def test_a_mix_up_is_said_in_words() -> None:
    values = typical_values()[[3, 1, 2, 0]].reshape(4, 20, 100, 10)

    (found,) = findings(geometry(), values, voxel_ml=0.001)

    assert found == "modalities may be mixed up: t1n looks like t2f, t2f looks like t1n"


def test_more_tissue_than_a_brain_has_is_mentioned() -> None:
    values = typical_values().reshape(4, 20, 100, 10)

    (found,) = findings(geometry(), values, voxel_ml=0.2)

    assert found.startswith("what differs from the background measures 4000 ml")
    assert "skull does not seem to be stripped" in found


@pytest.mark.parametrize("seed", range(3))
def test_a_phantom_is_usual(seed: int) -> None:
    images = make_phantom(np.random.default_rng(seed), (48, 48, 40), with_et=True).images
    brain = images[0] != 0
    normalised = np.zeros(images.shape, dtype=np.float32)
    for image, out in zip(images, normalised, strict=True):
        out[brain] = (image[brain] - image[brain].mean()) / image[brain].std()

    assert list(findings(geometry(), normalised, voxel_ml=0.001)) == []


@pytest.mark.real
def test_usual_real_scans_have_no_findings_and_mixed_up_ones_do(real_data: Path) -> None:
    inputs = find_inputs([real_data / "BraTS2018", real_data / "BraTS2021"])
    n_seen = n_mixed = 0
    for case_input in inputs[::3]:
        scan = read_scan(case_input, (1.0, 1.0, 1.0))
        assert scan.warnings == ()
        values = scan.image[:, (scan.image != 0).any(axis=0)]
        for order in ([3, 1, 2, 0], [0, 1, 3, 2], [2, 1, 0, 3], [3, 2, 1, 0]):
            n_mixed += 1
            n_seen += likeliest_order(values[order]) != MODALITIES

    assert len(inputs) == 12
    assert n_seen >= 0.9 * n_mixed
