"""The notebooks: pairs that agree, without outputs, that run from one end to the other."""

import ast
import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import venv
from importlib.metadata import version
from pathlib import Path
from unittest.mock import Mock, patch
from zipfile import ZipFile

import pytest

from brats_seg.cases.phantom import write_phantom_cases
from tests.builders import ROOT, run_make, start, touch

NOTEBOOKS = ROOT / "notebooks"
NAMES = ("brats_segmentation", "gradient_accumulation")
PICTURE = re.compile(r"!\[[^]]*\]\(([^)]+)\)")


def code_cells(name: str) -> list[str]:
    notebook = json.loads((NOTEBOOKS / f"{name}.ipynb").read_text())
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    return [cell for cell in cells if not cell.startswith("%")]


@pytest.mark.parametrize("name", NAMES)
def test_the_pair_agrees_and_has_no_outputs(name: str) -> None:
    """After a change: `jupytext --update --to ipynb notebooks/*.py`."""
    jupytext = pytest.importorskip("jupytext")
    text, notebook = (jupytext.read(NOTEBOOKS / f"{name}.{ending}") for ending in ("py", "ipynb"))
    both = [[(cell.cell_type, cell.source) for cell in one.cells] for one in (text, notebook)]
    assert both[0] == both[1]
    code = [cell for cell in notebook.cells if cell.cell_type == "code"]
    assert code
    assert all(cell.outputs == [] and cell.execution_count is None for cell in code)


@pytest.mark.parametrize("name", NAMES)
def test_only_the_public_package_is_imported_and_the_story_defines_nothing(name: str) -> None:
    """Neither the command line nor modules of the package: what it exports is enough."""
    nodes = [node for cell in code_cells(name) for node in ast.walk(ast.parse(cell))]
    imported = [alias.name for n in nodes if isinstance(n, ast.Import) for alias in n.names]
    imported += [str(node.module) for node in nodes if isinstance(node, ast.ImportFrom)]
    assert "brats_seg" in imported
    assert [module for module in imported if module.startswith("brats_seg.")] == []
    definitions = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef, ast.Lambda)
    if name == NAMES[0]:
        assert [ast.unparse(node) for node in nodes if isinstance(node, definitions)] == []


def test_later_scans_have_other_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    demo = run_settings(tmp_path, monkeypatch)
    written = {path: path.stat().st_mtime_ns for path in Path(str(demo["DATA"])).rglob("*.gz")}
    again = run_settings(tmp_path, monkeypatch)
    write_phantom_cases(tmp_path / "data", n_cases=2, seed=0)
    real = run_settings(tmp_path, monkeypatch)
    assert demo["RUN"] == again["RUN"] != real["RUN"]
    assert written == {path: path.stat().st_mtime_ns for path in written}
    assert (real["DATA"], real["WORK"]) == (Path("../data"), Path("work/data"))


