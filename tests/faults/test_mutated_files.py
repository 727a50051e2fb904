"""Of thousands of NIfTI files with random faults, each is refused, or read and written back."""

from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.mutated_nifti import mutated_file, outcome_of

N_FILES, SIZE = 10_000, 1250
PROMISE = "mutated files: refused, or read and a label map written back"


@pytest.mark.parametrize(
    "numbers",
    [
        *(
            pytest.param(range(n, n + SIZE), marks=pytest.mark.slow)
            for n in range(0, N_FILES, SIZE)
        ),
        range(N_FILES, N_FILES + 100),
    ],
    ids=str,
)
def test_what_is_read_can_be_written_back(
    numbers: range, tmp_path: Path, campaign: NewCampaign
) -> None:
    n_written = 0
    with campaign(PROMISE) as tries:
        for number in numbers:
            name, content = mutated_file(number)
            path = tmp_path / name
            path.write_bytes(content)
            try:
                n_written += outcome_of(path) == "written"
                problem = ""
            except Exception as error:  # noqa: BLE001 - a fault of the package
                problem = f"{type(error).__name__}: {error}"
            tries.note(f"file {number}", problem)
    # the faults are neither all harmless nor all fatal
    assert 0.1 < n_written / len(numbers) < 0.9
