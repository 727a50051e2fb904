"""Several label maps become one: by hand, by an oracle, across label conventions."""

import shutil
from itertools import product
from pathlib import Path

import nibabel as nib
import numpy as np
import pytest

from brats_seg.errors import CaseError, LabelError, UsageError
from brats_seg.evaluation.evaluate import score_folders
from brats_seg.evaluation.fuse import fuse_label_maps, majority, staple
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.labels import BRATS2017, BRATS2023, LabelConvention, label_map_of, regions_of
from tests.builders import Run, check_json, make_label_map, write_nifti

CASES = ("patient_1", "patient_2")


def write_set(folder: Path, convention: LabelConvention = BRATS2017, shift: int = 0) -> Path:
    for case_id in CASES:
        label_map = np.roll(make_label_map(convention=convention), shift, axis=0)
        write_nifti(folder / f"{case_id}.nii.gz", label_map)
    return folder


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


@pytest.mark.parametrize("method", ["majority", "staple"])
def test_copies_give_the_copy_and_two_outvote_the_third(tmp_path: Path, method: str) -> None:
    """The second copy is in another label convention; what is written scores as a prediction does."""
    sets = [write_set(tmp_path / "a"), write_set(tmp_path / "b", BRATS2023)]
    sets.append(write_set(tmp_path / "c", shift=3))
    written = fuse_label_maps(sets, tmp_path / "out", method)
    assert [path.name for path in written] == [f"{case_id}.nii.gz" for case_id in CASES]
    for path in written:
        np.testing.assert_array_equal(voxels(path), make_label_map())
        assert np.array_equal(nib.load(path).affine, nib.load(sets[0] / path.name).affine)
    rules = protocol_named("legacy")
    scored = score_folders(sets[0], tmp_path / "out", tmp_path / "scores.csv", rules)
    assert {one.spreads[0].mean for one in scored.summaries} == {1.0}


def test_a_majority_by_hand_and_a_tie_is_outside() -> None:
    """Necrosis, oedema and enhancing tumour of three readers: two see the core, one the enhancement."""
    votes = [[1, 2, 4, 0, 4], [1, 4, 4, 2, 0], [2, 1, 0, 0, 0]]
    regions = np.stack([regions_of(np.uint8(vote), BRATS2017) for vote in votes], axis=1)

    def fused(n_readers: int) -> list[int]:
        masks = np.stack([majority(region[:n_readers]) > 0.5 for region in regions])
        return label_map_of(masks, BRATS2017).tolist()

    assert fused(3) == [1, 1, 4, 0, 0]
    # of two readers both must agree
    assert fused(2) == [1, 2, 4, 0, 0]


def test_staple_is_expectation_maximisation_over_all_voxels() -> None:
    """The oracle computes each voxel by itself, in a loop, without grouping equal votes."""
    rng = np.random.default_rng(0)
    truth = rng.random((6, 5, 4)) < 0.4
    masks = np.stack([truth ^ (rng.random(truth.shape) < rate) for rate in (0.05, 0.1, 0.4)])
    p, q, prior = [0.99999] * 3, [0.99999] * 3, masks.mean()
    places = list(product(*map(range, truth.shape)))
    for _ in range(100):
        weights = {}
        for place in places:
            votes = [mask[place] for mask in masks]
            yes, no = prior, 1 - prior
            for vote, sensitivity, specificity in zip(votes, p, q, strict=True):
                yes *= sensitivity if vote else 1 - sensitivity
                no *= 1 - specificity if vote else specificity
            weights[place] = yes / (yes + no)
        total = sum(weights.values())
        p = [sum(weights[at] for at in places if mask[at]) / total for mask in masks]
        outside = len(places) - total
        q = [sum(1 - weights[at] for at in places if not mask[at]) / outside for mask in masks]
    expected = np.reshape([weights[place] for place in places], truth.shape)
    np.testing.assert_allclose(staple(masks), np.where(masks.any(0), expected, 0), atol=1e-4)
    # the reader who is often wrong counts less than the others
    assert ((staple(masks) > 0.5) != truth).sum() < (masks[2] != truth).sum()


def test_what_cannot_be_fused_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    first, second = write_set(tmp_path / "a"), write_set(tmp_path / "b")
    out = tmp_path / "out"
    for inputs, to in (([first], out), ([first, second], second), ([first, second / "x"], out)):
        with pytest.raises(UsageError):
            fuse_label_maps(inputs, to)
    # another grid, a value of no region, a case that one folder lacks
    path = second / "patient_2.nii.gz"
    write_nifti(path, make_label_map()[1:])
    with pytest.raises(CaseError, match=r"patient_2, file .*b/patient_2.nii.gz: found 23x24x16"):
        fuse_label_maps([first, second], out)
    label_map = make_label_map(convention=BRATS2023)
    label_map[0, 0, 0] = 4
    write_nifti(path, label_map)
    with pytest.raises(LabelError, match=r"label values \[4\]; expected only those of brats2024"):
        fuse_label_maps([first, second], out)
    path.unlink()
    with pytest.raises(UsageError, match="b has no label map of patient_2"):
        fuse_label_maps([first, second], out)
    assert not out.exists()


def test_files_of_one_case_are_fused_by_the_command(run: Run, tmp_path: Path) -> None:
    folder = write_set(tmp_path / "a")
    for name in ("reader1", "reader2"):
        shutil.copy(folder / "patient_1.nii.gz", tmp_path / f"{name}.nii.gz")
    files = [folder / "patient_1.nii.gz", "reader1.nii.gz", "reader2.nii.gz"]
    done = run("fuse", *files, "-o", "out", "--json")
    assert done.code == 0, done.err
    assert check_json("fuse", done.out) == [{"paths": ["out/patient_1.nii.gz"]}]
    np.testing.assert_array_equal(voxels(Path("out/patient_1.nii.gz")), make_label_map())
    assert run("fuse", *files, "-o", "out", "--method", "vote").code == 2
    mixed = run("fuse", folder, "reader1.nii.gz", "-o", "out")
    assert (mixed.code, "two or more" in mixed.err) == (2, True)
