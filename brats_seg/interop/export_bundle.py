"""Write an exported model as a MONAI bundle too, which predicts without this package.

configs/metadata.json     channels in and out, versions
configs/inference.json    network, transforms, windows, thresholds
models/model.pt           weights, under the names of MONAI; model1.pt and so on of an ensemble
docs/README.md            the model card

The default network is MONAI's `DynUNet` under other names. A bundle of any other network asks for
this package by name.
"""

import json
import shutil
from collections.abc import Sequence
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from brats_seg.files import whole_file
from brats_seg.inference.model import Member, assemble
from brats_seg.inference.model_card import CARD_NAME
from brats_seg.labels import BRATS2023, MODALITIES, LabelConvention, convention_named
from brats_seg.models.unet import LEAKY_SLOPE, UNet
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import Decoding, ExportedModel

if TYPE_CHECKING:
    from monai.networks.nets import DynUNet

_REGION_NAMES = ("whole tumour", "tumour core", "enhancing tumour")
_MODALITY_NAMES = ("T1", "T1 with contrast agent", "T2", "FLAIR")
_FEWEST_LEVELS = 3
"""Levels of the smallest network that `DynUNet` builds."""

_NORMALISE = (
    # the brain is where any modality is not 0; each has a few zeros inside
    "$lambda image: (brain := (image != 0).any(0), values := image[:, brain].float(), "
    "values := values - values.double().mean(1, keepdim=True).float(), "
    "deviation := (values.double() ** 2).mean(1, keepdim=True).sqrt().float(), "
    "np.testing.assert_array_less(0, deviation, 'a modality has no contrast inside the brain'), "
    # networks are trained on values in half precision
    "torch.zeros_like(image, dtype=torch.float32).masked_scatter("
    "brain.expand(image.shape), (values / deviation).half().float()))[-1]"
)
"""Mean 0 and standard deviation 1 of each modality inside the brain, and 0 around it."""
_STARTS = (
    "$lambda gap, length: [round(i * gap / max(1, n)) for n in "
    "[-(-gap // max(1, round(length * (1 - @overlap))))] for i in range(n + 1)]"
)
"""First voxel of each window: the fewest that overlap enough, evenly spaced."""
_WEIGHTS = (
    "$lambda roi: torch.einsum('x,y,z->xyz', *[torch.exp(-0.5 * ((torch.arange(n) - (n - 1) / 2) "
    "/ (n / 8)) ** 2) for n in roi])"
)
"""Gaussian weights of the voxels of a window."""
_INFERER = (
    "$lambda image, network, *args, **kwargs: ("
    "roi := @roi_size(image.shape[2:]), "
    "missing := [max(0, m - n) for n, m in zip(image.shape[2:], roi)], "
    "padding := [k for m in missing[::-1] for k in (m // 2, m - m // 2)], "
    "padded := torch.nn.functional.pad(torch.as_tensor(image).as_subclass(torch.Tensor), padding), "
    "starts := [@starts(n - m, m) for n, m in zip(padded.shape[2:], roi)], "
    "boxes := [(..., *[slice(k, k + m) for k, m in zip(corner, roi)]) "
    "for corner in itertools.product(*starts)], "
    "weights := @window_weights(roi).to(padded.device), "
    "total := padded.new_zeros((len(padded), 3, *padded.shape[2:])), "
    "shares := padded.new_zeros(padded.shape[2:]), "
    "[(total[box].add_(network(padded[box]) * weights), shares[box].add_(weights)) for box in boxes], "
    "inner := (..., *[slice(m // 2, m // 2 + n) for n, m in zip(image.shape[2:], missing)]), "
    "probabilities := (total / shares)[inner].sigmoid() * (image != 0).any(1, keepdim=True), "
    "monai.utils.convert_to_dst_type(probabilities, image)[0])[-1]"
)
"""Probabilities of a brain crop, 0 around the brain.

MONAI's own inferers place windows at a fixed step, so that labels would differ at their borders.
"""
_SHARED_PARTS = {
    "bundle_root": ".",
    "output_dir": "$@bundle_root + '/eval'",
    "image": [f"{modality}.nii.gz" for modality in MODALITIES],
    "datalist": [{"image": "@image"}],
    "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
}
_OWN_PARTS = {
    "imports": ["$import pathlib", "$import nibabel", "$import brats_seg"],
    "predictor": "$brats_seg.Predictor.load([pathlib.Path(@bundle_root)])",
    "files": f"$dict(zip({list(MODALITIES)}, map(pathlib.Path, @image)))",
    "result": "$@predictor.predict_files(@files)",
    "name": "$pathlib.Path(@image[0]).name.partition('.')[0]",
    "label_map": "$nibabel.Nifti1Image(@result.label_map, nibabel.load(@image[0]).affine)",
    "run": [
        "$pathlib.Path(@output_dir).mkdir(parents=True, exist_ok=True)",
        "$nibabel.save(@label_map, @output_dir + '/' + @name + '_seg.nii.gz')",
    ],
}
"""Configuration that asks for this package by name, and predicts with the exported model."""


