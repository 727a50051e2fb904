"""Test networks applied to one scan: inputs and names of the features."""

from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brats_seg.cases.find import find_inputs
from brats_seg.errors import CaseError
from brats_seg.inference.method import Scan
from brats_seg.inference.model import Member
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.survival.leakage import TrainingCases
from brats_seg.survival.networks import Encoder
from tests.builders import write_case
from tests.inference_builders import CPU, read_scan


class Means(nn.Module):
    """Encodes an image as the mean of each channel."""

    def encode(self, image: Tensor) -> Tensor:
        return image.mean(dim=(2, 3, 4))


class Broken(nn.Module):
    """Encodes an image as NaN."""

    def encode(self, image: Tensor) -> Tensor:
        return torch.tensor([[1.0, torch.nan, torch.inf]])


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    write_case(tmp_path)
    return read_scan(find_inputs([tmp_path])[0], (1.0, 1.0, 1.0))


def make_encoder(network: nn.Module, channels=(0, 1, 2, 3)) -> Encoder:
    member = Member(
        network=network,
        name="autoencoder",
        patch=(8, 8, 8),
        window=None,
        channels=channels,
        regions=(0, 1, 2),
    )
    autoencoder = Reconstructor(member=member, device=CPU, spacing_mm=(1.0, 1.0, 1.0))
    return Encoder(path=Path("run"), autoencoder=autoencoder, training=TrainingCases(people=None))


def test_channels_are_in_the_order_of_training(scan):
    """The notebook trained on one order of the modalities and predicted with another."""
    latent = make_encoder(Means(), channels=(3, 0, 1, 2)).encode(scan, 0)

    means = scan.image.mean(axis=(1, 2, 3))
    assert [one.value for one in latent] == pytest.approx(means[[3, 0, 1, 2]].tolist(), abs=1e-6)


def test_features_are_named_after_their_autoencoder(scan):
    latent = make_encoder(Means()).encode(scan, 2)

    assert [one.name for one in latent] == [f"latent2_00{place}" for place in range(4)]


def test_a_vector_that_is_not_finite_is_an_error_of_the_case(scan):
    with pytest.raises(
        CaseError, match="a latent vector with NaN or infinity in 2 values; expected finite"
    ):
        make_encoder(Broken()).encode(scan, 0)


def test_the_scan_stays_as_it_is(scan):
    before = scan.image.copy()

    make_encoder(Means(), channels=(3, 2, 1, 0)).encode(scan, 0)

    assert np.array_equal(scan.image, before)
