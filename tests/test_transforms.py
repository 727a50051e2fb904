import typing
from collections import Counter
from collections.abc import Sequence
from itertools import product
from pathlib import Path

import numpy as np
import pytest
import torch
from monai.transforms import Compose
from scipy.ndimage import affine_transform
from scipy.spatial.transform import Rotation

from brats_seg.config import PatchConfig, TrainingConfig
from brats_seg.data.store import Buffers, PreparedCase
from brats_seg.data.transforms import (
    AUGMENTATIONS,
    FULL,
    ReadPatchd,
    SpatialTransform,
    apply_transforms,
    choose_box,
    draw_spatial_transform,
    read_transformed,
    rotation_matrix,
    touched_box,
)
from brats_seg.errors import ConfigError
from brats_seg.labels import BRATS2017
from brats_seg.voxels.box import Box, Triple

SHAPE = (22, 18, 26)
STILL = (False, False, False)
MIRRORINGS = tuple(product([False, True], repeat=3))


def make_case(image: np.ndarray, labels: np.ndarray) -> PreparedCase:
    return PreparedCase(
        case_id="a",
        convention=BRATS2017,
        image=image.astype(np.float16),
        labels=labels,
        foreground=(),
    )


@pytest.fixture
def case(rng: np.random.Generator) -> PreparedCase:
    return make_case(rng.normal(size=(4, *SHAPE)), rng.choice([0, 1, 2, 4], SHAPE).astype(np.uint8))


def moved(case: PreparedCase, box: Box, transform: SpatialTransform) -> list[np.ndarray]:
    image, labels = read_transformed(case, box, transform, Buffers())
    assert image.dtype == (torch.float16 if transform.matrix is None else torch.float32)
    return [image.float().numpy(), labels]


def random_matrix(seed: int) -> np.ndarray:
    rng = np.random.default_rng(seed)
    return rng.uniform(0.7, 1.4) * rotation_matrix(rng.uniform(-30, 30, size=3))


def by_scipy(volume: np.ndarray, box: Box, matrix: np.ndarray, order: int) -> np.ndarray:
    """Interpolate with another library, in a volume with a wide border of zeros."""
    margin = 40
    half = (np.array(box.shape) - 1) / 2
    offset = np.array(box.start) + half + margin - matrix @ half
    padded = np.pad(volume.astype(np.float64), margin)
    return affine_transform(padded, matrix, offset, output_shape=box.shape, order=order)


@pytest.mark.parametrize("mirrored", MIRRORINGS)
def test_mirroring_turns_axes_round(case: PreparedCase, mirrored: tuple[bool, bool, bool]) -> None:
    box, axes = Box.at((3, -2, 5), (8, 12, 10)), [axis for axis in range(3) if mirrored[axis]]
    in_image = [axis + 1 for axis in axes]
    for matrix in (None, random_matrix(0)):
        still, still_labels = moved(case, box, SpatialTransform(mirrored=STILL, matrix=matrix))
        image, labels = moved(case, box, SpatialTransform(mirrored=mirrored, matrix=matrix))
        if matrix is None:
            np.testing.assert_array_equal(still, box.read(case.image))
            np.testing.assert_array_equal(still_labels, box.read(case.labels))
        tolerance, share = (0, 0) if matrix is None else (1e-4, 0.002)
        np.testing.assert_allclose(image, np.flip(still, in_image), atol=tolerance)
        assert np.mean(labels != np.flip(still_labels, axes)) <= share


@pytest.mark.parametrize("seed", range(10))
def test_turning_and_scaling_agree_with_another_library(case: PreparedCase, seed: int) -> None:
    start = np.random.default_rng(seed).integers(-4, 12, size=3).tolist()
    box, matrix = Box.at(tuple(start), (12, 9, 14)), random_matrix(seed)
    image, labels = moved(case, box, SpatialTransform(mirrored=STILL, matrix=matrix))
    for channel, source in zip(image, case.image, strict=True):
        np.testing.assert_allclose(channel, by_scipy(source, box, matrix, 1), atol=1e-4)
    # a place right between two voxels may fall to either
    assert np.mean(labels != by_scipy(case.labels, box, matrix, 0)) < 0.002


@pytest.mark.parametrize("seed", range(10))
def test_the_touched_box_is_as_small_as_it_can_be(seed: int) -> None:
    box, matrix = Box.at((5, 7, 9), (6, 8, 4)), random_matrix(seed)
    half = (np.array(box.shape) - 1) / 2
    places = [
        matrix @ (np.array(voxel) - half) + np.array(box.start) + half
        for voxel in product(*map(range, box.shape))
    ]
    touched = touched_box(box, matrix)
    assert touched.start == tuple(np.floor(np.min(places, axis=0)).astype(int))
    assert touched.stop == tuple(np.ceil(np.max(places, axis=0)).astype(int) + 1)


def test_spatial_transforms_have_the_given_probabilities_and_ranges() -> None:
    rng = np.random.default_rng(0)
    transforms = [draw_spatial_transform(FULL, rng) for _ in range(4000)]
    assert np.mean([transform.mirrored for transform in transforms]) == pytest.approx(0.5, abs=0.02)
    matrices = [transform.matrix for transform in transforms if transform.matrix is not None]
    # either of two chances of a fifth
    assert len(matrices) / 4000 == pytest.approx(0.36, abs=0.025)
    scales = np.cbrt(np.linalg.det(matrices))
    assert (scales > 0.7).all()
    assert (scales < 1.4).all()
    scaled = ~np.isclose(scales, 1)
    assert scaled.sum() / 4000 == pytest.approx(0.2, abs=0.02)
    assert scales[scaled].mean() == pytest.approx(1.05, abs=0.02)
    angles = Rotation.from_matrix(matrices / scales[:, None, None]).as_euler("xyz", degrees=True)
    assert np.abs(angles).max() < 30
    turned = np.abs(angles).max(axis=1) > 1e-6
    assert turned.sum() / 4000 == pytest.approx(0.2, abs=0.02)
    assert angles[turned].std(axis=0) == pytest.approx([17.3] * 3, abs=1.5)


