"""The certificate: what it measures, that it can fail, and the command that prints it."""

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg.cli import main
from brats_seg.config import LossConfig, load_config
from brats_seg.data.fold import FoldData, open_fold
from brats_seg.errors import BratsError, ConfigError, EnvironmentalError
from brats_seg.progress import untracked
from brats_seg.runtime.device import Device
from brats_seg.training.certificate import (
    BATCH_DICE,
    PATCH_DICE,
    UNDECLARED,
    Certificate,
    CertificateRow,
    Probe,
    certify,
    phantom_patches,
    probe_settings,
)
from brats_seg.training.trainer import Trainer
from tests.builders import write_case

CPU = Device(torch_device=torch.device("cpu"))
SMALL = [
    "patch.size=[8, 8, 8]",
    "model.widths=[4, 8]",
    "model.deep_supervision=false",
    "training.precision=fp32",
    "training.device=cpu",
]


@pytest.fixture(scope="module")
def probe() -> Probe:
    """A small network after its moment of training."""
    config = load_config(assignments=[*SMALL, "patch.size=[16, 16, 16]"])
    return probe_settings(config, 4, CPU, untracked)


@pytest.fixture(scope="module")
def rows(probe: Probe) -> tuple[CertificateRow, ...]:
    return certify(probe.network, LossConfig(batch_dice=True), probe.patches, CPU)


def errors(
    rows: tuple[CertificateRow, ...], method: str, precision: str = "fp64"
) -> dict[str, float]:
    return {
        row.loss: row.relative_error
        for row in rows
        if (row.method, row.precision) == (method, precision)
    }


def test_every_loss_is_measured_both_ways_in_both_precisions(
    rows: tuple[CertificateRow, ...],
) -> None:
    found = {(row.loss, row.method, row.precision) for row in rows}

    assert found == {
        (loss, method, precision)
        for loss in (PATCH_DICE, BATCH_DICE, UNDECLARED)
        for method in ("exact", "ordinary")
        for precision in ("fp32", "fp64")
    }
    assert {row.loss for row in rows if row.own} == {BATCH_DICE}
    assert {row.n_patches for row in rows} == {4}


def test_ours_is_the_whole_batch_to_rounding(rows: tuple[CertificateRow, ...]) -> None:
    assert max(errors(rows, "exact", "fp64").values()) <= 1e-12
    assert max(errors(rows, "exact", "fp32").values()) <= 1e-4
    assert all(row.passed for row in rows if row.method == "exact")


def test_ordinary_accumulation_is_seen_to_miss(rows: tuple[CertificateRow, ...]) -> None:
    """The negative control: after a moment of training the patches do tell the two apart."""
    ordinary = errors(rows, "ordinary")

    assert ordinary[PATCH_DICE] <= 1e-12  # a mean over patches of one size: right in any way
    assert ordinary[BATCH_DICE] > 0.1
    assert ordinary[UNDECLARED] > 0.1
    assert [row.angle_deg > 1 for row in rows if row.method == "ordinary"] == [
        False,
        True,
        True,
    ] * 2


def test_an_accumulation_that_misses_fails(rows: tuple[CertificateRow, ...]) -> None:
    found = Certificate(network="", patches="", environment={}, rows=rows)
    wrong = tuple(replace(row, method="exact") for row in rows)

    assert found.exact
    assert not replace(found, rows=wrong).exact


def test_the_network_stays_as_it_is(probe: Probe) -> None:
    before = {name: value.clone() for name, value in probe.network.state_dict().items()}
    random_state = torch.get_rng_state()

    certify(probe.network, LossConfig(), phantom_patches(2, (8, 8, 8)), CPU)

    after = probe.network.state_dict()
    assert all(torch.equal(before[name], after[name]) for name in before)
    assert torch.equal(random_state, torch.get_rng_state())


def test_the_angle_between_gradients_is_theirs(rows: tuple[CertificateRow, ...]) -> None:
    """The sine of the angle is the relative error at most: both are sides of one triangle."""
    for row in rows:
        sine = torch.sin(torch.deg2rad(torch.tensor(row.angle_deg, dtype=torch.float64)))
        assert float(sine) <= row.relative_error + 1e-14


class Crowded(nn.Module):
    """Runs out of memory for more patches at once than it has room for."""

    def __init__(self, room: int, room_in_float64: int) -> None:
        super().__init__()
        self.convolution = nn.Conv3d(4, 3, 1)
        self.room = {torch.float32: room, torch.float64: room_in_float64}

    def forward(self, image: Tensor) -> Tensor:
        if len(image) > self.room[image.dtype]:
            msg = "DefaultCPUAllocator: can't allocate memory"
            raise RuntimeError(msg)
        logits: Tensor = self.convolution(image)
        return logits


