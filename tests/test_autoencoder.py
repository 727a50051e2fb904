"""Test the autoencoder, and the training of one."""

from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg import Reconstructor, build_model, write_phantom_cases
from brats_seg.config import Config, ModelConfig, load_config
from brats_seg.data.fold import open_fold
from brats_seg.data.loader import whole_case
from brats_seg.models import autoencoder
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.progress import untracked
from brats_seg.runtime.device import Device
from brats_seg.training.losses import build_task
from brats_seg.training.trainer import Trainer
from tests.training_builders import train


@pytest.fixture(scope="module")
def network() -> Autoencoder:
    """A network whose reconstructions differ from the mean image, at which training starts."""
    torch.manual_seed(0)
    network = Autoencoder(n_channels=4, latent=512)
    nn.init.normal_(network.head.weight)
    return network


def make_image(*shape: int, seed: int = 0) -> Tensor:
    """A coarse image: the grid of the network smooths fine noise away."""
    coarse = torch.randn(1, 4, 5, 5, 5, generator=torch.Generator().manual_seed(seed))
    return functional.interpolate(coarse, size=shape, mode="trilinear")


@pytest.mark.parametrize("shape", [(143, 180, 142), (24, 24, 16), (7, 5, 3), (1, 1, 1)])
def test_any_size_comes_back_in_its_size(network: Autoencoder, shape: tuple[int, ...]) -> None:
    image = torch.randn(1, 4, *shape)
    with torch.inference_mode():
        latent = network.encode(image)
        reconstruction = network.eval()(image)
    assert latent.shape == (1, 512)
    assert reconstruction.shape == image.shape
    assert reconstruction.isfinite().all()


def test_only_the_vector_is_decoded(network: Autoencoder, monkeypatch: pytest.MonkeyPatch) -> None:
    images = make_image(20, 20, 20), make_image(20, 20, 20, seed=1)
    one, other = map(network, images)
    assert not torch.allclose(one, other, atol=1e-3)
    monkeypatch.setattr(network, "encode", lambda image: torch.zeros(1, 512))
    assert torch.equal(*map(network, images))
    latent = torch.randn(1, 512, requires_grad=True)
    network.decode(latent, (16, 16, 16)).square().sum().backward()
    assert (latent.grad != 0).all()


def test_learning_begins_at_one_image_for_all_and_the_first_step_leaves_it() -> None:
    torch.manual_seed(0)
    network = build_model(ModelConfig(name="autoencoder", latent=64), (20, 20, 20))
    images = make_image(20, 20, 20), make_image(20, 20, 20, seed=1)
    assert network.encode(images[0]).shape == (1, 64)
    before = [network(image) for image in images]
    (before[0] - images[0]).square().sum().backward()
    torch.optim.SGD(network.parameters(), lr=0.01).step()
    assert torch.equal(*before)
    assert not torch.equal(*map(network, images))


CPU = Device(torch_device=torch.device("cpu"))
SETTINGS = ("model.name=autoencoder", "model.latent=64", "training.n_epochs=2")


def settings(*changes: str) -> Config:
    usual = ("folds.n_folds=3", "training.precision=fp32", "training.n_workers=0")
    return load_config(assignments=[*SETTINGS, *usual, *changes])


def test_a_run_has_its_files_without_dice(data, tmp_path, tiny_run, monkeypatch):
    monkeypatch.setattr(autoencoder, "GRID", (32, 32, 32))
    outcome = Trainer(data=data, config=settings(), run_path=tmp_path / "run").run(track=untracked)
    names = [{path.name for path in run.iterdir()} for run in (tmp_path / "run", tiny_run)]
    assert names[0] == names[1]
    history = pd.read_csv(tmp_path / "run" / "history.csv")
    assert not [column for column in history if "dice" in column or "jaccard" in column]
    assert history["step"].tolist() == [2, 4]
    assert outcome.best == history["val_loss"].iloc[-1]
    assert np.isfinite(history["val_loss"]).all()
    parts = history[[f"val_rmse_{m}" for m in ("t1n", "t1c", "t2w", "t2f")]].mean(axis=1)
    assert history["val_rmse"].tolist() == pytest.approx(parts.tolist())
    # the target of a patch is the patch
    sample = whole_case(data.folder, data.split.train[0], build_task(settings()).target_key)
    assert torch.equal(sample.image, sample.target)
    assert sample.image.shape[0] == 4


@pytest.mark.slow
def test_a_short_training_beats_the_mean_image_on_held_out_cases(tmp_path: Path) -> None:
    write_phantom_cases(tmp_path / "scans", n_cases=9, seed=0)
    config = settings("model.latent=512", "training.n_epochs=10")
    data = open_fold(tmp_path / "scans", fold=0, config=config, prepared_path=tmp_path / "prepared")
    train(data, tmp_path / "run", config)

    def images(ids: tuple[str, ...]) -> list[Tensor]:
        return [whole_case(data.folder, case_id).image[None].float() for case_id in ids]

    def error(made: Tensor, image: Tensor) -> float:
        return float((made - image)[0, :, (image != 0).any(1)[0]].square().mean(1).sqrt().mean())

    network = Reconstructor.load(tmp_path / "run", CPU).model.members[0].network
    held_out, train_images = images(data.split.validation), images(data.split.train)
    with torch.inference_mode():
        for image in held_out:
            size = {"size": image.shape[2:], "mode": "trilinear"}
            mean = sum(functional.interpolate(one, **size) for one in train_images)
            assert error(network(image), image) < error(mean[0] / len(train_images), image)
        # the vectors of two cases differ, and that of a case is stable
        one, other, again = map(network.encode, (*held_out[:2], held_out[0]))
    assert torch.equal(one, again)
    assert float((one - other).norm()) > 0.1 * float(one.norm())
