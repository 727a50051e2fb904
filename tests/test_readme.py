"""Every command and every program of the README and of the pages in docs does what it says."""

import csv
import json
import os
import re
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import product
from pathlib import Path

import pytest

from brats_seg import export_model, find_cases, write_phantom_cases
from tests import builders
from tests.builders import ROOT, make_volumes, run_make, write_nifti
from tests.foreign_builders import write_bundle, write_nnunet
from tests.inference_builders import write_run

README = ROOT / "README.md"
SCANS = "docs/scans.md"
SEVERAL = "docs/several-devices.md"
PAGES = {
    page.relative_to(ROOT).as_posix(): page for page in (README, *(ROOT / "docs").glob("*.md"))
}
TINY = shlex.split(
    "--set 'patch.size=[16, 16, 16]' --set 'model.widths=[4, 8]' --set training.n_epochs=1 "
    "--set folds.n_folds=2"
)
QUICK = {"plan": [*TINY, "--device", "600MiB"], "crossval": [*TINY, "--folds", "0,1"]}
QUICK |= dict.fromkeys(("train", "certify"), TINY)
"""What makes a command quick on tiny cases."""
INSTALLING = ("git", "cd", "make setup", ".", "pip")
"""Beginnings of the lines that `test_each_way_to_install_works` runs."""
LONG = ("dicom", "guarantees", "missing-modalities", "other-tools", "pages")
"""Pages whose commands take more than a few seconds."""
ELSEWHERE = ("torchrun", "srun", "dask", "openssl", "export")
"""Beginnings of the lines that the tests of several processes run."""


def blocks(page: Path, language: str) -> list[str]:
    fenced = re.findall(r"^```(\w*)\n(.*?)^```$", page.read_text(), re.MULTILINE | re.DOTALL)
    return [text for name, text in fenced if name == language]


def lines(page: Path) -> list[str]:
    return [line for block in blocks(page, "") for line in block.splitlines() if line]


def arguments_of(line: str) -> list[str] | None:
    """Return the arguments of the `brats-seg` that a line calls, perhaps by make, or None."""
    if line.startswith("make train"):
        line = run_make("-n", *shlex.split(line, comments=True)[1:])[-1]
    program, *arguments = shlex.split(line, comments=True)
    return arguments if Path(program).name == "brats-seg" else None


@pytest.fixture
def workplace(brats_root, tmp_path, monkeypatch, one_process) -> Path:
    """The current folder: six tiny cases in `data`; phantoms are as small, and plans short."""
    monkeypatch.chdir(brats_root.parent)
    monkeypatch.setattr("brats_seg.training.memory_plan._CUBES", (16,))
    monkeypatch.setattr("brats_seg.training.memory_plan._BOXES", ())
    monkeypatch.setitem(write_phantom_cases.__kwdefaults__, "shape", builders.SHAPE)
    monkeypatch.setattr("brats_seg.cli.options.DEMO_CASES", 3)
    # a small network in the place of the one that the package carries
    export_model([write_run(tmp_path / "small")], tmp_path / "carried")
    monkeypatch.setattr("brats_seg.runtime.weights.SHIPPED", tmp_path / "carried")
    return brats_root.parent


def test_a_line_that_no_test_runs_is_not_shown() -> None:
    shown = [line for page in PAGES.values() for line in lines(page)]
    known = (*INSTALLING, *ELSEWHERE)
    assert [line for line in shown if not line.startswith(known) and not arguments_of(line)] == []


def run_commands(page: Path, *before: list[str]) -> None:
    """Run the commands of a page in this process, made quick; each must end with 0."""
    commands = [arguments for line in lines(page) if (arguments := arguments_of(line))]
    if any("runs/fold0" in arguments for arguments in commands):
        commands = [*before, *commands]
    for arguments in commands:
        # the slow test of the cluster has a scheduler, and time for workers; --watch does not end
        if not {"--workers", "--watch"} & {*arguments}:
            done = builders.call(Path.cwd(), *arguments, *QUICK.get(arguments[0], []))
            assert done.code == 0, (arguments, done.err)


def test_the_commands_of_the_readme_run_in_their_order(workplace: Path) -> None:
    (workplace / "data").rename("scans")
    for path in sorted(Path("scans").iterdir())[2:]:
        shutil.rmtree(path)
    Path("new-scans").symlink_to("scans")
    assert len(lines(README)) > 8
    before = {*workplace.iterdir()}
    run_commands(README)
    # a clone has no files that git would add
    made = (path for path in workplace.iterdir() if path not in before)
    names = [f"{path.name}{'/' * path.is_dir()}" for path in made]
    command = ["git", "check-ignore", "--no-index", *names]
    ignored = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False).stdout
    assert ignored.split() == names


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.slow if Path(name).stem in LONG else ())
        for name in PAGES
        if name != "README.md"
    ],
)
def test_the_commands_of_a_page_run(name: str, workplace: Path) -> None:
    for path in sorted(Path("data").iterdir())[5 if name == "docs/guarantees.md" else 3 :]:
        shutil.rmtree(path)
    Path("scans").symlink_to("data")
    write_table_of_paths(workplace)
    if name == "docs/other-tools.md":
        write_nnunet(workplace / "nnunet-model")
        write_bundle(workplace / "monai-bundle")
    if name == "docs/dicom.md":
        pytest.importorskip("pydicom")
        from tests.dicom_builders import write_examination

        write_examination(workplace / "dicom")
    run_commands(PAGES[name], ["train"])


