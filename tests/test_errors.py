"""Errors say what ends the command, and survive the way between processes."""

import itertools
import os
import pickle

import pytest

from brats_seg import errors
from brats_seg.errors import (
    BratsError,
    CaseError,
    CaseProblemsError,
    EnvironmentalError,
    UsageError,
)


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_the_tree_in_the_docstring_is_the_tree():
    """Every class is listed with the exit code it has."""
    lines = [line.split() for line in (errors.__doc__ or "").splitlines() if "Error" in line]
    listed = {
        name: int(code)
        for words in lines
        for name, code in itertools.pairwise(words)
        if name.endswith("Error") and code.isdigit()
    }

    own = {kind for kind in subclasses(BratsError) if kind.__module__ == errors.__name__}
    assert listed == {kind.__name__: kind.exit_code for kind in own}


def test_one_case_is_no_plural() -> None:
    one, two = CaseProblemsError(["a: x"]), CaseProblemsError(["a: x", "b: y"])

    assert str(one) == "1 case cannot be used:\n  a: x\nCorrect it, or exclude it with --skip-bad."
    assert str(two).startswith("2 cases cannot be used:\n  a: x\n  b: y\nCorrect them, or")


@pytest.mark.parametrize(
    ("kind", "exit_code"), [(BratsError, 1), (UsageError, 2), (EnvironmentalError, 3)]
)
def test_each_kind_of_trouble_has_its_exit_code(kind, exit_code):
    codes = {below.exit_code for below in subclasses(kind)}

    assert kind.exit_code == exit_code
    assert codes == {exit_code} or kind is BratsError


def make_case_error() -> CaseError:
    return CaseError("A_1", "A_1_t1.nii.gz", "an empty file", "a NIfTI file", "Copy it again.")


@pytest.mark.parametrize("way", [lambda error: error, lambda e: pickle.loads(pickle.dumps(e))])
def test_a_case_error_names_what_it_is_about_also_from_a_worker(way):
    assert str(way(make_case_error())) == (
        "case A_1, file A_1_t1.nii.gz: found an empty file; expected a NIfTI file. Copy it again."
    )


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("BraTS2021_00000 (é中)", "BraTS2021_00000 (é中)"),
        ("a\nb", r"a\nb"),
        ("\x1b[2Jgone", r"\x1b[2Jgone"),
        (os.fsdecode(b"caf\xe9"), r"caf\xe9"),
        ("\ud800", r"\ud800"),
        ("gpj.\u202ent", r"gpj.\u202ent"),
    ],
)
def test_a_name_in_a_message_is_one_line_that_can_be_printed(text: str, shown: str) -> None:
    error = CaseError(text, text, "nothing", "something", "")

    assert str(error).startswith(f"case {shown}, file {shown}: found")
    assert str(error).encode().decode() == str(error)
