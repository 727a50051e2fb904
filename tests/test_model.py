"""Test loading models: agreement of members, fingerprints and label conventions."""

import re
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from brats_seg.config import Config, ModelConfig
from brats_seg.errors import ConfigError, ResumeError, UsageError
from brats_seg.inference.model import load_model, read_trained
from brats_seg.inference.probabilities import centre_shares, window_of
from brats_seg.inference.settings import PredictionSettings, prediction_settings
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD
from brats_seg.runtime.weights import Decoding, FittedPrediction
from tests.inference_builders import CONFIG, CPU, IDENTITY, make_model, write_run


def test_a_run_is_its_best_checkpoint(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")

    model = load_model([run], CPU)

    weights = read_trained(run)[0].weights
    assert len(model.members) == 1
    assert not model.members[0].network.training
    for name, value in model.members[0].network.state_dict().items():
        assert torch.equal(value, weights[name])


def test_loading_leaves_the_random_numbers_of_torch_alone(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    torch.manual_seed(0)
    expected = torch.rand(1)

    torch.manual_seed(0)
    load_model([run], CPU)

    assert torch.rand(1) == expected


def test_the_fingerprint_follows_what_the_model_does_and_not_where_it_lies(tmp_path: Path) -> None:
    one, copy = (write_run(tmp_path / name) for name in ("one", "copy"))
    other = write_run(tmp_path / "other", seed=1)
    stricter = write_run(
        tmp_path / "strict", fitted=FittedPrediction(decoding=Decoding(thresholds=(0.5, 0.5, 0.9)))
    )

    windows = [
        write_run(
            tmp_path / f"overlap{overlap}",
            fitted=FittedPrediction(window=(8, 8, 8), overlap=overlap),
        )
        for overlap in (None, 0.25)
    ]

    def fingerprint(*paths: Path) -> str:
        return load_model(paths, CPU).fingerprint

    assert fingerprint(one) == fingerprint(copy) == fingerprint(one / "best.pt")
    assert fingerprint(one, other) == fingerprint(other, one)
    distinct = {
        fingerprint(one),
        fingerprint(other),
        fingerprint(stricter),
        fingerprint(one, other),
        *map(fingerprint, windows),
    }
    assert len(distinct) == 6


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            {"fitted": FittedPrediction(decoding=Decoding(thresholds=(0.4, 0.5, 0.5)))},
            r"thresholds is \(0\.5, 0\.5, 0\.5\) in one and \(0\.4",
        ),
        (
            {"identity": replace(IDENTITY, spacing_mm=(2.0, 2.0, 2.0))},
            r"cannot be averaged: spacing_mm",
        ),
    ],
)
def test_models_that_do_not_go_together_are_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    one = write_run(tmp_path / "one")
    other = write_run(tmp_path / "other", **change)

    with pytest.raises(UsageError, match=message):
        load_model([one, other], CPU)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"modalities": ("t1n", "t1c")}, r"modalities \['t1c', 't1n'\]; expected .*'t2f'"),
        ({"regions": ("tumour",)}, r"regions \['tumour'\]; expected"),
        ({"normalisation": "none"}, r"normalisation none; expected z-score"),
    ],
)
def test_a_model_that_was_trained_on_other_inputs_is_refused(
    tmp_path: Path, change: dict, message: str
) -> None:
    run = write_run(tmp_path / "run", identity=replace(IDENTITY, **change))

    with pytest.raises(UsageError, match=message):
        load_model([run], CPU)


def test_modalities_in_another_order_are_put_right(tmp_path: Path) -> None:
    order = ("t2f", "t1n", "t1c", "t2w")
    run = write_run(tmp_path / "run", identity=replace(IDENTITY, modalities=order))

    assert load_model([run], CPU).members[0].channels == (3, 0, 1, 2)


@pytest.mark.parametrize("name", ["empty", "nowhere"])
def test_a_place_without_a_model_is_refused(tmp_path: Path, name: str) -> None:
    (tmp_path / "empty").mkdir()

    with pytest.raises(UsageError, match=rf"{name} holds no model: expected best\.pt of a run"):
        load_model([tmp_path / name], CPU)


