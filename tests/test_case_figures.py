"""Test figures of one case: modalities, label maps and reconstruction."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.collections import QuadMesh
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.text import Text

from brats_seg.errors import CaseError
from brats_seg.figures.cases import (
    N_SECTIONS,
    _spread,
    montage_figure,
    reconstruction_figure,
    sample_figure,
    tissue_colours,
    uncertainty_figure,
    view_figure,
)
from brats_seg.figures.sections import draw_section
from brats_seg.figures.style import REGION_COLOURS
from brats_seg.figures.view import CaseView, Labelled, open_view
from brats_seg.labels import BRATS2017, BRATS2024, BRATS2024_PED, CONVENTIONS, LabelConvention
from tests.builders import SHAPE, make_label_map, make_volumes, write_case, write_nifti


def test_each_colour_of_the_label_map_is_in_the_legend_under_its_own_name(tmp_path: Path) -> None:
    """The original called WT, TC and ET by the names of tissues."""
    write_case(tmp_path)
    view = open_view(tmp_path)

    figure = sample_figure(view)

    (legend,) = figure.legends
    named = dict(
        zip(
            (to_hex(patch.get_facecolor()) for patch in legend.get_patches()),
            (text.get_text() for text in legend.get_texts()),
            strict=True,
        )
    )
    assert list(named.values()) == [
        "NCR/NET: label 1, in WT, TC",
        "ED: label 2, in WT",
        "ET: label 4, in WT, TC, ET",
    ]
    painted = figure.axes[-1].images[-1].get_array()
    section = int(figure.get_suptitle().split()[-1])
    labels = view.reference.label_map[:, :, section].T
    for value, words in ((1, "NCR"), (2, "ED"), (4, "ET")):
        (colour,) = {to_hex(pixel) for pixel in painted[labels == value]}
        assert named[colour].startswith(words)
    assert (painted[labels == 0][:, 3] == 0).all()


def test_all_four_modalities_are_shown(brats_root: Path) -> None:
    titles = [axes.get_title() for axes in sample_figure(open_view(brats_root)).axes]

    assert titles == ["T1", "T1c", "T2", "FLAIR", "label map over FLAIR"]


def test_a_case_without_label_map_is_shown_too(tmp_path: Path) -> None:
    write_case(tmp_path, labelled=False)

    assert sample_figure(open_view(tmp_path)).axes[-1].get_title() == "FLAIR, no label map"


@pytest.mark.parametrize("convention", CONVENTIONS, ids=lambda convention: convention.name)
def test_every_tissue_has_a_colour_of_its_own(convention: LabelConvention) -> None:
    colours = tissue_colours(convention)

    assert list(colours) == [value for value, _ in convention.meanings]
    assert len(set(colours.values())) == len(colours)


def test_tissues_look_like_the_regions_they_make_up() -> None:
    wt, tc, et = REGION_COLOURS

    assert tissue_colours(BRATS2017) == {1: tc, 2: wt, 4: et}
    assert {tissue_colours(BRATS2024)[value] for value in (1, 2, 3)} == {wt, tc, et}
    assert tissue_colours(BRATS2024_PED)[1] == et
    assert np.isin(tissue_colours(BRATS2024)[4], (wt, tc, et)) == False  # noqa: E712


def test_both_sides_have_the_same_sections_from_end_to_end(brats_root: Path) -> None:
    view = open_view(brats_root)
    shifted = np.roll(view.reference.label_map, 2, axis=2)
    both = replace(view, prediction=replace(view.reference, label_map=shifted))

    left, right = montage_figure(both).subfigs

    indices = [axes.get_title() for axes in left.axes if axes.images]
    assert indices == [axes.get_title() for axes in right.axes if axes.images]
    there = np.flatnonzero((view.reference.label_map | shifted).any(axis=(0, 1)))
    first, last = (int(indices[place].removeprefix("axial ")) for place in (0, -1))
    assert (first, last) == (there[0], there[-1])
    assert [block.get_suptitle().splitlines()[0] for block in (left, right)] == [
        "reference",
        "prediction",
    ]


def test_an_empty_label_map_shows_the_brain(brats_root: Path) -> None:
    view = open_view(brats_root)
    empty = replace(view.reference, label_map=np.zeros_like(make_label_map()))

    (block,) = montage_figure(replace(view, reference=empty)).subfigs

    assert len([axes for axes in block.axes if axes.images]) == N_SECTIONS
    assert isinstance(empty, Labelled)


def letters_of(axes) -> dict[str, str]:
    """Return the letter at each edge, by where it is drawn."""
    found = {
        text.get_position(): text.get_text() for text in axes.texts if len(text.get_text()) < 3
    }
    by_x, by_y = sorted(found), sorted(found, key=lambda place: place[1])
    ends = {"left": by_x[0], "right": by_x[-1], "bottom": by_y[0], "top": by_y[-1]}
    return {edge: found[place] for edge, place in ends.items()}


def all_figures(view: CaseView) -> dict[str, Figure]:
    entropy = np.where(view.prediction.regions[0], 0.7, 0.0)
    return {
        "sample": sample_figure(view),
        "montage": montage_figure(view),
        "preview": view_figure(view),
        "uncertainty": uncertainty_figure(replace(view, uncertainty=entropy)),
        "reconstruction": reconstruction_figure(
            view.images, view.images, case_id=view.case_id, spacing_mm=(1.0, 1.0, 1.0)
        ),
    }


def panels_of(figure: Figure) -> list:
    return [
        axes for axes in figure.findobj(Axes) if axes.images and axes.get_label() != "<colorbar>"
    ]


def both_sides(root: Path) -> CaseView:
    view = open_view(root)
    return replace(view, prediction=view.reference)


def test_every_panel_of_every_figure_names_the_sides_of_the_patient(brats_root: Path) -> None:
    axial = {"left": "R", "right": "L", "top": "A", "bottom": "P"}
    coronal = {"left": "R", "right": "L", "top": "S", "bottom": "I"}
    sagittal = {"left": "A", "right": "P", "top": "S", "bottom": "I"}
    planes = {
        "preview": [axial, coronal, sagittal] * 2,
        "uncertainty": [axial, coronal, sagittal] * 2,
    }

    for name, figure in all_figures(both_sides(brats_root)).items():
        found = [letters_of(axes) for axes in panels_of(figure)]
        assert found == planes.get(name, [axial] * len(found)), name
        assert len(found) >= 5


@pytest.mark.parametrize("signs", [(-1, -1, 1), (1, -1, 1), (-1, 1, -1), (1, 1, 1)])
def test_the_letters_are_right_however_the_files_are_stored(
    tmp_path: Path, signs: tuple[int, int, int]
) -> None:
    """A bright voxel on the patient's left and front is drawn beside L and A."""
    affine = np.diag([*map(float, signs), 1.0])
    left_front = [20 if signs[0] < 0 else 3, 20 if signs[1] > 0 else 3, 8]
    for number, name in enumerate(("t1", "t1ce", "t2", "flair")):
        image = np.full(SHAPE, 100 + number, np.int16)
        image[0], image[-1], image[:, 0], image[:, -1] = 0, 0, 0, 0
        image[..., 0] = image[..., -1] = 0
        image[5:19, 5:19] += np.random.default_rng(number).integers(0, 9, (14, 14, 16), np.int16)
        image[tuple(left_front)] = 1000
        write_nifti(tmp_path / "a" / f"a_{name}.nii.gz", image, affine)
    view = open_view(tmp_path)
    figure = Figure()
    axes = figure.subplots()

    draw_section(axes, view.images[0], 2, 8 if signs[2] > 0 else 7, view.grid)

    (row,), (column,) = np.nonzero(axes.images[0].get_array() == 1000)
    ((x, y),) = axes.transAxes.inverted().transform(axes.transData.transform([(column, row)]))
    letters = letters_of(axes)
    assert letters["right" if x > 0.5 else "left"] == "L"
    assert letters["top" if y > 0.5 else "bottom"] == "A"


