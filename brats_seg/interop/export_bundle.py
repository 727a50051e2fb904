"""Write an exported model as a MONAI bundle too, which predicts without this package.

configs/metadata.json     channels in and out, versions
configs/inference.json    network, transforms, windows, thresholds
models/model.pt           weights, as a state dict
scripts/                  the modules of this package that the bundle needs
docs/README.md            the model card

Networks, windows and the rules for the label map are the code of this package, copied, so that the
bundle computes the same: a configuration of MONAI's own parts alone would place windows elsewhere.
"""

import json
import re
import shutil
from collections.abc import Iterable
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch

from brats_seg.errors import UsageError
from brats_seg.files import whole_file
from brats_seg.inference.model import assemble
from brats_seg.inference.model_card import CARD_NAME
from brats_seg.labels import BRATS2023, MODALITIES, LabelConvention, convention_named
from brats_seg.models.build import network_call
from brats_seg.presets import NETWORKS
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import ExportedModel, TrainedModel

BUNDLE_FOLDERS = ("configs", "models", "scripts", "docs")
"""Folders of a bundle."""
_SCRIPTS = "scripts"
_PARTS = "bundle_parts"
_OWN_IMPORT = re.compile(r"^from brats_seg\.(?:\w+\.)*(\w+) import ", re.MULTILINE)
_REGION_NAMES = ("whole tumour", "tumour core", "enhancing tumour")
_MODALITY_NAMES = ("T1", "T1 with contrast agent", "T2", "FLAIR")


def write_bundle(exported: ExportedModel, folder: Path) -> None:
    """Write the files of a bundle into the folder of an exported model, which has its card.

    Raises:
        UsageError: A network is of another package, whose code cannot be copied.
        EnvironmentalError: A file cannot be written.
    """
    for network in exported.networks:
        name = network.config.model.name
        if name not in NETWORKS:
            msg = (
                f"the network is {name!r}, whose code is not of this package; expected one of "
                f"{', '.join(NETWORKS)} for a bundle. Export it without --format."
            )
            raise UsageError(msg)
    calls = [_network_def(network) for network in exported.networks]
    scripts = _closure([_PARTS, *(call["_target_"].split(".")[1] for call in calls)])
    for name, path in scripts.items():
        _write(
            folder / _SCRIPTS / f"{name}.py",
            _OWN_IMPORT.sub(rf"from {_SCRIPTS}.\1 import ", path.read_text()),
        )
    _write(folder / _SCRIPTS / "__init__.py", "")
    _write(folder / "configs" / "metadata.json", _json(_metadata(exported)))
    _write(folder / "configs" / "inference.json", _json(_inference(exported, calls)))
    weights = {
        f"members.{place}.{name}": value
        for place, network in enumerate(exported.networks)
        for name, value in network.weights.items()
    }
    with whole_file(folder / "models" / "model.pt") as beside:
        torch.save(weights, beside)
    with whole_file(folder / "docs" / "README.md") as beside:
        shutil.copyfile(folder / CARD_NAME, beside)


def _network_def(network: TrainedModel) -> dict[str, Any]:
    """Return the description of a network, as MONAI builds objects."""
    make, arguments = network_call(network.config.model, network.identity.patch)
    module = make.__module__.rpartition(".")[2]
    return {"_target_": f"{_SCRIPTS}.{module}.{make.__name__}", **arguments}


def _closure(names: Iterable[str]) -> dict[str, Path]:
    """Return the files of modules of this package, and of all that they import from it, by name."""
    root = Path(__file__).parents[1]
    files = {
        path.stem: path for place in ("models", "inference") for path in (root / place).glob("*.py")
    }
    pending = [files[name] for name in names]
    found: dict[str, Path] = {}
    while pending:
        path = pending.pop()
        if path.stem not in found:
            found[path.stem] = path
            imported = re.findall(
                r"^from (brats_seg\.[\w.]+) import", path.read_text(), re.MULTILINE
            )
            pending += [
                (root.parent / name.replace(".", "/")).with_suffix(".py") for name in imported
            ]
    return found


def _inference(exported: ExportedModel, calls: list[dict[str, Any]]) -> dict[str, Any]:
    """Return the configuration that predicts a case."""
    loader = {"_target_": "DataLoader", "dataset": "@dataset", "batch_size": 1, "num_workers": 0}
    checkpoint = {
        "load_path": "$@bundle_root + '/models/model.pt'",
        "load_dict": {"model": "@network"},
    }
    return {
        "bundle_root": ".",
        "output_dir": "$@bundle_root + '/eval'",
        "image": [f"{modality}.nii.gz" for modality in MODALITIES],
        "datalist": [{"image": "@image"}],
        "device": "$torch.device('cuda:0' if torch.cuda.is_available() else 'cpu')",
        "network_def": _part(f"{_SCRIPTS}.{_PARTS}.Ensemble", members=calls),
        "network": "$@network_def.to(@device)",
        "preprocessing": _part("Compose", transforms=_preprocessing(exported)),
        "dataset": _part("Dataset", data="@datalist", transform="@preprocessing"),
        "dataloader": loader,
        "inferer": _part(
            f"{_SCRIPTS}.{_PARTS}.BrainInferer",
            members=[_windows(network) for network in exported.networks],
        ),
        "postprocessing": _part("Compose", transforms=_postprocessing(exported)),
        "handlers": [_part("CheckpointLoader", **checkpoint)],
        "evaluator": _part(
            "SupervisedEvaluator",
            device="@device",
            val_data_loader="@dataloader",
            network="@network",
            inferer="@inferer",
            postprocessing="@postprocessing",
            val_handlers="@handlers",
        ),
        "run": ["$@evaluator.run()"],
    }


