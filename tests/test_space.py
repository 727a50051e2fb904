import re
from pathlib import Path

import numpy as np
import pytest

from brats_seg.cases.case import CaseIndex
from brats_seg.cases.index import index_cases
from brats_seg.config import StoreConfig
from brats_seg.data import prepare as space
from brats_seg.data.prepare import LARGEST_BRAIN_MM3, check_space, required_bytes
from brats_seg.errors import EnvironmentalError
from brats_seg.files import folder_bytes
from tests.builders import write_case, write_nifti
from tests.prepared import prepare

PLAIN, COMPRESSED = StoreConfig(compressed=False), StoreConfig(compressed=True)


def required(index: CaseIndex, folder: Path, config: StoreConfig = PLAIN) -> int:
    return required_bytes(index.cases, folder, config)


def test_small_volumes_are_counted_whole(tmp_path: Path) -> None:
    write_case(tmp_path / "scans", shape=(24, 24, 16))
    index = index_cases(tmp_path / "scans")

    assert required(index, tmp_path) == 24 * 24 * 16 * (4 * 2 + 1) + 2**18


@pytest.mark.parametrize(("spacing_mm", "n_voxels"), [(1, LARGEST_BRAIN_MM3), (2, 200**3)])
def test_of_large_volumes_a_brain_is_counted(
    tmp_path: Path, spacing_mm: float, n_voxels: int
) -> None:
    """A 200 mm cube holds more than a brain at 1 mm; 400 mm in 2 mm voxels likewise."""
    write_case(tmp_path / "scans")
    index = index_cases(tmp_path / "scans")
    # an empty volume packs well: only its header is read
    header_only = np.zeros((200, 200, 200), dtype=np.uint8)
    affine = np.diag([spacing_mm, spacing_mm, spacing_mm, 1.0])
    write_nifti(tmp_path / "scans" / index.cases[0].images[0].path, header_only, affine)

    expected = min(n_voxels, LARGEST_BRAIN_MM3 / spacing_mm**3) * 9 + 2**18

    assert required(index, tmp_path) == int(expected)


def test_compressed_cases_need_less(tmp_path: Path) -> None:
    write_case(tmp_path / "scans", shape=(64, 64, 64))
    index = index_cases(tmp_path / "scans")

    assert required(index, tmp_path, COMPRESSED) < 0.5 * required(index, tmp_path)


@pytest.mark.parametrize("config", [PLAIN, COMPRESSED])
def test_the_estimate_is_no_less_than_what_is_written(tmp_path: Path, config: StoreConfig) -> None:
    write_case(tmp_path / "scans", shape=(48, 48, 32))
    index = index_cases(tmp_path / "scans")
    needed = required(index, tmp_path / "prepared", config)
    prepare(tmp_path / "scans", tmp_path / "prepared", compressed=config.compressed)

    written = folder_bytes(tmp_path / "prepared" / index.cases[0].case_id)

    assert 0.2 * needed < written <= needed


def test_what_is_replaced_needs_no_more_room(tmp_path: Path) -> None:
    write_case(tmp_path / "scans")
    index = index_cases(tmp_path / "scans")
    needed = required(index, tmp_path / "prepared")
    prepare(tmp_path / "scans", tmp_path / "prepared")
    there = folder_bytes(tmp_path / "prepared" / index.cases[0].case_id)

    assert required(index, tmp_path / "prepared") == needed - there


def test_an_unreadable_scan_needs_no_room(tmp_path: Path) -> None:
    write_case(tmp_path / "scans")
    index = index_cases(tmp_path / "scans")
    (index.root / index.cases[0].images[0].path).write_text("not a scan")

    assert required(index, tmp_path) == 0


@pytest.mark.parametrize(
    ("config", "advice"),
    [(PLAIN, "or set store.compressed to true"), (COMPRESSED, r"on a larger disk\.$")],
)
def test_too_little_room_is_refused_with_what_is_needed_and_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, config: StoreConfig, advice: str
) -> None:
    write_case(tmp_path / "scans", shape=(64, 64, 64))
    index = index_cases(tmp_path / "scans")
    monkeypatch.setattr(space, "free_bytes", lambda _: 0)

    with pytest.raises(
        EnvironmentalError,
        match=rf"preparing 1 cases needs about [13] MB in .*{tmp_path.name}.*0 MB are free.*{advice}",
    ):
        check_space(index.cases, tmp_path, config)


def test_enough_room_is_told_of(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    write_case(tmp_path / "scans")
    index = index_cases(tmp_path / "scans")
    caplog.set_level("INFO")

    check_space(index.cases, tmp_path, PLAIN)

    assert re.fullmatch(
        r"preparing 1 cases needs about 0 MB in .*, where .* are free", caplog.messages[-1]
    )
