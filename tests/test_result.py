"""Test the warnings about predicted label maps that cannot be right."""

import re
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest
from scipy.ndimage import binary_erosion

from brats_seg.inference.predict import measure
from brats_seg.labels import BRATS2017, LabelMap, regions_of
from brats_seg.quality.result import JudgedPrediction, implausibilities
from brats_seg.voxels.box import brain_mask
from brats_seg.wings import PredictedDice
from tests.check_builders import images_of, real_cases

Mask = npt.NDArray[np.bool_]

SHAPE = (64, 64, 64)


def ball(radius: float, centre: tuple[float, float, float] = (32, 32, 32)) -> Mask:
    distance = np.sqrt(((np.indices(SHAPE).T - centre) ** 2).sum(axis=-1)).T
    return distance < radius


BRAIN = ball(30)
TUMOUR = np.select([ball(radius, (40, 32, 32)) for radius in (4, 7, 11)], [1, 4, 2])


def prediction_of(
    labels: npt.NDArray[np.generic], *, brain: Mask = BRAIN, sure: float = 0.99, mm: float = 1.0
) -> JudgedPrediction:
    label_map: LabelMap = labels.astype(np.uint8)
    regions = regions_of(label_map, BRATS2017)
    return JudgedPrediction(
        regions=regions,
        probabilities=np.where(regions, sure, 1 - sure).astype(np.float32),
        brain=brain,
        volumes=measure(label_map, BRATS2017, mm**3),
        spacing_mm=(mm, mm, mm),
    )


def speckle(share: float) -> Mask:
    return BRAIN & (np.random.default_rng(0).random(SHAPE) < share)


def with_island(radius: float) -> npt.NDArray[np.generic]:
    return np.where(ball(radius, (16, 32, 32)), 2, TUMOUR)


def said_of(labels: npt.NDArray[np.generic], **values: float) -> str:
    return "\n".join(implausibilities(prediction_of(labels, **values)))


def test_a_tumour_of_three_shells_is_believed() -> None:
    assert said_of(TUMOUR) == said_of(TUMOUR, mm=2.0) == said_of(with_island(3)) == ""
    # 14 ml of foreground are no brain
    for labels in (2 * BRAIN, TUMOUR * 0, 2 * speckle(0.2)):
        assert said_of(labels, sure=0.6, mm=0.5) == ""


SHELL = BRAIN & ~binary_erosion(BRAIN, iterations=3)


@pytest.mark.parametrize(
    ("labels", "found"),
    [
        (2 * BRAIN, r"very large: .* \[share of the brain: 1; usual at most 0\.33\]"),
        (TUMOUR * 0, "no tumour was found"),
        (4 * ball(8), "nearly all of the tumour enhances"),
        (2 * speckle(0.02), r"very many parts: .*: [\d.e+]+; usual at most 200"),
        (2 * speckle(0.2), "is scattered: .* a ball of the same volume"),
        (2 * SHELL, r"lies at the border of the brain: .*: 0\.[67]"),
        (2 * ball(9, (3, 3, 3)), "lies at the border of the brain: .*: 1;"),
        (with_island(8), r"lies in several places: .* usual at most 0\.15"),
    ],
    ids=["all brain", "nothing", "one label", "grains", "noise", "shell", "outside", "islands"],
)
def test_what_cannot_be_a_tumour_is_flagged(labels: npt.NDArray[np.generic], found: str) -> None:
    assert re.search(found, said_of(labels))


def test_a_network_that_cannot_decide_is_flagged() -> None:
    """The label map is that of a tumour, but other voxels are nearly as likely."""
    prediction = prediction_of(TUMOUR)
    doubtful = np.where(prediction.regions, 0.9, np.where(BRAIN, 0.4, 0)).astype(np.float32)
    (said,) = implausibilities(replace(prediction, probabilities=doubtful))
    assert said.startswith("the network is undecided in very many voxels")


@pytest.mark.parametrize(("enhancement", "is_flagged"), [(0.2, True), (0.5, False)])
def test_tumour_that_does_not_enhance_is_flagged(enhancement: float, *, is_flagged: bool) -> None:
    prediction = prediction_of(TUMOUR)
    noise = np.random.default_rng(0).normal(1, 0.3, SHAPE).astype(np.float32)
    uptake = noise + np.float32(enhancement) * prediction.regions[2]
    said = list(implausibilities(replace(prediction, uptake=uptake)))
    assert len(said) == is_flagged
    assert all("is hardly brighter in t1c than its surroundings" in one for one in said)


def test_a_low_predicted_dice_is_flagged_and_that_of_an_unusual_scan_is_doubted() -> None:
    wt = PredictedDice(region="wt", dice=0.82, low=0.7, high=0.9)
    et = PredictedDice(region="et", dice=0.41, low=0.2, high=0.6, is_low=True)

    def said(*dice: PredictedDice, is_unusual: bool = False) -> str:
        prediction = replace(prediction_of(TUMOUR), predicted_dice=dice, is_unusual=is_unusual)
        return " | ".join(implausibilities(prediction))

    assert said(wt) == said(is_unusual=True) == ""
    assert said(wt, et).endswith("held-out cases of the model: ET 0.41 (0.20 to 0.60)]")
    assert said(wt, is_unusual=True).startswith("the predicted Dice may be too high")


@pytest.mark.real
@pytest.mark.slow
def test_real_label_maps_and_good_predictions_are_believed(real_data: Path) -> None:
    predictions = real_data / "metric_fixtures" / "network_predictions"
    n_believed = 0
    weak: list[str] = []
    for loaded in real_cases(real_data, "BraTS2018", "BraTS2021"):
        assert loaded.label is not None
        case_id = loaded.case.case_id
        brain = brain_mask([volume.array for volume in loaded.volumes])
        native, enhanced = (_normalised(image, brain) for image in images_of(loaded)[:2])
        maps = [loaded.label.array]
        for path in predictions.glob(f"{case_id}.nii.gz"):
            stored = np.asarray(nib.load(path).dataobj).astype(np.uint8)
            maps.append(np.where(stored == 3, 4, stored))
        for labels in maps:
            prediction = replace(prediction_of(labels, brain=brain), uptake=enhanced - native)
            said = list(implausibilities(prediction))
            n_believed += not said
            weak += [case_id] * any("hardly brighter" in one for one in said)
    # the reference and the prediction of a scan whose contrast agent is weak
    assert (n_believed, weak) == (18, ["Brats18_TCIA13_623_1"] * 2)


def _normalised(image: npt.NDArray[np.generic], brain: Mask) -> npt.NDArray[np.float32]:
    values = image.astype(np.float32)
    return (values - values[brain].mean()) / values[brain].std()