def write_bundle(exported: ExportedModel, folder: Path) -> None:
    """Write the files of a bundle into the folder of an exported model, which has its card.

    Raises:
        EnvironmentalError: A file cannot be written.
    """
    members = assemble(exported.networks, choose_device("cpu", "fp32")).members
    same = [_as_dynunet(member.network) for member in members]
    networks = [network for network in same if network is not None]
    windows = [_windows(member) for member in members]
    is_monai = len(networks) == len(members) and all(one == windows[0] for one in windows)
    parts = _monai_parts(exported, networks, windows[0]) if is_monai else _OWN_PARTS
    _write_json(folder / "configs" / "metadata.json", _metadata(exported, needs_us=not is_monai))
    _write_json(folder / "configs" / "inference.json", _SHARED_PARTS | parts)
    for number, network in enumerate(networks if is_monai else ()):
        with whole_file(folder / "models" / _weights_name(number)) as beside:
            torch.save(network.state_dict(), beside)
    with whole_file(folder / "docs" / "README.md") as beside:
        shutil.copyfile(folder / CARD_NAME, beside)


def _as_dynunet(network: Any) -> "DynUNet | None":
    """Return a network of MONAI that computes the same; None if it cannot be `DynUNet`."""
    from monai.networks.nets import DynUNet

    if isinstance(inner := getattr(network, "network", None), DynUNet):
        return inner
    if not isinstance(network, UNet) or len(network.encoder) < _FEWEST_LEVELS:
        return None
    encoder: Any = network.encoder
    widths = [level[0].convolution.out_channels for level in encoder]
    strides = [level[0].convolution.stride for level in encoder]
    heads: Any = network.heads
    n_in, n_out = encoder[0][0].convolution.in_channels, heads[0].out_channels
    same: Any = DynUNet(**_arguments(n_in, n_out, widths, strides))
    down = (same.input_block, *same.downsamples, same.bottleneck)
    for level, block in zip(network.encoder, down, strict=True):
        _copy_level(level, block)
    decoders: Any = reversed(network.decoder)
    for decoder, block in zip(decoders, same.upsamples, strict=True):
        block.transp_conv.conv.load_state_dict(decoder.upsampling.state_dict())
        _copy_level(decoder.level, block.conv_block)
    same.output_block.conv.conv.load_state_dict(network.heads[0].state_dict())
    return same


def _copy_level(level: Any, block: Any) -> None:
    layers = ((block.conv1, block.norm1), (block.conv2, block.norm2))
    for ours, (convolution, norm) in zip(level, layers, strict=True):
        convolution.conv.load_state_dict(ours.convolution.state_dict())
        norm.load_state_dict(ours.norm.state_dict())


def _arguments(
    n_in: int, n_out: int, widths: Sequence[int], strides: Sequence[Sequence[int]]
) -> dict[str, Any]:
    """Return the arguments of a `DynUNet` in the shape of our U-Net."""
    return {
        "spatial_dims": 3,
        "in_channels": n_in,
        "out_channels": n_out,
        "kernel_size": [3] * len(strides),
        "strides": [list(stride) for stride in strides],
        "upsample_kernel_size": [list(stride) for stride in strides[1:]],
        "filters": list(widths),
        "norm_name": ["instance", {"affine": True}],
        "act_name": ["leakyrelu", {"inplace": True, "negative_slope": LEAKY_SLOPE}],
        "trans_bias": True,
    }


