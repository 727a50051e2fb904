"""The autoencoder: one vector between image and reconstruction, for every size."""

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import ModelConfig, load_config
from brats_seg.errors import ConfigError
from brats_seg.models.activation_checkpointing import ActivationCheckpointing
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.models.build import build_model, has_batch_statistics


@pytest.fixture(scope="module")
def network() -> Autoencoder:
    """One that has left the mean image behind, which learning begins at."""
    torch.manual_seed(0)
    network = Autoencoder(n_channels=4, latent=512)
    nn.init.normal_(network.head.weight)
    return network


def make_image(*shape: int, seed: int = 0) -> Tensor:
    """A rough image: the grid of the network takes fine noise away."""
    coarse = torch.randn(1, 4, 5, 5, 5, generator=torch.Generator().manual_seed(seed))
    return nn.functional.interpolate(coarse, size=shape, mode="trilinear")


@pytest.mark.parametrize("shape", [(143, 180, 142), (24, 24, 16), (7, 5, 3), (1, 1, 1)])
def test_any_size_comes_back_in_its_size(network: Autoencoder, shape: tuple[int, ...]) -> None:
    image = torch.randn(1, 4, *shape)

    with torch.inference_mode():
        latent = network.encode(image)
        reconstruction = network.eval()(image)

    assert latent.shape == (1, 512)
    assert reconstruction.shape == image.shape
    assert reconstruction.isfinite().all()


def test_it_has_a_few_million_parameters(network: Autoencoder) -> None:
    """The notebook's has 390,827,364 for the same 512 numbers."""
    assert 1e6 < sum(parameter.numel() for parameter in network.parameters()) < 6e6
    assert not has_batch_statistics(network)


def test_the_vector_depends_on_the_image_and_a_case_is_stable(network: Autoencoder) -> None:
    one, other = make_image(30, 40, 30), make_image(30, 40, 30, seed=1)

    with torch.inference_mode():
        first, again, second = map(network.eval().encode, (one, one.clone(), other))

    assert torch.equal(first, again)
    assert float((first - second).norm()) > 0.1 * float(first.norm())


def test_nothing_but_the_vector_reaches_the_decoder(network: Autoencoder) -> None:
    """With a vector of zeros two images come back alike; with their own they do not."""
    one, other = make_image(20, 20, 20), make_image(20, 20, 20, seed=1)
    own = [network(image) for image in (one, other)]

    whole = network.encode
    try:
        network.encode = lambda image: torch.zeros_like(whole(image))
        emptied = [network(image) for image in (one, other)]
    finally:
        del network.encode

    assert torch.equal(*emptied)
    assert not torch.allclose(*own, atol=1e-3)


def test_learning_begins_at_one_image_for_all_and_the_first_step_leaves_it() -> None:
    torch.manual_seed(0)
    network = Autoencoder(n_channels=4, latent=64)
    one, other = make_image(20, 20, 20), make_image(20, 20, 20, seed=1)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    before = [network(image) for image in (one, other)]

    (before[0] - one).square().sum().backward()
    optimizer.step()

    assert torch.equal(*before)
    assert not torch.equal(network(one), network(other))


def test_every_number_of_the_vector_is_used(network: Autoencoder) -> None:
    latent = torch.randn(1, 512, requires_grad=True)

    network.decode(latent, (16, 16, 16)).square().sum().backward()

    assert latent.grad is not None
    assert (latent.grad != 0).all()


def test_patches_do_not_see_each_other(network: Autoencoder) -> None:
    batch = torch.cat([make_image(16, 16, 16, seed=seed) for seed in range(2)])

    with torch.inference_mode():
        together = network(batch)
        alone = torch.cat([network(image[None]) for image in batch])

    assert torch.allclose(together, alone, atol=1e-4)


def gradients(network: Autoencoder) -> list[Tensor]:
    network.zero_grad()
    network(make_image(20, 24, 20)).square().mean().backward()
    return [parameter.grad for parameter in network.parameters() if parameter.grad is not None]


@pytest.mark.parametrize("mode", list(ActivationCheckpointing)[1:])
def test_no_rung_changes_a_bit_of_the_gradient(
    network: Autoencoder, mode: ActivationCheckpointing
) -> None:
    before = gradients(network)
    network.checkpointing = mode
    after = gradients(network)
    network.checkpointing = ActivationCheckpointing.NONE

    assert len(before) == len(list(network.parameters()))
    assert all(map(torch.equal, before, after))


def test_each_rung_keeps_less_than_the_one_before(network: Autoencoder) -> None:
    kept = []
    for mode in ActivationCheckpointing:
        network.checkpointing = mode
        memory: dict[int, int] = {}

        def note(tensor: Tensor, memory: dict[int, int] = memory) -> Tensor:
            memory[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage().nbytes()
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
            network(make_image(20, 24, 20))
        kept.append(sum(memory.values()))
    network.checkpointing = ActivationCheckpointing.NONE

    assert all(more > less for more, less in pairwise(kept))


@pytest.mark.parametrize("latent", [64, 128])
def test_the_settings_say_how_many_numbers(latent: int) -> None:
    network = build_model(ModelConfig(name="autoencoder", latent=latent), (9, 11, 13))

    assert network.encode(torch.zeros(1, 4, 9, 11, 13)).shape == (1, latent)


def test_numbers_that_cannot_be_shared_out_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"model\.latent: .*multiple of 64 \(got 500\)"):
        load_config(assignments=["model.name=autoencoder", "model.latent=500"])


def test_runs_under_the_former_name_of_the_vae_unet_can_be_read() -> None:
    assert load_config(text="model: {name: segresnet-vae}").model.name == "vae-unet"
