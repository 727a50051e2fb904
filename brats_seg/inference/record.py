"""What is written down about each case: one line of `manifest.jsonl`."""

import hashlib
from collections.abc import Sequence
from typing import Literal

from brats_seg.config import Section
from brats_seg.inference.settings import InferenceConfig
from brats_seg.inference.volumes import PartVolume


class Record(Section):
    """How one case ended."""

    case_id: str
    status: Literal["done", "failed"]
    key: str = ""
    """Changes with the scans, the model and the settings; empty where the scans could not be read."""
    inputs: tuple[str, ...] = ()
    """SHA-256 of each modality's file, and the index of the volume in a 4-D file."""
    model: str
    """Fingerprint of the model."""
    settings: InferenceConfig
    outputs: tuple[str, ...] = ()
    """Files, relative to the output folder."""
    convention: str = ""
    """Label convention of the label map."""
    volumes: tuple[PartVolume, ...] = ()
    warnings: tuple[str, ...] = ()
    """What was unusual."""
    error: str = ""
    """Kind of error, where the case failed."""
    message: str = ""
    """What is wrong, and what to do."""
    seconds: float = 0.0
    """Reading and computing; writing goes on beside the next case."""
    peak_memory_mb: float = 0.0
    device: str = ""
    version: str = ""
    """Of brats_seg."""


def key_of(inputs: Sequence[str], model: str, settings: InferenceConfig) -> str:
    """Return what changes with everything that a result depends on; the device is not part of it."""
    parts = [*inputs, model, settings.model_dump_json(exclude={"device"})]
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]
