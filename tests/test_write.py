"""The command `report` and `predict --report`: which pages are written, and what they hold."""

import json
import os
import shutil
from functools import partial
from pathlib import Path

import pytest

from brats_seg import PageOptions, PredictionSettings, export_model, predict_folder, write_report
from brats_seg.cases.find import find_inputs
from brats_seg.cases.many import Failure
from brats_seg.inference.batch import CaseOutcome
from brats_seg.inference.results import MANIFEST_NAME, OutputFolder
from brats_seg.labels import MSD
from brats_seg.runtime.weights import read_exported
from tests.builders import Run, check_json, make_label_map, write_case, write_nifti
from tests.inference_builders import write_run

SETTINGS = PredictionSettings(uncertainty=True)
IDS = ("BraTS2021_00000", "BraTS2021_00001")

pytestmark = pytest.mark.usefixtures("one_process")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("made")
    for seed, case_id in enumerate(IDS):
        write_case(root / "scans", case_id, seed=seed)
    write_run(root / "run")
    predict_folder([root / "scans"], [root / "run"], root / "results", SETTINGS)
    return root


@pytest.fixture
def results(made: Path, tmp_path: Path) -> Path:
    shutil.copytree(made, tmp_path, dirs_exist_ok=True)
    manifest = tmp_path / "results" / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace(str(made), str(tmp_path)))
    return tmp_path / "results"


def test_the_network_of_the_package_predicts_and_says_what_it_is(run, tmp_path, monkeypatch):
    write_case(tmp_path / "scans", IDS[0])
    remark = "Taught on made-up brains: <i>train</i> your own."
    trained = write_run(tmp_path / "run", remark=remark)
    export_model([trained], tmp_path / "model")
    monkeypatch.setattr("brats_seg.runtime.weights.SHIPPED", tmp_path / "nothing")
    code, _, err = run("predict", "scans", "-o", "out")
    assert (code, "carries no network: give a run or an exported model" in err) == (2, True)
    monkeypatch.setattr("brats_seg.runtime.weights.SHIPPED", tmp_path / "model")
    code, out, err = run("predict", "scans", "-o", "out", "--report", "--json")
    assert code == 0, err
    assert err.count(f"model: {remark}\n") == 1
    (record,) = check_json("predict", out)
    assert record["remark"] == remark
    assert remark not in record["warnings"]
    assert record["model"] == read_exported(tmp_path / "model").fingerprint
    run("report", "out", "--no-case-pages")
    for page in ("cohort.html", f"reports/{IDS[0]}.html"):
        text = (tmp_path / "out" / page).read_text()
        assert text.count("made-up brains: &lt;i&gt;train&lt;/i&gt; your own.") == 1
    assert remark in (tmp_path / "model" / "README.md").read_text()
    run("predict", "scans", "-o", "other", "--model", write_run(tmp_path / "plain"), "--report")
    assert "made-up" not in (tmp_path / "other" / "reports" / f"{IDS[0]}.html").read_text()


@pytest.mark.slow
def test_predict_writes_the_pages_that_are_not_there(run: Run, results: Path) -> None:
    command = ("predict", "scans", "-o", "results", "--model", "run", "--uncertainty", "--report")
    page, other = (results / "reports" / f"{case_id}.html" for case_id in IDS)
    other.parent.mkdir()
    other.touch()
    _, said, _ = run(*command)
    assert "0 predicted, 2 finished before" in said
    assert "html" in page.read_text()
    assert other.read_text() == ""
    (results.parent / "scans").rename(results.parent / "moved")
    page.unlink()
    command = ("predict", "moved", *command[2:])
    assert run(*command)[0] == 0
    # a page of what another command predicted is not kept
    run(*command[:-1], "--set", "overlap=0.25")
    assert not page.exists()


