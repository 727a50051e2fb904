import errno
import os
import sys
from pathlib import Path

import numpy as np
import pytest

from brats_seg.data.store import array_name, check_compression, open_array, write_array
from brats_seg.errors import EnvironmentalError


@pytest.mark.parametrize("compressed", [False, True])
@pytest.mark.parametrize("shape", [(4, 70, 33, 20), (4, 3, 2, 1), (40, 65, 5)])
def test_what_was_written_is_read_also_in_parts(
    tmp_path: Path, rng: np.random.Generator, shape: tuple[int, ...], *, compressed: bool
) -> None:
    array = rng.normal(size=shape).astype(np.float16)
    path = tmp_path / array_name("image", compressed=compressed)

    write_array(path, array)
    stored = open_array(path)

    assert tuple(stored.shape) == shape
    part = (*(slice(None) for _ in shape[:-3]), slice(1, 3), slice(0, 2), slice(0, 1))
    np.testing.assert_array_equal(stored[part], array[part])
    np.testing.assert_array_equal(stored[(slice(None),) * len(shape)], array)


def test_plain_arrays_are_those_of_numpy(tmp_path: Path) -> None:
    array = np.arange(24, dtype=np.uint8).reshape(2, 3, 4)
    write_array(tmp_path / "labels.npy", array[:, ::-1])

    np.testing.assert_array_equal(np.load(tmp_path / "labels.npy"), array[:, ::-1])


def test_compression_makes_smooth_images_smaller(tmp_path: Path) -> None:
    x, y, z = np.ogrid[:64, :64, :64]
    image = np.sin(x / 9 + y / 7 + z / 8).round(2).astype(np.float16)[None]
    for name in ("image.npy", "image.b2nd"):
        write_array(tmp_path / name, image)

    plain, packed = ((tmp_path / name).stat().st_size for name in ("image.npy", "image.b2nd"))

    assert packed < 0.5 * plain


def test_a_full_disk_is_recognisable(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", refuse)

    with pytest.raises(OSError, match="No space left") as caught:
        write_array(tmp_path / "image.npy", np.zeros((2, 2, 2), dtype=np.float16))

    assert caught.value.errno == errno.ENOSPC


def test_compression_without_blosc2_says_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "blosc2", None)

    with pytest.raises(EnvironmentalError, match=r"pip install brats_seg\[compressed\]"):
        check_compression()
    with pytest.raises(EnvironmentalError, match=r"set store\.compressed to false"):
        open_array(tmp_path / "image.b2nd")
