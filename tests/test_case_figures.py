"""Test figures of one case: modalities, label maps and reconstruction."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from brats_seg.labels import BRATS2017, BRATS2024, BRATS2024_PED, CONVENTIONS, LabelConvention
from brats_seg.report.case_figures import (
    N_SECTIONS,
    _spread,
    montage_figure,
    reconstruction_figure,
    sample_figure,
    tissue_colours,
)
from brats_seg.report.case_view import Labelled, open_view
from brats_seg.report.style import REGION_COLOURS
from tests.builders import make_label_map, make_volumes, write_case


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

    assert titles == ["t1n", "t1c", "t2w", "t2f", "label map over t2f"]


def test_a_case_without_label_map_is_shown_too(tmp_path: Path) -> None:
    write_case(tmp_path, labelled=False)

    assert sample_figure(open_view(tmp_path)).axes[-1].get_title() == "t2f, no label map"


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
    assert (int(indices[0]), int(indices[-1])) == (there[0], there[-1])
    assert [block.get_suptitle() for block in (left, right)] == ["reference", "prediction"]


def test_an_empty_label_map_shows_the_brain(brats_root: Path) -> None:
    view = open_view(brats_root)
    empty = replace(view.reference, label_map=np.zeros_like(make_label_map()))

    (block,) = montage_figure(replace(view, reference=empty)).subfigs

    assert len([axes for axes in block.axes if axes.images]) == N_SECTIONS
    assert isinstance(empty, Labelled)


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
