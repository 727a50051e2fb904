"""Of thousands of NIfTI files with random faults, each is refused, or read and written back."""

from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.mutated_nifti import mutated_file, outcome_of

N_FILES = 10_000
N_PARTS = 8
N_FEW = 100
PROMISE = "mutated files: refused, or read and a label map written back"


def read_and_write_back(numbers: range, folder: Path, new: NewCampaign) -> None:
    n_written = 0
    with new(PROMISE) as tries:
        for number in numbers:
            name, content = mutated_file(number)
            path = folder / name
            path.write_bytes(content)
            try:
                n_written += outcome_of(path) == "written"
                problem = ""
            except Exception as error:  # noqa: BLE001 - a fault of the package
                problem = f"{type(error).__name__}: {error}"
            tries.note(f"file {number}", problem)
    # the faults are neither all harmless nor all fatal
    assert 0.1 < n_written / len(numbers) < 0.9


@pytest.mark.slow
@pytest.mark.parametrize("part", range(N_PARTS))
def test_what_is_read_can_be_written_back(part: int, tmp_path: Path, campaign: NewCampaign) -> None:
    size = N_FILES // N_PARTS
    read_and_write_back(range(part * size, (part + 1) * size), tmp_path, campaign)


def test_what_is_read_of_a_few_can_be_written_back(tmp_path: Path, campaign: NewCampaign) -> None:
    read_and_write_back(range(N_FILES, N_FILES + N_FEW), tmp_path, campaign)
