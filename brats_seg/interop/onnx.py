"""Write the networks of an exported model as ONNX too, and check them with onnxruntime.

member0.onnx holds the first network: `image`, normalised modalities `(1, 4, X, Y, Z)` in float32, to
`logits` of WT, TC and ET. X, Y and Z can be any multiples of those that the network needs. What is done
before and after, cropping, normalising, windows and thresholds, is not in it; the model card says it.
"""

import warnings
from pathlib import Path
from types import ModuleType

import numpy as np
import torch
from torch import Tensor

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.files import whole_file
from brats_seg.inference.model import Member, assemble
from brats_seg.models.norm import ActivatedNorm
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import ExportedModel, reason_of

ONNX_TOLERANCE = 1e-4
"""Largest difference of a logit between torch and onnxruntime, as a share of the largest if that is above 1."""
_OTHERWISE = "Export it without --format, or as a bundle."
_OPSET = 18
_SMALLEST_AXIS = 8


def write_onnx(exported: ExportedModel, folder: Path) -> None:
    """Write each network of an exported model as `member*.onnx`, and compare it with torch.

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
    members = assemble(exported.networks, choose_device("cpu", "fp32")).members
    for index, member in enumerate(members):
        for layer in member.network.modules():
            if isinstance(layer, ActivatedNorm):
                # ONNX has the stock layers alone
                layer.in_place = False
        with whole_file(folder / f"member{index}.onnx") as temporary:
            _write_network(member, temporary)
            _compare(member, temporary, onnxruntime)


def _write_network(member: Member, path: Path) -> None:
    """Write a network; the size of its input stays open."""
    axes = {2: "x", 3: "y", 4: "z"}
    try:
        # the exporter by tracing is the one that needs no further package
        with warnings.catch_warnings(action="ignore"):
            torch.onnx.export(
                member.network,
                (_example(member, 1),),
                path,
                dynamo=False,
                opset_version=_OPSET,
                input_names=["image"],
                output_names=["logits"],
                dynamic_axes={"image": axes, "logits": axes},
            )
    except (RuntimeError, ValueError, TypeError) as error:
        msg = f"model.name {member.name!r} cannot be written as ONNX: {reason_of(error)}. {_OTHERWISE}"
        raise UsageError(msg) from None


def _compare(member: Member, path: Path, onnxruntime: ModuleType) -> None:
    """Raise `UsageError` unless onnxruntime gives the logits of torch, for two sizes of the input."""
    session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
    for scale in (1, 2):
        image = _example(member, scale)
        (logits,) = session.run(None, {"image": image.numpy()})
        with torch.inference_mode():
            expected = member.network(image).numpy()
        allowed = ONNX_TOLERANCE * max(1.0, float(np.abs(expected).max()))
        if logits.shape != expected.shape or np.abs(logits - expected).max() > allowed:
            msg = (
                f"{path.name}: onnxruntime {onnxruntime.__version__} does not give the logits of torch; "
                f"expected them within {allowed:g} for {tuple(image.shape)}. {_OTHERWISE}"
            )
            raise UsageError(msg)


def _example(member: Member, scale: int) -> Tensor:
    """Return a random image of a size that the network takes, of other numbers along each axis."""
    generator = torch.Generator().manual_seed(scale)
    x, y, z = (
        m * (-(-max(_SMALLEST_AXIS, n // 4) // m) + scale + axis)
        for axis, (n, m) in enumerate(zip(member.identity.patch, member.multiple, strict=True))
    )
    return torch.randn(1, len(member.channels), x, y, z, generator=generator)
