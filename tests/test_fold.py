import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.folds import Split
from brats_seg.cases.index import read_index
from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData, open_fold, open_index, open_split, prepared_path_of
from brats_seg.data.loader import whole_case
from brats_seg.errors import CaseError, EnvironmentalError, FoldError, UsageError
from tests.builders import write_case
from tests.inference_builders import read_scan

pytestmark = pytest.mark.usefixtures("one_process")
ONE, TWO = (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)

_read_only: list[str] = []
"""Folders in which the audit hook refuses to write."""
_CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime")


def _refuse_to_write(event: str, arguments: tuple[object, ...]) -> None:
    if not _read_only:
        return
    flags = arguments[2] if event == "open" else 0
    writes = event in _CHANGES or (isinstance(flags, int) and flags & (os.O_ACCMODE | os.O_CREAT))
    if writes and str(arguments[0]).startswith(tuple(_read_only)):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(arguments[0]))


@pytest.fixture(scope="session", autouse=True)
def hook() -> None:
    """Install the hook, which cannot be removed: permissions do not stop an administrator."""
    sys.addaudithook(_refuse_to_write)


@contextmanager
def read_only(folder: Path) -> Iterator[None]:
    _read_only.append(str(folder))
    try:
        yield
    finally:
        _read_only.clear()


def write_cases(root: Path, *spacings: float) -> Path:
    for number, spacing_mm in enumerate(spacings):
        write_case(root, f"BraTS2021_{number:05d}", seed=number, spacing_mm=spacing_mm)
    return root


def settings(*changes: str) -> Config:
    demo = ["folds.n_folds=2", "patch.size=[8,8,8]", "model.widths=[4,8]", "training.n_epochs=1"]
    return load_config(preset="demo", assignments=[*demo, *changes])


def opened(root: Path, *changes: str, fold: int = 0) -> FoldData:
    config, ready = settings(*changes), root.with_name("ready")
    return open_fold(root, fold=fold, config=config, prepared_path=ready)


@pytest.fixture
def two(tmp_path: Path) -> Path:
    return write_cases(tmp_path / "scans", 1, 1)


@pytest.mark.parametrize(
    ("spacings", "changes", "expected"),
    [
        ((1, 1), (), ONE),
        ((2, 1, 2), (), TWO),
        ((2, 1), (), ONE),
        # all cases count, and not those of the fold
        ((1, 2, 2, 1, 2), (), TWO),
        ((1, 1), ("store.spacing_mm=[1.5,2,1]",), (1.5, 2.0, 1.0)),
    ],
)
def test_training_sees_what_prediction_computes(tmp_path, spacings, changes, expected):
    """Each case is, bit for bit, the scan that the network would be given, in every fold."""
    root = write_cases(tmp_path / "scans", *spacings)
    folds = [opened(root, *changes, fold=fold) for fold in (0, 1, 0)]
    assert {data.spacing_mm for data in folds} == {expected}
    cases = read_index(folds[0].folder / "cases.csv", root).cases
    assert [case.facts.voxel_mm3 for case in cases] == pytest.approx([mm**3 for mm in spacings])
    for case in cases:
        scan, prepared = read_scan(case, expected), whole_case(folds[0].folder, case.case_id)
        np.testing.assert_array_equal(prepared.image.numpy(), scan.image.astype(np.float16))
        assert prepared.target.shape[1:] == scan.image.shape[1:]
    # another spacing is another training set
    assert opened(root, "store.spacing_mm=[3,3,3]").fingerprint != folds[0].fingerprint


def test_what_cannot_be_opened_is_refused_before_anything_is_written(two: Path) -> None:
    before = sorted(two.parent.rglob("*"))
    with pytest.raises(FoldError, match="there is no fold 9: the settings have 2 folds, 0 to 1"):
        open_fold(two, fold=9, config=settings())
    with pytest.raises(UsageError, match=r"prepared cases would replace .*_00000, .*_00001: "):
        open_fold(two, fold=0, config=settings(), prepared_path=two)
    assert sorted(two.parent.rglob("*")) == before


def test_fold_tables_stand_side_by_side_and_a_given_one_is_kept(tmp_path: Path) -> None:
    root = write_cases(tmp_path / "scans", 1, 1, 1)
    two, three, again = (opened(root, f"folds.n_folds={n}") for n in (2, 3, 2))
    assert two == again
    assert two.folds_path == two.folder / "folds-2-seed55.csv"
    assert three.folds_path == two.folder / "folds-3-seed55.csv"
    assert len(three.split.validation) == 1
    text = two.folds_path.read_text().replace(",1\n", ",2\n").replace(",0\n", ",1\n")
    two.folds_path.unlink()
    (two.folder / "folds.csv").write_text(text)
    given = opened(root, fold=1)
    assert (given.split, given.folds_path) == (two.split, two.folder / "folds.csv")


