"""Tables of paths: for training as for prediction."""

from pathlib import Path

import pandas as pd
import pytest

from brats_seg import export_model, load_model, open_fold
from brats_seg.cases.index import index_cases, read_index, write_index
from brats_seg.errors import UsageError
from brats_seg.evaluation.evaluate import find_pairs
from brats_seg.training.state import read_state
from tests.inference_builders import CPU
from tests.training_builders import StopAtCheck, tiny_settings, train

HEADINGS = {"T1": "t1", "T1 post": "t1ce", "t2w": "t2", "FLAIR": "flair", "Segmentation": "seg"}


def rows_of(brats_root: Path, above: Path) -> list[dict[str, str]]:
    rows = []
    for number, folder in enumerate(sorted(brats_root.iterdir())):
        stem = f"{folder.relative_to(above)}/{folder.name}"
        files = {heading: f"{stem}_{suffix}.nii.gz" for heading, suffix in HEADINGS.items()}
        rows.append({"case_id": f"scan{number}", "Patient_ID": f"p{number % 2}", **files})
    return rows


def write_rows(path: Path, rows: list[dict[str, str]]) -> Path:
    pd.DataFrame(rows).to_csv(path, index=False)
    return path


def test_a_table_is_indexed_as_a_folder_is(brats_root: Path, tmp_path: Path) -> None:
    table = write_rows(tmp_path / "cases.csv", rows_of(brats_root, tmp_path))
    index = index_cases(table)
    assert [case.case_id for case in index.cases] == [f"scan{n}" for n in range(6)]
    assert [case.patient_id for case in index.cases] == [f"p{n % 2}" for n in range(6)]
    assert all(case.usable and case.label is not None for case in index.cases)
    assert index.root == tmp_path
    write_index(index, tmp_path / "index.csv")
    assert read_index(tmp_path / "index.csv", table) == index
    rows = [{**row, "t1gd": row["T1 post"]} for row in rows_of(brats_root, tmp_path)]
    with pytest.raises(UsageError, match="T1 post and t1gd both name t1c"):
        index_cases(write_rows(table, rows))


def test_patients_of_a_table_are_known_to_the_network(brats_root: Path, tmp_path: Path) -> None:
    """Their next scan may have any id."""
    table = write_rows(tmp_path / "cases.csv", rows_of(brats_root, tmp_path))
    two_folds = tiny_settings("folds.n_folds=2")
    data = open_fold(table, fold=0, config=two_folds)
    train(data, tmp_path / "run", tiny_settings("training.n_epochs=1"))
    export_model([tmp_path / "run"], tmp_path / "model", case_ids=True)
    for path in (tmp_path / "run", tmp_path / "model"):
        model = load_model([path], CPU)
        assert sorted(model.seen("new", f"p{n}") for n in range(3)) == ["no", "no", "yes"]
    rows = [{**row, "case_id": f"new{n}"} for n, row in enumerate(rows_of(brats_root, tmp_path))]
    data = open_fold(write_rows(tmp_path / "others.csv", rows), fold=1, config=two_folds)
    train(data, tmp_path / "child", tiny_settings(f"start.path={tmp_path / 'run'}"), StopAtCheck(0))
    assert read_state(tmp_path / "child" / "last.pt").started_from.seen == data.split.validation


def test_references_are_found_in_a_table(brats_root: Path, tmp_path: Path) -> None:
    rows = rows_of(brats_root, tmp_path)
    table = write_rows(tmp_path / "cases.csv", rows)
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "scan0.nii.gz").touch()
    pairs = find_pairs(table, tmp_path / "out").pairs
    assert pairs[0].reference.path == tmp_path / rows[0]["Segmentation"]
    assert pairs[0].prediction.path == tmp_path / "out" / "scan0.nii.gz"
    assert pairs[0].reference.case is not None


def test_missing_files_are_problems_of_a_case(brats_root: Path, tmp_path: Path) -> None:
    rows = rows_of(brats_root, tmp_path)[:3]
    rows[1] |= dict.fromkeys(HEADINGS, " ")
    rows[2] |= {"FLAIR": "nowhere.nii.gz", "T1KM": "c.nii", "note": "T1 c"}
    good, empty, absent = index_cases(write_rows(tmp_path / "cases.csv", rows)).cases
    assert good.usable
    assert "the column T1KM names a file, and no modality: it is not read" in absent.remarks
    assert "case scan1, file (none): found no t1n, t1c, t2w, t2f; expected" in empty.problems[0]
    assert "case scan2, file nowhere.nii.gz: found a file that cannot be read" in absent.problems[0]
