"""Test that an exported bundle and exported ONNX files predict as this package does."""

import json
import subprocess
import sys
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser

from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.inference.batch import predict_folder
from brats_seg.inference.export import export_model
from brats_seg.inference.model import load_model
from brats_seg.inference.settings import PredictionSettings
from brats_seg.runtime.weights import Decoding, FittedPrediction
from tests.builders import write_case
from tests.inference_builders import CONFIG, CPU, write_run

DECODING = Decoding(thresholds=(0.45, 0.5, 0.55), smallest_mm3=(6, 4, 2))
FITTED = (
    FittedPrediction(window=(16, 8, 8), overlap=0.25, decoding=DECODING),
    FittedPrediction(window="centre", decoding=DECODING),
)
"""One for each network."""
PROGRAM = """
import sys
sys.modules["brats_seg"] = None
import torch
from monai.bundle import ConfigParser
from monai.data import decollate_batch
config = ConfigParser()
config.read_config("configs/inference.json")
config["image"] = sys.argv[2:]
config["output_dir"] = sys.argv[1]
network = config.get_parsed_content("network").eval()
network.load_state_dict(torch.load("models/model.pt", weights_only=True))
(batch,) = config.get_parsed_content("dataloader")
with torch.no_grad():
    batch["pred"] = config.get_parsed_content("inferer")(batch["image"], network)
for case in decollate_batch(batch):
    config.get_parsed_content("postprocessing")(case)
"""
"""What the evaluator of `monai.bundle run` does, which needs ignite."""


def write_runs(folder: Path) -> list[Path]:
    return [write_run(folder / f"run{n}", seed=n, fitted=FITTED[n]) for n in range(2)]


def test_a_bundle_predicts_the_same_label_map_without_this_package(tmp_path: Path) -> None:
    case = write_case(tmp_path / "scans")
    model = tmp_path / "model"
    export_model(write_runs(tmp_path), model, file_format="bundle")
    settings = PredictionSettings(device="cpu", precision="fp32", preview=False)
    predict_folder([case], [model], tmp_path / "own", settings)
    names = [f"{case.name}_{name}.nii.gz" for name in ("t1", "t1ce", "t2", "flair")]

    done = subprocess.run(
        [
            sys.executable,
            "-W",
            "ignore",
            "-c",
            PROGRAM,
            tmp_path / "monai",
            *(case / n for n in names),
        ],
        cwd=model,
        capture_output=True,
        text=True,
        check=False,
    )

    assert done.returncode == 0, done.stderr
    (file,) = (tmp_path / "monai").glob("*.nii.gz")
    own, found = nib.load(tmp_path / "own" / f"{case.name}.nii.gz"), nib.load(file)
    assert len(np.unique(own.dataobj)) > 2
    np.testing.assert_array_equal(np.asarray(found.dataobj), np.asarray(own.dataobj))
    np.testing.assert_array_equal(found.affine, own.affine)


def test_a_bundle_is_read_as_the_exported_model_that_it_is(tmp_path: Path) -> None:
    exported = export_model(write_runs(tmp_path), tmp_path / "model", file_format="bundle")
    metadata = json.loads((tmp_path / "model" / "configs" / "metadata.json").read_text())
    config = ConfigParser.load_config_file(tmp_path / "model" / "configs" / "inference.json")

    assert load_model([tmp_path / "model"], CPU).fingerprint == exported.fingerprint
    channels = metadata["network_data_format"]["inputs"]["image"]["channel_def"]
    assert channels["1"] == "T1 with contrast agent"
    assert config["network_def"]["members"][0]["_target_"] == "scripts.unet.UNet"
    card = (tmp_path / "model" / "docs" / "README.md").read_text()
    assert card == (tmp_path / "model" / "README.md").read_text()


def test_a_network_of_other_packages_is_not_exported_as_a_bundle(tmp_path: Path) -> None:
    arguments = {"in_channels": 4, "out_channels": 3, "kernel_size": 1}
    model = CONFIG.model.model_copy(update={"name": "torch.nn.Conv3d", "arguments": arguments})
    run = write_run(tmp_path / "run", config=CONFIG.model_copy(update={"model": model}))

    with pytest.raises(UsageError, match=r"the network is 'torch.nn.Conv3d', whose code is not of"):
        export_model([run], tmp_path / "model", file_format="bundle")

    assert not list((tmp_path / "model").glob("[!.]*"))


def test_without_onnx_the_command_to_install_it_is_said(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)

    with pytest.raises(
        EnvironmentalError, match=r'not installed \(.*\): pip install "brats_seg\[onnx'
    ):
        export_model(write_runs(tmp_path)[:1], tmp_path / "model", file_format="onnx")


def test_onnxruntime_gives_the_logits_of_torch_for_any_size(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = tmp_path / "model"
    export_model(write_runs(tmp_path)[:1], model, file_format="onnx")
    session = onnxruntime.InferenceSession(model / "member0.onnx")
    (member,) = load_model([model], CPU).members

    for size in ((8, 8, 8), (24, 16, 40)):
        image = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(0))
        (found,) = session.run(None, {"image": image.numpy()})
        with torch.inference_mode():
            expected = member.network(image).numpy()
        np.testing.assert_allclose(found, expected, rtol=0, atol=1e-4)
