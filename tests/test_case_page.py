"""The page of a case without a browser: what it holds, and the coding of its volumes."""

import base64
import gzip
import re
from dataclasses import replace
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from brats_seg.figures.cases import CaseView
from brats_seg.pages import case
from tests.test_pages import moved_view


@pytest.fixture(scope="module")
def view(tiny_scans: Path) -> CaseView:
    return moved_view(tiny_scans)


def test_the_rows_of_volumes_are_of_both_sides(view: CaseView) -> None:
    _, _, ml, scores = zip(*case.part_rows(view), strict=True)
    wt, tc, et, oedema, necrosis = (part["reference"] for part in ml)
    assert ml[0]["prediction"] == wt == pytest.approx(oedema + tc)
    assert tc == pytest.approx(et + necrosis)
    assert 0.5 < scores[0] < 1
    assert scores[3:] == (None, None)


def test_a_case_without_label_maps_has_a_page_of_its_scans(view: CaseView, tmp_path: Path) -> None:
    alone = replace(view, prediction=None, reference=None, uncertainty=None)
    case.write_case_page(alone, tmp_path / "a.html")
    warnings = ("look at <t2f> [mm: 8; usual at most 3]", "no [file] here")
    case.write_case_page(alone, tmp_path / "b.html", warnings=warnings)
    page, flagged = ((tmp_path / name).read_text() for name in ("a.html", "b.html"))
    assert "No warning was raised" in page
    assert "Volume (ml)" not in re.sub("<script.*", "", page, flags=re.DOTALL)
    # the measure is folded, and brackets elsewhere are text
    assert "<summary>look at &lt;t2f&gt;</summary>mm: 8; usual at most 3</details>" in flagged
    assert "no [file] here" in flagged


def decoded(volume: case.EmbeddedVolume) -> nib.Nifti1Image:
    """Undo the coding that the docstring of `_encode_voxels` describes, one difference after the other."""
    header = base64.b64decode(volume.header)
    shape = nib.Nifti1Header(header[:348]).get_data_shape()
    content = gzip.decompress(base64.b64decode(volume.data))
    if len(content) > np.prod(shape):
        low, high = np.frombuffer(content, np.uint8).reshape(2, -1).astype(int)
        code = low + 256 * high
        voxels = np.where(code % 2, -(code + 1) // 2, code // 2).reshape(shape, order="F")
        for axis in (2, 1, 0):
            voxels = np.cumsum(voxels, axis=axis)
        content = voxels.astype(np.uint16).tobytes(order="F")
    return nib.Nifti1Image.from_bytes(header + content)


@pytest.mark.parametrize(
    ("dtype", "factor", "step"),
    [(np.int16, 1, 1), (np.float32, 1, 1), (np.float64, 1e-3, None), (np.int32, 1000, None)],
)
def test_embedded_volumes_have_the_values_and_the_place_of_the_files(view, dtype, factor, step):
    images = (view.images * factor).astype(dtype)
    images[0][images[0] > 0] *= -1
    box = case._find_box(view)
    volumes = case.embedded_volumes(replace(view, images=images), box)
    assert [one.name for one in volumes[4:]] == ["labels", "uncertainty"]
    for volume, image in zip(volumes, images, strict=False):
        assert step is None or volume.step == step
        assert volume.step == 1 or volume.step < 1e-4 * np.abs(image).max()
        found = decoded(volume)
        expected = image[box.slices]
        np.testing.assert_allclose(found.get_fdata(), expected, rtol=1e-6, atol=volume.step / 2)
        corner = view.affine @ [*box.start, 1]
        np.testing.assert_allclose(found.affine @ [0, 0, 0, 1], corner)
    codes = decoded(volumes[4]).get_fdata().astype(int)
    for k, side in enumerate(view.sides.values()):
        np.testing.assert_array_equal(codes >> 4 * k & 15, side.label_map[box.slices])


def test_large_scans_are_rounded_until_the_page_is_small(view, tmp_path, monkeypatch):
    box = case._find_box(view)
    exact = case.embedded_volumes(view, box)
    n_bytes = sum(len(volume.data) for volume in exact)
    monkeypatch.setattr("brats_seg.pages.case.MOST_BYTES", n_bytes * 3 // 4)
    rounded = case.embedded_volumes(view, box)
    case.write_case_page(view, tmp_path / "a.html")
    assert sum(len(volume.data) for volume in rounded) <= n_bytes * 3 // 4
    assert {volume.step for volume in exact[:4]} == {1}
    assert rounded[0].step >= 4
    assert "rounded to steps of at most" in (tmp_path / "a.html").read_text()
