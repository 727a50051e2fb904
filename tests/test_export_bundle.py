"""An exported MONAI bundle predicts as this package does, without it."""

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
from monai.bundle import ConfigParser

from brats_seg.inference.batch import predict_folder
from brats_seg.inference.export import export_model
from brats_seg.inference.model import load_model
from brats_seg.inference.settings import PredictionSettings
from brats_seg.runtime.weights import NOT_FITTED, Decoding, FittedPrediction
from tests.builders import write_case
from tests.inference_builders import CONFIG, CPU, IDENTITY, write_run

SETTINGS = PredictionSettings(device="cpu", precision="fp32", preview=False)
NAMES = ("t1", "t1ce", "t2", "flair")
PATCH = (16, 16, 16)
DEEPER = CONFIG.model_copy(
    update={
        "model": CONFIG.model.model_copy(update={"widths": (4, 6, 8)}),
        "patch": CONFIG.patch.model_copy(update={"size": (16, 16, 16)}),
    }
)
PROGRAM = """
import sys
sys.modules["brats_seg"] = None
import torch
from monai.bundle import ConfigParser
from monai.data import decollate_batch
output, folder, *files = sys.argv[1:]
config = ConfigParser()
config.read_config(f"{folder}/configs/inference.json")
config.update({"bundle_root": folder, "output_dir": output, "image": files})
(batch,) = config.get_parsed_content("dataloader")
inferer = config.get_parsed_content("inferer")
n = len(config["handlers"])
for number in range(n):
    network = config.get_parsed_content(f"network{number}").eval()
    weights = torch.load(f"{folder}/models/model{number or ''}.pt", weights_only=True)
    network.load_state_dict(weights)
    with torch.no_grad():
        batch["pred" if n == 1 else f"pred{number}"] = inferer(batch["image"], network)
for case in decollate_batch(batch):
    config.get_parsed_content("postprocessing")(case)
"""
"""What the evaluators of `monai.bundle run` do, which need ignite."""


def export(folder: Path, n_networks: int = 1, decoding: Decoding | None = None) -> Path:
    """Write a bundle of networks with three levels, the fewest that `DynUNet` has."""
    fitted = NOT_FITTED if decoding is None else FittedPrediction(decoding=decoding)
    identity = replace(IDENTITY, patch=(16, 16, 16))
    runs = [
        write_run(folder / f"run{n}", seed=n, identity=identity, config=DEEPER, fitted=fitted)
        for n in range(n_networks)
    ]
    export_model(runs, folder / "model", file_format="bundle")
    return folder / "model"


def files_of(case: Path) -> list[str]:
    return [str(case / f"{case.name}_{name}.nii.gz") for name in NAMES]


def assert_same(
    folder: Path, case: Path, model: Path, settings: PredictionSettings = SETTINGS
) -> None:
    """Compare the label map of a bundle with that of this package."""
    predict_folder([case], [model], folder / "ours", settings)
    (file,) = (folder / "bundle").glob("*.nii.gz")
    ours, theirs = nib.load(folder / "ours" / f"{case.name}.nii.gz"), nib.load(file)
    assert len(np.unique(ours.dataobj)) > 2
    np.testing.assert_array_equal(np.asarray(theirs.dataobj), np.asarray(ours.dataobj))
    np.testing.assert_array_equal(theirs.affine, ours.affine)


@pytest.mark.parametrize(
    ("n_networks", "decoding"),
    [
        (1, None),
        (2, Decoding(thresholds=(0.45, 0.5, 0.55), smallest_et_mm3=20)),
        (1, Decoding(smallest_mm3=(60, 9, 4))),
    ],
)
def test_a_bundle_predicts_the_same_label_map_without_this_package(
    tmp_path: Path, n_networks: int, decoding: Decoding | None
) -> None:
    """The crop takes several windows along each axis."""
    case = write_case(tmp_path / "scans", shape=(60, 50, 36))
    model = export(tmp_path, n_networks, decoding)

    arguments = [str(tmp_path / "bundle"), str(model), *files_of(case)]
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", PROGRAM, *arguments],
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    assert_same(tmp_path, case, model)


def test_a_bundle_of_another_network_asks_for_this_package(tmp_path: Path) -> None:
    case = write_case(tmp_path / "scans")
    model = tmp_path / "model"
    export_model([write_run(tmp_path / "run")], model, file_format="bundle")
    config = ConfigParser()
    config.read_config(model / "configs" / "inference.json")

    config.update(
        {"bundle_root": str(model), "output_dir": str(tmp_path / "bundle"), "image": files_of(case)}
    )
    config.get_parsed_content("run")

    metadata = json.loads((model / "configs" / "metadata.json").read_text())
    assert "brats_seg" in metadata["required_packages_version"]
    assert not list((model / "models").glob("*"))
    assert_same(tmp_path, case, model, PredictionSettings(preview=False))


def test_a_bundle_is_read_as_the_exported_model_that_it_is(tmp_path: Path) -> None:
    model = export(tmp_path)
    metadata = json.loads((model / "configs" / "metadata.json").read_text())
    config = ConfigParser.load_config_file(model / "configs" / "inference.json")

    assert load_model([model], CPU).fingerprint == load_model([tmp_path / "run0"], CPU).fingerprint
    channels = metadata["network_data_format"]["inputs"]["image"]["channel_def"]
    assert channels["1"] == "T1 with contrast agent"
    assert "brats_seg" not in metadata["required_packages_version"]
    assert config["network0_def"]["_target_"] == "DynUNet"
    assert "brats_seg" not in (model / "configs" / "inference.json").read_text()
    card = (model / "docs" / "README.md").read_text()
    assert card == (model / "README.md").read_text()
    assert not (model / "scripts").exists()
