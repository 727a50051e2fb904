"""Time the prediction of a brain crop by nnU-Net's predictor, by MONAI's sliding window, and by ours.

All get the same network, weights and normalised crop, one thread and the same settings of malloc, and
run in turn. nnU-Net computes in float32 on the CPU, its default there, without mirroring, in windows
of the training patch that overlap by half. MONAI gets the same windows in half precision, as ours.

Without a run, the network has random weights and the crop is noise: what is computed does not depend on
them. With runs, each of their held-out cases is a round, and the mean Dice of the regions is compared:

    python benchmarks/predict_case.py
    python benchmarks/predict_case.py --runs runs/fold0 runs/fold1 --prepared prepared/BraTS

nnU-Net is left out where it is not installed (`make bench` installs it).
"""

import argparse
import os
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch
from comparison import Comparison, ratios_of, report
from machine import version_of
from monai.inferers.utils import sliding_window_inference
from torch import Tensor

from brats_seg.config import Config, ModelConfig, PatchConfig
from brats_seg.data.store import open_case
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.inference.held_out import open_held_out
from brats_seg.inference.method import input_of_crop
from brats_seg.inference.model import Model, assemble, load_model
from brats_seg.inference.probabilities import PredictionFallback, apply_model
from brats_seg.labels import REGIONS
from brats_seg.models.build import build_model
from brats_seg.runtime.device import Device, choose_device, native_dtype
from brats_seg.runtime.memory import keep_freed_memory
from brats_seg.runtime.weights import ModelCard, ModelIdentity, TrainedModel
from brats_seg.runtime.windows import Window
from brats_seg.voxels.box import Box

CPU = torch.device("cpu")
SHAPE = (141, 175, 137)
"""Voxels of an ordinary brain crop."""
WIDTHS = (16, 32, 64, 128, 160)
OVERLAP = 0.5
PATCH_WINDOWS = "windows of the patch"
DEFAULT = "the default"
NNUNET = "nnU-Net"
MONAI = "MONAI"
LEAST = {(PATCH_WINDOWS, NNUNET): 1.9, (DEFAULT, NNUNET): 5.0}
"""Goals: the same windows as nnU-Net, and those that are taken by default."""

Predict = Callable[[Tensor], np.ndarray]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Round:
    """A network, and a crop that it was not trained on."""

    ways: Mapping[str, Predict]
    image: Tensor
    """(4, x, y, z)"""
    reference: np.ndarray | None = None
    """(3, x, y, z); None where the weights are random."""


def main() -> None:
    """Print a row for each of our ways and each other program."""
    arguments = _arguments()
    torch.set_num_threads(1)
    keep_freed_memory()
    rounds = _held_out(arguments) if arguments.runs else _random(arguments)
    seconds: dict[str, list[float]] = {}
    scores: dict[str, list[float]] = {}
    for round_ in rounds:
        for name, predict in round_.ways.items():
            started_s = process_time()
            probabilities = predict(round_.image)
            seconds.setdefault(name, []).append(process_time() - started_s)
            if round_.reference is not None:
                counts = count_regions(probabilities > 0.5, round_.reference, "case")
                scores.setdefault(name, []).append(float(dice(counts).mean()))
    comparisons = list(_comparisons(seconds, scores))
    report(comparisons, arguments.json)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--runs", type=Path, nargs="+", help="runs, for real weights and cases")
    parser.add_argument("--prepared", type=Path, help="their prepared cases")
    parser.add_argument("--patch", type=int, default=96, help="patch of the random network")
    parser.add_argument("--rounds", type=int, default=5, help="rounds of the random network")
    parser.add_argument("--json", type=Path, help="file to append the comparisons to")
    return parser.parse_args()


def _random(arguments: argparse.Namespace) -> Iterator[Round]:
    """Yield rounds of a network with random weights, which all compute the same."""
    torch.manual_seed(0)
    patch = (arguments.patch,) * 3
    config = Config(model=ModelConfig(widths=WIDTHS), patch=PatchConfig(size=patch))
    identity = ModelIdentity(conventions=("brats2017",), patch=patch, fingerprint="random")
    weights = build_model(config.model, patch).state_dict()
    trained = TrainedModel(weights=weights, card=ModelCard(identity=identity, config=config))
    ways = _ways(*(assemble([trained], choose_device("cpu", p)) for p in ("fp32", "auto")))
    print(f"random weights, patch {arguments.patch}^3, widths {WIDTHS}, crop {SHAPE}")
    for _ in range(arguments.rounds):
        yield Round(ways=ways, image=torch.randn(4, *SHAPE))


