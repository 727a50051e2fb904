import shutil
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import pytest

from brats_seg.config import Config
from brats_seg.config_text import load_config
from brats_seg.data.fold import FoldData, open_fold
from brats_seg.data.loader import whole_case
from brats_seg.data.verify import prepared_ids, raise_damage, verify_case, verify_cases
from brats_seg.errors import CaseError, UsageError
from brats_seg.progress import untracked
from brats_seg.training.trainer import Trainer
from tests.builders import write_case
from tests.prepared import write_prepared

CASE = "BraTS2021_00000"
KINDS = ("image", "labels", "foreground", "case")


@pytest.fixture(params=[False, True], ids=["plain", "compressed"])
def folder(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return write_prepared(tmp_path, compressed=request.param)


def file_of(folder: Path, kind: str) -> Path:
    [path] = (folder / CASE).glob(f"{kind}.*")
    return path


def flip_bit(path: Path, rng: np.random.Generator) -> None:
    content = bytearray(path.read_bytes())
    content[rng.integers(len(content))] ^= 1 << int(rng.integers(8))
    path.write_bytes(content)


def test_a_case_is_whole_as_it_was_prepared(folder: Path) -> None:
    verify_case(folder, CASE)
    assert verify_cases([CASE], folder) == ()


@pytest.mark.parametrize("kind", KINDS)
def test_every_flipped_bit_is_found(folder: Path, kind: str) -> None:
    """Spaces between the entries of the manifest may change: they mean nothing."""
    path, rng = file_of(folder, kind), np.random.default_rng(0)
    content = path.read_bytes()
    for _ in range(20):
        flip_bit(path, rng)
        if kind != "case" or path.read_bytes().split() != content.split():
            with pytest.raises(CaseError, match=f"case {CASE}, file .*{path.name}: found"):
                verify_case(folder, CASE)
        path.write_bytes(content)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("n_bytes", [-1, 1])
def test_a_cut_or_lengthened_file_is_found(folder: Path, kind: str, n_bytes: int) -> None:
    path = file_of(folder, kind)
    content = path.read_bytes()
    path.write_bytes(content[:n_bytes] if n_bytes < 0 else content + b"\x00")

    with pytest.raises(CaseError, match=f"case {CASE}, file .*{path.name}: found"):
        verify_case(folder, CASE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_missing_file_is_found(folder: Path, kind: str) -> None:
    file_of(folder, kind).unlink()

    with pytest.raises(CaseError, match=f"case {CASE}, file .*{kind}"):
        verify_case(folder, CASE)


def test_the_message_says_what_to_do(folder: Path) -> None:
    flip_bit(file_of(folder, "image"), np.random.default_rng(0))

    with pytest.raises(
        CaseError,
        match=r"the check sum [0-9a-f]{8}; expected [0-9a-f]{8} as they were written: the file is "
        r"damaged\. Prepare it again with `brats-seg prepare --repair`",
    ):
        verify_case(folder, CASE)


def test_arrays_of_another_case_are_found(tmp_path: Path) -> None:
    folder = write_prepared(tmp_path, n_cases=2)
    shutil.copy(folder / "BraTS2021_00001" / "image.npy", folder / CASE / "image.npy")

    with pytest.raises(CaseError, match=r"image.npy: found .*damaged"):
        verify_case(folder, CASE)


def test_all_damaged_cases_are_returned_in_order_and_counted(tmp_path: Path) -> None:
    folder, seen = write_prepared(tmp_path, n_cases=4), []
    case_ids = prepared_ids(folder)
    for case_id in (case_ids[3], case_ids[1]):
        flip_bit(folder / case_id / "labels.npy", np.random.default_rng(0))

    def track(items: Iterable[object], *, what: str, total: int) -> Iterable[object]:
        seen.append((what, total))
        return items

    errors = verify_cases(case_ids, folder, track=track)

    assert [error.case_id for error in errors] == [case_ids[1], case_ids[3]]
    assert seen == [("verifying prepared cases", 4)]
    with pytest.raises(CaseError, match=rf"case {case_ids[1]}, .*damaged too: {case_ids[3]}"):
        raise_damage(errors)


def test_cases_are_found_however_damaged_and_other_folders_are_not(folder: Path) -> None:
    (folder / "another").mkdir()
    (folder / CASE / "case.json").unlink()

    assert prepared_ids(folder) == (CASE,)


def test_a_folder_without_prepared_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="holds no prepared cases"):
        prepared_ids(tmp_path / "absent")


def test_a_held_out_case_is_verified_whenever_it_is_read(folder: Path) -> None:
    flip_bit(file_of(folder, "labels"), np.random.default_rng(0))

    with pytest.raises(CaseError, match=r"labels.*found the check sum"):
        whole_case(folder, CASE)


def train(data: FoldData, config: Config, run_path: Path) -> None:
    Trainer(data=data, config=config, run_path=run_path).run(track=untracked)


def test_a_damaged_case_ends_a_run_before_it_begins_and_when_it_resumes(tmp_path: Path) -> None:
    changes = ["patch.size=[8,8,8]", "model.widths=[4,8]", "training.n_epochs=1"]
    config = load_config(preset="demo", assignments=[*changes, "folds.n_folds=2"])
    for number in range(2):
        write_case(tmp_path / "scans", f"BraTS2021_{number:05d}", seed=number)
    data = open_fold(tmp_path / "scans", fold=0, config=config, prepared_path=tmp_path / "ready")
    damaged = data.folder / data.split.train[0] / "image.npy"
    content = damaged.read_bytes()

    flip_bit(damaged, np.random.default_rng(0))
    with pytest.raises(CaseError, match=r"image.npy: found .* the file is damaged"):
        train(data, config, tmp_path / "run")
    assert not (tmp_path / "run").exists()

    damaged.write_bytes(content)
    train(data, config, tmp_path / "run")

    flip_bit(damaged, np.random.default_rng(0))
    with pytest.raises(CaseError, match=r"image.npy: found .* the file is damaged"):
        train(data, config, tmp_path / "run")