def _windows(member: Member) -> dict[str, Any]:
    """Return how the windows of a network are placed, by the names in the expressions."""
    size, multiple = member.window.size, list(member.multiple)
    rounded = "-(-n // m) * m"
    if size is None:
        roi_size = f"$lambda shape: [{rounded} for n, m in zip(shape, {multiple})]"
    else:
        # never larger than the crop, or smaller than a training patch
        roi_size = (
            f"$lambda shape: [min(w, max(p, {rounded})) for n, m, w, p in "
            f"zip(shape, {multiple}, {list(size)}, {list(member.patch)})]"
        )
    return {"overlap": member.window.overlap, "roi_size": roi_size}


def _monai_parts(
    exported: ExportedModel, networks: Sequence[Any], windows: dict[str, Any]
) -> dict[str, Any]:
    """Return the configuration that predicts a case with the parts of MONAI alone."""
    names = [f"network{number}" for number in range(len(networks))]
    definitions: dict[str, Any] = {}
    for name, network in zip(names, networks, strict=True):
        arguments = _arguments(
            network.in_channels, network.out_channels, network.filters, network.strides
        )
        definitions[f"{name}_def"] = _part("DynUNet", **arguments)
        definitions[name] = f"$@{name}_def.to(@device)"
    loading = [
        _part(
            "CheckpointLoader",
            load_path=f"$@bundle_root + '/models/{_weights_name(number)}'",
            load_dict={"model": f"@{name}"},
        )
        for number, name in enumerate(names)
    ]
    evaluator = {
        "device": "@device",
        "val_data_loader": "@dataloader",
        "inferer": "@inferer",
        "postprocessing": "@postprocessing",
        "val_handlers": "@handlers",
    }
    return {
        **definitions,
        **windows,
        "imports": ["$import itertools", "$import scipy.ndimage as ndimage"],
        "starts": _STARTS,
        "window_weights": _WEIGHTS,
        "inferer": _INFERER,
        "preprocessing": _part("Compose", transforms=_preprocessing(exported)),
        "dataset": _part("Dataset", data="@datalist", transform="@preprocessing"),
        "dataloader": _part("DataLoader", dataset="@dataset", batch_size=1, num_workers=0),
        "postprocessing": _part("Compose", transforms=_postprocessing(exported)),
        "handlers": loading,
        "evaluator": _part("SupervisedEvaluator", network="@network0", **evaluator)
        if len(networks) == 1
        else _part(
            "EnsembleEvaluator",
            networks=[f"@{name}" for name in names],
            pred_keys=_predictions(len(names)),
            **evaluator,
        ),
        "run": ["$@evaluator.run()"],
    }


def _preprocessing(exported: ExportedModel) -> list[dict[str, Any]]:
    """Return the transforms from files to the image that the networks take."""
    spacing_mm = exported.networks[0].identity.spacing_mm
    crop = {"source_key": "image", "select_fn": "$lambda image: image != 0", "allow_smaller": True}
    return [
        _part("LoadImaged", keys="image", image_only=True, ensure_channel_first=True),
        _part("Orientationd", keys="image", axcodes="LPS", labels=None),
        _part("Spacingd", keys="image", pixdim=spacing_mm, mode="bilinear"),
        _part("Lambdad", keys="image", func=_NORMALISE),
        _part("CropForegroundd", keys="image", **crop),
    ]


def _postprocessing(exported: ExportedModel) -> list[dict[str, Any]]:
    """Return the transforms from probabilities to a label map on the grid of the files."""
    inverse = {"transform": "@preprocessing", "orig_keys": "image", "nearest_interp": False}
    saving = {"output_dir": "@output_dir", "output_postfix": "seg", "output_dtype": "uint8"}
    mean = []
    if len(exported.networks) > 1:
        keys = _predictions(len(exported.networks))
        mean = [_part("MeanEnsembled", keys=keys, output_key="pred")]
    return [
        *mean,
        _part("Invertd", keys="pred", **inverse),
        *_decoding(exported.networks[0].fitted.decoding, _convention(exported)),
        _part("SaveImaged", keys="pred", resample=False, separate_folder=False, **saving),
    ]


