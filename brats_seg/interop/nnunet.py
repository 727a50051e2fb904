"""Read a trained model of nnU-Net v2, and apply it as nnU-Net does.

dataset.json                       channels and labels
plans.json                         architecture, normalisation, voxel size, window
fold_*/checkpoint_final.pth        weights of each fold, or checkpoint_best.pth

Checkpoints are read without running code. nnU-Net crops to the voxels that are not 0, normalises,
and resamples; its arrays are `(C, z, y, x)` in the axes of the file, permuted as the plans say.
"""

import json
import logging
import re
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from math import floor
from pathlib import Path
from typing import Annotated, Any, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from pydantic import AliasChoices, BaseModel, ConfigDict, Field
from scipy.ndimage import binary_fill_holes, zoom
from scipy.special import expit
from torch import Tensor

from brats_seg.cases.case import LoadedCase
from brats_seg.errors import CaseError, UsageError
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
from brats_seg.interop.nnunet_network import MeanNetwork, NnunetNetwork, NnunetShape
from brats_seg.labels import CONVENTIONS, MODALITIES, REGIONS, tissue_named
from brats_seg.runtime.torch_files import checked_weights, read_plain
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.runtime.windows import Window, WindowRule, gaussian, window_starts
from brats_seg.voxels.box import Mask, Triple, bounding_box
from brats_seg.voxels.grids import Spacing, turn_of, turned, turned_back

log = logging.getLogger(__name__)

Values = TypeVar("Values", bound=BaseModel)
Normalisation: TypeAlias = Callable[[Image, Mask], Image]
"""Normalises a modality (x, y, z), given the mask of the voxels that are not 0."""

