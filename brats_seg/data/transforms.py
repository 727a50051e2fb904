"""MONAI dictionary transforms for training, and their pipeline.

A dictionary has a `case_id` at first. Reading adds `image`, a tensor (4, X, Y, Z) with exactly 0
around the brain; `label`, a label map (1, X, Y, Z) in uint8; and `convention`, the name of the
label convention. Each transform also works in other pipelines: it takes numpy arrays, tensors and
MetaTensors. Those of this package replace MONAI's for flips, rotation and intensities where they
behave differently or are faster (`benchmarks/patches.py`, `benchmarks/NOTES.md`).
Probabilities and ranges are those of nnU-Net v2, without its elastic deformation.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
import torch
from monai.transforms import CastToTyped, Compose, MapTransform, Randomizable, create_rotate
from torch import Tensor
from torch.nn import functional

from brats_seg.config import PatchConfig, import_by_name
from brats_seg.data.intensities import (
    CHANGES,
    Item,
    RandIntensitiesd,
    Transform,
    as_type,
    plain_tensor,
)
from brats_seg.data.store import Buffers, PreparedCase, open_case
from brats_seg.errors import BratsError, ConfigError
from brats_seg.labels import MODALITIES, REGIONS, LabelMap, convention_named, regions_of
from brats_seg.voxels.box import Box, Triple, rounded_up, triple

KEYS = ("image", "label")
"""Keys of the dictionary whose items the transforms change."""
ROTATION_DEGREES = 30.0
"""Largest angle about each axis, in either direction."""
SCALING = (0.7, 1.4)
"""Range of the voxels of the case per voxel of the patch: above 1 the brain becomes smaller."""
_N_MODALITIES = len(MODALITIES)
_SLAB = 8
"""Planes that are interpolated at a time, so that their coordinates stay in the cache."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Augmentation:
    """Probability of each transform, per patch."""

    mirror: float = 0
    """Probability per axis."""
    rotation: float = 0
    scaling: float = 0
    intensities: tuple[float, ...] = (0.0,) * len(CHANGES)
    """Probability of each of `CHANGES`."""


NONE = Augmentation()
LIGHT = Augmentation(mirror=0.5, intensities=(0.1, 0, 0.15, 0.15, 0, 0, 0))
"""The fast transforms: about five times as many patches a second as with all of them."""
FULL = Augmentation(
    mirror=0.5, rotation=0.2, scaling=0.2, intensities=(0.1, 0.2, 0.15, 0.15, 0.25, 0.1, 0.3)
)
AUGMENTATIONS = {"none": NONE, "light": LIGHT, "full": FULL}
"""Augmentations by their name in the settings."""


def training_transforms(
    folder: Path,
    *,
    patch: PatchConfig,
    multiple: Triple = (1, 1, 1),
    augment: str = "none",
    extra: Sequence[Transform] = (),
) -> Compose:
    """Return the pipeline that turns `{"case_id": ...}` into a patch and its region masks.

    The result depends on the seed alone that `seed_patch` sets.

    Args:
        folder: Folder of the prepared cases.
        patch: Size and placement of patches.
        multiple: Multiple that the size of a whole case is rounded up to.
        augment: A name in `AUGMENTATIONS`.
        extra: Transforms to apply after those of `augment`, to an image (4, X, Y, Z) in float32
            and a label map (1, X, Y, Z) in uint8, whose shapes must stay. Their randomness must come
            from `self.R` alone.

    Example:
        >>> pipeline = training_transforms(
        ...     Path("prepared"), patch=PatchConfig(size=(64, 64, 64)), augment="light"
        ... )
        >>> [type(transform).__name__ for transform in pipeline.transforms][:3]
        ['ReadPatchd', 'RandIntensitiesd', 'RegionsOfLabelsd']
    """
    augmentation = AUGMENTATIONS[augment]
    read = ReadPatchd(
        folder=folder, patch=patch, multiple=multiple, augmentation=augmentation, dtype=np.float16
    )
    changes = tuple(zip(CHANGES, augmentation.intensities, strict=True))
    # few operations of torch and MONAI take float16 on the CPU
    in_float = CastToTyped("image", dtype=torch.float32)
    given = [in_float, *extra, partial(check_patch, read)] if extra else []
    transforms = [read, RandIntensitiesd("image", changes), *given]
    return Compose([*transforms, RegionsOfLabelsd("label"), InHalfd("image")])


