"""Test that models of nnU-Net predict as nnU-Net does, and that others are refused."""

import json
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
import torch
from scipy.ndimage import binary_fill_holes, gaussian_filter

from brats_seg import PredictionSettings, export_model, load_case
from brats_seg.cases.find import find_inputs
from brats_seg.errors import UsageError
from brats_seg.inference.predict import Predictor
from brats_seg.labels import BRATS2017, BRATS2023
from tests.builders import write_case
from tests.foreign_builders import (
    TISSUE_LABELS,
    nnunet_network,
    predict,
    resampling,
    write_fold,
    write_nnunet,
)


def load(*models: Path) -> Predictor:
    return Predictor.load(models, PredictionSettings(device="cpu", precision="fp32"))


def oracle(
    case: Path, networks: list[torch.nn.Module], *, mirrored: bool = False
) -> npt.NDArray[np.float32]:
    """Return the logits (L, X, Y, Z) of networks, computed window by window as nnU-Net documents it."""
    files = [next(case.glob(f"*_{name}.nii.gz")) for name in ("flair", "t1", "t1ce", "t2")]
    images = np.stack([nib.load(file).get_fdata().astype(np.float32).T for file in files])
    images = images.transpose(0, 2, 1, 3)
    mask = binary_fill_holes((images != 0).any(axis=0))
    box = tuple(slice(int(i.min()), int(i.max()) + 1) for i in np.nonzero(mask))
    crop, inside = images[:, *box], mask[box]
    for image in crop:
        image[inside] = (image[inside] - image[inside].mean()) / image[inside].std()
    patch = (16, 8, 16)
    point = np.zeros(patch)
    point[tuple(n // 2 for n in patch)] = 1
    weights = torch.from_numpy(gaussian_filter(point, [n / 8 for n in patch], mode="constant"))
    flips = [[2 + a for a in range(3) if bits >> a & 1] for bits in range(8 if mirrored else 1)]
    total, count, voxels = 0.0, torch.zeros(inside.shape), torch.from_numpy(crop)[None]
    slices = [
        [slice(start, start + p) for start in starts(n, p)]
        for n, p in zip(inside.shape, patch, strict=True)
    ]
    for window in product(*slices):
        image = voxels[:, :, *window]
        with torch.no_grad():
            passes = [network(image.flip(f)).flip(f) for network in networks for f in flips]
        logits = (sum(passes) / len(passes))[0]
        if isinstance(total, float):
            total = torch.zeros(len(logits), *inside.shape)
        total[:, *window] += logits * weights
        count[*window] += weights
    whole = np.full((len(total), *mask.shape), -9, dtype=np.float32)
    whole[0 if len(total) == 4 else slice(0, 0)] = 9
    whole[:, *box] = (total / count).numpy()
    return whole.transpose(0, 2, 1, 3).transpose(0, 3, 2, 1)


def starts(size: int, length: int) -> list[int]:
    n = int(np.ceil((size - length) / (length / 2))) + 1
    return [round(i * (size - length) / max(1, n - 1)) for i in range(n)]


def painted(regions: npt.NDArray[np.bool_]) -> npt.NDArray[np.uint8]:
    """Return the label map of BraTS 2017 for region masks, later ones over earlier ones."""
    label_map = np.zeros(regions.shape[1:], dtype=np.uint8)
    for region, value in zip(regions, (2, 1, 4), strict=True):
        label_map[region] = value
    return label_map


@pytest.mark.parametrize("is_residual", [False, True])
def test_regions_are_those_of_nnunet(tmp_path: Path, case: Path, is_residual: bool) -> None:
    model = write_nnunet(tmp_path / "model", is_residual=is_residual)
    network = nnunet_network(3, seed=0, is_residual=is_residual)
    result = predict(model, case)
    assert len(np.unique(result.label_map)) > 2
    assert result.convention == BRATS2017
    np.testing.assert_array_equal(result.label_map, painted(oracle(case, [network]) > 0))


def test_folds_and_mirror_images_are_averaged_as_logits(tmp_path: Path, case: Path) -> None:
    model = write_nnunet(tmp_path / "model", labels=TISSUE_LABELS, n_folds=2)
    networks: list[torch.nn.Module] = [nnunet_network(4, seed=n) for n in range(2)]
    labels = np.array([0, 2, 1, 4], dtype=np.uint8)
    for mirrored in (False, True):
        found = predict(model, case, tta=mirrored).label_map
        expected = labels[oracle(case, networks, mirrored=mirrored).argmax(axis=0)]
        np.testing.assert_array_equal(found, expected)


def test_one_fold_can_be_given_alone(tmp_path: Path, case: Path, monkeypatch) -> None:
    model = write_nnunet(tmp_path / "model", n_folds=2)
    networks = [nnunet_network(3, seed=n) for n in range(2)]
    expected = painted(oracle(case, networks[1:]) > 0)
    monkeypatch.chdir(model / "fold_1")
    for path in (model / "fold_1", Path(), Path("checkpoint_final.pth")):
        np.testing.assert_array_equal(predict(path, case).label_map, expected)


@pytest.mark.parametrize("spacing", [[2.0, 1.5, 1.25], [5.0, 1.2, 1.2]])
def test_scans_are_resampled_and_back(tmp_path: Path, case: Path, spacing: list[float]) -> None:
    model = write_nnunet(tmp_path / "model", configuration={"spacing": spacing})
    predictor = load(model)
    scan = predictor.prepare(load_case(find_inputs([case])[0]))
    given = predictor.model.method.to_network(scan)
    y, z, x = scan.image.shape[2], scan.image.shape[3], scan.image.shape[1]
    edges = zip((y, z, x), spacing, strict=True)
    assert given.image.shape[1:] == tuple(round(n / mm) for n, mm in edges)
    # a constant stays one, there and back
    back = given.to_volume(torch.full((3, *given.image.shape[1:]), 2.0))
    assert back.shape == (3, *scan.image.shape[1:])
    np.testing.assert_allclose(back, 1 / (1 + np.exp(-2)), rtol=1e-5)


def test_the_fingerprint_changes_with_the_weights_and_not_with_the_folder(tmp_path: Path) -> None:
    models = [write_nnunet(tmp_path / name, n_folds=1 + (name == "c")) for name in "abc"]
    one, again, other = (load(model).model.fingerprint for model in models)
    assert one == again != other


def test_scans_whose_names_show_no_release_get_the_labels_of_the_model(tmp_path: Path) -> None:
    labels = {"background": 0, "NCR": 1, "ED": 2, "ET": 3}
    model = write_nnunet(tmp_path / "model", labels=TISSUE_LABELS)
    dataset = json.loads((model / "dataset.json").read_text()) | {"labels": labels}
    (model / "dataset.json").write_text(json.dumps(dataset))
    assert predict(model, write_case(tmp_path / "scans", "mine")).convention == BRATS2023


class _Code:
    def __reduce__(self) -> tuple[Callable[..., Any], tuple[str]]:
        return print, ("code of the checkpoint was run",)


THREE = nnunet_network(3, seed=0)


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        (lambda fold: (fold / "checkpoint_final.pth").unlink(), "no checkpoint_final.pth in"),
        (lambda fold: write_fold(fold, THREE, logging=_Code()), "can be read: it holds something"),
        (lambda fold: write_fold(fold, nnunet_network(4, seed=0)), "checkpoint_final.pth cannot"),
        (lambda fold: (fold.parent / "plans.json").write_text("{"), "plans.json cannot be used"),
    ],
)
def test_a_model_with_missing_or_damaged_files_is_refused(tmp_path, capsys, damage, message):
    model = write_nnunet(tmp_path / "model", n_folds=2)
    damage(model / "fold_1")
    with pytest.raises(UsageError, match=message):
        load(model)
    assert "code of the checkpoint" not in capsys.readouterr().out


