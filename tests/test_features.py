"""Test features of cases: of the shape and intensity of their tumours, and of networks."""

import logging
from dataclasses import replace
from math import isnan
from pathlib import Path

import numpy as np
import pytest
import torch
from scipy import stats
from torch import Tensor, nn

from brats_seg import find_cases, load_case
from brats_seg.cases.case import Case
from brats_seg.cases.clinical import ClinicalTable, read_clinical_files
from brats_seg.cases.find import find_inputs
from brats_seg.cases.folds import SPLIT_NAME, Split, write_split
from brats_seg.config import Config, ModelConfig, PatchConfig, ValidationConfig
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.method import prepare_scan
from brats_seg.inference.model import Model, load_model
from brats_seg.labels import BRATS2017, MODALITIES, regions_of
from brats_seg.models import autoencoder
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.survival import features
from brats_seg.survival.table import read_features
from brats_seg.voxels.grids import Spacing
from tests.builders import BRATS_AFFINE, make_label_map, make_volumes, write_arrays, write_case
from tests.inference_builders import CONFIG, CPU, IDENTITY, read_scan, write_run

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


def extract(root: Path, **options: Path | list[Path]) -> features.MappedCases[features.Row]:
    output = root.parent / "out" / "features.csv"
    return features.features_of_folder(root, output, device="cpu", precision="fp32", **options)


def numbers(row: features.Row) -> list[float]:
    return [cell for cell in row.values() if not isinstance(cell, str)]


def write_trained(path: Path, *train: str, **entries: Config | ModelIdentity | int) -> Path:
    write_run(path, **entries)
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

    def with_network(network: nn.Module) -> Model:
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
        (["autoencoder"], CONFIG, "found a segmentation run.*expected a reconstruction run"),
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


MM = (1.0, 1.0, 1.0)
SHAPE = (16, 12, 10)


def read_tumour(root: Path) -> features.Tumour:
    loaded = load_case(find_cases(root).cases[0])
    return features.tumour_of(prepare_scan(loaded, MM), loaded.label, loaded.convention)


def test_labels_lie_where_the_tissue_is_in_every_orientation(tmp_path):
    labels = make_label_map()
    labels[0, 0, 0] = 2
    arrays = [*make_volumes(), labels]
    write_arrays(tmp_path / "a" / IDS[0], arrays)
    swapped = BRATS_AFFINE[:, [1, 0, 2, 3]] * [1, 1, -1, 1]
    turned = [array.transpose(1, 0, 2)[:, :, ::-1] for array in arrays]
    write_arrays(tmp_path / "b" / IDS[0], turned, swapped)
    one, other = (read_tumour(tmp_path / name) for name in "ab")
    # enhancing tumour is the brightest in T1 with contrast agent
    assert one.image[1][one.regions[2]].min() > one.image[1][one.brain & ~one.regions[0]].max()
    assert one.regions[0].sum() == np.count_nonzero(labels)
    assert not one.brain[0, 0, 0]
    assert features.measure_shape(one) == pytest.approx(features.measure_shape(other))


def test_a_resampled_scan_is_measured_in_the_voxels_of_its_files(tmp_path):
    arrays = (*make_volumes(), make_label_map())
    write_arrays(tmp_path / IDS[0], arrays, BRATS_AFFINE @ np.diag([1, 1, 2, 1.0]))
    tumour = read_tumour(tmp_path)
    assert tumour.spacing_mm == (1, 1, 2)
    # the brain without its first voxels along X and Y, as in the files
    assert tumour.regions.shape == (3, 23, 23, 16)
    wt_ml = np.count_nonzero(make_label_map()) * 0.002
    assert features.measure_shape(tumour)["wt_ml"] == pytest.approx(wt_ml)


def make_tumour(label_map: np.ndarray, image: np.ndarray, spacing_mm: Spacing) -> features.Tumour:
    regions = regions_of(label_map.astype(np.uint8), BRATS2017)
    return features.Tumour(image=image.astype(np.float32), regions=regions, spacing_mm=spacing_mm)


def shape_of(label_map: np.ndarray, spacing_mm: Spacing = MM) -> dict[str, float]:
    image = np.ones((4, *label_map.shape))
    return features.measure_shape(make_tumour(label_map, image, spacing_mm))


def test_volumes_ratios_components_and_the_distance_are_those_of_the_voxels():
    label_map = np.zeros((10, 10, 10))
    label_map[0:4, 0, 0] = 2
    label_map[4:6, 0, 0] = 1
    label_map[6, 0, 0] = label_map[8, 8, 8] = label_map[9, 9, 9] = 4
    found = shape_of(label_map, spacing_mm=(1.0, 1.0, 2.0))
    expected = {"wt_ml": 0.018, "tc_ml": 0.01, "brain_ml": 2, "et_components": 2}
    expected |= {"tc_wt_ratio": 5 / 9, "et_wt_ratio": 3 / 9, "et_tc_ratio": 3 / 5}
    expected["wt_brain_ratio"] = 9 / 1000
    apart = 4.5 - 17 / 9
    expected["wt_centre_distance_mm"] = ((4.5 - 38 / 9) ** 2 + 5 * apart**2) ** 0.5
    assert {name: found[name] for name in expected} == pytest.approx(expected)


