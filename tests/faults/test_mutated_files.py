"""Of thousands of NIfTI files with random faults, each is refused, or read and written back."""

import pytest

from tests.faults.campaign import Campaign
from tests.faults.mutated_nifti import mutated_file, read_and_write_back

N_FILES, SIZE = 5_000, 1250
MANY = (range(first, first + SIZE) for first in range(0, N_FILES, SIZE))


@pytest.mark.parametrize(
    "numbers",
    [
        *(pytest.param(numbers, marks=pytest.mark.slow) for numbers in MANY),
        range(N_FILES, N_FILES + 100),
    ],
    ids=str,
)
def test_what_is_read_can_be_written_back(numbers: range, campaign: Campaign) -> None:
    n_written = 0
    for number in numbers:
        name, content = mutated_file(number)
        path = campaign.folder / name
        path.write_bytes(content)
        try:
            n_written += read_and_write_back(path)
            problem = ""
        except Exception as error:  # noqa: BLE001 - a fault of the package
            problem = f"{type(error).__name__}: {error}"
        campaign.note(f"file {number}", problem)
    # the faults are neither all harmless nor all fatal
    assert 0.1 < n_written / len(numbers) < 0.9
