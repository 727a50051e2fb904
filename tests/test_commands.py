"""Test commands as a user types them: one after another on tiny scans, and what they refuse."""

import json
import os
import re
import shlex
import shutil
import signal
import sys
import time
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import Mock

import jsonschema
import pandas as pd
import pytest
import typer
from typer.testing import CliRunner

from brats_seg.cli import COMMANDS, READ_SETTINGS, app
from brats_seg.cli.json_output import OUTPUTS, json_text
from brats_seg.cli.options import ABOUT, shared
from brats_seg.errors import UsageError
from brats_seg.figures.draw import FIGURES
from brats_seg.labels import BRATS2023, MODALITY_SUBSETS
from brats_seg.presets import KINDS, SHORT
from tests import builders
from tests.bad_cases import BAD_CASES, break_in_ten_ways
from tests.builders import Done, Run, call, check_json, write_case
from tests.inference_builders import IDENTITY, NAMES, write_run

TINY = (
    "--set folds.n_folds=2 --set patch.size=8,8,8 --set model.widths=4,8 --precision fp32 "
    "--set training.n_workers=0 --set training.n_epochs=1"
)
GROUP: Any = typer.main.get_command(app)


def type_line(folder: Path, line: str) -> Done:
    return call(folder, *shlex.split(line))


class Step(NamedTuple):
    """A command line, what its messages must match, and the files that must exist afterwards."""

    line: str
    fact: str = ""
    files: tuple[str, ...] = ()


ONE_CASE = [
    f"--{flag}=data/BraTS2021_00000/BraTS2021_00000_{name}.nii.gz" for flag, name in NAMES.items()
]
FLOW = (
    Step("index data -o table.csv", "6 cases.*brats2021", ("table.csv",)),
    Step(
        "prepare data --prepared ready --set folds.n_folds=2",
        "6 cases prepared, with cases.csv, in ready\nfold table with 2 folds: ready",
        ("ready/cases.csv", "ready/folds-2-seed55.csv", "ready/BraTS2021_00000"),
    ),
    Step("prepare data --prepared ready --verify", "6 prepared cases in ready, 0 damaged"),
    Step("phantom few --number 1", "1 phantom case", ("few/BraTS2021_00000",)),
    Step("settings training --preset demo --seed 7", r"training\.n_epochs +16 "),
    Step(f"plan {TINY} --device 600MiB", r"a GPU of 600MiB \(predicted\).*largest patch"),
    Step(
        f"train --data data --prepared ready {TINY} --session-hours 0",
        r"preset cpu, because.*patch 8x8x8 as given.*time of this session is used up",
    ),
    Step(
        "train --data data --prepared ready",
        r"settings of runs/fold0/config.yaml.*3 cases to train on, 3 held out",
        ("runs/fold0/best.pt", "runs/fold0/history.csv", "runs/fold0/config.yaml"),
    ),
    Step("train --data data --prepared ready", "finished after 1 epoch:"),
    Step("doctor data", "0 problems"),
    Step(
        "predict data -o out --model runs/fold0",
        "6 predicted, 0 finished before, 0 failed.*Research use only",
        ("out/BraTS2021_00000.nii.gz", "out/volumes.csv", "out/manifest.jsonl"),
    ),
    Step("predict data -o out --model runs/fold0", "0 predicted, 6 finished before"),
    Step("evaluate data out", r"out: 6 cases", ("scores.csv", "scores.json")),
    Step("fuse data out out -o fused", "6 label maps", ("fused/BraTS2021_00000.nii.gz",)),
    Step("evaluate data --compare out out", r"first: out\nsecond: out", ("comparison.csv",)),
    Step("figure scores scores.csv -o scores.png", "wrote scores.png", ("scores.png",)),
    Step("export runs/fold0 -o unlicensed", "states no licence; `brats-seg export --license`"),
    Step(
        "export runs/fold0 -o model --license CC0",
        "wrote 1 network to model, fingerprint(?!.*--license)",
        ("model/member0.safetensors", "model/README.md"),
    ),
    Step("predict data -o from-model --model model --set preview=false", "6 predicted"),
    Step(
        f"predict {' '.join(ONE_CASE)} -o single --model runs/fold0 --case me --convention msd",
        "\nme: WT ",
    ),
    Step("report out --reference data --no-case-pages", files=("out/cohort.html",)),
    Step("features data", "6 cases with", ("features.csv", "failures.csv")),
    Step("certify --run runs/fold0 --patches 2", "exact:"),
)
"""Commands one after another, from a folder of scans, each with `--json`."""


