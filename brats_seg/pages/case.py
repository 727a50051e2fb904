"""Write the page of a case: viewer, volumes, lesions, warnings, and where everything came from.

Whole numbers are embedded as they are; other numbers are rounded to 65,536 steps, and to fewer where
the volumes would take more than `MOST_BYTES`. Without a script or WebGL the tables and pictures remain.
"""

import base64
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import nibabel as nib
import numpy as np
import numpy.typing as npt

from brats_seg.evaluation.lesions import list_lesions
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.figures import cases
from brats_seg.figures.sections import MODALITY_NAMES, REGION_COLOURS, centre_of, grey_limits
from brats_seg.labels import MODALITIES
from brats_seg.pages.html import Fact, data_uri, load_niivue, packed, picture_uri, write_page
from brats_seg.voxels.box import Box, bounding_box
from brats_seg.voxels.grids import Affine

MOST_BYTES = 12_500_000
"""Largest size of the volumes of a case, which leaves room for the rest of the page."""

_REGION_NAMES = {"wt": "Whole tumour", "tc": "Tumour core", "et": "Enhancing tumour"}
_TISSUES = ("WT without TC", "TC without ET")
_ENTROPY_STEP = 1 / 250
_FADING_BITS = 0.25
"""Entropy below which its colours fade, as in pictures."""
_COARSER = (1, 4, 16, 64, 256)
"""Factors by which the steps of scans become coarser until the volumes are small enough."""
_INT16 = np.iinfo(np.int16)


class EmbeddedVolume(NamedTuple):
    """One volume in a page, from which the page makes a NIfTI file."""

    name: str
    """A modality, `labels` or `uncertainty`."""
    header: str
    """Header of the file, in base64."""
    data: str
    """Voxels, as `packed` returns them; those of scans are coded, see `_encode_voxels`."""
    step: float
    """Difference between neighbouring values; 1 for whole numbers."""
    low: float
    """Value that is drawn black; of the uncertainty that below which it fades."""
    high: float
    """Value that is drawn white."""


def write_case_page(
    view: cases.CaseView,
    path: Path,
    *,
    warnings: Sequence[str] = (),
    facts: Sequence[Fact] = (),
    steps: Path | None = None,
) -> None:
    """Write the page of a case.

    Args:
        view: Scans of the case, with the label maps and the uncertainty that it has.
        path: The page.
        warnings: Sentences on what speaks against the scans or the prediction.
        facts: Origin of the scans and of the prediction.
        steps: Picture of how the scans were prepared, if there is one.
    """
    box = _find_box(view)
    volumes = embedded_volumes(view, box)
    first = [*view.sides.items()][:1]
    lesions = {name: list_lesions(side.regions, view.affine) for name, side in first}
    write_page(
        path,
        "case.html",
        title=view.case_id,
        warnings=warnings,
        facts=(*facts, *_facts_of_grid(view, volumes)),
        parts=part_rows(view),
        lesions=lesions,
        legend=_legend(view),
        pictures=tuple(_pictures(view)),
        steps=data_uri(steps.read_bytes(), "image/png") if steps and steps.is_file() else "",
        viewer={
            "title": view.case_id,
            "volumes": [volume._asdict() for volume in volumes],
            "shape": box.shape,
            "to_file": np.linalg.inv(view.geometry.affine).tolist(),
            "centre_mm": _centre_mm(view),
            "sides": [
                (name, dict(side.convention.meanings), cases.tissue_colours(side.convention))
                for name, side in view.sides.items()
            ],
        },
        scans=[(name, MODALITY_NAMES[name]) for name in view.modalities],
        layers=[*view.sides] + ["uncertainty"] * (view.uncertainty is not None),
        region_names=_REGION_NAMES,
        niivue=load_niivue(),
    )


def part_rows(view: cases.CaseView) -> list[tuple[str, str, dict[str, float], float | None]]:
    """Return name, colour, ml by side, and Dice of every region and of the tissues between them."""
    names = [f"{name} ({region.upper()})" for region, name in _REGION_NAMES.items()]
    ml = {}
    for side, labelled in view.sides.items():
        wt, tc, et = (np.count_nonzero(mask) * view.grid.voxel_ml for mask in labelled.regions)
        ml[side] = (wt, tc, et, wt - tc, tc - et)
    scores: list[float | None] = [None] * 5
    if view.prediction is not None and view.reference is not None:
        counts = count_regions(view.prediction.regions, view.reference.regions, view.case_id)
        scores[:3] = dice(counts).tolist()
    of_sides = [dict(zip(ml, values, strict=True)) for values in zip(*ml.values(), strict=True)]
    return [*zip((*names, *_TISSUES), (*REGION_COLOURS, "", ""), of_sides, scores, strict=False)]


