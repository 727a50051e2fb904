"""Test the preview of a case."""

from pathlib import Path

import matplotlib.image
import numpy as np
import pytest

from brats_seg.cases.find import find_inputs
from brats_seg.figures.draw import draw as figure
from brats_seg.inference.model import Model
from brats_seg.inference.predict import predict_scan
from brats_seg.inference.results import OutputFolder, write_preview
from brats_seg.inference.settings import PredictionSettings
from brats_seg.runtime.weights import Decoding
from tests.builders import make_volumes, write_case, write_nifti
from tests.inference_builders import make_model, read_scan


def draw(folder: Path, path: Path, model: Model | None = None) -> np.ndarray:
    (found,) = find_inputs([folder])
    scan = read_scan(found, (1.0, 1.0, 1.0))
    write_preview(scan, predict_scan(model or make_model(), scan), path)
    return matplotlib.image.imread(path)


def n_coloured(picture: np.ndarray) -> int:
    """Count pixels that are not grey."""
    return int((np.ptp(picture[..., :3], axis=-1) > 0.2).sum())


def test_a_tumour_is_outlined(tmp_path: Path) -> None:
    folder = write_case(tmp_path, labelled=False)

    with_tumour = draw(folder, tmp_path / "a.png")
    without = draw(
        folder, tmp_path / "b.png", make_model(decoding=Decoding(thresholds=(1 - 1e-9,) * 3))
    )

    assert with_tumour.shape == (990, 1350, 4)
    # the legend is coloured in both
    assert n_coloured(with_tumour) > n_coloured(without) + 500


@pytest.mark.parametrize("affine", [np.diag([1.0, 1.0, 3.0, 1.0]), np.eye(4)[[2, 0, 1, 3]]])
def test_scans_of_any_grid_are_drawn(tmp_path: Path, affine: np.ndarray) -> None:
    for name, image in zip(("t1", "t1ce", "t2", "flair"), make_volumes(), strict=True):
        write_nifti(tmp_path / "scan" / f"scan_{name}.nii.gz", image, affine)

    assert n_coloured(draw(tmp_path / "scan", tmp_path / "a.png")) > 0


def test_the_uncertainty_that_a_prediction_writes_can_be_drawn(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans")
    (found,) = find_inputs([folder])
    scan, settings = read_scan(found, (1.0, 1.0, 1.0)), PredictionSettings(uncertainty=True)
    output = OutputFolder(tmp_path / "p")
    result = predict_scan(make_model(settings=settings), scan)
    with output.opened():
        output.write_case(scan, result, settings)

    figure("uncertainty", tmp_path / "scans", tmp_path / "a.png", prediction=tmp_path / "p")

    assert result.uncertainty.max() > 0.5
    # the colours of high entropies are between magenta and orange
    red, green, blue, _ = np.moveaxis(matplotlib.image.imread(tmp_path / "a.png"), -1, 0)
    assert ((red > 0.7) & (green < 0.75) & (red - blue > 0.2)).sum() > 500
