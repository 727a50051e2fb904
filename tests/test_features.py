"""Test features of the cases of a folder, with and without networks."""

from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.case import CaseIndex
from brats_seg.cases.clinical import ClinicalTable, read_clinical_tables, with_clinical
from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.cases.index import index_cases
from brats_seg.config import Config, ModelConfig, PatchConfig, ValidationConfig
from brats_seg.errors import UsageError
from brats_seg.models import autoencoder
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.survival.features import Extraction, extract_features, features_of_folder
from brats_seg.survival.leakage import Leakage, People
from brats_seg.survival.networks import Networks
from brats_seg.survival.table import read_features
from tests.builders import write_case
from tests.inference_builders import CPU, IDENTITY, write_run

IDS = tuple(f"BraTS2021_{number:05d}" for number in range(3))
AUTOENCODER = Config(
    model=ModelConfig(name="autoencoder", latent=64),
    patch=PatchConfig(size="whole"),
    validation=ValidationConfig(watch="val_loss"),
)
NO, YES, UNKNOWN = Leakage.NO, Leakage.YES, Leakage.UNKNOWN


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    """Use a smaller grid for the autoencoder of these tests."""
    monkeypatch.setattr(autoencoder, "GRID", (32, 32, 32))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, case_id in enumerate(IDS):
        write_case(tmp_path / "data", case_id, seed=number, labelled=number < 2)
    return tmp_path / "data"


def extract(
    root: Path, *, autoencoders=(), segmentations=(), predicted: bool = False
) -> Extraction:
    clinical = read_clinical_tables(root)
    index = index_cases(root)
    index = CaseIndex(root=root, cases=with_clinical(index.cases, clinical))
    people = People(clinical=clinical)
    networks = Networks.load(autoencoders, segmentations, CPU, people, index.cases)
    return extract_features(index, networks, predicted=predicted)


def write_trained(path: Path, *train: str, seed: int = 0, config=None, identity=IDENTITY) -> Path:
    """Write a run that was trained on the given cases."""
    write_run(path, seed=seed, identity=identity, **({"config": config} if config else {}))
    write_split(Split(train=train, validation=("held out",)), path / SPLIT_NAME)
    return path


def test_a_reference_label_map_needs_no_network(root):
    extraction = extract(root)

    first, second = extraction.rows
    assert [row.case_id for row in extraction.rows] == list(IDS[:2])
    assert first.labels_from == "reference"
    assert first.labels_leakage is None
    assert [one.name for one in first.features] == [one.name for one in second.features]
    assert first.features != second.features


def test_a_case_without_label_map_and_network_is_a_failure(root):
    (failure,) = extract(root).failures

    assert failure.case_id == IDS[2]
    assert "found no label map; expected one, or a network to predict it" in failure.message
    assert "--model" in failure.message


def test_a_broken_scan_does_not_stop_the_others(root):
    (root / IDS[0] / f"{IDS[0]}_t2.nii.gz").write_bytes(b"broken")

    extraction = extract(root)

    assert [row.case_id for row in extraction.rows] == [IDS[1]]
    assert IDS[0] in extraction.failures[0].message
    assert f"{IDS[0]}_t2.nii.gz" in extraction.failures[0].message


def test_age_and_resection_come_from_the_tables(root):
    (root / "survival_info.csv").write_text(
        f"case_id,Age,Survival_days,Extent_of_Resection\n{IDS[0]},61.5,NA,GTR\n"
    )

    first, second = extract(root).rows

    ages = [
        next(one.value for one in row.features if one.name == "age_years")
        for row in (first, second)
    ]
    assert ages[0] == 61.5
    assert np.isnan(ages[1])
    assert (first.resection, second.resection) == ("GTR", "")


def test_a_label_map_is_predicted_where_there_is_no_reference(root, tmp_path):
    run = write_trained(tmp_path / "run", IDS[0])

    extraction = extract(root, segmentations=[run])

    assert [row.labels_from for row in extraction.rows] == ["reference", "reference", "prediction"]
    assert [row.labels_leakage for row in extraction.rows] == [None, None, NO]


def test_label_maps_can_be_predicted_and_their_leakage_is_noted(root, tmp_path):
    runs = [write_trained(tmp_path / f"fold{n}", IDS[n], IDS[2], seed=n) for n in range(2)]

    rows = extract(root, segmentations=runs, predicted=True).rows

    assert {row.labels_from for row in rows} == {"prediction"}
    assert [row.labels_leakage for row in rows] == [NO, NO, YES]


