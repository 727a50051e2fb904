"""Input and reconstruction side by side."""

import numpy as np
import pytest

from brats_seg.report.case_figures import reconstruction_figure
from tests.builders import make_volumes


def test_a_row_has_one_scale_and_the_difference_is_absolute() -> None:
    image = make_volumes().astype(np.float32)
    figure = reconstruction_figure(image, image - 10, case_id="case")

    for row in np.array(figure.axes).reshape(4, 3):
        before, after, difference = (axes.images[0] for axes in row)
        assert before.get_clim() == after.get_clim()
        assert difference.get_clim() == (0, before.get_clim()[1] - before.get_clim()[0])
        assert set(np.unique(difference.get_array())) == {0, 10}
        assert row[2].get_xlabel() == "RMSE here 10"
    assert figure.get_suptitle().startswith("case, axial")


def test_what_is_made_up_outside_the_brain_is_not_shown() -> None:
    image = make_volumes().astype(np.float32)
    elsewhere = np.where(image == 0, 5000, image)

    figure = reconstruction_figure(image, elsewhere, case_id="case")

    differences = [axes.images[0].get_array().max() for axes in figure.axes[2::3]]
    assert max(differences) == 0


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_flat_images_can_be_drawn(value: float) -> None:
    image = np.full((4, 8, 8, 8), value, np.float32)

    reconstruction_figure(image, image, case_id="case").canvas.draw()
