"""Read a MONAI bundle that segments brain tumours, and apply it as MONAI does.

configs/metadata.json     channels in and out
configs/inference.json    network, preprocessing, windows, threshold
models/model.pt           weights

The configuration of a bundle can run any code. Nothing of it is run here: networks, transforms and
windows are built from short lists of MONAI's names and plain values; a bundle that needs more is refused.
"""

import json
import logging
import re
import reprlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from math import ceil, gcd
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
import torch
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter
from torch import Tensor, nn

from brats_seg import interop
from brats_seg.cases.case import LoadedCase
from brats_seg.config import Size, Threshold, VoxelEdge, VoxelSpacing
from brats_seg.inference.method import Field as Image
from brats_seg.inference.method import Method, NetworkInput, Scan
from brats_seg.inference.model import Member
from brats_seg.labels import REGIONS, tissue_named
from brats_seg.models.build import IMPORTED_MULTIPLE
from brats_seg.models.convolution import use_slabs
from brats_seg.models.interface import check_window
from brats_seg.presets import MONAI_NETWORKS, is_plain
from brats_seg.runtime import weights
from brats_seg.runtime.windows import Window, WindowRule
from brats_seg.voxels.box import Box, Triple, triple
from brats_seg.voxels.grids import find_orientation, reorient, reorient_back
from brats_seg.voxels.regions import Decoding

log = logging.getLogger(__name__)

_METADATA = Path("configs/metadata.json")
_USE_MONAI = "Run this bundle with `python -m monai.bundle run`."
_IMAGE, _PREDICTION = "image", "pred"

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
_CLEANING = ("KeepLargestConnectedComponentd", "RemoveSmallObjectsd", "FillHolesd")
"""Transforms of MONAI that are applied to the thresholded regions."""
_STAGES = {"Activationsd": 0, "Invertd": 1, "AsDiscreted": 2, "Lambdad": 4}
_STAGES |= dict.fromkeys(_CLEANING, 3)
"""Stage of each transform of a postprocessing: stages are applied in this order."""
_PER_KEY = ("mode", "padding_mode", "align_corners", "dtype", "nearest_interp")
"""Arguments that may have an entry for each key, of which that of the image or prediction is taken."""
_NOT_ARGUMENTS = (
    *("_target_", "_disabled_", "_requires_", "_desc_", "keys", "allow_missing_keys", "device"),
    # of `Invertd`, which name other entries
    *("transform", "orig_keys", "meta_keys", "orig_meta_keys", "meta_key_postfix", "to_tensor"),
)
_CODE = re.compile(r'"[$%@]|"_target_"')
"""Code, a reference or an object somewhere in a value that is written as JSON."""
_Part: TypeAlias = Mapping[str, Any]
_Voxels: TypeAlias = Annotated[int, Field(ge=0, le=64)]
_FLAG = TypeAdapter(bool)
_CHANNELS = TypeAdapter(dict[int, str])
"""Names of the channels of an input or output of a network."""


class _Windows(BaseModel):
    """Arguments of a `SlidingWindowInferer`."""

    roi_size: Size
    overlap: float = Field(0.25, ge=0, le=0.9)
    mode: Literal["constant", "gaussian"] = "constant"
    padding_mode: Literal["constant"] = "constant"
    cval: Literal[0] = 0
    with_coord: Literal[False] = False
    sigma_scale: float = Field(0.125, ge=0.01, le=10)

    def weigh(self, _network: nn.Module, _images: tuple[Tensor], logits: Tensor) -> Tensor:
        """Return the logits of a window times the weights of its voxels, and the weights."""
        from monai.data.utils import compute_importance_map as weights_of

        importance = weights_of(logits.shape[2:], self.mode, self.sigma_scale, logits.device)
        return torch.cat((logits * importance, importance.expand_as(logits[:, :1])), dim=1)


