"""Time the prediction of one case by nnU-Net's predictor, by MONAI's sliding window, and by ours.

All get the same network, weights and normalised brain crop, and one thread, and run in turn.
nnU-Net computes in float32 on the CPU, its default there, and without mirroring; MONAI computes in
bf16, as ours does. Shown are the median CPU time, the median and range over rounds of the ratio of
the first row's time to it, and the Dice of the regions.

nnU-Net needs an environment of its own, because it may change the version of torch:

    python -m venv peers && peers/bin/pip install -c constraints.txt . nnunetv2
    peers/bin/python benchmarks/predict_case.py --model runs/fold0 --prepared prepared/BraTS \
        --case BraTS2021_00006 --window 128

Without nnU-Net its row is left out.
"""

import argparse
import os
import statistics
from collections.abc import Callable
from functools import partial
from pathlib import Path
from time import process_time
from types import SimpleNamespace

import numpy as np
import torch
from machine import version_of
from monai.inferers.utils import sliding_window_inference
from torch import Tensor

from brats_seg.data.store import open_case
from brats_seg.inference.model import Model, load_model
from brats_seg.inference.probabilities import PredictionFallback, predict_probabilities
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import REGIONS
from brats_seg.runtime.device import Device, choose_device, native_dtype
from brats_seg.voxels.box import Box

CPU = torch.device("cpu")
PEERS = ("torch", "nnunetv2", "monai")


def main() -> None:
    """Print one line per way."""
    arguments = _arguments()
    torch.set_num_threads(1)
    case = open_case(arguments.prepared, arguments.case)
    box = Box.at((0, 0, 0), case.shape)
    image = torch.from_numpy(case.read_image(box)).float()
    reference = case.regions_of(case.read_labels(box))
    ways = _ways(arguments.model, (arguments.window,) * 3)
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    found = {}
    for _ in range(arguments.rounds):
        for name, predict in ways.items():
            started_s = process_time()
            found[name] = predict(image)
            seconds[name].append(process_time() - started_s)
    versions = ", ".join(f"{name} {version_of(name)}" for name in PEERS)
    print(f"{versions}; crop {case.shape}, window {arguments.window}^3, {arguments.rounds} rounds")
    print(f"{'':34} CPU s  first/this  range            {'  '.join(REGIONS).upper()}")
    first = next(iter(seconds.values()))
    for name, own in seconds.items():
        ratios = [a / b for a, b in zip(first, own, strict=True)]
        dice = "  ".join(f"{score:.4f}" for score in _dice(found[name], reference))
        print(
            f"{name:34} {statistics.median(own):5.1f}  {statistics.median(ratios):9.2f}x  "
            f"{min(ratios):5.2f} to {max(ratios):5.2f}  {dice}"
        )


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--model", type=Path, required=True, help="a run")
    parser.add_argument("--prepared", type=Path, required=True, help="its prepared cases")
    parser.add_argument("--case", required=True)
    parser.add_argument("--window", type=int, default=128, help="voxels along each axis")
    parser.add_argument("--rounds", type=int, default=5)
    return parser.parse_args()


def _ways(run: Path, window: tuple[int, int, int]) -> dict[str, Callable[[Tensor], np.ndarray]]:
    in_fp32, in_half = (load_model([run], choose_device("cpu", p)) for p in ("fp32", "auto"))
    whole, sliding = PredictionSettings(windows="whole"), PredictionSettings(window=window)
    ways: dict[str, Callable[[Tensor], np.ndarray]] = {
        "MONAI, windows, half": partial(_by_monai, in_half, window),
        "ours, windows, float32": partial(_by_us, in_fp32, sliding),
        "ours, windows, half": partial(_by_us, in_half, sliding),
        "ours, one pass, half": partial(_by_us, in_half, whole),
    }
    if version_of("nnunetv2") == "not installed":
        return ways
    return {"nnU-Net, windows, float32": _nnunet(in_fp32, window), **ways}


def _by_us(model: Model, settings: PredictionSettings, image: Tensor) -> np.ndarray:
    return predict_probabilities(
        model, image.numpy(), settings, PredictionFallback("case", model.device)
    )


@torch.inference_mode()
def _by_monai(model: Model, window: tuple[int, int, int], image: Tensor) -> np.ndarray:
    half = Device(torch_device=CPU, autocast_dtype=native_dtype(CPU))
    with half.autocast():
        logits = sliding_window_inference(
            image[None], window, 1, model.members[0].network, overlap=0.5, mode="gaussian"
        )
    return logits[0].float().sigmoid().numpy()


def _nnunet(model: Model, window: tuple[int, int, int]) -> Callable[[Tensor], np.ndarray]:
    for place in ("nnUNet_raw", "nnUNet_preprocessed", "nnUNet_results"):
        os.environ.setdefault(place, ".")  # it asks for them when it is imported
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(
        use_mirroring=False, perform_everything_on_device=False, device=CPU, allow_tqdm=False
    )
    predictor.network = model.members[0].network
    predictor.configuration_manager = SimpleNamespace(patch_size=window)
    predictor.label_manager = SimpleNamespace(num_segmentation_heads=len(REGIONS))

    def predict(image: Tensor) -> np.ndarray:
        logits = predictor.predict_sliding_window_return_logits(image)
        return logits.float().sigmoid().numpy()

    return predict


def _dice(probabilities: np.ndarray, reference: np.ndarray) -> list[float]:
    """Return plain Dice of each region, above one half."""
    return [
        2 * float((found & known).sum()) / max(float(found.sum() + known.sum()), 1.0)
        for found, known in zip(probabilities > 0.5, reference, strict=True)
    ]


if __name__ == "__main__":
    main()