def test_the_montage_says_volumes_and_dice(brats_root: Path) -> None:
    view = open_view(brats_root)
    half = view.reference.label_map.copy()
    half[..., : half.shape[2] // 2] = 0
    both = replace(view, prediction=replace(view.reference, label_map=half))

    left, right = montage_figure(both).subfigs

    whole, part = view.reference.regions[0].sum(), (half > 0).sum()
    assert left.get_suptitle().splitlines()[1].startswith(f"WT {whole / 1000:.1f} ml, TC ")
    assert "Dice" not in left.get_suptitle()
    dice = 2 * part / (whole + part)
    expected = f"WT {part / 1000:.1f} ml (Dice {dice:.3f}), TC "
    assert right.get_suptitle().splitlines()[1].startswith(expected)


def test_a_region_that_is_empty_on_both_sides_has_no_dice(tmp_path: Path) -> None:
    write_case(tmp_path, with_et=False)

    _, right = montage_figure(both_sides(tmp_path)).subfigs

    assert right.get_suptitle().endswith("ET 0.0 ml (none in the reference)")


def entries_of(figure: Figure) -> list[str]:
    return [text.get_text().split()[0] for text in figure.legends[0].get_texts()]


def test_there_is_no_legend_entry_for_a_region_that_is_not_there(tmp_path: Path) -> None:
    write_case(tmp_path / "with")
    write_case(tmp_path / "without", with_et=False)
    view = both_sides(tmp_path / "without")
    empty = replace(view.reference, label_map=np.zeros_like(view.reference.label_map))

    for draw in (montage_figure, view_figure):
        assert entries_of(draw(both_sides(tmp_path / "with"))) == ["WT", "TC", "ET"]
        assert entries_of(draw(view)) == ["WT", "TC"]
        assert entries_of(draw(replace(view, reference=empty, prediction=empty))) == []
    assert entries_of(sample_figure(view)) == ["NCR/NET:", "ED:"]


def cut_off(figure: Figure) -> list[str]:
    """Return the words of which a part is outside the figure."""
    canvas = FigureCanvasAgg(figure)
    canvas.draw()
    frame = figure.bbox
    hidden = [axes for axes in figure.findobj(Axes) if not axes.axison]
    unseen = {
        id(text)
        for axes in hidden
        for axis in (axes.xaxis, axes.yaxis)
        for text in axis.findobj(Text)
    }
    boxes = {
        text.get_text(): text.get_window_extent(canvas.get_renderer())
        for text in figure.findobj(Text)
        if text.get_text().strip() and text.get_visible() and id(text) not in unseen
    }
    return [
        words
        for words, box in boxes.items()
        if box.x0 < frame.x0 or box.y0 < frame.y0 or box.x1 > frame.x1 or box.y1 > frame.y1
    ]


@pytest.mark.parametrize("length", [1, 40, 80])
def test_nothing_written_is_cut_at_the_edge(brats_root: Path, length: int) -> None:
    view = replace(both_sides(brats_root), case_id="W" * length)
    one_side = replace(view, prediction=None)

    figures = all_figures(view) | {"one side": montage_figure(one_side)}
    assert {name: cut_off(figure) for name, figure in figures.items()} == {
        name: [] for name in figures
    }


def test_an_id_with_dollars_is_no_formula(brats_root: Path) -> None:
    view = replace(both_sides(brats_root), case_id="a$x^$b")

    view_figure(view).canvas.draw()


def test_the_uncertainty_is_drawn_in_the_colours_of_its_bar(brats_root: Path) -> None:
    view = both_sides(brats_root)
    entropy = np.zeros(view.images.shape[1:])
    entropy[view.prediction.regions[0]] = 0.6
    entropy[view.prediction.regions[1]] = 1.0

    figure = uncertainty_figure(replace(view, uncertainty=entropy))

    axial, bar = panels_of(figure)[3], figure.axes[-1]
    colours = axial.images[1].get_array()
    scale = next(mesh.cmap for mesh in bar.collections if isinstance(mesh, QuadMesh))
    assert bar.get_ylabel() == "entropy (bits)"
    section = int(axial.get_title().split()[-1])
    for value in (0.6, 1.0):
        there = np.isclose(entropy[..., section].T, value)
        assert there.any()
        np.testing.assert_allclose(colours[there], [scale(value)] * there.sum())
    assert (colours[entropy[..., section].T == 0][:, 3] == 0).all()
    ml = np.count_nonzero(entropy) / 1000
    assert f"{ml:.1f} ml above 0.5 bits" in figure.get_suptitle()


def test_the_uncertainty_of_nothing_predicted_is_drawn_where_it_is(brats_root: Path) -> None:
    view = both_sides(brats_root)
    empty = replace(view.reference, label_map=np.zeros_like(view.reference.label_map))
    entropy = np.zeros(view.images.shape[1:])
    entropy[12, 13, 5] = 0.9

    figure = uncertainty_figure(replace(view, prediction=empty, uncertainty=entropy))

    sections = [int(axes.get_title().split()[-1]) for axes in panels_of(figure)[:3]]
    assert sections == [5, 13, 12]


def test_an_uncertainty_without_its_parts_is_an_error(brats_root: Path) -> None:
    view = open_view(brats_root)

    with pytest.raises(CaseError, match="found no prediction"):
        uncertainty_figure(view)
    with pytest.raises(CaseError, match="found no map of its uncertainty"):
        uncertainty_figure(replace(view, prediction=view.reference))


def test_few_sections_are_all_shown() -> None:
    assert _spread(np.array([4, 5, 9])) == [4, 5, 9]
    assert _spread(np.array([4])) == [4]
    assert _spread(np.arange(100))[:2] == [0, 9]
    assert len(_spread(np.arange(100))) == N_SECTIONS


def test_a_row_has_one_scale_and_the_difference_is_absolute() -> None:
    image = make_volumes().astype(np.float32)
    figure = reconstruction_figure(image, image - 10, case_id="case")

    for row in np.array(figure.axes).reshape(4, 3):
        before, after, difference = (axes.images[0] for axes in row)
        assert before.get_clim() == after.get_clim()
        assert difference.get_clim() == (0, before.get_clim()[1] - before.get_clim()[0])
        assert set(np.unique(difference.get_array())) == {0, 10}
        assert row[2].get_xlabel() == "RMSE here 10"
    assert figure.get_suptitle().startswith("case, axial")


def test_what_is_made_up_outside_the_brain_is_not_shown() -> None:
    image = make_volumes().astype(np.float32)
    elsewhere = np.where(image == 0, 5000, image)

    figure = reconstruction_figure(image, elsewhere, case_id="case")

    differences = [axes.images[0].get_array().max() for axes in figure.axes[2::3]]
    assert max(differences) == 0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_flat_images_can_be_drawn(value: float) -> None:
    image = np.full((4, 8, 8, 8), value, np.float32)

    reconstruction_figure(image, image, case_id="case").canvas.draw()
