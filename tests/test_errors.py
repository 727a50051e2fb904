"""Errors say what ends the command, and survive the way between processes."""

import os
import pickle
import re

import pytest

from brats_seg import errors


def subclasses(kind: type) -> set[type]:
    return {kind}.union(*map(subclasses, kind.__subclasses__()))


def test_the_tree_in_the_docstring_is_the_tree() -> None:
    listed = re.findall(r"(\w+Error) +(\d)", errors.__doc__ or "")
    own = {kind for kind in subclasses(errors.BratsError) if kind.__module__ == errors.__name__}
    assert sorted(listed) == sorted((kind.__name__, f"{kind.exit_code}") for kind in own)
    assert errors.BratsError.exit_code == 1
    assert {kind.exit_code for kind in subclasses(errors.UsageError)} == {2}
    assert {kind.exit_code for kind in subclasses(errors.EnvironmentalError)} == {3}


def test_one_case_is_no_plural() -> None:
    one, two = errors.CaseProblemsError(["a: x"]), errors.CaseProblemsError(["a: x", "b: y"])
    assert str(one).startswith("1 case cannot be used:\n  a: x\nCorrect it, or exclude it with")
    assert str(two).startswith("2 cases cannot be used:\n  a: x\n  b: y\nCorrect them, or")


def test_a_case_error_names_what_it_is_about_also_from_a_worker() -> None:
    error = errors.CaseError("A_1", "t1.nii", "an empty file", "a NIfTI file", "Copy it again.")
    expected = "case A_1, file t1.nii: found an empty file; expected a NIfTI file. Copy it again."
    assert str(error) == str(pickle.loads(pickle.dumps(error))) == expected


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
    error = errors.CaseError(text, text, "nothing", "something", "")
    assert str(error).startswith(f"case {shown}, file {shown}: found")
    assert str(error).encode().decode() == str(error)