def apply_transforms(pipeline: Compose, data: Item) -> Item:
    """Apply a pipeline to a dictionary, and raise the errors of this package unchanged.

    `Compose` raises every error of a transform as a `RuntimeError` without the original message.
    """
    try:
        return pipeline(data)
    except RuntimeError as error:
        cause: BaseException = error
        # lists of patches are passed on one by one, and add an error each
        while cause.__cause__ is not None and not isinstance(cause, BratsError | MemoryError):
            cause = cause.__cause__
        if not isinstance(cause, BratsError | MemoryError):
            raise
    # raised here and not above: there the two errors would refer to each other, and dask, which
    # pickles an error with those that it refers to, would not come to an end
    raise cause


def seed_patch(pipeline: Compose, *, position: int, augment: int) -> None:
    """Seed every random transform of a pipeline of patches.

    The position has a seed of its own, so that it is the same with any augmentation.
    """
    pipeline.set_random_state(seed=augment % 2**32)
    for transform in pipeline.transforms:
        if isinstance(transform, ReadPatchd):
            transform.set_random_state(seed=position)


def transform_named(name: str) -> Transform:
    """Import a transform by dotted name, as `training.transforms` gives it.

    The name is a function or class that returns a dictionary transform when it is called without
    arguments. A transform that needs arguments is wrapped in a function:

        def elastic():
            return RandAffined(("image", "label"), prob=0.2, mode=("bilinear", "nearest"))

    Raises:
        ConfigError: The name cannot be imported or called without arguments, or does not return a
            transform.
    """
    make = import_by_name(name, "training.transforms")
    setting = f"training.transforms {name!r}"
    expected = "a function or class that returns a MONAI dictionary transform without arguments"
    try:
        transform = make()
    # code of a user may raise anything
    except Exception as error:
        msg = f"{setting} cannot be called: {type(error).__name__}: {error}. Expected {expected}"
        raise ConfigError(msg) from error
    # those of MONAI change plain arrays, and fail in the first patch that a random one is drawn for; of
    # `utility.array`, Lambda takes what its function takes, a dictionary too
    module = type(transform).__module__
    for_arrays = module.startswith("monai") and module.endswith("array") and "utility" not in module
    if for_arrays or not callable(transform):
        msg = f"{setting} returned {transform!r}. Expected {expected}"
        raise ConfigError(msg)
    return transform


class ReadPatchd(Randomizable, MapTransform):
    """Read a random patch of a prepared case, mirrored, rotated and scaled.

    Sets `image` (4, X, Y, Z) in float32, `label` (1, X, Y, Z) in uint8, and `convention` in a
    dictionary with `case_id`. The position is drawn first, then the spatial transform. Mirroring is
    almost free, because the patch is read into a reversed view. Rotation and scaling are computed only
    if they are drawn, on the box of voxels that the patch covers, and every voxel is interpolated
    once. The memory of the image is reused when nothing refers to it.
    """

    def __init__(
        self,
        keys: tuple[str, str] = KEYS,
        *,
        folder: Path,
        patch: PatchConfig,
        multiple: Triple = (1, 1, 1),
        augmentation: Augmentation = NONE,
        dtype: type[np.floating] = np.float32,
    ) -> None:
        """Read patches of the prepared cases of a folder.

        Args:
            keys: Keys of the image and the label map.
            folder: Folder of all prepared cases.
            patch: Size and placement.
            multiple: Multiple that the size of a whole case is rounded up to.
            augmentation: Probabilities of mirroring, rotation and scaling.
            dtype: Type of the image: float32, or float16 to convert only interpolated images.
        """
        MapTransform.__init__(self, keys)
        self.folder = folder
        self.patch = patch
        self.multiple = multiple
        self.augmentation = augmentation
        self.dtype = dtype
        self._buffers = Buffers()
        self.set_random_state()

    def set_random_state(
        self, seed: int | None = None, state: np.random.RandomState | None = None
    ) -> Self:
        """Seed the position and the spatial transform; a seed may have up to 64 bits."""
        super().set_random_state(None if seed is None else int(seed) % 2**32, state)
        self._generator = np.random.default_rng(
            int(self.R.randint(2**32, dtype=np.uint32)) if seed is None else seed
        )
        return self

    def randomize(self, data: PreparedCase) -> None:
        """Draw the box and the spatial transform of the next patch."""
        self.box = choose_box(data, self.patch, self.multiple, self._generator)
        self.transform = draw_spatial_transform(self.augmentation, self._generator)

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Read the patch.

        Raises:
            CaseError: The case was not prepared, or has no label map.
        """
        case = open_case(self.folder, data["case_id"])
        self.randomize(case)
        image, labels = read_transformed(case, self.box, self.transform, self._buffers)
        if self.dtype is np.float32:
            image = as_type(image, np.float32, self._buffers)
        read = {self.keys[0]: image, self.keys[1]: torch.from_numpy(labels)[None]}
        return {**data, **read, "convention": case.convention.name}


class RegionsOfLabelsd(MapTransform):
    """Convert label maps (1, X, Y, Z) to region masks (3, X, Y, Z) in uint8: WT, TC, ET, 1 inside.

    MONAI's `ConvertToMultiChannelBasedOnBratsClassesd` returns TC, WT, ET and supports only the
    convention before BraTS 2023, in which later label maps have no enhancing tumour.
    """

    def __init__(
        self, keys: str | Sequence[str] = "label", *, convention: str | None = None
    ) -> None:
        """Use a convention by its name; None takes the one under `convention` in the dictionary."""
        super().__init__(keys)
        self.convention = convention
        self._buffers = Buffers()

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Replace the label maps."""
        convention = convention_named(self.convention or data["convention"])
        regions: Item = {}
        for key in self.key_iterator(data):
            labels = plain_tensor(data[key]).to(torch.uint8)[0].numpy()
            masks = self._buffers.take((len(REGIONS), *labels.shape), np.bool_)
            regions[key] = torch.from_numpy(regions_of(labels, convention, masks).view(np.uint8))
        return {**data, **regions}


