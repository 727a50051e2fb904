"""Read a trained model of nnU-Net v2, and apply it as nnU-Net does.

dataset.json                       channels and labels
plans.json                         architecture, normalisation, voxel size, window
fold_*/checkpoint_final.pth        weights of each fold, or checkpoint_best.pth

Checkpoints are read without running code. nnU-Net crops to the voxels that are not 0, normalises,
and resamples; its arrays are `(C, z, y, x)` in the axes of the file, permuted as the plans say.
"""

import re
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Annotated, Any, Generic, Literal, TypeAlias, TypeVar

import numpy as np
import torch
from pydantic import AliasPath, BaseModel, ConfigDict, Field, PositiveInt
from scipy.ndimage import binary_fill_holes, zoom
from scipy.special import expit
from torch import Tensor, nn

from brats_seg import interop
from brats_seg.cases.case import LoadedCase
from brats_seg.config import Size, VoxelSpacing
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.method import Field as Image
from brats_seg.inference.method import Method, NetworkInput, Scan
from brats_seg.inference.model import Member
from brats_seg.interop.nnunet_network import Architecture, MeanNetwork, NnunetNetwork
from brats_seg.labels import CONVENTIONS, MODALITIES, REGIONS, tissue_named
from brats_seg.models.interface import check_window
from brats_seg.runtime.weights import ModelIdentity, build_with
from brats_seg.runtime.windows import Window, WindowRule, gaussian, window_starts
from brats_seg.voxels.box import Mask, Triple, bounding_box, triple
from brats_seg.voxels.grids import Orientation, Spacing, find_orientation, reorient, reorient_back

Values = TypeVar("Values", bound=BaseModel)
Order = TypeVar("Order")

