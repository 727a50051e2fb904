"""The page of a case, in a browser and without one."""

import base64
import gzip
import json
import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.nifti import read_volume
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.figures.view import CaseView, open_view, with_prediction
from brats_seg.labels import MODALITIES
from brats_seg.pages.case import (
    LARGEST_PAGE,
    CasePage,
    Fact,
    part_rows,
    write_case_page,
)
from brats_seg.pages.embedded import EmbeddedVolume, embedded
from tests.browser import CHROMIUM, Page, opened_browser

HOSTILE = "</script><img src=x onerror=hurt=1>\"'&"
SUFFIXES = dict(zip(MODALITIES, ("t1", "t1ce", "t2", "flair"), strict=True))


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scans")
    write_phantom_cases(root, n_cases=1, seed=0, shape=(40, 44, 36))
    return root / "BraTS2021_00000"


@pytest.fixture(scope="module")
def view(scans: Path) -> CaseView:
    """A phantom whose prediction is its reference, moved by a voxel."""
    found = open_view(scans)
    assert found.reference is not None
    moved = np.ascontiguousarray(np.roll(found.reference.label_map, 1, axis=0))
    entropy = np.zeros(moved.shape, np.float32)
    entropy[moved == 4] = 0.5
    prediction = replace(found.reference, label_map=moved)
    return replace(found, prediction=prediction, uncertainty=entropy)