def test_the_messages_about_a_vanished_and_a_new_case_name_the_table(two: Path) -> None:
    opened(two)
    (two / "BraTS2021_00001").rename(two.with_name("elsewhere"))
    with pytest.raises(FoldError, match=r"folds-2-seed55\.csv has cases .*: BraTS2021_00001\. Res"):
        opened(two)
    write_case(two, "BraTS2021_00002", seed=2)
    with pytest.raises(FoldError, match=r"folds-2-seed55\.csv: the fold table has no row for case"):
        opened(two)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home"


@pytest.mark.usefixtures("home")
def test_prepared_cases_are_beside_scans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    root = tmp_path / "disk" / "BraTS"
    root.mkdir(parents=True)
    Path("link").symlink_to(root)
    paths = [prepared_path_of(path) for path in (root, Path("../disk/BraTS"), Path("link"))]
    monkeypatch.chdir(root)
    assert {*paths, prepared_path_of(Path())} == {tmp_path / "disk" / "BraTS-prepared"}
    root.with_suffix(".csv").touch()
    assert prepared_path_of(root.with_suffix(".csv")).name == "BraTS.csv-prepared"


def test_prepared_in_the_cache(tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    roots = [tmp_path / disk / "BraTS" for disk in ("caf\udce9", "two")]
    for root in roots:
        root.mkdir(parents=True)
        root.parent.chmod(0o555)
    places = [prepared_path_of(root) for root in roots]
    assert [place.parent for place in places] == [home / ".cache/brats_seg/prepared"] * 2
    assert len({place.name for place in places}) == 2
    # those that exist are found again, though the scans have become writable
    roots[1].parent.chmod(0o755)
    for place in (places[1], tmp_path / "two/BraTS-prepared"):
        place.mkdir(parents=True)
        assert prepared_path_of(roots[1]) != place
        (place / "cases.csv").touch()
        assert prepared_path_of(roots[1]) == place
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "large"))
    assert prepared_path_of(roots[0]).parent == tmp_path / "large/brats_seg/prepared"


def test_a_split_of_two_spacings_is_refused(tmp_path: Path, two: Path) -> None:
    data = opened(two)
    other = opened(write_cases(tmp_path / "other" / "scans", 2, 2))
    (moved,) = data.split.validation
    (other.folder / moved).rename(tmp_path / "spare")
    (data.folder / moved).rename(other.folder / moved)
    with pytest.raises(CaseError, match=r"prepared at 1x1x1 mm; expected 2x2x2 mm as BraTS2021"):
        open_split(other.folder, data.split)


def test_a_fold_has_more_cases_than_a_process_may_open_files(tiny_prepared: Path) -> None:
    """The usual limit is 1,024 files, and BraTS 2021 has 1,251 cases."""
    ids = tuple(f"BraTS2021_{number:05d}" for number in range(6))
    split = Split(train=ids[:3], validation=ids[3:])
    expected = open_split(tiny_prepared, split).fingerprint
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 6, hard))
    try:
        assert open_split(tiny_prepared, split).fingerprint == expected
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_read_only_folder_is_used(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    before = opened(two)
    with read_only(before.folder):
        assert opened(two) == before
        whole_case(before.folder, before.split.train[0])
        assert "the table of cases" not in caplog.text
        for path in two.glob("*/*"):
            os.utime(path, (1, 1))
        assert opened(two) == before
        assert "the table of cases is not updated" in caplog.text
        outdated = r"ready cannot be written: Read-only .* 2 of its cases must be prepared"
        with pytest.raises(EnvironmentalError, match=outdated):
            opened(two, "store.spacing_mm=[2,2,2]")


def test_remarks_on_scans_are_made_once(two: Path, caplog: pytest.LogCaptureFixture) -> None:
    label_map = two / "BraTS2021_00000/BraTS2021_00000_seg.nii.gz"
    # so is one named in BraTS 2020
    label_map.rename(label_map.with_name("W39_1998.09.19_Segm.nii.gz"))
    said = []
    for _ in range(2):
        caplog.clear()
        opened(two)
        said.append("remarks:" in caplog.messages)
    assert said == [True, False]


def test_a_table_that_has_not_changed_is_not_written_again(two: Path) -> None:
    path, is_written, tables = two.with_name("cases.csv"), [], []
    for n in range(3):
        tables.append(open_index(two, path, settings()))
        is_written.append(path.stat().st_mtime_ns != 10**9)
        # a time that tells, however coarse the clock of the disk is
        os.utime(path, (1, 1))
        if n == 1:
            os.utime(next(two.glob("*/*")), (1, 1))
    assert tables[0] == tables[1]
    assert is_written == [True, False, True]
    (two / "survival_info.csv").write_text("case_id,Age\nsmith,old\n")
    with pytest.raises(CaseError, match="found age 'old'"):
        open_index(two, path, settings(), track=lambda *_, **__: pytest.fail("scans were read"))
