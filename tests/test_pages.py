"""The pages in a browser: what they draw and say, and that nothing leaves them."""

import json
import shutil
from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from pathlib import Path

import numpy as np
import pandas as pd
import pytest

from brats_seg.cases.nifti import read_volume
from brats_seg.evaluation.scores import join_scores, read_scores, write_scores
from brats_seg.figures.cases import CaseView, open_view
from brats_seg.inference.results import MANIFEST_NAME, Record
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import REGIONS
from brats_seg.pages.case import write_case_page
from brats_seg.pages.cohort import write_cohort_page
from brats_seg.pages.html import Fact, PageOptions
from brats_seg.pages.run import write_run_page
from brats_seg.voxels.regions import PartVolume
from tests.browser import CHROMIUM, Page, opened_browser
from tests.builders import touch
from tests.check_builders import write_clear_phantoms
from tests.inference_builders import NAMES
from tests.test_run import FILES
from tests.test_scores import score_row

HOSTILE = "</script><img src=x onerror=hurt=1>\"'&"
PAGES = ("case", "cohort", "run")


@pytest.fixture(scope="module")
def scans(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("scans")
    return write_clear_phantoms(root, 1, (40, 44, 36)) / "BraTS2021_00000"


def moved_view(scans: Path) -> CaseView:
    view = open_view(scans)
    moved = np.ascontiguousarray(np.roll(view.reference.label_map, 1, axis=0))
    entropy = np.where(moved > 0, 0.5, 0).astype(np.float32)
    return replace(view, prediction=replace(view.reference, label_map=moved), uncertainty=entropy)


@pytest.fixture(scope="module")
def view(scans: Path) -> CaseView:
    return moved_view(scans)


def write_results(folder: Path, *, name: str = "") -> Path:
    """Write the records of four predictions, one of which failed, and a table of scores of two."""
    folder.mkdir()
    lines = []
    for case_id, ml in {"fair": (90, 0.5, 3), "bad": (89, 0.12, 3), "unknown": (200, 9, 1)}.items():
        parts = zip(REGIONS, ml, strict=True)
        record = Record(
            case_id=f"{case_id}{name}",
            model=f"0123{name}",
            warnings=(f"odd {name}",) * (case_id == "fair"),
            volumes=[PartVolume(name=region, ml=n, n_components=1) for region, n in parts],
            outputs=(f"previews/{case_id}{name}.png",),
            settings=PredictionSettings(),
            convention="brats2017",
            inputs=(),
            files={},
            **dict.fromkeys(("key", "version", "device"), "0123"),
            **dict.fromkeys(("seconds", "peak_memory_mb"), 1.0),
        )
        lines.append(record.model_dump_json())
    failed = {"case_id": f"lost{name}", "error": "CaseError", "message": f"a file is empty {name}"}
    (folder / MANIFEST_NAME).write_text("\n".join([*lines, json.dumps(failed)]) + "\n")
    if not name:
        pairs = product((("bad", 0.2), ("fair", 0.7)), REGIONS)
        rows = [score_row(*case, region) for case, region in pairs]
        write_scores(pd.DataFrame(rows), folder / "scores.csv")
        touch(folder, "reports/bad.html")
    return folder


@pytest.fixture(scope="module")
def files(view, tiny_run, tiny_prepared, tmp_path_factory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("pages")
    paths = {name: folder / f"{name}.html" for name in PAGES}
    write_case_page(view, paths["case"], warnings=("odd",), facts=(Fact("Model", "0123abc"),))
    results = write_results(folder / "results")
    write_cohort_page(results, paths["cohort"], read_scores(results / "scores.csv"))
    # predictions are stored in the folder of the run
    run = shutil.copytree(tiny_run, folder / "fold0")
    write_run_page(run, paths["run"], PageOptions(prepared=tiny_prepared, device="cpu"))
    return paths


@pytest.fixture
def page(browser: Page, files: dict[str, Path]) -> Iterator[Page]:
    if browser.run("[location.href, devicePixelRatio]") == [files["case"].as_uri(), 1]:
        browser.run("viewer.reset()")
    else:
        browser.open(files["case"])
    yield browser
    assert (browser.complaints, outside(browser)) == ([], [])


def outside(page: Page) -> list[str]:
    return [address for address in page.requests if not address.startswith(("data:", "blob:"))]


def said(page: Page, name: str) -> str:
    return str(page.run(f"document.querySelector('[data-value={name}]').textContent"))


def coloured(picture: np.ndarray) -> int:
    return int((picture.max(axis=2) - picture.min(axis=2) > 40).sum())


SEEN = {"enlarged": (True, 800, 1.25), "phone": (False, 390, 1)}
# the viewer of the page of a case takes seconds to start
LONG = {("case", "enlarged"): pytest.mark.slow}


@pytest.mark.parametrize(
    ("name", "seen"), [pytest.param(*one, marks=LONG.get(one, ())) for one in product(PAGES, SEEN)]
)
def test_a_page_is_drawn_and_asks_for_nothing_from_outside(browser, files, tmp_path, name, seen):
    dark, width, scale = SEEN[seen]
    browser.dark(dark)
    browser.open(files[name], width=width, scale=scale)
    assert (browser.complaints, outside(browser)) == ([], [])
    assert browser.run("document.documentElement.scrollWidth <= innerWidth")
    cut = "[...document.querySelectorAll('.wide')].filter((e) => e.scrollWidth > e.clientWidth)"
    assert browser.run(f"{cut}.length") == 0
    back = browser.run("getComputedStyle(document.body).backgroundColor")
    assert (back == "rgb(255, 255, 255)") is not dark
    assert browser.run("[...document.images].every((i) => i.complete && i.naturalWidth)")
    before = browser.picture(tmp_path / "a.png", ".page-head").mean()
    browser.click("#theme")
    assert (browser.picture(tmp_path / "a.png", ".page-head").mean() > before) == dark


@pytest.mark.parametrize("name", [pytest.param("case", marks=pytest.mark.slow), *PAGES[1:]])
def test_names_cannot_add_anything_to_a_page(browser, view, tiny_run, tmp_path, name):
    path = tmp_path / "a.html"
    if name == "case":
        hostile = replace(view, case_id=HOSTILE)
        write_case_page(hostile, path, warnings=(HOSTILE,), facts=(Fact(HOSTILE, HOSTILE),))
    elif name == "cohort":
        write_cohort_page(write_results(tmp_path / "results", name=HOSTILE), path, join_scores(()))
    else:
        run = tmp_path / HOSTILE.replace("/", "")
        run.mkdir()
        for file in FILES:
            shutil.copy(tiny_run / file, run)
        (run / "environment.json").write_text(json.dumps({HOSTILE: HOSTILE}))
        write_run_page(run, path)
    browser.open(path)
    text = browser.run("document.body.textContent")
    assert (HOSTILE if name != "cohort" else f"bad{HOSTILE}") in text
    assert browser.run("document.querySelectorAll('img[onerror]').length") == 0
    assert browser.run("typeof hurt") == "undefined"
    assert (browser.complaints, outside(browser)) == ([], [])


@pytest.mark.slow
def test_the_viewer_draws_and_layers_and_scans_are_toggled(page: Page, tmp_path: Path) -> None:
    def drawn(selector: str = "", key: str = "") -> np.ndarray:
        if selector:
            page.click(selector)
        elif key:
            page.run("document.querySelector('canvas').focus()")
            page.key(key)
        return page.picture(tmp_path / "a.png", ".panels")

    both = drawn()
    with_prediction = drawn("[data-layer=reference]")
    outlined = drawn(key="o")
    without = drawn("[data-layer=prediction]")
    flair = drawn(key="4")
    with_reference = drawn(key="r")
    with_uncertainty = drawn(key="u")
    assert np.abs(drawn("[data-view=Coronal]") - with_uncertainty).mean() > 1
    assert (with_prediction.max(axis=2) > 60).mean() > 0.1
    assert np.abs(both - with_prediction).mean() > 0.1
    assert coloured(with_prediction) > 1.5 * coloured(outlined) > 1.5 * coloured(without)
    assert np.abs(flair - without).mean() > 1
    assert coloured(with_reference) > coloured(flair)
    assert np.abs(with_uncertainty - with_reference).mean() > 0.1
    buttons = "[...document.querySelectorAll('[aria-pressed=true]')]"
    pressed = page.run(f"{buttons}.map(b => b.innerText)")
    assert pressed == ["FLAIR", "Coronal", "Crosshair", "Reference", "Uncertainty", "Outline"]
    # WebGL complains of frames of negative size, which the fixture would see
    for height in ("0", "8px", ""):
        page.run(f"document.querySelector('.panels').style.height = '{height}'")
        page.run("viewer.panels.t2f.resizeListener()")
    assert page.run("document.querySelector('[data-panel=t2f] canvas').height") > 64


@pytest.mark.slow
def test_four_scans_are_linked_and_each_label_has_a_switch(page: Page, tmp_path: Path) -> None:
    at = "nv => [...nv.scene.crosshairPos].map(x => x.toFixed(4)).join(' ')"
    places = f"Object.values(viewer.panels).map({at})"

    def height_mm() -> float:
        return float(said(page, "mm").split(",")[2])

    assert len(page.run(places)) == 4
    start_mm = height_mm()
    # each panel is on the largest lesion, and the wheel over any moves all by a section
    for panel in ("t1n", "t2f"):
        page.run(f"document.querySelector('[data-panel={panel}]').scrollIntoView()")
        page.mouse("Wheel", f"[data-panel={panel}]", (0.5, 0.5), deltaX=0, deltaY=120)
    assert height_mm() == pytest.approx(start_mm + 2 * 155 / 36, abs=0.1)
    page.drag("[data-panel=t2f]", (0.4, 0.4), (0.45, 0.5))
    assert len(set(page.run(places))) == 1
    slider = "document.querySelector('[data-section=\"2\"]')"
    sections = []
    for index in (9, 10):
        page.run(f"{slider}.value = {index}; {slider}.dispatchEvent(new Event('input'))")
        sections.append(int(said(page, "voxel").split(", ")[2]))
    assert sections[1] == sections[0] + 1
    page.run("viewer.goTo(viewer.values.centre_mm)")
    everything = coloured(page.picture(tmp_path / "a.png", ".panels"))
    page.run("document.querySelectorAll('[data-label]').forEach((box) => box.click())")
    assert coloured(page.picture(tmp_path / "a.png", ".panels")) < everything


@pytest.mark.slow
def test_a_ruler_measures_and_greys_zoom_and_the_saved_picture_follow(page: Page) -> None:
    page.run("document.querySelector('.panels').scrollIntoView()")
    page.click("[data-tool=measurement]")
    page.drag("[data-panel=t1c]", (0.4, 0.5), (0.5, 0.5), (0.6, 0.5))
    # a fifth of the width of the panel, whose height is that of the brain
    panel = "document.querySelector('[data-panel=t1c]')"
    aspect = page.run(f"{panel}.clientWidth / {panel}.clientHeight")
    tall_mm = page.run("viewer.values.shape[1] * viewer.images.t1c.pixDims[2]")
    assert page.run("viewer.rulers.map((one) => one.distance)") == [
        pytest.approx(0.2 * aspect * tall_mm, rel=0.03)
    ]
    greys = "[...document.querySelectorAll('[data-greys]')].map((e) => e.textContent)"
    before = page.run(greys)
    page.drag("[data-panel=t1c]", (0.4, 0.5), (0.5, 0.5), (0.5, 0.4), button="right")
    after = page.run(greys)
    assert [one == other for one, other in zip(before, after, strict=True)].count(False) == 1
    preset = "document.querySelector('[data-preset]')"
    page.run(f"{preset}.selectedIndex = 1; {preset}.dispatchEvent(new Event('change'))")
    assert not set(before) & set(page.run(greys))
    page.click("[data-tool=pan]")
    page.mouse("Wheel", "[data-panel=t1n]", (0.5, 0.5), deltaX=0, deltaY=-120)
    assert page.run("Object.values(viewer.panels).every((nv) => nv.scene.pan2Dxyzmm[3] > 1)")
    page.run("HTMLAnchorElement.prototype.click = function () { window.saved = this; }")
    page.click("[data-save]")
    assert page.run("saved.download") == "BraTS2021_00000.png"
    load = "i.onload = () => done([i.width, i.height]); i.src = saved.href;"
    size = page.run(f"new Promise((done) => {{ const i = new Image(); {load} }})")
    frame = "document.querySelector('.panels')"
    assert size[0] == page.run(f"{frame}.clientWidth")
    assert size[1] > page.run(f"{frame}.clientHeight")


def test_the_patients_left_is_on_the_right(page: Page, view: CaseView, tmp_path: Path) -> None:
    assert view.prediction is not None
    page.click("[data-scan=t1c]")
    with_prediction = page.picture(tmp_path / "a.png", ".panels")
    page.click("[data-layer=prediction]")
    without = page.picture(tmp_path / "a.png", ".panels")
    # X of the axes of BraTS runs to the patient's left
    section = page.run("viewer.values.centre_mm[2]")
    z = round(np.linalg.solve(view.affine, [0, 0, section, 1])[2])
    labels = view.prediction.label_map[:, :, z] > 0
    brain = (view.images[0, :, :, z] != 0).nonzero()[0].mean()
    is_left = labels.nonzero()[0].mean() > brain
    changed = (np.abs(with_prediction - without).sum(axis=2) > 30).nonzero()[1].mean()
    assert (changed > without.shape[1] / 2) == is_left


@pytest.mark.parametrize("voxel", [(20, 22, 18), (13, 30, 10)])
def test_a_value_in_the_page_is_that_of_the_file(page, scans, voxel):
    """At a voxel of the file: both what the page says and what NiiVue draws."""
    paths = {name: scans / f"{scans.name}_{suffix}.nii.gz" for name, suffix in NAMES.items()}
    scan = read_volume(paths["t1c"], case_id="a")
    mm = (scan.geometry.affine @ [*voxel, 1])[:3].tolist()
    page.run(f"viewer.goTo({json.dumps(mm)})")
    assert said(page, "voxel") == ", ".join(map(str, voxel))
    for name, path in paths.items():
        assert float(said(page, name)) == read_volume(path, case_id="a").array[voxel]
    shown = page.run(
        "(() => { const [v] = viewer.panels.t1c.volumes, x = v.mm2vox("
        f"{json.dumps(mm)}); return v.getValue(x[0], x[1], x[2], 0); }})()"
    )
    assert shown == scan.array[voxel]
    label = read_volume(scans / f"{scans.name}_seg.nii.gz", case_id="a").array[voxel]
    assert said(page, "reference").split(":")[0] == (str(label) if label else "none")


def test_keys_and_lesions_move_the_crosshair(page: Page) -> None:
    before = [float(part) for part in said(page, "mm").split(",")]
    page.run("document.querySelector('canvas').focus()")
    for key in ("ArrowLeft", "ArrowUp", "PageUp"):
        page.key(key)
    after = [float(part) for part in said(page, "mm").split(",")]
    page.click("[data-mm]")
    # to the patient's right, to the front, up
    np.testing.assert_allclose(np.subtract(after, before), 190 / 44, atol=0.11)
    lesion = page.run("document.querySelector('[data-mm]').dataset.mm")
    assert said(page, "mm") == ", ".join(f"{mm:.1f}" for mm in json.loads(lesion))


@pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium")
@pytest.mark.slow
def test_without_webgl_there_are_pictures_and_the_reason(files: dict[str, Path]) -> None:
    with opened_browser("--disable-3d-apis") as page:
        page.open(files["case"])
        absent = page.run("document.querySelector('.viewer-absent').innerText")
        widths = page.run("Array.from(document.querySelectorAll('img'), i => i.clientWidth)")
        assert "The viewer cannot start here: this browser has no WebGL 2" in absent
        assert page.run("getComputedStyle(document.querySelector('.panels')).display") == "none"
        assert "Whole tumour" in page.run("document.querySelector('.volumes').innerText")
        assert len(widths) == 2
        assert min(widths) > 200
        assert page.complaints == []


def shown(page: Page) -> list[str]:
    rows = "[...document.querySelectorAll('#cases tbody tr')].filter((row) => !row.hidden)"
    return list(page.run(f"{rows}.map((row) => row.querySelector('.name').dataset.value)"))


def press(page: Page, heading: str) -> list[str]:
    heads = "[...document.querySelectorAll('#cases th button')]"
    page.run(f"{heads}.find((b) => b.textContent === {heading!r}).click()")
    return shown(page)


def test_cases_are_sorted_by_any_column_and_found(browser: Page, files: dict[str, Path]) -> None:
    """As text, 0.5 comes before 0.12; a case without a value stays last in both directions."""
    browser.open(files["cohort"])
    assert shown(browser) == ["bad", "fair", "unknown"]
    for heading, expected in (
        ("WT, ml", ["bad", "fair", "unknown"]),
        ("WT, ml", ["unknown", "fair", "bad"]),
        ("TC, ml", ["bad", "fair", "unknown"]),
        ("Mean Dice", ["bad", "fair", "unknown"]),
        ("Mean Dice", ["fair", "bad", "unknown"]),
    ):
        assert press(browser, heading) == expected
    browser.run("document.querySelector('#cases th button').focus()")
    browser.key(" ")
    sorted_by = browser.run("document.querySelector('#cases th[aria-sort]').innerText")
    assert sorted_by.startswith("Case")
    browser.run("document.getElementById('find').focus()")
    browser.key("a")
    assert shown(browser) == ["bad", "fair"]
    browser.run("document.getElementById('find').value = ''")
    browser.click("#warned")
    assert shown(browser) == ["fair"]
    assert browser.run("document.getElementById('shown').textContent") == "1 of 3 cases"
    warned = "document.querySelector('#cases [data-warned] td:last-child').innerText"
    assert browser.run(warned).strip() == "odd"


def test_the_curves_of_a_run_answer_to_the_pointer(browser: Page, files: dict[str, Path]) -> None:
    browser.open(files["run"], width=900, height=900)
    told = "document.querySelector('.history output')"
    browser.run("document.querySelector('.history').scrollIntoView()")
    best = browser.run("document.querySelector('.history').textContent")
    assert "best: epoch" in best
    assert browser.run(f"{told}.hidden")
    for height, words in ((0.1, ("loss", "training")), (0.9, ("learning rate", "rate"))):
        browser.mouse("Moved", ".history svg", (0.3, height))
        assert all(word in browser.run(f"{told}.textContent") for word in ("epoch", *words))
    drawn = browser.run("[...document.querySelectorAll('#cases a')].map((a) => a.hash)")
    assert drawn
    assert all(browser.run(f"document.querySelector('{name}').tagName") == "H3" for name in drawn)
