"""Write an exported model as a MONAI bundle too, which predicts without this package, or as ONNX.

configs/metadata.json     channels in and out, versions
configs/inference.json    network, transforms, windows, thresholds
models/model.pt           weights, under the names of MONAI; model1.pt and so on of an ensemble
docs/README.md            the model card, and how to run the bundle

`bundle.yaml` has the configuration. The default network is MONAI's `DynUNet` under other names; a
bundle of any other network asks for this package by name. member0.onnx turns `image`, normalised
modalities `(1, 4, X, Y, Z)` in float32, into `logits`; cropping, normalising, windows and thresholds are
not in it. onnxruntime checks it.
"""

import warnings
from collections.abc import Sequence
from importlib.metadata import version
from importlib.resources import files
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
import yaml
from torch import Tensor

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.files import whole_file, write_json
from brats_seg.inference.export import CARD_NAME
from brats_seg.inference.model import Member, Model
from brats_seg.labels import BRATS2023, LabelConvention, convention_named
from brats_seg.models.norm import ActivatedNorm
from brats_seg.models.unet import FEWEST_DYNUNET_LEVELS, dynunet_arguments
from brats_seg.runtime.weights import reason_of

if TYPE_CHECKING:
    from monai.networks.nets import DynUNet

ONNX_TOLERANCE = 1e-4
"""Largest difference of a logit between torch and onnxruntime, as a share of the largest if that is above 1."""
_OTHERWISE = "Export it without --format, or as a bundle."


def write_bundle(model: Model, folder: Path) -> None:
    """Write the files of a bundle into the folder of an exported model, which has its card."""
    members, convention = model.members, _convention(model)
    converted = [_as_dynunet(member.name, member.network) for member in members]
    networks = [network for network in converted if network is not None]
    values = [_values(member, convention) for member in members]
    is_monai = len(networks) == len(members) and all(value == values[0] for value in values)
    template = yaml.safe_load(files("brats_seg.interop").joinpath("bundle.yaml").read_text())
    config = template["common"] | template["by_name"]
    if is_monai:
        config = template["common"] | values[0] | template["monai"]
        _add_networks(config, networks)
    write_json(folder / "configs" / "inference.json", config)
    meanings = {f"{n}": text for n, text in sorted(convention.meanings) if n in convention.painted}
    metadata = template["metadata"] | _facts(model, convention, is_monai=is_monai)
    metadata["network_data_format"]["outputs"]["pred"]["label_map"] = meanings
    write_json(folder / "configs" / "metadata.json", metadata)
    for index, network in enumerate(networks if is_monai else ()):
        with whole_file(folder / "models" / _weights_name(index)) as temporary:
            torch.save(network.state_dict(), temporary)
    with whole_file(folder / "docs" / "README.md") as temporary:
        temporary.write_text((folder / CARD_NAME).read_text("utf-8") + template["use"], "utf-8")


def _as_dynunet(name: str, network: Any) -> "DynUNet | None":
    """Return a network of MONAI that computes the same; None if it cannot be `DynUNet` of this shape."""
    from monai.networks.nets import DynUNet

    if name == "dynunet":
        return network.network
    if name != "unet" or len(network.encoder) < FEWEST_DYNUNET_LEVELS:
        return None
    widths = [level[0].convolution.out_channels for level in network.encoder]
    strides = [level[0].convolution.stride for level in network.encoder]
    n_in, n_out = network.encoder[0][0].convolution.in_channels, network.heads[0].out_channels
    same: Any = DynUNet(**dynunet_arguments(n_in, n_out, widths, strides))
    down = (same.input_block, *same.downsamples, same.bottleneck)
    for level, block in zip(network.encoder, down, strict=True):
        _copy_level(level, block)
    for decoder, block in zip(reversed(network.decoder), same.upsamples, strict=True):
        block.transp_conv.conv.load_state_dict(decoder.upsampling.state_dict())
        _copy_level(decoder.level, block.conv_block)
    same.output_block.conv.conv.load_state_dict(network.heads[0].state_dict())
    return same


def _copy_level(level: Any, block: Any) -> None:
    layers = ((block.conv1, block.norm1), (block.conv2, block.norm2))
    for ours, (convolution, norm) in zip(level, layers, strict=True):
        convolution.conv.load_state_dict(ours.convolution.state_dict())
        norm.load_state_dict(ours.norm.state_dict())


def _values(member: Member, convention: LabelConvention) -> dict[str, Any]:
    """Return how windows are placed and read, and label maps made, by the names in the expressions."""
    return {
        "window": member.window.size,
        "overlap": member.window.overlap,
        "patch": member.identity.patch,
        "multiple": member.multiple,
        "channels": member.channels,
        "regions": member.regions,
        "spacing_mm": member.identity.spacing_mm,
        **member.decoding.model_dump(),
        "label_values": convention.painted,
    }


