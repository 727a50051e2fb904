import errno
import os
import resource
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.index import read_index
from brats_seg.config import Config, load_config
from brats_seg.data.fold import FoldData, open_fold, open_index, open_split, prepared_path_of
from brats_seg.data.loader import whole_case
from brats_seg.errors import CaseError, EnvironmentalError, FoldError, UsageError
from tests.builders import write_case
from tests.inference_builders import read_scan

ONE, TWO = (1.0, 1.0, 1.0), (2.0, 2.0, 2.0)

_read_only: list[str] = []
"""Folders in which the audit hook refuses to write."""
_CHANGES = ("os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.truncate", "os.utime")


def _refuse_to_write(event: str, arguments: tuple[object, ...]) -> None:
    if not _read_only:
        return
    if event == "open":
        path, _, flags = arguments
        writes = isinstance(flags, int) and flags & (os.O_WRONLY | os.O_RDWR | os.O_CREAT)
    else:
        path, writes = arguments[0] if arguments else None, event in _CHANGES
    if writes and isinstance(path, str | Path) and str(path).startswith(tuple(_read_only)):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS), str(path))


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


def opened(root: Path, *changes: str) -> FoldData:
    return open_fold(root, fold=0, config=settings(*changes), prepared_path=root.with_name("ready"))


def shapes(data: FoldData) -> dict[str, tuple[int, ...]]:
    ids = (*data.split.train, *data.split.validation)
    return {case_id: whole_case(data.folder, case_id).image.shape[1:] for case_id in sorted(ids)}


@pytest.mark.parametrize(
    ("spacings", "changes", "expected"),
    [
        ((1, 1), (), ONE),
        ((2, 2), (), TWO),
        ((2, 1, 2), (), TWO),
        ((2, 1), (), ONE),
        ((1, 1), ("store.spacing_mm=[1.5,2,1]",), (1.5, 2.0, 1.0)),
    ],
)
def test_training_sees_what_prediction_computes(
    tmp_path: Path, spacings: tuple[int, ...], changes: tuple[str, ...], expected: tuple[float, ...]
) -> None:
    """Each held-out and training case is, bit for bit, the scan that the network would be given."""
    root = write_cases(tmp_path / "scans", *spacings)
    data = opened(root, *changes)

    assert data.spacing_mm == expected
    for case in read_index(data.folder / "cases.csv", root).cases:
        scan, prepared = read_scan(case, data.spacing_mm), whole_case(data.folder, case.case_id)
        np.testing.assert_array_equal(prepared.image.numpy(), scan.image.astype(np.float16))
        assert prepared.target.shape[1:] == scan.image.shape[1:]


def test_a_fold_that_does_not_exist_is_refused_before_anything_is_written(tmp_path: Path) -> None:
    root = write_cases(tmp_path / "scans", 1, 1)

    with pytest.raises(FoldError, match="there is no fold 9: the settings have 2 folds, 0 to 1"):
        open_fold(root, fold=9, config=settings())

    assert [path.name for path in tmp_path.iterdir()] == ["scans"]


def test_prepared_cases_in_the_folder_of_the_scans_are_refused_before_a_table_is_written(
    tmp_path: Path,
) -> None:
    root = write_cases(tmp_path / "scans", 1, 1)
    before = sorted(tmp_path.rglob("*"))

    refused = r"prepared cases would replace .*BraTS2021_00000 and 1 more"
    with pytest.raises(UsageError, match=refused):
        open_fold(root, fold=0, config=settings(), prepared_path=root)

    assert sorted(tmp_path.rglob("*")) == before


def test_fold_tables_of_several_numbers_stand_side_by_side(tmp_path: Path) -> None:
    root = write_cases(tmp_path / "scans", 1, 1, 1)
    two, three, two_again = (opened(root, f"folds.n_folds={n}") for n in (2, 3, 2))

    assert two == two_again
    assert two.folds_path == two.folder / "folds-2-seed55.csv"
    assert three.folds_path == two.folder / "folds-3-seed55.csv"
    assert len(three.split.validation) == 1


def test_a_table_that_was_given_keeps_its_folds(tmp_path: Path) -> None:
    root = write_cases(tmp_path / "scans", 1, 1, 1)
    before = opened(root)
    assert before.folds_path is not None
    text = before.folds_path.read_text().replace(",1\n", ",2\n").replace(",0\n", ",1\n")
    before.folds_path.unlink()
    (before.folder / "folds.csv").write_text(text)

    after = open_fold(root, fold=1, config=settings(), prepared_path=before.folder)

    assert after.split == before.split
    assert after.folds_path == before.folder / "folds.csv"


