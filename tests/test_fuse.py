"""Several label maps become one: by hand, across label conventions, from the command line."""

import shutil
import sys
from collections.abc import Iterable
from pathlib import Path

import nibabel as nib
import numpy as np
import pandas as pd
import pytest

from brats_seg.errors import CaseError, EnvironmentalError, LabelError, UsageError
from brats_seg.evaluation.evaluate import score_folders
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.inference.batch import predict_folder
from brats_seg.inference.fuse import fuse_label_maps
from brats_seg.labels import BRATS2017, BRATS2023, MSD, LabelConvention
from tests.builders import make_label_map, touch, write_nifti

CASES = ("patient_1", "patient_2")


def write_set(folder: Path, convention: LabelConvention = BRATS2017, shift: int = 0) -> Path:
    for case_id in CASES:
        label_map = np.roll(make_label_map(convention=convention), shift, axis=0)
        write_nifti(folder / f"{case_id}.nii.gz", label_map)
    return folder


def voxels(path: Path) -> np.ndarray:
    return np.asarray(nib.load(path).dataobj)


@pytest.mark.parametrize("method", ["majority", "staple"])
def test_two_equal_label_maps_outvote_the_third(tmp_path: Path, method: str) -> None:
    """The second is in a label convention that its table tells; what is written is scored as a prediction is."""
    sets = [write_set(tmp_path / "a"), write_set(tmp_path / "b", MSD)]
    (tmp_path / "b" / "volumes.csv").write_text(
        "case_id,convention,in_training\npatient_1,msd,yes\npatient_2,msd,no\n"
    )
    sets.append(write_set(tmp_path / "c", shift=3))
    written = fuse_label_maps(sets, tmp_path / "out", method)
    assert [path.name for path in written] == [f"{case_id}.nii.gz" for case_id in CASES]
    for path in written:
        np.testing.assert_array_equal(voxels(path), make_label_map())
        assert np.array_equal(nib.load(path).affine, nib.load(sets[0] / path.name).affine)
    rules = protocol_named("legacy")
    scored = score_folders(sets[0], tmp_path / "out", tmp_path / "scores.csv", rules)
    assert {one.spreads[0].mean for one in scored.summaries} == {1.0}
    # they have a table of their own
    first, _ = fuse_label_maps([sets[1], sets[1]], tmp_path / "msd", method)
    scored = score_folders(sets[0], first.parent, tmp_path / "scores.csv", rules)
    assert {one.spreads[0].mean for one in scored.summaries} == {1.0}
    table = pd.read_csv(first.parent / "volumes.csv").to_numpy().tolist()
    assert table == [["patient_1", "msd", "yes"], ["patient_2", "msd", "no"]]
    # a prediction would replace it
    with pytest.raises(UsageError, match="msd holds fused label maps: give another folder"):
        predict_folder(iter(()), [], first.parent)
    with pytest.raises(UsageError, match="a holds NIfTI files that are no results: give another"):
        predict_folder(iter(()), [], sets[0])


def test_two_processes_do_not_fuse_into_one_folder(tmp_path, monkeypatch):
    """Each would write a table without the cases of the other; what a killed one left is removed."""
    monkeypatch.setattr("brats_seg.files._GRACE_S", 0.1)
    sets = [write_set(tmp_path / name) for name in "ab"]
    first, second = ([path / f"{case_id}.nii.gz" for path in sets] for case_id in CASES)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / ".123-0a1b2c-a.nii.gz").touch()

    def track(items: Iterable[object], **_: object) -> Iterable[object]:
        with pytest.raises(UsageError, match=r"another process writes to .*out"):
            fuse_label_maps(second, tmp_path / "out")
        return items

    fuse_label_maps(first, tmp_path / "out", track=track)
    fuse_label_maps(second, tmp_path / "out")
    assert pd.read_csv(tmp_path / "out" / "volumes.csv")["case_id"].tolist() == list(CASES)
    assert not [*(tmp_path / "out").glob(".123*")]


