"""Read a MONAI bundle that segments brain tumours, and apply it as MONAI does.

configs/metadata.json     channels in and out
configs/inference.json    network, preprocessing, windows, threshold
models/model.pt           weights

The configuration of a bundle can run any code. Nothing of it is run here: networks, transforms and
windows are built from names that MONAI has and plain values, and a bundle that needs more is refused.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from inspect import isclass
from math import ceil
from pathlib import Path
from typing import Any, NoReturn

import numpy as np
import torch
import yaml
from torch import Tensor, nn

from brats_seg.cases.case import LoadedCase
from brats_seg.errors import UsageError
from brats_seg.files import read_bounded
from brats_seg.inference.method import Field as Image
from brats_seg.inference.method import Method, NetworkInput, Scan
from brats_seg.inference.model import Member
from brats_seg.interop.foreign import (
    LONGEST_TEXT,
    channels_of,
    hash_of_files,
    load_weights,
    usable,
)
from brats_seg.labels import MODALITIES, REGIONS, tissue_named
from brats_seg.models.convolution import use_slabs
from brats_seg.runtime.torch_files import checked_weights, read_plain
from brats_seg.runtime.weights import Decoding, ModelIdentity
from brats_seg.runtime.windows import Window, WindowRule, gaussian
from brats_seg.voxels.box import Box, Triple
from brats_seg.voxels.grids import turn_of, turned, turned_back

_METADATA, _WEIGHTS = Path("configs/metadata.json"), Path("models/model.pt")
_CONFIGURATIONS = tuple(Path(f"configs/inference.{kind}") for kind in ("json", "yaml", "yml"))
_COPY_AGAIN = "Copy the folder of the bundle again."
_USE_MONAI = "Run this bundle with `python -m monai.bundle run`."
_IMAGE = "image"

_LOADING = frozenset(
    {
        *("LoadImaged", "EnsureChannelFirstd", "EnsureTyped", "ConcatItemsd", "ToTensord"),
        *("CastToTyped", "ToDeviced"),
    }
)
"""Transforms that only bring four files into one tensor."""
_APPLIED = frozenset(
    {
        *("NormalizeIntensityd", "ScaleIntensityd", "ScaleIntensityRanged"),
        *("ScaleIntensityRangePercentilesd", "Orientationd", "Spacingd", "CropForegroundd"),
    }
)
"""Transforms of MONAI that are applied with the arguments of the bundle."""
_PER_KEY = ("mode", "padding_mode", "align_corners", "dtype")
"""Arguments with an entry for each key, of which that of the image is taken."""
_NOT_ARGUMENTS = ("_target_", "_disabled_", "_requires_", "_desc_", "keys", "allow_missing_keys")


def is_bundle(path: Path) -> bool:
    """Return whether a path is a MONAI bundle."""
    return (path / _METADATA).is_file()


def read_bundle(path: Path) -> Member:
    """Read a bundle.

    Raises:
        UsageError: A file is missing or damaged, or the bundle is not one of the four modalities and
            the three regions of BraTS, or it needs code of its own.
    """
    metadata = _read(path / _METADATA)
    file = next((path / name for name in _CONFIGURATIONS if (path / name).is_file()), None)
    if file is None:
        msg = f"{path}: found no {_CONFIGURATIONS[0]}, which says how the bundle predicts. {_COPY_AGAIN}"
        raise UsageError(msg)
    config = _Config(content=_read(file), file=file)
    taken, returned = _channels(metadata, path / _METADATA)
    modalities = channels_of(taken, path / _METADATA)
    regions = _regions(returned, path / _METADATA)
    window, rule = _windows(config)
    network, name = _network(config, path / _WEIGHTS)
    method = _Method(
        channels=tuple(map(MODALITIES.index, modalities)),
        transforms=_transforms(config),
    )
    fingerprint = hash_of_files([path / _METADATA, file, path / _WEIGHTS])
    return Member(
        network=network,
        name=name,
        identity=ModelIdentity(
            conventions=(),
            patch=window.size or (1, 1, 1),
            fingerprint=fingerprint,
            modalities=modalities,
            regions=regions,
            normalisation=", ".join(type(one).__name__ for one in method.transforms),
        ),
        multiple=_multiple(metadata),
        decoding=_decoding(config),
        method=Method(
            prepare=_whole_scan, to_network=method.to_network, rule=rule, mean_of="logits"
        ),
        window=window,
        regions=tuple(map(regions.index, REGIONS)),
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class _Config:
    """Configuration of a bundle, and the file that it is from."""

    content: Mapping[str, Any]
    file: Path

    def section(self, name: str) -> Mapping[str, Any]:
        """Return a section that builds an object.

        Raises:
            UsageError: It is missing, or a piece of code.
        """
        found = self.content.get(name)
        if not isinstance(found, Mapping):
            self.refuse(f"{name} is {found!r}")
        return found

    def plain(self, value: Any) -> Any:
        """Return a value with references to others, such as `@device`, replaced by them.

        Raises:
            UsageError: It needs code to be run.
        """
        if isinstance(value, str) and value.startswith("@"):
            name = value[1:]
            if name not in self.content:
                self.refuse(f"{value} refers to nothing in it")
            return self.plain(self.content[name])
        if isinstance(value, str) and value.startswith(("$", "%")):
            self.refuse(f"it needs the code {value!r}")
        if isinstance(value, list):
            return [self.plain(one) for one in value]
        if isinstance(value, Mapping):
            if "_target_" in value:
                self.refuse(f"it needs an object of {value['_target_']}")
            return {key: self.plain(one) for key, one in value.items()}
        return value

    def arguments(self, section: Mapping[str, Any]) -> dict[str, Any]:
        """Return the arguments of an object as plain values."""
        return {
            name: self.plain(value) for name, value in section.items() if name not in _NOT_ARGUMENTS
        }

    def refuse(self, why: str) -> NoReturn:
        """Raise `UsageError` for a bundle that cannot be used here."""
        msg = f"{self.file}: {why}; expected MONAI's own parts and plain values. {_USE_MONAI}"
        raise UsageError(msg) from None


@dataclass(frozen=True, kw_only=True, slots=True)
class _Method:
    """Applies the preprocessing of a bundle, and undoes it."""

    channels: tuple[int, ...]
    """Place in `MODALITIES` of each input channel."""
    transforms: tuple[Any, ...]

    def to_network(self, scan: Scan) -> NetworkInput:
        """Apply the transforms to the volumes of a scan, in the axes of its files."""
        # importing MONAI's transforms takes seconds
        from monai.data import MetaTensor
        from monai.transforms import Compose
        from monai.transforms.inverse import InvertibleTransform

        turn = turn_of(scan.geometry.affine)
        stored = np.stack([turned_back(scan.image[place], turn) for place in self.channels])
        affine = torch.from_numpy(scan.geometry.affine)
        pipeline = Compose(self.transforms)
        image = pipeline({_IMAGE: MetaTensor(torch.from_numpy(stored), affine=affine)})[_IMAGE]

        def back(logits: Tensor) -> Image:
            shares = MetaTensor(logits.cpu().sigmoid())
            shares.affine, shares.applied_operations = image.affine, image.applied_operations
            # MONAI warns where there is nothing to undo
            is_undone = any(isinstance(one, InvertibleTransform) for one in self.transforms)
            found = pipeline.inverse({_IMAGE: shares})[_IMAGE] if is_undone else shares
            return np.stack([turned(one, turn) for one in found.numpy()])

        return NetworkInput(image=np.ascontiguousarray(image.numpy()), back=back)


def _whole_scan(loaded: LoadedCase) -> Scan:
    """Return the modalities as they are: the transforms of a bundle see the whole volumes."""
    volumes = [volume.array.astype(np.float32) for volume in loaded.volumes]
    x, y, z = volumes[0].shape
    return Scan(
        case_id=loaded.case.case_id,
        release=loaded.case.release,
        image=np.stack(volumes),
        box=Box(start=(0, 0, 0), stop=(x, y, z)),
        geometry=loaded.geometry,
        warnings=loaded.case.remarks,
    )


def _read(path: Path) -> dict[str, Any]:
    with usable(path, _COPY_AGAIN):
        text = read_bounded(path, LONGEST_TEXT).decode()
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
        if not isinstance(content, dict):
            msg = f"it holds {type(content).__name__}, expected sections by name"
            raise TypeError(msg)
    return content


def _channels(metadata: Mapping[str, Any], path: Path) -> tuple[list[str], list[str]]:
    """Return the names of the channels that a bundle takes and returns, in order."""
    with usable(path, _USE_MONAI):
        formats = metadata["network_data_format"]
        image, pred = (
            [str(name) for _, name in sorted((int(place), name) for place, name in one.items())]
            for one in (
                formats["inputs"]["image"]["channel_def"],
                formats["outputs"]["pred"]["channel_def"],
            )
        )
    return image, pred


def _regions(names: Sequence[str], path: Path) -> tuple[str, ...]:
    """Return the region of each output channel, given their names."""
    regions = tuple(map(tissue_named, names))
    if sorted(regions) != sorted(REGIONS):
        msg = (
            f"{path}: the bundle returns {', '.join(names) or 'nothing'}; expected the regions whole "
            "tumour, tumour core and enhancing tumour. Bundles of other regions cannot be used."
        )
        raise UsageError(msg)
    return regions


def _multiple(metadata: Mapping[str, Any]) -> Triple:
    """Return the numbers that the size of an input is a multiple of, such as 8 for `8*n`."""
    shape = metadata["network_data_format"]["inputs"]["image"].get("spatial_shape")
    found = [re.fullmatch(r"\s*(\d+)\s*\*\s*n\s*", str(one)) for one in shape or ()]
    numbers = [int(one[1]) if one else 1 for one in found]
    if len(numbers) != len((1, 1, 1)):
        return 1, 1, 1
    x, y, z = (max(1, number) for number in numbers)
    return x, y, z


def _network(config: _Config, path: Path) -> tuple[nn.Module, str]:
    """Build the network of a bundle with its weights, and return it with its name."""
    import monai.networks.nets as nets

    section = config.section("network_def")
    name = str(section.get("_target_")).rpartition(".")[2]
    made = getattr(nets, name, None)
    if not isclass(made) or not issubclass(made, nn.Module):
        config.refuse(f"its network is {section.get('_target_')!r}")
    with usable(config.file, _USE_MONAI):
        network = made(**config.arguments(section))
    content = read_plain(path, _COPY_AGAIN)
    if isinstance(content, Mapping):
        # the entries that MONAI's handlers and bundles store a network in
        content = next((content[key] for key in ("model", "state_dict") if key in content), content)
    with usable(path, _COPY_AGAIN):
        weights = checked_weights(content)
    load_weights(network, weights, path)
    use_slabs(network)
    return network, name


def _parts(config: _Config, section: str) -> Iterable[tuple[str, Mapping[str, Any]]]:
    """Yield the transforms of a section: their names and descriptions."""
    found = config.section(section)
    listed = found.get("transforms", [found])
    if isinstance(listed, str) and listed.startswith("@"):
        listed = config.content.get(listed[1:])
    if not isinstance(listed, list) or not all(isinstance(one, Mapping) for one in listed):
        config.refuse(f"the transforms of {section} are {listed!r}")
    for one in listed:
        if not one.get("_disabled_"):
            yield str(one.get("_target_")).rpartition(".")[2], one


def _transforms(config: _Config) -> tuple[Any, ...]:
    """Build the transforms of the preprocessing that change voxels."""
    import monai.transforms

    made = []
    for name, described in _parts(config, "preprocessing"):
        if name in _LOADING:
            continue
        if name not in _APPLIED:
            config.refuse(f"its preprocessing has {name}")
        arguments = config.arguments(described)
        for key in _PER_KEY:
            if isinstance(arguments.get(key), list):
                arguments[key] = arguments[key][0]
        if name == "CropForegroundd":
            arguments["source_key"] = _IMAGE
        with usable(config.file, _USE_MONAI):
            made.append(getattr(monai.transforms, name)(keys=_IMAGE, **arguments))
    return tuple(made)


def _windows(config: _Config) -> tuple[Window, WindowRule]:
    """Return the window of the inferer, and the rule for placing it."""
    section = config.section("inferer")
    name = str(section.get("_target_")).rpartition(".")[2]
    arguments = config.arguments(section)
    size, overlap = arguments.get("roi_size"), arguments.get("overlap", 0.25)
    mode = arguments.get("mode", "constant")
    sigma = arguments.get("sigma_scale", 0.125)
    if not name.startswith("SlidingWindowInferer"):
        config.refuse(f"its inferer is {name}")
    if not (isinstance(size, list) and len(size) == len((1, 1, 1)) and min(map(int, size)) > 0):
        config.refuse(f"the roi_size of its windows is {size!r}")
    if mode not in {"constant", "gaussian"} or not isinstance(overlap, int | float):
        config.refuse(f"its windows have mode {mode!r} and overlap {overlap!r}")
    weights: Callable[[int], Tensor] = torch.ones
    if mode == "gaussian":

        def weights(length: int) -> Tensor:
            return gaussian(length, (length - 1) / 2, sigma)

    x, y, z = map(int, size)
    rule = WindowRule(starts=_starts, weights=weights)
    return Window(size=(x, y, z), overlap=overlap), rule


def _starts(size: int, length: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxel of each window: at a fixed step, and the last one at the border."""
    step = max(1, int(length * (1 - overlap)))
    n_steps = ceil((size - length) / step)
    return tuple(min(place * step, size - length) for place in range(n_steps + 1))


def _decoding(config: _Config) -> Decoding:
    """Return the threshold of the postprocessing."""
    threshold = 0.5
    for name, described in _parts(config, "postprocessing"):
        if name == "Activationsd" and not config.arguments(described).get("sigmoid"):
            config.refuse("its outputs are no sigmoids")
        if name == "AsDiscreted":
            threshold = float(config.plain(described.get("threshold", threshold)))
    return Decoding(thresholds=(threshold, threshold, threshold))
