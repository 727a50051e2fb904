import math
from collections import Counter

import numpy as np
import pytest
import torch
from monai.data import MetaTensor
from monai.transforms import AdjustContrast, RandSimulateLowResolution, ScaleIntensityFixedMean
from torch import Tensor

from brats_seg.data import intensities
from brats_seg.data.transforms import FULL
from brats_seg.labels import MODALITIES, MODALITY_SUBSETS

SHAPE = (12, 14, 10)
BRAIN_THROUGHOUT = torch.from_numpy(np.random.default_rng(0).normal(size=(1, *SHAPE))).float()
"""An image without background: there MONAI's statistics are those of the brain too."""


@pytest.fixture
def all_channels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(intensities, "CHANNEL_CHANCE", 1.0)


def make_image(seed: int = 0) -> Tensor:
    """An image (4, 12, 14, 10) with a normalised brain in the middle and 0 around it."""
    rng = np.random.default_rng(seed)
    image = np.zeros((4, *SHAPE), dtype=np.float32)
    image[:, 2:10, 3:12, 1:9] = rng.normal(size=(4, 8, 9, 8))
    return torch.from_numpy(image)


def changed(change: intensities.Change, seed: int = 0, image: Tensor | None = None) -> Tensor:
    image = make_image() if image is None else image.clone()
    return certain(change).set_random_state(seed)({"image": image})["image"]


def certain(*changes: intensities.Change) -> intensities.RandIntensitiesd:
    return intensities.RandIntensitiesd("image", [(change, 1.0) for change in changes])


def inside(image: Tensor) -> np.ndarray:
    return image.numpy()[:, 2:10, 3:12, 1:9].reshape(4, -1)


def test_the_brain_is_where_any_channel_is_not_0_and_has_its_statistics() -> None:
    image = torch.zeros(4, 3, 3, 3)
    image[0, 0, 0, 0], image[3, 1, 2, 0] = -1, 2
    for kind in (image, image.half()):
        assert intensities.BrainMask.of(kind).n_voxels == 2
        assert intensities.BrainMask.of(kind).mask.nonzero().tolist() == [[0, 0, 0], [1, 2, 0]]
    mean, std = intensities.BrainMask.of(make_image()).mean_and_std(make_image()[1])
    assert mean == pytest.approx(inside(make_image())[1].mean(), abs=1e-6)
    assert std == pytest.approx(inside(make_image())[1].std(), rel=1e-5)


@pytest.mark.parametrize("change", intensities.CHANGES)
def test_changes_follow_the_random_state(change: intensities.Change, all_channels: None) -> None:
    flat = make_image()
    flat[2] = (flat[2] != 0) * 0.5  # a channel without contrast
    background = intensities.BrainMask.of(flat).mask == 0
    for image in (make_image(), flat):
        found = [changed(change, seed, image) for seed in (3, 3, 4)]
        assert torch.equal(found[0], found[1])
        assert not torch.equal(found[0], found[2])
        assert not torch.equal(found[0], image)
        assert (found[0][:, background] == 0).all()
        assert found[0].isfinite().all()


@pytest.mark.parametrize("seed", range(3))
def test_noise_has_one_strength_and_is_independent_between_channels(seed: int) -> None:
    noise = inside(changed(intensities.add_noise, seed)) - inside(make_image())
    random = np.random.RandomState(seed)
    random.uniform()  # whether there is noise
    std = random.uniform(0, 0.1)
    np.testing.assert_allclose(noise.std(axis=1), std, rtol=0.15)
    assert np.abs(np.corrcoef(noise) - np.eye(4)).max() < 0.2


@pytest.mark.parametrize("seed", range(3))
def test_brightness_multiplies_each_channel_by_a_factor_of_its_own(seed: int) -> None:
    before = inside(make_image())
    factors = inside(changed(intensities.change_brightness, seed)) / before
    np.testing.assert_allclose(factors.std(axis=1), 0, atol=1e-6)
    assert len(set(factors[:, 0].tolist())) == 4
    assert ((factors > 0.75) & (factors < 1.25)).all()


def test_smoothing_is_a_gaussian_whose_weights_add_up_at_the_border() -> None:
    """Against a plain loop over voxels, on an image that is brain throughout."""
    image = torch.from_numpy(np.random.default_rng(0).normal(size=(1, 6, 5, 4)) + 9).float()
    smoothed = intensities.blur_along(image[0], 1, 0.8)
    weights = [math.exp(-0.5 * (offset / 0.8) ** 2) for offset in range(4)]
    for j in range(5):
        near = [k for k in range(5) if abs(k - j) <= 3]
        total = sum(weights[abs(k - j)] for k in near)
        expected = sum(weights[abs(k - j)] * image[0, :, k] for k in near) / total
        np.testing.assert_allclose(smoothed[:, j], expected, rtol=1e-5)


