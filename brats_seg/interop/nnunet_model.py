"""Read a trained model of nnU-Net v2.

dataset.json                       channels and labels
plans.json                         architecture, normalisation, voxel size, window
fold_*/checkpoint_final.pth        weights of each fold, or checkpoint_best.pth

Nothing of nnU-Net needs to be installed, and checkpoints are read without running code. Several
folds are one network whose logits are averaged, as nnU-Net does.
"""

import json
import logging
import re
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from pydantic import BaseModel, ConfigDict, Field, ValidationError
from torch import Tensor

from brats_seg.errors import UsageError
from brats_seg.files import read_bounded
from brats_seg.inference.method import Field as Image
from brats_seg.inference.method import Method
from brats_seg.inference.model import ForeignNetwork
from brats_seg.interop.foreign import LONGEST_TEXT, channels_of, hash_of_files
from brats_seg.interop.nnunet_method import (
    RULE,
    NnunetGrid,
    Normalisation,
    between_0_and_1,
    region_logits,
    unchanged,
    z_score,
    z_score_inside,
)
from brats_seg.interop.nnunet_network import MeanNetwork, NnunetNetwork, NnunetShape
from brats_seg.labels import CONVENTIONS, MODALITIES, REGIONS
from brats_seg.runtime.torch_files import checked_weights, read_plain, reason_of
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.runtime.windows import Window
from brats_seg.voxels.box import Triple

log = logging.getLogger(__name__)

Values = TypeVar("Values", bound=BaseModel)

DATASET_NAME, PLANS_NAME = "dataset.json", "plans.json"
_CHECKPOINTS = ("checkpoint_final.pth", "checkpoint_best.pth")
_FOLD = re.compile(r"fold_(\d+|all)")
_RESAMPLING = "resample_data_or_seg_to_shape"
_OVERLAP = 0.5
_REORIENTED = "NibabelIOWithReorient"
_COPY_AGAIN = "Copy the folder of the model again."
_UNUSABLE = "Use nnU-Net itself for this model."

_NORMALISATIONS: dict[tuple[str, bool], Normalisation] = {
    ("ZScoreNormalization", True): z_score_inside,
    ("ZScoreNormalization", False): z_score,
    ("NoNormalization", False): unchanged,
    ("NoNormalization", True): unchanged,
    ("RescaleTo01Normalization", False): between_0_and_1,
    ("RescaleTo01Normalization", True): between_0_and_1,
}
"""Normalisation of each scheme of the plans, with and without the mask of the scan."""


class _Dataset(BaseModel):
    """Entries of `dataset.json` that prediction depends on."""

    channel_names: dict[int, str]
    labels: dict[str, int | list[int]]


class _Architecture(BaseModel):
    network_class_name: str
    arch_kwargs: dict[str, Any]


class _Configuration(BaseModel):
    """Entries of a configuration of `plans.json`, such as `3d_fullres`."""

    patch_size: Triple
    spacing: tuple[float, float, float]
    normalization_schemes: list[str]
    use_mask_for_norm: list[bool]
    resampling_fn_data: str = _RESAMPLING
    resampling_fn_probabilities: str = _RESAMPLING
    previous_stage: str | None = None
    architecture: _Architecture


class _Plans(BaseModel):
    transpose_forward: Triple
    image_reader_writer: str
    configurations: dict[str, dict[str, Any]]


class _Norm(BaseModel):
    eps: float = 1e-5
    affine: bool = False


class _Nonlinearity(BaseModel):
    negative_slope: float = 0.01


class _Arguments(BaseModel):
    """Arguments of the networks of nnU-Net; unknown ones are refused."""

    model_config = ConfigDict(extra="forbid")

    n_stages: int = Field(ge=2, le=12)
    features_per_stage: list[int]
    kernel_sizes: list[Triple]
    strides: list[Triple]
    n_conv_per_stage: list[int] = []
    n_blocks_per_stage: list[int] = []
    n_conv_per_stage_decoder: list[int]
    conv_op: str = "torch.nn.modules.conv.Conv3d"
    conv_bias: bool = True
    norm_op: str = "torch.nn.modules.instancenorm.InstanceNorm3d"
    norm_op_kwargs: _Norm = _Norm(affine=True)
    dropout_op: None = None
    dropout_op_kwargs: None = None
    nonlin: str = "torch.nn.LeakyReLU"
    nonlin_kwargs: _Nonlinearity = _Nonlinearity()
    deep_supervision: bool = False