class _Sizes(BaseModel):
    """Arguments of transforms that the size of a volume depends on."""

    pixdim: VoxelSpacing | VoxelEdge = 1.0
    min_pixdim: VoxelSpacing | VoxelEdge = 1.0
    max_pixdim: VoxelSpacing | VoxelEdge = 1.0
    margin: _Voxels | tuple[_Voxels, _Voxels, _Voxels] = 0
    k_divisible: _Voxels | tuple[_Voxels, _Voxels, _Voxels] = 1


class _Thresholding(BaseModel):
    """Arguments of `Activationsd`, `Invertd` and `AsDiscreted` together."""

    model_config = ConfigDict(extra="forbid")

    keys: str
    sigmoid: Literal[True]
    softmax: Literal[False] = False
    argmax: Literal[False] = False
    threshold: Threshold = 0.5
    nearest_interp: bool = True


def is_bundle(path: Path) -> bool:
    """Return whether a path is a MONAI bundle."""
    return (path / _METADATA).is_file()


def read_bundle(path: Path) -> Member:
    """Read a bundle.

    `UsageError` is raised if a file is missing or damaged, or the bundle is not one of the four modalities
    and the three regions of BraTS, or it needs other parts than those listed here.
    """
    metadata, checkpoint = path / _METADATA, path / "models/model.pt"
    configurations = [path / f"configs/inference.{kind}" for kind in ("json", "yaml", "yml")]
    file = next(filter(Path.is_file, configurations), configurations[0])
    with interop.usable(metadata, _USE_MONAI):
        formats = interop.read_content(metadata)["network_data_format"]
        channels = _CHANNELS.validate_python(formats["inputs"]["image"]["channel_def"])
        outputs = _outputs(_CHANNELS.validate_python(formats["outputs"]["pred"]["channel_def"]))
    inputs = interop.channels_of(channels, metadata)
    state = weights.read_weights(checkpoint)
    with interop.usable(file, _USE_MONAI):
        config = interop.read_content(file)
        _known_name("inferer", config["inferer"], _INFERERS)
        windows = _Windows.model_validate(_arguments(config, config["inferer"]))
        steps = _preprocessing(config)
        decoding, cleaning = _postprocessing(config)
        network = _network(config, state, windows.roi_size)
        # the weights of MONAI are no product of axes; the rule averages all that a window returns
        network.register_forward_hook(windows.weigh)
        pipeline = _Pipeline(
            channels=inputs, outputs=outputs, steps=steps, cleaning=cleaning, decoding=decoding
        )
        method = Method(
            prepare=_whole_scan,
            to_network=pipeline.to_network,
            rule=WindowRule(starts=_starts, weights=torch.ones),
            mean_of="logits",
        )
        interop.try_method(method, len(REGIONS) + 1)
    return Member(
        network=network,
        name=type(network).__name__,
        identity=weights.ModelIdentity(
            conventions=(),
            patch=windows.roi_size,
            fingerprint=interop.hash_of_files([metadata, file, checkpoint]),
            normalisation=", ".join(type(transform).__name__ for transform in steps),
        ),
        # of the window, as of the patch of any network by name
        multiple=triple(gcd(n, IMPORTED_MULTIPLE) for n in windows.roi_size),
        decoding=Decoding(thresholds=(decoding.threshold,) * 3),
        method=method,
        window=Window(size=windows.roi_size, overlap=windows.overlap),
        regions=(*outputs, len(REGIONS)),
    )


