"""An exported MONAI bundle predicts as this package does, without it; ONNX files give its logits."""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import pytest
import torch
from monai.bundle import ConfigParser
from monai.data import decollate_batch
from torch import Tensor, nn

from brats_seg import PredictionSettings, export_model, load_model, predict_folder
from brats_seg.config import Config, ModelConfig, PatchConfig
from brats_seg.errors import EnvironmentalError, UsageError
from brats_seg.interop import channels_of
from brats_seg.presets import trusting
from brats_seg.runtime.weights import NOT_FITTED, FittedPrediction
from brats_seg.voxels.regions import Decoding
from tests.builders import ROOT, call_in_fork, plain_environment, shell, start, write_case
from tests.foreign_builders import FP32
from tests.inference_builders import CONFIG, CPU, IDENTITY, NAMES, write_run
from tests.test_readme import PAGES, blocks

DEEPER = Config(model=ModelConfig(widths=(4, 6, 8)), patch=PatchConfig(size=(16, 16, 16)))
"""Three levels, the fewest that `DynUNet` has."""
DECODING = Decoding(thresholds=(0.45, 0.5, 0.55), smallest_mm3=(60, 9, 4), smallest_et_mm3=20)
MODELS = {
    "plain": ("unet", 1, NOT_FITTED),
    "fitted": ("unet", 2, FittedPrediction(decoding=DECODING)),
    # an untrained network is sure of nothing
    "dynunet": ("dynunet", 1, FittedPrediction(decoding=Decoding(surest_et=0.99))),
}
"""Name and number of the networks and fitted settings of each exported model."""
SHAPE = {"kernel_size": [3] * 3, "strides": [[1] * 3, [2] * 3, [2] * 3], "filters": [4, 6, 8]}
SHAPE |= {"spatial_dims": 3, "in_channels": 4, "out_channels": 3, "act_name": "relu"}
OTHER = ModelConfig(
    name="monai.networks.nets.DynUNet",
    arguments=SHAPE | {"upsample_kernel_size": [[2] * 3, [2] * 3]},
)
"""A `DynUNet` of another shape than ours."""


def run_bundles(root: Path, files: list[str]) -> None:
    """Do what the evaluators of `monai.bundle run` do, which need ignite, without this package."""
    sys.modules |= dict.fromkeys(name for name in sys.modules if name.startswith("brats_seg"))
    for name in MODELS:
        folder, config = f"{root}/{name}", ConfigParser()
        config.read_config(f"{folder}/configs/inference.json")
        config.update({"bundle_root": folder, "output_dir": f"{root}/out/{name}", "image": files})
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


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_case(tmp_path_factory.mktemp("scans"), shape=(36, 30, 26))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory, case: Path) -> Path:
    """Each model as a bundle, and below `out` what it predicts where this package is missing."""
    root = tmp_path_factory.mktemp("bundles")
    # inputs and outputs in other orders than ours
    orders = {"modalities": ("t2f", "t1n", "t1c", "t2w"), "regions": ("et", "wt", "tc")}
    identity = replace(IDENTITY, patch=(16, 16, 16), **orders)
    for name, (network, n_networks, fitted) in MODELS.items():
        config = with_network(DEEPER.model.model_copy(update={"name": network}))
        runs = [
            write_run(root / f"{name}{n}", seed=n, identity=identity, config=config, fitted=fitted)
            for n in range(n_networks)
        ]
        export_model(runs, root / name, file_format="bundle")
    done = call_in_fork(run_bundles, root, files_of(case))
    assert done.code == 0, done.out
    return root


def with_network(model: ModelConfig) -> Config:
    return DEEPER.model_copy(update={"model": model})


def files_of(case: Path) -> list[str]:
    return [str(case / f"{case.name}_{name}.nii.gz") for name in NAMES.values()]


def assert_same(predicted: Path, case: Path, model: Path, output: Path, **settings: Any) -> None:
    predict_folder([case], [model], output, PredictionSettings(preview=False, **settings))
    (file,) = predicted.glob("*.nii.gz")
    ours, theirs = nib.load(output / f"{case.name}.nii.gz"), nib.load(file)
    assert len(np.unique(ours.dataobj)) > 2
    np.testing.assert_array_equal(np.asarray(theirs.dataobj), np.asarray(ours.dataobj))
    np.testing.assert_array_equal(theirs.affine, ours.affine)


@pytest.mark.parametrize("name", MODELS)
def test_a_bundle_predicts_alone(bundles: Path, case: Path, tmp_path: Path, name: str) -> None:
    assert_same(bundles / "out" / name, case, bundles / name, tmp_path, **FP32)


