"""The command `report` for folders of predictions and runs."""

import json
import shutil
from pathlib import Path

import pytest

from brats_seg.evaluation.scores import write_scores
from brats_seg.inference.batch import predict_folder
from brats_seg.inference.settings import PredictionSettings
from brats_seg.pages.cohort import cohort_of
from tests.builders import Run, write_case
from tests.inference_builders import write_run
from tests.test_charts import make_score, score_table

CASES = [f"BraTS2021_{number:05d}" for number in range(3)]


@pytest.fixture(scope="module")
def predicted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with three cases in `data`, and their predictions in `results`."""
    root = tmp_path_factory.mktemp("predicted")
    for number, case_id in enumerate(CASES):
        write_case(root / "data", case_id, seed=number)
    settings = PredictionSettings(device="cpu")
    predict_folder([root / "data"], [write_run(root / "model")], root / "results", settings)
    return root


@pytest.fixture
def results(predicted: Path, tmp_path: Path) -> Path:
    """A copy of the predictions in the current folder of the program."""
    shutil.copytree(predicted / "results", tmp_path / "results")
    return tmp_path / "results"


def test_a_folder_of_predictions_has_a_page_of_all_its_cases(
    run: Run, results: Path, predicted: Path
) -> None:
    code, shown, said = run(
        "report", "results", "--reference", predicted / "data", "--no-case-pages"
    )

    assert (code, shown) == (0, "wrote results/cohort.html\nResearch use only.\n"), said
    assert all(case_id in (results / "cohort.html").read_text() for case_id in CASES)
    assert not (results / "reports").exists()


def test_the_page_of_all_links_to_the_pages_of_the_cases(run: Run, results: Path) -> None:
    manifest = results / "manifest.jsonl"
    manifest.write_text(manifest.read_text().replace(f"{CASES[1]}_t2.nii.gz", "gone.nii.gz"))

    code, shown, said = run("report", "results")

    text = (results / "cohort.html").read_text()
    assert code == 1, said
    assert "wrote results/cohort.html" in shown
    assert "wrote 2 pages to results/reports" in shown
    assert f'href="reports/{CASES[0]}.html"' in text
    # the scans of one are gone: it has no page, and stays in the table
    assert f'href="reports/{CASES[1]}.html"' not in text
    assert CASES[1] in text


def test_scores_may_be_those_of_an_earlier_evaluation(run: Run, results: Path) -> None:
    scores = score_table(
        make_score(name, region, 0.25) for name in CASES[:2] for region in ("wt", "tc", "et")
    )
    write_scores(scores, results.parent / "scores.csv")

    code, _, said = run("report", "results", "--scores", "scores.csv", "--no-case-pages")

    assert code == 0, said
    assert (results / "cohort.html").read_text().count('data-value="0.25"') == 8


def test_volumes_warnings_and_failures_are_those_of_the_records(results: Path) -> None:
    lines = (results / "manifest.jsonl").read_text().splitlines()
    records = [json.loads(line) for line in lines]
    by_id = {record["case_id"]: record for record in records}
    failed = by_id[CASES[1]] | {"status": "failed", "error": "CaseError", "message": "no voxels"}
    with (results / "manifest.jsonl").open("a") as file:
        file.write(json.dumps(failed) + "\n")

    found = cohort_of(results)

    assert [one.message for one in found.failures] == ["no voxels"]
    assert CASES[1] not in {case.case_id for case in found.cases}
    for case in found.cases:
        record = by_id[case.case_id]
        assert case.ml == tuple(part["ml"] for part in record["volumes"][:3])
        assert case.warnings == tuple(record["warnings"])
        assert case.preview == results / "previews" / f"{case.case_id}.png"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["results", "--data", "data"], "results is none; leave them out"),
        (["results", "--scores", "s.csv", "--reference", "data"], "are given; expected one"),
        (["results", "--scores", "s.csv", "--no-case-pages"], "s.csv does not exist"),
        (["results", "data", "-o", "a.html"], "a.html is one page, for 2 folders"),
    ],
)
def test_wrong_use_is_explained(run: Run, results: Path, arguments: list[str], words: str) -> None:
    code, _, said = run("report", *arguments)

    assert code == 2
    assert words in said
