"""One case from files to a label map: the right voxels, on the scan's own grid."""

from pathlib import Path

import nibabel as nib
import numpy as np
import pytest
import torch

from brats_seg.cases.inputs import find_inputs
from brats_seg.data.fold import open_fold
from brats_seg.data.loader import whole_case
from brats_seg.errors import CaseError
from brats_seg.inference.model import Model, load_model
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.predict import CaseResult, predict_scan
from brats_seg.inference.scan import Scan, read_scan
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import BRATS2017, BRATS2023, regions_of
from brats_seg.progress import untracked
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import Decoding
from brats_seg.training.trainer import Trainer
from brats_seg.training.validation import case_predictor
from tests.builders import BRATS_AFFINE, make_volumes, write_case, write_nifti
from tests.inference_builders import Pointwise, make_model
from tests.test_trainer import settings as training_settings

NAMES = ("t1", "t1ce", "t2", "flair")
SETTINGS = PredictionSettings(preview=False)


def write_scan(
    folder: Path, images: np.ndarray, affine: np.ndarray, codes: tuple[int, int] = (1, 1)
) -> Path:
    for name, image in zip(NAMES, images, strict=True):
        path = write_nifti(folder / f"case_{name}.nii.gz", image, affine)
        stored = nib.load(path)
        stored.set_qform(affine, code=codes[0])
        stored.set_sform(affine, code=codes[1])
        nib.save(nib.Nifti1Image(np.asarray(stored.dataobj), None, stored.header), path)
    return folder


def predict(
    folder: Path, model: Model | None = None, settings: PredictionSettings = SETTINGS
) -> tuple[Scan, CaseResult]:
    (found,) = find_inputs([folder])
    scan = read_scan(found, (1.0, 1.0, 1.0))
    return scan, predict_scan(model or make_model(), scan, settings)


def written(folder: Path, output: Path, settings: PredictionSettings = SETTINGS) -> nib.Nifti1Image:
    scan, result = predict(folder, settings=settings)
    names = OutputFolder(output).write_case(scan, result, settings)
    return nib.load(output / names[-1])


def turned_scans(folder: Path) -> list[Path]:
    """Write one scan in three orientations: as BraTS, RAS, and with axes in another order."""
    images = make_volumes(seed=2)
    usual = write_scan(folder / "lps", images, BRATS_AFFINE)
    flip = np.diag([-1.0, -1.0, 1.0, 1.0])
    flip[:2, 3] = np.array(images.shape[1:3]) - 1
    ras = write_scan(folder / "ras", images[:, ::-1, ::-1], BRATS_AFFINE @ flip)
    # voxel (i, j, k) of the third is voxel (k, i, j) of the first
    moved = BRATS_AFFINE @ np.eye(4)[[2, 0, 1, 3]]
    sagittal = write_scan(folder / "sag", images.transpose(0, 2, 3, 1), moved)
    return [usual, ras, sagittal]


def test_every_orientation_gives_the_same_tumour_in_the_same_place(tmp_path: Path) -> None:
    """With a network to which the direction of the axes matters."""
    images = [written(folder, tmp_path / f"{folder.name}-out") for folder in turned_scans(tmp_path)]

    reference = nib.as_closest_canonical(images[0])
    assert np.asarray(reference.dataobj).any()
    for image in images[1:]:
        canonical = nib.as_closest_canonical(image)
        np.testing.assert_allclose(canonical.affine, reference.affine, atol=1e-6)
        assert np.array_equal(np.asarray(canonical.dataobj), np.asarray(reference.dataobj))


@pytest.mark.parametrize("codes", [(1, 1), (0, 2), (4, 0), (0, 0)])
@pytest.mark.parametrize("place", range(3))
def test_the_label_map_has_the_geometry_of_the_scan(
    tmp_path: Path, place: int, codes: tuple[int, int]
) -> None:
    folder = turned_scans(tmp_path)[place]
    original = nib.load(folder / "case_t1.nii.gz")
    for name in NAMES:
        image = nib.load(folder / f"case_{name}.nii.gz")
        image.set_qform(original.affine if codes[0] else None, code=codes[0])
        image.set_sform(original.affine if codes[1] else None, code=codes[1])
        array = np.asarray(image.dataobj)
        nib.save(nib.Nifti1Image(array, None, image.header), folder / f"case_{name}.nii.gz")
    scan = nib.load(folder / "case_t1.nii.gz")

    label_map = written(folder, tmp_path / "out")

    assert label_map.shape == scan.shape
    assert label_map.get_data_dtype() == np.uint8
    np.testing.assert_array_equal(label_map.affine, scan.affine)
    for field in ("qform_code", "sform_code"):
        assert label_map.header[field] == scan.header[field]
    if codes[0]:
        np.testing.assert_allclose(label_map.get_qform(), scan.get_qform(), atol=1e-6)
    assert label_map.header.get_zooms() == scan.header.get_zooms()
    assert set(np.unique(np.asarray(label_map.dataobj))) == {0, 1, 2, 4}


def test_thick_slices_come_back_on_their_own_grid(tmp_path: Path) -> None:
    affine = np.diag([-1.0, -1.0, 2.0, 1.0])
    folder = write_scan(tmp_path / "scan", make_volumes((24, 24, 12), seed=2), affine)

    label_map = written(folder, tmp_path / "out")

    assert label_map.shape == (24, 24, 12)
    np.testing.assert_array_equal(label_map.affine, affine)
    assert np.asarray(label_map.dataobj).any()