class InHalfd(MapTransform):
    """Convert images to plain tensors in float16, as prepared cases are stored.

    Patches take half as long to the device that way, and half the memory of the host.
    """

    def __init__(self, keys: str | Sequence[str] = "image") -> None:
        super().__init__(keys)
        self._buffers = Buffers()

    def __call__(self, data: Mapping[str, Any]) -> Item:
        """Convert the images; those in float16 stay in their memory."""
        halves = {
            key: as_type(plain_tensor(data[key]), np.float16, self._buffers)
            for key in self.key_iterator(data)
        }
        return {**data, **halves}


def check_patch(read: ReadPatchd, data: Any) -> Any:
    """Return the dictionary that transforms of the user have made of the patch that was read last.

    Raises:
        ConfigError: An entry is missing, or of another shape.
    """
    size = read.box.shape
    expected = {"image": (_N_MODALITIES, *size), "label": (1, *size), "convention": ()}
    present = [key for key in expected if isinstance(data, Mapping) and key in data]
    # a value that is no array counts as one without axes
    found = {key: tuple(getattr(data[key], "shape", ())) for key in present}
    if found != expected:
        msg = f"training.transforms returned a {type(data).__name__} with the shapes {found}; expected {expected}"
        raise ConfigError(msg)
    return data


def choose_box(
    case: PreparedCase, patch: PatchConfig, multiple: Triple, rng: np.random.Generator
) -> Box:
    """Place a patch in a case.

    A fraction of the patches is centred on a random voxel of a random region of the case, and then
    shifted into the case; the others are placed uniformly. If the case is smaller than the patch,
    the patch extends beyond it on both sides.

    Args:
        case: Case that the patch is from.
        patch: Size and placement.
        multiple: Multiple that the size of a whole case is rounded up to.
        rng: Generator of this patch.
    """
    size = patch.size
    if size == "whole":
        return Box.at((0, 0, 0), rounded_up(case.shape, multiple))
    slack = np.subtract(case.shape, size)
    present = [voxels for voxels in case.foreground if len(voxels)]
    if rng.random() < patch.foreground and present:
        voxels = present[rng.integers(len(present))]
        start = voxels[rng.integers(len(voxels))] - np.floor_divide(size, 2)
    else:
        start = rng.integers(np.maximum(slack, 0), endpoint=True)
    start = np.where(slack < 0, slack // 2, np.clip(start, 0, np.maximum(slack, 0)))
    return Box.at(triple(start.tolist()), size)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class SpatialTransform:
    """Mirroring, rotation and scaling of a patch within its case."""

    mirrored: tuple[bool, bool, bool]
    """Whether X, Y and Z of the patch are reversed."""
    matrix: npt.NDArray[np.float64] | None
    """Rotation and scaling (3, 3): maps offsets from the centre in the unmirrored patch to offsets in
    the case; None for the identity."""


def draw_spatial_transform(
    augmentation: Augmentation, rng: np.random.Generator
) -> SpatialTransform:
    """Draw the spatial transform of a patch."""
    mirrored = triple((rng.random(3) < augmentation.mirror).tolist())
    turned, scaled = rng.random(2) < (augmentation.rotation, augmentation.scaling)
    matrix = None
    if turned or scaled:
        angles = rng.uniform(-ROTATION_DEGREES, ROTATION_DEGREES, size=3) if turned else np.zeros(3)
        scale = rng.uniform(*SCALING) if scaled else 1.0
        matrix = scale * rotation_matrix(angles)
    return SpatialTransform(mirrored=mirrored, matrix=matrix)


def rotation_matrix(angles_degrees: npt.NDArray[np.float64]) -> npt.NDArray[np.float64]:
    """Return the rotation (3, 3) about X, then Y, then Z."""
    # the product of MONAI is about Z first; that of the opposite angles, transposed, is about X first
    return create_rotate(3, -np.radians(angles_degrees))[:3, :3].T


def read_transformed(
    case: PreparedCase, box: Box, transform: SpatialTransform, buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    """Return the image (4, ...) and the labels of a patch on one grid.

    The image is float16 as stored, or float32 if it is interpolated.

    Args:
        case: Case with a label map.
        box: Voxels of the patch without the transform, which is about the centre of the box.
        transform: Mirroring, rotation and scaling.
        buffers: Memory for the image.
    """
    if transform.matrix is None:
        return _read_mirrored(case, box, transform.mirrored, buffers)
    matrix = transform.matrix @ np.diag(np.where(transform.mirrored, -1.0, 1.0))
    return _read_interpolated(case, box, matrix, buffers)


def touched_box(box: Box, matrix: npt.NDArray[np.float64]) -> Box:
    """Return the smallest box of all voxels that a transformed patch is interpolated from."""
    reach = np.abs(matrix) @ (np.array(box.shape) - 1) / 2
    start = triple(math.floor(n) for n in _centre(box) - reach)
    return Box(start=start, stop=triple(math.ceil(n) + 1 for n in _centre(box) + reach))


def _read_mirrored(
    case: PreparedCase, box: Box, mirrored: tuple[bool, bool, bool], buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    reversed_axes = tuple(slice(None, None, -1 if flip else 1) for flip in mirrored)
    half = buffers.take((_N_MODALITIES, *box.shape), np.float16)
    labels = np.empty(box.shape, dtype=np.uint8)
    box.read(case.image, half[:, *reversed_axes])
    box.read(case.labels, labels[reversed_axes])
    return torch.from_numpy(half), labels


def _read_interpolated(
    case: PreparedCase, box: Box, matrix: npt.NDArray[np.float64], buffers: Buffers
) -> tuple[Tensor, LabelMap]:
    touched = touched_box(box, matrix).within(case.shape)
    # the modalities of a voxel lie side by side, so that its neighbours are in few cache lines
    half = buffers.take((*touched.shape, _N_MODALITIES), np.float16)
    touched.read(case.image, half.transpose(3, 0, 1, 2))
    source = as_type(torch.from_numpy(half), np.float32, buffers).permute(3, 0, 1, 2)
    source_labels = torch.from_numpy(touched.read(case.labels)).to(torch.float32)[None]
    image = torch.from_numpy(buffers.take((_N_MODALITIES, *box.shape), np.float32))
    labels = np.empty(box.shape, dtype=np.uint8)
    for start, coordinates in _coordinates(box, matrix, touched):
        slab = slice(start, start + len(coordinates))
        image[:, slab] = _sample(source, coordinates, "bilinear")
        labels[slab] = _sample(source_labels, coordinates, "nearest")[0]
    return image, labels


def _coordinates(
    box: Box, matrix: npt.NDArray[np.float64], touched: Box
) -> Iterator[tuple[int, Tensor]]:
    """Yield the coordinates of the patch in the touched box, (n, Y, Z, 3) for n planes at a time.

    As `grid_sample` takes them: the last axis is Z, Y, X, from -1 to 1 between the outer faces.
    """
    offset = _centre(box) - touched.start - matrix @ (np.array(box.shape) - 1) / 2
    per_voxel = 2 / np.array(touched.shape)
    first = torch.from_numpy((offset + 0.5) * per_voxel - 1).flip(0)
    steps = torch.from_numpy(matrix * per_voxel[:, None]).flip(0)
    x, y, z = (torch.arange(n, dtype=torch.float64)[:, None] for n in box.shape)
    plane = (first + y[:, None] * steps[:, 1] + z * steps[:, 2]).to(torch.float32)
    along_x = (x * steps[:, 0]).to(torch.float32)[:, None, None]
    for start in range(0, len(x), _SLAB):
        yield start, plane + along_x[start : start + _SLAB]


def _sample(source: Tensor, coordinates: Tensor, mode: str) -> Tensor:
    """Interpolate a source (C, ...) at coordinates (n, Y, Z, 3); the background beyond it is 0."""
    return functional.grid_sample(
        source[None], coordinates[None], mode=mode, padding_mode="zeros", align_corners=False
    )[0]


def _centre(box: Box) -> npt.NDArray[np.float64]:
    return np.array(box.start) + (np.array(box.shape) - 1) / 2