def _decoding(decoding: Decoding, convention: LabelConvention) -> list[dict[str, Any]]:
    """Return the transforms from probabilities of WT, TC and ET to a label map."""
    wt, tc, et = decoding.thresholds
    # a region holds those inside it
    parts = [
        _part(
            "Lambdad",
            keys="pred",
            func=f"$lambda p: torch.cat([(p[0:1] > {wt}) | (p[1:2] > {tc}) | (p[2:3] > {et}), "
            f"(p[1:2] > {tc}) | (p[2:3] > {et}), p[2:3] > {et}]).to(torch.uint8)",
        )
    ]
    voxel_mm3 = "abs(np.linalg.det(np.asarray(p.affine)[:3, :3]))"
    if any(decoding.smallest_mm3):
        # voxels that share a corner are connected
        kept = (
            f"np.stack([(np.bincount(c.ravel()) >= mm3 / {voxel_mm3})[c] for mask, mm3 in "
            f"zip(np.asarray(p) > 0, {list(decoding.smallest_mm3)}) "
            "for c in [ndimage.label(mask, np.ones((3, 3, 3)))[0]]])"
        )
        func = f"$lambda p: (p * torch.as_tensor({kept})).cumprod(0)"
        parts.append(_part("Lambdad", keys="pred", func=func))
    if decoding.smallest_et_mm3:
        is_kept = f"int(p[2].sum() * {voxel_mm3} >= {decoding.smallest_et_mm3})"
        smallest = f"torch.tensor([1, 1, {is_kept}])"
        func = f"$lambda p: p * {smallest}[:, None, None, None]"
        parts.append(_part("Lambdad", keys="pred", func=func))
    ed, ncr, et_value = convention.painted
    values = f"torch.tensor([0, {ed}, {ncr}, {et_value}])"
    parts.append(
        _part("Lambdad", keys="pred", func=f"$lambda p: {values}[p.sum(0, keepdim=True).long()]")
    )
    return parts


def _part(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


def _predictions(n_networks: int) -> list[str]:
    return [f"pred{number}" for number in range(n_networks)]


def _weights_name(number: int) -> str:
    return f"model{number or ''}.pt"


def _convention(exported: ExportedModel) -> LabelConvention:
    """Return the label convention that the bundle writes: that of training, if there was only one."""
    taught = {name for network in exported.networks for name in network.identity.conventions}
    return convention_named(*taught) if len(taught) == 1 else BRATS2023


def _metadata(exported: ExportedModel, *, needs_us: bool) -> dict[str, Any]:
    convention = _convention(exported)
    spacing = "x".join(f"{mm:g}" for mm in exported.networks[0].identity.spacing_mm)
    meanings = dict(convention.meanings)
    return {
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by brats_seg {version('brats_seg')}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch"),
        "numpy_version": version("numpy"),
        "required_packages_version": _required(needs_us=needs_us),
        "name": "Brain tumour segmentation",
        "task": "Segmentation of brain tumours in four modalities of MRI",
        "description": f"Exported by brats_seg, fingerprint {exported.fingerprint}. Research use only.",
        "authors": "see docs/README.md",
        "copyright": "see docs/README.md",
        "intended_use": "Research use only. This is not a medical device.",
        "image_classes": f"{', '.join(_MODALITY_NAMES)}, skull-stripped, one grid, {spacing} mm",
        "label_classes": str(convention),
        "network_data_format": {
            "inputs": {"image": _format("magnitude", _MODALITY_NAMES)},
            "outputs": {
                "pred": _format("segmentation", _REGION_NAMES)
                | {
                    "label_map": {
                        str(value): meanings[value] for value in sorted(convention.painted)
                    }
                }
            },
        },
    }


def _required(*, needs_us: bool) -> dict[str, str]:
    """Return the packages that a bundle needs beside MONAI."""
    names = {name: version(name) for name in ("nibabel", "scipy")}
    if needs_us:
        return names | {"brats_seg": version("brats_seg")}
    return names | {"pytorch-ignite": ">=0.4"}


def _format(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "image",
        "format": kind,
        "modality": "MR",
        "num_channels": len(names),
        "spatial_shape": ["*", "*", "*"],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": True,
        "channel_def": {str(index): name for index, name in enumerate(names)},
    }


def _write_json(path: Path, content: dict[str, Any]) -> None:
    with whole_file(path) as beside:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
