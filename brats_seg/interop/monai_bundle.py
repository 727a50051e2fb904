"""Read a MONAI bundle that segments brain tumours, and apply it as MONAI does.

configs/metadata.json     channels in and out
configs/inference.json    network, preprocessing, windows, threshold
models/model.pt           weights

The configuration of a bundle can run any code. Nothing of it is run here: networks, transforms and
windows are built from short lists of MONAI's names and plain values; a bundle that needs more is refused.
"""

import json
import re
from collections.abc import Mapping, Sequence
from functools import partial
from math import ceil
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from pydantic import BaseModel, Field, PositiveInt
from torch import Tensor, nn

from brats_seg import interop
from brats_seg.cases.case import LoadedCase
from brats_seg.inference.method import Field as Image
from brats_seg.inference.method import Method, NetworkInput, Scan
from brats_seg.inference.model import Member
from brats_seg.labels import MODALITIES, REGIONS, tissue_named
from brats_seg.models.convolution import use_slabs
from brats_seg.presets import MONAI_NETWORKS, is_plain
from brats_seg.runtime.weights import Decoding, ModelIdentity, checked_weights
from brats_seg.runtime.windows import Window, WindowRule, gaussian
from brats_seg.voxels.box import Box, Triple
from brats_seg.voxels.grids import turn_of, turned, turned_back

_METADATA, _WEIGHTS = Path("configs/metadata.json"), Path("models/model.pt")
_CONFIGURATIONS = tuple(Path(f"configs/inference.{kind}") for kind in ("json", "yaml", "yml"))
_USE_MONAI = "Run this bundle with `python -m monai.bundle run`."
_IMAGE = "image"

_INFERERS = ("SlidingWindowInferer", "SlidingWindowInfererAdapt")
_LOADING = (
    *("LoadImaged", "EnsureChannelFirstd", "EnsureTyped", "ConcatItemsd", "ToTensord"),
    *("CastToTyped", "ToDeviced"),
)
"""Transforms that only bring four files into one tensor."""
_TRANSFORMS = (
    *("NormalizeIntensityd", "ScaleIntensityd", "ScaleIntensityRanged"),
    *("ScaleIntensityRangePercentilesd", "Orientationd", "Spacingd", "CropForegroundd"),
)
"""Transforms of MONAI that are applied with the arguments of the bundle."""
_PER_KEY = ("mode", "padding_mode", "align_corners", "dtype")
"""Arguments with an entry for each key, of which that of the image is taken."""
_NOT_ARGUMENTS = ("_target_", "_disabled_", "_requires_", "_desc_", "keys", "allow_missing_keys")
_CODE = re.compile(r'"[$%@]|"_target_"')
"""Code, a reference or an object somewhere in a value that is written as JSON."""


class _Format(BaseModel):
    """Format of an input or output of the network."""

    channel_def: dict[int, str]
    spatial_shape: tuple[int | str, int | str, int | str] = (1, 1, 1)

    @property
    def names(self) -> list[str]:
        return [name for _, name in sorted(self.channel_def.items())]

    @property
    def multiple(self) -> Triple:
        """Numbers that the size of an input is a multiple of, such as 8 for `8*n`."""
        sizes = [re.fullmatch(r"\s*(\d+)\s*\*\s*n\s*", str(size)) for size in self.spatial_shape]
        x, y, z = (max(1, int(size[1])) if size else 1 for size in sizes)
        return x, y, z


class _Windows(BaseModel):
    """Arguments of a `SlidingWindowInferer`."""

    roi_size: tuple[PositiveInt, PositiveInt, PositiveInt]
    overlap: float = Field(0.25, ge=0, lt=1)
    mode: Literal["constant", "gaussian"] = "constant"
    sigma_scale: float = Field(0.125, gt=0)

    def weights(self, length: int) -> Tensor:
        """Return the weight of each voxel of a window along an axis."""
        if self.mode == "constant":
            return torch.ones(length)
        return gaussian(length, (length - 1) / 2, self.sigma_scale)


def is_bundle(path: Path) -> bool:
    """Return whether a path is a MONAI bundle."""
    return (path / _METADATA).is_file()