@pytest.mark.parametrize(("n_readers", "expected"), [(3, [1, 1, 4, 0, 0]), (2, [1, 2, 4, 0, 0])])
def test_a_majority_by_hand(tmp_path: Path, n_readers: int, expected: list[int]) -> None:
    """Of three readers two see the core, and one the enhancing tumour; of two both must agree."""
    votes = [[1, 2, 4, 0, 4], [1, 4, 4, 2, 0], [2, 1, 0, 0, 0]]
    for index, vote in enumerate(votes[:n_readers]):
        write_nifti(tmp_path / str(index) / "case.nii.gz", np.uint8(vote).reshape(5, 1, 1))
    (fused,) = fuse_label_maps(sorted(tmp_path.iterdir()), tmp_path / "out")
    assert voxels(fused).ravel().tolist() == expected


def test_mean_probabilities_are_those_of_predict(tmp_path: Path) -> None:
    """One network is sure of the core, the other less sure that there is none."""
    first, second = write_set(tmp_path / "a"), write_set(tmp_path / "b")
    missing = r"a/probabilities/patient_1-wt.nii.gz is missing; .*`predict --probabilities`"
    with pytest.raises(UsageError, match=missing):
        fuse_label_maps([first, second], tmp_path / "out", "mean")
    shape = make_label_map().shape
    for folder, shares in ((first, (0.9, 0.8, 0.1)), (second, (0.9, 0.3, 0.8))):
        for region, share in zip(("wt", "tc", "et"), shares, strict=True):
            for case_id in CASES:
                path = folder / "probabilities" / f"{case_id}-{region}.nii.gz"
                write_nifti(path, np.full(shape, share, np.float32))
        (folder / "probabilities" / "brats_seg.json").write_text("{}")
    assert {*voxels(fuse_label_maps([first, second], tmp_path / "out", "mean")[1]).ravel()} == {1}
    write_nifti(path, np.full((1, *shape[1:]), share, np.float32))
    with pytest.raises(CaseError, match=r"patient_2-et.nii.gz: found 1x24x16 voxels"):
        fuse_label_maps([first, second], tmp_path / "out", "mean")


def test_what_cannot_be_fused_is_refused_by_name_and_nothing_is_written(tmp_path: Path) -> None:
    first, second, out = write_set(tmp_path / "a"), write_set(tmp_path / "b"), tmp_path / "out"
    both, predicted = [first, second], touch(tmp_path, "predicted/manifest.jsonl") / "predicted"
    refused = (
        ([first], out, "there is one input; expected two"),
        (both, second, "b holds inputs; expected another --output"),
        (both, predicted, "predicted holds predictions; expected another --output"),
        ([first, second / "x"], out, "the inputs are folders and files; expected either"),
        (both, write_set(tmp_path / "c"), "c holds NIfTI files that are no results: give another"),
    )
    for inputs, to, message in refused:
        with pytest.raises(UsageError, match=message):
            fuse_label_maps(inputs, to)
    with pytest.raises(UsageError, match="method 'medain' is unknown; there are majority, staple"):
        fuse_label_maps([first, second], out, "medain")
    path = second / "patient_2.nii.gz"
    write_nifti(path, make_label_map()[1:])
    with pytest.raises(CaseError, match=r"patient_2, file .*b/patient_2.nii.gz: found 23x24x16"):
        fuse_label_maps([first, second], out)
    # resection cavity, which is in no region
    label_map = make_label_map(convention=BRATS2023)
    label_map[0, 0, 0] = 4
    write_nifti(path, label_map)
    with pytest.raises(LabelError, match=r"label values \[4\]; expected only those of brats2024"):
        fuse_label_maps([first, second], out)
    path.unlink()
    with pytest.raises(UsageError, match="b has no label map of patient_2"):
        fuse_label_maps([first, second], out)
    assert not out.exists()


def test_files_of_one_case_are_fused_by_the_command(run, tmp_path, monkeypatch):
    folder = write_set(tmp_path / "a")
    for name in ("reader1", "reader2"):
        shutil.copy(folder / "patient_1.nii.gz", tmp_path / f"{name}.nii.gz")
    files = [folder / "patient_1.nii.gz", "reader1.nii.gz", "reader2.nii.gz"]
    assert run("fuse", *files, "-o", "out").code == 0
    np.testing.assert_array_equal(voxels(Path("out/patient_1.nii.gz")), make_label_map())
    mixed = run("fuse", folder, "reader1.nii.gz", "-o", "out")
    assert (mixed.code, "folders and files" in mixed.err) == (2, True)
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    with pytest.raises(EnvironmentalError, match="pip install SimpleITK"):
        fuse_label_maps([folder, folder], tmp_path / "out2", "staple")
