"""Test reconstruction and the command `reconstruct`: output, files and exit codes."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brats_seg.cases.find import find_inputs
from brats_seg.config import Config, ModelConfig, PatchConfig, ValidationConfig
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.method import Scan
from brats_seg.inference.reconstruct import Reconstruction, Reconstructor
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import ModelIdentity
from tests.builders import Run, check_json, write_case
from tests.inference_builders import read_scan, write_run

CPU = Device(torch_device=torch.device("cpu"))
IDENTITY = ModelIdentity(conventions=("brats2017",), patch=(24, 24, 16), fingerprint="cases")


def config_of(size: object = "whole") -> Config:
    return Config(
        model=ModelConfig(name="autoencoder", latent=64),
        patch=PatchConfig.model_validate({"size": size}),
        validation=ValidationConfig(watch="val_loss"),
    )


@pytest.fixture
def autoencoder(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run", identity=IDENTITY, config=config_of())


@pytest.fixture
def scan(tmp_path: Path) -> Scan:
    (case_input,) = find_inputs([write_case(tmp_path / "scans")])
    return read_scan(case_input, (1.0, 1.0, 1.0))


class Darker(nn.Module):
    """Returns its input, with the second modality reduced by a half."""

    def forward(self, image: Tensor) -> Tensor:
        return image - 0.5 * torch.tensor([0.0, 1, 0, 0]).view(1, 4, 1, 1, 1)


def reconstructor_of(network: nn.Module, path: Path, size: object = "whole") -> Reconstructor:
    """Return a reconstructor with a network whose output is known."""
    run = write_run(path / "run", identity=IDENTITY, config=config_of(size))
    model = Reconstructor.load(run, CPU).model
    network.weight = nn.Parameter(torch.ones(1))
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
def test_whole_crops_and_windows_give_what_the_network_gives(
    tmp_path: Path, scan: Scan, size: object
) -> None:
    made = reconstructor_of(Darker(), tmp_path, size).reconstruct_scan(scan)

    assert made.reconstruction.shape == scan.image.shape
    assert made.rmse == pytest.approx((0, 0.5, 0, 0), abs=1e-5)


def test_a_reconstruction_that_is_not_finite_is_an_error_of_the_case(
    tmp_path: Path, scan: Scan
) -> None:
    class Broken(nn.Module):
        def forward(self, image: Tensor) -> Tensor:
            return image / 0

    with pytest.raises(CaseError, match=r"NaN or infinite.*--precision fp32"):
        reconstructor_of(Broken(), tmp_path).reconstruct_scan(scan)


def test_modalities_in_another_order_come_back_in_ours(tmp_path: Path, scan: Scan) -> None:
    identity = ModelIdentity(
        conventions=(), patch=(8, 8, 8), fingerprint="", modalities=("t2f", "t1n", "t2w", "t1c")
    )
    run = write_run(tmp_path / "run", identity=identity, config=config_of())
    found = Reconstructor.load(run, CPU)
    network = found.model.members[0].network
    assert isinstance(network, Autoencoder)

    with torch.inference_mode():
        decoded = network(torch.from_numpy(scan.image)[[3, 0, 2, 1]][None])[0]

    made = found.reconstruct_scan(scan).reconstruction
    assert np.allclose(made[3], decoded[0], atol=1e-5)
    assert np.allclose(made[1], decoded[3], atol=1e-5)


def test_it_draws_a_case_and_prints_the_error_of_each_modality(
    run: Run, autoencoder: Path, tmp_path: Path
) -> None:
    folder = write_case(tmp_path / "scans")

    code, shown, said = run("reconstruct", autoencoder, folder, "-o", "pictures")

    assert code == 0, said
    assert "BraTS2021_00000: error " in shown
    assert all(f"{modality} " in shown for modality in ("t1n", "t1c", "t2w", "t2f"))
    assert "Research use only." in shown
    picture = tmp_path / "pictures" / "BraTS2021_00000.png"
    assert picture.read_bytes().startswith(b"\x89PNG")


def test_machines_read_a_line_of_json_and_a_bad_case_does_not_stop_the_others(
    run: Run, autoencoder: Path, tmp_path: Path
) -> None:
    write_case(tmp_path / "scans", "BraTS2021_00000")
    bad = write_case(tmp_path / "scans", "BraTS2021_00001")
    (bad / "BraTS2021_00001_t2.nii.gz").unlink()

    code, shown, said = run("reconstruct", autoencoder, tmp_path / "scans", "--json")

    assert code == 1
    (record,) = check_json("reconstruct", shown)
    assert record["case_id"] == "BraTS2021_00000"
    assert list(record["rmse"]) == ["t1n", "t1c", "t2w", "t2f"]
    assert record["mean_rmse"] == pytest.approx(sum(record["rmse"].values()) / 4)
    assert "FAILED" in said
    assert "BraTS2021_00001" in said
    assert "no t2w" in said


def test_a_segmentation_run_is_refused(run: Run, tmp_path: Path) -> None:
    segmentation = write_run(tmp_path / "run")

    code, _, said = run("reconstruct", segmentation, write_case(tmp_path / "scans"))

    assert code == 2
    assert "expected a reconstruction run. Train one with `brats-seg train --network auto" in said


def test_an_autoencoder_is_refused_by_what_segments(
    run: Run, autoencoder: Path, tmp_path: Path
) -> None:
    case = write_case(tmp_path / "scans")

    ended = [
        run("predict", case, "-o", "out", "--model", autoencoder),
        run("export", autoencoder, "-o", "exported"),
        run("certify", "--run", autoencoder),
    ]

    assert [code for code, _, _ in ended] == [2, 2, 2]
    assert all("expected a segmentation run. An autoencoder" in said for _, _, said in ended)
    assert not (tmp_path / "exported").exists()


def test_a_folder_without_a_run_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"holds no model"):
        Reconstructor.load(tmp_path, CPU)


def test_certify_says_why_it_has_no_losses_for_an_autoencoder(run: Run) -> None:
    code, _, said = run("certify", "--set", "model.name=autoencoder")

    assert code == 2
    assert "model.name is 'autoencoder'; expected a network that segments" in said
