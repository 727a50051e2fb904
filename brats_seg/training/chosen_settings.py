"""Choose the settings of a run for which neither a preset nor a file of settings is given.

A run that was begun keeps its settings, so that the same command continues it, whatever is free now. A
new run gets the preset that suits the device: `cpu`, or one for GPUs by their memory. The patch of the
preset is kept where it fits, and else the largest below it is taken. The whole memory of the device
counts and not what is free at the moment, so that all folds on one device get the same patch.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from brats_seg.config import Config, ModelConfig, Size
from brats_seg.config_text import LONGEST_YAML, load_config
from brats_seg.errors import ConfigError
from brats_seg.models.build import size_words
from brats_seg.runtime.device import Device, Gpu, choose_device
from brats_seg.runtime.memory import MEGABYTE, total_memory
from brats_seg.training.checkpoints import CONFIG_NAME, Run
from brats_seg.training.memory_count import UncountableError
from brats_seg.training.memory_plan import PlanRow, largest_patch
from brats_seg.training.state import build_network

SMALL_GPU_BYTES = 20 * 2**30
"""Memory below which a GPU gets the preset `kaggle-t4`, which is made for 16 GB, and not `full`."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ChosenSettings:
    """Settings of a run, and why they were chosen."""

    config: Config
    reason: str
    """One or two sentences for the person who starts the run."""


@dataclass(frozen=True, kw_only=True, slots=True)
class _Place:
    """Device that a run is to be trained on."""

    device: Device
    gpu: Gpu | None
    """GPU that is planned for without using it."""
    why: str
    """Reason for the preset."""
    memory_bytes: int

    @property
    def is_gpu(self) -> bool:
        return self.device.torch_device.type == "cuda"

    @property
    def preset(self) -> str:
        if not self.is_gpu:
            return "cpu"
        return "kaggle-t4" if self.memory_bytes < SMALL_GPU_BYTES else "full"


def choose_settings(
    *,
    assignments: Iterable[str] = (),
    values: Mapping[str, Any] | None = None,
    run_paths: Sequence[Path] = (),
    gpu: Gpu | None = None,
) -> ChosenSettings:
    """Return the settings of a run that was begun, or those that suit the device; what is given wins.

    Args:
        assignments: `key=value` texts, see `load_config`.
        values: Values by dotted key.
        run_paths: Folders of runs. The first that holds a checkpoint gives the settings.
        gpu: GPU to choose for, instead of the device of the settings.

    Raises:
        ConfigError: A setting is not allowed, the settings of the run cannot be read, or the network
            cannot be built.
        EnvironmentalError: The machine lacks the device.

    Example:
        >>> choose_settings(values={"training.device": "cpu"}).config.patch.size
        (64, 64, 64)
    """
    assignments = list(assignments)
    begun = next((path for path in run_paths if Run(path=path).last_path.is_file()), None)
    if begun is not None:
        path = begun / CONFIG_NAME
        config = load_config(text=_settings_text(path), assignments=assignments, values=values)
        return ChosenSettings(config=config, reason=f"settings of {path}, which the run began with")
    given = load_config(assignments=assignments, values=values)
    place = _place_of(given, gpu)
    config = load_config(preset=place.preset, assignments=assignments, values=values)
    changes, why = _fitted(config, given, place)
    chosen = f"preset {place.preset}, {place.why} (--preset takes another)"
    network = _network_words(config.model)
    config = load_config(
        preset=place.preset, assignments=assignments, values={**(values or {}), **changes}
    )
    return ChosenSettings(config=config, reason=f"{chosen}: {network}, {why}")


def _network_words(model: ModelConfig) -> str:
    if model.name not in {"unet", "dynunet"}:
        return model.name
    return f"{model.name} of {model.widths[0]} to {model.widths[-1]} channels"


def _settings_text(path: Path) -> str:
    """Return the settings of a run, as YAML that `load_config` reads."""
    try:
        with path.open(encoding="utf-8") as file:
            text = file.read(LONGEST_YAML + 1)
        load_config(text=text)
        return text
    except (OSError, UnicodeDecodeError, ConfigError) as error:
        msg = (
            f"{path} cannot be read: {error}. It holds the settings that the run began with; give them "
            "with --preset or --config, or start anew with --fresh"
        )
        raise ConfigError(msg) from None


def _place_of(given: Config, gpu: Gpu | None) -> _Place:
    training = given.training
    if gpu is not None:
        device = gpu.device(training.precision)
        why = f"for {gpu.name} with {_gib(gpu.memory_bytes)}"
        return _Place(device=device, gpu=gpu, why=why, memory_bytes=gpu.memory_bytes)
    device = choose_device(training.device, training.precision)
    where = device.torch_device
    if where.type != "cuda":
        found = "torch finds no GPU here"
        why = f"because {found if training.device == 'auto' else f'training.device is {where}'}"
        return _Place(device=device, gpu=None, why=why, memory_bytes=total_memory(where))
    # ranks of one run must choose the same: the GPU that has least decides
    each = [torch.device("cuda", number) for number in range(torch.cuda.device_count())]
    memory_bytes = min(map(total_memory, [where] if ":" in training.device else each))
    why = f"for {torch.cuda.get_device_name(where)} with {_gib(memory_bytes)}"
    return _Place(device=device, gpu=None, why=why, memory_bytes=memory_bytes)


def _gib(memory_bytes: int) -> str:
    return f"{memory_bytes / 2**30:.1f} GiB"


def _fitted(config: Config, given: Config, place: _Place) -> tuple[dict[str, Any], str]:
    """Return the settings in which a run differs from the preset to fit in memory, and why."""
    patch = config.patch.size
    if patch == "whole":
        return {}, f"whole brains in {place.device.precision}"
    if "size" in given.patch.model_fields_set:
        # a patch that does not fit the network is refused before the cases are prepared
        build_network(config, patch)
        return {}, f"patch {size_words(patch)} as given, in {place.device.precision}"
    try:
        row = largest_patch(config, place.memory_bytes, gpu=place.gpu)
    except UncountableError:
        words = f"whose memory cannot be counted for model.name {config.model.name}"
        return {}, f"patch {size_words(patch)}, {words}"
    changes: dict[str, Any] = {}
    if row is not None and row.patch != patch:
        changes["patch.size"] = row.patch
    if place.is_gpu and "memory" not in given.training.model_fields_set:
        # starts with less micro-batch or more checkpointing where another process uses the GPU
        changes["training.memory"] = "auto"
    return changes, _memory_words(patch, row, place.memory_bytes // MEGABYTE)


def _memory_words(patch: Size, row: PlanRow | None, memory_mib: int) -> str:
    own = size_words(patch)
    if row is None:
        return f"patch {own}, which is not predicted to fit in {memory_mib} MiB: lower model.widths"
    instead = "" if row.patch == patch else f" instead of {own}"
    kind = "" if row.checkpointing == "none" else f", with checkpointing {row.checkpointing}"
    return (
        f"patch {size_words(row.patch)}{instead} in {row.precision}, about "
        f"{row.predicted_mib} of {memory_mib} MiB{kind}"
    )
