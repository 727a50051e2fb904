import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.case import Case, ScanFile, read_case_files
from brats_seg.cases.nifti import Geometry
from brats_seg.data.store import (
    FORMAT_VERSION,
    MANIFEST_NAME,
    Manifest,
    SourceFile,
    read_manifest,
    sources_of,
)
from brats_seg.voxels.box import Box

MANIFEST = Manifest(
    version=FORMAT_VERSION,
    compressed=False,
    convention="brats2017",
    sources=(SourceFile(name="a/b.nii.gz#2", n_bytes=7, mtime_ns=1234567890123456789),),
    contents=("abc#2",),
    box=Box(start=(1, 2, 3), stop=(4, 5, 6)),
    geometry=Geometry(
        shape=(240, 240, 155),
        affine=np.diag([-1, -1, 1 / 3, 1]),
        qform=np.diag([-1, -1, 0.1 + 0.2, 1]),
        qform_code=1,
        sform_code=2,
    ),
    means=(1.5, 2.0, 3.0, 4.0),
    stds=(1 / 3, 2.0, 3.0, 4.0),
)


def case_of(root: Path, *scans: ScanFile, label: ScanFile | None = None) -> Case:
    modalities = dict(zip(("t1n", "t1c", "t2w", "t2f"), scans, strict=True))
    return Case(
        case_id="a", patient_id="a", release="unknown", root=root, label=label, **modalities
    )


def four(root: Path) -> list[ScanFile]:
    scans = [ScanFile(path=Path(f"{name}.nii")) for name in "abcd"]
    for scan in scans:
        (root / scan.path).write_text(scan.path.name)
    return scans


def test_reading_gives_what_was_written_to_the_last_bit(tmp_path: Path) -> None:
    (tmp_path / MANIFEST_NAME).write_text(MANIFEST.to_json())

    assert read_manifest(tmp_path) == MANIFEST


def test_there_may_be_no_manifest(tmp_path: Path) -> None:
    assert read_manifest(tmp_path) is None


@pytest.mark.parametrize("text", ["", "{", "[]", "{}", '{"version": 1}', "\x00"])
def test_a_damaged_manifest_counts_as_none(tmp_path: Path, text: str) -> None:
    (tmp_path / MANIFEST_NAME).write_text(text)

    assert read_manifest(tmp_path) is None


def test_a_manifest_of_another_version_counts_as_none(tmp_path: Path) -> None:
    values = json.loads(MANIFEST.to_json()) | {"version": FORMAT_VERSION + 1}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(values))

    assert read_manifest(tmp_path) is None


def test_the_key_changes_with_contents_and_convention_but_not_with_files_or_storage() -> None:
    same = replace(MANIFEST, sources=(), compressed=True)

    assert same.key == MANIFEST.key
    assert replace(MANIFEST, contents=("abd#2",)).key != MANIFEST.key
    assert replace(MANIFEST, convention="brats2023").key != MANIFEST.key


def test_sources_are_the_modalities_in_order_and_then_the_label_map(tmp_path: Path) -> None:
    scans, label = four(tmp_path), ScanFile(path=Path("seg.nii"))
    (tmp_path / "seg.nii").write_text("labels")

    for case, expected in (
        (case_of(tmp_path, *scans), [*scans]),
        (case_of(tmp_path, *scans, label=label), [*scans, label]),
    ):
        assert [source.name for source in sources_of(case)] == list(map(str, expected))


def test_sources_tell_name_size_and_time(tmp_path: Path) -> None:
    scans = four(tmp_path)
    sources = sources_of(case_of(tmp_path, *scans))

    status = (tmp_path / "a.nii").stat()
    assert sources[0] == SourceFile(name="a.nii", n_bytes=5, mtime_ns=status.st_mtime_ns)
    assert [source.name for source in sources] == ["a.nii", "b.nii", "c.nii", "d.nii"]


def test_contents_tell_files_and_volumes_apart(tmp_path: Path) -> None:
    (tmp_path / "four.nii").write_text("voxels")
    (tmp_path / "copy.nii").write_text("voxels")
    (tmp_path / "other.nii").write_text("other voxels")
    in_one = [ScanFile(path=Path("four.nii"), volume=n) for n in range(2)]
    alone, copy, other = (ScanFile(path=Path(f"{name}.nii")) for name in ("four", "copy", "other"))

    contents = read_case_files(case_of(tmp_path, *in_one, alone, copy, label=other)).contents

    assert contents[2] == contents[3]
    assert len(set(contents)) == 4
