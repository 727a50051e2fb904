"""Test that bundles predict as MONAI does, and that those that need code or other data are refused."""

from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai import transforms
from monai.inferers import SlidingWindowInferer
from monai.networks import nets
from monai.networks.nets import SegResNet

from brats_seg import PredictionSettings, Predictor
from brats_seg.errors import UsageError
from brats_seg.presets import MONAI_NETWORKS
from tests.foreign_builders import FP32, part, predict, write_bundle

WINDOWS = part("SlidingWindowInferer", roi_size=[16, 16, 8])
SPATIAL = (
    part("Orientationd", keys="image", axcodes="RAS", labels=None),
    part(
        "Spacingd", keys=["image", "label"], pixdim=[1.5, 1.5, 1.25], mode=["bilinear", "nearest"]
    ),
)


ACTIVATION = part("Activationsd", keys="pred", sigmoid=True)
INVERSE = part(
    "Invertd", keys=["pred"], transform="@preprocessing", orig_keys="image", device="@device"
)


@pytest.mark.filterwarnings("ignore")  # MONAI's own
@pytest.mark.parametrize(
    ("is_spatial", "mode", "inverse"),
    [
        (False, "constant", None),
        (False, "gaussian", None),
        (True, "constant", {"nearest_interp": [False]}),
        (True, "constant", {}),
    ],
)
def test_regions_are_those_of_monai(tmp_path, case, is_spatial, mode, inverse):
    sections = {"inferer": {**WINDOWS, "overlap": 0.4, "mode": mode}}
    if inverse is not None:
        sections["postprocessing"] = {"transforms": [ACTIVATION, INVERSE | inverse]}
    model = write_bundle(tmp_path / "model", transforms=SPATIAL if is_spatial else (), **sections)
    network = SegResNet(
        in_channels=4, out_channels=3, init_filters=8, blocks_down=[1, 1], blocks_up=[1]
    ).eval()
    network.load_state_dict(torch.load(model / "models" / "model.pt"))
    steps = [transforms.LoadImaged("image"), transforms.EnsureChannelFirstd("image")]
    if is_spatial:
        steps.append(transforms.Orientationd("image", axcodes="RAS", labels=None))
        steps.append(transforms.Spacingd("image", pixdim=[1.5, 1.5, 1.25], mode="bilinear"))
    steps.append(transforms.NormalizeIntensityd("image", nonzero=True, channel_wise=True))
    pipeline = transforms.Compose(steps)
    files = [next(case.glob(f"*_{name}.nii.gz")) for name in ("t1ce", "t1", "t2", "flair")]
    data = pipeline({"image": files})
    with torch.no_grad():
        inferer = SlidingWindowInferer([16, 16, 8], overlap=0.4, mode=mode)
        data["pred"] = inferer(data["image"][None], network)[0].sigmoid()
    is_nearest = inverse == {}  # the default of MONAI
    data = transforms.Invertd("pred", pipeline, "image", nearest_interp=is_nearest)(data)
    tc, wt, et = data["pred"].numpy()
    result = predict(model, case, probabilities=True)
    assert result.probabilities is not None
    assert min(region.std() for region in (wt, tc, et)) > 0.01
    np.testing.assert_allclose(result.probabilities, np.stack([wt, tc, et]), rtol=0, atol=1e-5)
    # on the grid of the files
    assert result.label_map.shape == nib.load(files[0]).shape
    assert set(np.unique(result.label_map)) <= {0, 1, 2, 4}


CLEANING = {
    "KeepLargestConnectedComponentd": {"connectivity": 1},
    "RemoveSmallObjectsd": {"min_size": 40},
    "FillHolesd": {},
}


@pytest.mark.filterwarnings("ignore")  # MONAI's own
@pytest.mark.parametrize("name", CLEANING)
def test_regions_are_cleaned_as_by_monai(tmp_path: Path, case: Path, name: str) -> None:
    steps = [
        part("Activationsd", keys="pred", sigmoid=True),
        part("AsDiscreted", keys="pred", threshold=0.46),
    ]
    cleaning = part(f"monai.transforms.{name}", keys=["pred"], **CLEANING[name])
    probabilities = []
    for index, after in enumerate(([], [cleaning, part("SaveImaged", keys="pred")])):
        sections = {"postprocessing": {"transforms": [*steps, *after]}}
        model = write_bundle(tmp_path / f"model{index}", **sections)
        probabilities.append(predict(model, case, probabilities=True).probabilities)
    before, after = probabilities
    mask = torch.from_numpy(before[[1, 0, 2]] >= 0.46)  # the channels of the bundle: TC, WT, ET
    cleaned = getattr(transforms, name)("pred", **CLEANING[name])({"pred": mask.float()})["pred"]
    expected = cleaned.bool()[[1, 0, 2]].numpy()
    np.testing.assert_array_equal(after >= 0.46, expected)
    same = (before >= 0.46) == expected
    np.testing.assert_array_equal(after[same], before[same])
    assert (expected != (before >= 0.46)).any()