def configured(**values: Any) -> dict[str, Any]:
    return {"configuration": values}


MAMBA = {"network_class_name": "a.Mamba", "arch_kwargs": {}}
"""Entries of the configuration that we do not do."""


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"channels": {"0": "CT"}}, "takes the channels CT; expected T1, T1 with contrast"),
        ({"channels": dict.fromkeys("0123", "T1w")}, "takes the channels T1w, T1w, T1w, T1w"),
        ({"labels": {"background": 0, "liver": [1, 2], "tumour": 2}}, "background, liver, tum"),
        ({"labels": TISSUE_LABELS | {"cavity": 4}}, "enhancing tumor, cavity; expected oedema"),
        ({"plans": {"configurations": {}}}, "plans.json cannot be used"),
        (configured(normalization_schemes=["CTNormalization"]), "expected 'ZScoreNormalization'"),
        (configured(patch_size=[16, 16]), "plans.json cannot be used: patch"),
        (configured(previous_stage="3d_lowres"), "plans.json cannot be used: previous_stage"),
        (configured(resampling_fn_data="resample_torch"), "resampling_fn_data: .*resample_torch"),
        (
            configured(resampling_fn_data_kwargs=resampling(1)),
            "resampling_fn_data_kwargs.order: expected 3 .got 1",
        ),
        (
            configured(resampling_fn_probabilities_kwargs=resampling(1, force_separate_z=True)),
            "resampling_fn_probabilities_kwargs.force_separate_z: .*None",
        ),
        # nnU-Net would take slices in another way
        (configured(resampling_fn_data_kwargs=resampling(3, order_z=1)), "order_z: expected 0"),
        (
            configured(resampling_fn_data_kwargs=resampling(3, separate_z_anisotropy_threshold=9)),
            "separate_z_anisotropy_threshold: Extra",
        ),
        (configured(architecture=MAMBA), "class_name: .*ResidualEncoderUNet.* .got 'a.Mamba'"),
    ],
)
def test_another_model_is_refused(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    model = write_nnunet(tmp_path / "model", **changes)
    with pytest.raises(UsageError, match=message):
        load(model)


def test_it_is_neither_averaged_with_others_nor_exported(tmp_path: Path) -> None:
    model = write_nnunet(tmp_path / "model")
    with pytest.raises(UsageError, match="only `predict` takes it, and alone"):
        load(model, model)
    with pytest.raises(UsageError, match="only `predict` takes it, and alone"):
        export_model([model], tmp_path / "exported")
