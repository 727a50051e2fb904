"""Test tuning on predictions of held-out cases: choice, significance and storage with the weights."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg.errors import UsageError
from brats_seg.inference import held_out as held_out_module
from brats_seg.inference.held_out import FOLDER_NAME, HeldOutCase, open_held_out, predict_held_out
from brats_seg.inference.model import load_model
from brats_seg.inference.tuning import fit_cases, tune_runs
from brats_seg.progress import untracked
from brats_seg.quality.result import dice_lines
from brats_seg.runtime.weights import run_locked
from brats_seg.voxels.regions import Decoding
from tests.inference_builders import CASES, CPU, write_fold, write_run

N_CASES = 10


def write_cases(folder: Path, change: Callable, n_cases: int = N_CASES) -> list[HeldOutCase]:
    cases = []
    for number in range(n_cases):
        reference, probabilities = nested(), nested() * 0.9
        change(number, probabilities, reference)
        path = folder / f"{number}.npz"
        stored = {"complement": (1 - probabilities).astype(np.float16), "reference": reference}
        np.savez(path, **stored, start=(0, 0, 0), spacing_mm=(1.0, 1.0, 1.0))
        cases.append(HeldOutCase(case_id=path.stem, path=path))
    return cases


def cube(start: int, stop: int) -> np.ndarray:
    mask = np.zeros((20, 20, 20), dtype=np.bool_)
    mask[start:stop, start:stop, start:stop] = True
    return mask


def nested() -> np.ndarray:
    return np.stack([cube(4, 16), cube(6, 14), cube(8, 12)])


def add_rim(number: int, probabilities: np.ndarray, reference: np.ndarray) -> None:
    """Give ET a false rim of probability 0.62: 0.65 is the nearest threshold without it."""
    probabilities[2][cube(7, 13) & ~cube(8, 12)] = 0.62


def add_speck(number: int, probabilities: np.ndarray, reference: np.ndarray) -> None:
    """Give WT a false speck of 27 mm3: 50 is the first candidate that drops it."""
    probabilities[0][cube(0, 3)] = 0.9


def add_far_speck(number: int, probabilities: np.ndarray, reference: np.ndarray) -> None:
    """Give WT a false speck of 8 mm3, which three dilations of the tumour do not reach: a lesion."""
    probabilities[0][cube(0, 2)] = 0.9


# Dice of ET from 2 64 / (216 + 64) to 1, a third of the mean
RIM = ("threshold of ET", (1 - 128 / 280) / 3)
SPECK = ("smallest component of WT, mm3", (1 - 2 * 1728 / (2 * 1728 + 27)) / 3)
# a lesion-wise Dice of 1/2; the gain of Dice alone, .0008, would be too small to matter
FAR_SPECK = (SPECK[0], (1 - 2 * 1728 / (2 * 1728 + 8) + 1 / 2) / 6)


@pytest.mark.parametrize(
    ("change", "n_cases", "expected", "setting", "gain"),
    [
        (add_rim, N_CASES, Decoding(thresholds=(0.5, 0.5, 0.65)), *RIM),
        (add_rim, 8, Decoding(), *RIM),
        (add_speck, N_CASES, Decoding(smallest_mm3=(50, 0, 0)), *SPECK),
        (add_far_speck, N_CASES, Decoding(smallest_mm3=(10, 0, 0)), *FAR_SPECK),
    ],
)
def test_sure_gains_are_taken(tmp_path: Path, change, n_cases, expected, setting, gain) -> None:
    tuning = fit_cases(write_cases(tmp_path, change, n_cases))
    fits = {fit.setting: fit for fit in tuning.fits}
    assert tuning.fitted.decoding == expected
    assert fits[setting].gain.mean == pytest.approx(gain, abs=1e-3)
    assert (fits[setting].chosen == fits[setting].best) == (expected != Decoding())
    # the prediction of TC is right
    assert fits["threshold of TC"].chosen == fits["threshold of TC"].best == "0.5"


@pytest.mark.parametrize(
    ("false_et", "sureness", "expected"),
    [
        (cube(8, 11), 0.9, {(50.0, 0.0, 0.0), (0.0, 0.0, 50.0)}),
        (cube(8, 12), 0.99993, {(0.0, 0.99999, 0.0)}),
    ],
)
def test_false_et_becomes_necrosis(tmp_path: Path, false_et, sureness, expected) -> None:
    """10 of 14 cases have false ET, the others 64 mm3 of true ET."""

    def change(number: int, probabilities: np.ndarray, reference: np.ndarray) -> None:
        if number < 10:
            reference[2] = False
            probabilities[2] = false_et * sureness
        elif sureness > 0.9:
            probabilities[2] = cube(8, 12) * 0.999995

    decoding = fit_cases(write_cases(tmp_path, change, n_cases=14)).fitted.decoding
    assert (decoding.smallest_mm3[2], decoding.surest_et, decoding.smallest_et_mm3) in expected


def test_the_predicted_dice_is_fitted_to_the_decoded_regions(tmp_path: Path) -> None:
    """The surer a network is, the nearer its cubes are to the reference."""

    def change(number: int, probabilities: np.ndarray, reference: np.ndarray) -> None:
        probabilities[:] = nested() * (0.95 - 0.05 * (number % 5))
        probabilities[:, : 4 + number % 5] = 0

    lines = dice_lines([fit_cases(write_cases(tmp_path, change)).notes])
    assert [line.region for line in lines] == ["wt", "tc", "et"]
    assert {line.n_cases for line in lines} == {N_CASES}
    # ET is cut in no case
    assert [line.slope > 0 for line in lines] == [True, True, False]


@pytest.fixture
def runs(tmp_path: Path, tiny_prepared: Path) -> list[Path]:
    return [write_fold(tmp_path / f"fold{n}", tiny_prepared, CASES[n::2], seed=n) for n in range(2)]


def test_a_case_is_predicted_once_for_weights(runs: list[Path], tiny_prepared: Path) -> None:
    held_out = open_held_out(runs[0], tiny_prepared)
    cases = predict_held_out(held_out, CPU, untracked)
    time = cases[0].path.stat().st_mtime_ns
    cases[1].path.unlink()
    again = predict_held_out(held_out, CPU, untracked)
    assert [case.case_id for case in cases] == [CASES[0], CASES[2], CASES[4]]
    assert cases == again
    assert (cases[0].path.stat().st_mtime_ns, cases[1].path.exists()) == (time, True)
    weights = {name: value + 1 for name, value in held_out.trained.weights.items()}
    other = replace(held_out, trained=replace(held_out.trained, weights=weights))
    (other.run / FOLDER_NAME / ".DS_Store").touch()
    cases = predict_held_out(other, CPU, untracked)
    (without_former_weights,) = (other.run / FOLDER_NAME).glob("*/")
    assert cases[0].path.is_relative_to(without_former_weights)


@pytest.mark.usefixtures("one_process")
def test_fitted_settings_are_stored_and_found_again(runs, tiny_prepared, monkeypatch, caplog):
    before = [open_held_out(run, tiny_prepared) for run in runs]
    tune = partial(tune_runs, runs, prepared_path=tiny_prepared, device="cpu", precision="fp32")
    with monkeypatch.context() as patched:
        patched.delattr(held_out_module, "predict_held_out")
        with pytest.raises(AttributeError):
            tune()
    # said before a network is asked
    [warning] = caplog.messages
    assert warning.startswith("6 held-out cases cannot change a setting: ")
    assert "the p value 0.0156, and at most 0.002 is needed, which takes 9 cases" in warning
    again = runs[0].with_name("again")
    start = {"path": "a", "fingerprint": "b", "learnt_from": CASES[:1], "is_complete": True}
    of_same_cases = write_fold(again, tiny_prepared, CASES[::2], seed=2, started_from=start)
    assert tune_runs([*runs, of_same_cases], prepared_path=tiny_prepared, device="cpu").n_cases == 6
    assert f"again: its first weights had learnt from {CASES[0]}: " in caplog.messages[-1]
    tuning = tune()
    assert load_model(runs, CPU).decoding == tuning.fitted.decoding
    # the fitted scores are of these cases, so that the mean is no lower than before
    assert np.mean(tuning.after) >= np.mean(tuning.before)
    for run, one in zip(runs, before, strict=True):
        after = open_held_out(run, tiny_prepared)
        assert after.data.fingerprint == after.trained.card.identity.fingerprint
        for name, value in one.trained.weights.items():
            assert torch.equal(after.trained.weights[name], value)
    # no network is asked again
    monkeypatch.delattr("brats_seg.inference.held_out._predict_and_store")
    assert tune() == tuning


def test_a_run_in_training_is_not_tuned(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The newest weights of the first would be replaced by the tuned ones."""
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    run = write_run(tmp_path / "run")
    with run_locked(run), pytest.raises(UsageError, match="another process trains or tunes"):
        tune_runs([run], prepared_path=tmp_path)
    with pytest.raises(UsageError, match=r"found no best\.pt"):
        tune_runs([tmp_path / "absent"], prepared_path=tmp_path)
    assert list(tmp_path.iterdir()) == [run]