@pytest.mark.parametrize(
    "program",
    [
        pytest.param(program, marks=pytest.mark.slow if "BasicUNet" in program else ())
        for page in PAGES.values()
        for program in blocks(page, "python")
    ],
)
def test_the_programs_run(workplace: Path, program: str) -> None:
    if "nnunetv2" in program:
        pytest.importorskip("nnunetv2")
    exec(compile(program, "page", "exec"), {})


def test_every_link_and_every_test_that_a_page_names_is_there() -> None:
    for page in PAGES.values():
        links = re.findall(r"\]\((?!https?://)([^)#]+)", page.read_text())
        assert [link for link in links if not (page.parent / link).exists()] == [], page
    named = re.findall(r"`([\w/]*test_\w+\.py)`", PAGES["docs/guarantees.md"].read_text())
    assert named
    assert [name for name in named if not (ROOT / "tests" / name).is_file()] == []
    assert re.findall(r"!\[.*?\]\((.*?)\)", README.read_text())


def layouts() -> list[list[list[str]]]:
    """Return the patterns of files and the names of cases of each row of the table of layouts."""
    (table,) = re.findall(r"\| source \|.*?\n\n", PAGES[SCANS].read_text(), flags=re.DOTALL)
    rows = [row.split("|")[2:4] for row in table.splitlines()[2:] if row]
    return [[re.findall(r"`([^`]+)`", cell) for cell in row] for row in rows]


def spelled_out(pattern: str) -> list[str]:
    parts = [part.split(",") for part in re.split(r"[{}]", pattern)]
    return ["".join(chosen) for chosen in product(*parts)]


@pytest.mark.parametrize(("patterns", "case_ids"), layouts())
def test_each_layout_is_read(tmp_path: Path, patterns: list[str], case_ids: list[str]) -> None:
    is_label = re.compile("seg|labels/")
    for name in (name for pattern in patterns for name in spelled_out(pattern)):
        array = builders.make_label_map() if is_label.search(name) else make_volumes()[0]
        write_nifti(tmp_path / name, array)
    found = find_cases(tmp_path).cases
    assert [case.case_id for case in found] == case_ids
    assert all(len(case.images) == 4 and case.label and not case.problems for case in found)


def write_table_of_paths(folder: Path) -> None:
    (table,) = blocks(PAGES[SCANS], "csv")
    (folder / "table.csv").write_text(table)
    (row,) = csv.DictReader(table.splitlines())
    for modality, image in zip(("t1n", "t1c", "t2w", "t2f"), make_volumes(), strict=True):
        write_nifti(folder / row[modality], image)
    write_nifti(folder / row["label"], builders.make_label_map())


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (
            "train FOLD=3 DATA=scans RUN=r PRESET=full NETWORK=notebook ARGS=--fresh",
            "train --fold 3 --data scans --run r --preset full --network notebook --fresh",
        ),
        ("predict IN=scans RUN='a b'", "predict scans -o predictions --model a --model b"),
        (
            "crossval DATA=scans PRESET=full NETWORK=notebook ARGS='--folds 0,1'",
            "crossval --data scans --preset full --network notebook --folds 0,1",
        ),
    ],
)
def test_make_only_calls_the_command_line(target: str, expected: str) -> None:
    shown = run_make("-n", *shlex.split(target))[-1]
    assert shown.split() == [".venv/bin/brats-seg", *expected.split()]


def test_make_help_lists_every_target() -> None:
    (phony,) = re.findall(r"^\.PHONY: (.*)$", (ROOT / "Makefile").read_text(), re.MULTILINE)
    # `always` is no target of its own: it makes a file anew each time
    named = [name for name in phony.split() if name != "always"]
    assert [line.split()[0] for line in run_make()[:-1]] == named


@pytest.mark.slow
def test_the_first_command_trains_the_demo_well(tmp_path: Path) -> None:
    shown = type_line("brats-seg train --fold 0", tmp_path)
    assert "training on 12 phantom cases" in shown
    (best,) = re.findall(r"best val_dice ([\d.]+)", shown)
    assert float(best) > 0.7


@contextmanager
def running(line: str, folder: Path) -> Iterator[None]:
    process = subprocess.Popen(
        ["bash", "-c", line], cwd=folder, env=variables(folder), start_new_session=True
    )
    try:
        yield
    finally:
        os.killpg(process.pid, signal.SIGTERM)
        process.wait(timeout=500)


def free_port() -> int:
    with socket.socket() as unused:
        unused.bind(("localhost", 0))
        return int(unused.getsockname()[1])


def wait_for(port: int) -> None:
    for _ in range(120):
        with socket.socket() as asking:
            if asking.connect_ex(("localhost", port)) == 0:
                return
        time.sleep(1)