def test_an_earlier_session_is_continued(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Kaggle mounts the output of an earlier session read-only; later work is not overwritten."""
    write_phantom_cases(tmp_path / "kaggle" / "scans", n_cases=2, seed=0)
    saved = tmp_path / "kaggle" / "notebook" / "work" / "scans" / "runs" / "fold0" / "last.pt"
    saved.parent.mkdir(parents=True)
    saved.write_text("earlier")
    with monkeypatch.context() as patched:
        patched.setattr(Path, "rename", Mock(side_effect=KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            run_settings(tmp_path, monkeypatch)
    run = Path(str(run_settings(tmp_path, monkeypatch)["RUN"]))
    earlier = (run / "last.pt").read_text()
    (run / "last.pt").write_text("later")
    run_settings(tmp_path, monkeypatch)
    assert earlier == "earlier"
    assert (run / "last.pt").read_text() == "later"


def run_settings(folder: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, object]:
    (settings,) = [cell for cell in code_cells(NAMES[0]) if "WORK =" in cell]
    (folder / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / "here")
    monkeypatch.delenv("BRATS_DATA", raising=False)
    monkeypatch.setitem(write_phantom_cases.__kwdefaults__, "shape", (24, 24, 20))
    # imported by the cell that installs
    names: dict[str, object] = {"Path": Path, "os": os, "shutil": shutil}
    exec(settings.replace("/kaggle/input", str(folder / "kaggle")), names)
    return names


@pytest.mark.parametrize("place", ["mounts/owner/wheels", "here", "here/dist", "dist", "named"])
def test_a_wheel_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """A wheel in an attached data set goes before the clone that contains the notebook."""
    wheel = write_wheel(tmp_path / place, "brats_seg")
    touch(tmp_path, "brats_seg/__init__.py")
    command = command_that_installs(monkeypatch, tmp_path, str(wheel) if place == "named" else "")
    assert Path(command[-1]).samefile(wheel)
    assert Path(command[command.index("--find-links") + 1]).samefile(wheel.parent)
    assert "--no-index" in command
    # torch is left alone
    kept = Path(command[command.index("--constraint") + 1])
    assert kept.read_text() == f"torch=={version('torch')}\n"


@pytest.mark.parametrize("place", ["mounts/owner/archive/brats_seg-main", "."])
def test_the_source_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: str) -> None:
    """An uploaded archive is read-only: pip builds in a copy. A clone is installed from where it is."""
    source = touch(tmp_path / place, "brats_seg/__init__.py", "pyproject.toml")
    writable = os.access
    monkeypatch.setattr("os.access", lambda path, mode: "mounts" not in str(path))
    command = command_that_installs(monkeypatch, tmp_path)
    assert writable(command[-1], os.W_OK)
    assert Path(command[-1]).samefile(source) == (place == ".")
    assert (Path(command[-1]) / "pyproject.toml").exists()


def test_a_repository_is_left_to_pip(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModuleNotFoundError, match=r"set PACKAGE to one of them, or to git\+https"):
        command_that_installs(monkeypatch, tmp_path)
    write_wheel(tmp_path / "mounts", "brats_seg")
    command = command_that_installs(monkeypatch, tmp_path, "git+https://host/owner/name")
    assert command[-1] == "git+https://host/owner/name"
    assert "--no-index" not in command


@pytest.mark.slow
def test_the_wheels_of_the_recipe_are_enough_without_a_package_index(tmp_path: Path) -> None:
    """Where one of them is missing, the page with the recipe is named."""
    venv.create(tmp_path / "environment", with_pip=True)
    (site,) = tmp_path.glob("environment/lib/*/site-packages")
    with ZipFile(write_wheel(tmp_path / "index", "torch")) as torch:
        torch.extractall(site)
    needs = "Requires-Dist: torch\nRequires-Dist: needed\n"
    wheel = write_wheel(tmp_path / "index", "brats_seg", needs=needs)
    write_wheel(tmp_path / "index", "needed")
    page = (NOTEBOOKS.parent / "docs" / "kaggle.md").read_text()
    (recipe,) = re.findall(r"^```bash\n%%bash\n(.*?)^```", page, flags=re.MULTILINE | re.DOTALL)
    recipe = re.sub(r"^PACKAGE=.*", f"PACKAGE={wheel}", recipe, flags=re.MULTILINE)
    program = f"{cell_that_installs(tmp_path)}\nimport brats_seg; print(brats_seg.__file__)"
    environment = {
        "PATH": f"{tmp_path / 'environment' / 'bin'}:{os.environ['PATH']}",
        "PIP_CONFIG_FILE": os.devnull,
        "PIP_NO_INDEX": "1",
    }

    def run(*command: str, folder: str, links: Path) -> subprocess.CompletedProcess[str]:
        (tmp_path / folder).mkdir(parents=True, exist_ok=True)
        return start(command, tmp_path / folder, {**environment, "PIP_FIND_LINKS": str(links)})

    collected = run("bash", "-c", recipe, folder="mounts", links=wheel.parent)
    needed = next(tmp_path.glob("mounts/wheels/needed-*.whl"))
    needed.rename(tmp_path / needed.name)
    incomplete = run("python", "-c", program, folder="here", links=tmp_path / "here")
    (tmp_path / needed.name).rename(needed)
    complete = run("python", "-c", program, folder="here", links=tmp_path / "here")
    assert collected.returncode == 0, collected.stderr
    assert "No matching distribution found for needed" in incomplete.stderr
    assert "docs/kaggle.md" in incomplete.stderr
    assert "site-packages" in complete.stdout
    assert list(tmp_path.glob("mounts/wheels/torch*")) == []


def write_wheel(folder: Path, name: str, *, needs: str = "") -> Path:
    path = folder / f"{name}-1.0-py3-none-any.whl"
    path.parent.mkdir(parents=True, exist_ok=True)
    info = f"{name}-1.0.dist-info"
    files = {
        f"{name}/__init__.py": "",
        f"{info}/METADATA": f"Metadata-Version: 2.1\nName: {name}\nVersion: 1.0\n{needs}",
        f"{info}/WHEEL": "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n",
    }
    with ZipFile(path, "w") as archive:
        for file, text in files.items():
            archive.writestr(file, text)
        archive.writestr(f"{info}/RECORD", "".join(f"{file},,\n" for file in files))
    return path


def cell_that_installs(folder: Path, package: str = "") -> str:
    (cell,) = [cell for cell in code_cells(NAMES[0]) if "PACKAGE =" in cell]
    cell = cell.replace("/kaggle/input", str(folder / "mounts"))
    return cell.replace('PACKAGE = ""', f"PACKAGE = {package!r}")


def command_that_installs(
    monkeypatch: pytest.MonkeyPatch, folder: Path, package: str = ""
) -> list[str]:
    """Return the command of the cell that installs, run in `folder/here` without the package."""
    (folder / "here").mkdir(exist_ok=True)
    monkeypatch.chdir(folder / "here")
    monkeypatch.setattr("tempfile.tempdir", str(folder))
    commands: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[str]:
        commands.append(command)
        return subprocess.CompletedProcess(command, 0)

    monkeypatch.setattr("subprocess.run", run)
    is_there = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == "brats_seg" else is_there(name)
    )
    exec(cell_that_installs(folder, package), {})
    (command,) = commands
    return command


@pytest.mark.parametrize("data", ["", "scans"])
def test_make_notebook_keeps_the_work_that_there_is(data: str) -> None:
    shown = "\n".join(run_make("--always-make", "-n", "notebook", f"DATA={data}"))
    assert "rm " not in shown
    assert shown.count(f'BRATS_WORK="{ROOT}/runs/notebook"') == len(NAMES)
    assert shown.count(f'BRATS_DATA="{ROOT}/scans"') == (len(NAMES) if data else 0)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_is_of_the_notebook_as_it_is_now(name: str) -> None:
    """After a change: `make pages`."""
    pytest.importorskip("nbclient")
    with patch.object(sys, "path", [str(NOTEBOOKS / "pages"), *sys.path]):
        pages = importlib.import_module("make_pages")
    text = (NOTEBOOKS / "pages" / f"{name}.md").read_text()
    assert pages.is_current(name)
    assert all((NOTEBOOKS / "pages" / file).is_file() for file in PICTURE.findall(text))
    assert "/tmp" not in text
    files = list((NOTEBOOKS / "pages" / name).iterdir())
    assert sorted(f"{name}/{path.name}" for path in files) == sorted(PICTURE.findall(text))
    assert sum(path.stat().st_size for path in files) < 3e6


MADE = (
    "runs/autoencoder0/best.pt",
    "results/fold0/scores.csv",
    "results/fold0/features.csv",
    "results/fold0/survival/predictions.csv",
)
"""Files that the story makes, below its folder of work."""


@pytest.mark.slow
@pytest.mark.parametrize(("name", "made"), [(NAMES[0], MADE), (NAMES[1], ())])
def test_it_runs_from_one_end_to_the_other(tmp_path, monkeypatch, name, made):
    pytest.importorskip("ipykernel")
    nbformat, nbclient = pytest.importorskip("nbformat"), pytest.importorskip("nbclient")
    for variable in ("BRATS_DATA", "BRATS_WORK"):
        monkeypatch.delenv(variable, raising=False)
    shutil.copy(NOTEBOOKS / f"{name}.ipynb", tmp_path)
    notebook = nbformat.read(tmp_path / f"{name}.ipynb", as_version=4)
    resources = {"metadata": {"path": str(tmp_path)}}
    nbclient.NotebookClient(notebook, timeout=900, resources=resources).execute()
    outputs = [output for cell in notebook.cells for output in cell.get("outputs", [])]
    assert any("image/png" in output.get("data", {}) for output in outputs)
    assert [path for path in made if not (tmp_path / "work" / "demo" / path).exists()] == []
