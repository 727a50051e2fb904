"""Test the model card: cases, scores and origin of the networks of an export."""

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.config import Config, PatchConfig, ValidationConfig
from brats_seg.errors import UsageError
from brats_seg.evaluation.metrics import region_counts
from brats_seg.evaluation.scores import summarise_counts
from brats_seg.inference.export import CrossValidationScores, export_model, read_facts
from brats_seg.inference.model import load_model
from brats_seg.runtime.weights import Decoding, FittedPrediction
from brats_seg.training.losses import RunningSums
from brats_seg.training.state import Progress
from tests.inference_builders import CONFIG, CPU, IDENTITY, write_run

# rows: true positive, false positive, false negative, true negative; columns: WT, TC, ET
PERFECT = [[4, 4, 0], [0, 0, 0], [0, 0, 0], [12, 12, 16]]
HALF = [[2, 2, 2], [2, 2, 2], [2, 2, 2], [10, 10, 10]]


def write_fold(
    path: Path,
    *,
    training: Sequence[str],
    held_out: Sequence[str],
    seed: int = 0,
    config: Config = CONFIG,
    n_patches: int | None = None,
) -> Path:
    """Write a run that was validated on its held-out cases: the first is perfect, the rest half right."""
    rows = [PERFECT, *[HALF] * (len(held_out) - 1)]
    write_run(
        path,
        seed=seed,
        config=config,
        progress=Progress(
            sums=RunningSums(
                n_patches=len(held_out) if n_patches is None else n_patches,
                counts=dict(zip(held_out, rows, strict=True)),
            ),
            history=[{"epoch": 7, "val_dice_wt": 0.75, "val_dice_tc": 0.5, "val_dice_et": 0.25}],
        ),
        environment={"torch": "2.0", "device": "cpu", "python": "3.12"},
    )
    write_split(Split(train=tuple(training), validation=tuple(held_out)), path / SPLIT_NAME)
    return path


def card_of(folder: Path) -> str:
    return (folder / "README.md").read_text()


@pytest.fixture
def folds(tmp_path: Path) -> list[Path]:
    """Two folds of four cases."""
    return [
        write_fold(tmp_path / "fold0", training=("c", "d"), held_out=("a", "b"), seed=0),
        write_fold(tmp_path / "fold1", training=("a", "b"), held_out=("c", "d"), seed=1),
    ]


def test_the_card_of_a_run_has_its_cases_scores_and_versions(tmp_path: Path) -> None:
    run = write_fold(tmp_path / "mine", training=("c", "d", "e"), held_out=("a", "b"))

    export_model([run], tmp_path / "model", license_name="CC BY 4.0", case_ids=True)

    card = card_of(tmp_path / "model")
    assert "one network, unet, of " in card
    assert "- licence: CC BY 4.0\n" in card
    assert "| 0 | mine | 3 | 2 | 7 | 8x8x8 | cases |" in card
    assert "- trained with torch 2.0, device cpu\n" in card
    assert "Held out (2 cases):\n\n    a, b\n" in card
    assert "Trained on (3 cases):\n\n    c, d, e\n" in card
    # WT of the two cases: 1 and 0.5; ET is empty on both sides in the first
    assert "| WT | 0.750 [0.500, 1.000] | 2 | 0 |" in card
    assert "| ET | 0.750 [0.500, 1.000] | 2 | 1 |" in card
    assert "single networks" not in card


def test_the_held_out_cases_of_folds_are_summarised_together(
    folds: list[Path], tmp_path: Path
) -> None:
    export_model(folds, tmp_path / "model", case_ids=True)

    card = card_of(tmp_path / "model")
    counts = [
        region_counts(name, rows) for name, rows in zip("abcd", [PERFECT, HALF] * 2, strict=True)
    ]
    (wt, _, _) = summarise_counts(counts, np.random.default_rng(0))
    assert f"| WT | {wt.spread('dice').mean_text(4)} | 4 | 0 |" in card
    assert "Held out of network 0; trained on by network 1 (2 cases):\n\n    a, b\n" in card
    assert "Held out of network 1; trained on by network 0 (2 cases):\n\n    c, d\n" in card
    assert "scores of single networks, not of their mean" in card


def test_networks_that_share_held_out_cases_are_summarised_apart(tmp_path: Path) -> None:
    runs = [
        write_fold(tmp_path / f"run{seed}", training=("c",), held_out=("a", "b"), seed=seed)
        for seed in range(2)
    ]

    export_model(runs, tmp_path / "model", case_ids=True)

    card = card_of(tmp_path / "model")
    assert card.count("| WT | 0.750 [0.500, 1.000] | 2 | 0 |") == 2
    assert "Network 1:" in card
    assert "Held out of networks 0, 1 (2 cases):" in card


