"""Test the voxel counts of patches and the scores of an epoch."""

import math

import numpy as np
import pytest
import torch
from torch import Tensor

from brats_seg.training.losses import (
    BACKGROUND_WEIGHT,
    ReconstructionLoss,
    RunningSums,
    add_squares,
    count_voxels,
    error_columns,
    overlap_columns,
)

# rows: true positive, false positive, false negative, true negative; columns: WT, TC, ET
HALF_RIGHT = [[2, 1, 0], [2, 0, 0], [2, 1, 0], [10, 14, 16]]
PERFECT = [[4, 4, 4], [0, 0, 0], [0, 0, 0], [12, 12, 12]]


def test_voxels_are_counted_patch_by_patch() -> None:
    logits = torch.full((2, 3, 2, 2, 2), -1.0)
    logits[0, 0, 0] = 1  # 4 voxels of WT in the first patch
    target = torch.zeros(2, 3, 2, 2, 2)
    target[0, 0, :, 0] = 1  # 4 voxels, 2 of them the same

    counts = count_voxels(logits, target)

    assert counts[0, :, 0].tolist() == [2, 2, 2, 2]
    assert counts[1, :, 0].tolist() == [0, 0, 0, 8]


def test_scores_are_means_of_case_ratios_with_empty_regions_counted() -> None:
    sums = RunningSums(counts={"a": HALF_RIGHT, "b": PERFECT})

    found = overlap_columns(sums)

    expected = {
        "dice": [(0.5 + 1) / 2, (2 / 3 + 1) / 2, 1],
        "jaccard": [(1 / 3 + 1) / 2, (1 / 2 + 1) / 2, 1],
        "empty": [0, 0, 1],
    }
    for name, values in expected.items():
        assert [found[f"{name}_{region}"] for region in ("wt", "tc", "et")] == pytest.approx(values)
    assert found["dice"] == pytest.approx(sum(expected["dice"]) / 3)


def test_patches_of_a_case_are_pooled_before_the_ratio() -> None:
    sums = RunningSums(loss_sum=3.0, n_patches=2)
    sums.add("a", HALF_RIGHT)
    sums.add("a", PERFECT)

    scores = overlap_columns(sums)

    assert scores["loss"] == 1.5
    assert scores["dice_wt"] == pytest.approx(2 * 6 / (8 + 8))


def test_the_order_in_which_cases_come_changes_nothing() -> None:
    there, back = RunningSums(n_patches=1), RunningSums(n_patches=1)
    for sums, ids in ((there, "abc"), (back, "cba")):
        for case_id in ids:
            sums.add(case_id, (np.array(HALF_RIGHT) * ord(case_id)).tolist())

    assert overlap_columns(there) == overlap_columns(back)


def random_pair(n: int, seed: int = 0, edge: int = 8) -> tuple[Tensor, Tensor]:
    """Reconstructions and images whose first layer is background."""
    generator = torch.Generator().manual_seed(seed)
    images = torch.randn(n, 4, edge, edge, edge, generator=generator, dtype=torch.float64)
    images[:, :, 0] = 0
    return images + 0.3 * torch.randn(images.shape, generator=generator), images


def half_brain() -> tuple[Tensor, Tensor]:
    """4 voxels of brain that are missed by 2, 4 of background missed by 1."""
    image = torch.zeros(1, 4, 2, 2, 2, dtype=torch.float64)
    image[:, :, 0] = 5
    return torch.where(image == 0, 1.0, 3.0).double(), image


def test_an_error_in_the_background_counts_a_tenth() -> None:
    reconstruction, image = half_brain()

    loss = ReconstructionLoss()(reconstruction, image)

    expected = (4 * 2**2 + 4 * BACKGROUND_WEIGHT * 1**2) / (4 + 4 * BACKGROUND_WEIGHT)
    assert loss.tolist() == [pytest.approx(expected)]