def test_a_case_is_segmented_by_the_run_that_was_not_trained_on_it(root, tmp_path):
    """Two runs with other weights: with both, the case is measured as with the right one alone."""
    seen = write_trained(tmp_path / "seen", IDS[0], seed=1)
    unseen = write_trained(tmp_path / "unseen", IDS[1], seed=2)

    def features(*runs):
        return extract(root, segmentations=runs, predicted=True).rows[0].features

    both = [one.value for one in features(seen, unseen)]
    assert both == pytest.approx([one.value for one in features(unseen)], nan_ok=True)
    assert both != pytest.approx([one.value for one in features(seen)], nan_ok=True)


def test_predicted_label_maps_need_a_run(root):
    with pytest.raises(UsageError, match="expected a run to predict them: --model"):
        extract(root, predicted=True)


def test_every_autoencoder_has_a_vector_and_its_leakage(root, tmp_path):
    runs = [
        write_trained(tmp_path / "ae0", IDS[0], config=AUTOENCODER, seed=0),
        write_run(tmp_path / "ae1", config=AUTOENCODER, seed=1),
    ]

    first, second = extract(root, autoencoders=runs).rows

    latent = {one.name: one.value for one in first.features if one.name.startswith("latent")}
    assert len(latent) == 128
    assert {"latent0_000", "latent0_063", "latent1_063"} <= latent.keys()
    assert latent["latent0_000"] != latent["latent1_000"]
    assert first.latent_leakage == (YES, UNKNOWN)
    assert second.latent_leakage == (NO, UNKNOWN)
    assert [one.value for one in second.features][-128:] != [*latent.values()]


def test_modalities_reach_the_autoencoder_in_the_order_of_its_training(root, tmp_path):
    """The notebook trained on one order of the modalities and predicted with another."""
    other = ModelIdentity(
        conventions=("brats2017",),
        patch=(8, 8, 8),
        fingerprint="cases",
        modalities=("t2f", "t1n", "t1c", "t2w"),
    )
    usual = write_trained(tmp_path / "usual", config=AUTOENCODER)
    swapped = write_trained(tmp_path / "swapped", config=AUTOENCODER, identity=other)
    people = People(clinical=ClinicalTable(rows={}))

    networks = Networks.load([usual, swapped], [], CPU, people, ())

    channels = [encoder.autoencoder.member.channels for encoder in networks.encoders]
    assert channels == [(0, 1, 2, 3), (3, 0, 1, 2)]


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ("autoencoders", r"found a segmentation run.*expected a reconstruction run"),
        ("segmentations", r"found a reconstruction run.*expected a segmentation run"),
    ],
)
def test_a_run_of_the_other_kind_is_refused(root, tmp_path, given, message):
    config = None if given == "autoencoders" else AUTOENCODER
    run = write_trained(tmp_path / "run", config=config)

    with pytest.raises(UsageError, match=message):
        extract(root, **{given: [run]})


def test_runs_of_other_voxels_are_refused(root, tmp_path):
    coarse = ModelIdentity(
        conventions=(), patch=(8, 8, 8), fingerprint="", spacing_mm=(2.0, 2.0, 2.0)
    )
    runs = [
        write_trained(tmp_path / "a", config=AUTOENCODER),
        write_trained(tmp_path / "b", config=AUTOENCODER, identity=coarse),
    ]

    with pytest.raises(UsageError, match="trained on scans of different spacings"):
        extract(root, autoencoders=runs)


def test_an_autoencoder_of_patches_is_refused(root, tmp_path):
    """It was never trained on whole brains."""
    config = AUTOENCODER.model_copy(update={"patch": PatchConfig(size=(8, 8, 8))})
    run = write_trained(tmp_path / "run", config=config)

    with pytest.raises(UsageError, match=r"trained on patches of 8x8x8 voxels; .*--patch whole"):
        extract(root, autoencoders=[run])


def test_a_folder_is_one_function_that_prints_nothing(root, tmp_path, capsys):
    output = tmp_path / "out" / "features.csv"

    found = features_of_folder(root, output, prepared_path=tmp_path / "prepared", device="cpu")

    assert [row.case_id for row in found.rows] == list(IDS[:2])
    assert [(failure.case_id, failure.error) for failure in found.failures] == [
        (IDS[2], "CaseError")
    ]
    assert read_features(output).case_ids == IDS[:2]
    assert (output.parent / "failures.csv").read_text().startswith("case_id,error,message\n")
    assert capsys.readouterr().out == ""
