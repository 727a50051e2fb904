"""Probabilities: the mean over networks and mirror images, in windows that the network takes."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import Config, PatchConfig
from brats_seg.errors import ConfigError
from brats_seg.inference.model import load_model
from brats_seg.inference.predict import (
    PredictionFallback,
    entropy,
    predict_probabilities,
    window_of,
)
from brats_seg.inference.settings import PredictionSettings
from brats_seg.runtime.sliding_window import predict_logits
from brats_seg.runtime.weights import FittedPrediction
from tests.inference_builders import CONFIG, CPU, Pointwise, make_model, write_run

IMAGE = np.random.default_rng(0).standard_normal((4, 12, 10, 9)).astype(np.float32)


class Constant(nn.Module):
    """Three logits, whatever the image."""

    def __init__(self, *logits: float) -> None:
        super().__init__()
        self.logits = nn.Parameter(torch.tensor(logits, dtype=torch.float32))

    def forward(self, image: Tensor) -> Tensor:
        return self.logits[None, :, None, None, None].expand(1, 3, *image.shape[2:])


def predict(*networks: nn.Module, **settings: object) -> np.ndarray:
    model = make_model(*networks)
    return predict_probabilities(
        model, IMAGE, PredictionSettings.model_validate(settings), PredictionFallback("case", CPU)
    )


def sigmoid(logit: float) -> float:
    return 1 / (1 + np.exp(-logit))


def test_probabilities_not_logits_are_averaged():
    """By hand: sigmoid(-2) = 0.1192 and sigmoid(4) = 0.9820, mean 0.5506; of logits it were 0.73."""
    found = predict(Constant(-2, 0, 1), Constant(4, 0, 3))

    assert found[0] == pytest.approx(0.5506, abs=1e-4)
    assert found[1] == pytest.approx(0.5)
    assert found[2] == pytest.approx((sigmoid(1) + sigmoid(3)) / 2, abs=1e-6)


def test_mirror_images_are_turned_back():
    """A network that sees each voxel alone gives the same with and without them."""

    class Alone(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.ones(1))

        def forward(self, image: Tensor) -> Tensor:
            return image[:, :3] * self.weight

    np.testing.assert_allclose(predict(Alone(), tta=True), predict(Alone()), atol=1e-6)


def test_all_eight_mirror_images_are_averaged():
    """Against a slow loop, with a network to which directions matter."""
    network = Pointwise()
    expected = np.zeros((3, *IMAGE.shape[1:]))
    for mirror in np.ndindex(2, 2, 2):
        axes = tuple(axis + 1 for axis in range(3) if mirror[axis])
        flipped = torch.from_numpy(np.flip(IMAGE, axes).copy())
        with torch.no_grad():
            logits = predict_logits(network, flipped, window=(8, 8, 8), overlap=0.5)
        expected += np.flip(torch.sigmoid(logits).numpy(), axes) / 8

    np.testing.assert_allclose(predict(network, tta=True), expected, atol=1e-6)
    assert np.abs(predict(network) - expected).max() > 0.1


def test_a_network_gets_its_modalities_and_gives_its_regions_in_its_own_order():
    usual = make_model()

    class Reordered(Pointwise):
        def forward(self, image: Tensor) -> Tensor:
            # FLAIR first, as in the decathlon; ET, TC, WT
            return super().forward(image[:, [1, 2, 3, 0]])[:, [2, 1, 0]]

    other = make_model(Reordered())
    reordered = replace(other.members[0], channels=(3, 0, 1, 2), regions=(2, 1, 0))
    other = replace(other, members=(reordered,))
    settings = PredictionSettings()

    found = [
        predict_probabilities(m, IMAGE, settings, PredictionFallback("a", CPU))
        for m in (usual, other)
    ]

    np.testing.assert_allclose(*found, atol=1e-6)


def test_a_case_that_does_not_fit_is_computed_in_smaller_windows(tmp_path):
    seen = []

    class Picky(Pointwise):
        def forward(self, image: Tensor) -> Tensor:
            seen.append(tuple(image.shape[2:]))
            if image[0, 0].numel() > 16**3:
                raise torch.OutOfMemoryError("full")
            return super().forward(image)

    image = np.zeros((4, 40, 40, 40), dtype=np.float32)
    fallback = PredictionFallback("a", CPU)

    predict_probabilities(
        make_model(Picky()), image, PredictionSettings(window=(32, 32, 32)), fallback
    )

    assert seen[0] == (32, 32, 32)
    assert seen[-1] == (16, 16, 16)
    assert fallback.warnings


def member_trained_on(size: object):
    config = Config(model=CONFIG.model, patch=PatchConfig.model_validate({"size": size}))
    return make_model(config=config).members[0]


@pytest.mark.parametrize(
    ("size", "settings", "expected"),
    [
        ((8, 8, 8), {}, (8, 8, 8)),
        ((8, 8, 8), {"windows": "whole"}, (14, 12, 10)),
        ((8, 8, 8), {"window": (10, 10, 10)}, (10, 10, 10)),
        ("whole", {}, (14, 12, 10)),
        ("whole", {"windows": "sliding"}, (8, 8, 8)),
        ("whole", {"window": (10, 10, 10)}, (10, 10, 10)),
    ],
)
def test_the_window_is_what_was_learnt_unless_asked_otherwise(size, settings, expected):
    """The network halves once: sizes are even."""
    config = PredictionSettings.model_validate(settings)

    assert window_of(member_trained_on(size), config, (13, 11, 10)) == expected


def test_a_window_that_scored_best_is_taken_whatever_was_learnt_on():
    fitted = FittedPrediction(window=(16, 16, 16))
    config = Config(model=CONFIG.model, patch=PatchConfig(size="whole"))
    member = make_model(fitted=fitted, config=config).members[0]

    assert window_of(member, PredictionSettings(), (13, 11, 10)) == (16, 16, 16)
    assert window_of(member, PredictionSettings(windows="whole"), (13, 11, 10)) == (14, 12, 10)


def test_a_window_that_does_not_fit_names_the_next_one_that_does():
    config = PredictionSettings(window=(9, 8, 7))

    with pytest.raises(ConfigError, match=r"9x8x7 does not fit .* multiples of 2x2x2.*: 10,8,8\."):
        window_of(member_trained_on((8, 8, 8)), config, (13, 11, 10))


def test_entropy_is_one_bit_at_even_odds_and_none_when_sure():
    probabilities = np.array([[0, 1, 0.5, 0.25], [0, 1, 0, 0], [0, 0, 0, 0.25]], np.float32)

    bits = entropy(probabilities[:, :, None, None]).ravel()

    assert bits == pytest.approx([0, 0, 1, 0.811278], abs=1e-6)


def test_an_ensemble_of_runs_is_the_mean_of_its_members(tmp_path):
    paths = [write_run(tmp_path / f"run{seed}", seed=seed) for seed in range(2)]

    both, *single = [
        predict_probabilities(
            load_model(p, CPU), IMAGE, PredictionSettings(), PredictionFallback("a", CPU)
        )
        for p in (paths, paths[:1], paths[1:])
    ]

    np.testing.assert_allclose(both, np.mean(single, axis=0), atol=1e-6)
    assert np.abs(single[0] - single[1]).max() > 0.01
