"""Test features of the cases of a folder, with and without networks."""

import logging
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from brats_seg.cases.case import Case
from brats_seg.cases.clinical import ClinicalTable, read_clinical_files
from brats_seg.cases.find import find_inputs
from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.config import Config, ModelConfig, PatchConfig, ValidationConfig
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.model import load_model
from brats_seg.models import autoencoder
from brats_seg.survival import features
from brats_seg.survival.table import read_features
from tests.builders import write_case
from tests.inference_builders import CPU, IDENTITY, read_scan, write_run

IDS = tuple(f"BraTS2021_{number:05d}" for number in range(3))
AUTOENCODER = Config(
    model=ModelConfig(name="autoencoder", latent=64),
    patch=PatchConfig(size="whole"),
    validation=ValidationConfig(watch="val_loss"),
)
NO_TABLE = ClinicalTable(rows={})


@pytest.fixture(autouse=True)
def small_grid(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(autoencoder, "GRID", (32, 32, 32))


@pytest.fixture
def root(tmp_path: Path) -> Path:
    for number, case_id in enumerate(IDS):
        write_case(tmp_path / "data", case_id, seed=number, labelled=number < 2)
    return tmp_path / "data"


def extract(root: Path, **options):
    output = root.parent / "out" / "features.csv"
    return features.features_of_folder(root, output, device="cpu", precision="fp32", **options)


def numbers(row) -> list[float]:
    return [cell for cell in row.values() if not isinstance(cell, str)]


def write_trained(path: Path, *train: str, seed: int = 0, config=None, identity=IDENTITY) -> Path:
    write_run(path, seed=seed, identity=identity, **({"config": config} if config else {}))
    write_split(Split(train=train, validation=("held out",)), path / SPLIT_NAME)
    return path


def test_a_reference_label_map_needs_no_network(root, capsys):
    (root / "survival_info.csv").write_text(
        f"case_id,Age,Survival_days,Extent_of_Resection\n{IDS[0]},61.5,NA,GTR\n"
    )
    extraction = extract(root)
    first, second = extraction.results
    assert [row["case_id"] for row in extraction.results] == list(IDS[:2])
    assert (first["labels_from"], first["labels_seen"]) == ("reference", "")
    assert list(first) == list(second)
    assert first["wt_ml"] != second["wt_ml"]
    # age and resection come from the tables
    assert (first["age_years"], first["resection"], second["resection"]) == (61.5, "GTR", "")
    assert np.isnan(second["age_years"])
    [failure] = extraction.failures
    assert failure.case_id == IDS[2]
    assert "found no label map; expected one, or a network" in failure.message
    assert read_features(root.parent / "out" / "features.csv")["case_id"].tolist() == [*IDS[:2]]
    assert capsys.readouterr().out == ""


def test_a_case_is_segmented_by_the_run_that_was_not_trained_on_it(root, tmp_path):
    """With two runs of other weights, a case is measured as with the right one alone."""
    seen = write_trained(tmp_path / "seen", IDS[0], IDS[2], seed=1)
    unseen = write_trained(tmp_path / "unseen", IDS[1], IDS[2], seed=2)
    # where there is a reference, it is measured
    mixed = extract(root, segmentations=[unseen]).results
    for path in root.rglob("*seg*"):
        path.unlink()
    both = extract(root, segmentations=[seen, unseen]).results
    alone = extract(root, segmentations=[unseen]).results
    assert [row["labels_seen"] for row in both] == ["no", "no", "yes"]
    assert numbers(both[0]) == pytest.approx(numbers(alone[0]), nan_ok=True)
    assert numbers(both[1]) != pytest.approx(numbers(alone[1]), nan_ok=True)
    assert [row["labels_from"] for row in mixed] == ["reference", "reference", "prediction"]
    assert [row["labels_seen"] for row in mixed] == ["", "", "yes"]


def test_an_autoencoder_has_a_vector_and_says_whom_it_was_trained_on(root, tmp_path):
    run = write_trained(tmp_path / "ae", IDS[0], config=AUTOENCODER)
    first, second = extract(root, autoencoder=run).results
    names = [name for name in first if name.startswith("latent0_0")]
    assert names == [f"latent0_{index:03d}" for index in range(64)]
    assert [row["latent0_seen"] for row in (first, second)] == ["yes", "no"]
    assert [first[name] for name in names] != [second[name] for name in names]


class Encoder(nn.Module):
    """Encodes an image as the mean of each channel, or as given."""

    def __init__(self, *latent: float) -> None:
        super().__init__()
        self.latent = latent

    def encode(self, image: Tensor) -> Tensor:
        return torch.tensor([self.latent]) if self.latent else image.mean(dim=(2, 3, 4))


def test_a_scan_is_encoded_in_the_order_of_the_network_and_must_be_finite(root, tmp_path):
    """The notebook trained on one order of the modalities and predicted with another."""
    scan = read_scan(find_inputs([root])[0])
    before = scan.image.copy()
    identity = replace(IDENTITY, modalities=("t2f", "t1n", "t1c", "t2w"))
    run = write_trained(tmp_path / "run", config=AUTOENCODER, identity=identity)
    model = features.load_networks(run, [], CPU, NO_TABLE, ()).autoencoder

    def with_network(network: nn.Module):
        return replace(model, members=(replace(model.members[0], network=network),))

    latent = features.encode(with_network(Encoder()), scan)
    assert list(latent) == [f"latent0_00{index}" for index in range(4)]
    means = scan.image.mean(axis=(1, 2, 3))[[3, 0, 1, 2]]
    assert [*latent.values()] == pytest.approx(means.tolist(), abs=1e-6)
    assert np.array_equal(scan.image, before)
    with pytest.raises(CaseError, match="NaN or infinity in 2 values"):
        features.encode(with_network(Encoder(1.0, np.nan, np.inf)), scan)


PATCHES = AUTOENCODER.model_copy(update={"patch": PatchConfig(size=(8, 8, 8))})


@pytest.mark.parametrize(
    ("kinds", "config", "message"),
    [
        (["autoencoder"], None, "found a segmentation run.*expected a reconstruction run"),
        (["segmentations"], AUTOENCODER, "a reconstruction run.*expected a segmentation run"),
        (["autoencoder"], PATCHES, r"trained on patches of 8x8x8 voxels; .*--patch whole"),
        (["autoencoder", "segmentations"], AUTOENCODER, "different spacings"),
    ],
)
def test_runs_that_do_not_fit_are_refused(root, tmp_path, kinds, config, message):
    identity = replace(IDENTITY, spacing_mm=(2.0, 2.0, 2.0))
    run = write_trained(tmp_path / "run", config=config, identity=identity)
    other = run if len(kinds) == 1 else write_trained(tmp_path / "other")
    values = {"autoencoder": run, "segmentations": [other]}
    with pytest.raises(UsageError, match=message):
        extract(root, **{kind: values[kind] for kind in kinds})


MAPPING = "BraTS_2018_subject_ID,BraTS_2020_subject_ID\nA,BraTS20_Training_001\n"
JOINED = Case(case_id="A", patient_id="person", release="brats2023-gli")


@pytest.mark.parametrize(
    ("train", "case_id", "patient_id", "seen"),
    [
        ("A", "held", "held", "no"),
        # ids that the index or a table joins; others are in `test_weights.py`
        ("A", "B", "person", "yes"),
        ("A", "BraTS20_Training_001", "another", "yes"),
        ("A", "BraTS20_Training_002", "another", "no"),
        (None, "A", "A", "unknown"),
    ],
)
def test_a_patient_is_seen_under_every_id(tmp_path, caplog, train, case_id, patient_id, seen):
    """A checkpoint belongs to the run that it lies in, which may lack the record of its cases."""
    (tmp_path / "name_mapping.csv").write_text(MAPPING)
    clinical = read_clinical_files([tmp_path / "name_mapping.csv"])
    write_run(tmp_path)
    if train:
        write_split(Split(train=(train,), validation=("held",)), tmp_path / SPLIT_NAME)
    with caplog.at_level(logging.WARNING):
        for path in (tmp_path, tmp_path / "best.pt"):
            model = features.with_patients(load_model([path], CPU), path, clinical, [JOINED])
            assert model.seen(*features.patient_ids(clinical, case_id, patient_id)) == seen
    assert ("does not name all cases" in caplog.text) == (train is None)