def test_a_ball_is_rounder_than_a_plate():
    ball = (np.indices([25] * 3) - 12) ** 2
    plate = np.zeros((40, 40, 10))
    plate[2:38, 2:38, 4:6] = 2
    round_, flat = shape_of((ball.sum(axis=0) <= 100) * 2), shape_of(plate)
    assert 0.9 < round_["wt_sphericity"] < 0.95
    assert flat["wt_sphericity"] < 0.5
    # 2.8 by the surface, an octahedron in the voxel
    assert shape_of(np.array([[[0, 2, 0]]]))["wt_sphericity"] == 1
    assert round_["wt_compactness"] == pytest.approx(round_["wt_sphericity"] ** 3)


def test_what_is_not_there_has_no_shape_and_every_case_has_the_same_features():
    label_map = np.zeros((8, 8, 8))
    empty = shape_of(label_map)
    label_map[3:5, 3:5, 3:5] = 2
    oedema = shape_of(label_map)
    assert oedema["et_ml"] == oedema["et_surface_mm2"] == oedema["et_components"] == 0
    assert oedema["et_wt_ratio"] == empty["wt_ml"] == empty["wt_brain_ratio"] == 0
    unknown = {name for name, value in oedema.items() if isnan(value)}
    assert {"et_sphericity", "et_centre_distance_mm", "et_tc_ratio"} < unknown
    assert isnan(empty["tc_wt_ratio"])
    assert list(empty) == list(oedema) == list(shape_of(np.full((8, 8, 8), 4)))


IMAGE = np.random.default_rng(0).gamma(2.0, size=(4, *SHAPE)) + 0.1
LABELS = np.zeros(SHAPE, np.uint8)
LABELS[4:10, 4:10, 2:8] = 2
LABELS[5:9, 5:9, 3:7] = 1
LABELS[6:9, 5:9, 3:7] = 4


def intensity_of(image: np.ndarray = IMAGE, label_map: np.ndarray = LABELS) -> dict[str, float]:
    return features.measure_intensity(make_tumour(label_map, image, MM))


def test_the_ten_numbers_of_the_notebook_are_taken_inside_each_region():
    """The numbers are the same with more air, which most of the notebook's volumes were."""
    values = IMAGE[1].astype(np.float32)[LABELS == 4].astype(float)
    mean, std, skew = values.mean(), values.std(), stats.skew(values)
    expected = {"skew": skew, "kurtosis": stats.kurtosis(values), "mean": mean, "std": std}
    parts = {"intensive": values[values > mean], "non_intensive": values[values < mean]}
    for name, part in parts.items():
        expected[f"{name}_share"] = len(part) / len(values)
        expected[f"{name}_skew"] = stats.skew(part)
        expected[f"{name}_skew_difference"] = skew - stats.skew(part)
    expected |= {"more_intensive_share": (values > mean + std).mean(), "p50": np.median(values)}
    padding = [(10, 14), (10, 18), (10, 20)]
    near = intensity_of()
    far = intensity_of(np.pad(IMAGE, [(0, 0), *padding]), np.pad(LABELS, padding))
    assert {name: near[f"t1c_et_{name}"] for name in expected} == pytest.approx(expected)
    names = [name for name in near if "slab" not in name]
    assert [near[name] for name in names] == pytest.approx([far[n] for n in names], nan_ok=True)
    # every modality has the same numbers in one order
    parts = [[n.removeprefix(m) for n in near if n.startswith(m)] for m in MODALITIES]
    assert list(near) == [m + part for m in MODALITIES for part in parts[0]]


@pytest.mark.parametrize("values", [[], [1.0], [1.0, 2], [0.1] * 7, [1e6 + 0.1] * 1000])
def test_too_few_or_equal_values_have_no_skewness(values):
    image, label_map = np.ones((4, 1, 1, 1100)), np.zeros((1, 1, 1100))
    image[:, 0, 0, : len(values)] = values
    label_map[0, 0, : len(values)] = 4
    measured = intensity_of(image, label_map)
    assert isnan(measured["t1c_et_skew"])
    assert isnan(measured["t1c_et_kurtosis"])
    assert isnan(measured["t1c_et_mean"]) == (not values)
    assert isnan(measured["t1c_et_intensive_share"]) == (not values)


def test_differences_are_between_neighbours_of_the_region_and_slabs_go_from_right_to_left():
    steps = np.arange(SHAPE[2]) ** 2
    image = np.ones((4, *SHAPE)) + np.arange(SHAPE[0])[:, None, None]
    image[0] = np.where(LABELS == 0, 1000, 1 + steps)
    measured = intensity_of(image)
    assert measured["t1n_wt_diff_skew"] == pytest.approx(stats.skew(np.diff(steps[2:8])))
    # sixteen sagittal slices in fifteen slabs: the first holds two
    assert (measured["t2f_slab00_mean"], measured["t2f_slab14_mean"]) == (1.5, 16)