def embedded_volumes(view: cases.CaseView, box: Box) -> tuple[EmbeddedVolume, ...]:
    """Embed the part in a box of the scans of a case, its label maps and its uncertainty."""
    affine = view.affine.copy()
    affine[:3, 3] += affine[:3, :3] @ box.start
    layers = []
    # the first label map has the low four bits of a voxel, and the second the others
    maps = [side.label_map[box.slices] << 4 * k for k, side in enumerate(view.sides.values())]
    if maps:
        layers.append(_embedded("labels", np.bitwise_or.reduce(maps), affine, 1.0, (0.0, 255.0)))
    if view.uncertainty is not None:
        stored = np.rint(view.uncertainty[box.slices].clip(0, 1) / _ENTROPY_STEP).astype(np.uint8)
        layers.append(_embedded("uncertainty", stored, affine, _ENTROPY_STEP, (_FADING_BITS, 1.0)))
    for coarser in _COARSER:
        scans = []
        for name, image in zip(view.modalities, view.images, strict=True):
            cut = image[box.slices]
            step = _quantisation_step(cut) * coarser
            stored = np.rint(cut / step).astype(np.int16)
            scans.append(_embedded(name, stored, affine, step, grey_limits(cut)))
        volumes = (*scans, *layers)
        if sum(len(volume.data) for volume in volumes) <= MOST_BYTES:
            break
    return volumes


def _find_box(view: cases.CaseView) -> Box:
    """Return the box of the brain and of all labels, with one voxel around it."""
    is_shown = (view.images != 0).any(axis=0)
    for side in view.sides.values():
        is_shown |= side.label_map > 0
    x, y, z = is_shown.shape
    box = bounding_box(is_shown) or Box(start=(0, 0, 0), stop=(x, y, z))
    return box.grown(1).within((x, y, z))


def _quantisation_step(image: npt.NDArray[Any]) -> float:
    """Return the step with which int16 holds an image, in which 0 stays 0; 1 for whole numbers."""
    low, high = float(image.min()), float(image.max())
    if _INT16.min <= low and high <= _INT16.max and bool((image == np.rint(image)).all()):
        return 1.0
    return max(high / _INT16.max, low / _INT16.min)


def _embedded(
    name: str, stored: npt.NDArray[Any], affine: Affine, step: float, limits: tuple[float, float]
) -> EmbeddedVolume:
    header = nib.Nifti1Image(stored, affine).header
    header.set_slope_inter(step, 0)
    header["vox_offset"] = 352
    voxels = stored.tobytes(order="F") if stored.dtype == np.uint8 else _encode_voxels(stored)
    # four bytes say that there are no extensions
    coded_header = base64.b64encode(header.binaryblock + bytes(4)).decode()
    return EmbeddedVolume(name, coded_header, packed(voxels), step, *limits)


def _encode_voxels(stored: npt.NDArray[Any]) -> bytes:
    """Return int16 voxels (X, Y, Z) in a form that gzip halves once more.

    They become differences along X, of these along Y, and of these along Z, modulo 2^16, with the sign
    in the lowest bit, and all low bytes stand before all high bytes. X runs fastest, as in NIfTI.
    """
    differences: npt.NDArray[Any] = stored.view(np.uint16)
    for axis in range(3):
        # unsigned numbers wrap around, here and in the page
        differences = np.diff(differences, axis=axis, prepend=np.uint16(0))
    signed = differences.view(np.int16)
    folded = ((signed << 1) ^ (signed >> 15)).ravel(order="F").astype("<u2")
    return folded.view(np.uint8).reshape(-1, 2).T.tobytes()


def _centre_mm(view: cases.CaseView) -> list[float]:
    """Return the middle of the first tumour that is there, or of the brain."""
    regions = (side.regions for side in view.sides.values() if side.label_map.any())
    centre = centre_of(next(regions, None), view.images[0])
    return (view.affine @ [*centre, 1])[:3].tolist()


def _legend(view: cases.CaseView) -> list[tuple[str, str]]:
    """Return the colours of the tissues, and what each means on either side."""
    texts: dict[str, dict[str, None]] = {}
    for side in view.sides.values():
        colours = cases.tissue_colours(side.convention)
        for value, meaning in side.convention.meanings:
            texts.setdefault(colours[value], {})[f"{meaning} (label {value})"] = None
    return [(colour, " or ".join(meanings)) for colour, meanings in texts.items()]


def _pictures(view: cases.CaseView) -> Iterator[tuple[str, str]]:
    """Yield static pictures, each with words for readers who do not see it."""
    if view.sides:
        caption = "Three planes through the tumour, with the outlines of its regions"
        yield picture_uri(cases.view_figure(view)), caption
    else:
        yield picture_uri(cases.sample_figure(view)), "The scans in one section"
    if view.prediction is not None and view.uncertainty is not None:
        caption = "Outlines of the prediction, and its uncertainty in colours"
        yield picture_uri(cases.uncertainty_figure(view)), caption


def _facts_of_grid(view: cases.CaseView, volumes: Sequence[EmbeddedVolume]) -> Iterator[Fact]:
    edges = " x ".join(f"{mm:.3g}" for mm in view.geometry.spacing_mm)
    voxels = " x ".join(map(str, view.geometry.shape))
    yield Fact("Grid of the files", f"{voxels} voxels of {edges} mm")
    steps = [volume.step for volume in volumes if volume.name in MODALITIES and volume.step != 1]
    values = f"rounded to steps of at most {max(steps):.2g}" if steps else "as in the files"
    yield Fact("Intensities in the viewer", f"{values}; the part around the brain")
