"""Test the profile of a training set: scans like its own, and what is wrong with damaged ones."""

import re
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pytest
from scipy.ndimage import gaussian_filter, shift, zoom

from brats_seg.cases.case import LoadedCase, case_of_arrays
from brats_seg.data.store import verify_cases
from brats_seg.inference.method import Scan, prepare_scan
from brats_seg.quality.profile import (
    FEWEST_CASES,
    MEASURES,
    TrainingProfile,
    deviations,
    measure_crop,
    pooled,
    profile_of,
    profile_of_cases,
    unlike_training,
)
from brats_seg.wings import Notes
from tests.check_builders import ATLAS_AFFINE, images_of, phantom, real_cases

Images = npt.NDArray[np.generic]
N_PHANTOMS = 9
MM = (1.0, 1.0, 1.0)


def scan_of(images: Images) -> Scan:
    return prepare_scan(case_of_arrays("case", images, ATLAS_AFFINE), MM)


def measured(images: Images) -> npt.NDArray[np.float64]:
    values = measure_crop(scan_of(images).image, MM)
    assert values is not None
    return values


def brain(images: Images) -> npt.NDArray[np.bool_]:
    return (images != 0).any(axis=0)


@cache
def phantom_values() -> npt.NDArray[np.float64]:
    return np.stack([measured(phantom(seed)[0]) for seed in range(N_PHANTOMS)])


def phantom_profile() -> TrainingProfile:
    return profile_of(phantom_values(), [(64, 64, 56)])


def notes_of() -> list[Notes]:
    return [{"profile": phantom_profile().model_dump(mode="json")}]


def said_of(images: Images) -> str:
    """Return all warnings about a scan."""
    scan = scan_of(images)
    return " | ".join((*scan.warnings, *unlike_training(scan, notes_of(), MM)))


def blurred(images: Images, mm: float = 1.5) -> Images:
    return np.stack([gaussian_filter(one.astype(np.float32), mm) for one in images]) * brain(images)


def no_agent(images: Images) -> Images:
    t1n, inside = images[0].astype(np.float32), brain(images)
    noise = np.random.default_rng(1).normal(0, 0.15 * t1n[inside].std(), t1n.shape)
    return np.stack([t1n, t1n + noise * inside, images[2], images[3]])


def thick(images: Images, n: int = 4) -> Images:
    slices = images.reshape(*images.shape[:3], -1, n).mean(axis=-1)
    return np.stack([zoom(one, (1, 1, n), order=1) for one in slices]) * brain(images)


def shifted(images: Images, by: int = 8) -> Images:
    return np.stack([*images[:3], shift(images[3], (0, by, 0), order=0)])


def scaled(images: Images, factor: float = 1.3) -> Images:
    return np.stack([zoom(one, factor, order=1) for one in images])


def noisy(images: Images) -> Images:
    return images + np.random.default_rng(0).normal(0, 80, images.shape) * brain(images)


DAMAGES: dict[str, tuple[Callable[[Images], Images], str]] = {
    "swapped": (lambda images: images[[2, 1, 0, 3]], "normalisation"),
    "shifted": (shifted, "shifted against each other"),
    "scaled": (scaled, "voxel size"),
    "blurred": (blurred, "smoothing"),
    "thick slices": (thick, "thick slices"),
    "another normalisation": (lambda images: np.sqrt(1.0 * images), "another normalisation"),
    "no contrast agent": (no_agent, "no contrast agent"),
    "noisy": (noisy, "noise"),
}


def test_phantoms_are_like_the_other_phantoms() -> None:
    """Each is compared with the profile of the others."""
    values = phantom_values()

    found = [
        deviations(profile_of(np.delete(values, index, axis=0)), values[index])
        for index in range(N_PHANTOMS)
    ]

    assert sum(map(bool, found)) <= 1


@pytest.fixture(scope="module")
def usual_warnings() -> str:
    return said_of(phantom(20)[0])


@pytest.mark.parametrize("name", DAMAGES)
def test_a_damaged_phantom_is_reported_with_its_cause(name: str, usual_warnings: str) -> None:
    damage, cause = DAMAGES[name]

    said = said_of(damage(phantom(20)[0]))

    assert cause in said
    assert cause not in usual_warnings
    if name == "blurred":
        assert re.search(
            r"unlike the training scans: sharpness [a-z0-9, ]+ is 0\.\d+, in training 0\.\d+ to 0\.\d+ "
            r"\(\d+ more measures of that kind\); usual causes: thick slices",
            said,
        )


def test_a_change_of_units_is_not_reported_and_a_grid_that_no_training_scan_has_is() -> None:
    images = phantom(20)[0].astype(np.float32)
    rescaled = np.where(brain(images), 1000 * images + 300, 0)
    padded = np.pad(images, ((0, 0), (0, 6), (0, 0), (0, 0)))

    assert said_of(rescaled) == said_of(images)
    assert "its grid has 70x64x56 voxels, those of the training scans 64x64x56" in said_of(padded)