def test_fewer_patches_are_taken_where_the_whole_batch_does_not_fit() -> None:
    found = certify(Crowded(3, 1), LossConfig(), phantom_patches(4, (8, 8, 8)), CPU)

    assert {(row.precision, row.n_patches) for row in found} == {("fp32", 2)}


def test_two_patches_that_do_not_fit_are_an_error() -> None:
    with pytest.raises(EnvironmentalError, match=r"two patches of 8x8x8 .* --device cpu"):
        certify(Crowded(1, 1), LossConfig(), phantom_patches(4, (8, 8, 8)), CPU)


def test_batch_statistics_are_refused() -> None:
    network = nn.Sequential(nn.Conv3d(4, 3, 1), nn.BatchNorm3d(3))

    with pytest.raises(ConfigError, match="normalises over the batch"):
        certify(network, LossConfig(), phantom_patches(2, (8, 8, 8)), CPU)


@pytest.mark.parametrize(
    ("config", "weight", "length"),
    [(LossConfig(dice=0, bce=0), 1.0, "0.0"), (LossConfig(), float("nan"), "nan")],
)
def test_a_gradient_without_direction_is_an_error(
    config: LossConfig, weight: float, length: str
) -> None:
    network = nn.Conv3d(4, 3, 1)
    nn.init.constant_(network.weight, weight)

    with pytest.raises(BratsError, match=f"has length {length} for patch Dice"):
        certify(network, config, phantom_patches(2, (8, 8, 8)), CPU)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> FoldData:
    root = tmp_path_factory.mktemp("scans")
    for number in range(6):
        write_case(root, f"BraTS2021_{number:05d}", seed=number, with_et=number % 2 == 0)
    config = load_config(assignments=["folds.n_folds=3"])
    return open_fold(root, fold=0, config=config, prepared_path=tmp_path_factory.mktemp("prepared"))


@pytest.fixture(scope="module")
def run_path(data: FoldData, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of one epoch."""
    settings = ["training.n_epochs=1", "training.n_workers=0", "loss.batch_dice=true"]
    path = tmp_path_factory.mktemp("runs") / "fold0"
    config = load_config(assignments=[*SMALL, "folds.n_folds=3", *settings])
    Trainer(data=data, config=config, run_path=path).run(track=untracked)
    return path


@pytest.fixture
def command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Callable[..., tuple[int, str, str]]:
    """The command in this process: exit code, output, errors."""

    def run(*arguments: str | Path) -> tuple[int, str, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["brats-seg", "certify", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return int(ended.value.code or 0), shown.out, shown.err

    return run


def test_a_run_is_certified_on_its_own_cases(
    command: Callable[..., tuple[int, str, str]], run_path: Path, data: FoldData
) -> None:
    code, out, err = command("--run", run_path, "--prepared", data.folder, "--json")

    assert (code, err) == (0, "")
    printed = json.loads(out)
    written = json.loads((run_path / "certificate.json").read_text())
    assert written["rows"] == printed
    assert {row["loss"] for row in printed if row["own"]} == {BATCH_DICE}
    assert {"loss", "method", "relative_error", "angle_deg"} <= printed[0].keys()
    assert f"from {data.folder}" in written["patches"]
    assert written["network"] == str(run_path / "last.pt")


def test_without_its_cases_a_run_is_certified_on_phantoms(
    command: Callable[..., tuple[int, str, str]], run_path: Path
) -> None:
    code, out, err = command("--run", run_path)

    assert (code, err) == (0, "")
    assert "4 patches of 8x8x8 from phantoms, 2 without ET" in out
    assert "batch Dice + BCE (yours)" in out
    assert out.splitlines()[-1].startswith("exact:")


def test_settings_are_certified_without_a_run(
    command: Callable[..., tuple[int, str, str]],
) -> None:
    code, out, err = command("--preset", "demo", *(f"--set={change}" for change in SMALL))

    assert (code, err) == (0, "")
    assert out.startswith("unet, trained for 40 steps, on 4 patches of 8x8x8 from phantoms")


@pytest.mark.parametrize("arguments", [[], ["--run", "runs/fold0", "--preset", "demo"]])
def test_a_run_or_settings_are_asked_for(
    command: Callable[..., tuple[int, str, str]], arguments: list[str]
) -> None:
    code, _, err = command(*arguments)

    assert code == 2
    assert "give either --run, or settings" in err


def test_a_folder_without_weights_is_named(
    command: Callable[..., tuple[int, str, str]], tmp_path: Path
) -> None:
    code, _, err = command("--run", tmp_path)

    assert code == 2
    assert f"{tmp_path} holds neither last.pt nor best.pt" in err