def test_every_name_in_the_settings_has_its_transforms() -> None:
    allowed = typing.get_args(TrainingConfig.model_fields["augment"].annotation)
    none = draw_spatial_transform(AUGMENTATIONS["none"], np.random.default_rng(0))
    pairs = zip(AUGMENTATIONS["light"].intensities, FULL.intensities, strict=True)
    assert set(AUGMENTATIONS) == set(allowed)
    assert (none.matrix, none.mirrored) == (None, STILL)
    assert not any(AUGMENTATIONS["none"].intensities)
    assert all(light in {0, full} for light, full in pairs)


CASE_SHAPE, SIZE = (20, 30, 10), (8, 8, 8)
NONE = (np.empty((0, 3), dtype=np.int32),) * 3


def case_of(shape: Triple, foreground: Sequence[np.ndarray] = NONE) -> PreparedCase:
    image = np.broadcast_to(np.float16(0), (4, *shape))
    return PreparedCase(
        case_id="a",
        convention=BRATS2017,
        image=image,
        labels=image[0],
        foreground=tuple(foreground),
    )


def boxes(
    n: int, fraction: float, foreground: Sequence[np.ndarray] = NONE, shape: Triple = CASE_SHAPE
) -> list[Box]:
    rng, patch = np.random.default_rng(0), PatchConfig(size=SIZE, foreground=fraction)
    return [choose_box(case_of(shape, foreground), patch, (1, 1, 1), rng) for _ in range(n)]


def test_patches_lie_anywhere_inside_the_case() -> None:
    found = boxes(2000, fraction=0)
    starts = np.array([box.start for box in found])
    assert {box.shape for box in found} == {SIZE}
    assert starts.min(axis=0).tolist() == [0, 0, 0]
    assert starts.max(axis=0).tolist() == [12, 22, 2]
    # every place is as likely: along the last axis a third each
    assert np.bincount(starts[:, 2]) == pytest.approx([667, 667, 667], abs=70)


@pytest.mark.parametrize(
    ("voxel", "start"),
    [((10, 15, 5), (6, 11, 1)), ((0, 0, 0), (0, 0, 0)), ((19, 29, 9), (12, 22, 2))],
)
def test_foreground_is_centred(voxel: tuple[int, int, int], start: tuple[int, int, int]) -> None:
    found = boxes(1, fraction=1, foreground=(np.array([voxel], dtype=np.int32), *NONE[:2]))
    assert found == [Box.at(start, SIZE)]


def test_regions_that_are_there_are_as_likely_whatever_their_size() -> None:
    many = np.tile(np.array([[5, 5, 5]], dtype=np.int32), (1000, 1))
    one = np.array([[15, 5, 5]], dtype=np.int32)
    starts = [box.start[0] for box in boxes(1000, fraction=1, foreground=(many, NONE[0], one))]
    assert Counter(starts) == {1: pytest.approx(500, abs=60), 11: pytest.approx(500, abs=60)}


@pytest.mark.parametrize("fraction", [0.0, 1 / 3, 1.0])
def test_the_share_of_foreground_patches_is_as_set(fraction: float) -> None:
    corner = np.array([[0, 0, 0]], dtype=np.int32)
    found = boxes(3000, fraction=fraction, foreground=(corner,) * 3, shape=(300, 300, 300))
    n_on_tumour = sum(box.start == (0, 0, 0) for box in found)
    assert len(set(boxes(100, fraction=fraction))) > 50  # without tumour they are anywhere
    assert n_on_tumour == pytest.approx(3000 * fraction, abs=100 if 0 < fraction < 1 else 0)


@pytest.mark.parametrize("fraction", [0, 1])
def test_a_patch_larger_than_the_case_reaches_beyond_it_on_both_sides(fraction: float) -> None:
    voxels = (np.array([[3, 3, 3]], dtype=np.int32),) * 3
    found = boxes(5, fraction=fraction, foreground=voxels, shape=(4, 7, 8))
    assert set(found) == {Box(start=(-2, -1, 0), stop=(6, 7, 8))}
    # and a whole case is rounded up
    case, patch = case_of((143, 180, 128)), PatchConfig(size="whole", foreground=fraction)
    box = choose_box(case, patch, (16, 8, 32), np.random.default_rng(0))
    assert box == Box.at((0, 0, 0), (144, 184, 128))


@pytest.mark.parametrize(
    ("error", "raised"),
    [(MemoryError(), MemoryError), (ConfigError("a"), ConfigError), (ValueError(), RuntimeError)],
)
def test_errors_of_this_package_and_of_memory_leave_a_pipeline_unchanged(error, raised) -> None:
    def fail(_: object) -> None:
        raise error

    with pytest.raises(raised):
        apply_transforms(Compose([fail]), {})


def test_a_seed_may_be_an_integer_of_numpy() -> None:
    # as MONAI 1.5.0 seeds the transforms of a pipeline
    ReadPatchd(folder=Path(), patch=PatchConfig()).set_random_state(np.uint32(2**32 - 1))