@pytest.fixture(scope="module")
def work(tmp_path_factory: pytest.TempPathFactory, tiny_scans: Path) -> Path:
    folder = tmp_path_factory.mktemp("work")
    shutil.copytree(tiny_scans, folder / "data")
    return folder


@pytest.fixture(scope="module")
def flow(work: Path) -> dict[int, Done]:
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr("brats_seg.training.memory_plan._CUBES", (16,))
        patched.setattr("brats_seg.training.memory_plan._BOXES", ())
        return {number: type_line(work, f"{step.line} --json") for number, step in enumerate(FLOW)}


@pytest.mark.parametrize("number", range(len(FLOW)), ids=lambda number: FLOW[number].line[:40])
def test_each_step_writes_files_and_reports(work: Path, flow: dict[int, Done], number: int) -> None:
    step, done = FLOW[number], flow[number]
    assert done.code == 0, done.err
    assert re.search(step.fact, done.err, re.DOTALL), done.err
    assert [name for name in step.files if not (work / name).exists()] == []
    check_json(step.line.split()[0], done.out)


def test_every_command_is_run_by_tests_and_has_a_schema() -> None:
    """What the flow lacks is checked in other tests, where its cases are."""
    assert OUTPUTS.keys() == GROUP.commands.keys()
    tests = "".join(path.read_text() for path in Path(__file__).parent.glob("test_*.py"))
    for name in OUTPUTS.keys() - {step.line.split()[0] for step in FLOW}:
        assert f'check_json("{name}"' in tests


def test_what_is_printed_without_json(work: Path, flow: dict[int, Done]) -> None:
    done = type_line(work, "evaluate data out --protocol lesionwise2023 -o lesions.csv")
    assert (done.code, done.err) == (0, "")
    assert "lesion-wise HD95 (mm)" in done.out
    rows = [row for row in done.out.splitlines() if row.startswith(("region", "wt", "et"))]
    # a terminal of 80 columns would cut longer ones
    assert len(rows) == 2 * 2 * 3, "over the cases that were held out, and over all"
    assert max(map(len, rows)) <= 80
    assert "lesionwise_nsd_1.0" in pd.read_csv(work / "lesions.csv").columns
    done = type_line(work, "evaluate data out --protocol brats2025 --task MET -o matched.csv")
    assert (done.code, done.err) == (0, "")
    assert "small F1" in done.out
    assert max(len(row) for row in done.out.splitlines() if row.startswith(("wt", "rc"))) <= 80
    title = "brats2025 MET: BraTS 2025 as in brats-evaluation 0.0.10"
    assert {*pd.read_csv(work / "matched.csv")["protocol"]} == {title}
    done = type_line(work, "evaluate data --compare out out --protocol brats2025 -o compared.csv")
    assert (done.code, done.err) == (0, "")
    assert {*pd.read_csv(work / "compared.csv")["protocol"]} == {title.replace("MET", "GLI")}


def test_damaged_prepared_cases_are_found_and_repaired(work: Path, flow: dict[int, Done]) -> None:
    shutil.copytree(work / "ready", work / "damaged")
    path = work / "damaged" / "BraTS2021_00001" / "image.npy"
    content = path.read_bytes()
    path.write_bytes(content[:-1] + b"\x55")
    prepare = "prepare data --prepared damaged"
    found = type_line(work, f"{prepare} --verify")
    repaired = type_line(work, f"{prepare} --set folds.n_folds=2 --verify --repair")
    assert (found.code, repaired.code) == (1, 0)
    assert "case BraTS2021_00001" in found.out
    assert "6 prepared cases in damaged, 1 damaged" in found.out
    assert path.read_bytes() == content