def _whole_scan(loaded: LoadedCase) -> Scan:
    """Return the modalities as they are: the transforms of a bundle see the whole volumes."""
    image = np.stack([volume.array.astype(np.float32) for volume in loaded.volumes])
    box = Box.at((0, 0, 0), triple(image.shape[1:]))
    return Scan(case=loaded.case, image=image, box=box, geometry=loaded.geometry)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Pipeline:
    """What a bundle does to a scan before its network, and to the probabilities after it."""

    channels: tuple[int, ...]
    """Index in `MODALITIES` of each input channel."""
    outputs: tuple[int, ...]
    """Output channel of WT, TC and ET."""
    steps: tuple[Any, ...]
    """Transforms of the volumes."""
    cleaning: tuple[Any, ...]
    """Transforms of the thresholded regions."""
    decoding: _Thresholding

    def to_network(self, scan: Scan) -> NetworkInput:
        """Apply the transforms to the volumes of a scan, in the axes of its files."""
        # importing MONAI's transforms takes seconds
        from monai.data import MetaTensor
        from monai.transforms import Compose, Invertd

        orientation = find_orientation(scan.geometry.affine)
        stored = np.stack([reorient_back(scan.image[i], orientation) for i in self.channels])
        affine = torch.from_numpy(scan.geometry.affine)
        pipeline = Compose(self.steps)
        image = pipeline({_IMAGE: MetaTensor(torch.from_numpy(stored), affine=affine)})[_IMAGE]
        undo = Invertd(_PREDICTION, pipeline, _IMAGE, nearest_interp=self.decoding.nearest_interp)

        def to_volume(output: Tensor) -> Image:
            probabilities = MetaTensor((output[:-1] / output[-1:]).cpu().sigmoid())
            # MONAI warns where there is nothing to undo
            if image.applied_operations:
                probabilities = undo({_IMAGE: image, _PREDICTION: probabilities})[_PREDICTION]
            regions = self._clean(probabilities) if self.cleaning else probabilities
            return np.stack([reorient(region, orientation) for region in regions.numpy()])

        return NetworkInput(image=np.ascontiguousarray(image.numpy()), to_volume=to_volume)

    def _clean(self, probabilities: Tensor) -> Tensor:
        """Return probabilities that are 0 where a voxel is removed from a region, and 1 where one is added."""
        before = probabilities >= self.decoding.threshold
        after = before[np.argsort(self.outputs).tolist()].float()
        for transform in self.cleaning:
            after = transform({_PREDICTION: after})[_PREDICTION]
        after = after[list(self.outputs)].bool()
        return probabilities.masked_fill(before & ~after, 0).masked_fill(after & ~before, 1)


def _starts(size: int, length: int, overlap: float) -> tuple[int, ...]:
    """Return the first voxel of each window: at a fixed step, and the last one at the border."""
    step = max(1, int(length * (1 - overlap)))
    n_steps = ceil((size - length) / step)
    return tuple(min(index * step, size - length) for index in range(n_steps + 1))


def _outputs(channels: Mapping[int, str]) -> tuple[int, ...]:
    """Return the output channel of WT, TC and ET, given the names of the channels."""
    names = [name for _, name in sorted(channels.items())]
    regions = tuple(map(tissue_named, names))
    if sorted(regions) != sorted(REGIONS):
        msg = f"the bundle returns {', '.join(names) or 'nothing'}; expected the regions of BraTS"
        raise ValueError(msg)
    return tuple(map(regions.index, REGIONS))


def _network(config: _Part, state: Any, window: Triple) -> nn.Module:
    import monai.networks.nets as nets

    name = _known_name("network", config["network_def"], MONAI_NETWORKS)
    arguments = _arguments(config, config["network_def"])
    if not is_plain(arguments):
        msg = f"its network has arguments that are no plain numbers and words: {reprlib.repr(arguments)}"
        raise ValueError(msg)
    network = weights.build_with(partial(getattr(nets, name), **arguments), state)
    use_slabs(network)
    check_window(network, window, len(REGIONS))
    return network


def _preprocessing(config: _Part) -> tuple[Any, ...]:
    """Build the transforms of the preprocessing that change voxels."""
    steps = _steps(config, "preprocessing", _LOADING + _TRANSFORMS)
    _known_name("first transform", steps[0][1], ("LoadImaged",))
    return tuple(_make(config, *step, _IMAGE) for step in steps if step[0] in _TRANSFORMS)


