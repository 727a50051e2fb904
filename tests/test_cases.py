"""Reading a case for figures, and the figures of its modalities, label maps and uncertainty."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text
from matplotlib.transforms import Bbox

from brats_seg.cases.layouts import OUTPUT_MARKER
from brats_seg.errors import CaseError, LabelError, UsageError
from brats_seg.figures import cases
from brats_seg.figures.cases import CaseView, open_view, with_prediction, with_uncertainty
from brats_seg.figures.sections import REGION_COLOURS, Grid
from brats_seg.inference.results import result_files
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, CONVENTIONS
from tests.builders import make_label_map, make_volumes, write_arrays, write_case, write_nifti

AXIAL = {"left": "R", "right": "L", "top": "A", "bottom": "P"}
CORONAL = {"left": "R", "right": "L", "top": "S", "bottom": "I"}
SAGITTAL = {"left": "A", "right": "P", "top": "S", "bottom": "I"}
FIGURES = {
    "sample": cases.sample_figure,
    "montage": cases.montage_figure,
    "one side": lambda view: cases.montage_figure(replace(view, prediction=None)),
    "preview": cases.view_figure,
    "uncertainty": cases.uncertainty_figure,
    "reconstruction": lambda view: cases.reconstruction_figure(
        view.images, view.images, case_id=view.case_id, spacing_mm=(1.0, 1.0, 1.0)
    ),
}


@pytest.fixture(scope="module")
def view(tiny_scans: Path) -> CaseView:
    """A case whose prediction is the upper half of its reference, uncertain inside."""
    found = open_view(tiny_scans)
    half = found.reference.label_map.copy()
    half[..., : half.shape[2] // 2] = 0
    prediction = replace(found.reference, label_map=half)
    entropy = np.where(prediction.regions[0], 0.7, 0.0)
    return replace(found, prediction=prediction, uncertainty=entropy)


def panels_of(figure: Figure) -> list[Axes]:
    drawn = [axes for axes in figure.findobj(Axes) if axes.images]
    return [axes for axes in drawn if axes.get_label() != "<colorbar>"]


def letters_of(axes: Axes) -> dict[str, str]:
    return {text.get_gid(): text.get_text() for text in axes.texts if text.get_gid()}


def cut_off(figure: Figure) -> list[str]:
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    hidden = [axes for axes in figure.findobj(Axes) if not axes.axison]
    unseen = [text for axes in hidden for a in (axes.xaxis, axes.yaxis) for text in a.findobj(Text)]
    outside = []
    for text in figure.findobj(Text):
        if text.get_text().strip() and text.get_visible() and text not in unseen:
            box = text.get_window_extent(canvas.get_renderer())
            if not np.array_equal(Bbox.union([figure.bbox, box]), figure.bbox):
                outside.append(text.get_text())
    return outside


@pytest.mark.parametrize("name", FIGURES)
def test_every_panel_has_its_letters_and_no_text_is_cut_off(view: CaseView, name: str) -> None:
    figure = FIGURES[name](replace(view, case_id="a$x^$b"))
    panels = panels_of(figure)
    texts = [text.get_text() for text in figure.findobj(Text)]
    planes = [AXIAL, CORONAL, SAGITTAL] * 2
    expected = planes if name in {"preview", "uncertainty"} else [AXIAL] * len(panels)
    assert [letters_of(axes) for axes in panels] == expected
    assert len(panels) >= 5
    assert any(text.endswith(" mm") for text in texts)
    assert any("research use only" in text for text in texts)
    assert cut_off(figure) == []
    assert cut_off(FIGURES[name](replace(view, case_id="W" * 80))) == []
    too_wide = Figure()
    too_wide.suptitle("W" * 200)
    assert cut_off(too_wide) == ["W" * 200]


def test_each_colour_of_the_label_map_is_in_the_legend_under_its_own_name(view: CaseView) -> None:
    figure = cases.sample_figure(view)
    titles = [axes.get_title() for axes in figure.axes]
    assert titles == ["T1", "T1c", "T2", "FLAIR", "label map over FLAIR"]
    (legend,) = figure.legends
    words = [text.get_text() for text in legend.get_texts()]
    meanings = ("NCR/NET: label 1, in WT, TC", "ED: label 2, in WT", "ET: label 4, in WT, TC, ET")
    assert words == [*meanings]
    named = dict(zip([to_hex(line.get_color()) for line in legend.get_lines()], words, strict=True))
    painted = figure.axes[-1].images[-1].get_array()
    labels = view.reference.label_map[:, :, int(figure.get_suptitle().split()[-1])].T
    for value, start in ((1, "NCR"), (2, "ED"), (4, "ET")):
        (colour,) = {to_hex(pixel) for pixel in painted[labels == value]}
        assert named[colour].startswith(start)
    assert (painted[labels == 0][:, 3] == 0).all()
    without = cases.sample_figure(replace(view, reference=None))
    assert without.axes[-1].get_title() == "FLAIR, no label map"


def test_every_tissue_has_a_colour_of_its_own_like_the_region_it_makes_up() -> None:
    wt, tc, et = REGION_COLOURS
    for convention in CONVENTIONS:
        colours = cases.tissue_colours(convention)
        assert list(colours) == [value for value, _ in convention.meanings]
        assert len(set(colours.values())) == len(colours)
    assert cases.tissue_colours(BRATS2017) == {1: tc, 2: wt, 4: et}
    assert {cases.tissue_colours(BRATS2024)[value] for value in (1, 2, 3)} == {wt, tc, et}
    assert cases.tissue_colours(BRATS2024_PED)[1] == et
    assert cases.tissue_colours(BRATS2024)[4] not in (wt, tc, et)


def test_a_montage_has_equal_sections_with_volumes_and_dice(view: CaseView) -> None:
    left, right = cases.montage_figure(view).subfigs
    indices = [axes.get_title() for axes in left.axes if axes.images]
    assert indices == [axes.get_title() for axes in right.axes if axes.images]
    tumour = np.flatnonzero((view.reference.label_map > 0).any(axis=(0, 1)))
    assert (indices[0], indices[-1]) == (f"axial {tumour[0]}", f"axial {tumour[-1]}")
    whole, part = (side.regions[0].sum() for side in (view.reference, view.prediction))
    dice = 2 * part / (whole + part)
    assert left.get_suptitle().startswith(f"reference\nWT {whole / 1000:.1f} ml, TC ")
    assert "Dice" not in left.get_suptitle()
    expected = f"prediction\nWT {part / 1000:.1f} ml (Dice {dice:.3f}), TC "
    assert right.get_suptitle().startswith(expected)


def test_the_legend_tells_regions_that_are_missing(tmp_path: Path) -> None:
    write_case(tmp_path, with_et=False)
    view = open_view(tmp_path)
    empty = replace(view.reference, label_map=np.zeros_like(view.reference.label_map))
    missed = replace(view, prediction=empty)
    nothing = replace(missed, reference=empty)
    figures = cases.view_figure(missed), cases.sample_figure(view)
    of_view, of_sample = ([text.get_text() for text in f.legends[0].get_texts()] for f in figures)
    of_none = "ET 0.0 ml (none in the reference)"
    assert of_view[::2] == ["WT 0.0 ml (Dice 0.000)", of_none]
    assert [text.split()[0] for text in of_sample] == ["NCR/NET:", "ED:"]
    assert cases.montage_figure(missed).subfigs[1].get_suptitle().endswith(of_none)
    assert cases.view_figure(nothing).get_suptitle().endswith("no tumour")
    # the brain is shown instead
    assert len(panels_of(cases.montage_figure(nothing))) == 2 * cases.N_SECTIONS


def test_the_three_planes_have_one_scale(view: CaseView) -> None:
    figure = cases.view_figure(view)
    FigureCanvasAgg(figure).draw()
    ends = [axes.transData.transform([(0, 0), (1, 0)])[:, 0] for axes in panels_of(figure)]
    np.testing.assert_allclose(np.ptp(ends, axis=1), np.ptp(ends[0]), rtol=1e-6)


def test_the_uncertainty_is_drawn_in_the_colours_of_its_bar(view: CaseView) -> None:
    entropy = view.uncertainty.copy()
    entropy[view.prediction.regions[1]] = 1.0
    figure = cases.uncertainty_figure(replace(view, uncertainty=entropy))
    axial, bar = panels_of(figure)[3], figure.axes[-1]
    drawn = axial.images[1]
    section = int(axial.get_title().split()[-1])
    np.testing.assert_array_equal(drawn.get_array(), entropy[..., section].T)
    assert bar.get_ylabel() == "entropy (bits)"
    assert drawn.get_cmap() == cases._HEAT
    assert drawn.get_clim() == bar.get_ylim() == (0, 1)
    # from transparent to opaque without a step
    opacity = cases._HEAT(np.linspace(0, 1, 256))[:, 3]
    assert (opacity[0], opacity[-1]) == (0, 1)
    assert 0 <= np.diff(opacity).min() <= np.diff(opacity).max() < 0.02
    assert f"{np.count_nonzero(entropy) / 1000:.1f} ml above 0.5 bits" in figure.get_suptitle()


def test_a_row_has_one_scale_and_the_difference_is_absolute_and_inside_the_brain() -> None:
    image = make_volumes().astype(np.float32)
    outside = image == 0
    figure = cases.reconstruction_figure(image, np.where(outside, 5000, image - 10), case_id="case")
    for row in np.array(figure.axes).reshape(4, 3):
        before, after, difference = (axes.images[0] for axes in row)
        assert before.get_clim() == after.get_clim()
        assert difference.get_clim() == (0, before.get_clim()[1] - before.get_clim()[0])
        assert set(np.unique(difference.get_array())) == {0, 10}
        assert row[2].get_title() == "difference, RMSE here 10"
        assert len({(axes.get_xlim(), axes.get_ylim()) for axes in row}) == 1
    assert figure.get_suptitle().startswith("case, axial")


def test_a_prediction_has_a_convention_of_its_own(brats_root: Path, tmp_path: Path) -> None:
    predicted = make_label_map(convention=BRATS2023, seed=7)
    write_nifti(tmp_path / "p" / "BraTS2021_00000.nii.gz", predicted)
    view = with_prediction(open_view(brats_root), tmp_path / "p")
    np.testing.assert_array_equal(view.image("FLAIR"), make_volumes()[3])
    np.testing.assert_array_equal(view.reference.label_map, make_label_map())
    assert (view.case_id, view.reference.convention) == ("BraTS2021_00000", BRATS2017)
    assert view.prediction.convention == BRATS2023
    assert [*cases.masks_to_draw(view)] == ["reference", "prediction"]
    np.testing.assert_array_equal(cases.masks_to_draw(view)["prediction"][2], predicted == 3)
    (tmp_path / "p" / "volumes.csv").write_text("case_id,convention\nBraTS2021_00000,brats2024\n")
    recorded = with_prediction(open_view(brats_root), tmp_path / "p").prediction
    assert recorded.convention.name == "brats2024"


@pytest.mark.parametrize(
    ("draw", "error", "words"),
    [
        (lambda root: open_view(root, "X"), UsageError, "it has BraTS2021_00000, .* and 1 more"),
        (lambda root: with_prediction(open_view(root), root / "p"), UsageError, "it has other"),
        (lambda root: with_prediction(open_view(root), root / "no"), UsageError, "does not exist"),
        (lambda root: with_prediction(open_view(root), root / "p/other.nii.gz"), CaseError, "grid"),
        (lambda root: open_view(root).image("swi"), UsageError, "no swi; there are t1n, t1c"),
        (lambda root: open_view(root, labels="brats2023"), LabelError, r"label values \[4\]"),
        (lambda root: with_uncertainty(open_view(root), root / "p"), UsageError, "--uncertainty"),
    ],
    ids=["case", "folder", "file", "grid", "modality", "labels", "uncertainty"],
)
def test_unreadable_input_is_refused(brats_root: Path, draw, error: type, words: str) -> None:
    write_nifti(brats_root / "p" / "other.nii.gz", make_label_map()[:, :, :-1])
    (brats_root / "p" / OUTPUT_MARKER).touch()
    with pytest.raises(error, match=words):
        draw(brats_root)


def test_the_directions_come_from_the_files_and_the_background_is_0(tmp_path: Path) -> None:
    # 2 mm to the right, 3 mm to the head, 1 mm to the front
    affine = np.array([[2.0, 0, 0, 0], [0, 0, 1, 0], [0, 3, 0, 0], [0, 0, 0, 1]])
    images = make_volumes()
    write_arrays(tmp_path / "a", np.where(images == 0, -5, images), affine)
    view = open_view(tmp_path)
    # R S A instead of L P S
    np.testing.assert_array_equal(view.images[0], np.swapaxes(images[0], 1, 2)[::-1, ::-1])
    assert view.grid == Grid(spacing_mm=(2.0, 1.0, 3.0), directions=("L", "P", "S"))
    assert view.grid.voxel_ml == 0.006


def test_the_uncertainty_is_found_or_refused(brats_root: Path, tmp_path: Path) -> None:
    entropy = np.random.default_rng(0).uniform(0, 1, make_label_map().shape).astype(np.float32)
    view, path = open_view(brats_root), tmp_path / "uncertainty" / "BraTS2021_00000.nii.gz"
    write_nifti(path, entropy)
    np.testing.assert_array_equal(with_uncertainty(view, tmp_path).uncertainty, entropy)
    bids = result_files("bids", view.case_id, "brats2017").uncertainty
    write_nifti(tmp_path / "bids" / bids, entropy)
    np.testing.assert_array_equal(with_uncertainty(view, tmp_path / "bids").uncertainty, entropy)
    for other, message in (
        (np.full_like(entropy, 3), r"values from 3 to 3; expected entropies from 0 to 1 bit"),
        (np.full_like(entropy, np.nan), r"values from nan to nan; expected entropies"),
        (np.zeros_like(entropy)[:-1], r"expected the grid of the scans"),
    ):
        write_nifti(path, other)
        with pytest.raises(CaseError, match=message):
            with_uncertainty(view, tmp_path)
