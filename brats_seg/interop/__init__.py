"""Read models of nnU-Net and MONAI, and write ours as MONAI bundles and ONNX files.

This module has what the readers share. The rest of the package reaches it by way of `wings`.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import torch

from brats_seg.cases.case import Case, LoadedCase
from brats_seg.cases.layouts import modality_named
from brats_seg.cases.nifti import Geometry, Volume
from brats_seg.config import LONGEST_YAML, parse_yaml
from brats_seg.errors import UsageError
from brats_seg.files import read_bounded
from brats_seg.inference.method import Method
from brats_seg.inference.model import Member, Model
from brats_seg.labels import MODALITIES, REGIONS
from brats_seg.runtime.weights import read_plain, reason_of, sha256_of

_LONGEST_TEXT = 1 << 24
"""Bytes of the longest description of a model."""
_COPY_AGAIN = "Copy the folder of the model again."


def reader_of(path: Path) -> Callable[[Path], Member] | None:
    """Return the function that reads a model of another program; None if the path is no such model."""
    from brats_seg.interop import monai_bundle, nnunet

    try:
        if nnunet.find_root(path) is not None:
            return nnunet.read_nnunet
        return monai_bundle.read_bundle if monai_bundle.is_bundle(path) else None
    except OSError:
        return None


def writer_of(file_format: str) -> Callable[[Model, Path], None]:
    """Return the function that writes a model for other programs: as a `bundle`, or as `onnx`."""
    from brats_seg.interop import export

    return export.write_onnx if file_format == "onnx" else export.write_bundle


def read_content(path: Path) -> Any:
    """Return the content of a file of JSON or YAML, or of a checkpoint, without running code."""
    if path.suffix not in {".json", ".yaml", ".yml"}:
        return read_plain(path, _COPY_AGAIN)
    if path.suffix == ".json":
        return json.loads(read_bounded(path, _LONGEST_TEXT))
    return parse_yaml(read_bounded(path, LONGEST_YAML).decode(), f"{path}")


def channels_of(channels: Mapping[int, str], path: Path) -> tuple[int, ...]:
    """Return the index in `MODALITIES` of each input channel, given the names of the channels in a file."""
    names = [name for _, name in sorted(channels.items())]
    # MONAI's bundles call T1 with contrast agent T1c, nnU-Net's datasets T1ce or T1Gd
    modalities = [f"{modality_named(name)}" for name in names]
    if sorted(modalities) != sorted(MODALITIES):
        msg = (
            f"{path}: the model takes the channels {', '.join(names) or 'none'}; expected T1, T1 "
            "with contrast agent, T2 and FLAIR, each once. Models of other images cannot be used."
        )
        raise UsageError(msg)
    return tuple(map(MODALITIES.index, modalities))


def hash_of_files(paths: Iterable[Path]) -> str:
    """Return a hash of the contents of files, in any order, as the fingerprint of a model."""
    return hashlib.sha256("\n".join(sorted(map(sha256_of, paths))).encode()).hexdigest()[:32]


def try_method(method: Method, n_out: int) -> None:
    """Raise `ValueError` unless a small scan becomes the input of a network, and its output a result."""
    grid = Geometry.at(np.eye(4), (16, 16, 16))
    voxels = np.pad(np.random.default_rng(0).uniform(100, 900, (12, 12, 12)), 2)
    volumes = (Volume(array=voxels, geometry=grid, file="trial"),) * len(MODALITIES)
    case = Case.named("trial", {})
    loaded = LoadedCase(case=case, volumes=volumes, geometry=grid, label=None, convention=None)
    given = method.to_network(scan := method.prepare(loaded))
    result = given.to_volume(torch.ones(n_out, *given.image.shape[1:]))
    is_finite = np.isfinite(given.image).all() and np.isfinite(result).all()
    if not is_finite or result.shape != (len(REGIONS), *scan.image.shape[1:]):
        msg = f"it turns a scan into an image of {given.image.shape}, and this into {result.shape}"
        raise ValueError(msg)


@contextmanager
def usable(path: Path, next_step: str = _COPY_AGAIN) -> Iterator[None]:
    """Turn errors of reading and building the content of a file into `UsageError`."""
    try:
        yield
    except UsageError:
        raise
    except Exception as error:  # noqa: BLE001 - torch, MONAI and YAML raise errors of many kinds
        # MONAI's own error of a transform does not say why
        cause = error.__cause__ if isinstance(error.__cause__, Exception) else error
        msg = f"{path} cannot be used: {reason_of(cause)}. {next_step}"
        raise UsageError(msg) from None
