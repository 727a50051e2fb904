import pickle

import numpy as np
import pytest
import torch

from brats_seg.data.store import Buffers


def address(array: np.ndarray) -> int:
    return array.ctypes.data


def test_arrays_have_the_shape_and_type_asked_for() -> None:
    array = Buffers().take((3, 5, 2), np.float16)
    array[...] = 1

    assert array.shape == (3, 5, 2)
    assert array.dtype == np.float16
    assert array.flags.c_contiguous


def test_memory_is_used_again_once_it_is_free() -> None:
    buffers = Buffers()
    first = address(buffers.take((10, 10), np.float32))

    assert address(buffers.take((10, 10), np.float32)) == first
    # of the same power of two
    assert address(buffers.take((9, 13), np.float32)) == first


@pytest.mark.parametrize(
    "hold",
    [
        lambda array: array,
        lambda array: array[1:, ::-1],
        lambda array: array.view(np.int32).reshape(-1)[3:],
        torch.from_numpy,
        lambda array: torch.from_numpy(array)[2:5].permute(1, 0),
        lambda array: torch.from_numpy(array)[1].numpy()[2:],
    ],
    ids=["array", "view", "other type", "tensor", "tensor view", "array of tensor"],
)
def test_memory_that_anything_refers_to_is_not_handed_out(hold) -> None:
    buffers = Buffers()
    held = hold(buffers.take((10, 10), np.float32))
    held[...] = 3
    before = held.tolist()

    other = buffers.take((10, 10), np.float32)
    other[...] = 7

    assert held.tolist() == before


def test_several_may_be_held_at_once() -> None:
    buffers = Buffers()
    arrays = [buffers.take((4, 4), np.uint8) for _ in range(5)]
    for value, array in enumerate(arrays):
        array[...] = value

    assert [array.max() for array in arrays] == [0, 1, 2, 3, 4]


def test_no_memory_goes_to_another_process() -> None:
    buffers = Buffers()
    buffers.take((1000, 1000), np.float32)[...] = 1

    packed = pickle.dumps(buffers)

    assert len(packed) < 200
    assert pickle.loads(packed).take((2, 2), np.uint8).shape == (2, 2)
