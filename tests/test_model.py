"""Test loading models: agreement of members, fingerprints, windows and label conventions."""

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from brats_seg.config import Config, PatchConfig
from brats_seg.errors import ConfigError, UsageError
from brats_seg.inference.model import load_model, resolve
from brats_seg.inference.settings import PredictionSettings, prediction_settings
from brats_seg.labels import MODALITY_SUBSETS
from brats_seg.runtime.weights import FittedPrediction, read_trained
from brats_seg.runtime.windows import Window
from brats_seg.voxels.regions import Decoding
from tests.inference_builders import CONFIG, CPU, IDENTITY, make_model, write_run

ORDER = ("t2f", "t1n", "t1c", "t2w")


def test_a_run_is_its_best_checkpoint_and_takes_no_random_numbers(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    torch.manual_seed(0)
    expected = torch.rand(1)
    torch.manual_seed(0)
    (member,) = load_model([run], CPU).members
    assert torch.rand(1) == expected
    weights = read_trained(run)[0].weights
    assert not member.network.training
    for name, value in member.network.state_dict().items():
        assert torch.equal(value, weights[name])
    # modalities in another order are put right
    other = write_run(tmp_path / "other", identity=replace(IDENTITY, modalities=ORDER))
    assert load_model([other], CPU).members[0].channels == (3, 0, 1, 2)


def test_the_fingerprint_follows_what_the_model_does_and_not_where_it_lies(tmp_path: Path) -> None:
    one, copy = (write_run(tmp_path / name) for name in ("one", "copy"))
    other = write_run(tmp_path / "other", seed=1)
    fitted = FittedPrediction(decoding=Decoding(thresholds=(0.5, 0.5, 0.9)))
    stricter = write_run(tmp_path / "strict", fitted=fitted)

    def fingerprint(*paths: Path) -> str:
        return load_model(paths, CPU).fingerprint

    assert fingerprint(one) == fingerprint(copy) == fingerprint(one / "best.pt")
    assert fingerprint(one, other) == fingerprint(other, one)
    models = ((one,), (other,), (stricter,), (one, other))
    assert len({fingerprint(*paths) for paths in models}) == 4


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modalities": ("t1n", "t1c")}, r"modalities \['t1c', 't1n'\]; expected .*'t2f'"),
        ({"modalities": ("t1n",) * 4}, "modalities"),
        ({"regions": ("tumour",)}, r"regions \['tumour'\]; expected"),
        ({"normalisation": "none"}, r"normalisation none; expected z-score"),
        ({"conventions": ("brats1999",)}, r"label conventions \['brats1999'\]"),
        ({"subsets": (("t1c", "pet"),)}, r"subsets of the modalities .*pet"),
    ],
)
def test_models_of_other_inputs_are_refused(tmp_path: Path, changes: dict, message: str) -> None:
    run = write_run(tmp_path / "run", identity=replace(IDENTITY, **changes))
    with pytest.raises(UsageError, match=message):
        load_model([run], CPU)


def test_models_that_do_not_go_together_are_refused_or_combined(tmp_path: Path) -> None:
    """An ensemble takes the subsets that all its networks were trained for."""
    fitted = FittedPrediction(decoding=Decoding(thresholds=(0.4, 0.5, 0.5)))
    plain, tuned = write_run(tmp_path / "plain"), write_run(tmp_path / "tuned", fitted=fitted)
    coarse = write_run(tmp_path / "coarse", identity=replace(IDENTITY, spacing_mm=(2.0, 2.0, 2.0)))
    dropout = write_run(tmp_path / "dropout", identity=replace(IDENTITY, subsets=MODALITY_SUBSETS))
    with pytest.raises(UsageError, match=r"thresholds \(0\.5, 0\.5, 0\.5\) and \(0\.4"):
        load_model([plain, tuned], CPU)
    with pytest.raises(UsageError, match=r"cannot be averaged: spacing_mm"):
        load_model([plain, coarse], CPU)
    assert load_model([dropout], CPU).subsets == MODALITY_SUBSETS
    assert load_model([dropout, plain], CPU).subsets == ()


