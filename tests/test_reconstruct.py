"""Test reconstruction and the command `reconstruct`: output, files and exit codes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brats_seg.config import Config, ModelConfig, PatchConfig, ValidationConfig
from brats_seg.errors import CaseError, EnvironmentalError, UsageError
from brats_seg.inference.method import Scan
from brats_seg.inference.reconstruct import Reconstruction, Reconstructor
from brats_seg.inference.settings import PredictionSettings
from brats_seg.runtime.weights import ModelIdentity
from tests.builders import Run, check_json, write_case
from tests.inference_builders import CPU, read_scan, write_run

IDENTITY = ModelIdentity(conventions=("brats2017",), patch=(24, 24, 16), fingerprint="cases")


def write_autoencoder(path: Path, size: object = "whole", **identity: ModelIdentity) -> Path:
    config = Config(
        model=ModelConfig(name="autoencoder", latent=64),
        patch=PatchConfig.model_validate({"size": size}),
        validation=ValidationConfig(watch="val_loss"),
    )
    return write_run(path, config=config, **{"identity": IDENTITY} | identity)


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    return read_scan(write_case(tmp_path / "scans"))


class Scaled(nn.Module):
    def __init__(self, divisor: float = 2) -> None:
        super().__init__()
        self.divisor = nn.Parameter(torch.tensor([1.0, divisor, 1, 1]).view(1, 4, 1, 1, 1))

    def forward(self, image: Tensor) -> Tensor:
        return image / self.divisor


def reconstructor_of(network: nn.Module, run: Path) -> Reconstructor:
    model = Reconstructor.load(run, CPU).model
    known = replace(model.members[0], network=network)
    return Reconstructor(model=replace(model, members=(known,)))


def test_the_error_is_computed_by_hand() -> None:
    """Two voxels of brain, one of them missed by 2 in the first modality; air does not count."""
    image = np.zeros((4, 3, 1, 1), dtype=np.float32)
    image[:, :2] = 1
    reconstruction = image.copy()
    reconstruction[0, 0] += 2
    reconstruction[:, 2] = 7
    made = Reconstruction(case_id="a", image=image, reconstruction=reconstruction, warnings=())
    assert made.rmse == pytest.approx((2 / np.sqrt(2), 0, 0, 0))


@pytest.mark.parametrize("size", ["whole", (16, 16, 16)])
def test_crops_and_windows_give_equal_numbers(tmp_path: Path, scan: Scan, size: object) -> None:
    run = write_autoencoder(tmp_path / "run", size)
    made = reconstructor_of(Scaled(), run).reconstruct_scan(scan)
    assert made.reconstruction.shape == scan.image.shape
    assert made.rmse == pytest.approx((0, 0.5, 0, 0), abs=1e-5)
    with pytest.raises(CaseError, match=r"NaN or infinite.*--precision fp32"):
        reconstructor_of(Scaled(0), run).reconstruct_scan(scan)


def test_modalities_in_another_order_come_back_in_ours(tmp_path: Path, scan: Scan) -> None:
    identity = replace(IDENTITY, patch=(8, 8, 8), modalities=("t2f", "t1n", "t2w", "t1c"))
    found = Reconstructor.load(write_autoencoder(tmp_path / "run", identity=identity), CPU)
    with torch.inference_mode():
        image = torch.from_numpy(scan.image)[[3, 0, 2, 1]][None]
        decoded = found.model.members[0].network(image)[0]
    made = found.reconstruct_scan(scan).reconstruction
    assert np.allclose(made[3], decoded[0], atol=1e-5)
    assert np.allclose(made[1], decoded[3], atol=1e-5)


def test_it_draws_cases_and_goes_on_after_a_bad_one(run: Run, tmp_path: Path) -> None:
    autoencoder = write_autoencoder(tmp_path / "run")
    folder = write_case(tmp_path / "scans", "BraTS2021_00000")
    code, shown, errors = run("reconstruct", autoencoder, folder, "-o", "pictures")
    assert code == 0, errors
    assert "BraTS2021_00000: error " in shown
    assert all(f"{modality} " in shown for modality in ("t1n", "t1c", "t2w", "t2f"))
    picture = tmp_path / "pictures" / "BraTS2021_00000.png"
    assert picture.read_bytes().startswith(b"\x89PNG")
    bad = write_case(tmp_path / "scans", "BraTS2021_00001")
    (bad / "BraTS2021_00001_t2.nii.gz").unlink()
    code, shown, errors = run("reconstruct", autoencoder, tmp_path / "scans", "--json")
    assert code == 1
    (record,) = check_json("reconstruct", shown)
    assert record["case_id"] == "BraTS2021_00000"
    assert list(record["rmse"]) == ["t1n", "t1c", "t2w", "t2f"]
    assert record["mean_rmse"] == pytest.approx(sum(record["rmse"].values()) / 4)
    assert "FAILED" in errors
    assert "case BraTS2021_00001, file BraTS2021_00001/: found no t2w" in errors


def test_it_is_loaded_onto_the_device_of_the_settings(tmp_path: Path) -> None:
    settings = PredictionSettings(device="cuda:99")
    with pytest.raises(EnvironmentalError, match="cuda:99"):
        Reconstructor.load(write_autoencoder(tmp_path / "run"), settings=settings)


def test_a_run_of_another_task_is_refused(run: Run, tmp_path: Path) -> None:
    case, autoencoder = write_case(tmp_path / "scans"), write_autoencoder(tmp_path / "auto")
    commands = {
        ("reconstruct", write_run(tmp_path / "run"), case): "expected a reconstruction run",
        ("predict", case, "-o", "out", "--model", autoencoder): "expected a segmentation run",
        ("export", autoencoder, "-o", "exported"): "expected a segmentation run",
        ("certify", "--run", autoencoder): "expected a segmentation run",
        ("certify", "--set", "model.name=autoencoder"): "expected a network that segments",
    }
    for command, message in commands.items():
        code, _, errors = run(*command)
        assert code == 2
        assert message in errors
    assert not (tmp_path / "exported").exists()
    with pytest.raises(UsageError, match="holds no model"):
        Reconstructor.load(tmp_path, CPU)