def test_a_page_that_could_not_be_written_is_told_and_a_failed_case_fails_once(results: Path):
    """Another program moves scans away as soon as they have a result."""
    scans, model, told = results.parent / "scans", [results.parent / "run"], []

    def on_case(outcome: CaseOutcome) -> None:
        told.append((outcome.record.case_id, isinstance(outcome.record, Failure)))
        shutil.rmtree(scans / outcome.record.case_id, ignore_errors=True)

    settings = SETTINGS.model_copy(update={"report": True})
    cases = find_inputs([scans])
    predict = partial(predict_folder, cases, model, results, settings, on_case=on_case)
    done, again = predict(), predict()
    assert told[:4] == [*((case_id, False) for case_id in IDS), *((name, True) for name in IDS)]
    assert told[4:] == [(case_id, True) for case_id in IDS]
    for outcome in (done, again):
        assert [failure.case_id for failure in outcome.failures] == [*IDS]


def test_nothing_among_the_results_ends_a_report_or_leads_out_of_them(results: Path) -> None:
    manifest = results / MANIFEST_NAME
    text = manifest.read_text().replace(f'"case_id": "{IDS[0]}"', '"case_id": "../../x"')
    manifest.write_text(f"{text}{'[' * 9000}\n")
    shutil.copy(results / f"{IDS[0]}.nii.gz", results.parent.parent / "x.nii.gz")
    os.mkfifo(results.parent / "scans" / IDS[1] / "steps.png")
    report = write_report([results])
    assert report.results
    (failure,) = report.failures
    assert "the id '../../x', which cannot be the name of a file" in failure.message
    assert not (results.parent / "x.html").exists()
    manifest.unlink()
    os.mkfifo(manifest)
    assert OutputFolder(results).entries == {}


def test_predictions_have_a_page_of_each_case_and_of_all(run: Run, results: Path) -> None:
    code, said, _ = run("report", "results", "--reference", "scans")
    assert code == 0
    assert said.splitlines()[1:] == ["wrote 2 pages to results/reports", "Research use only."]
    page = (results / "reports" / f"{IDS[0]}.html").read_text()
    record = json.loads((results / MANIFEST_NAME).read_text().splitlines()[0])
    for words in (
        record["model"],
        *(sha256.partition("#")[0] for sha256 in record["inputs"]),
        *record["warnings"][:1],
        "uncertainty: True",
        "BraTS2021_00000_t1ce.nii.gz",
        *(">Reference</th>", "Lesions of the prediction", "RANO", 'data-layer="uncertainty"'),
    ):
        assert words in page, words
    # a page that is handed on tells file names, and not where they lie
    assert str(results.parent) not in page
    cohort = (results / "cohort.html").read_text()
    assert all(f'href="reports/{case_id}.html"' in cohort for case_id in IDS)
    assert cohort.count("data:image/webp") == len(IDS)
    (results / f"{IDS[1]}.nii.gz").unlink()
    write_report([results], PageOptions(reference=results.parent / "scans", with_cases=False))
    assert f"{IDS[1]} has no label map, and the worst" in (results / "cohort.html").read_text()


def test_scans_alone_or_with_a_given_label_map_have_a_page(run: Run, results: Path) -> None:
    write_nifti(results.parent / "other.nii.gz", make_label_map())
    code, out, said = run("report", "scans", "--case", IDS[0], "-o", "one.html", "--json")
    alone = (results.parent / "one.html").read_text()
    given = run("report", f"scans/{IDS[0]}", "--prediction", "other.nii.gz", "-o", "one.html")
    (found,) = check_json("report", out)
    assert found == {"pages": ["one.html"], "failures": []}
    assert (code, said) == (0, "wrote one.html\nResearch use only.\n")
    assert "Lesions of the reference" in alone
    assert given[0] == 0, given
    page = (results.parent / "one.html").read_text()
    assert "other.nii.gz, without a record of its model" in page
    assert ">Reference</th>" in page
    name = "sub-BraTS202100000/anat/sub-BraTS202100000_desc-msd_dseg.nii.gz"
    write_nifti(results.parent / "bids" / name, make_label_map(convention=MSD))
    (results.parent / "bids" / "volumes.csv").write_text(f"case_id,convention\n{IDS[0]},msd\n")
    code, _, error = run("report", "results", "--case", IDS[0], "--reference", "bids")
    assert code == 0, error
    page = (results / "reports" / f"{IDS[0]}.html").read_text()
    assert f"<dt>Reference</dt><dd>{Path(name).name}</dd>" in page
    assert "ED (label 2) or ED (label 1)" in page