def test_volumes_count_the_voxels_of_the_scan(tmp_path: Path) -> None:
    affine = np.diag([-1.0, -1.0, 2.0, 1.0])
    folder = write_scan(tmp_path / "scan", make_volumes((24, 24, 12), seed=2), affine)

    _, result = predict(folder)

    wt = regions_of(result.label_map, result.convention)[0]
    assert result.volumes[0].ml == pytest.approx(wt.sum() * 2 / 1000)


def test_nothing_is_found_in_the_air(tmp_path: Path) -> None:
    """Whatever a network makes of zeros; here everything is tumour."""
    folder = write_case(tmp_path, labelled=False)

    _, result = predict(
        folder, settings=PredictionSettings(decoding=Decoding(thresholds=(0, 0, 0)))
    )

    air = (make_volumes() == 0).all(axis=0)
    assert not result.label_map[air].any()
    assert (result.label_map[~air] == 4).all()


def test_labels_follow_the_release_of_the_scan_or_what_is_asked_for(tmp_path: Path) -> None:
    legacy = write_case(tmp_path, "BraTS2021_00000", labelled=False)
    recent = write_case(tmp_path, "BraTS-GLI-00000-000", labelled=False)

    assert predict(legacy)[1].convention == BRATS2017
    assert predict(recent)[1].convention == BRATS2023
    asked = predict(legacy, settings=PredictionSettings(labels="brats2023"))[1]
    assert set(np.unique(asked.label_map)) == {0, 1, 2, 3}


def test_probabilities_and_uncertainty_lie_on_the_grid_of_the_scan(tmp_path: Path) -> None:
    folder = turned_scans(tmp_path)[2]
    settings = PredictionSettings(probabilities=True, uncertainty=True, preview=False)
    label_map = written(folder, tmp_path / "out", settings)

    wt, tc, et = (
        np.asarray(nib.load(tmp_path / "out" / "probabilities" / f"sag-{region}.nii.gz").dataobj)
        for region in ("wt", "tc", "et")
    )
    uncertainty = nib.load(tmp_path / "out" / "uncertainty" / "sag.nii.gz")

    labels = np.asarray(label_map.dataobj)
    assert np.array_equal(labels == 4, et > 0.5)
    assert np.array_equal(labels > 0, (wt > 0.5) | (tc > 0.5) | (et > 0.5))
    np.testing.assert_array_equal(uncertainty.affine, label_map.affine)
    bits = np.asarray(uncertainty.dataobj)
    inside = np.clip([wt, tc, et], 1e-7, 1 - 1e-7).astype(np.float64)
    expected = -(inside * np.log2(inside) + (1 - inside) * np.log2(1 - inside))
    brain = wt > 0
    np.testing.assert_allclose(bits[brain], np.max(expected, axis=0)[brain], atol=5e-3)
    assert not bits[~brain].any()


def test_a_case_is_predicted_as_the_trainer_validated_it(tmp_path: Path) -> None:
    for number in range(6):
        write_case(tmp_path / "scans", f"BraTS2021_{number:05d}", seed=number)
    config = training_settings("training.n_epochs=1", "optimizer.lr=0.05")
    prepared = tmp_path / "prepared"
    data = open_fold(tmp_path / "scans", fold=0, config=config, prepared_path=prepared)
    Trainer(data=data, config=config, run_path=tmp_path / "run").run(track=untracked)
    device = choose_device("cpu", "fp32")
    model = load_model([tmp_path / "run"], device)
    sample = whole_case(prepared, "BraTS2021_00003")
    predictor = case_predictor(config, device, model.members[0].patch)
    with torch.inference_mode():
        logits = predictor(model.members[0].network, sample.image)

    settings = PredictionSettings(overlap=config.validation.overlap)
    scan, result = predict(tmp_path / "scans" / "BraTS2021_00003", model, settings)

    found = regions_of(result.label_map, BRATS2017)[(slice(None), *scan.box.slices)]
    expected = (logits > 0).numpy() & (sample.image != 0).any(0).numpy()
    assert np.array_equal(found[2], expected[2])
    assert np.array_equal(found[1], expected[1] | expected[2])
    assert np.array_equal(found[0], expected.any(axis=0))


def test_a_network_that_gives_no_numbers_is_not_taken_for_one_that_finds_nothing(
    tmp_path: Path,
) -> None:
    network = Pointwise()
    network.steepness.data[...] = np.nan

    with pytest.raises(CaseError, match=r"probabilities that are no numbers.*--precision fp32"):
        predict(write_case(tmp_path), make_model(network))


@pytest.mark.real
def test_a_real_scan_keeps_its_geometry(real_data: Path, tmp_path: Path) -> None:
    folder = real_data / "unlabelled" / "TCGA-FG-6692_atlas"

    label_map = written(folder, tmp_path, PredictionSettings(windows="whole", preview=False))

    (path,) = folder.glob("*t1_bet*")
    scan = nib.load(path)
    assert label_map.shape == scan.shape
    np.testing.assert_array_equal(label_map.affine, scan.affine)
    assert label_map.header.get_zooms() == scan.header.get_zooms()
    for field in ("qform_code", "sform_code", "quatern_b", "quatern_c", "quatern_d"):
        np.testing.assert_allclose(label_map.header[field], scan.header[field], atol=1e-6)
