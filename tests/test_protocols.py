"""Test the parameters of the scoring protocols."""

import pytest

from brats_seg.errors import ConfigError
from brats_seg.evaluation.protocols import PROTOCOLS, LesionRules, ScoredRegion, protocol_named
from brats_seg.labels import BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD

BRATS_SHAPE = (240, 240, 155)
MM = (1.0, 1.0, 1.0)


PUBLISHED = [
    # year, task, regions, dilations, minima, penalty, whether predicted lesions are merged
    (2023, "GLI", "wt tc et", (3,) * 3, (50,) * 3, 374, False),
    (2023, "SSA", "wt tc et", (3,) * 3, (50,) * 3, 374, False),
    (2023, "PED", "wt tc et", (3,) * 3, (50,) * 3, 374, False),
    (2023, "MEN", "wt tc et", (1,) * 3, (50,) * 3, 374, False),
    (2023, "MET", "wt tc et", (1,) * 3, (2,) * 3, 374, False),
    (2024, "GLI", "wt tc netc snfh et rc", (3, 3, 5, 3, 3, 5), (20,) * 4 + (10, 20), 337, True),
    (2024, "SSA", "wt tc et", (3,) * 3, (50,) * 3, 374, True),
    (2024, "PED", "wt tc et netc cc ed", (5,) * 6, (10,) * 6, 374, True),
    (2024, "MEN", "wt tc et", (1,) * 3, (50,) * 3, 374, False),
    (2024, "MET", "wt tc et rc", (1,) * 4, (2,) * 4, 373.128664, True),
    (2024, "MEN-RT", "gtv", (1,), (50,), 373.128664, True),
]


def test_each_year_and_task_has_its_numbers() -> None:
    for year, task, regions, dilations, minima, penalty, merges in PUBLISHED:
        protocol = protocol_named(f"lesionwise{year}", task.lower())

        expected = zip(regions.split(), dilations, minima, strict=True)
        assert protocol.regions == tuple(ScoredRegion(*region) for region in expected)
        assert protocol.hd95_penalty(BRATS_SHAPE, MM) == pytest.approx(penalty)
        assert protocol.lesions == LesionRules(
            merges_predictions=merges,
            joins_touching=(year, task) == (2024, "GLI"),
            counts_false_positives=task != "MEN-RT",
        )
    # paediatric label maps without the fourth label look like those of 2023
    assert protocol_named("lesionwise2024", "PED").labels == BRATS2024_PED


def test_legacy_is_one_for_all_tasks_and_the_diagonal_of_an_image_is_in_mm() -> None:
    assert protocol_named("legacy") is protocol_named("legacy", "MET")
    assert protocol_named("legacy").hd95_penalty((182, 218, 182), MM) == 373.12866
    assert (protocol_named("legacy").lesions, protocol_named("legacy").labels) == (None, None)
    of_metastases = protocol_named("lesionwise2024", "MET")
    assert of_metastases.hd95_penalty((30, 40, 12), (0.1, 0.1, 1.0)) == pytest.approx(13.0)


def test_unknown_names_are_refused_with_those_there_are() -> None:
    with pytest.raises(
        ConfigError, match="'lesion' is unknown; there are legacy, lesionwise2023, lesionwise2024"
    ):
        protocol_named("lesion")
    with pytest.raises(ConfigError, match="no task 'MEN-RT'; there are GLI, SSA, PED, MEN, MET"):
        protocol_named("lesionwise2023", "MEN-RT")


VALUES = {
    # in BraTS 2017, 2023, 2024, 2024 paediatric and the decathlon
    "wt": [(1, 2, 4), (1, 2, 3), (1, 2, 3), (1, 2, 3, 4), (1, 2, 3)],
    "tc": [(1, 4), (1, 3), (1, 3), (1, 2, 3), (2, 3)],
    "et": [(4,), (3,), (3,), (1,), (3,)],
    "netc": [(1,), (1,), (1,), (2,), (2,)],
    "snfh": [(2,), (2,), (2,), (4,), (1,)],
    "ed": [(2,), (2,), (2,), (4,), (1,)],
    "rc": [(), (), (4,), (), ()],
    "cc": [(), (), (), (3,), ()],
}


def test_a_region_has_its_values_in_every_convention() -> None:
    conventions = (BRATS2017, BRATS2023, BRATS2024, BRATS2024_PED, MSD)

    for region, values in VALUES.items():
        assert [ScoredRegion(name=region).values(c) for c in conventions] == values
    for protocol in PROTOCOLS:
        for region in protocol.regions:
            assert region.values(protocol.labels or BRATS2024), (protocol.task, region.name)
