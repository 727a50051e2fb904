"""Test losses against hand-computed values, and their sums over patches."""

import math

import pytest
import torch
from monai.losses import DiceFocalLoss

from brats_seg.config import LossConfig
from brats_seg.errors import ConfigError
from brats_seg.models.interface import TrainingOutput
from brats_seg.training.losses import BatchDiceBce, DiceBce, build_criterion, reduction_of


def random_pair(n: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(n, 3, 4, 4, 4, generator=generator, dtype=torch.float64)
    target = (torch.rand(n, 3, 4, 4, 4, generator=generator) > 0.7).to(torch.uint8)
    return logits, target


def test_a_patch_of_even_odds_has_the_loss_computed_by_hand() -> None:
    logits = torch.zeros(1, 3, 2, 2, 2, dtype=torch.float64)
    target = torch.zeros(1, 3, 2, 2, 2)
    target[:, :, 0] = 1  # 4 of 8 voxels

    loss = DiceBce()(logits, target)

    # probability 1/2 everywhere: 2 inside the target, 4 + 4 in both together, smoothed by one voxel
    dice = (2 * 2 + 1) / (8 + 1)
    assert loss.item() == pytest.approx(1 - dice + math.log(2))


def test_a_perfect_prediction_costs_next_to_nothing() -> None:
    _, target = random_pair(2)

    loss = DiceBce()((target.double() - 0.5) * 100, target)

    assert loss.max() < 1e-6


def test_losses_of_a_batch_are_those_of_its_patches() -> None:
    logits, target = random_pair(3)

    together = DiceBce()(logits, target)
    alone = torch.cat([DiceBce()(logits[i : i + 1], target[i : i + 1]) for i in range(3)])

    assert together.shape == (3,)
    assert torch.equal(together, alone)


def test_an_empty_region_that_is_left_empty_has_no_dice_loss() -> None:
    logits = torch.full((1, 3, 4, 4, 4), -50.0)

    loss = DiceBce(LossConfig(bce=0))(logits, torch.zeros(1, 3, 4, 4, 4))

    assert loss.item() == pytest.approx(0, abs=1e-6)


def test_coarser_levels_weigh_half() -> None:
    logits, target = random_pair(2)
    coarse, coarse_target = logits[..., ::2, ::2, ::2], target[..., ::2, ::2, ::2]

    loss = DiceBce()(TrainingOutput(logits=(logits, coarse)), target)

    expected = (2 * DiceBce()(logits, target) + DiceBce()(coarse, coarse_target)) / 3
    assert torch.allclose(loss, expected)


def test_half_precision_logits_are_summed_in_single_precision() -> None:
    logits = torch.zeros(1, 3, 32, 32, 32, dtype=torch.bfloat16)
    target = torch.zeros(1, 3, 32, 32, 32)

    loss = DiceBce()(logits, target)

    # 32768 * 0.5 is exact in float32; a bfloat16 sum stops growing at 256
    assert loss.item() == pytest.approx(1 - 1 / (16384 + 1) + math.log(2), rel=1e-5)


def test_batch_dice_of_one_patch_is_its_patch_dice() -> None:
    logits, target = random_pair(1)
    criterion = BatchDiceBce()

    loss = criterion.of_sums(criterion.sums(logits, target), 1)

    assert loss.item() == pytest.approx(DiceBce()(logits, target).item())


def test_batch_dice_pools_patches_before_the_ratio() -> None:
    target = torch.zeros(2, 3, 2, 2, 2, dtype=torch.float64)
    target[0] = 1  # the second patch is empty
    logits = (target - 0.5) * 100
    logits[1, :, 0, 0, 0] = 50  # and has one false voxel of 8
    criterion = BatchDiceBce(LossConfig(bce=0))

    loss = criterion.of_sums(criterion.sums(logits, target), 2)

    assert loss.item() == pytest.approx(1 - (2 * 8 + 1) / (9 + 8 + 1))
    # patch by patch the false voxel costs half of a Dice
    assert DiceBce(LossConfig(bce=0))(logits, target).mean().item() == pytest.approx(
        (1 - 1 / 2) / 2
    )


def test_batch_dice_has_the_cross_entropy_of_the_mean_patch() -> None:
    logits, target = random_pair(3)
    config = LossConfig(dice=0)
    criterion = BatchDiceBce(config)
    output = TrainingOutput(logits=(logits,))

    loss = criterion.of_sums(criterion.sums(output, target), 3)

    assert loss.item() == pytest.approx(DiceBce(config)(logits, target).mean().item())


DICE_FOCAL = "monai.losses.DiceFocalLoss"


def own(name: str, **arguments: object) -> LossConfig:
    return LossConfig.model_validate({"name": name, "arguments": arguments})


def test_a_loss_by_dotted_name_gets_plain_logits() -> None:
    logits, target = random_pair(2)
    expected = DiceFocalLoss(sigmoid=True)(logits, target.double())

    criterion = build_criterion(own(DICE_FOCAL, sigmoid=True))

    assert reduction_of(criterion) == "outputs"
    assert torch.allclose(criterion(logits, target), expected)
    output = TrainingOutput(logits=(logits,))
    assert torch.allclose(criterion(output, target), expected)


def test_levels_count_for_a_loss_by_dotted_name_too() -> None:
    logits, target = random_pair(2)
    coarse, coarse_target = logits[..., ::2, ::2, ::2], target[..., ::2, ::2, ::2]
    criterion = build_criterion(own("torch.nn.BCEWithLogitsLoss"))

    loss = criterion(TrainingOutput(logits=(logits, coarse)), target)

    bce = torch.nn.functional.binary_cross_entropy_with_logits
    expected = (2 * bce(logits, target.double()) + bce(coarse, coarse_target.double())) / 3
    assert torch.allclose(loss, expected)


def test_a_loss_by_dotted_name_that_declares_how_it_reduces_is_used_as_it_is() -> None:
    criterion = build_criterion(own("brats_seg.training.losses.BatchDiceBce"))

    assert isinstance(criterion, BatchDiceBce)


def test_a_loss_by_dotted_name_is_a_scalar() -> None:
    criterion = build_criterion(own("torch.nn.BCEWithLogitsLoss", reduction="none"))

    with pytest.raises(ConfigError, match=r"returned the shape \(2, 3, .*reduction: mean"):
        criterion(*random_pair(2))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (own("monai.losses.Nowhere"), r"loss\.name 'monai\.losses\.Nowhere' cannot be imported"),
        (own(DICE_FOCAL, sigmoids=True), r"cannot be built with loss\.arguments .*sigmoids"),
        (LossConfig(arguments={"sigmoid": True}), r"loss\.arguments .* without loss\.name"),
    ],
)
def test_a_loss_that_cannot_be_built_is_named(config: LossConfig, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        build_criterion(config)
