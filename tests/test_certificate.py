"""Test the certificate: its measurements, that it can fail, and the command that prints it."""

import json
from copy import deepcopy
from dataclasses import replace
from itertools import product
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from brats_seg import BatchDiceBce, DiceBce, MicroBatch, build_model
from brats_seg.config import LossConfig, load_config
from brats_seg.errors import BratsError, EnvironmentalError, ResumeError
from brats_seg.progress import untracked
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import ModelCard, ModelIdentity
from brats_seg.training import certificate
from brats_seg.training.certificate import Certificate, CertificateRow, certify, phantom_patches
from brats_seg.training.state import build_network
from tests.builders import Run
from tests.inference_builders import save_run
from tests.training_builders import Recorder, same

CPU = Device(torch_device=torch.device("cpu"))
SMALL = ["patch.size=[8, 8, 8]", "model.widths=[4, 8]"]
SMALL += ["training.precision=fp32", "training.device=cpu"]

PATCHES = phantom_patches(4, (16, 16, 16))


@pytest.fixture(scope="module")
def trained() -> nn.Module:
    network = build_network(load_config(assignments=SMALL), (16, 16, 16))
    certificate.warm_up(network, PATCHES, CPU, untracked)
    return network


@pytest.fixture(scope="module")
def measured(trained: nn.Module) -> Certificate:
    return certify(trained, LossConfig(batch_dice=True), PATCHES, CPU, "a network")


def errors(rows: tuple[CertificateRow, ...], *of: str) -> dict[str, float]:
    """Return the error of each loss, of a method and a precision."""
    return {row.loss: row.relative_error for row in rows if (row.method, row.precision) == of}


def test_the_accumulator_is_exact_to_rounding(measured: Certificate) -> None:
    """Ordinary accumulation is the negative control: after a few steps of training it differs."""
    rows = measured.rows
    assert {(row.loss, row.method, row.precision) for row in rows} == {
        *product(
            (certificate.PATCH_DICE, certificate.BATCH_DICE, certificate.UNDECLARED),
            ("exact", "ordinary"),
            ("fp32", "fp64"),
        )
    }
    assert measured.exact
    assert measured.network == "a network"
    wrong = tuple(replace(row, method="exact") for row in rows)
    assert not replace(measured, rows=wrong).exact
    assert {row.loss for row in rows if row.own} == {certificate.BATCH_DICE}
    assert {row.n_patches for row in rows} == {4}
    assert max(errors(rows, "exact", "fp64").values()) <= 1e-12
    assert max(errors(rows, "exact", "fp32").values()) <= 1e-4
    ordinary = errors(rows, "ordinary", "fp64")
    # a mean over patches of one size: right in any way
    assert ordinary[certificate.PATCH_DICE] <= 1e-12
    assert min(ordinary[certificate.BATCH_DICE], ordinary[certificate.UNDECLARED]) > 0.1


def test_patches_that_do_not_fit_are_an_error() -> None:
    class Crowded(nn.Conv3d):
        def forward(self, image: Tensor) -> Tensor:
            if len(image) > 2:
                msg = "DefaultCPUAllocator: can't allocate memory"
                raise RuntimeError(msg)
            return super().forward(image)

    patches = phantom_patches(4, (8, 8, 8))
    with pytest.raises(EnvironmentalError, match=r"4 patches of 8x8x8 .* --device cpu"):
        certify(Crowded(4, 3, 1), LossConfig(), patches, CPU, "")


@pytest.mark.parametrize(
    ("config", "weight", "length"),
    [(LossConfig(dice=0, bce=0), 1.0, "0.0"), (LossConfig(), float("nan"), "nan")],
)
def test_a_gradient_of_zeros_is_an_error(config: LossConfig, weight: float, length: str) -> None:
    network = nn.Conv3d(4, 3, 1)
    nn.init.constant_(network.weight, weight)
    with pytest.raises(BratsError, match=f"has length {length} for patch Dice"):
        certify(network, config, phantom_patches(2, (8, 8, 8)), CPU, "")