def test_settings_from_a_pipe_of_the_shell_are_read(run: Run) -> None:
    reader, writer = os.pipe()
    os.write(writer, b"training: {n_epochs: 7}")
    os.close(writer)
    done = run("settings", "training", "--config", f"/dev/fd/{reader}")
    os.close(reader)
    assert re.search(r"training\.n_epochs +7 ", done.out)


def test_flags_win_over_set_and_a_written_file_is_read(work: Path, flow: dict[int, Done]) -> None:
    train = "train --data data --prepared ready --session-hours 0"
    type_line(work, f"{train} {TINY} --run runs/seed --seed 7 --set training.seed=8")
    config = work / "runs" / "seed" / "config.yaml"
    assert "seed: 7" in config.read_text()
    assert type_line(work, f"{train} --run runs/again --config {config}").code == 0
    assert (work / "runs" / "again" / "config.yaml").read_text() == config.read_text()


@pytest.mark.parametrize(
    ("line", "code", "message"),
    [
        ("train --preset kagle", 2, "Did you mean kaggle-t4?"),
        ("train --fold 7", 2, "fold 7"),
        ("train --set folds.n_folds=9 --run new", 2, "6 patients cannot fill 9 folds"),
        ("train --epochs 3 --set training.hours=1", 2, "--epochs 3 and training.hours 1"),
        ("train --preset cpu", 2, "keeps its own settings"),
        ("certify --patches 2", 2, "--run"),
        ("crossval --folds 0,7", 2, "fold 7"),
        ("crossval --network autoencoder", 2, "autoencoder"),
        ("crossval -o taken", 2, "taken/model exists and holds no exported model"),
        ("crossval -o file", 3, "cannot be written"),
        ("predict data --model runs/fold0 --t1n file", 2, "give either DATA, or one case"),
        ("predict data --model runs/fold0 --case me", 2, "which --case names"),
        ("predict data --model nothing", 2, "nothing does not exist; expected --model: Run,"),
        ("predict data --model runs/fold0 --window 9,9,9", 2, "9x9x9"),
        ("predict data --model runs/fold0 --device cuda:97", 3, "use --device cpu"),
        ("predict empty.csv --model runs/fold0", 2, "empty.csv"),
        ("predict data data --model runs/fold0 --watch 1", 2, "--watch takes one folder"),
        ("predict data --watch inf", 2, "less than or equal to 86400"),
        ("evaluate data", 2, "two with --compare A B"),
        (f"phantom {'n' * 300}", 3, "File name too long"),
        ("phantom few --seed -1", 2, "'--seed'"),
        ("tune model", 2, "model: found an exported model; expected the folder of a run"),
        ("predict '' -o refused", 2, "an argument is empty, as a variable of the shell"),
    ],
)
def test_wrong_use(work: Path, flow: dict[int, Done], line: str, code: int, message: str) -> None:
    (work / "file").touch()
    (work / "empty").mkdir(exist_ok=True)
    (work / "taken" / "model").mkdir(parents=True, exist_ok=True)
    (work / "taken" / "model" / "mine.txt").touch()
    (work / "empty.csv").write_text("case_id\n")
    command = line.split()[0]
    if command in {"train", "crossval"}:
        settings = "" if "--preset" in line else TINY
        rest = line.removeprefix(command)
        line = f"{command} --data data --prepared ready {settings} {rest}"
    if command == "predict" and " -o " not in line:
        line += " -o refused"
    done = type_line(work, line)
    assert done.code == code, done.err
    assert message in done.err
    assert "Traceback" not in done.err
    assert not (work / "refused").exists()


