"""Models of nnU-Net and MONAI that are nonsense, or made to break the program.

Each is refused once, by name, when it is loaded; or it is read, and predicts as it says.
"""

import json
import resource
import time
from collections.abc import Callable, Iterator, Mapping
from copy import deepcopy
from functools import reduce
from math import gcd
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import pytest
import torch

from brats_seg import PredictionSettings, Predictor
from brats_seg.cases.case import LoadedCase, load_case
from brats_seg.cases.find import find_inputs
from brats_seg.errors import UsageError
from tests.builders import write_case
from tests.faults.campaign import Campaign
from tests.faults.test_hostile_models import Break
from tests.foreign_builders import part, write_bundle, write_nnunet

pytestmark = pytest.mark.filterwarnings("ignore")  # MONAI's own
Way: TypeAlias = tuple[str | int, ...]
"""Keys that lead to an entry of nested values."""
NAN, HUGE = float("nan"), 10**9
NONSENSE: Mapping[str, Any] = {
    "-1": -1,
    "0": 0,
    "10^9": 1e9,
    "2^70": 2**70,
    "NaN": NAN,
    "infinity": float("inf"),
    "a text": "abc",
    "an empty list": [],
    "an empty mapping": {},
    "nothing": None,
    "a deep list": reduce(lambda inner, _: [inner], range(900), []),
    "a long list": [1] * 100_000,
}
SPATIAL = (
    part("Spacingd", keys=["image", "label"], pixdim=[1.5, 1.5, 1.2], mode=["bilinear", "nearest"]),
    part("CropForegroundd", keys="image", source_key="image", margin=1, k_divisible=4),
)
WRITERS: Mapping[str, Callable[[Path], Path]] = {
    "nnunet": write_nnunet,
    "bundle": lambda folder: write_bundle(folder, transforms=SPATIAL),
}
PLANS, INFERENCE = "plans.json", "configs/inference.json"
FILES = {"nnunet": ("dataset.json", PLANS), "bundle": ("configs/metadata.json", INFERENCE)}
MEANT = (
    *("use_mask_for_norm", "nonzero", "channel_wise"),
    *("mode", "margin", "k_divisible", "overlap"),
)
"""Entries that may be 0 or false, with the meaning that the other program gives to that."""
_LONGEST_S, _MOST_KILOBYTES = 10, 1 << 20


def ways_of(content: Any, above: Way = ()) -> Iterator[Way]:
    if above:
        yield above
    if isinstance(content, list):
        content = dict(enumerate(content))
    for key in content if isinstance(content, dict) else ():
        yield from ways_of(content[key], (*above, key))


def changed(content: Any, way: Way, value: Any) -> Any:
    new = deepcopy(content)
    reduce(lambda entry, key: entry[key], way[:-1], new)[way[-1]] = value
    return new


def probabilities_of(predictor: Predictor, case: LoadedCase) -> Any:
    return predictor.predict_scan(predictor.prepare(case)).probabilities


def load(folder: Path) -> Predictor:
    return Predictor.load([folder], PredictionSettings(device="cpu", probabilities=True))


def problem_of(folder: Path, case: LoadedCase, expected: Any) -> str:
    """Return what is wrong with the way in which a model is read: any error but one that names it."""
    # time of the processor: other work on the machine does not count
    start_s, peak = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        predictor = load(folder)
    except UsageError as error:
        is_named = f"{folder}" in f"{error}" and len(f"{error}") < 2000
        problem = "" if is_named else f"the refusal is {error}"
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    else:
        try:
            is_same = np.allclose(probabilities_of(predictor, case), expected, atol=1e-3)
        except Exception as error:  # noqa: BLE001
            return f"accepted, then {type(error).__name__}: {error}"
        problem = "" if is_same else "accepted, and it predicts otherwise"
    grown = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak
    is_slow = time.process_time() - start_s > _LONGEST_S
    is_large = grown > _MOST_KILOBYTES
    return problem or ("it took too long" * is_slow) or ("too much memory" * is_large)


@pytest.fixture
def case(tmp_path: Path) -> LoadedCase:
    return load_case(find_inputs([write_case(tmp_path / "scans")])[0])


@pytest.mark.parametrize("name", WRITERS)
@pytest.mark.parametrize("step", [59, pytest.param(5, marks=pytest.mark.slow)])
def test_an_entry_of_nonsense_is_refused_by_name(step, name, tmp_path, case, campaign):
    """Steps without a common factor with the kinds of nonsense, so that every kind is tried."""
    assert gcd(step, len(NONSENSE)) == 1
    folder = WRITERS[name](tmp_path / "model")
    expected = probabilities_of(load(folder), case)
    for file in FILES[name]:
        original = (folder / file).read_text()
        content = json.loads(original)
        tries = [(way, what) for way in ways_of(content) for what in NONSENSE]
        for way, what in tries[::step]:
            (folder / file).write_text(json.dumps(changed(content, way, NONSENSE[what])))
            problem = problem_of(folder, case, expected)
            is_meant = "otherwise" in problem and not NONSENSE[what] and {*way} & {*MEANT}
            campaign.note(f"{file} {way} {what}", "" if is_meant else problem)
        (folder / file).write_text(original)


def entry(file: str, way: str, value: Any) -> Break:
    """Return what changes the entry of a dotted way in a file of a model, or adds it."""
    keys: Way = tuple(int(key) if key.isdecimal() else key for key in way.split("."))

    def change(folder: Path) -> None:
        content = json.loads((folder / file).read_text())
        (folder / file).write_text(json.dumps(changed(content, keys, value)))

    return change


def of_plans(way: str, value: Any) -> Break:
    return entry(PLANS, f"configurations.3d_fullres.{way}", value)