@pytest.fixture(scope="module")
def run_path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of batch Dice; what it has learnt does not count here."""
    path = tmp_path_factory.mktemp("fold0")
    write_run(path, "loss.batch_dice=true")
    return path


def test_a_run_is_certified_on_phantoms(run: Run, run_path: Path, tmp_path: Path) -> None:
    code, out, err = run("certify", "--run", run_path)
    assert (code, err) == (0, "")
    assert "4 patches of 8x8x8 from phantoms, 2 without ET" in out
    assert "batch Dice + BCE (yours)" in out
    assert out.splitlines()[-1].startswith("exact:")
    printed = json.loads(run("certify", "--run", run_path, "--json")[1])
    assert {row["loss"] for row in printed if row["own"]} == {certificate.BATCH_DICE}
    assert out.startswith(f"{run_path / 'last.pt'}, on 4 patches")
    # and settings without a run
    code, out, err = run("certify", "--preset", "demo", *(f"--set={change}" for change in SMALL))
    assert (code, err) == (0, "")
    assert out.startswith("unet, trained for 40 steps, on 4 patches of 8x8x8 from phantoms")
    for arguments, words in (
        ([], "give either --run, or settings"),
        (["--run", run_path, "--preset", "demo"], "give either --run, or settings"),
        (["--run", tmp_path], f"{tmp_path} is an empty folder"),
    ):
        code, _, err = run("certify", *arguments)
        assert (code, words in err) == (2, True)
    write_run(tmp_path, widths=(4, 6))
    with pytest.raises(ResumeError, match=r"last\.pt holds another network than its settings"):
        certificate.certify_run(tmp_path, n_patches=2)


def write_run(path: Path, *settings: str, widths: tuple[int, ...] = (4, 8)) -> None:
    config, patch = load_config(assignments=[*SMALL, *settings]), (8, 8, 8)
    network = build_model(config.model.model_copy(update={"widths": widths}), patch)
    identity = ModelIdentity(conventions=("brats2017",), patch=patch, fingerprint="")
    save_run(path / "last.pt", network.state_dict(), ModelCard(identity=identity, config=config))


def test_phantoms_grow_and_two_in_five_lack_et() -> None:
    wt, tc, et = phantom_patches(10, (16, 16, 16)).target.sum((2, 3, 4)).T
    assert torch.all(wt >= tc)
    assert torch.all(tc >= et)
    assert torch.all(wt.diff() > 0)
    assert wt[-1] > 30 * wt[0]
    assert (et == 0).nonzero().flatten().tolist() == [0, 2, 5, 7]
    assert torch.equal(phantom_patches(2, (8, 8, 8)).image, phantom_patches(2, (8, 8, 8)).image)


@pytest.mark.parametrize(
    ("edge", "widths", "size"),
    # with two levels any even size will do; with six, three voxels are left at the lowest
    [(16, [4, 8], 16), (96, [4, 8], 64), (128, [2] * 6, 96)],
)
def test_a_long_patch_is_cut_for_the_network(edge: int, widths: list[int], size: int) -> None:
    config, patch = load_config(assignments=[f"model.widths={widths}"]), (edge,) * 3
    network = build_network(config, patch)
    assert certificate._measured_size(network, config, patch, CPU) == (size,) * 3
    of_one_size = nn.Sequential(nn.Conv3d(4, 3, 1), nn.Unflatten(2, (edge, 1)), nn.Flatten(2, 3))
    assert certificate._measured_size(of_one_size, config, patch, CPU) == patch


METHODS = ("whole", "exact", "ordinary")
IN_FLOAT16 = Device(torch_device=torch.device("cpu"), autocast_dtype=torch.float16)


def network(*layers: nn.Module) -> nn.Module:
    torch.manual_seed(0)
    first, last = nn.Conv3d(4, 6, 3, padding=1), nn.Conv3d(6, 3, 1)
    return nn.Sequential(first, nn.Tanh(), *layers, last).double()


def by_hand(model: nn.Module, patches: MicroBatch) -> Tensor:
    """The oracle: batch Dice + BCE by hand."""
    target, probabilities, voxels = patches.target, model(patches.image).sigmoid(), (0, 2, 3, 4)
    both = (probabilities * target).sum(voxels)
    dice = (2 * both + 1) / (probabilities.sum(voxels) + target.sum(voxels) + 1)
    bce = -(target * probabilities.log() + (1 - target) * (1 - probabilities).log())
    derivatives = torch.autograd.grad((1 - dice).mean() + bce.mean(), list(model.parameters()))
    return torch.cat([one.flatten() for one in derivatives])


def test_the_methods_compute_what_they_say() -> None:
    """Whole and exact: the derivative of the batch loss; ordinary: the mean over micro-batches."""
    model = network()
    patches = MicroBatch(*(tensor.double() for tensor in phantom_patches(3, (6, 6, 6))))
    expected = by_hand(model, patches)
    found = {
        method: certificate.gradient_by(method, model, BatchDiceBce(), patches, CPU)
        for method in METHODS
    }
    assert torch.allclose(found["whole"], expected, atol=1e-8)
    assert torch.allclose(found["exact"], expected, atol=1e-8)
    parts = map(MicroBatch, *(tensor.split(1) for tensor in patches))
    each = [certificate.gradient_by("whole", model, BatchDiceBce(), part, CPU) for part in parts]
    assert torch.allclose(found["ordinary"], torch.stack(each).mean(0), rtol=1e-12)
    # the loss scale of float16 is taken out again
    rough, small = model.float(), MicroBatch(*(tensor.float() for tensor in patches))
    for method, gradient in found.items():
        in_float16 = certificate.gradient_by(method, rough, BatchDiceBce(), small, IN_FLOAT16)
        assert float((in_float16 - gradient).norm() / gradient.norm()) <= 0.01
    # a parameter that takes no part counts as zero; the module's own parameters come first
    model.register_parameter("idle", nn.Parameter(torch.ones(5)))
    assert not certificate.gradient_by("exact", model, DiceBce(), small, CPU)[:5].any()


def test_dropout_is_left_out_and_the_network_stays_as_it_is() -> None:
    """Of three losses: the whole batch, exact and ordinary accumulation, in both precisions."""
    track, model = Recorder(), network(nn.Dropout3d(0.5)).float()
    before, random_state = deepcopy(model.state_dict()), torch.get_rng_state()
    rows = certify(model, LossConfig(), PATCHES, CPU, "", track).rows
    assert max(errors(rows, "exact", "fp64").values()) <= 1e-12
    assert track.works == [("gradients, fp32", 9), ("gradients, fp64", 9)]
    assert same(model.state_dict(), before)
    assert torch.equal(random_state, torch.get_rng_state())
