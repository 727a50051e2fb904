"""Test memory plans: their rows, the suggested patch, and the memory mode of a run."""

import sys
from dataclasses import replace
from math import prod

import pytest
import torch

from brats_seg.cli import main
from brats_seg.config import Config
from brats_seg.config_text import load_config
from brats_seg.models.build import build_model, size_words
from brats_seg.models.interface import ActivationCheckpointing
from brats_seg.runtime.device import choose_device, native_dtype
from brats_seg.runtime.memory import MEGABYTE
from brats_seg.training import memory_plan
from brats_seg.training.losses import build_criterion
from brats_seg.training.memory_count import Footprint, predicted_bytes
from brats_seg.training.memory_plan import (
    MemoryPlan,
    PlanRow,
    count_plan,
    plan_memory_mode,
    start_in_planned_mode,
    try_plan,
)
from brats_seg.training.out_of_memory import MemoryMode
from brats_seg.training.ranks import Ranks
from brats_seg.training.state import RunState, build_state
from brats_seg.training.step_trial import measure_step
from tests.builders import check_json
from tests.training_builders import Recorder

SMALL = [
    "model.widths=[8, 12, 16]",
    "patch.size=[40, 40, 40]",
    "training.precision=fp32",
    "training.device=cpu",
]
CPU = torch.device("cpu")
PATCH = (40, 40, 40)
MEDIUM_MIB = 280
"""Enough for a patch of 48^3 of the small network, and not for 128^3."""


def settings(*assignments: str) -> Config:
    return load_config(assignments=[*SMALL, *assignments])


def row_of(patch: int, checkpointing: str = "none", **changes: object) -> PlanRow:
    row = PlanRow(
        patch=(patch,) * 3,
        micro_batch=1,
        precision="fp32",
        checkpointing=checkpointing,
        predicted_mib=patch,
        fits=True,
    )
    return replace(row, **changes)


def plan_of(*rows: PlanRow) -> MemoryPlan:
    return MemoryPlan(device=choose_device("cpu", "fp32"), memory_mib=100, rows=rows)


def state_of(config: Config) -> RunState:
    assert config.patch.size != "whole"
    network = build_model(config.model, config.patch.size)
    device = choose_device("cpu", config.training.precision)
    criterion = build_criterion(config.loss)
    return build_state(network, criterion, config, device=device, ranks=Ranks(), n_steps=1)


@pytest.fixture(scope="module")
def medium() -> MemoryPlan:
    return count_plan(settings("training.effective_batch=4"), MEDIUM_MIB * MEGABYTE)


def test_the_rows_hold_the_settings_patch_in_every_way(medium: MemoryPlan) -> None:
    own = [row for row in medium.rows if row.patch == (40, 40, 40)]
    ways = {(row.micro_batch, row.checkpointing) for row in own if row.precision == "fp32"}

    assert ways == {(1, "none"), (2, "none"), (4, "none"), (1, "top"), (1, "all")}


def test_what_fits_is_what_is_predicted_to_take_no_more_than_there_is(medium: MemoryPlan) -> None:
    assert {row.fits for row in medium.rows} == {True, False}
    assert all(row.fits == (row.predicted_mib <= MEDIUM_MIB) for row in medium.rows)


def test_a_larger_patch_never_takes_less(medium: MemoryPlan) -> None:
    plain = [
        row
        for row in medium.rows
        if (row.micro_batch, row.checkpointing, row.precision) == (1, "none", "fp32")
    ]
    by_size = sorted(plain, key=lambda row: prod(row.patch))

    assert len(by_size) > 3
    assert [row.predicted_mib for row in by_size] == sorted(row.predicted_mib for row in by_size)


def test_the_largest_patch_that_fits_is_suggested(medium: MemoryPlan) -> None:
    assert medium.suggested is not None
    largest = max(prod(row.patch) for row in medium.rows if row.fits)

    assert prod(medium.suggested.patch) == largest
    assert sum(row.suggested for row in medium.rows) == 1


def test_more_memory_never_suggests_a_smaller_patch(medium: MemoryPlan) -> None:
    less = count_plan(settings(), 200 * MEGABYTE)

    assert less.suggested is not None
    assert medium.suggested is not None
    assert prod(less.suggested.patch) < prod(medium.suggested.patch)