def _held_out(arguments: argparse.Namespace) -> Iterator[Round]:
    """Yield every held-out case of every run."""
    for run in arguments.runs:
        ways = _ways(*(load_model([run], choose_device("cpu", p)) for p in ("fp32", "auto")))
        for case_id in open_held_out(run, arguments.prepared).data.split.validation:
            case = open_case(arguments.prepared, case_id)
            box = Box.at((0, 0, 0), case.shape)
            image = torch.from_numpy(case.read_image(box)).float()
            reference = np.asarray(case.regions_of(case.read_labels(box))).astype(np.bool_)
            print(f"{run.name}: {case_id}", flush=True)
            yield Round(ways=ways, image=image, reference=reference)


def _ways(in_fp32: Model, in_half: Model) -> dict[str, Predict]:
    patch = in_half.members[0].identity.patch
    ways: dict[str, Predict] = {
        PATCH_WINDOWS: partial(_by_us, in_half, Window(size=patch, overlap=OVERLAP)),
        DEFAULT: partial(_by_us, in_half, in_half.members[0].window),
        MONAI: partial(_by_monai, in_half, patch),
    }
    if version_of("nnunetv2") == "not installed":
        print("nnU-Net is not installed: its rows are left out")
        return ways
    return {NNUNET: _nnunet(in_fp32, patch), **ways}


def _comparisons(
    seconds: Mapping[str, Sequence[float]], scores: Mapping[str, Sequence[float]]
) -> Iterator[Comparison]:
    peers = {
        NNUNET: f"nnU-Net {version_of('nnunetv2')}, float32, windows of the patch",
        MONAI: f"MONAI {version_of('monai')}, half precision, windows of the patch",
    }
    for peer, name in ((peer, name) for peer in peers for name in (PATCH_WINDOWS, DEFAULT)):
        if peer in seconds:
            yield Comparison(
                task=f"predict a brain crop, {name}",
                ours=f"{statistics.median(seconds[name]):.1f} s",
                peer=peers[peer],
                theirs=f"{statistics.median(seconds[peer]):.1f} s",
                ratios=ratios_of(seconds[peer], seconds[name]),
                least=LEAST.get((name, peer)),
                agreement=_agreement(scores, name, peer),
            )


def _agreement(scores: Mapping[str, Sequence[float]], ours: str, theirs: str) -> str:
    if not scores:
        return ""
    our_dice, their_dice = (statistics.mean(scores[name]) for name in (ours, theirs))
    return f"mean Dice {our_dice:.3f} against {their_dice:.3f}, {len(scores[ours])} cases"


def _by_us(model: Model, window: Window, image: Tensor) -> np.ndarray:
    model = replace(model, members=(replace(model.members[0], window=window),))
    fallback = PredictionFallback("case", model.device)
    return apply_model(model, input_of_crop(image.numpy()), fallback)


@torch.inference_mode()
def _by_monai(model: Model, window: tuple[int, int, int], image: Tensor) -> np.ndarray:
    half = Device(torch_device=CPU, autocast_dtype=native_dtype(CPU))
    with half.autocast():
        logits = sliding_window_inference(
            image[None], window, 1, model.members[0].network, overlap=OVERLAP, mode="gaussian"
        )
    return _inside(logits[0], image)


def _nnunet(model: Model, window: tuple[int, int, int]) -> Predict:
    for place in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        os.environ.setdefault(place, ".")  # it asks for them when it is imported
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(
        use_mirroring=False, perform_everything_on_device=False, device=CPU, allow_tqdm=False
    )
    predictor.network = model.members[0].network
    predictor.configuration_manager = SimpleNamespace(patch_size=window)
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=len(REGIONS))
    return lambda image: _inside(predictor.predict_sliding_window_return_logits(image), image)


def _inside(logits: Tensor, image: Tensor) -> np.ndarray:
    """Return probabilities, 0 outside the brain, as ours are."""
    found: np.ndarray = logits.float().sigmoid().numpy()
    return found * (image != 0).any(dim=0).numpy()


if __name__ == "__main__":
    main()
