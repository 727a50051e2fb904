"""Weights and patches to measure a gradient on."""

from pathlib import Path

import pytest
import torch

from brats_seg.config import load_config
from brats_seg.data.fold import open_fold
from brats_seg.errors import ResumeError
from brats_seg.models.build import build_model
from brats_seg.progress import untracked
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.training.certificate import (
    phantom_patches,
    prepared_patches,
    probe_run,
    probe_settings,
)
from brats_seg.training.checkpoints import Checkpoint, save_checkpoint
from brats_seg.training.state import Position

CPU = Device(torch_device=torch.device("cpu"))
NOWHERE = Path("nowhere")


def write_run(path: Path, *settings: str, widths: tuple[int, ...] = (4, 8)) -> None:
    """Write `last.pt` of a run with those settings and a network of those widths."""
    config = load_config(assignments=["model.widths=[4, 8]", *settings])
    patch = config.patch.size if config.patch.size != "whole" else (16, 16, 16)
    network = build_model(config.model.model_copy(update={"widths": widths}), patch)
    identity = ModelIdentity(conventions=("brats2017",), patch=patch, fingerprint="")
    checkpoint = Checkpoint(
        model=network.state_dict(),
        identity=identity,
        config=config.model_dump(mode="json"),
        position=Position(),
    )
    save_checkpoint(checkpoint, path / "last.pt")


def test_phantoms_grow_and_two_in_five_lack_et() -> None:
    wt, tc, et = phantom_patches(10, (16, 16, 16)).target.sum((2, 3, 4)).T

    assert torch.all(wt >= tc)
    assert torch.all(tc >= et)
    assert torch.all(wt.diff() > 0)
    assert wt[-1] > 30 * wt[0]
    assert (et == 0).nonzero().flatten().tolist() == [0, 2, 5, 7]


@pytest.mark.parametrize("seed", range(3))
def test_the_same_seed_makes_the_same_phantoms(seed: int) -> None:
    one, same, other = (phantom_patches(2, (8, 8, 8), seed=s) for s in (seed, seed, seed + 1))

    assert torch.equal(one.image, same.image)
    assert not torch.equal(one.image, other.image)


def test_prepared_patches_go_from_the_least_tumour_to_the_most(
    brats_root: Path, tmp_path: Path
) -> None:
    config = load_config(assignments=["folds.n_folds=3"])
    data = open_fold(brats_root, fold=0, config=config, prepared_path=tmp_path / "prepared")

    patches = prepared_patches(data.folder, config, (8, 8, 8), 4)

    assert patches.image.shape == (4, 4, 8, 8, 8)
    n_voxels = patches.target.sum((1, 2, 3, 4))
    assert torch.all(n_voxels.diff() >= 0)
    assert n_voxels[-1] > n_voxels[0]


def test_a_moment_of_training_teaches() -> None:
    settings = ["patch.size=[16, 16, 16]", "model.widths=[4, 8]"]
    probe = probe_settings(load_config(assignments=settings), 4, CPU, untracked)

    with torch.no_grad():
        found = probe.network.eval()(probe.patches.image) > 0
    agreement = (found == (probe.patches.target > 0)).float().mean()

    assert agreement > 0.9


@pytest.mark.parametrize(
    ("settings", "size"),
    [
        (["patch.size=[16, 16, 16]"], 16),
        (["patch.size=whole"], 16),
        (["patch.size=[96, 96, 96]"], 64),  # two levels: any even size will do
        (["patch.size=[16, 16, 16]", "model.name=vae-unet"], 16),
    ],
)
def test_a_long_patch_is_cut_to_what_the_network_takes(
    tmp_path: Path, settings: list[str], size: int
) -> None:
    write_run(tmp_path, *settings)

    assert probe_run(tmp_path, NOWHERE, 2).patches.image.shape == (2, 4, size, size, size)


def test_three_voxels_stay_at_the_lowest_level(tmp_path: Path) -> None:
    widths = (2, 2, 2, 2, 2, 2)
    write_run(tmp_path, "patch.size=[128,128,128]", f"model.widths={list(widths)}", widths=widths)

    assert probe_run(tmp_path, NOWHERE, 2).patches.image.shape[2:] == (96, 96, 96)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    write_run(tmp_path, "patch.size=[16, 16, 16]", widths=(4, 6))

    with pytest.raises(ResumeError, match=r"last\.pt holds another network than its settings"):
        probe_run(tmp_path, NOWHERE, 2)
