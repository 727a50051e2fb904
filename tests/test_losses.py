"""Test losses against hand-computed values, their sums over patches, and the scores of an epoch."""

import math
from collections.abc import Callable

import numpy as np
import pytest
import torch
from monai.losses import DiceFocalLoss
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits as bce

from brats_seg.config import LossConfig
from brats_seg.errors import ConfigError
from brats_seg.models.interface import TrainingOutput
from brats_seg.training import losses

# rows: true positive, false positive, false negative, true negative; columns: WT, TC, ET
HALF_RIGHT = [[2, 1, 0], [2, 0, 0], [2, 1, 0], [10, 14, 16]]
PERFECT = [[4, 4, 4], [0, 0, 0], [0, 0, 0], [12, 12, 12]]


def random_pair(n: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    logits = torch.randn(n, 3, 4, 4, 4, generator=generator, dtype=torch.float64)
    return logits, (torch.rand(n, 3, 4, 4, 4, generator=generator) > 0.7).to(torch.uint8)


def random_images(n: int, edge: int = 8) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(n, 4, edge, edge, edge, generator=generator, dtype=torch.float64)
    images[:, :, 0] = 0
    return images + 0.3 * torch.randn(images.shape, generator=generator), images


def at_once(criterion: losses.BatchDiceBce, output: object, target: Tensor) -> Tensor:
    return criterion.of_sums(criterion.sums(output, target), len(target))


def test_a_patch_of_even_odds_has_the_loss_computed_by_hand() -> None:
    target = torch.zeros(1, 3, 2, 2, 2)
    target[:, :, 0] = 1  # 4 of 8 voxels
    even = torch.zeros(1, 3, 2, 2, 2, dtype=torch.float64)
    _, images = random_images(2)
    # probability 1/2 everywhere: 2 inside the target, 4 + 4 in both together, smoothed by one voxel
    expected = 1 - (2 * 2 + 1) / (8 + 1) + math.log(2)
    assert losses.DiceBce()(even, target).item() == pytest.approx(expected)
    assert losses.DiceBce()((target.double() - 0.5) * 100, target).max() < 1e-6
    assert float(losses.ReconstructionLoss()(images, images).abs().max()) < 1e-6
    # a region that is empty and left empty
    left_empty = losses.DiceBce(LossConfig(bce=0))(even - 50, 0 * target)
    assert left_empty.item() == pytest.approx(0, abs=1e-6)


@pytest.mark.parametrize(
    ("criterion", "pair"),
    [(losses.DiceBce(), random_pair(3)), (losses.ReconstructionLoss(), random_images(3))],
)
def test_losses_are_by_patch(criterion: Callable[..., Tensor], pair: tuple[Tensor, Tensor]) -> None:
    together = criterion(*pair)
    alone = [criterion(*one) for one in zip(*(part.split(1) for part in pair), strict=True)]
    assert losses.reduction_of(criterion) == "patches"
    assert together.shape == (3,)
    assert torch.allclose(together, torch.cat(alone), atol=1e-7)


@pytest.mark.parametrize(("n", "config"), [(1, LossConfig()), (3, LossConfig(dice=0))])
def test_batch_dice_of_one_patch_is_that_of_patches(n: int, config: LossConfig) -> None:
    logits, target = random_pair(n)
    loss = at_once(losses.BatchDiceBce(config), TrainingOutput(logits=(logits,)), target)
    assert loss.item() == pytest.approx(losses.DiceBce(config)(logits, target).mean().item())


def test_coarser_levels_weigh_half_also_for_a_loss_by_dotted_name() -> None:
    logits, target = random_pair(2)
    coarse, coarse_target = logits[..., ::2, ::2, ::2], target[..., ::2, ::2, ::2]
    output = TrainingOutput(logits=(logits, coarse))
    named = losses.build_criterion(own("torch.nn.BCEWithLogitsLoss"))
    expected = (2 * losses.DiceBce()(logits, target) + losses.DiceBce()(coarse, coarse_target)) / 3
    assert torch.allclose(losses.DiceBce()(output, target), expected)
    expected = (2 * bce(logits, target.double()) + bce(coarse, coarse_target.double())) / 3
    assert torch.allclose(named(output, target), expected)


def test_half_precision_is_summed_in_single_precision() -> None:
    loss = losses.DiceBce()(torch.zeros(1, 3, 32, 32, 32).bfloat16(), torch.zeros(1, 3, 32, 32, 32))
    # 32768 * 0.5 is exact in float32; a bfloat16 sum stops growing at 256
    assert loss.item() == pytest.approx(1 - 1 / (16384 + 1) + math.log(2), rel=1e-5)
    reconstructions, images = (pair.float() for pair in random_images(1, edge=16))
    half, criterion = reconstructions.bfloat16(), losses.ReconstructionLoss()
    assert criterion(half, images).dtype == torch.float32
    assert torch.equal(criterion(half, images), criterion(half.float(), images))
    product = losses.LogitsLoss(lambda logits, target: logits.flatten() @ target.flatten())
    with torch.autocast("cpu", torch.bfloat16):
        assert product(half, images).dtype == torch.float32


def test_a_loss_that_declares_nothing_returns_one_number() -> None:
    def by_patch(logits: Tensor, target: Tensor) -> Tensor:
        return bce(logits, target.double(), reduction="none").mean((1, 2, 3, 4))

    assert losses.whole_loss(by_patch, *random_pair(1)).shape == ()
    with pytest.raises(ConfigError, match=r"by_patch returned the shape \(2,\); expected a scalar"):
        losses.whole_loss(by_patch, *random_pair(2))


def test_batch_dice_pools_patches_before_the_ratio() -> None:
    target = torch.zeros(2, 3, 2, 2, 2, dtype=torch.float64)
    target[0] = 1  # the second patch is empty
    logits = (target - 0.5) * 100
    logits[1, :, 0, 0, 0] = 50  # and has one false voxel of 8
    config = LossConfig(bce=0)
    loss = at_once(losses.BatchDiceBce(config), logits, target)
    assert loss.item() == pytest.approx(1 - (2 * 8 + 1) / (9 + 8 + 1))
    # patch by patch the false voxel costs half of a Dice
    assert losses.DiceBce(config)(logits, target).mean().item() == pytest.approx((1 - 1 / 2) / 2)


DICE_FOCAL = "monai.losses.DiceFocalLoss"


def own(name: str, **arguments: object) -> LossConfig:
    return LossConfig.model_validate({"name": name, "arguments": arguments})


def test_a_loss_by_dotted_name_gets_plain_logits_unless_it_declares_how_it_reduces() -> None:
    logits, target = random_pair(2)
    expected = DiceFocalLoss(sigmoid=True)(logits, target.double())
    criterion = losses.build_criterion(own(DICE_FOCAL, sigmoid=True))
    assert losses.reduction_of(criterion) == "outputs"
    assert torch.allclose(criterion(logits, target), expected)
    assert torch.allclose(criterion(TrainingOutput(logits=(logits,)), target), expected)
    declared = losses.build_criterion(own("brats_seg.training.losses.BatchDiceBce"))
    assert isinstance(declared, losses.BatchDiceBce)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (own("monai.losses.Nowhere"), r"loss\.name 'monai\.losses\.Nowhere' cannot be imported"),
        (own(DICE_FOCAL, sigmoids=True), r"cannot be built with loss\.arguments .*sigmoids"),
        (LossConfig(arguments={"sigmoid": True}), r"loss\.arguments .* without loss\.name"),
        (own("torch.nn.BCEWithLogitsLoss", reduction="none"), r"shape \(2, 3, .*reduction: mean"),
    ],
)
def test_a_loss_that_cannot_be_built_is_named(config: LossConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        losses.build_criterion(config)(*random_pair(2))


def test_scores_are_means_of_case_ratios_with_empty_regions_counted() -> None:
    scores = losses.overlap_columns(losses.RunningSums(counts={"a": HALF_RIGHT, "b": PERFECT}))
    expected = {
        "dice": [(0.5 + 1) / 2, (2 / 3 + 1) / 2, 1],
        "jaccard": [(1 / 3 + 1) / 2, (1 / 2 + 1) / 2, 1],
        "empty": [0, 0, 1],
    }
    for name, values in expected.items():
        columns = [scores[f"{name}_{region}"] for region in ("wt", "tc", "et")]
        assert columns == pytest.approx(values)
    assert scores["dice"] == pytest.approx(sum(expected["dice"]) / 3)
    logits, target = torch.full((2, 3, 2, 2, 2), -1.0), torch.zeros(2, 3, 2, 2, 2)
    logits[0, 0, 0] = 1  # 4 voxels of WT in the first patch
    logits[0, 0, 1] = 0  # even odds are outside
    target[0, 0, :, 0] = 1  # 4 voxels, 2 of them the same
    assert losses.count_voxels(logits, target)[:, :, 0].tolist() == [[2, 2, 2, 2], [0, 0, 0, 8]]
    logits[1, 2, 1, 1, 1] = 1  # ET alone, which label maps write as part of TC and WT
    assert losses.count_voxels(logits, target)[1].T.tolist() == [[0, 1, 0, 7]] * 3


def test_patches_of_a_case_are_pooled_before_the_ratio_in_any_order() -> None:
    sums = losses.RunningSums(loss_sum=3.0, n_patches=2)
    sums.add("a", HALF_RIGHT)
    sums.add("a", PERFECT)
    scores = losses.overlap_columns(sums)
    assert scores["loss"] == 1.5
    assert scores["dice_wt"] == pytest.approx(2 * 6 / (8 + 8))
    twice = losses.RunningSums()
    for _ in range(2):
        twice.add_all(sums)
    assert (twice.loss_sum, twice.n_patches) == (6.0, 4)
    assert losses.overlap_columns(twice) == scores
    errors = np.arange(1, 9).reshape(2, 4)
    for columns, counts in ((losses.overlap_columns, HALF_RIGHT), (losses.error_columns, errors)):
        by_order = losses.RunningSums(n_patches=1), losses.RunningSums(n_patches=1)
        for sums, ids in zip(by_order, ("abcdefg", "gfedcba"), strict=True):
            for case_id in ids:
                sums.add(case_id, np.add(counts, ord(case_id) - 96).tolist())
        # to the last bit
        assert columns(by_order[0]) == columns(by_order[1])


def test_errors_count_in_the_brain_and_a_tenth_in_the_background() -> None:
    """A voxel is brain if any modality is not zero."""
    image = torch.zeros(1, 4, 2, 2, 2, dtype=torch.float64)
    # 4 voxels of brain that are missed by 2, 4 of background missed by 1
    image[:, 3, 0] = -5
    missed = torch.where((image != 0).any(1, keepdim=True), image + 2, 1.0)
    expected = (4 * 2**2 + 4 * losses.BACKGROUND_WEIGHT * 1**2) / (4 + 4 * losses.BACKGROUND_WEIGHT)
    assert losses.ReconstructionLoss()(missed, image).tolist() == [pytest.approx(expected)]
    assert losses.add_squares(missed, image)[0].tolist() == [[16] * 4, [4] * 4]
    # a patch of background alone has a loss and no error
    nothing = torch.zeros_like(image)
    sums = losses.RunningSums(counts={"a": losses.add_squares(nothing + 1, nothing)[0].tolist()})
    assert losses.ReconstructionLoss()(nothing + 1, nothing).item() == pytest.approx(1)
    columns = losses.error_columns(sums)
    assert math.isnan(columns["rmse"])
    assert math.isnan(columns["loss"])


def test_the_error_is_the_mean_over_cases_of_roots_taken_once() -> None:
    sums = losses.RunningSums(loss_sum=6.0, n_patches=3)
    sums.add("a", [[1, 0, 0, 4], [1, 1, 1, 1]])
    sums.add("a", [[3, 0, 0, 12], [3, 3, 3, 3]])
    sums.add("b", [[18, 0, 0, 0], [2, 2, 2, 2]])
    by_modality = {"rmse_t1n": (1 + 3) / 2, "rmse_t1c": 0, "rmse_t2w": 0, "rmse_t2f": (2 + 0) / 2}
    expected = {"loss": 2, "rmse": sum(by_modality.values()) / 4, **by_modality}
    assert losses.error_columns(sums) == pytest.approx(expected)