def test_of_one_patch_the_least_checkpointing_is_preferred() -> None:
    plan = plan_of(
        row_of(32),
        row_of(64, "none", fits=False),
        row_of(64, "top"),
        row_of(64, "all"),
        row_of(96, "all", fits=False),
        row_of(80, precision="bf16"),
        row_of(80, micro_batch=2),
    )

    found = [(row.patch[0], row.checkpointing) for row in plan.candidates]
    assert found == [(64, "top"), (64, "all"), (32, "none")]


def test_too_little_memory_says_what_to_lower() -> None:
    plan = count_plan(settings(), 50 * MEGABYTE)

    assert plan.suggested is None
    assert not any(row.fits for row in plan.rows)
    least = min(plan.rows, key=lambda row: row.predicted_mib)
    assert plan.what_to_lower().startswith(
        f"nothing fits in 50 MiB: the row that takes least, a patch of {size_words(least.patch)}"
    )
    assert (
        f"needs {least.predicted_mib} MiB. Lower model.widths or patch.size" in plan.what_to_lower()
    )


def test_a_row_that_is_larger_than_the_machine_is_not_tried() -> None:
    plan = plan_of(row_of(64, predicted_mib=2**40, suggested=True))

    assert try_plan(plan, settings()) == plan


def needs_of(state: RunState, config: Config) -> dict[MemoryMode, int]:
    """The memory that every mode of a run is predicted to take."""
    accumulator = state.accumulator
    footprint = Footprint(state.network, accumulator.criterion, config, CPU)
    half = replace(accumulator.device, autocast_dtype=native_dtype(CPU))
    return {
        mode: predicted_bytes(
            footprint.counted_bytes(PATCH, mode, half if mode.in_half else accumulator.device), CPU
        )
        for mode in state.fallback.modes
    }


@pytest.mark.parametrize("half", ["true", "false"])
def test_a_run_starts_in_the_first_mode_that_fits(half: str) -> None:
    config = settings("training.micro_batch=2", f"training.half_if_needed={half}")
    state = state_of(config)
    needs = needs_of(state, config)

    assert list(needs.values()) == sorted(set(needs.values()), reverse=True)
    found = [plan_memory_mode(state, config, PATCH, need) for need in needs.values()]
    assert found == list(needs)
    assert plan_memory_mode(state, config, PATCH, min(needs.values()) - 1) is None
    assert state.fallback.place == 0


@pytest.mark.parametrize("place", [0, 1, 3])
def test_a_run_that_plans_starts_where_the_free_memory_says(
    monkeypatch: pytest.MonkeyPatch, place: int
) -> None:
    config = settings("training.micro_batch=2")
    state = state_of(config)
    need = list(needs_of(state, config).values())[place]
    monkeypatch.setattr("brats_seg.training.memory_plan.free_memory", lambda _: need)

    start_in_planned_mode(state, config, PATCH)

    assert state.fallback.place == place