SIZES = {"spatial_dims": 3, "in_channels": 4, "out_channels": 3}
LEVELS = {**SIZES, "channels": [4, 8], "strides": [2]}
KERNELS = {"kernel_size": [3, 3, 3], "strides": [1, 2, 2], "upsample_kernel_size": [2, 2]}
ARGUMENTS: dict[str, dict[str, Any]] = {
    "AttentionUnet": LEVELS,
    "BasicUNet": {**SIZES, "features": [4, 4, 4, 4, 4, 4]},
    "DynUNet": {**SIZES, **KERNELS, "filters": [4, 8, 8], "deep_supervision": True},
    "HighResNet": SIZES,
    "SegResNet": {**SIZES, "init_filters": 8, "norm": ["instance", {"affine": True}]},
    "SwinUNETR": {**SIZES, "feature_size": 12},
    "UNETR": {**SIZES, "img_size": 64, "hidden_size": 24, "mlp_dim": 24, "num_heads": 2},
    "UNet": {**LEVELS, "num_res_units": 1, "norm": "batch"},
    "VNet": SIZES,
}
LARGE = ("HighResNet", "SwinUNETR", "UNETR", "VNet")
NETWORKS = [pytest.param(n, marks=[pytest.mark.slow] * (n in LARGE)) for n in MONAI_NETWORKS]


@pytest.mark.filterwarnings("ignore")  # MONAI's own
@pytest.mark.parametrize("name", NETWORKS)
def test_every_known_network_is_read(tmp_path: Path, name: str) -> None:
    size = [64 if name in {"SwinUNETR", "UNETR"} else 32] * 3
    windows = part("SlidingWindowInferer", roi_size=size)
    network = part(f"monai.networks.nets.{name}", **ARGUMENTS[name])
    model = write_bundle(tmp_path, network_def=network, inferer=windows)
    expected = getattr(nets, name)(**ARGUMENTS[name]).eval()
    torch.save({"state_dict": expected.state_dict()}, model / "models/model.pt")
    image = torch.rand(1, 4, *size)
    member = Predictor.load([model], PredictionSettings(**FP32)).model.members[0]
    with torch.no_grad():
        logits = member.network(image)[:, :3]  # all of weight 1
        torch.testing.assert_close(logits, expected(image), atol=1e-4, rtol=1e-4)


FOUR = ("T1c", "T1", "T2", "FLAIR")
LOAD = part("LoadImaged", keys="image")
REGIONS = ("tumor core", "whole tumor", "enhancing tumor")
DISORDER = [part("FillHolesd", keys="pred"), part("AsDiscreted")]
NETWORK = part("SegResNet", in_channels=4, out_channels=3, init_filters=8)


def before(*steps: dict[str, Any]) -> dict[str, Any]:
    return {"preprocessing": {"transforms": [LOAD, *steps]}}


def after(name: str, **arguments: Any) -> dict[str, Any]:
    return {"postprocessing": part(name, keys="pred", **arguments)}


def metadata_of(*channels: str, regions: tuple[str, ...] = REGIONS) -> dict[str, Any]:
    image, pred = (
        {"channel_def": {str(index): name for index, name in enumerate(names)}}
        for names in (channels, regions)
    )
    formats = {"inputs": {"image": image}, "outputs": {"pred": pred}}
    return {"metadata": {"network_data_format": formats}}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (metadata_of("CT"), "metadata.json: the model takes the channels CT; expected T1"),
        (metadata_of(*FOUR, regions=("bg", "liver")), "returns bg, liver; expected the regions of"),
        ({"metadata": {"version": "1"}}, "cannot be used: it has no entry 'network_data_format'"),
        ({"network_def": {**NETWORK, "act": "$os.system('true')"}}, r"code or another object for"),
        ({"network_def": part("os.system")}, "network is os.system; expected one of AttentionUnet"),
        (
            {"network_def": part(f"{nets.__name__}.EfficientNetBN")},
            "BN; expected one of .*SegResNet",
        ),
        ({"network_def": {**NETWORK, "act": "@act"}, "act": ["@act"]}, "code or another object"),
        ({"network_def": "@network"}, "inference.json cannot be used"),
        ({"network_def": {**NETWORK, "init_filters": 16}}, "has more weights than the file"),
        ({"network_def": {**NETWORK, "sizes": 3}}, "inference.json cannot .*unexpected keyword"),
        (before(part("scripts.Mine")), "its transform is scripts.Mine; .* Run this bundle with"),
        (before(part("Orientationd", keys="image", axcodes="XYZ", labels=None)), "all axis codes"),
        (before(part("ScaleIntensityd", keys=["label"])), r"ScaleIntensityd is applied to"),
        ({"inferer": part("SimpleInferer")}, "its inferer is SimpleInferer"),
        ({"inferer": part("SlidingWindowInferer", roi_size=[96, 96])}, "be used: roi_size.2"),
        (after("Activationsd", softmax=True), "sigmoid: Field required.*, softmax: expected False"),
        (after("AsDiscreted", argmax=True), "argmax: expected False .got True"),
        (after("VoteEnsembled"), "its transform is VoteEnsembled; expected one of Activationsd"),
        ({"postprocessing": {"transforms": DISORDER}}, "another order than Activationsd, Invertd"),
        ({"inferer": {**WINDOWS, "padding_mode": "reflect"}}, "padding_mode: expected .constant"),
        ("models/model.pt", "model.pt .*: No such file"),
        ("configs/inference.json", "inference.json .*: No such file"),
    ],
)
def test_refused_bundles(tmp_path: Path, changes: dict[str, Any] | str, message: str) -> None:
    """The changes are sections of its configuration, or the file that it lacks."""
    is_lacking = isinstance(changes, str)
    model = write_bundle(tmp_path / "model", **({} if is_lacking else changes))
    if is_lacking:
        (model / changes).unlink()
    with pytest.raises(UsageError, match=message):
        Predictor.load([model], PredictionSettings(**FP32))