@pytest.mark.parametrize(("widths", "patch"), [([6, 8], (8, 8, 8)), ([4096] * 10, (512, 512, 512))])
def test_weights_must_fit(tmp_path: Path, widths: list[int], patch: tuple[int, int, int]) -> None:
    """Also of one that does not fit into memory, which is not built."""
    run = write_run(tmp_path / "run")
    content = torch.load(run / "best.pt", weights_only=True)
    content["card"]["config"]["model"]["widths"] = widths
    content["card"]["identity"]["patch"] = patch
    torch.save(content, run / "best.pt")
    with pytest.raises(UsageError, match=r"the weights are not those of model\.name 'unet'"):
        load_model([run], CPU)


@pytest.mark.parametrize(
    ("patch", "settings", "size"),
    [
        ((8, 8, 8), {}, (12, 12, 12)),
        ((8, 8, 8), {"window": "whole"}, None),
        ((8, 8, 8), {"window": (10, 10, 10), "overlap": 0.25}, (10, 10, 10)),
        ("whole", {}, None),
        ("whole", {"window": (10, 10, 10)}, (10, 10, 10)),
    ],
)
def test_windows_of_models(tmp_path: Path, patch: object, settings: dict, size: object) -> None:
    """The default is one and a half training patches; the network halves once."""
    config = Config(model=CONFIG.model, patch=PatchConfig.model_validate({"size": patch}))
    run = write_run(tmp_path / "run", config=config)
    (member,) = load_model([run], CPU, PredictionSettings.model_validate(settings)).members
    assert member.window == Window(size=size, overlap=settings.get("overlap", 0.5))
    if patch != "whole":
        with pytest.raises(ConfigError, match=r"9x8x7 does not fit .* 2x2x2.*: 10,8,8\."):
            load_model([run], CPU, PredictionSettings(window=(9, 8, 7)))


FITTED = Decoding(
    thresholds=(0.3, 0.4, 0.5), smallest_mm3=(9, 8, 7), smallest_et_mm3=200, surest_et=0.9
)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("thresholds", (0.5, 0.5, 0.5)),
        ("smallest_mm3", (0, 0, 0)),
        ("smallest_et_mm3", 0),
        ("surest_et", 0),
    ],
)
def test_a_default_that_is_given_replaces_what_was_fitted(name: str, value: object) -> None:
    settings = prediction_settings({name: value})
    (member,) = make_model(decoding=FITTED).members
    assert resolve(settings, member).decoding == FITTED.model_copy(update={name: value})
    # results must be told apart
    assert settings != PredictionSettings()
    assert settings.result_text != PredictionSettings().result_text


def test_finished_predictions_are_recognised_by_what_they_depend_on() -> None:
    settings = prediction_settings({"thresholds": (0.4, 0.5, 0.6), "device": "cpu", "labels": None})
    names = {*PredictionSettings.model_fields} - {"device", "report"}
    assert {*json.loads(settings.result_text)} == names
    assert PredictionSettings.model_validate_json(settings.model_dump_json()) == settings


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": "brats1999"}, "setting labels: expected 'brats2017'.*got 'brats1999'"),
        ({"thresholds": ["0.5", "2", "0.5"]}, r"setting thresholds\.1: .* less than 1"),
        ({"window": ["64", "64"]}, "setting window: expected three positive whole numbers"),
        ({"window": "a,64,64"}, "setting window: expected three positive whole numbers"),
        ({"window": "centre"}, "setting window: .* or 'whole'"),
        ({"overlap": 1.0}, r"setting overlap: .* less than 1"),
        ({"overlp": 0.5}, "setting overlp is unknown; .* Did you mean overlap?"),
    ],
)
def test_settings_out_of_range_are_named(given: dict, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        prediction_settings(given)