@pytest.mark.slow
def test_missing_scans_are_reported_and_can_be_given_by_path(run: Run, results: Path) -> None:
    moved = results.parent / "elsewhere"
    moved.mkdir()
    (results.parent / "scans" / IDS[0]).rename(moved / IDS[0])
    gone = run("report", "results")
    cohort = (results / "cohort.html").read_text()
    write_case(moved, "other")
    given = run("report", "elsewhere", "--prediction", "results")
    assert gone[0] == 1
    assert f"FAILED  case {IDS[0]}, file BraTS2021_00000_t1.nii.gz" in gone[1]
    # it has no page, and stays in the table
    assert IDS[0] in cohort
    assert f'href="reports/{IDS[0]}.html"' not in cohort
    assert given[0] == 1
    assert f"wrote results/reports/{IDS[0]}.html\n" in given[1]
    assert "FAILED  case other, file other.nii.gz: found no such file" in given[1]


def test_changed_scans_are_flagged_and_a_lost_label_map_ends_its_case(results: Path) -> None:
    case = find_inputs([results.parent / "scans"])[0]
    path = case.path_of(case.files["t1c"])
    path.write_bytes(path.read_bytes() + b"\0")
    (results / f"{IDS[1]}.nii.gz").unlink()
    written = write_report([results], PageOptions(output=results.parent / "pages"))
    assert [(one.case_id, one.error) for one in written.failures] == [(IDS[1], "CaseError")]
    cohort, page = written.results
    assert (cohort.name, page.name) == ("cohort.html", f"{IDS[0]}.html")
    assert "the file of t1c is not the one that was predicted" in page.read_text()


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        ("absent", "absent"),
        ("scans --case X", "there is no case X; there are BraTS2021_00000, BraTS2021_0"),
        ("scans -o a.html", "a.html is one page, for 2 cases; give a folder, or choose"),
        ("results scans -o pages", "several cases would have the page pages/BraTS2021_00000.html"),
        ("results results -o pages", "pages would get 2 pages called cohort.html"),
        ("results --prediction results", "results holds predictions itself"),
        ("results --reference others", "others has no label map of BraTS2021_00000, BraTS2021_0"),
        ("results --prepared prepared", "results is no run; leave them out"),
        ("results --scores one.nii.gz --reference scans", "are given; expected one"),
        ("results --scores one.nii.gz", "one.nii.gz is not a CSV table"),
        ("results results --scores one.nii.gz", "those of one folder of predictions, and 2 are"),
        ("scans --scores one.nii.gz", "those of one folder of predictions, and 0 are given"),
        ("scans --prediction absent", "absent does not exist"),
        ("scans --prediction one.nii.gz", "one.nii.gz is one label map, for 2 cases"),
        ("scans --prediction one.nii.gz --case X", "there is no case X; there are BraTS2021_00000"),
        ("scans --no-case-pages", "leaves no page to write: give a folder of predictions"),
        (f"results --no-case-pages --case {IDS[0]}", "of predictions, and no --case"),
        ("fold0 --case a", "fold0 is a run, whose page shows its own cases only; leave out --case"),
    ],
)
def test_contradictory_arguments_of_report_are_refused(run, results, arguments, expected):
    for name in ("one.nii.gz", "others/X.nii.gz"):
        write_nifti(results.parent / name, make_label_map())
    for name in ("config.yaml", "split.csv"):
        path = results.parent / "fold0" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    code, out, err = run("report", *arguments.split())
    assert (code, (results / "reports").exists()) == (2, False), out
    assert expected in err
