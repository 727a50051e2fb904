"""Write trained models of other programs: small, with random weights, in the files of each program."""

import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from brats_seg import PredictionSettings, Predictor, load_case
from brats_seg.cases.find import find_inputs
from brats_seg.inference.predict import Prediction
from brats_seg.interop.nnunet_network import Architecture, NnunetNetwork

REGION_LABELS = {"background": 0, "whole tumor": [1, 2, 3], "tumor core": [2, 3], "ET": [3]}
TISSUE_LABELS = {"background": 0, "edema": 1, "non-enhancing tumor": 2, "enhancing tumor": 3}
FP32: dict[str, Any] = {"device": "cpu", "precision": "fp32"}
CHANNELS = {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}
"""The order of the decathlon, which is not ours."""


def nnunet_architecture(*, is_residual: bool = False) -> dict[str, Any]:
    """Return a small network as `plans.json` describes it."""
    kind = "ResidualEncoderUNet" if is_residual else "PlainConvUNet"
    return {
        "network_class_name": f"dynamic_network_architectures.architectures.unet.{kind}",
        "arch_kwargs": {
            "n_stages": 2,
            "features_per_stage": [4, 6],
            "kernel_sizes": [[3, 3, 3], [1, 3, 3]],
            "strides": [[1, 1, 1], [1, 2, 2]],
            ("n_blocks_per_stage" if is_residual else "n_conv_per_stage"): [1, 2],
            "n_conv_per_stage_decoder": [1],
            "conv_op": "torch.nn.modules.conv.Conv3d",
            "conv_bias": True,
            "norm_op": "torch.nn.modules.instancenorm.InstanceNorm3d",
            "norm_op_kwargs": {"eps": 1e-5, "affine": True},
            "dropout_op": None,
            "dropout_op_kwargs": None,
            "nonlin": "torch.nn.LeakyReLU",
            "nonlin_kwargs": {"inplace": True},
        },
        "_kw_requires_import": ["conv_op", "norm_op", "dropout_op", "nonlin"],
    }


def resampling(order: int, **arguments: Any) -> dict[str, Any]:
    """Return the arguments of a resampling as the planners of nnU-Net write them."""
    return {"is_seg": False, "order": order, "order_z": 0, "force_separate_z": None, **arguments}


def write_nnunet(
    folder: Path,
    *,
    labels: dict[str, Any] = REGION_LABELS,
    channels: dict[str, str] = CHANNELS,
    n_folds: int = 1,
    is_residual: bool = False,
    configuration: dict[str, Any] | None = None,
    plans: dict[str, Any] | None = None,
) -> Path:
    """Write a folder of results of nnU-Net, with entries of the configuration and plans replaced."""
    is_labels = labels == TISSUE_LABELS
    described = {
        "patch_size": [16, 8, 16],
        "spacing": [1.0, 1.0, 1.0],
        "normalization_schemes": ["ZScoreNormalization"] * 4,
        "use_mask_for_norm": [True] * 4,
        "resampling_fn_data": "resample_data_or_seg_to_shape",
        "resampling_fn_probabilities": "resample_data_or_seg_to_shape",
        "resampling_fn_data_kwargs": resampling(3),
        "resampling_fn_probabilities_kwargs": resampling(1),
        "architecture": nnunet_architecture(is_residual=is_residual),
        **(configuration or {}),
    }
    folder.mkdir(parents=True)
    dataset = {"channel_names": channels, "labels": labels, "file_ending": ".nii.gz"}
    if not is_labels:
        dataset["regions_class_order"] = [1, 2, 3]
    (folder / "dataset.json").write_text(json.dumps(dataset))
    written = {
        "dataset_name": "Dataset901_Test",
        "plans_name": "nnUNetPlans",
        "transpose_forward": [1, 0, 2],
        "transpose_backward": [1, 0, 2],
        "image_reader_writer": "SimpleITKIO",
        "foreground_intensity_properties_per_channel": {str(n): {} for n in range(4)},
        "configurations": {"3d_fullres": described},
        **(plans or {}),
    }
    (folder / "plans.json").write_text(json.dumps(written))
    for fold in range(n_folds):
        network = nnunet_network(4 if is_labels else 3, seed=fold, is_residual=is_residual)
        write_fold(folder / f"fold_{fold}", network)
    return folder