def read_bundle(path: Path) -> Member:
    """Read a bundle.

    `UsageError` is raised if a file is missing or damaged, or the bundle is not one of the four modalities
    and the three regions of BraTS, or it needs other parts than those listed here.
    """
    metadata, weights = path / _METADATA, path / _WEIGHTS
    configurations = [path / name for name in _CONFIGURATIONS]
    file = next(filter(Path.is_file, configurations), configurations[0])
    with interop.usable(metadata, _USE_MONAI):
        formats = interop.read_content(metadata)["network_data_format"]
        image = _Format.model_validate(formats["inputs"]["image"])
        regions = _regions(_Format.model_validate(formats["outputs"]["pred"]).names)
    modalities = interop.channels_of(image.names, metadata)
    with interop.usable(file, _USE_MONAI):
        config = interop.read_content(file)
        windows = _windows(config)
        network = _network(config)
        transforms = _transforms(config)
        decoding = _decoding(config)
    with interop.usable(weights):
        # the entries that MONAI's handlers and bundles store a network in
        content = interop.read_content(weights)
        state = checked_weights(content.get("model", content.get("state_dict", content)))
    interop.load_weights(network, state, weights)
    fingerprint = interop.hash_of_files([metadata, file, weights])
    channels = tuple(map(MODALITIES.index, modalities))
    return Member(
        network=network,
        name=type(network).__name__,
        identity=ModelIdentity(
            conventions=(),
            patch=windows.roi_size,
            fingerprint=fingerprint,
            modalities=modalities,
            regions=regions,
            normalisation=", ".join(type(transform).__name__ for transform in transforms),
        ),
        multiple=image.multiple,
        decoding=decoding,
        method=Method(
            prepare=_whole_scan,
            to_network=partial(_to_network, channels=channels, transforms=transforms),
            rule=WindowRule(starts=_starts, weights=windows.weights),
            mean_of="logits",
        ),
        window=Window(size=windows.roi_size, overlap=windows.overlap),
        regions=tuple(map(regions.index, REGIONS)),
    )


def _whole_scan(loaded: LoadedCase) -> Scan:
    """Return the modalities as they are: the transforms of a bundle see the whole volumes."""
    volumes = [volume.array.astype(np.float32) for volume in loaded.volumes]
    return interop.scan_of(loaded, np.stack(volumes), Box.at((0, 0, 0), volumes[0].shape))


def _to_network(scan: Scan, channels: tuple[int, ...], transforms: tuple[Any, ...]) -> NetworkInput:
    """Apply transforms to the volumes of a scan, in the axes of its files.

    `channels` are the indices in `MODALITIES` of the channels that the network takes.
    """
    # importing MONAI's transforms takes seconds
    from monai.data import MetaTensor
    from monai.transforms import Compose
    from monai.transforms.inverse import InvertibleTransform

    turn = turn_of(scan.geometry.affine)
    stored = np.stack([turned_back(scan.image[channel], turn) for channel in channels])
    affine = torch.from_numpy(scan.geometry.affine)
    pipeline = Compose(transforms)
    image = pipeline({_IMAGE: MetaTensor(torch.from_numpy(stored), affine=affine)})[_IMAGE]

    def back(logits: Tensor) -> Image:
        probabilities = MetaTensor(logits.cpu().sigmoid())
        probabilities.affine, probabilities.applied_operations = (
            image.affine,
            image.applied_operations,
        )
        # MONAI warns where there is nothing to undo
        if any(isinstance(transform, InvertibleTransform) for transform in transforms):
            probabilities = pipeline.inverse({_IMAGE: probabilities})[_IMAGE]
        return np.stack([turned(region, turn) for region in probabilities.numpy()])

    return NetworkInput(image=np.ascontiguousarray(image.numpy()), back=back)


