"""Sections from one end of the tumour to the other."""

from dataclasses import replace
from pathlib import Path

import numpy as np

from brats_seg.report.case_figures import N_SECTIONS, _spread, montage_figure
from brats_seg.report.case_view import Labelled, open_view
from tests.builders import make_label_map


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