MISTAKES = (
    "train --data empty",
    "predict empty -o out",
    "train --data nosuch",
    "train --data . --set trainin.seed=3",
    "train --data . --device gpu",
    "train --data . --config nosuch.yaml",
    "train --data . --fold 9",
    "train --data . --run /dev/null/run",
    "plan --device t5",
    "settings nosuch",
    "certify --run nosuch",
    "tune nosuch",
    "crossval --folds x",
    "crossval --protocol legac",
    "predict . -o out --model nosuch",
    "predict . -o out --model . --set overlp=1",
    "predict . -o out --model . --window half",
    "predict . -o out --model . --workers many",
    "index nosuch",
    "predict . -o out --model . --series t1x=3",
    "predict . -o /dev/null/out --model .",
    "predict -o out --model .",
    "evaluate nosuch .",
    "evaluate . . --task GLIO",
    "figure montag . -o a.png",
    "figure Montage . -o a.png",
    "figure 5 . -o a.png",
    "fuse . . -o out --method STAPLE",
    "export nosuch -o model",
    "features . --convention brats2016",
    "features . -o failures.csv",
    "features . -o .",
    "evaluate . . -o scores.json",
    "evaluate . . -o /dev/null/scores.csv",
    "evaluate . --compare . . -o /dev/null/tests.csv",
    "report nosuch",
    "reconstruct . nosuch",
)