@pytest.fixture(scope="module")
def page_file(view: CaseView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "case.html"
    facts = (Fact(name="Model", words="0123abc", is_code=True),)
    write_case_page(CasePage(view=view, flags=(f"odd {HOSTILE}",), facts=facts), path)
    return path


@pytest.fixture
def page(browser: Page, page_file: Path) -> Iterator[Page]:
    """The page as at first; it is loaded once."""
    if browser.run("location.href") == page_file.as_uri():
        browser.run("viewers[0].reset()")
    else:
        browser.open(page_file)
    yield browser
    assert (browser.complaints, outside(browser)) == ([], [])


def outside(page: Page) -> list[str]:
    return [address for address in page.requests if not address.startswith(("data:", "blob:"))]


def said(page: Page, name: str) -> str:
    return str(page.run(f"document.querySelector('[data-value={name}]').textContent"))


def drawn(page: Page, tmp_path: Path) -> np.ndarray:
    return page.picture(tmp_path / "a.png", "canvas")


def coloured(picture: np.ndarray) -> int:
    """Return the number of pixels that are not grey."""
    return int((picture.max(axis=2) - picture.min(axis=2) > 40).sum())


def test_the_viewer_draws_and_nothing_is_asked_for_from_outside(page: Page, tmp_path: Path) -> None:
    picture = drawn(page, tmp_path)

    assert page.run("document.documentElement.dataset.viewer") == "ready"
    assert (picture.max(axis=2) > 60).mean() > 0.1
    assert coloured(picture) > 1000


def test_layers_and_scans_are_toggled_by_buttons_and_keys(page: Page, tmp_path: Path) -> None:
    with_prediction = drawn(page, tmp_path)
    page.click("[data-layer=prediction]")
    without = drawn(page, tmp_path)
    page.run("document.querySelector('canvas').focus()")
    page.key("4")
    flair = drawn(page, tmp_path)
    page.key("r")
    with_reference = drawn(page, tmp_path)
    page.key("u")
    with_uncertainty = drawn(page, tmp_path)

    # the crosshair and the buttons of the 3-D view are left
    assert coloured(without) < 0.5 * coloured(with_prediction)
    assert np.abs(flair - without).mean() > 1
    assert coloured(with_reference) > coloured(flair)
    assert np.abs(with_uncertainty - with_reference).mean() > 0.1
    pressed = page.run(
        "Array.from(document.querySelectorAll('[aria-pressed=true]'), b => b.textContent)"
    )
    assert pressed == ["FLAIR", "Reference", "Uncertainty", "All"]


@pytest.mark.parametrize("size", ["0", "8px"])
def test_a_canvas_without_room_is_not_drawn(page: Page, size: str) -> None:
    """WebGL complains of frames of negative size, which the fixture would see."""
    for value in (size, ""):
        page.run(f"document.querySelector('.viewer-canvas').style.height = '{value}'")
        page.run("viewers[0].nv.resizeListener()")

    assert page.run("document.querySelector('canvas').height") > 64


@pytest.mark.slow
def test_each_view_can_be_chosen(page: Page, tmp_path: Path) -> None:
    pictures = []
    for name in ("axial", "coronal", "sagittal", "space", "all"):
        page.click(f"[data-view={name}]")
        pictures.append(drawn(page, tmp_path))

    assert all(np.abs(a - b).mean() > 1 for a, b in pairwise(pictures))


def test_the_patients_left_is_on_the_right(page: Page, view: CaseView, tmp_path: Path) -> None:
    assert view.prediction is not None
    page.click("[data-view=axial]")
    with_prediction = drawn(page, tmp_path)
    page.click("[data-layer=prediction]")
    without = drawn(page, tmp_path)

    # X of the axes of BraTS runs to the patient's left
    section = page.run("viewers[0].values.centre_mm[2]")
    z = round(np.linalg.solve(view.affine, [0, 0, section, 1])[2])
    labels = view.prediction.label_map[:, :, z] > 0
    brain = (view.images[0, :, :, z] != 0).nonzero()[0].mean()
    is_left = labels.nonzero()[0].mean() > brain
    changed = (np.abs(with_prediction - without).sum(axis=2) > 30).nonzero()[1].mean()
    assert (changed > without.shape[1] / 2) == is_left


@pytest.mark.parametrize("place", [(20, 22, 18), (13, 30, 10)])
def test_a_value_in_the_page_is_that_of_the_file(
    page: Page, scans: Path, place: tuple[int, int, int]
) -> None:
    """At a voxel of the file: both what the page says and what NiiVue draws."""
    files = {name: scans / f"{scans.name}_{suffix}.nii.gz" for name, suffix in SUFFIXES.items()}
    volume = read_volume(files["t1c"], case_id="a")
    mm = (volume.geometry.affine @ [*place, 1])[:3].tolist()

    page.run(f"viewers[0].goTo({json.dumps(mm)})")

    assert said(page, "voxel") == ", ".join(map(str, place))
    for name, file in files.items():
        assert float(said(page, name)) == read_volume(file, case_id="a").array[place]
    shown = page.run(
        "(() => { const v = viewers[0].nv.volumes[0], x = v.mm2vox("
        f"{json.dumps(mm)}); return v.getValue(x[0], x[1], x[2], 0); }})()"
    )
    assert shown == volume.array[place]
    label = read_volume(scans / f"{scans.name}_seg.nii.gz", case_id="a").array[place]
    assert said(page, "reference").split(":")[0] == (str(label) if label else "none")


def test_the_arrow_keys_move_the_crosshair_by_a_voxel(page: Page) -> None:
    before = [float(part) for part in said(page, "mm").split(",")]
    page.run("document.querySelector('canvas').focus()")
    for key in ("ArrowLeft", "ArrowUp", "PageUp"):
        page.key(key)

    after = [float(part) for part in said(page, "mm").split(",")]

    # to the patient's right, to the front, up
    assert np.subtract(after, before).tolist() == [1, 1, 1]


def test_a_lesion_is_shown_where_it_is(page: Page) -> None:
    page.run("viewers[0].goTo([0, 0, 0])")
    page.click("[data-mm]")

    wanted = page.run("document.querySelector('[data-mm]').dataset.mm")

    assert said(page, "mm") == ", ".join(f"{mm:.1f}" for mm in json.loads(wanted))


@pytest.mark.slow
def test_a_page_is_readable_when_enlarged_and_dark(
    browser: Page, page_file: Path, tmp_path: Path
) -> None:
    brightness = {}
    for dark in (False, True):
        browser.dark(dark)
        browser.open(page_file, width=800, scale=1.25)
        # nothing is cut off at the side
        assert browser.run("document.documentElement.scrollWidth <= innerWidth")
        brightness[dark] = browser.picture(tmp_path / "a.png", ".page-head").mean()
    browser.dark(False)

    assert brightness[False] > 200 > 80 > brightness[True]


def test_the_reader_can_change_light_to_dark(page: Page, tmp_path: Path) -> None:
    before = page.picture(tmp_path / "a.png", ".page-head").mean()
    page.click("#theme")

    assert page.picture(tmp_path / "a.png", ".page-head").mean() < before / 2


def test_names_cannot_add_anything_to_a_page(browser: Page, view: CaseView, tmp_path: Path) -> None:
    facts = (Fact(name=HOSTILE, words=HOSTILE),)
    hostile = replace(view, case_id=HOSTILE)
    write_case_page(CasePage(view=hostile, flags=(HOSTILE,), facts=facts), tmp_path / "a.html")

    browser.open(tmp_path / "a.html")

    assert browser.run("document.querySelector('h1').textContent") == HOSTILE
    assert browser.run("document.querySelectorAll('img[onerror]').length") == 0
    assert browser.run("typeof hurt") == "undefined"
    assert (browser.complaints, outside(browser)) == ([], [])


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
def test_without_webgl_the_pictures_are_there_and_the_reason_is_said(page_file: Path) -> None:
    with opened_browser("--disable-3d-apis") as page:
        page.open(page_file)

        absent = page.run("document.querySelector('.viewer-absent').innerText")
        widths = page.run("Array.from(document.querySelectorAll('img'), i => i.clientWidth)")

        assert "The viewer cannot start here: this browser has no WebGL 2" in absent
        assert page.run("document.querySelector('.viewer').hidden")
        assert len(widths) == 2
        assert min(widths) > 200
        assert page.complaints == []


def test_a_page_has_volumes_lesions_flags_and_origin(page_file: Path, view: CaseView) -> None:
    page = page_file.read_text()

    assert view.reference is not None
    wt_ml = (view.reference.label_map > 0).sum() / 1000
    assert page.count(f'<td class="n">{wt_ml:.2f}</td>') >= 2
    for words in ("Lesions of the prediction", "0123abc", "Research use only", "RANO"):
        assert words in page
    assert HOSTILE not in page
    assert len(page) < 4_000_000


def test_the_rows_of_volumes_are_of_both_sides(view: CaseView) -> None:
    wt, tc, et, ed, ncr = part_rows(view)

    assert wt.dice is not None
    assert 0.5 < wt.dice < 1
    assert ed.dice is None
    assert (
        wt.prediction_ml
        == wt.reference_ml
        == pytest.approx((ed.reference_ml or 0) + (tc.reference_ml or 0))
    )
    assert tc.reference_ml == pytest.approx((et.reference_ml or 0) + (ncr.reference_ml or 0))


def test_a_page_that_is_too_large_is_said(
    view: CaseView,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr("brats_seg.pages.case.LARGEST_PAGE", 1_000_000)

    write_case_page(CasePage(view=view), tmp_path / "a.html")

    assert "a.html has 1 MB: scans of 40 x 44 x 36 voxels are too large" in caplog.text


def test_a_case_without_label_maps_has_a_page_of_its_scans(view: CaseView, tmp_path: Path) -> None:
    alone = replace(view, prediction=None, reference=None, uncertainty=None)

    write_case_page(CasePage(view=alone), tmp_path / "a.html")

    page = (tmp_path / "a.html").read_text()
    assert "No warning was raised" in page
    assert "Volumes" not in re.sub("<script.*", "", page, flags=re.DOTALL)


def decoded(volume: EmbeddedVolume, shape: tuple[int, int, int]) -> np.ndarray:
    """Undo the coding that the docstring of `embedded` describes, one voxel after the other."""
    content = gzip.decompress(base64.b64decode(volume.data))
    low, high = np.frombuffer(content, np.uint8).reshape(2, -1).astype(int)
    code = low + 256 * high
    signed = np.where(code % 2, -(code + 1) // 2, code // 2).reshape(shape, order="F")
    for axis in (2, 1, 0):
        signed = np.cumsum(signed, axis=axis)
    return (signed.astype(np.uint16).view(np.int16)) * volume.step


@pytest.mark.parametrize(
    ("dtype", "factor", "step"),
    [(np.int16, 1, 1), (np.float32, 1, 1), (np.float64, 1e-3, None), (np.int32, 1000, None)],
)
def test_embedded_scans_have_the_values_of_the_file(
    view: CaseView, dtype: type, factor: float, step: float | None
) -> None:
    images = (view.images * factor).astype(dtype)
    images[0][images[0] > 0] *= -1

    grid = embedded(replace(view, images=images))

    nx, ny, nz = grid.shape
    corner = np.array([row[3] for row in grid.affine])
    start = np.rint(np.linalg.solve(view.affine, corner))[:3].astype(int)
    for volume, image in zip(grid.volumes, images, strict=False):
        x, y, z = start
        cut = image[x : x + nx, y : y + ny, z : z + nz]
        assert step is None or volume.step == step
        np.testing.assert_allclose(decoded(volume, grid.shape), cut, rtol=0, atol=volume.step / 2)
        assert volume.step == 1 or volume.step < 1e-4 * np.abs(image).max()


def test_large_scans_are_rounded_until_the_page_is_small_enough(
    view: CaseView, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = embedded(view)
    n_bytes = sum(len(volume.data) for volume in exact.volumes)
    monkeypatch.setattr("brats_seg.pages.embedded.MOST_BYTES", n_bytes * 3 // 4)

    rounded = embedded(view)

    assert sum(len(volume.data) for volume in rounded.volumes) <= n_bytes * 3 // 4
    assert exact.largest_step == 0
    assert rounded.largest_step >= 4


@pytest.mark.real
@pytest.mark.slow
def test_the_page_of_a_real_case_is_small_enough(real_data: Path, tmp_path: Path) -> None:
    """The scans that take most room of those that there are, of 30,000 grey levels, with all layers."""
    case_id = "Brats18_TCIA10_637_1"
    view = open_view(real_data / "BraTS2018" / "LGG" / case_id)
    predictions = real_data / "metric_fixtures" / "network_predictions"
    view = with_prediction(view, predictions / f"{case_id}.nii.gz")
    noise = np.random.default_rng(0).random(view.images.shape[1:], np.float32)
    assert view.prediction is not None
    # as uncertain as a network is around the whole tumour
    entropy = np.where(view.prediction.label_map > 0, noise, 0)

    write_case_page(CasePage(view=replace(view, uncertainty=entropy)), tmp_path / "a.html")

    assert (tmp_path / "a.html").stat().st_size < LARGEST_PAGE
