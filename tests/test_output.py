"""Test the output of networks in training mode."""

import torch

from brats_seg.models.output import (
    TrainingOutput,
    as_output,
    output_from,
    structure_of,
    tensors_of,
)

FINE, COARSE = torch.zeros(2, 3, 4, 4, 4), torch.zeros(2, 3, 2, 2, 2)


def test_a_plain_tensor_is_taken_as_the_only_logits() -> None:
    output = as_output(FINE)

    assert output.logits == (FINE,)
    assert output.penalty is None


def test_an_output_is_passed_through() -> None:
    output = TrainingOutput(logits=(FINE, COARSE), penalty=torch.zeros(2))

    assert as_output(output) is output


def test_an_output_comes_back_from_its_tensors() -> None:
    for output in (
        TrainingOutput(logits=(FINE, COARSE), penalty=torch.ones(2)),
        TrainingOutput(logits=(FINE,), penalty=torch.ones(2)),
        TrainingOutput(logits=(FINE, COARSE)),
    ):
        assert output_from(structure_of(output), tensors_of(output)) == output
    assert output_from(structure_of(FINE), tensors_of(FINE)) is FINE