def _postprocessing(config: _Part) -> tuple[_Thresholding, tuple[Any, ...]]:
    """Return what the postprocessing does to probabilities, and its transforms of the thresholded regions."""
    steps = _steps(config, "postprocessing", (*_STAGES, *_LOADING, "SaveImaged"))
    names = [name for name, _ in steps if name in _STAGES]
    if names != sorted(names, key=_STAGES.__getitem__):
        msg = f"its postprocessing has another order than {', '.join(_STAGES)}"
        raise ValueError(msg)
    arguments: dict[str, Any] = {} if "Invertd" in names else {"nearest_interp": False}
    for name, part in steps:
        if name in ("Activationsd", "Invertd", "AsDiscreted"):
            arguments |= _key_arguments(config, part, _PREDICTION)
    decoding = _Thresholding.model_validate(arguments)
    cleaning = [step for step in steps if step[0] in _CLEANING]
    if cleaning and find_spec("skimage") is None:
        msg = f"its {cleaning[0][0]} needs scikit-image: pip install 'brats_seg[bundle]'"
        raise ValueError(msg)
    if "Lambdad" in names:
        log.info("code that the bundle ends with is not run: it is taken to write the label map")
    return decoding, tuple(_make(config, *step, _PREDICTION) for step in cleaning)


def _steps(config: _Part, section: str, known: Sequence[str]) -> list[tuple[str, _Part]]:
    """Return the names and the descriptions of the transforms of a section that are not disabled."""
    steps = []
    for part in _resolve_reference(config, config[section].get("transforms", [config[section]])):
        is_disabled = _plain(config, part.get("_disabled_", False))
        if not _FLAG.validate_python(is_disabled, strict=True):
            steps.append((_known_name("transform", part, known), part))
    return steps


def _make(config: _Part, name: str, part: _Part, key: str) -> Any:
    """Return a transform of MONAI that is applied to a key."""
    import monai.transforms

    arguments = _key_arguments(config, part, key)
    _Sizes.model_validate(arguments)
    return getattr(monai.transforms, name)(**arguments)


def _key_arguments(config: _Part, part: _Part, key: str) -> dict[str, Any]:
    """Return the arguments of a transform that is applied to a key, perhaps among others."""
    arguments, keys = _arguments(config, part), _plain(config, part["keys"])
    keys = [keys] if isinstance(keys, str) else keys
    if key not in keys or arguments.get("source_key", key) != key:
        msg = f"{part['_target_']} is applied to {keys}; expected {key!r}"
        raise ValueError(msg)
    for name in _PER_KEY:
        if isinstance(arguments.get(name), list):
            arguments[name] = arguments[name][keys.index(key)]
    return {"keys": key, **arguments}


def _known_name(kind: str, part: _Part, known: Sequence[str]) -> str:
    """Return the name of MONAI that a part is built from; raise `ValueError` if it is not listed."""
    name = str(part["_target_"]).rpartition(".")[2]
    if name not in known:
        msg = f"its {kind} is {part['_target_']}; expected one of {', '.join(known)}"
        raise ValueError(msg)
    return name


def _arguments(config: _Part, part: _Part) -> dict[str, Any]:
    """Return the arguments of an object as plain values."""
    return {key: _plain(config, part[key]) for key in part if key not in _NOT_ARGUMENTS}


def _plain(config: _Part, value: Any) -> Any:
    """Return a value, or the one that it refers to; raise `ValueError` if code is needed for it."""
    value = _resolve_reference(config, value)
    text = json.dumps(value, allow_nan=False)
    if match := _CODE.search(text):
        msg = f"it needs code or another object for {text[match.start() :][:60]}"
        raise ValueError(msg)
    return value


def _resolve_reference(config: _Part, value: Any) -> Any:
    """Return the value that a text such as `@device` refers to; any other value is returned."""
    is_reference = isinstance(value, str) and value.startswith("@")
    return config[value[1:]] if is_reference else value
