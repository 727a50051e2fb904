"""The notebooks: pairs that agree, without outputs, that run from one end to the other."""

import ast
import importlib.util
import json
import logging
import shutil
from importlib.metadata import version
from pathlib import Path

import pytest

from brats_seg.cases.phantom import write_phantom_cases

NOTEBOOKS = Path(__file__).parent.parent / "notebooks"
NAMES = ("brats_segmentation", "gradient_accumulation")


def code_cells(name: str) -> list[str]:
    """Return the code of a notebook, cell by cell, without what is only for notebooks."""
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if not cell.startswith("%")]


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_agrees(name: str) -> None:
    """After a change: `jupytext --update --to ipynb notebooks/*.py`."""
    jupytext = pytest.importorskip("jupytext")

    text, notebook = (jupytext.read(NOTEBOOKS / f"{name}.{ending}") for ending in ("py", "ipynb"))

    assert [(cell.cell_type, cell.source) for cell in text.cells] == [
        (cell.cell_type, cell.source) for cell in notebook.cells
    ]


@pytest.mark.parametrize("name", NAMES)
def test_outputs_are_stripped(name: str) -> None:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())

    code = [cell for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert code
    assert all(cell["outputs"] == [] and cell["execution_count"] is None for cell in code)


def test_the_story_defines_nothing_but_settings() -> None:
    nodes = [node for cell in code_cells(NAMES[0]) for node in ast.walk(ast.parse(cell))]

    defined = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    assert [ast.unparse(node) for node in nodes if isinstance(node, defined)] == []


@pytest.mark.parametrize("name", NAMES)
def test_only_the_public_package_is_imported(name: str) -> None:
    """Neither the command line nor modules of the package: what it exports is enough."""
    nodes = [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell))]

    imported = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    imported += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "brats_seg" in imported
    assert [module for module in imported if module.startswith("brats_seg.")] == []


def test_a_machine_without_scans_and_rights_is_told_what_to_set(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """It goes on in a temporary folder, with phantoms."""
    (settings,) = [cell for cell in code_cells(NAMES[0]) if "writable_folder(" in cell]
    (tmp_path / "here").mkdir()
    (tmp_path / "file").touch()
    monkeypatch.chdir(tmp_path / "here")
    monkeypatch.setenv("BRATS_WORK", str(tmp_path / "file" / "work"))
    monkeypatch.delenv("BRATS_DATA", raising=False)
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    monkeypatch.setitem(write_phantom_cases.__kwdefaults__, "shape", (24, 24, 20))
    caplog.set_level(logging.WARNING)
    names: dict[str, object] = {"Path": Path}  # imported by the cell that installs

    exec(settings.replace("/kaggle/input", str(tmp_path / "kaggle")), names)

    assert "cannot be written to" in caplog.text
    assert "Choose a folder that you can write to" in caplog.text
    assert "demo-scans (phantoms)" in capsys.readouterr().out
    assert Path(str(names["WORK"])).parent == tmp_path


@pytest.mark.parametrize("offline", [False, True])
def test_what_is_installed_leaves_torch_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, offline: bool
) -> None:
    (install,) = [cell for cell in code_cells(NAMES[0]) if "PACKAGE =" in cell]
    wheel = tmp_path / "mounts" / "owner" / "wheels" / "brats_seg-1.0-py3-none-any.whl"
    if offline:
        wheel.parent.mkdir(parents=True)
        wheel.touch()
    commands: list[list[str]] = []
    monkeypatch.setattr("subprocess.run", lambda command, check: commands.append(command))
    is_there = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "brats_seg" else is_there(name)
    )

    exec(install.replace("/kaggle/input", str(tmp_path / "mounts")), {})

    (command,) = commands
    kept = Path(command[command.index("--constraint") + 1])
    assert kept.read_text() == f"torch=={version('torch')}\n"
    ending = ["--no-index", "--find-links", str(wheel.parent), str(wheel)]
    assert command[-4:] == ending if offline else command[-1] == "brats_seg"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "made"),
    [
        (
            "brats_segmentation",
            [
                "surface.gif",
                "crossval/scores.csv",
                "runs/ae/best.pt",
                "features.csv",
                "survival/submission.csv",
            ],
        ),
        ("gradient_accumulation", []),
    ],
)
def test_it_runs_from_one_end_to_the_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, made: list[str]
) -> None:
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for variable in ("BRATS_DATA", "BRATS_WORK"):
        monkeypatch.delenv(variable, raising=False)
    shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)

    client = nbclient.NotebookClient(
        notebook, timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    )
    client.execute()

    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    pictures = [output for output in outputs if "image/png" in output.get("data", {})]
    assert pictures
    assert [path for path in made if not (tmp_path / "work" / path).exists()] == []