def _starts(size: int, length: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxel of each window: at a fixed step, and the last one at the border."""
    step = max(1, int(length * (1 - overlap)))
    n_steps = ceil((size - length) / step)
    return tuple(min(index * step, size - length) for index in range(n_steps + 1))


def _regions(names: list[str]) -> tuple[str, ...]:
    """Return the region of each output channel, given their names."""
    regions = tuple(map(tissue_named, names))
    if sorted(regions) != sorted(REGIONS):
        expected = "the regions whole tumour, tumour core and enhancing tumour"
        msg = f"the bundle returns {', '.join(names) or 'nothing'}; expected {expected}"
        raise ValueError(msg)
    return regions


def _windows(config: Mapping[str, Any]) -> _Windows:
    _known_name("inferer", config["inferer"], _INFERERS)
    return _Windows.model_validate(_arguments(config, config["inferer"]))


def _network(config: Mapping[str, Any]) -> nn.Module:
    import monai.networks.nets as nets

    name = _known_name("network", config["network_def"], MONAI_NETWORKS)
    arguments = _arguments(config, config["network_def"])
    if not is_plain(arguments):
        msg = f"its network has arguments that are no numbers and words: {arguments}"
        raise ValueError(msg)
    network: nn.Module = getattr(nets, name)(**arguments)
    use_slabs(network)
    return network


def _transforms(config: Mapping[str, Any]) -> tuple[Any, ...]:
    """Build the transforms of the preprocessing that change voxels."""
    import monai.transforms

    built = []
    for part in _listed(config, "preprocessing"):
        name = _known_name("transform", part, _LOADING + _TRANSFORMS)
        if name in _TRANSFORMS:
            built.append(getattr(monai.transforms, name)(**_of_image(config, part)))
    return tuple(built)


def _decoding(config: Mapping[str, Any]) -> Decoding:
    """Return the threshold of the postprocessing, whose other transforms are those of every result."""
    threshold = 0.5
    for part in _listed(config, "postprocessing"):
        name = str(part["_target_"]).rpartition(".")[2]
        if name == "Activationsd" and not _plain(config, part.get("sigmoid")):
            msg = "its outputs are no sigmoids"
            raise ValueError(msg)
        if name == "AsDiscreted":
            threshold = float(_plain(config, part.get("threshold", threshold)))
    return Decoding(thresholds=(threshold, threshold, threshold))


def _listed(config: Mapping[str, Any], section: str) -> list[Mapping[str, Any]]:
    """Return the descriptions of the transforms of a section that are not disabled."""
    parts = _referred(config, config[section].get("transforms", [config[section]]))
    return [part for part in parts if not _plain(config, part.get("_disabled_"))]


def _of_image(config: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of a transform that is applied to the image, perhaps among other keys."""
    arguments, keys = _arguments(config, part), _plain(config, part["keys"])
    keys = [keys] if isinstance(keys, str) else keys
    if _IMAGE not in keys or arguments.get("source_key", _IMAGE) != _IMAGE:
        msg = f"{part['_target_']} is applied to {keys}; expected {_IMAGE!r}"
        raise ValueError(msg)
    for name in _PER_KEY:
        if isinstance(arguments.get(name), list):
            arguments[name] = arguments[name][keys.index(_IMAGE)]
    return {"keys": _IMAGE, **arguments}


def _known_name(what: str, part: Mapping[str, Any], known: Sequence[str]) -> str:
    """Return the name of MONAI that a part is built from; raise `ValueError` if it is not listed."""
    name = str(part["_target_"]).rpartition(".")[2]
    if name not in known:
        msg = f"its {what} is {part['_target_']}; expected one of {', '.join(known)}"
        raise ValueError(msg)
    return name


def _arguments(config: Mapping[str, Any], part: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments of an object as plain values."""
    names = [name for name in part if name not in _NOT_ARGUMENTS]
    return {name: _plain(config, part[name]) for name in names}


def _plain(config: Mapping[str, Any], value: Any) -> Any:
    """Return a value, or the one that it refers to; raise `ValueError` if code is needed for it."""
    value = _referred(config, value)
    if match := _CODE.search(json.dumps(value)):
        msg = f"it needs code or another object for {json.dumps(value)[match.start() :][:60]}"
        raise ValueError(msg)
    return value


def _referred(config: Mapping[str, Any], value: Any) -> Any:
    """Return the value that a text such as `@device` refers to; any other value is returned."""
    is_reference = isinstance(value, str) and value.startswith("@")
    return config[value[1:]] if is_reference else value
