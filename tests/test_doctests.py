"""The examples in docstrings run and show what they say."""

import doctest
import logging
import re
from importlib import import_module
from pathlib import Path

import pytest

import brats_seg

ROOT = Path(brats_seg.__file__).parent


def modules_with_examples() -> list[str]:
    example = re.compile(r"^(?!.*\+SKIP).*>>> ", re.MULTILINE)
    paths = [path for path in sorted(ROOT.rglob("*.py")) if example.search(path.read_text())]
    names = [".".join(path.relative_to(ROOT.parent).with_suffix("").parts) for path in paths]
    return [name.removesuffix(".__init__") for name in names]


@pytest.mark.parametrize("name", modules_with_examples())
def test_the_examples_run(name, tmp_path, monkeypatch, brats_root):
    monkeypatch.chdir(brats_root.parent)
    # the log of a command that another test has run would be taken for what the examples print
    monkeypatch.setattr(logging.getLogger("brats_seg"), "handlers", [])
    result = doctest.testmod(
        import_module(name), optionflags=doctest.ELLIPSIS | doctest.NORMALIZE_WHITESPACE
    )
    assert result.attempted
    assert result.failed == 0