def _add_networks(config: dict[str, Any], networks: Sequence["DynUNet"]) -> None:
    """Add the networks of a bundle to its configuration, and apply them all."""
    names = [f"network{index}" for index in range(len(networks))]
    config["handlers"] = []
    for index, (name, net) in enumerate(zip(names, networks, strict=True)):
        shape = net.in_channels, net.out_channels, net.filters, net.strides
        config[f"{name}_def"] = {"_target_": "DynUNet", **dynunet_arguments(*shape)}
        config[name] = f"$@{name}_def.to(@device)"
        path = f"$@bundle_root + '/models/{_weights_name(index)}'"
        load = {"load_path": path, "load_dict": {"model": f"@{name}"}}
        config["handlers"].append({"_target_": "CheckpointLoader", **load})
    if len(networks) == 1:
        config["evaluator"]["network"] = "@network0"
        return
    keys = [f"pred{index}" for index in range(len(networks))]
    config["evaluator"] |= {
        "_target_": "EnsembleEvaluator",
        "networks": [f"@{name}" for name in names],
        "pred_keys": keys,
    }
    mean = {"_target_": "MeanEnsembled", "keys": keys, "output_key": "pred"}
    config["postprocessing"]["transforms"].insert(0, mean)


def _weights_name(index: int) -> str:
    return f"model{index or ''}.pt"


def _convention(model: Model) -> LabelConvention:
    """Return the label convention that the bundle writes: that of training, if there was only one."""
    taught = {name for member in model.members for name in member.identity.conventions}
    return convention_named(*taught) if len(taught) == 1 else BRATS2023


def _facts(model: Model, convention: LabelConvention, *, is_monai: bool) -> dict[str, Any]:
    """Return the entries of the metadata that depend on the model and the versions."""
    spacing = "x".join(f"{mm:g}" for mm in model.identity.spacing_mm)
    required = {name: version(name) for name in ("nibabel", "scipy")}
    required |= {"pytorch-ignite": ">=0.4"} if is_monai else {"brats_seg": version("brats_seg")}
    return {
        "monai_version": version("monai"),
        "pytorch_version": version("torch"),
        "numpy_version": version("numpy"),
        "required_packages_version": required,
        "changelog": {"0.1.0": f"exported by brats_seg {version('brats_seg')}"},
        "description": f"Exported by brats_seg, fingerprint {model.fingerprint}. Research use only.",
        "image_classes": "T1, T1 with contrast agent, T2, FLAIR, skull-stripped, one grid, "
        f"{spacing} mm",
        "label_classes": str(convention),
    }


def write_onnx(model: Model, folder: Path) -> None:
    """Write each network of a model as `member*.onnx`, and compare it with torch.

    Raises:
        EnvironmentalError: `onnx` or `onnxruntime` is not installed.
        UsageError: A network cannot be written, or gives other logits with onnxruntime.
    """
    try:
        import onnx  # noqa: F401
        import onnxruntime
    except ImportError as error:
        msg = f'--format onnx needs {error.name}: pip install "brats_seg[onnx]"'
        raise EnvironmentalError(msg) from None
    for index, member in enumerate(model.members):
        for layer in member.network.modules():
            if isinstance(layer, ActivatedNorm):
                # ONNX has the stock layers alone
                layer.in_place = False
        with whole_file(folder / f"member{index}.onnx") as temporary:
            try:
                _write_network(member, temporary)
                _compare(member, temporary, onnxruntime)
            except OSError:
                raise
            except Exception as error:  # noqa: BLE001 - torch, onnxruntime and networks raise errors of many kinds
                msg = f"model.name {member.name!r} cannot be written as ONNX: {reason_of(error)}. {_OTHERWISE}"
                raise UsageError(msg) from None


def _write_network(member: Member, path: Path) -> None:
    """Write a network; the size of its input stays open."""
    axes = {2: "x", 3: "y", 4: "z"}
    # the exporter by tracing is the one that needs no further package
    with warnings.catch_warnings(action="ignore"):
        torch.onnx.export(
            member.network,
            (_example(member, 1),),
            path,
            dynamo=False,
            opset_version=18,
            input_names=["image"],
            output_names=["logits"],
            dynamic_axes={"image": axes, "logits": axes},
        )


def _compare(member: Member, path: Path, onnxruntime: ModuleType) -> None:
    """Raise `ValueError` unless onnxruntime gives the logits of torch, for two sizes of the input."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for scale in (1, 2):
        image = _example(member, scale)
        (logits,) = session.run(None, {"image": image.numpy()})
        with torch.inference_mode():
            expected = member.network(image).numpy()
        allowed = ONNX_TOLERANCE * max(1.0, float(np.abs(expected).max()))
        if logits.shape != expected.shape or np.abs(logits - expected).max() > allowed:
            msg = (
                f"onnxruntime {onnxruntime.__version__} does not give the logits of torch; "
                f"expected them within {allowed:g} for {tuple(image.shape)}"
            )
            raise ValueError(msg)


def _example(member: Member, scale: int) -> Tensor:
    """Return a random image of a size that the network takes, of other numbers along each axis.

    All networks take multiples above 16 voxels, which the smallest patch of `notebook` has.
    """
    generator = torch.Generator().manual_seed(scale)
    x, y, z = (
        m * (-(-max(16, n // 4) // m) + scale + axis)
        for axis, (n, m) in enumerate(zip(member.identity.patch, member.multiple, strict=True))
    )
    return torch.randn(1, len(member.channels), x, y, z, generator=generator)