def test_a_mistake_is_answered_before_torch_is_imported(tmp_path: Path) -> None:
    program = f"""if True:
        import shlex, sys
        from brats_seg.cli import main
        for line in {MISTAKES}:
            sys.argv = ["brats-seg", *shlex.split(line)]
            try:
                main()
            except SystemExit as end:
                assert end.code == 2 + ("/dev/null" in line), line
            assert "torch" not in sys.modules, line
    """
    (tmp_path / "empty").mkdir()
    done = builders.start([sys.executable, "-c", program], tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stderr.count("error: ") == len(MISTAKES)
    assert done.stderr.count("error: empty is an empty folder") == 2
    assert [*tmp_path.iterdir()] == [tmp_path / "empty"]


def test_every_bad_case_is_named_and_can_be_skipped(run: Run, brats_root: Path) -> None:
    train = ("train", "--data", brats_root, *shlex.split(TINY))
    next(brats_root.glob("BraTS2021_00003/*_t2.nii.gz")).unlink()
    refused, _, error = run(*train)
    skipped, told, _ = run(*train, "--skip-bad")
    break_in_ten_ways(brats_root)
    code, shown, _ = run("index", brats_root)
    assert (refused, skipped, code) == (1, 0, 1)
    assert "case BraTS2021_00003, file" in error
    assert "--skip-bad" in error
    assert "left out: case BraTS2021_00003, file" in told
    for case_id, found in BAD_CASES.items():
        assert re.search(rf"case {case_id}, file .*: found .*{re.escape(found)}.*; expected", shown)


def test_scans_without_label_maps_are_refused_by_train(run: Run) -> None:
    write_case(Path("scans"), labelled=False)
    done = run("train", "--data", "scans", *shlex.split(TINY))
    assert (done.code, "no usable label map" in done.err) == (2, True)


def test_evaluate_scores_missing_predictions_as_worst(run: Run, tiny_scans: Path) -> None:
    first, second = (Path(f"made/BraTS2021_0000{number}.nii.gz") for number in range(2))
    for seed, path in enumerate((first, second)):
        builders.write_nifti(path, builders.make_label_map(seed=seed, convention=BRATS2023))
    whole = run("evaluate", tiny_scans, "made", "--task", "MET")
    only = run("evaluate", tiny_scans, "made", "--only-predicted")
    compared = run("evaluate", tiny_scans, "--compare", "made", "made")
    n_scores = len(pd.read_csv("scores.csv"))
    first.unlink()
    second.write_bytes(b"broken")
    broken = run("evaluate", tiny_scans, "made", "--only-predicted")
    assert (whole.code, only.code, compared.code, broken.code, n_scores) == (1, 0, 1, 1, 2 * 3)
    assert "made: 6 cases, labels brats2023, against brats2017" in whole.out
    assert "BraTS2021_00004, BraTS2021_00005: no prediction, given the worst" in whole.out
    assert re.search(r"\nwt +0\.333 \[0\.000, 0\.667\] +248\.8 \[", whole.out)
    assert re.search(r"(?s)no prediction to score or compare, left out.*\nwt +1\.000 \[", only.out)
    notice = "--task MET changes nothing: legacy scores all tasks alike\n"
    assert (notice in whole.out, notice in only.out) == (True, False)
    assert "not scored: case BraTS2021_00001, file" in broken.out


def test_output_to_a_full_disk_is_an_error_of_the_machine(tmp_path: Path) -> None:
    line = f"exec {sys.executable} -m brats_seg phantom scans --number 1 > /dev/full"
    done = builders.start(["sh", "-c", line], tmp_path)
    lost = "error: the output of the command is lost: No space left on device\n"
    assert (done.returncode, done.stderr) == (3, lost)
    assert len(list((tmp_path / "scans").rglob("*.nii.gz"))) == 5


@pytest.mark.parametrize("closed", [">&-", ">&- 2>&-"])
def test_a_command_works_without_output(tmp_path: Path, tiny_scans: Path, closed: str) -> None:
    line = f"exec {sys.executable} -m brats_seg prepare {tiny_scans} --prepared prepared {closed}"
    done = builders.start(["sh", "-c", line], tmp_path)
    assert (done.returncode, "rror" in done.stderr) == (0, False)


def test_commands_interrupted(run: Run, tiny_scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    no_memory = "memory ran out. Close other programs, or use a machine with more memory."
    ends = {KeyboardInterrupt: (130, "interrupted\n"), MemoryError: (3, f"error: {no_memory}\n")}
    for error, expected in ends.items():
        monkeypatch.setattr("brats_seg.data.fold.open_index", Mock(side_effect=error))
        code, _, said = run("index", tiny_scans)
        assert (code, said) == expected


@pytest.mark.slow
def test_crossval_resumes_scores_and_names_what_failed(work: Path, flow: dict[int, Done]) -> None:
    line = f"crossval --data data --prepared ready {TINY}"
    tune = "tune runs/fold0 runs/fold1 --prepared ready --json"
    time_before = (work / "runs" / "fold0" / "last.pt").stat().st_mtime_ns
    done, tuned, again = (type_line(work, typed) for typed in (f"{line} --json", tune, line))
    assert done.code == again.code == 0, done.err
    assert check_json("crossval", done.out)[0]["in_training"] == []
    check_json("tune", tuned.out)
    assert "tuned on 6 held-out cases of 2 runs, for the mean of Dice" in tuned.err
    assert (work / "runs" / "fold0" / "last.pt").stat().st_mtime_ns == time_before
    assert "6 held-out cases, 0 failed" in done.err
    assert len(pd.read_csv(work / "crossval" / "scores.csv")) == 3 * 6
    card = (work / "crossval" / "model" / "README.md").read_text()
    assert "| 1 | fold1 | 3 | 3 |" in card
    assert "BraTS2021" not in card
    assert "epoch 1/1" not in again.out
    shutil.rmtree(work / "crossval")
    path = work / "data" / "BraTS2021_00003" / "BraTS2021_00003_t2.nii.gz"
    times, content = path.stat(), bytearray(path.read_bytes())
    content[len(content) // 2] ^= 255
    path.write_bytes(content)
    # the scan is damaged, and the prepared case is not
    os.utime(path, ns=(times.st_atime_ns, times.st_mtime_ns))
    failed = type_line(work, line)
    assert failed.code == 1
    assert "FAILED  case BraTS2021_00003" in failed.out
    assert "BraTS2021_00003: no prediction, given the worst scores" in failed.out


def test_the_json_of_several_ranks_is_that_of_the_first(run: Run, monkeypatch) -> None:
    line = "settings", "training.seed", "--preset", "demo", "--json"
    assert json.loads(run(*line)[1])
    monkeypatch.setenv("RANK", "1")
    assert run(*line)[1] == ""


def test_the_json_has_null_for_nan_takes_any_file_name_and_is_checked() -> None:
    text = json_text("reconstruct", None, {"mean_rmse": float("nan")})
    assert json.loads(text)["mean_rmse"] is None
    text = json_text("figure", None, {"path": Path("caf\udce9")})
    assert json.loads(text)["path"] == "caf\udce9"
    assert text.isascii()
    # the test of the tests
    with pytest.raises(jsonschema.ValidationError, match="Additional properties"):
        check_json("phantom", '{"path": "few", "more": 1}')


def test_options_are_few_and_mean_the_same_everywhere() -> None:
    shared = set(SHORT) | {"--preset", "--config", "--set", "--json"}
    own = 0
    for command in (command for panel in COMMANDS.values() for command in panel):
        params = GROUP.commands[command.__name__].params
        flags = {param.opts[-1] for param in params if param.opts[0].startswith("-")}
        own += len(flags - shared) if command in READ_SETTINGS else len(flags - {"--json"})
        assert (flags >= shared) == (command in READ_SETTINGS)
    assert own + len(shared) <= 120
    assert tuple(FIGURES) == KINDS


def test_help_shows_every_option_without_types_or_markup_and_examples_that_work() -> None:
    """Words in square or angle brackets are taken for markup, and left out."""
    params = [param for command in GROUP.commands.values() for param in command.params]
    texts = [param.help for param in params if getattr(param, "help", None)]
    assert ABOUT.keys() <= {param.name for param in params}
    assert not [text for text in texts if "[" in text or "<" in text or "{values}" in text]
    for name, command in GROUP.commands.items():
        shown = CliRunner().invoke(app, [name, "--help"]).output
        _, *examples = command.epilog.split("\n\n")
        assert "<bool>" not in shown
        assert f"brats-seg {name}" in shown
        for line in examples:
            program, called, *arguments = shlex.split(line)
            assert (program, called) == ("brats-seg", name)
            assert command.make_context(name, arguments).params


PLAIN = ("--set", "preview=false")


@pytest.fixture
def model(tmp_path: Path) -> Path:
    return write_run(tmp_path / "run")


def test_a_failed_case_ends_predict_with_one(run: Run, brats_root: Path, model: Path) -> None:
    (brats_root / "notes.zip").touch()
    next(brats_root.glob("*_00003/*_t2.nii.gz")).write_bytes(b"")
    code, shown, said = run("predict", brats_root, "-o", "out", "--model", model, "--json", *PLAIN)
    records = {record["case_id"]: record for record in check_json("predict", shown)}
    assert (code, len(records)) == (1, 6)
    assert [name for name, record in records.items() if "message" in record] == ["BraTS2021_00003"]
    # what a person should know does not get between the lines
    assert "archives are not read" in said
    assert "FAILED  case BraTS2021_00003, file BraTS2021_00003_t2.nii.gz: found an empty" in said
    assert "5 predicted, 0 finished before, 1 failed" in said


def test_a_case_of_two_files_is_predicted_by_a_model_for_it(run: Run, tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans", labelled=False)
    flags = [f"--{flag}={folder}/{folder.name}_{NAMES[flag]}.nii.gz" for flag in ("t1c", "t2f")]
    model = write_run(tmp_path / "run", identity=replace(IDENTITY, subsets=MODALITY_SUBSETS))
    done = run("predict", *flags, "-o", "out", "--model", model, *PLAIN)
    assert done.code == 0, done.err
    assert "note: no t1n, t2w: predicted from t1c and t2f alone" in done.out


def test_another_convention_than_the_release_is_said(run: Run, model: Path, tmp_path: Path) -> None:
    for case_id in ("BraTS2021_00000", "patient_1", "patient_2"):
        write_case(tmp_path / "scans", case_id, labelled=False)
    predict = ("predict", "scans", "-o", "out", "--model", model, *PLAIN)
    first, again, asked = run(*predict), run(*predict), run(*predict, "--convention", "brats2023")
    shown = run(*predict, "--json").out
    assert [done.out.count("convention written for") for done in (first, again)] == [1, 1]
    assert "convention written for 2 cases: brats2017 (1 NCR/NET, 2 ED, 4 ET)" in again.out
    assert "for 1 case: brats2023 (1 NCR, 2 ED, 3 ET); asked for; the release" in asked.out
    records = {record["case_id"]: record for record in map(json.loads, shown.splitlines())}
    assert records["BraTS2021_00000"]["convention_reason"] == ""
    assert "no release" in records["patient_1"]["convention_reason"]


def test_options_reach_the_record(run: Run, tiny_scans: Path, model: Path, tmp_path: Path) -> None:
    given = {"overlap": 0.25, "smallest_et_mm3": 50, "surest_et": 0.1, "preview": False}
    given |= {"thresholds": [0.4, 0.5, 0.6], "smallest_mm3": [9, 8, 7]}
    flags = "--window 16,16,16 --tta --probabilities --uncertainty --device cpu --precision fp32"
    options = [*flags.split(), "--convention", "brats2023"]
    options += [f"--set={name}={str(value).strip('[]')}" for name, value in given.items()]
    case = tiny_scans / "BraTS2021_00000"
    done = run("predict", case, "-o", "out", "--model", model, *options)
    assert done.code == 0, done.err
    (record,) = map(json.loads, (tmp_path / "out" / "manifest.jsonl").read_text().splitlines())
    switches = dict.fromkeys(("tta", "probabilities", "uncertainty"), True)
    named = {"device": "cpu", "precision": "fp32", "window": [16] * 3, "labels": "brats2023"}
    assert record["settings"] == given | switches | named | {"report": False, "layout": "plain"}
    assert record["convention"] == "brats2023"
    assert all((tmp_path / "out" / name).is_file() for name in record["outputs"])
    assert len(record["outputs"]) == 5


@pytest.mark.parametrize(
    ("place", "n_done"), [("cli.use.print_outcome", 1), ("inference.predict.entropy", 0)]
)
def test_ctrl_c_says_how_to_go_on(run, tiny_scans, model, monkeypatch, place, n_done):
    monkeypatch.setattr(f"brats_seg.{place}", Mock(side_effect=KeyboardInterrupt))
    flags = ("-o", "out", "--model", model, *PLAIN, "--uncertainty")
    code, _, said = run("predict", tiny_scans, *flags)
    assert code == 128 + signal.SIGINT
    assert f"interrupted after {n_done} of 6 cases. Results are in out; the same command" in said
    assert f"brats-seg predict {tiny_scans} -o out --model {model} --set preview=false" in said


def test_watching_ends_by_ctrl_c_and_waits_for_the_first_scan(run, tiny_scans, model, monkeypatch):
    Path("empty").mkdir()
    n_looks = iter([0, 1, 2] * 2)

    def wait(_: float) -> None:
        if next(n_looks) == 2:
            raise KeyboardInterrupt

    clock = SimpleNamespace(sleep=wait, monotonic=time.monotonic)
    monkeypatch.setattr("brats_seg.inference.batch.time", clock)
    options = ("-o", "out", "--model", model, *PLAIN, "--watch", "1", "--identifiers")
    # an atlas that is not there, or the lack of the programs, is not noticed at the first scan only
    assert run("predict", "empty", *options, "--atlas", "sri42").code > 0
    done = run("predict", "empty", *options)
    assert (done.code, "cases are taken after 1 s" in done.out) == (0, True), done.err
    assert "interrupted after 0 cases. Results are in out; the same command continues" in done.err
    assert f"predict empty -o out --model {model}" in done.err
    first = next(path for path in sorted(tiny_scans.iterdir()) if path.is_dir())
    shutil.copytree(first, Path("incoming") / first.name)
    assert "interrupted after 1 case. Results" in run("predict", "incoming", *options).err


def test_paths_that_typer_keeps_as_text_are_checked(tmp_path: Path) -> None:
    # as its releases before 0.29 do; the command is given paths by all of them
    command = SimpleNamespace(params=[SimpleNamespace(name="data", opts=["data"])])
    context: Any = SimpleNamespace(command=command, params={"data": "text"}, info_name="index")

    def index(data: Path) -> int:
        return len(data.parts)

    run = shared(index, with_settings=False)
    with pytest.raises(typer.Exit):
        run(context, data=tmp_path.parent, as_json=False)
    with pytest.raises(UsageError, match="nothing does not exist; expected data"):
        run(context, data=tmp_path / "nothing", as_json=False)