def test_smoothing_and_low_resolution_take_half_of_the_channels() -> None:
    for change in (intensities.blur, intensities.lower_resolution):
        n_changed = sum(
            int((changed(change, seed) != make_image()).any(dim=(1, 2, 3)).sum())
            for seed in range(50)
        )
        assert n_changed == pytest.approx(100, abs=25)


def test_changes_come_as_often_as_their_chances_say() -> None:
    counts = np.zeros(len(intensities.CHANGES))
    changes = tuple(zip(intensities.CHANGES, FULL.intensities, strict=True))
    transform = intensities.RandIntensitiesd("image", changes)
    for seed in range(1000):
        transform.set_random_state(seed).randomize()
        counts += [change in transform.drawn for change in intensities.CHANGES]
    assert counts.tolist() == pytest.approx([100, 200, 150, 150, 250, 100, 300], abs=50)
    assert not transform({"image": torch.zeros(4, 5, 5, 5)})["image"].any()


@pytest.mark.parametrize("change", intensities.CHANGES)
def test_arrays_and_tensors_of_any_kind_are_changed_alike(change: intensities.Change) -> None:
    expected = changed(change)
    for image in (make_image().numpy(), MetaTensor(make_image()), make_image().double()):
        found = certain(change).set_random_state(0)({"image": image})["image"]
        assert type(found) is Tensor
        assert torch.equal(found, expected)


@pytest.mark.parametrize(
    ("ours", "factor", "theirs"),
    [
        *(
            (intensities.change_gamma, gamma, AdjustContrast(gamma, retain_stats=True))
            for gamma in (0.7, 1.5)
        ),
        (intensities.change_inverted_gamma, 0.7, AdjustContrast(0.7, True, True)),
        (intensities.change_contrast, 0.75, ScaleIntensityFixedMean(-0.25, preserve_range=True)),
        (intensities.change_contrast, 1.2, ScaleIntensityFixedMean(0.2, preserve_range=True)),
    ],
)
def test_a_change_is_monais_where_all_is_brain(ours, factor, theirs, monkeypatch):
    monkeypatch.setattr(intensities, "_around_one", lambda *_: factor)
    found = changed(ours, image=BRAIN_THROUGHOUT)
    np.testing.assert_allclose(found, theirs(BRAIN_THROUGHOUT), atol=2e-3)


def test_low_resolution_is_monais(monkeypatch: pytest.MonkeyPatch, all_channels: None) -> None:
    """MONAI keeps the first voxel of two, ours the second: nearest, and nearest-exact of torch."""
    monkeypatch.setattr(intensities, "RESOLUTION", (0.5, 0.5))
    options = {"zoom_range": (0.5, 0.5), "downsample_mode": "nearest-exact"}
    theirs = RandSimulateLowResolution(prob=1.0, **options)
    expected = theirs.set_random_state(0)(BRAIN_THROUGHOUT.clone())
    found = changed(intensities.lower_resolution, image=BRAIN_THROUGHOUT)
    np.testing.assert_allclose(found, expected, rtol=1e-4, atol=1e-5)
    # of four voxels the second and the fourth are kept, and spread to where they stand for
    line = torch.ones(4, 1, 1, 4) * torch.tensor([1.0, 2.0, 3.0, 6.0])
    coarse = changed(intensities.lower_resolution, image=line)
    np.testing.assert_allclose(coarse[0, 0, 0], [2, 3, 5, 6])


def kept_of(image: Tensor) -> tuple[str, ...]:
    return tuple(n for n, channel in zip(MODALITIES, image, strict=True) if bool(channel.any()))


def test_modality_dropout_leaves_every_subset_of_whole_channels_equally_often() -> None:
    dropout = intensities.RandIntensitiesd("image", [(intensities.drop_modalities, 0.7)])
    dropout.set_random_state(seed=0)
    ones, n_draws = torch.ones(4, 1, 1, 1), 4000
    found = Counter(kept_of(dropout({"image": ones.clone()})["image"]) for _ in range(n_draws))
    assert {*found} == {MODALITIES, *MODALITY_SUBSETS}
    assert found.pop(MODALITIES) / n_draws == pytest.approx(0.3, abs=0.03)
    for n_found in found.values():
        assert n_found / n_draws == pytest.approx(0.05, abs=0.02)
    for seed in range(20):
        result = changed(intensities.drop_modalities, seed)
        for name, channel, before in zip(MODALITIES, result, make_image(), strict=True):
            assert channel.equal(before if name in kept_of(result) else torch.zeros_like(before))