def stages(way: str, value: Any) -> Break:
    return of_plans(f"architecture.arch_kwargs.{way}", value)


def saved(**entries: Any) -> Break:
    def change(folder: Path) -> None:
        path = folder / "fold_0/checkpoint_final.pth"
        torch.save(torch.load(path, weights_only=False) | entries, path)

    return change


def weights(change: Callable[[torch.Tensor], torch.Tensor]) -> Break:

    def change_all(folder: Path) -> None:
        path = next(folder.rglob("*.pt*"))
        content = torch.load(path, weights_only=False)
        state = content.get("network_weights", content)
        state |= {name: change(value) for name, value in state.items()}
        torch.save(content, path)

    return change_all


def as_yaml(text: str) -> Break:
    def write(folder: Path) -> None:
        (folder / INFERENCE).unlink()
        (folder / INFERENCE).with_suffix(".yaml").write_text(text)

    return write


def network(target: str, **arguments: Any) -> Break:
    sizes = {"spatial_dims": 3, "in_channels": 4, "out_channels": 3}
    return entry(INFERENCE, "network_def", part(target, **sizes, **arguments))


DOUBLING = {f"r{n}": [f"@r{n + 1}", f"@r{n + 1}"] for n in range(40)}
BOMB = "\n".join(["a0: &a0 [1, 1]", *(f"a{n}: &a{n} [*a{n - 1}, *a{n - 1}]" for n in range(1, 40))])
MERGES = [f"a{n}: &a{n}\n  <<: [*a{n - 1}, *a{n - 1}]" for n in range(1, 40)]
HOSTILE: Mapping[str, Mapping[str, Break]] = {
    "nnunet": {
        "a configuration that inherits from itself": of_plans("inherits_from", "3d_fullres"),
        "ten normalisations": of_plans("normalization_schemes", ["ZScoreNormalization"] * 10),
        "a voxel of 10^5 mm": of_plans("spacing.0", 1e5),
        "one axis three times": entry(PLANS, "transpose_forward", [1, 1, 1]),
        "another reader": entry(PLANS, "image_reader_writer", "SimpleITKIOWithReorient"),
        "more stages than it has": stages("n_stages", 3),
        "a first stride of 2": stages("strides.0", [2, 2, 2]),
        "an even kernel": stages("kernel_sizes.1", [2, 2, 2]),
        "labels beside the regions": entry("dataset.json", "labels.whole tumor", [0, 2, 3]),
        "axes that are a text": saved(inference_allowed_mirroring_axes="abc"),
        "an axis 4": saved(inference_allowed_mirroring_axes=(0, 4)),
        "a configuration of NaN": saved(init_args={"configuration": NAN}),
        "weights that are a list": saved(network_weights=[1]),
    },
    "bundle": {
        "a network that refers to itself": entry(INFERENCE, "network_def", "@network_def"),
        "transforms of themselves": entry(INFERENCE, "preprocessing.transforms", "@preprocessing"),
        "references that double": lambda folder: (folder / INFERENCE).write_text(
            json.dumps(json.loads((folder / INFERENCE).read_text()) | DOUBLING | {"inferer": "@r0"})
        ),
        "aliases that double": as_yaml(BOMB),
        "merges that double": as_yaml("\n".join(["a0: &a0 {x: 1}", *MERGES])),
        "a list that holds itself": as_yaml("&a [*a]"),
        "100,000 brackets": lambda folder: (folder / INFERENCE).write_text("[" * 100_000),
        "20 MB": lambda folder: (folder / INFERENCE).write_text(" " * 20_000_000),
        "10^6 blocks": network("SegResNet", blocks_down=[10**6]),
        "8,000 blocks": network("SegResNet", blocks_down=[8000] * 200, blocks_up=[1] * 199),
        "8,000 filters": network("SegResNet", init_filters=8000),
        "8,000 layers of attention": entry(
            INFERENCE,
            "network_def",
            part("SwinUNETR", in_channels=4, out_channels=3, depths=[8000] * 200, feature_size=12),
        ),
        "windows of 10^6": network("UNETR", img_size=[10**6] * 3),
        "another network": network("BasicUNet", features=[4] * 6),
        "an overlap of .9999": entry(INFERENCE, "inferer.overlap", 0.9999),
        "a text as a switch": entry(INFERENCE, "preprocessing.transforms.1._disabled_", "abc"),
    },
}
OF_BOTH = {
    "weights of NaN": weights(lambda value: value * NAN),
    "weights of integers": weights(torch.Tensor.int),
    "complex weights": weights(lambda value: value.to(torch.complex64)),
    "one value for all weights": weights(lambda value: torch.ones(1).expand(value.shape)),
    "weights without values": weights(lambda value: value[:0]),
}


@pytest.mark.parametrize("name", ["nnunet", pytest.param("bundle", marks=pytest.mark.slow)])
def test_hostile_models(name: str, tmp_path: Path, case: LoadedCase, campaign: Campaign) -> None:
    for number, (what, change) in enumerate((HOSTILE[name] | OF_BOTH).items()):
        folder = WRITERS[name](tmp_path / f"model{number}")
        change(folder)
        problem = problem_of(folder, case, 2)
        campaign.note(f"{name}: {what}", problem)


@pytest.mark.parametrize("name", WRITERS)
def test_weights_in_half_precision_are_read(name: str, tmp_path: Path, case: LoadedCase) -> None:
    folder = WRITERS[name](tmp_path / "model")
    expected = probabilities_of(load(folder), case)
    weights(torch.Tensor.half)(folder)
    assert np.abs(probabilities_of(load(folder), case) - expected).max() < 0.01