def test_where_nothing_fits_a_run_still_tries_its_last_mode(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    config = settings()
    state = state_of(config)
    monkeypatch.setattr("brats_seg.training.memory_plan.free_memory", lambda _: 2**20)

    start_in_planned_mode(state, config, PATCH)

    assert state.fallback.mode == state.fallback.modes[-1]
    assert "no mode is predicted to fit in the 1 MiB free" in caplog.text


def run_plan(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    chosen = [part for assignment in SMALL for part in ("--set", assignment)]
    monkeypatch.setattr(sys, "argv", ["brats-seg", "plan", *chosen, *arguments])
    with pytest.raises(SystemExit) as ended:
        main()
    return ended.value.code or 0


def test_the_command_ends_with_3_where_nothing_fits(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run_plan(monkeypatch, "--device", "520MiB")

    shown = capsys.readouterr()
    assert code == 3
    assert "unet on a GPU of 520MiB: 8 MiB, beside 512 MiB for torch itself" in shown.out
    assert "32x32x32" in shown.out
    assert "nothing fits in 8 MiB" in shown.err


def test_the_command_prints_rows_as_json(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run_plan(monkeypatch, "--device", "520MiB", "--json")

    (rows,) = check_json("plan", capsys.readouterr().out)
    assert rows[0]["patch"] == [40, 40, 40]
    assert rows[0]["measured_mib"] is None
    assert {"micro_batch", "precision", "checkpointing", "predicted_mib", "fits"} <= rows[0].keys()


def test_a_gpu_is_planned_for_on_a_machine_without_it(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(memory_plan, "_CUBES", (32,))
    monkeypatch.setattr(memory_plan, "_BOXES", ())

    code = run_plan(monkeypatch, "--device", "700MiB", "--preset", "kaggle-t4")

    shown = " ".join(capsys.readouterr().out.split())
    assert code == 0
    assert "unet on a GPU of 700MiB: 188 MiB, beside 512 MiB for torch itself" in shown
    assert "40x40x40 1 fp32 none" in shown
    assert "prediction for a GPU of 700MiB: the tensors of a step were counted" in shown
    assert "Nothing was computed on it" in shown


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--device", "titan"], "device 'titan' is unknown; expected a GPU (t4, p100"),
        (["--device", "t4", "--precision", "bf16"], "bf16 on Tesla T4, which emulates it"),
        (["--device", "t4", "--precision", "half"], "training.precision: expected 'auto', 'fp32'"),
    ],
)
def test_a_device_that_cannot_be_planned_for_is_refused(
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    arguments: list[str],
    message: str,
) -> None:
    assert run_plan(monkeypatch, *arguments) == 2
    assert message in capsys.readouterr().err


def test_a_gpu_that_is_absent_is_not_charged_for_the_batch_on_the_host() -> None:
    network = build_model(settings().model, PATCH)
    counted = []
    for effective_batch in (4, 64):
        config = settings(f"training.effective_batch={effective_batch}")
        criterion = build_criterion(config.loss)
        footprint = Footprint(network, criterion, config, CPU, for_gpu=True)
        counted.append(
            footprint.counted_bytes(PATCH, MemoryMode(micro_batch=1), choose_device("cpu", "fp32"))
        )

    assert counted[0] == counted[1]


@pytest.mark.gpu
@pytest.mark.parametrize("precision", ["fp32", "fp16"])
def test_tensors_on_the_cpu_stand_for_those_of_a_gpu(precision: str) -> None:
    config = load_config(assignments=["patch.size=64,64,64", f"training.precision={precision}"])
    network, criterion = build_model(config.model, (64, 64, 64)), build_criterion(config.loss)
    gpu = choose_device("cuda", precision)
    own = Footprint(network, criterion, config, gpu.torch_device)
    stand_in = Footprint(network, criterion, config, CPU, for_gpu=True)

    for kind in (ActivationCheckpointing.NONE, ActivationCheckpointing.ALL):
        mode = MemoryMode(micro_batch=1, checkpointing=kind)
        expected = own.counted_bytes((64, 64, 64), mode, gpu)
        found = stand_in.counted_bytes((64, 64, 64), mode, replace(gpu, torch_device=CPU))
        assert found == pytest.approx(expected, rel=0.15)


def test_an_invalid_size_is_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run_plan(monkeypatch, "--device", "much") == 2
    assert "device 'much' is unknown" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.parametrize(
    "checkpointing", [ActivationCheckpointing.NONE, ActivationCheckpointing.ALL]
)
def test_a_trial_takes_about_what_was_predicted(checkpointing: ActivationCheckpointing) -> None:
    config = load_config(
        assignments=["patch.size=[64, 64, 64]", "training.precision=fp32", "training.device=cpu"]
    )
    state = state_of(config)
    patch = (64, 64, 64)

    trial = measure_step(config, patch, checkpointing)
    measured = trial.peak_bytes

    assert measured is not None
    assert 0 < trial.step_s < 600
    modes = {0.7: False, 1.3: True}
    for share, fits in modes.items():
        mode = MemoryMode(micro_batch=1, checkpointing=checkpointing)
        state.fallback.modes = (mode,)
        assert (plan_memory_mode(state, config, patch, int(share * measured)) is not None) == fits
    assert torch.get_num_threads() == 1


def test_counting_and_computing_are_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each takes minutes for a large network."""
    monkeypatch.setattr("brats_seg.training.memory_plan._tried", lambda row, *_: row)
    track = Recorder()
    plan = count_plan(settings(), 300 * MEGABYTE, track)
    try_plan(plan, settings(), track)

    (counting, n_patches), computing = track.works
    assert counting == "counting memory"
    assert n_patches == len({row.patch for row in plan.rows})
    assert plan.suggested is not None
    words = size_words(plan.suggested.patch)
    assert computing == (f"computing a batch of {words}, {plan.device.precision}", 1)