DATASET_NAME, PLANS_NAME = "dataset.json", "plans.json"
_CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
_FOLD = re.compile(r"fold_(\d+|all)")
_Resampling: TypeAlias = Literal["resample_data_or_seg_to_shape"]
_Normalisation: TypeAlias = Literal["ZScoreNormalization"]
_Labels: TypeAlias = tuple[frozenset[int], ...]
_UNUSABLE = "Use nnU-Net itself for this model."
_ANISOTROPY = 3
"""Ratio of voxel edges above which nnU-Net resamples slice by slice."""
_IMAGE_ORDER, _LOGITS_ORDER = 3, 1
"""Orders of the splines for images and for logits."""
RULE = WindowRule(starts=window_starts, weights=lambda length: gaussian(length, length // 2))
"""Windows are spaced evenly; the Gaussian has its peak at a voxel."""


class _Dataset(BaseModel):
    """Entries of `dataset.json` that prediction depends on."""

    channel_names: dict[int, str]
    labels: dict[str, int | Annotated[list[PositiveInt], Field(min_length=1)]]


class _Arguments(BaseModel, Generic[Order]):
    """Arguments of a resampling, as the planners of nnU-Net write them."""

    model_config = ConfigDict(extra="forbid")

    order: Order
    force_separate_z: None
    order_z: Literal[0] = 0
    is_seg: Literal[False] = False


class _Configuration(BaseModel):
    """Entries of a configuration of `plans.json`, such as `3d_fullres`."""

    patch_size: Size
    spacing: VoxelSpacing
    normalization_schemes: tuple[_Normalisation, _Normalisation, _Normalisation, _Normalisation]
    use_mask_for_norm: tuple[bool, bool, bool, bool]
    resampling_fn_data: _Resampling = "resample_data_or_seg_to_shape"
    resampling_fn_probabilities: _Resampling = "resample_data_or_seg_to_shape"
    resampling_fn_data_kwargs: _Arguments[Literal[3]]
    resampling_fn_probabilities_kwargs: _Arguments[Literal[1]]
    previous_stage: None = None
    """Only the second stage of a cascade has one."""
    architecture: Architecture


class _Checkpoint(BaseModel):
    """Entries of a checkpoint that prediction depends on."""

    network_weights: dict[str, Any]
    configuration: str = Field(validation_alias=AliasPath("init_args", "configuration"))
    """Name in the plans, such as `3d_fullres`."""
    inference_allowed_mirroring_axes: frozenset[Literal[0, 1, 2]] | None = None


class _Plans(BaseModel):
    transpose_forward: Triple
    image_reader_writer: Literal["SimpleITKIO", "NibabelIO", "NibabelIOWithReorient"]
    configurations: dict[str, dict[str, Any]]


def find_root(path: Path) -> Path | None:
    """Return the folder with the plans of a trained model of nnU-Net, or None.

    `path` is the folder itself, one of its folds or a checkpoint in a fold.
    """
    path = path.absolute()
    for folder in (path, path.parent, path.parent.parent):
        is_part = folder == path or _FOLD.fullmatch(path.relative_to(folder).parts[0])
        if is_part and all((folder / name).is_file() for name in (DATASET_NAME, PLANS_NAME)):
            return folder
    return None


def read_nnunet(path: Path) -> Member:
    """Read the folds of a trained model of nnU-Net, or one of them.

    `path` is the folder with `plans.json`, a folder `fold_*` in it, or a checkpoint of a fold.
    `UsageError` is raised if a file is missing or damaged, or the model is not one of the four modalities
    and the tissues or regions of BraTS, or it has parts that are not known here.
    """
    root = find_root(path) or path
    dataset_path, plans_path = root / DATASET_NAME, root / PLANS_NAME
    dataset, plans = _read(dataset_path, _Dataset), _read(plans_path, _Plans)
    channels = interop.channels_of(dataset.channel_names, dataset_path)
    heads, regions = _read_heads(dataset, dataset_path)
    files = _checkpoints(path, root)
    folds = [_read(file, _Checkpoint) for file in files]
    configuration = _configuration(plans, folds[0].configuration, plans_path)
    networks = list(map(partial(_network, configuration, len(heads)), folds, files))
    of_regions = {tuple(map(frozenset, c.regions)): (c.name,) for c in reversed(CONVENTIONS)}
    grid = _Grid(
        channels=channels,
        is_masked=configuration.use_mask_for_norm,
        axes=plans.transpose_forward,
        spacing_mm=configuration.spacing,
        is_turned=plans.image_reader_writer == "NibabelIOWithReorient",
        heads=heads,
        regions=regions,
    )
    method = Method(
        prepare=grid.prepare,
        to_network=grid.to_network,
        rule=RULE,
        mirror_axes=tuple(sorted(folds[0].inference_allowed_mirroring_axes or ())),
        mean_of="logits",
    )
    with interop.usable(plans_path, _UNUSABLE):
        interop.try_method(method, len(heads))
    return Member(
        network=MeanNetwork(networks),
        name=configuration.architecture.network_class_name.rpartition(".")[2],
        identity=ModelIdentity(
            conventions=of_regions.get(regions, ()),
            patch=configuration.patch_size,
            fingerprint=interop.hash_of_files([dataset_path, plans_path, *files]),
            normalisation=", ".join(configuration.normalization_schemes),
            spacing_mm=configuration.spacing,
        ),
        multiple=configuration.architecture.multiple,
        method=method,
        window=Window(size=configuration.patch_size, overlap=0.5),
        # the method takes all outputs, of regions or of labels
        regions=tuple(range(len(heads))),
    )


def _read(path: Path, kind: type[Values]) -> Values:
    with interop.usable(path):
        return kind.model_validate(interop.read_content(path))


def _read_heads(dataset: _Dataset, path: Path) -> tuple[_Labels, _Labels]:
    """Return the values of each output of a network, regions or labels, and those of WT, TC and ET."""
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
            return heads, regions
    else:
        named = {tissue_named(name): values for name, values in tissues.items()}
        is_whole = frozenset({0}).union(*tissues.values()) == {0, 1, 2, 3}
        if named.keys() == {"ed", "ncr", "et"} and len(tissues) == len(named) and is_whole:
            labels = tuple(frozenset({value}) for value in range(4))
            tc = named["ncr"] | named["et"]
            return labels, (tc | named["ed"], tc, named["et"])
    msg = (
        f"{path}: the model has the labels {', '.join(sets)}; expected oedema, necrosis and enhancing "
        "tumour, or whole tumour, tumour core and enhancing tumour. Others cannot be used."
    )
    raise UsageError(msg)


def _checkpoints(path: Path, root: Path) -> list[Path]:
    """Return the checkpoints that a path means: final ones if all folds have them, else best."""
    folds = [path]
    if path.absolute() == root:
        every = sorted(p for p in root.iterdir() if _FOLD.fullmatch(p.name) and p.is_dir())
        # `all` was trained on the cases of all folds
        folds = [fold for fold in every if fold.name != "fold_all"] or every
    for name in _CHECKPOINTS:
        files = [path] if path.is_file() else [fold / name for fold in folds]
        if files and all(map(Path.is_file, files)):
            return files
    without = [fold.name for fold in folds if not (fold / _CHECKPOINTS[0]).is_file()]
    msg = (
        f"{root}: found no {_CHECKPOINTS[0]} in {', '.join(without) or 'a folder fold_0, fold_1, ...'}; "
        "expected it in each fold. Copy the missing files, or give one fold as --model."
    )
    raise UsageError(msg)


def _configuration(plans: _Plans, name: str, path: Path) -> _Configuration:
    """Return a configuration of the plans, completed by the one that it inherits from."""
    content: dict[str, Any] = {"inherits_from": name}
    with interop.usable(path, _UNUSABLE):
        while (name := content.pop("inherits_from", None)) is not None:
            # each is taken once: a configuration does not inherit from itself
            content = plans.configurations.pop(name) | content
        return _Configuration.model_validate(content)


def _network(plan: _Configuration, n_out: int, fold: _Checkpoint, path: Path) -> nn.Module:
    """Build the network of a fold with its weights."""
    # of weights that nnU-Net stores under two names, one is enough
    copies = re.compile(r"decoder\.encoder\.|.*\.all_modules\.")
    make = partial(NnunetNetwork, plan.architecture, len(MODALITIES), n_out)
    with interop.usable(path, _UNUSABLE), torch.device("meta"):
        state = fold.network_weights.items()
        network = build_with(make, {key: value for key, value in state if not copies.match(key)})
        check_window(network, plan.patch_size, n_out)
    return network


@dataclass(frozen=True, kw_only=True, slots=True)
class _Grid:
    """Grid of voxels that a network of nnU-Net was trained on."""

    channels: tuple[int, ...]
    """Index in `MODALITIES` of each input channel."""
    is_masked: tuple[bool, ...]
    """Whether each input channel is normalised inside the voxels that are not 0 alone."""
    axes: Triple
    """Axis of z, y, x that becomes each axis of the input (`transpose_forward`)."""
    spacing_mm: Spacing
    """Voxel size along the axes of the input."""
    is_turned: bool
    """Whether scans are turned to right, anterior, superior first; else they stay as stored."""
    heads: _Labels
    """Values in label maps that each output of the network represents."""
    regions: _Labels
    """Values of WT, TC and ET."""

    def prepare(self, loaded: LoadedCase) -> Scan:
        """Crop a case to the voxels that are not 0, and normalise its modalities.

        Raises:
            CaseError: All voxels are 0.
        """
        volumes = [volume.array for volume in loaded.volumes]
        mask: Mask = binary_fill_holes(np.any([volume != 0 for volume in volumes], axis=0))
        box = bounding_box(mask)
        if box is None:
            file, problem = loaded.volumes[0].file, "no voxel that is not 0"
            raise CaseError(loaded.case.case_id, file, problem, "a scan", "Export it again.")
        image = np.empty((len(volumes), *box.shape), dtype=np.float32)
        for channel, is_masked in zip(self.channels, self.is_masked, strict=True):
            crop = volumes[channel][box.slices].astype(np.float32)
            inside = mask[box.slices] if is_masked else np.s_[:]
            values = crop[inside]
            crop[inside] = (values - values.mean()) / max(values.std(), 1e-8)
            image[channel] = crop
        return Scan(case=loaded.case, image=image, box=box, geometry=loaded.geometry)

    def to_network(self, scan: Scan) -> NetworkInput:
        """Return a scan on the grid of the network."""
        orientation = self._orientation(scan)
        stored = np.stack([reorient_back(scan.image[i], orientation) for i in self.channels])
        crop = np.ascontiguousarray(stored.transpose(self._order()))
        spacing, wanted = self._spacing(scan), self.spacing_mm
        edges = zip(crop.shape[1:], spacing, wanted, strict=True)
        shape = tuple(max(1, round(mm / wanted_mm * n)) for n, mm, wanted_mm in edges)
        image = _resize(crop, shape, (spacing, wanted), _IMAGE_ORDER)
        return NetworkInput(image=image, to_volume=partial(self._to_volume, crop.shape[1:], scan))

    def _to_volume(self, shape: tuple[int, ...], scan: Scan, output: Tensor) -> Image:
        """Return probabilities (3, x, y, z) on the crop of a scan, of the output of the network."""
        spacings = self.spacing_mm, self._spacing(scan)
        logits = _resize(output.cpu().numpy(), shape, spacings, _LOGITS_ORDER)
        stored = expit(self._region_logits(logits)).transpose(np.argsort(self._order()))
        return np.stack([reorient(volume, self._orientation(scan)) for volume in stored])

    def _region_logits(self, logits: Image) -> Image:
        """Return logits (3, ...) of WT, TC and ET, given the output (L, ...) of a network.

        Of labels, the logit of a region is the largest one of its labels, less the largest one of the
        others: it is above 0 exactly where the most probable label belongs to the region.
        """
        if frozenset({0}) not in self.heads:
            return logits[[self.heads.index(region) for region in self.regions]]
        inside = [np.array([value <= region for value in self.heads]) for region in self.regions]
        return np.stack([logits[mask].max(axis=0) - logits[~mask].max(axis=0) for mask in inside])

    def _orientation(self, scan: Scan) -> Orientation:
        """Return the transform from the axes in which nnU-Net reads a file to those of BraTS."""
        return find_orientation(np.eye(4) if self.is_turned else scan.geometry.affine)

    def _order(self) -> tuple[int, ...]:
        """Return the axis of (C, x, y, z) that becomes each axis of the input."""
        return (0, *(3 - axis for axis in self.axes))

    def _spacing(self, scan: Scan) -> Spacing:
        """Return the voxel size of a scan along the axes of the network."""
        stored = scan.spacing_mm if self.is_turned else scan.geometry.spacing_mm
        return triple(stored[2 - axis] for axis in self.axes)


def _resize(
    image: Image, shape: tuple[int, ...], spacings: tuple[Spacing, Spacing], order: int
) -> Image:
    """Resample an image (C, ...) to a shape, slice by slice where the voxels are long and thin."""
    if image.shape[1:] == shape:
        return image
    axis = _long_axis(spacings)
    if axis is None:
        return np.stack([_zoom_volume(channel, shape, order) for channel in image])
    flat = tuple(np.delete(shape, axis))
    # the nearest slice, as nnU-Net takes along the long axis
    n_slices = image.shape[1 + axis]
    nearest = np.floor(n_slices / shape[axis] * (np.arange(shape[axis]) + 0.5)).astype(int)
    slices = np.moveaxis(image, 1 + axis, 1)
    resized = np.stack([[_zoom_volume(plane, flat, order) for plane in c] for c in slices])
    return np.ascontiguousarray(np.moveaxis(resized[:, nearest.clip(0, n_slices - 1)], 1, 1 + axis))


def _long_axis(spacings: tuple[Spacing, Spacing]) -> int | None:
    """Return the axis along which voxels are much longer than along both others, if there is one."""
    for spacing in spacings:
        if max(spacing) / min(spacing) > _ANISOTROPY:
            is_single = spacing.count(max(spacing)) == 1
            return spacing.index(max(spacing)) if is_single else None
    return None


def _zoom_volume(image: Image, shape: tuple[int, ...], order: int) -> Image:
    values = image.astype(np.float64)
    factors = np.divide(shape, image.shape)
    resized = zoom(values, factors, order=order, mode="nearest", grid_mode=True)
    # splines overshoot
    return resized.clip(values.min(), values.max()).astype(np.float32)
