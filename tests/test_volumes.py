"""How large regions and tissues are."""

import numpy as np
import pytest

from brats_seg.inference.postprocess import PARTS, measure
from brats_seg.labels import BRATS2017, BRATS2024_PED


def test_volumes_and_components_by_hand():
    """Six voxels of 500 mm3 in a row: necrosis, enhancing, enhancing, air, oedema, air."""
    label_map = np.array([1, 4, 4, 0, 2, 0], dtype=np.uint8).reshape(6, 1, 1)

    found = {part.name: (part.ml, part.n_components) for part in measure(label_map, BRATS2017, 500)}

    assert found == {
        "wt": (2.0, 2),
        "tc": (1.5, 1),
        "et": (1.0, 1),
        "ed": (0.5, 1),
        "ncr": (0.5, 1),
    }


@pytest.mark.parametrize("convention", [BRATS2017, BRATS2024_PED])
def test_a_case_without_tumour_has_nothing(convention):
    parts = measure(np.zeros((2, 2, 2), dtype=np.uint8), convention, 1.0)

    assert [(part.name, part.ml, part.n_components) for part in parts] == [
        (name, 0.0, 0) for name in PARTS
    ]