def test_the_messages_about_a_vanished_and_a_new_case_name_the_table(tmp_path: Path) -> None:
    root = write_cases(tmp_path / "scans", 1, 1)
    opened(root)
    (root / "BraTS2021_00001").rename(tmp_path / "elsewhere")
    with pytest.raises(FoldError, match=r"folds-2-seed55\.csv has cases .*: BraTS2021_00001\. Res"):
        opened(root)

    write_case(root, "BraTS2021_00002", seed=2)
    with pytest.raises(FoldError, match=r"folds-2-seed55\.csv: the fold table has no row for case"):
        opened(root)


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A home folder, and a current folder that is not that of the scans."""
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    (tmp_path / "elsewhere").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    return tmp_path / "home"


def test_prepared_cases_are_beside_the_scans_whatever_the_current_folder(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    root = tmp_path / "disk" / "BraTS"
    root.mkdir(parents=True)
    Path("link").symlink_to(root)
    found = [prepared_path_of(path) for path in (root, Path("../disk/BraTS"), Path("link"))]
    monkeypatch.chdir(root)

    assert {*found, prepared_path_of(Path())} == {tmp_path / "disk" / "BraTS-prepared"}


def test_prepared_cases_of_scans_in_a_read_only_folder_are_in_the_cache(
    tmp_path: Path, home: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Root may write there too, and does not."""
    roots = [tmp_path / disk / "BraTS" for disk in ("one", "two")]
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


def test_another_spacing_prepares_all_cases_again_and_is_another_training_set(
    tmp_path: Path,
) -> None:
    root = write_cases(tmp_path / "scans", 1, 1)
    before = opened(root)
    sizes = shapes(before)

    after = opened(root, "store.spacing_mm=[2,2,2]")

    assert after.spacing_mm == TWO
    assert after.fingerprint != before.fingerprint
    for case_id, shape in shapes(after).items():
        assert np.allclose(np.divide(sizes[case_id], shape), 2, atol=0.3)


def test_the_spacing_is_chosen_from_all_cases_and_not_from_those_of_the_fold(
    tmp_path: Path,
) -> None:
    """It is the same again when the headers come from the prepared cases, and in every fold."""
    root = write_cases(tmp_path / "scans", 1, 2, 2, 1, 2)
    for fold in (0, 1, 0):
        data = open_fold(root, fold=fold, config=settings(), prepared_path=tmp_path / "ready")
        assert data.spacing_mm == TWO


def test_a_split_of_two_spacings_is_refused(tmp_path: Path) -> None:
    data = opened(write_cases(tmp_path / "scans", 1, 1))
    other = opened(write_cases(tmp_path / "other" / "scans", 2, 2))
    (moved,) = data.split.validation
    (other.folder / moved).rename(tmp_path / "spare")
    (data.folder / moved).rename(other.folder / moved)

    with pytest.raises(CaseError, match=r"prepared at 1x1x1 mm; expected 2x2x2 mm as BraTS2021"):
        open_split(other.folder, data.split)


def test_a_fold_has_more_cases_than_a_process_may_open_files(tmp_path: Path) -> None:
    """The usual limit is 1,024 files, and BraTS 2021 has 1,251 cases."""
    data = write_cases(tmp_path / "data", *[1.0] * 6)
    config = load_config(values={"folds.n_folds": 2})
    expected = open_fold(data, fold=0, config=config)
    n_open = len(list(Path("/proc/self/fd").iterdir()))
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)

    resource.setrlimit(resource.RLIMIT_NOFILE, (n_open + 6, hard))
    try:
        assert open_split(expected.folder, expected.split).fingerprint == expected.fingerprint
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_a_read_only_folder_is_used_unless_it_is_outdated(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Scans with other times are used too, as in a data folder that was copied, or mounted elsewhere."""
    root = write_cases(tmp_path / "scans", 1, 1)
    before = opened(root)
    with read_only(before.folder):
        assert opened(root) == before
        whole_case(before.folder, before.split.train[0])
        assert "the table of cases" not in caplog.text
        for path in root.glob("*/*"):
            os.utime(path, (1, 1))
        assert opened(root) == before
        assert "the table of cases is not updated" in caplog.text
        outdated = (
            r"ready cannot be written: Read-only file system.* 2 of its cases must be prepared"
        )
        with pytest.raises(EnvironmentalError, match=outdated):
            opened(root, "store.spacing_mm=[2,2,2]")


def test_a_table_that_has_not_changed_is_not_written_again(tmp_path: Path) -> None:
    root, path = write_cases(tmp_path / "scans", 1, 1), tmp_path / "cases.csv"
    first = open_index(root, path, settings())
    before = path.stat().st_mtime_ns

    assert open_index(root, path, settings()) == first
    assert path.stat().st_mtime_ns == before

    os.utime(next(root.glob("*/*")), (1, 1))
    open_index(root, path, settings())

    assert path.stat().st_mtime_ns != before
