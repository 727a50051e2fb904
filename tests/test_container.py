"""Test the Dockerfile, whose steps are run as a script, and the workflow of the tests."""

import re
import shlex
import sys
from pathlib import Path

import pytest

from tests.builders import ROOT, shell, variables_of_installation

DOCKERFILE = (ROOT / "Dockerfile").read_text()
PAGE = (ROOT / "docs" / "running.md").read_text()


def steps() -> list[tuple[str, str]]:
    lines = DOCKERFILE.replace("\\\n", " ").splitlines()
    split = [line.split(maxsplit=1) for line in lines if line and not line.startswith("#")]
    return [(name, text) for name, text in split]


def as_script(root: Path) -> str:
    """Return the steps of the Dockerfile as a script that works below a folder."""
    lines = [f"mkdir -p {root}", f"cd {root}"]
    for name, text in steps():
        if name == "ARG":
            lines += [f"{text.split('=', 1)[0]}={shlex.quote(text.split('=', 1)[1])}"]
        elif name == "ENV" and not text.startswith("HOME"):
            lines += [f"export {text}"]
        elif name == "WORKDIR":
            lines += [f"mkdir -p {root}{text}", f"cd {root}{text}"]
        elif name == "COPY":
            *sources, target = text.split()
            # a folder's content is copied into a folder of that name
            lines += [f"cp -a {ROOT / source} {Path(target).parent}" for source in sources]
        elif name == "RUN":
            lines += [text]
    return "\n".join(lines)


def test_everything_that_is_copied_is_there_and_not_ignored_and_torch_is_the_tested_one() -> None:
    ignored = (ROOT / ".dockerignore").read_text()
    copied = {source for name, text in steps() if name == "COPY" for source in text.split()[:-1]}
    (torch,) = re.findall(r"^ARG TORCH=(.+)$", DOCKERFILE, re.MULTILINE)
    assert copied == set(re.findall("^!(.+)$", ignored, re.MULTILINE))
    assert all((ROOT / name).exists() for name in copied)
    assert f"torch=={torch}\n" in (ROOT / "constraints.txt").read_text()


def test_the_lines_of_the_page_have_arguments_that_the_dockerfile_knows() -> None:
    (block,) = re.findall(r"```sh\n(.*?)```", PAGE, re.DOTALL)
    known = {text.split("=")[0] for name, text in steps() if name == "ARG"}
    for line in block.splitlines():
        program, command, *rest = shlex.split(line)
        assert (program, command) in {("docker", "build"), ("docker", "run")}
        given = [rest[place + 1] for place, word in enumerate(rest) if word == "--build-arg"]
        assert {text.split("=")[0] for text in given} <= known


@pytest.mark.slow
def test_the_steps_of_the_dockerfile_work_as_a_script(tmp_path: Path) -> None:
    script = [
        f"{sys.executable} -m venv {tmp_path / 'venv'}",
        f". {tmp_path / 'venv/bin/activate'}",
        as_script(tmp_path / "image"),
        "rm -rf ../opt/brats_seg",
        "brats-seg doctor --json",
        "brats-seg train --epochs 1",
    ]
    shown = shell("\n".join(script), tmp_path, variables_of_installation(tmp_path))
    assert '"can_work": true' in shown
    assert "finished after 1 epoch" in shown
    assert (tmp_path / "image/work/runs/fold0/best.pt").is_file()