def test_a_voxel_is_brain_if_any_modality_is_not_zero() -> None:
    image = torch.zeros(1, 4, 2, 1, 1, dtype=torch.float64)
    image[0, 3, 0] = 1

    loss = ReconstructionLoss()(image + 2, image)
    squares, n_voxels = add_squares(image + 2, image)[0]

    assert loss.item() == pytest.approx(4)
    assert n_voxels.tolist() == [1, 1, 1, 1]
    assert squares.tolist() == [4, 4, 4, 4]


def test_a_patch_of_background_alone_has_a_loss_and_no_error() -> None:
    image = torch.zeros(1, 4, 2, 2, 2)
    sums = RunningSums(loss_sum=1.0, n_patches=1)
    sums.add("a", add_squares(image + 1, image)[0].tolist())

    assert ReconstructionLoss()(image + 1, image).item() == pytest.approx(1)
    assert math.isnan(error_columns(sums)["rmse"])


def test_losses_of_a_batch_are_those_of_its_patches() -> None:
    reconstructions, images = random_pair(3)
    criterion = ReconstructionLoss()

    together = criterion(reconstructions, images)
    alone = [criterion(r[None], i[None]) for r, i in zip(reconstructions, images, strict=True)]

    assert criterion.reduces == "patches"
    assert together.shape == (3,)
    assert torch.allclose(together, torch.cat(alone), atol=1e-7)


def test_a_perfect_reconstruction_costs_nothing() -> None:
    _, images = random_pair(2)

    losses = ReconstructionLoss()(images, images)

    assert float(losses.abs().max()) < 1e-6


def test_half_precision_is_summed_in_float32() -> None:
    reconstructions, images = (pair.float() for pair in random_pair(1, edge=16))
    expected = ReconstructionLoss()(reconstructions.bfloat16().float(), images)

    found = ReconstructionLoss()(reconstructions.bfloat16(), images)

    assert found.dtype == torch.float32
    assert torch.equal(found, expected)


def test_the_error_is_the_mean_over_cases_of_roots_taken_once() -> None:
    """Two patches of case a, with 1 and 3 voxels; one of case b."""
    sums = RunningSums(loss_sum=6.0, n_patches=3)
    sums.add("a", [[1, 0, 0, 4], [1, 1, 1, 1]])
    sums.add("a", [[3, 0, 0, 12], [3, 3, 3, 3]])
    sums.add("b", [[18, 0, 0, 0], [2, 2, 2, 2]])

    columns = error_columns(sums)

    assert columns == {
        "loss": 2.0,
        "rmse": pytest.approx(((1 + 3) / 2 + 0 + 0 + (2 + 0) / 2) / 4),
        "rmse_t1n": pytest.approx((1 + 3) / 2),
        "rmse_t1c": 0.0,
        "rmse_t2w": 0.0,
        "rmse_t2f": pytest.approx((2 + 0) / 2),
    }


def test_an_image_without_contrast_has_an_error_of_one() -> None:
    """Inside the brain prepared cases have mean 0 and standard deviation 1."""
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 4, 10, 10, 10, generator=generator)
    image = (image - image.mean((2, 3, 4), keepdim=True)) / image.std((2, 3, 4), keepdim=True)
    sums = RunningSums(n_patches=1)
    sums.add("a", add_squares(torch.zeros_like(image), image)[0].tolist())

    assert error_columns(sums)["rmse"] == pytest.approx(1, rel=1e-3)


def test_squares_agree_with_a_loop() -> None:
    reconstruction, image = (part.numpy() for part in random_pair(2, edge=5))

    found = add_squares(torch.from_numpy(reconstruction), torch.from_numpy(image))

    for n in range(2):
        brain = (image[n] != 0).any(0)
        for modality in range(4):
            difference = (reconstruction[n, modality] - image[n, modality])[brain]
            assert found[n, 0, modality].item() == pytest.approx(np.square(difference).sum())
            assert found[n, 1, modality].item() == brain.sum()