def nnunet_network(n_out: int, seed: int, *, is_residual: bool = False) -> NnunetNetwork:
    architecture = Architecture.model_validate(nnunet_architecture(is_residual=is_residual))
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        network = NnunetNetwork(architecture, 4, n_out).eval()
        for module in network.modules():
            if isinstance(module, nn.InstanceNorm3d):
                nn.init.normal_(module.weight, 1, 0.2)
                nn.init.normal_(module.bias, 0, 0.3)
    return network


def write_fold(folder: Path, network: NnunetNetwork, **entries: Any) -> Path:
    weights = {}
    for name, value in network.state_dict().items():
        weights[name] = value
        if ".conv." in name:
            weights[name.replace(".conv.", ".all_modules.0.")] = value
        if name.startswith("encoder."):
            weights[f"decoder.{name}"] = value
    content = {
        "network_weights": weights,
        "optimizer_state": {"state": {}},
        "grad_scaler_state": None,
        # nnU-Net keeps numbers of numpy among these
        "logging": {"ema_fg_dice": [torch.zeros(1).numpy()[0]], "lrs": [0.01]},
        "_best_ema": torch.zeros(1, dtype=torch.float64).numpy()[0],
        "init_args": {"configuration": "3d_fullres", "fold": 0, "device": torch.device("cpu")},
        "trainer_name": "nnUNetTrainer",
        "inference_allowed_mirroring_axes": (0, 1, 2),
        **entries,
    }
    folder.mkdir(parents=True, exist_ok=True)
    torch.save(content, folder / "checkpoint_final.pth")
    return folder


def write_bundle(
    folder: Path,
    *,
    metadata: dict[str, Any] | None = None,
    transforms: tuple[dict[str, Any], ...] = (),
    **sections: Any,
) -> Path:
    """Write a bundle of the form of `brats_mri_segmentation`, with sections of it replaced."""
    from monai.networks.nets import SegResNet

    arguments = {"in_channels": 4, "out_channels": 3, "init_filters": 8, "blocks_down": [1, 1]}
    arguments |= {"blocks_up": [1], "dropout_prob": 0.2}
    channels = {"0": "T1c", "1": "T1", "2": "T2", "3": "FLAIR"}
    regions = {"0": "Tumor core", "1": "Whole tumor", "2": "Enhancing tumor"}
    described = {
        "inputs": {"image": {"channel_def": channels, "spatial_shape": ["2*n", "2*n", "2*n"]}},
        "outputs": {"pred": {"channel_def": regions}},
    }
    preprocessing = [
        part("LoadImaged", keys="image"),
        *transforms,
        part("NormalizeIntensityd", keys="image", nonzero=True, channel_wise=True),
    ]
    postprocessing = [
        part("Activationsd", keys="pred", sigmoid=True),
        part("AsDiscreted", keys="pred", threshold=0.5),
        part("Lambdad", keys="pred", func="$lambda x: x"),
    ]
    content = {
        "imports": ["$import os"],
        "device": "$torch.device('cpu')",
        "network_def": part("SegResNet", **arguments),
        "preprocessing": part("Compose", transforms=preprocessing),
        "inferer": part("SlidingWindowInferer", roi_size=[16, 16, 8], sw_batch_size=1, overlap=0.4),
        "postprocessing": part("Compose", transforms=postprocessing),
        **sections,
    }
    for name in ("configs", "models"):
        (folder / name).mkdir(parents=True)
    written = metadata or {"network_data_format": described}
    (folder / "configs" / "metadata.json").write_text(json.dumps(written))
    (folder / "configs" / "inference.json").write_text(json.dumps(content))
    with torch.random.fork_rng():
        torch.manual_seed(0)
        network = SegResNet(**arguments)
    torch.save(network.state_dict(), folder / "models" / "model.pt")
    return folder


def predict(model: Path, case: Path, **settings: Any) -> Prediction:
    predictor = Predictor.load([model], PredictionSettings(**FP32, **settings))
    return predictor.predict_scan(predictor.prepare(load_case(find_inputs([case])[0])))


def part(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}