_PARTS = {"conv_op": "Conv3d", "norm_op": "InstanceNorm3d", "nonlin": "LeakyReLU"}
"""Layers that the networks are built of; others are refused."""
_ENCODERS = {"PlainConvUNet": "n_conv_per_stage", "ResidualEncoderUNet": "n_blocks_per_stage"}
"""Argument with the length of each stage, by the name of the architecture."""


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
    """Tell whether a path is a trained model of nnU-Net, one of its folds, or holds such models."""
    return _root_of(path) is not None or bool(_results_in(path))


def read_nnunet(path: Path) -> ForeignNetwork:
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
    shape = _shape_of(configuration, len(heads.values), root / PLANS_NAME)
    network = MeanNetwork([_network(shape, fold) for fold in folds])
    grid = NnunetGrid(
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
    return ForeignNetwork(
        network=network,
        name=configuration.architecture.network_class_name.rpartition(".")[2],
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
        fingerprint=fingerprint,
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
            _log_folds(folds)
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


def _log_folds(folds: Sequence[Path]) -> None:
    numbers = [fold.name.removeprefix("fold_") for fold in folds]
    missing = (
        [str(n) for n in range(max(map(int, numbers))) if str(n) not in numbers]
        if (len(folds) > 1)
        else []
    )
    without = f"; {', '.join(missing)} missing" if missing else ""
    log.info("nnU-Net model of fold%s %s%s", "s" * (len(folds) > 1), ", ".join(numbers), without)


def _read(path: Path, kind: type[Values]) -> Values:
    try:
        return kind.model_validate(json.loads(read_bounded(path, LONGEST_TEXT)))
    except (OSError, ValueError, RecursionError) as error:
        msg = f"{path} cannot be read as a file of nnU-Net v2: {reason_of(error)}. {_COPY_AGAIN}"
        raise UsageError(msg) from None


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
    try:
        return _Fold(
            path=path,
            weights=checked_weights(content["network_weights"]),
            configuration=str(content["init_args"]["configuration"]),
            mirror_axes=tuple(content.get("inference_allowed_mirroring_axes") or ()),
        )
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        msg = f"{path} is no checkpoint of nnU-Net v2: {reason_of(error)}. {_COPY_AGAIN}"
        raise UsageError(msg) from None


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
        named = {_tissue_of(name): values for name, values in tissues.items()}
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


def _tissue_of(name: str) -> str:
    """Return `ed`, `ncr` or `et` for the name of a label, or an empty text."""
    letters = re.sub(r"[^a-z]+", " ", name.lower()).strip()
    words, joined = set(letters.split()), letters.replace(" ", "")
    if "nonenh" in joined or "necro" in joined or words & {"ncr", "net", "netc"}:
        return "ncr"
    if "edema" in joined or words & {"ed", "snfh"}:
        return "ed"
    return "et" if "enhanc" in joined or "et" in words else ""


def _configuration(plans: _Plans, name: str, path: Path) -> _Configuration:
    """Return a configuration of the plans, completed by the one that it inherits from.

    Raises:
        UsageError: It is not there, is a cascade, or has no window in three dimensions.
    """
    content: dict[str, Any] = {}
    wanted: str | None = name
    try:
        for _ in plans.configurations:
            if wanted is None:
                break
            own = plans.configurations[wanted]
            content = {**own, **content}
            wanted = own.get("inherits_from")
        if "architecture" not in content:
            content["architecture"] = _early_architecture(content)
        found = _Configuration.model_validate(content)
    except (KeyError, TypeError, ValidationError) as error:
        msg = f"{path}: the configuration {name!r} cannot be used: {reason_of(error)}. {_UNUSABLE}"
        raise UsageError(msg) from None
    resampling = {found.resampling_fn_data, found.resampling_fn_probabilities}
    for is_unknown, words in (
        (found.previous_stage is not None, "it is the second stage of a cascade"),
        (resampling != {_RESAMPLING}, f"it resamples with {', '.join(sorted(resampling))}"),
    ):
        if is_unknown:
            msg = f"{path}: the configuration {name!r} cannot be used: {words}. {_UNUSABLE}"
            raise UsageError(msg)
    return found


def _early_architecture(content: dict[str, Any]) -> dict[str, Any]:
    """Return the architecture of plans before version 2.4, which have its sizes alone."""
    name = content["UNet_class_name"]
    strides = content["pool_op_kernel_sizes"]
    widest, first = content["unet_max_num_features"], content["UNet_base_num_features"]
    return {
        "network_class_name": name,
        "arch_kwargs": {
            "n_stages": len(strides),
            "features_per_stage": [min(widest, first * 2**level) for level in range(len(strides))],
            "kernel_sizes": content["conv_kernel_sizes"],
            "strides": strides,
            _ENCODERS.get(name, "n_conv_per_stage"): content["n_conv_per_stage_encoder"],
            "n_conv_per_stage_decoder": content["n_conv_per_stage_decoder"],
        },
    }


def _shape_of(configuration: _Configuration, n_out: int, path: Path) -> NnunetShape:
    """Return the architecture of a configuration.

    Raises:
        UsageError: It is one that cannot be built here.
    """
    described = configuration.architecture
    name = described.network_class_name.rpartition(".")[2]
    try:
        if name not in _ENCODERS:
            msg = f"its network is {name}; expected {' or '.join(_ENCODERS)}"
            raise ValueError(msg)
        arguments = _Arguments.model_validate(described.arch_kwargs)
        for key, part in _PARTS.items():
            if getattr(arguments, key).rpartition(".")[2] != part:
                msg = f"{key} is {getattr(arguments, key)}; expected {part}"
                raise ValueError(msg)
        return NnunetShape(
            n_in=len(MODALITIES),
            n_out=n_out,
            widths=tuple(arguments.features_per_stage),
            kernels=tuple(arguments.kernel_sizes),
            strides=tuple(arguments.strides),
            n_encoder=tuple(getattr(arguments, _ENCODERS[name])),
            n_decoder=tuple(arguments.n_conv_per_stage_decoder),
            is_residual=name == "ResidualEncoderUNet",
            bias=arguments.conv_bias,
            eps=arguments.norm_op_kwargs.eps,
            slope=arguments.nonlin_kwargs.negative_slope,
        )
    except (ValueError, AttributeError) as error:
        msg = f"{path}: the network cannot be built: {reason_of(error)}. {_UNUSABLE}"
        raise UsageError(msg) from None


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
    try:
        # the weights are those of the file: no memory is needed for others, of any size
        with torch.device("meta"):
            network = NnunetNetwork(shape)
        network.load_state_dict(kept, assign=True)
    except (RuntimeError, ValueError) as error:
        reason = str(error).partition("\n")[2].strip().partition("\n")[0] or error
        msg = f"{fold.path}: the weights are not those of the network in {PLANS_NAME}: {reason} {_UNUSABLE}"
        raise UsageError(msg) from None
    return network


def _normalisations(configuration: _Configuration, path: Path) -> tuple[Normalisation, ...]:
    schemes = list(
        zip(configuration.normalization_schemes, configuration.use_mask_for_norm, strict=False)
    )
    unknown = sorted({name for name, mask in schemes if (name, mask) not in _NORMALISATIONS})
    if unknown or len(schemes) != len(MODALITIES):
        known = ", ".join(sorted({name for name, _ in _NORMALISATIONS}))
        found = ", ".join(unknown) or f"{len(schemes)} channels"
        ct = " CTNormalization is for CT." if "CTNormalization" in unknown else ""
        msg = (
            f"{path}: the normalisation is {found}; expected one of {known} for each of the four "
            f"modalities.{ct} Models of other images cannot be used."
        )
        raise UsageError(msg)
    return tuple(_NORMALISATIONS[scheme] for scheme in schemes)
