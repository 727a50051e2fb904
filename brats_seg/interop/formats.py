"""The functions of this wing that the rest of the package calls, by way of `wings`."""

from collections.abc import Callable
from pathlib import Path

from brats_seg.inference.model import Member
from brats_seg.interop.export_bundle import write_bundle
from brats_seg.interop.monai_bundle import is_bundle, read_bundle
from brats_seg.interop.nnunet import is_nnunet, read_nnunet
from brats_seg.interop.onnx import write_onnx

WRITERS = {"bundle": write_bundle, "onnx": write_onnx}
"""Functions that write a model for other programs, by the name of the format."""


def reader_of(path: Path) -> Callable[[Path], Member] | None:
    """Return the function that reads a model of another program; None if the path is no such model."""
    try:
        return next((read for is_one, read in _READERS if is_one(path)), None)
    except OSError:
        return None


_READERS: tuple[tuple[Callable[[Path], bool], Callable[[Path], Member]], ...] = (
    (is_nnunet, read_nnunet),
    (is_bundle, read_bundle),
)
