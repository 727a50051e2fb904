"""Tensors of worker processes in shared memory; here both ends are in one process."""

import pickle

import pytest
import torch
from torch import Tensor

from brats_seg.data import shared_memory
from brats_seg.data.shared_memory import Receiver, Sender


def make_tensors(value: float, edge: int = 4) -> list[Tensor]:
    shape = (edge, edge, edge)
    image = torch.full((4, *shape), value, dtype=torch.float16)
    return [image, torch.full((3, *shape), int(value) % 2, dtype=torch.uint8)]


def test_tensors_arrive_as_they_were() -> None:
    sender, receiver = Sender(), Receiver()
    tensors = [torch.randn(4, 3, 5, 7).half(), torch.randint(0, 2, (3, 3, 5, 7)).to(torch.uint8)]

    found = receiver.receive(sender.send(tensors))

    for one, other in zip(found, tensors, strict=True):
        assert one.dtype == other.dtype
        assert torch.equal(one, other)


def test_a_tensor_that_is_not_contiguous_arrives_as_it_was() -> None:
    turned = torch.arange(24.0).reshape(2, 3, 4).permute(2, 0, 1)

    (found,) = Receiver().receive(Sender().send([turned]))

    assert torch.equal(found, turned)


def test_memory_is_used_again_when_nothing_refers_to_it() -> None:
    sender, receiver = Sender(), Receiver()
    blocks = set()
    for number in range(20):
        sent = sender.send(make_tensors(number))
        assert (sent.memory is not None) == (number == 0)
        blocks.add(sent.block)
        image, _ = receiver.receive(sent)
        assert image.unique().tolist() == [number]
        del image, _

    assert blocks == {0}


def test_memory_is_left_alone_while_a_view_of_a_tensor_exists() -> None:
    sender, receiver = Sender(), Receiver()
    kept = []
    for number in range(5):
        image, target = receiver.receive(sender.send(make_tensors(number)))
        kept.append((image[1:3, 2].permute(1, 2, 0), target[None]))
        del image, target

    for number, (image, target) in enumerate(kept):
        assert image.unique().tolist() == [number]
        assert target.unique().tolist() == [number % 2]
    kept.clear()
    assert sender.send(make_tensors(9)).memory is None


def test_larger_tensors_get_a_larger_block_and_smaller_ones_share_it() -> None:
    sender, receiver = Sender(), Receiver()
    blocks = []
    for edge in (4, 8, 6, 4):
        sent = sender.send(make_tensors(1, edge))
        blocks.append(sent.block)
        receiver.receive(sent)

    assert blocks == [0, 1, 1, 0]


def test_a_block_outlives_the_receiver() -> None:
    sender = Sender()
    image, _ = Receiver().receive(sender.send(make_tensors(3)))

    assert image.unique().tolist() == [3]
    assert sender.send(make_tensors(4)).block == 1


@pytest.mark.parametrize("shape", [(), (0, 3), (1,)])
def test_tensors_of_any_shape_arrive(shape: tuple[int, ...]) -> None:
    (found,) = Receiver().receive(Sender().send([torch.ones(shape, dtype=torch.uint8)]))

    assert found.shape == shape


def test_a_tensor_begins_where_its_type_can_be_read() -> None:
    odd = [torch.ones(3, dtype=torch.uint8), torch.ones(5, dtype=torch.float64)]

    _, found = Receiver().receive(Sender().send(odd))

    assert found.tolist() == [1.0] * 5


def test_what_is_sent_is_small_after_the_first_time() -> None:
    sender, receiver = Sender(), Receiver()
    receiver.receive(sender.send(make_tensors(1)))
    sent = sender.send(make_tensors(2))

    assert len(pickle.dumps(sent)) < 1000
    assert shared_memory._HEADER_BYTES % 8 == 0