def test_a_flipped_byte_is_found(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    content = bytearray((run / "best.pt").read_bytes())
    weights = next(iter(read_trained(run)[0].weights.values()))
    content[content.index(weights.numpy().tobytes()) + 5] ^= 4
    (run / "best.pt").write_bytes(content)

    with pytest.raises(ResumeError, match=r"best\.pt is not a checkpoint that can be read"):
        load_model([run], CPU)


def test_weights_of_another_network_are_refused(tmp_path: Path) -> None:
    wider = Config(model=ModelConfig(widths=(6, 8)))
    run = write_run(tmp_path / "run")
    content = torch.load(run / "best.pt", weights_only=True)
    content["config"] = wider.model_dump(mode="json")
    torch.save(content, run / "best.pt")

    with pytest.raises(UsageError, match=r"the weights are not those of model\.name 'unet'"):
        load_model([run], CPU)


def test_what_is_asked_for_wins_over_what_is_stored() -> None:
    decoding = Decoding(thresholds=(0.3, 0.4, 0.5), smallest_mm3=(9, 8, 7), smallest_et_mm3=200)
    model = make_model(fitted=FittedPrediction(decoding=decoding))

    stored = model.decoding(PredictionSettings())
    none = Decoding(thresholds=(0.1, 0.1, 0.1), smallest_mm3=(0, 0, 0), smallest_et_mm3=0)
    asked = model.decoding(PredictionSettings(decoding=none))
    one = model.decoding(prediction_settings({"smallest_et_mm3": 0}))

    assert stored == decoding
    assert asked == Decoding(thresholds=(0.1, 0.1, 0.1))
    assert one == decoding.model_copy(update={"smallest_et_mm3": 0})


@pytest.mark.parametrize(
    ("release", "trained", "expected", "reason"),
    [
        ("brats2021", ("brats2023",), BRATS2017, ""),
        ("brats2023-gli", ("brats2017",), BRATS2023, ""),
        ("brats2024-gli", ("brats2017",), BRATS2024, ""),
        ("msd", ("brats2017",), MSD, ""),
        ("unknown", ("brats2017",), BRATS2017, "show no release, and the model was trained on thi"),
        ("unknown", ("brats2017", "msd"), BRATS2023, "no release, .* trained on brats2017, msd"),
        ("brats-ped", ("brats2024-ped",), BRATS2024_PED, "brats-ped exists in several conventions"),
        ("nnunet", ("msd",), MSD, "the names of the scans show no release"),
    ],
)
def test_labels_are_in_the_convention_of_the_release_of_the_scan(
    release, trained, expected, reason
) -> None:
    model = make_model(identity=replace(IDENTITY, conventions=trained))

    written = model.written_convention(PredictionSettings(), release)
    asked = model.written_convention(PredictionSettings(labels="msd"), release)

    assert written.convention == expected
    assert bool(written.reason) == bool(reason)
    assert re.search(reason, written.reason)
    assert asked.convention == MSD
    assert asked.reason.startswith("asked for; ") or (release, asked.reason) == ("msd", "")


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"labels": "brats1999"}, "label convention 'brats1999' is unknown; there are brats2017"),
        ({"thresholds": ["0.5", "2", "0.5"]}, r"setting thresholds\.1: .* less than 1"),
        ({"window": ["64", "64"]}, r"setting window\.2: expected one more value"),
        ({"window": ["a", "64", "64"]}, r"setting window\.0: expected a whole number"),
        ({"overlap": 1.0}, r"setting overlap: .* less than 1"),
        ({"windows": "huge"}, r"setting windows: .*'auto', 'whole', 'centre' or 'sliding'"),
    ],
)
def test_settings_out_of_range_are_named(given, message) -> None:
    with pytest.raises(ConfigError, match=message):
        prediction_settings(given)


def test_settings_that_are_not_given_keep_their_default() -> None:
    assert prediction_settings({"overlap": None, "tta": True}) == PredictionSettings(tta=True)


def test_config_of_the_builders_is_that_of_a_run() -> None:
    assert make_model().members[0].multiple == (2, 2, 2)
    assert CONFIG.patch.size == (8, 8, 8)


def test_the_whole_crop_can_be_what_scores_best(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fitted=FittedPrediction(window="whole"))

    (member,) = load_model([run], CPU).members
    assert member.window == (12, 12, 12)
    assert window_of(member, PredictionSettings(), (20, 18, 16)) == (20, 18, 16)
    assert window_of(member, PredictionSettings(windows="sliding"), (20, 18, 16)) == (12, 12, 12)


def test_statistics_of_the_centre_are_those_of_the_default_window(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", fitted=FittedPrediction(window="centre"))
    (member,) = load_model([run], CPU).members
    fitted, whole = PredictionSettings(), PredictionSettings(windows="whole")

    assert window_of(member, fitted, (20, 18, 16)) == (20, 18, 16)
    assert centre_shares(member, fitted, (20, 18, 16)) == (12 / 20, 12 / 18, 12 / 16)
    assert centre_shares(member, whole, (20, 18, 16)) is None
    # a crop is never smaller than a training patch
    assert window_of(member, fitted, (12, 10, 5)) == (12, 10, 8)
    assert centre_shares(member, fitted, (12, 10, 8)) is None


def test_other_networks_slide_and_are_refused_the_statistics_of_the_middle() -> None:
    (member,) = make_model().members

    assert window_of(member, PredictionSettings(), (20, 18, 16)) == (8, 8, 8)
    with pytest.raises(
        ConfigError, match=r"--windows centre needs the norms of model\.name 'unet'"
    ):
        window_of(member, PredictionSettings(windows="centre"), (20, 18, 16))


def test_a_network_that_the_settings_make_huge_is_not_built(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run")
    content = torch.load(run / "best.pt", weights_only=True)
    content["config"]["model"]["widths"] = [4096] * 10
    content["identity"]["patch"] = (512, 512, 512)
    torch.save(content, run / "best.pt")

    with pytest.raises(UsageError, match=r"\d{10,} weights of the network, \d{4} in the file"):
        load_model([run], CPU)


def test_an_unknown_label_convention_is_refused(tmp_path: Path) -> None:
    run = write_run(tmp_path / "run", identity=replace(IDENTITY, conventions=("brats1999",)))

    with pytest.raises(UsageError, match=r"label conventions \['brats1999'\]"):
        load_model([run], CPU)