def test_nothing_is_said_twice_without_a_profile_or_of_a_scan_that_is_no_brain() -> None:
    images = phantom(20)[0]
    scan, speck = scan_of(images[[2, 1, 0, 3]]), scan_of(images[:, 20:40, 20:40, 20:40])

    said = unlike_training(scan, notes_of(), MM)

    # the remark on any scan is not repeated
    assert any("mixed up" in one for one in scan.warnings)
    assert said
    assert not any("swapped, shifted" in one for one in said)
    for notes in ([{}], [*notes_of(), {}], []):
        assert unlike_training(scan, notes, MM) == ()
    assert unlike_training(speck, notes_of(), MM) == ()
    # a modality that is missing makes the scan incomparable
    scan.image[1] = 0
    assert measure_crop(scan.image, MM) is None


def ids_in(folder: Path) -> list[str]:
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


def test_prepared_cases_are_measured_as_new_scans_are(five_prepared: Path) -> None:
    """The range of five prepared phantoms holds what prediction measures in them."""
    profile = profile_of_cases(five_prepared, ids_in(five_prepared))

    assert profile is not None
    assert (profile.n_cases, profile.grids) == (5, ((64, 64, 56),))
    values = measured(phantom(0)[0])
    for one, value in zip(profile.ranges, values, strict=True):
        assert one.low - 1e-3 <= value <= one.high + 1e-3, one.name


def test_only_stored_measures_of_this_version_count(five_prepared: Path, tmp_path: Path) -> None:
    """They spare a run the reading of its scans, and damage of them is noticed."""
    folder = shutil.copytree(five_prepared, tmp_path / "prepared")
    ids = ids_in(folder)
    first, second = (folder / name / "measures.json" for name in ids[:2])
    second.write_text(second.read_text() + " ")
    (error,) = verify_cases(ids, folder)
    assert "measures.json" in str(error)
    for path in folder.glob("*/image.npy"):
        path.write_bytes(b"")
    assert profile_of_cases(folder, ids) is not None

    first.write_text(first.read_text().replace('"version": 1', '"version": 0'))

    assert profile_of_cases(folder, ids[:FEWEST_CASES]) is None


def test_a_training_set_of_no_brains_has_no_profile(tiny_prepared: Path) -> None:
    assert profile_of_cases(tiny_prepared, ids_in(tiny_prepared)) is None


def test_the_profile_of_an_ensemble_is_the_mixture_of_those_of_its_networks() -> None:
    values = phantom_values()
    parts = [values[:6], values[3:]]

    both = pooled([profile_of(part) for part in parts])

    assert both is not None
    assert both.n_cases == 6
    twelve = np.concatenate(parts)
    means = [part.mean(axis=0) for part in parts]
    variance = np.mean([part.var(axis=0, ddof=1) for part in parts], axis=0) + np.var(means, axis=0)
    found = np.array([(one.mean, one.sd**2, one.low, one.high) for one in both.ranges]).T
    expected = [np.mean(means, axis=0), variance, twelve.min(axis=0), twelve.max(axis=0)]
    np.testing.assert_allclose(found, expected, rtol=1e-6)


def test_measures_of_another_version_are_not_compared() -> None:
    profile = phantom_profile()
    older = profile.model_copy(update={"ranges": profile.ranges[:4]})
    empty = profile.model_copy(update={"ranges": ()})

    assert len(MEASURES) == phantom_values().shape[1]
    assert {kind for kind, _ in deviations(older, phantom_values()[0] + 99)} == {"size"}
    assert deviations(empty, phantom_values()[0]) == ()


def test_a_limit_is_a_prediction_interval() -> None:
    """5 % of new values from the normal distribution of eight are outside, by simulation."""
    draws = np.random.default_rng(0).normal(size=(20_000, 9))
    limit = phantom_profile().model_copy(update={"n_cases": 8}).limit(0.05)

    mean, sd = draws[:, :8].mean(axis=1), draws[:, :8].std(axis=1, ddof=1)

    assert np.mean(abs(draws[:, 8] - mean) > limit * sd) == pytest.approx(0.05, abs=0.005)


@pytest.mark.real
@pytest.mark.slow
def test_real_scans_are_like_each_other_and_damaged_ones_are_not(real_data: Path) -> None:
    """Each of twelve patients is compared with the other eleven."""
    cases = [_cut(case) for case in real_cases(real_data, "BraTS2018", "BraTS2021")]
    values = np.stack([measured(images) for images in cases])
    damages: list[Callable[[Images], Images]] = [
        lambda images: images[[0, 1, 3, 2]],
        lambda images: shifted(images, 10),
        lambda images: scaled(images, 1.25),
        lambda images: blurred(images, 2.0),
        no_agent,
    ]

    for index, images in enumerate(cases):
        profile = profile_of(np.delete(values, index, axis=0))
        assert deviations(profile, values[index]) == ()
        for damage in damages if index % 4 == 0 else ():
            assert deviations(profile, measured(damage(images)))


def _cut(case: LoadedCase) -> Images:
    """Return the images of a case (4, x, y, z) with a margin around the brain."""
    images = images_of(case).astype(np.float32)
    where = np.argwhere(brain(images))
    low, high = where.min(axis=0), where.max(axis=0) + 1
    cut = images[:, low[0] : high[0], low[1] : high[1], low[2] : high[2]]
    return np.pad(cut, ((0, 0), (12, 12), (12, 12), (12, 12)))