def variables(folder: Path) -> dict[str, str]:
    programs = folder / "programs"
    programs.mkdir(exist_ok=True)
    python = f'exec "{sys.executable}" -m'
    for name, text in {
        "brats-seg": f"{python} brats_seg",
        "torchrun": f"{python} torch.distributed.run",
        "dask": f"{python} dask",
        "srun": "exec",  # a job of one task
    }.items():
        (programs / name).write_text(f'#!/bin/sh\n{text} "$@"\n')
        (programs / name).chmod(0o755)
    return {**os.environ, "PYTHONPATH": str(ROOT), "PATH": f"{programs}:{os.environ['PATH']}"}


def type_line(line: str, folder: Path, **others: str) -> str:
    return builders.shell(line, folder, variables(folder) | others)


@pytest.mark.slow
def test_the_commands_for_several_gpus_train(workplace: Path) -> None:
    Path("scans").symlink_to("data")
    one_machine, two_machines = [line for line in lines(PAGES[SEVERAL]) if "torchrun" in line]
    here = two_machines.replace("--nnodes 2 --nproc-per-node 4", "--nnodes 1 --nproc-per-node 2")
    here = here.replace(":29500", f":{free_port()}")
    tiny = shlex.join(TINY)
    stopped = type_line(f"{one_machine} {tiny} --session-hours 0", workplace)
    alone = re.sub("torchrun .* train", "brats-seg train", one_machine)
    by_one = type_line(f"{alone} {tiny}", workplace)
    by_two = type_line(f"{here} {tiny}", workplace, HEAD_NODE="localhost")
    assert "finished after" not in stopped
    assert all("finished after 1 epoch" in shown for shown in (by_one, by_two))


@pytest.mark.slow
def test_the_commands_for_a_cluster_predict(workplace: Path) -> None:
    pytest.importorskip("distributed")
    Path("scans").symlink_to("data")
    type_line(f"brats-seg train --data scans {shlex.join(TINY)}", workplace)
    (by_workers,) = [line for line in lines(PAGES[SEVERAL]) if re.search(r"--workers \d", line)]
    certificate, export = [
        line for line in lines(PAGES[SEVERAL]) if line.split()[0] in {"openssl", "export"}
    ]
    type_line(certificate, workplace)
    Path("tls.yaml").write_text("".join(blocks(PAGES[SEVERAL], "yaml")))
    port = free_port()
    scheduler, worker, predict = [
        line.replace("8786", str(port)).replace("$HEAD_NODE", "localhost")
        for line in lines(PAGES[SEVERAL])
        if "8786" in line
    ]
    programs = [line.split()[:2] for line in (scheduler, worker, predict)]
    assert programs == [["dask", "scheduler"], ["dask", "worker"], ["brats-seg", "predict"]]
    with running(f"{export}\n{scheduler}", workplace), running(f"{export}\n{worker}", workplace):
        wait_for(port)
        by_cluster = type_line(f"{export}\n{predict}", workplace)
    shutil.rmtree(workplace / "predictions")
    for shown in (by_cluster, type_line(by_workers, workplace)):
        assert "6 predicted, 0 finished before, 0 failed" in shown


@pytest.mark.slow
@pytest.mark.parametrize("way", ["clone", "address", "wheel"])
def test_each_way_to_install_works(tmp_path: Path, way: str) -> None:
    if shutil.which("git") is None or not (ROOT / ".git").exists():
        pytest.skip("needs git, and a clone")
    starts = ("git clone", "pip install")
    installing = (block for block in blocks(README, "") if block.startswith(starts))
    (by_address, _), (*clone, _) = (block.splitlines() for block in installing)
    build = re.findall(r"`(pip wheel [^`]+)`", (ROOT / "docs" / "kaggle.md").read_text())
    venv = [f"{sys.executable} -m venv .venv", ". .venv/bin/activate"]
    build = ['git clone "$REPO" cloned && cd cloned', *build, "mv dist/*.whl .. && cd .."]
    by_wheel = [*build, "rm -rf cloned", "pip install *.whl"]
    typed = {"clone": clone, "address": [*venv, by_address], "wheel": [*venv, *by_wheel]}[way]
    demo = [
        "brats-seg doctor --json > doctor.json",
        "brats-seg phantom scans --number 1",
        f"brats-seg {'predict scans -o out --report' if way == 'address' else 'train --epochs 1'}",
        "python -c 'import brats_seg; print(brats_seg.__file__)'",
    ]
    environment = builders.variables_of_installation(tmp_path) | {"REPO": ROOT.as_uri()}
    shown = builders.shell("\n".join([*typed, *demo]), tmp_path, environment)
    assert ("1 predicted" if way == "address" else "finished after 1 epoch") in shown
    (diagnosis,) = tmp_path.rglob("doctor.json")
    findings = json.loads(diagnosis.read_text())["findings"]
    (packages,) = [one["found"] for one in findings if one["check"] == "packages"]
    # the versions that are needed are known without the checkout
    assert packages.endswith("are new enough")
    expected = tmp_path / ("brats_seg/brats_seg" if way == "clone" else ".venv")
    assert Path(shown.splitlines()[-1]).is_relative_to(expected)