def test_a_run_without_records_is_exported_with_what_is_known(tmp_path: Path) -> None:
    export_model([write_run(tmp_path / "run")], tmp_path / "model", case_ids=True)

    card = card_of(tmp_path / "model")
    assert "Not known: no validation of the networks on whole cases is recorded." in card
    assert "The cases are not recorded." in card
    assert "| 0 | run | not known | not known | not known | 8x8x8 | cases |" in card
    assert "- licence: not stated" in card


@pytest.mark.parametrize(
    ("n_patches", "per_case", "between"), [(4, 2, True), (2, 1, True)], ids=["counted", "settings"]
)
def test_a_validation_on_patches_is_no_score(
    tmp_path: Path, n_patches: int, per_case: int, between: bool
) -> None:
    config = CONFIG.model_copy(
        update={
            "patch": PatchConfig(size=(8, 8, 8), per_case=per_case),
            "validation": ValidationConfig(patches_between=between),
        }
    )
    run = write_fold(
        tmp_path / "run", training=("c",), held_out=("a", "b"), config=config, n_patches=n_patches
    )

    export_model([run], tmp_path / "model", case_ids=True)

    assert "Not known: no validation" in card_of(tmp_path / "model")


def test_the_latest_state_of_a_run_has_no_scores(tmp_path: Path) -> None:
    """Its sums are those of an unfinished epoch."""
    run = write_fold(tmp_path / "run", training=("c",), held_out=("a", "b"))
    content = torch.load(run / "best.pt", weights_only=True)
    torch.save({**content, "optimizer": {}}, run / "last.pt")

    export_model([run / "last.pt"], tmp_path / "model", case_ids=True)

    assert "Not known: no validation" in card_of(tmp_path / "model")
    assert "Trained on (1 case):" in card_of(tmp_path / "model")


@pytest.mark.parametrize("case_ids", [None, False])
def test_ids_that_may_identify_patients_are_left_out_unless_asked_for(
    tmp_path: Path, case_ids: bool | None
) -> None:
    held_out = ("Jones", "BraTS2021_00000")
    run = write_fold(tmp_path / "run", training=("Smith",), held_out=held_out)

    export_model([run], tmp_path / "model", case_ids=case_ids)

    for path in (tmp_path / "model").glob("*.*"):
        assert not any(name in path.read_bytes() for name in (b"Smith", b"Jones", b"BraTS2021_")), (
            path
        )
    card = card_of(tmp_path / "model")
    assert "Their ids are left out." in card
    assert "| 0 | run | 1 | 2 |" in card
    assert "| WT | 0.750 [" in card


def test_ids_of_public_releases_are_named_unless_refused(tmp_path: Path) -> None:
    held_out = ("BraTS2021_00000", "BRATS_001")
    run = write_fold(tmp_path / "run", training=("Brats18_2013_2_1",), held_out=held_out)

    export_model([run], tmp_path / "model")
    export_model([run], tmp_path / "other", case_ids=False)

    assert "    Brats18_2013_2_1\n" in card_of(tmp_path / "model")
    assert "Brats18_2013_2_1" not in card_of(tmp_path / "other")


def test_an_export_of_an_exported_model_keeps_the_facts(folds: list[Path], tmp_path: Path) -> None:
    export_model(folds, tmp_path / "model", license_name="MIT", case_ids=True)

    export_model([tmp_path / "model"], tmp_path / "again", case_ids=True)
    export_model([tmp_path / "model"], tmp_path / "anonymous", case_ids=False)
    (tmp_path / "model" / "card.json").unlink()
    export_model([tmp_path / "model"], tmp_path / "older", case_ids=True)

    assert card_of(tmp_path / "again") == card_of(tmp_path / "model")
    assert "Network 1:" in card_of(tmp_path / "anonymous")
    assert "The cases are not recorded." in card_of(tmp_path / "older")


def test_the_scores_of_a_cross_validation_replace_those_of_the_validation(
    folds: list[Path], tmp_path: Path
) -> None:
    counts = [region_counts("a", HALF)]
    summaries = summarise_counts(counts, np.random.default_rng(0))
    scores = CrossValidationScores(protocol="legacy", summaries=summaries)
    model = tmp_path / "model"
    export_model(folds, model, replace=True, case_ids=True)

    export_model(folds, model, replace=True, scores=scores, case_ids=True)

    card = card_of(model)
    assert "Cross-validation, scored by the protocol legacy" in card
    assert "| WT | 0.500 | 1 | 0 |" in card
    assert "during training" not in card