DATASET_NAME, PLANS_NAME = "dataset.json", "plans.json"
_CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
_FOLD = re.compile(r"fold_(\d+|all)")
_Resampling: TypeAlias = Literal["resample_data_or_seg_to_shape"]
_OVERLAP = 0.5
_REORIENTED = "NibabelIOWithReorient"
_COPY_AGAIN = "Copy the folder of the model again."
_UNUSABLE = "Use nnU-Net itself for this model."
_NETWORKS = ("PlainConvUNet", "ResidualEncoderUNet")
_ANISOTROPY = 3
"""Ratio of voxel edges above which nnU-Net resamples each slice by itself."""
_IMAGE_ORDER, _LOGITS_ORDER = 3, 1
"""Orders of the splines for images and for logits."""
_SMALLEST_STD = 1e-8
RULE = WindowRule(starts=window_starts, weights=lambda length: gaussian(length, length // 2))
"""Windows are spaced evenly; the Gaussian has its peak at a voxel."""


def _z_score_inside(image: Image, mask: Mask) -> Image:
    """Normalise the voxels of the mask to mean 0 and standard deviation 1; the others stay."""
    values = image[mask]
    image[mask] = (values - values.mean()) / max(values.std(), _SMALLEST_STD)
    return image


def _z_score(image: Image, mask: Mask) -> Image:
    return (image - image.mean()) / max(image.std(), _SMALLEST_STD)


def _unchanged(image: Image, mask: Mask) -> Image:
    return image


def _between_0_and_1(image: Image, mask: Mask) -> Image:
    image = image - image.min()
    return image / max(image.max(), _SMALLEST_STD)


_NORMALISATIONS: dict[str, tuple[Normalisation, Normalisation]] = {
    "ZScoreNormalization": (_z_score, _z_score_inside),
    "NoNormalization": (_unchanged, _unchanged),
    "RescaleTo01Normalization": (_between_0_and_1, _between_0_and_1),
}
"""Normalisation of each scheme of the plans, without and with the mask of the scan."""


class _Dataset(BaseModel):
    """Entries of `dataset.json` that prediction depends on."""

    channel_names: dict[int, str]
    labels: dict[str, int | list[int]]


class _Arguments(BaseModel):
    """Arguments of the networks of nnU-Net; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    n_stages: int = Field(ge=2, le=12)
    features_per_stage: tuple[int, ...]
    kernel_sizes: tuple[Triple, ...]
    strides: tuple[Triple, ...]
    n_encoder: tuple[int, ...] = Field(
        validation_alias=AliasChoices("n_conv_per_stage", "n_blocks_per_stage")
    )
    n_conv_per_stage_decoder: tuple[int, ...]
    conv_op: Annotated[str, Field(pattern=r"\bConv3d$")] = "Conv3d"
    conv_bias: bool = True
    norm_op: Annotated[str, Field(pattern=r"\bInstanceNorm3d$")] = "InstanceNorm3d"
    norm_op_kwargs: dict[str, float] = {}
    dropout_op: None = None
    dropout_op_kwargs: None = None
    nonlin: Annotated[str, Field(pattern=r"\bLeakyReLU$")] = "LeakyReLU"
    nonlin_kwargs: dict[str, float] = {}
    deep_supervision: bool = False


class _Architecture(BaseModel):
    network_class_name: str
    arch_kwargs: dict[str, Any]

    @property
    def name(self) -> str:
        return self.network_class_name.rpartition(".")[2]


class _Configuration(BaseModel):
    """Entries of a configuration of `plans.json`, such as `3d_fullres`."""

    patch_size: Triple
    spacing: tuple[float, float, float]
    normalization_schemes: list[str]
    use_mask_for_norm: list[bool]
    resampling_fn_data: _Resampling = "resample_data_or_seg_to_shape"
    resampling_fn_probabilities: _Resampling = "resample_data_or_seg_to_shape"
    previous_stage: None = None
    """Only the second stage of a cascade has one."""
    architecture: _Architecture


class _Plans(BaseModel):
    transpose_forward: Triple
    image_reader_writer: str
    configurations: dict[str, dict[str, Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class _Heads:
    """Outputs of a network: regions, or labels of which the most probable one counts."""

    values: tuple[frozenset[int], ...]
    """Values in label maps that each output stands for."""
    regions: tuple[frozenset[int], ...]
    """Values of WT, TC and ET."""

    @property
    def conventions(self) -> tuple[str, ...]:
        """Name of the label convention with these regions; none for one of its own."""
        return tuple(
            convention.name
            for convention in CONVENTIONS
            if tuple(map(frozenset, convention.regions)) == self.regions
        )[:1]

    def region_logits(self) -> Callable[[Image], Image]:
        """Return the function that turns the output into logits of WT, TC and ET."""
        if frozenset({0}) not in self.values:
            places = [self.values.index(region) for region in self.regions]
            return lambda output: output[places]
        return region_logits(
            tuple(
                frozenset(place for place, value in enumerate(self.values) if value <= region)
                for region in self.regions
            )
        )


def is_nnunet(path: Path) -> bool:
    """Return whether a path is a trained model of nnU-Net, one of its folds, or holds such models."""
    return _root_of(path) is not None or bool(_results_in(path))


def read_nnunet(path: Path) -> Member:
    """Read the folds of a trained model of nnU-Net, or one of them.

    Args:
        path: The folder with `plans.json`, a folder `fold_*` in it, or a checkpoint of a fold.

    Raises:
        UsageError: A file is missing or damaged, or the model is not one of the four modalities and
            the tissues or regions of BraTS, or it has parts that are not known here.
    """
    root = _root_of(path)
    if root is None:
        listed = ", ".join(_results_in(path))
        msg = f"{path} holds trained models of nnU-Net: {listed}. Give one of these folders as --model."
        raise UsageError(msg)
    dataset = _read(root / DATASET_NAME, _Dataset)
    plans = _read(root / PLANS_NAME, _Plans)
    names = [name for _, name in sorted(dataset.channel_names.items())]
    channels = channels_of(names, root / DATASET_NAME)
    heads = _heads_of(dataset, root / DATASET_NAME)
    files = _checkpoints(path, root)
    folds = [_read_fold(file) for file in files]
    configuration = _configuration(plans, folds[0].configuration, root / PLANS_NAME)
    shape = _shape_of(configuration.architecture, len(heads.values), root / PLANS_NAME)
    network = MeanNetwork([_network(shape, fold) for fold in folds])
    grid = _Grid(
        channels=tuple(map(MODALITIES.index, channels)),
        normalisations=_normalisations(configuration, root / PLANS_NAME),
        axes=plans.transpose_forward,
        spacing_mm=configuration.spacing,
        is_turned=plans.image_reader_writer == _REORIENTED,
        regions=heads.region_logits(),
    )
    method = Method(
        prepare=grid.prepare,
        to_network=grid.to_network,
        rule=RULE,
        mirror_axes=folds[0].mirror_axes,
        mean_of="logits",
    )
    fingerprint = hash_of_files([root / DATASET_NAME, root / PLANS_NAME, *files])
    return Member(
        network=network,
        name=configuration.architecture.name,
        identity=ModelIdentity(
            conventions=heads.conventions,
            patch=configuration.patch_size,
            fingerprint=fingerprint,
            modalities=channels,
            regions=REGIONS,
            normalisation=", ".join(configuration.normalization_schemes),
            spacing_mm=configuration.spacing,
        ),
        multiple=shape.multiple,
        method=method,
        window=Window(size=configuration.patch_size, overlap=_OVERLAP),
        # the method takes all outputs, of regions or of labels
        regions=tuple(range(len(heads.values))),
    )


def _root_of(path: Path) -> Path | None:
    """Return the folder with the plans of the model that a path belongs to, or None."""
    for folder in (path, path.parent, path.parent.parent):
        is_part = folder == path or _FOLD.fullmatch(path.relative_to(folder).parts[0])
        if is_part and all((folder / name).is_file() for name in (DATASET_NAME, PLANS_NAME)):
            return folder
    return None


def _results_in(path: Path) -> list[str]:
    """Return the names of the trained models in the folder of a data set of nnU-Net."""
    found = sorted(path.glob(f"*/{PLANS_NAME}")) if path.is_dir() else []
    return [file.parent.name for file in found if (file.parent / DATASET_NAME).is_file()]


def _checkpoints(path: Path, root: Path) -> list[Path]:
    """Return the checkpoints that a path stands for: final ones if all folds have them, else best.

    Without a choice, these are all folds that have a number; the fold `all` was trained on all cases.
    """
    if path.is_file():
        return [path]
    if path != root:
        folds = [path]
    else:
        found = sorted(one for one in root.iterdir() if _FOLD.fullmatch(one.name) and one.is_dir())
        folds = [one for one in found if one.name != "fold_all"] or found
    for name in _CHECKPOINTS:
        if folds and all((fold / name).is_file() for fold in folds):
            log.info("nnU-Net model of %s", ", ".join(fold.name for fold in folds))
            return [fold / name for fold in folds]
    without = [
        fold.name for fold in folds if not any((fold / name).is_file() for name in _CHECKPOINTS)
    ]
    words = f"no checkpoint in {', '.join(without)}" if without else "some of each"
    found_words = words if folds else "no folder fold_0, fold_1, ..."
    msg = (
        f"{root}: found {found_words}; expected {' or '.join(_CHECKPOINTS)} in each fold. Copy the "
        "missing files, or give one fold as --model, such as "
        f"{root / (folds[0].name if folds else 'fold_0')}."
    )
    raise UsageError(msg)


def _read(path: Path, kind: type[Values]) -> Values:
    with usable(path, _COPY_AGAIN):
        return kind.model_validate(json.loads(read_bounded(path, LONGEST_TEXT)))


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Fold:
    """Content of a checkpoint that prediction depends on."""

    path: Path
    weights: dict[str, Tensor]
    configuration: str
    """Name in the plans, such as `3d_fullres`."""
    mirror_axes: tuple[int, ...]


def _read_fold(path: Path) -> _Fold:
    content = read_plain(path, _COPY_AGAIN)
    with usable(path, _COPY_AGAIN):
        return _Fold(
            path=path,
            weights=checked_weights(content["network_weights"]),
            configuration=str(content["init_args"]["configuration"]),
            mirror_axes=tuple(content.get("inference_allowed_mirroring_axes") or ()),
        )


def _heads_of(dataset: _Dataset, path: Path) -> _Heads:
    """Return the outputs of a network, given the labels or regions of its data set."""
    sets = {
        name: frozenset([value] if isinstance(value, int) else value)
        for name, value in dataset.labels.items()
        if name != "ignore"
    }
    tissues = {name: values for name, values in sets.items() if values != {0}}
    if any(len(values) > 1 for values in tissues.values()):
        # as nnU-Net orders the outputs
        heads = tuple(tissues.values())
        regions = tuple(sorted(heads, key=len, reverse=True))
        if len(heads) == len(REGIONS) and regions[0] > regions[1] > regions[2]:
            return _Heads(values=heads, regions=regions)
    else:
        named = {tissue_named(name): values for name, values in tissues.items()}
        if named.keys() == {"ed", "ncr", "et"} and len(tissues) == len(named):
            tc = named["ncr"] | named["et"]
            values = tuple(frozenset({value}) for value in sorted({0}.union(*tissues.values())))
            return _Heads(values=values, regions=(tc | named["ed"], tc, named["et"]))
    msg = (
        f"{path}: the model has the labels {', '.join(sets)}; expected oedema, necrosis or "
        "non-enhancing tumour, and enhancing tumour, or the regions whole tumour, tumour core and "
        "enhancing tumour. Models of other labels cannot be used."
    )
    raise UsageError(msg)


def _configuration(plans: _Plans, name: str, path: Path) -> _Configuration:
    """Return a configuration of the plans, completed by the one that it inherits from.

    Raises:
        UsageError: It is not there, is a cascade, or has no window in three dimensions.
    """
    content: dict[str, Any] = {}
    inherited: str | None = name
    with usable(path, _UNUSABLE):
        for _ in plans.configurations:
            if inherited is not None:
                parent = plans.configurations[inherited]
                content, inherited = {**parent, **content}, parent.get("inherits_from")
        return _Configuration.model_validate(content)


def _shape_of(architecture: _Architecture, n_out: int, path: Path) -> NnunetShape:
    """Return the sizes of a network; raise `UsageError` if it cannot be built here."""
    with usable(path, _UNUSABLE):
        if architecture.name not in _NETWORKS:
            msg = f"its network is {architecture.name}; expected {' or '.join(_NETWORKS)}"
            raise ValueError(msg)
        arguments = _Arguments.model_validate(architecture.arch_kwargs)
        return NnunetShape(
            n_in=len(MODALITIES),
            n_out=n_out,
            widths=arguments.features_per_stage,
            kernels=arguments.kernel_sizes,
            strides=arguments.strides,
            n_encoder=arguments.n_encoder,
            n_decoder=arguments.n_conv_per_stage_decoder,
            is_residual=architecture.name == "ResidualEncoderUNet",
            bias=arguments.conv_bias,
            eps=arguments.norm_op_kwargs.get("eps", 1e-5),
            slope=arguments.nonlin_kwargs.get("negative_slope", 0.01),
        )


def _network(shape: NnunetShape, fold: _Fold) -> NnunetNetwork:
    """Build the network of a fold with its weights.

    Raises:
        UsageError: The weights are those of another network.
    """
    # of weights that nnU-Net stores under two names, one is enough
    kept = {
        name: value
        for name, value in fold.weights.items()
        if ".all_modules." not in name and not name.startswith("decoder.encoder.")
    }
    # the weights are those of the file: no memory is needed for others, of any size
    with usable(fold.path, _UNUSABLE), torch.device("meta"):
        network = NnunetNetwork(shape)
    load_weights(network, kept, fold.path)
    return network


def _normalisations(configuration: _Configuration, path: Path) -> tuple[Normalisation, ...]:
    schemes = configuration.normalization_schemes
    unknown = sorted({*schemes} - {*_NORMALISATIONS})
    if unknown or len(schemes) != len(MODALITIES):
        names = ", ".join(unknown) or f"{len(schemes)} channels"
        ct = " CTNormalization is for CT." if "CTNormalization" in unknown else ""
        msg = (
            f"{path}: the normalisation is {names}; expected one of {', '.join(_NORMALISATIONS)} for "
            f"each of the four modalities.{ct} Models of other images cannot be used."
        )
        raise UsageError(msg)
    pairs = zip(schemes, configuration.use_mask_for_norm, strict=False)
    return tuple(_NORMALISATIONS[scheme][is_masked] for scheme, is_masked in pairs)


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """Grid of voxels that a network of nnU-Net was trained on."""

    channels: tuple[int, ...]
    """Place in `MODALITIES` of each input channel."""
    normalisations: tuple[Normalisation, ...]
    """Normalisation of each input channel."""
    axes: Triple
    """Axis of z, y, x that becomes each axis of the input (`transpose_forward`)."""
    spacing_mm: Spacing
    """Voxel size along the axes of the input."""
    is_turned: bool
    """Whether scans are turned to right, anterior, superior first; else they stay as stored."""
    regions: Callable[[Image], Image]
    """Turns the output of the network into logits (3, ...) of WT, TC and ET."""

    def prepare(self, loaded: LoadedCase) -> Scan:
        """Crop a case to the voxels that are not 0, and normalise its modalities.

        Raises:
            CaseError: All voxels are 0.
        """
        volumes = [volume.array for volume in loaded.volumes]
        outside = np.logical_and.reduce([volume == 0 for volume in volumes])
        mask: Mask = binary_fill_holes(~outside)
        box = bounding_box(mask)
        if box is None:
            found, next_step = "no voxel that is not 0", "View the scan, and export it again."
            raise CaseError(loaded.case.case_id, loaded.volumes[0].file, found, "a scan", next_step)
        image = np.empty((len(volumes), *box.shape), dtype=np.float32)
        for channel, normalise in zip(self.channels, self.normalisations, strict=True):
            crop = volumes[channel][box.slices].astype(np.float32)
            image[channel] = normalise(crop, mask[box.slices])
        return Scan(
            case_id=loaded.case.case_id,
            release=loaded.case.release,
            image=image,
            box=box,
            geometry=loaded.geometry,
            warnings=loaded.case.remarks,
        )

    def to_network(self, scan: Scan) -> NetworkInput:
        """Return a scan on the grid of the network."""
        crop = self._permuted(scan.image[list(self.channels)], scan)
        image = _resized(crop, self._shape(crop, scan), self._spacings(scan), _IMAGE_ORDER)
        return NetworkInput(image=image, back=partial(self._back, crop.shape[1:], scan))

    def _back(self, shape: tuple[int, ...], scan: Scan, output: Tensor) -> Image:
        """Return probabilities (3, x, y, z) on the crop of a scan, of the output of the network."""
        there, here = self._spacings(scan)
        logits = self.regions(_resized(output.cpu().numpy(), shape, (here, there), _LOGITS_ORDER))
        stored = expit(logits).transpose(0, *(1 + int(axis) for axis in np.argsort(self.axes)))
        stored = stored.transpose(0, 3, 2, 1)
        if self.is_turned:
            return np.ascontiguousarray(stored[:, ::-1, ::-1])
        turn = turn_of(scan.geometry.affine)
        return np.stack([turned(one, turn) for one in stored])

    def _permuted(self, image: Image, scan: Scan) -> Image:
        if self.is_turned:
            stored = image[:, ::-1, ::-1]
        else:
            turn = turn_of(scan.geometry.affine)
            stored = np.stack([turned_back(one, turn) for one in image])
        permuted = stored.transpose(0, 3, 2, 1).transpose(0, *(1 + axis for axis in self.axes))
        return np.ascontiguousarray(permuted)

    def _spacings(self, scan: Scan) -> tuple[Spacing, Spacing]:
        """Return the voxel size of a scan and of the network, along the axes of the network."""
        stored = scan.spacing_mm if self.is_turned else scan.geometry.spacing_mm
        x, y, z = (stored[::-1][axis] for axis in self.axes)
        return (x, y, z), self.spacing_mm

    def _shape(self, image: Image, scan: Scan) -> Triple:
        edges = zip(image.shape[1:], *self._spacings(scan), strict=True)
        x, y, z = (max(1, round(here / there * n)) for n, here, there in edges)
        return x, y, z


def region_logits(heads: tuple[frozenset[int], ...]) -> Callable[[Image], Image]:
    """Return a function that turns logits of labels (L, ...) into logits (3, ...) of the regions.

    The logit of a region is the largest one of its labels, less the largest one of the others: it is
    above 0 exactly where the most probable label belongs to the region.

    Args:
        heads: Places among the labels of those of WT, TC and ET.
    """

    def regions(logits: Image) -> Image:
        everywhere = frozenset(range(len(logits)))
        return np.stack(
            [
                logits[sorted(inside)].max(axis=0) - logits[sorted(everywhere - inside)].max(axis=0)
                for inside in heads
            ]
        )

    return regions


def _resized(
    image: Image, shape: tuple[int, ...], spacings: tuple[Spacing, Spacing], order: int
) -> Image:
    """Resample an image (C, ...) to a shape, slice by slice where the voxels are long and thin."""
    if image.shape[1:] == shape:
        return image
    axis = _long_axis(spacings)
    if axis is None:
        return np.stack([_zoomed(one, shape, order) for one in image])
    flat = tuple(n for place, n in enumerate(shape) if place != axis)
    # the nearest slice, as nnU-Net takes along the long axis
    scale = image.shape[1 + axis] / shape[axis]
    nearest = [
        min(max(floor(scale * (place + 0.5)), 0), image.shape[1 + axis] - 1)
        for place in range(shape[axis])
    ]
    slices = np.moveaxis(image, 1 + axis, 1)
    resized = np.stack([[_zoomed(one, flat, order) for one in channel] for channel in slices])
    return np.ascontiguousarray(np.moveaxis(resized[:, nearest], 1, 1 + axis))


def _long_axis(spacings: tuple[Spacing, Spacing]) -> int | None:
    """Return the axis along which voxels are much longer than along both others, if there is one."""
    for spacing in spacings:
        if max(spacing) / min(spacing) > _ANISOTROPY:
            longest = [axis for axis, edge in enumerate(spacing) if edge == max(spacing)]
            return longest[0] if len(longest) == 1 else None
    return None


def _zoomed(image: Image, shape: tuple[int, ...], order: int) -> Image:
    factors = [there / here for there, here in zip(shape, image.shape, strict=True)]
    values = image.astype(np.float64)
    found = zoom(values, factors, order=order, mode="nearest", grid_mode=True)
    # splines overshoot
    return found.clip(values.min(), values.max()).astype(np.float32)