def _preprocessing(exported: ExportedModel) -> list[dict[str, Any]]:
    """Return the transforms from files to the image that the networks take."""
    spacing_mm = exported.networks[0].identity.spacing_mm
    crop = {"source_key": "image", "select_fn": "$lambda image: image != 0", "allow_smaller": True}
    return [
        _part("LoadImaged", keys="image", image_only=True, ensure_channel_first=True),
        _part("Orientationd", keys="image", axcodes="LPS", labels=None),
        _part("Spacingd", keys="image", pixdim=spacing_mm, mode="bilinear"),
        _part(f"{_SCRIPTS}.{_PARTS}.NormalizeBraind", keys="image"),
        _part("CropForegroundd", keys="image", **crop),
    ]


def _postprocessing(exported: ExportedModel) -> list[dict[str, Any]]:
    """Return the transforms from probabilities to a label map on the grid of the files."""
    decoding = exported.networks[0].fitted.decoding
    labels = {**decoding.model_dump(), "values": _convention(exported).painted}
    inverse = {"transform": "@preprocessing", "orig_keys": "image", "nearest_interp": False}
    saving = {"output_dir": "@output_dir", "output_postfix": "seg", "output_dtype": "uint8"}
    return [
        _part("Invertd", keys="pred", **inverse),
        _part(f"{_SCRIPTS}.{_PARTS}.LabelMapd", keys="pred", **labels),
        _part("SaveImaged", keys="pred", resample=False, separate_folder=False, **saving),
    ]


def _part(target: str, **arguments: Any) -> dict[str, Any]:
    return {"_target_": target, **arguments}


def _windows(network: TrainedModel) -> dict[str, Any]:
    """Return the window of a network, as `BrainInferer` takes it."""
    (member,) = assemble([network], choose_device("cpu", "fp32")).members
    return {
        "window": member.window.size,
        "overlap": member.window.overlap,
        "patch": member.patch,
        "multiple": member.multiple,
    }


def _convention(exported: ExportedModel) -> LabelConvention:
    """Return the label convention that the bundle writes: that of training, if there was only one."""
    taught = {name for network in exported.networks for name in network.identity.conventions}
    return convention_named(*taught) if len(taught) == 1 else BRATS2023


def _metadata(exported: ExportedModel) -> dict[str, Any]:
    convention = _convention(exported)
    spacing = "x".join(f"{mm:g}" for mm in exported.networks[0].identity.spacing_mm)
    meanings = dict(convention.meanings)
    return {
        "version": "0.1.0",
        "changelog": {"0.1.0": f"exported by brats_seg {version('brats_seg')}"},
        "monai_version": version("monai"),
        "pytorch_version": version("torch"),
        "numpy_version": version("numpy"),
        "required_packages_version": {
            name: version(name)
            for name in ("nibabel", "scipy", "pytorch-ignite")
            if _is_there(name)
        },
        "name": "Brain tumour segmentation",
        "task": "Segmentation of brain tumours in four modalities of MRI",
        "description": f"Exported by brats_seg, fingerprint {exported.fingerprint}. Research use only.",
        "authors": "see docs/README.md",
        "copyright": "see docs/README.md",
        "intended_use": "Research use only. This is not a medical device.",
        "image_classes": f"{', '.join(_MODALITY_NAMES)}, skull-stripped, one grid, {spacing} mm",
        "label_classes": str(convention),
        "network_data_format": {
            "inputs": {"image": _format("magnitude", _MODALITY_NAMES)},
            "outputs": {
                "pred": _format("segmentation", _REGION_NAMES)
                | {
                    "label_map": {
                        str(value): meanings[value] for value in sorted(convention.painted)
                    }
                }
            },
        },
    }


def _is_there(name: str) -> bool:
    try:
        return bool(version(name))
    except ModuleNotFoundError:
        return False


def _format(kind: str, names: tuple[str, ...]) -> dict[str, Any]:
    return {
        "type": "image",
        "format": kind,
        "modality": "MR",
        "num_channels": len(names),
        "spatial_shape": ["*", "*", "*"],
        "dtype": "float32",
        "value_range": [],
        "is_patch_data": True,
        "channel_def": {str(place): name for place, name in enumerate(names)},
    }


def _json(content: dict[str, Any]) -> str:
    return json.dumps(content, indent=2) + "\n"


def _write(path: Path, text: str) -> None:
    with whole_file(path) as beside:
        beside.write_text(text, encoding="utf-8")
