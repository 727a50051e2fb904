"""Build models for tests of inference: small real ones on disk, and ones of known output."""

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from brats_seg.config import Config, ModelConfig, PatchConfig
from brats_seg.evaluation.subset_scores import SubsetScores
from brats_seg.inference.model import Member, Model
from brats_seg.models.build import build_model, size_multiple
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import NOT_FITTED, FittedPrediction, ModelIdentity, store_fitted
from brats_seg.training.checkpoints import Checkpoint, save_checkpoint
from brats_seg.training.state import Position

CPU = Device(torch_device=torch.device("cpu"))
IDENTITY = ModelIdentity(conventions=("brats2017",), patch=(8, 8, 8), fingerprint="cases")
CONFIG = Config(model=ModelConfig(widths=(4, 8)), patch=PatchConfig(size=(8, 8, 8)))


def write_run(
    path: Path,
    *,
    seed: int = 0,
    identity: ModelIdentity = IDENTITY,
    config: Config = CONFIG,
    fitted: FittedPrediction = NOT_FITTED,
    **entries: Any,
) -> Path:
    """Write the best checkpoint of a run, with random weights; further entries are as given."""
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = build_model(config.model, identity.patch)
    checkpoint = Checkpoint(
        model=network.state_dict(),
        identity=identity,
        config=config.model_dump(mode="json"),
        **{"position": Position(), **entries},
    )
    save_checkpoint(checkpoint, path / "best.pt")
    if fitted != NOT_FITTED:
        store_fitted(path / "best.pt", fitted)
    return path


class Pointwise(nn.Module):
    """WT where FLAIR is bright, ET where T1 with contrast agent is, TC where it is dark as well.

    It looks one voxel towards the end of each axis, so that it matters how the axes run.
    """

    def __init__(self) -> None:
        super().__init__()
        self.steepness = nn.Parameter(torch.tensor(2.0))

    def forward(self, image: Tensor) -> Tensor:
        moved = torch.roll(image, shifts=(-1, -1, -1), dims=(2, 3, 4))
        _, t1c, _, t2f = moved.unbind(1)
        return self.steepness * torch.stack([t2f - 1, t1c.abs() - 2, t1c - 2], dim=1)


def make_model(
    *networks: nn.Module,
    identity: ModelIdentity = IDENTITY,
    config: Config = CONFIG,
    fitted: FittedPrediction = NOT_FITTED,
    subset_scores: tuple[SubsetScores, ...] = (),
) -> Model:
    """Return a model of the given networks, or of one pointwise network."""
    members = tuple(
        Member(
            network=network.eval(),
            name=config.model.name,
            patch=identity.patch,
            window=None if config.patch.size == "whole" else identity.patch,
            channels=(0, 1, 2, 3),
            regions=(0, 1, 2),
            multiple=size_multiple(config.model, identity.patch),
            fitted=fitted,
            subsets=identity.subsets,
            subset_scores=subset_scores,
        )
        for network in networks or (Pointwise(),)
    )
    return Model(members=members, identity=identity, fingerprint="model", device=CPU)
