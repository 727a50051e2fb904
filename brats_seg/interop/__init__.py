"""Read models of nnU-Net and MONAI, and write ours as MONAI bundles and ONNX files.

This module has what the readers share. The rest of the package reaches it by way of `wings`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml
from torch import Tensor, nn

from brats_seg.cases.case import LoadedCase
from brats_seg.cases.layouts import modality_named
from brats_seg.errors import UsageError
from brats_seg.files import read_bounded
from brats_seg.inference.method import Field, Scan
from brats_seg.inference.model import Member
from brats_seg.labels import MODALITIES
from brats_seg.runtime.weights import ExportedModel, read_plain, reason_of, sha256_of
from brats_seg.voxels.box import Box

_LONGEST_TEXT = 1 << 24
"""Bytes of the longest description of a model."""
_COPY_AGAIN = "Copy the folder of the model again."


def reader_of(path: Path) -> Callable[[Path], Member] | None:
    """Return the function that reads a model of another program; None if the path is no such model."""
    from brats_seg.interop import monai_bundle, nnunet

    try:
        if nnunet.is_nnunet(path):
            return nnunet.read_nnunet
        return monai_bundle.read_bundle if monai_bundle.is_bundle(path) else None
    except OSError:
        return None


def writer_of(file_format: str) -> Callable[[ExportedModel, Path], None]:
    """Return the function that writes a model for other programs: as a `bundle`, or as `onnx`."""
    from brats_seg.interop import export_bundle, onnx

    return onnx.write_onnx if file_format == "onnx" else export_bundle.write_bundle


def read_content(path: Path) -> Any:
    """Return the content of a file of JSON or YAML, or of a checkpoint, without running code."""
    if path.suffix not in {".json", ".yaml", ".yml"}:
        return read_plain(path, _COPY_AGAIN)
    text = read_bounded(path, _LONGEST_TEXT).decode()
    return json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)


def channels_of(names: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the modality of each input channel, given the names of the channels in a file."""
    # MONAI's bundles call T1 with contrast agent T1c, nnU-Net's datasets T1ce or T1Gd
    modalities = [modality_named(name) for name in names]
    if sorted(map(str, modalities)) != sorted(MODALITIES):
        msg = (
            f"{path}: the model takes the channels {', '.join(names) or 'none'}; expected T1, T1 "
            "with contrast agent, T2 and FLAIR, each once. Models of other images cannot be used."
        )
        raise UsageError(msg)
    return tuple(map(str, modalities))


def hash_of_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files, in any order, as the fingerprint of a model."""
    return hashlib.sha256("\n".join(sorted(map(sha256_of, paths))).encode()).hexdigest()[:32]


def scan_of(loaded: LoadedCase, image: Field, box: Box) -> Scan:
    """Return a case prepared for a network, given its image (4, x, y, z) in a box of the scan."""
    return Scan(
        case_id=loaded.case.case_id,
        release=loaded.case.release,
        image=image,
        box=box,
        geometry=loaded.geometry,
        warnings=loaded.case.remarks,
    )


@contextmanager
def usable(path: Path, next_step: str = _COPY_AGAIN) -> Iterator[None]:
    """Turn errors of reading and building the content of a file into `UsageError`."""
    try:
        yield
    except (
        *(OSError, LookupError, TypeError, ValueError, AttributeError, RuntimeError, ImportError),
        *(ArithmeticError, AssertionError, yaml.YAMLError),
    ) as error:
        msg = f"{path} cannot be used: {reason_of(error)}. {next_step}"
        raise UsageError(msg) from None


def load_weights(network: nn.Module, weights: Mapping[str, Tensor], path: Path) -> None:
    """Load the weights of a file into a network, which may be on the device `meta`."""
    try:
        network.load_state_dict(weights, assign=next(network.parameters()).is_meta)
    except RuntimeError as error:
        reason = str(error).partition("\n")[2].strip().partition("\n")[0] or error
        msg = f"{path}: the weights are not those of the network that is described: {reason}"
        raise UsageError(msg) from None
