"""The picture of what a case is, and a legend that says what the layers are."""

from pathlib import Path

import numpy as np
import pytest
from matplotlib.colors import to_hex

from brats_seg.labels import BRATS2017, BRATS2024, BRATS2024_PED, CONVENTIONS, LabelConvention
from brats_seg.report.case_figures import sample_figure, tissue_colours
from brats_seg.report.case_view import open_view
from brats_seg.report.style import REGION_COLOURS
from tests.builders import write_case


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