def test_what_the_card_names_and_lacks_is_logged(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    run = write_fold(tmp_path / "run", training=("c",), held_out=("a",))
    caplog.set_level("INFO", "brats_seg")

    export_model([run], tmp_path / "model", case_ids=True)
    assert [record.message[:30] for record in caplog.records] == [
        "The model card has the ids of ",
        "The model card states no licen",
    ]
    caplog.clear()
    export_model([run], tmp_path / "other", license_name="CC0", case_ids=False)
    assert [record.message[:30] for record in caplog.records] == ["The model card counts the case"]


def test_fitted_settings_are_in_the_card(tmp_path: Path) -> None:
    fitted = FittedPrediction(decoding=Decoding(smallest_et_mm3=50))
    run = write_run(tmp_path / "run", fitted=fitted)

    export_model([run], tmp_path / "model", case_ids=True)

    assert "Windows: 12x12x12 voxels, overlap 0.5." in card_of(tmp_path / "model")
    assert "Less than 50 mm3 of enhancing tumour in all" in card_of(tmp_path / "model")


def test_a_run_that_started_from_other_weights_names_them(tmp_path: Path) -> None:
    run = write_fold(tmp_path / "run", training=("c",), held_out=("a",))
    content = torch.load(run / "best.pt", weights_only=True)
    start = {"path": "/home/me/runs/parent", "fingerprint": "f00"}
    content["started_from"] = {**start, "learnt_from": ("c", "z")}
    torch.save(content, run / "best.pt")

    export_model([run], tmp_path / "model", case_ids=True)

    card = card_of(tmp_path / "model")
    assert "- network 0 started from the weights of parent, fingerprint f00\n" in card
    assert "/home/me" not in card
    assert "Trained on; trained on before, by the weights that it started from (1 case):" in card
    assert "Trained on before, by the weights that it started from (1 case):\n\n    z\n" in card


@pytest.mark.parametrize("content", [b"", b"[", b"[]", b'{"networks": 3}', b"[" * 100_000])
def test_damaged_facts_stop_an_export_and_no_prediction(tmp_path: Path, content: bytes) -> None:
    export_model([write_run(tmp_path / "run")], tmp_path / "model", case_ids=True)
    (tmp_path / "model" / "card.json").write_bytes(content)

    with pytest.raises(UsageError, match=r"card\.json cannot be read: .* or remove this file"):
        export_model([tmp_path / "model"], tmp_path / "again", case_ids=True)
    assert len(load_model([tmp_path / "model"], CPU).members) == 1
    assert not (tmp_path / "again").exists()


def test_facts_of_another_number_of_networks_are_refused(tmp_path: Path) -> None:
    export_model([write_run(tmp_path / "run")], tmp_path / "model", case_ids=True)
    path = tmp_path / "model" / "card.json"
    facts = json.loads(path.read_text())
    path.write_text(json.dumps({**facts, "networks": facts["networks"] * 2}))

    with pytest.raises(UsageError, match="describes 2 networks; expected 1"):
        export_model([tmp_path / "model"], tmp_path / "again", case_ids=True)


def test_ids_cannot_break_the_card(tmp_path: Path) -> None:
    run = write_fold(tmp_path / "run", training=("c\n\n# Fake",), held_out=("a",))

    export_model([run], tmp_path / "model", license_name="MIT\n\n# Fake", case_ids=True)

    assert "\n# Fake" not in card_of(tmp_path / "model")
    facts = read_facts(tmp_path / "model")
    assert facts is not None
    assert facts.license == "MIT\\n\\n# Fake"


def test_networks_of_two_training_sets_are_named_by_their_own(tmp_path: Path) -> None:
    conventions = ("brats2017", "brats2023")
    runs = [
        write_run(
            tmp_path / f"run{seed}",
            seed=seed,
            identity=replace(IDENTITY, fingerprint=f"set{seed}", conventions=(conventions[seed],)),
        )
        for seed in range(2)
    ]

    export_model(runs, tmp_path / "model", case_ids=True)

    assert "| 8x8x8 | set0 |" in card_of(tmp_path / "model")
    assert "| 8x8x8 | set1 |" in card_of(tmp_path / "model")
    assert "| brats2017 | 4 | ET |" in card_of(tmp_path / "model")
    assert "| brats2023 | 3 | ET |" in card_of(tmp_path / "model")
