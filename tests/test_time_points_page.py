"""The page of two time points, in a browser and without one."""

from dataclasses import replace
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.discovery import find_cases
from brats_seg.cases.nifti import Geometry, oriented, read_volume
from brats_seg.cases.phantom import write_phantom_cases
from brats_seg.errors import CaseError
from brats_seg.figures.view import CaseView, Labelled, open_view
from brats_seg.pages.case import CasePage, Fact
from brats_seg.pages.time_points_page import (
    LEAST_OVERLAP,
    RegionChange,
    _overlap,
    compare_time_points,
    time_point_remarks,
    write_time_points_page,
)
from tests.browser import Page
from tests.test_case_page import HOSTILE, coloured, outside
from tests.test_html import Tags


@pytest.fixture(scope="module")
def earlier(tmp_path_factory: pytest.TempPathFactory) -> CaseView:
    root = tmp_path_factory.mktemp("scans")
    write_phantom_cases(root, n_cases=1, seed=0, shape=(40, 44, 36))
    return open_view(root)


@pytest.fixture(scope="module")
def later(earlier: CaseView) -> CaseView:
    """The same scan with other noise, in which a block of 3x4x5 voxels enhances too."""
    images = np.where(earlier.images != 0, earlier.images + 1, 0)
    assert earlier.reference is not None
    label_map = earlier.reference.label_map.copy()
    x, y, z = np.argwhere(label_map == 0).min(axis=0)
    label_map[x : x + 3, y : y + 4, z : z + 5] = 4
    return with_label_map(replace(earlier, case_id="later", images=images), label_map)


def with_label_map(view: CaseView, label_map: np.ndarray) -> CaseView:
    assert view.reference is not None
    labelled = Labelled(label_map=label_map, convention=view.reference.convention)
    return replace(view, reference=labelled)


@pytest.fixture(scope="module")
def page_file(earlier: CaseView, later: CaseView, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("pages") / "a.html"
    first = CasePage(
        view=replace(earlier, case_id=HOSTILE),
        flags=(f"odd {HOSTILE}",),
        facts=(Fact(name="Model", words=HOSTILE),),
    )
    write_time_points_page(first, CasePage(view=later), path)
    return path


def moved(view: CaseView) -> CaseView:
    """Return a view of a scan whose origin is 10 mm away."""
    geometry: Geometry = view.geometry
    affine = geometry.affine.copy()
    affine[0, 3] += 10
    return replace(view, geometry=replace(geometry, affine=affine))


def test_growth_is_measured_for_each_region_and_by_voxel(
    earlier: CaseView, later: CaseView
) -> None:
    found = compare_time_points(earlier, later)

    # 60 voxels of 1 mm3, none of which was tumour
    assert [change.region for change in found.changes] == ["wt", "tc", "et"]
    for change in found.changes:
        assert change.change_ml == pytest.approx(0.06)
        assert change.gained_ml == pytest.approx(0.06)
        assert change.lost_ml == pytest.approx(0)
        assert change.change_percent == pytest.approx(6 / change.earlier_ml)
    assert found.brain_overlap == 1


def test_shrinkage_is_growth_backwards(earlier: CaseView, later: CaseView) -> None:
    found = compare_time_points(later, earlier)

    assert [change.lost_ml for change in found.changes] == pytest.approx([0.06] * 3)
    assert [change.change_ml for change in found.changes] == pytest.approx([-0.06] * 3)


def test_growth_from_nothing_has_no_per_cent() -> None:
    change = RegionChange(
        region="et",
        earlier_ml=0.0,
        later_ml=2.0,
        earlier_mm2=0.0,
        later_mm2=0.0,
        gained_ml=2.0,
        lost_ml=0.0,
    )

    assert change.change_percent is None


def test_a_prediction_is_compared_if_there_is_one(earlier: CaseView, later: CaseView) -> None:
    predicted = replace(later, prediction=earlier.reference)

    found = compare_time_points(earlier, predicted)

    assert [change.change_ml for change in found.changes] == pytest.approx([0.0] * 3)
    (remark,) = time_point_remarks(found)
    assert "by its reference" in remark
    assert "by its prediction" in remark


def test_scans_of_different_grids_have_no_changed_voxels(
    earlier: CaseView, later: CaseView, tmp_path: Path
) -> None:
    found = write_time_points_page(
        CasePage(view=earlier), CasePage(view=moved(later)), tmp_path / "a.html"
    )

    assert {change.gained_ml for change in found.changes} == {None}
    assert "different grids" in time_point_remarks(found)[0]
    text = (tmp_path / "a.html").read_text()
    assert "Only later" not in text
    assert "The crosshair moves in both" not in text


def test_scans_of_two_patients_are_remarked_on(earlier: CaseView, later: CaseView) -> None:
    other = replace(later, images=np.roll(later.images, 6, axis=1))

    found = compare_time_points(earlier, other)

    assert found.brain_overlap is not None
    assert found.brain_overlap < 0.95
    assert "Check that both are of one patient" in time_point_remarks(found)[0]
    assert time_point_remarks(compare_time_points(earlier, later)) == ()


def test_a_copy_is_remarked_on(earlier: CaseView) -> None:
    found = compare_time_points(earlier, replace(earlier, case_id="copy"))

    assert time_point_remarks(found) == (
        "Both time points have the same voxels: one is a copy of the other.",
    )


def test_a_case_without_a_label_map_is_refused(earlier: CaseView) -> None:
    with pytest.raises(CaseError, match=r"case bare, .* found neither reference nor prediction"):
        compare_time_points(earlier, replace(earlier, case_id="bare", reference=None))


def test_two_viewers_draw_with_one_crosshair_and_nothing_comes_from_outside(
    browser: Page, page_file: Path, tmp_path: Path
) -> None:
    browser.open(page_file, width=1500)
    places = (
        "viewers.map((v) => String([...v.nv.frac2mm(v.nv.scene.crosshairPos)].map(Math.round)))"
    )
    before = browser.run(places)
    browser.run("document.querySelector('canvas').focus()")
    browser.key("ArrowLeft")
    after = browser.run(places)

    assert browser.run("document.documentElement.dataset.viewer") == "ready"
    assert coloured(browser.picture(tmp_path / "a.png", ".card:first-child canvas")) > 300
    assert coloured(browser.picture(tmp_path / "a.png", ".card:last-child canvas")) > 300
    assert len(set(before)) == len(set(after)) == 1
    assert before != after
    assert (browser.complaints, outside(browser)) == ([], [])


def test_ids_cannot_add_tags(page_file: Path) -> None:
    found = Tags(page_file.read_text()).found

    assert [values for tag, values in found if tag == "img" and values.get("src") == "x"] == []
    assert any(HOSTILE in str(values.get("alt")) for _, values in found)


@pytest.mark.real
@pytest.mark.slow
def test_brains_of_two_patients_overlap_less_than_those_of_one(real_data: Path) -> None:
    cases = [
        case for root in ("BraTS2018", "BraTS2021") for case in find_cases(real_data / root).cases
    ]
    scans = [read_volume(case.path_of(case.images[3]), case_id=case.case_id) for case in cases]
    brains = [oriented(scan).array != 0 for scan in scans]

    pairs = [_overlap(one, other) for one, other in combinations(brains, 2)]
    moved_3_mm = [_overlap(brain, np.roll(brain, 3, axis=0)) for brain in brains]

    assert len(pairs) == 66
    assert max(pairs) < LEAST_OVERLAP < min(moved_3_mm)