@pytest.mark.slow
def test_the_example_of_the_page_runs_alone(bundles: Path, case: Path, tmp_path: Path) -> None:
    (block,) = (text for text in blocks(PAGES["docs/other-tools.md"], "bash") if "monai" in text)
    use = (bundles / "plain" / "docs" / "README.md").read_text()
    assert [line for line in block.splitlines() if line.strip() not in use] == ["cd bundle"]
    (tmp_path / "bundle").symlink_to(bundles / "plain")
    for path in files_of(case):
        shutil.copy(path, tmp_path / "bundle" / path.rpartition("_")[2])
    environment = plain_environment("PIP_", "PYTHONPATH", "VIRTUAL_ENV")
    environment["PIP_CONSTRAINT"] = str(ROOT / "constraints.txt")
    venv = f"{sys.executable} -m venv venv\n. venv/bin/activate\n"
    torch = start(["bash", "-ec", f"{venv}pip install torch"], tmp_path, environment)
    if torch.returncode:
        pytest.skip("needs a package index")
    shell(f". venv/bin/activate\n{block}", tmp_path, environment)
    assert_same(tmp_path / "bundle" / "results", case, bundles / "plain", tmp_path / "ours", **FP32)


@pytest.mark.parametrize("config", [CONFIG, with_network(OTHER)])
def test_a_bundle_of_another_network_asks_for_this_package(tmp_path: Path, config: Config) -> None:
    case, model = write_case(tmp_path / "scans"), tmp_path / "model"
    export_model([write_run(tmp_path / "run", config=config)], model, file_format="bundle")
    config = ConfigParser()
    config.read_config(model / "configs" / "inference.json")
    output = tmp_path / "bundle"
    config.update({"bundle_root": str(model), "output_dir": str(output), "image": files_of(case)})
    config.get_parsed_content("run")
    metadata = json.loads((model / "configs" / "metadata.json").read_text())
    assert "brats_seg" in metadata["required_packages_version"]
    assert not list((model / "models").glob("*"))
    assert_same(output, case, model, tmp_path / "ours")


def test_a_bundle_is_read_as_the_exported_model_that_it_is(bundles: Path) -> None:
    model = bundles / "plain"
    metadata = json.loads((model / "configs" / "metadata.json").read_text())
    config = ConfigParser.load_config_file(model / "configs" / "inference.json")
    assert load_model([model], CPU).fingerprint == load_model([bundles / "plain0"], CPU).fingerprint
    formats = metadata["network_data_format"]
    names = formats["inputs"]["image"]["channel_def"]
    assert names["1"] == "T1 with contrast agent"
    # known also where another network has taken its place
    assert channels_of({int(n): name for n, name in names.items()}, model) == (0, 1, 2, 3)
    assert formats["outputs"]["pred"]["label_map"] == {"1": "NCR/NET", "2": "ED", "4": "ET"}
    assert "brats_seg" not in metadata["required_packages_version"]
    assert config["network0_def"]["_target_"] == "DynUNet"
    # where the transforms after it compute with numpy, also if the network is on a GPU
    assert config["postprocessing"]["transforms"][0]["device"] == "cpu"
    assert "brats_seg" not in (model / "configs" / "inference.json").read_text()
    card, use = ((model / name).read_text() for name in ("README.md", "docs/README.md"))
    assert use.startswith(f"{card}\n## Use in MONAI\n")
    assert not (model / "scripts").exists()


def test_without_onnx_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EnvironmentalError, match=r'pip install "brats_seg\[onnx'):
        export_model([write_run(tmp_path / "run")], tmp_path / "model", file_format="onnx")


@pytest.mark.parametrize(("name", "patch"), [("unet", (8, 8, 8)), ("notebook", (16, 16, 16))])
def test_onnxruntime_gives_the_logits_of_torch_for_any_size(tmp_path, name, patch) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model, network = tmp_path / "model", ModelConfig(name=name, widths=(4, 8))
    identity, config = replace(IDENTITY, patch=patch), with_network(network)
    run = write_run(tmp_path / "run", identity=identity, config=config)
    export_model([run], model, file_format="onnx")
    session = onnxruntime.InferenceSession(model / "member0.onnx")
    (member,) = load_model([model], CPU).members
    for size in (patch, (24, 16, 40)):
        image = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(0))
        (logits,) = session.run(None, {"image": image.numpy()})
        with torch.inference_mode():
            expected = member.network(image).numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)


class OfFixedSize(nn.Conv3d):
    def __init__(self) -> None:
        super().__init__(4, 3, 1)

    def forward(self, image: Tensor) -> Tensor:
        return super().forward(image).reshape(1, 3, *map(int, image.shape[2:]))


def test_a_network_of_fixed_size_is_refused_by_name(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    pytest.importorskip("onnxruntime")
    name = f"{__name__}.OfFixedSize"
    run = write_run(tmp_path / "run", config=with_network(ModelConfig(name=name)))
    with trusting(name), pytest.raises(UsageError, match="OfFixedSize' cannot be written as ONNX"):
        export_model([run], tmp_path / "model", file_format="onnx")
