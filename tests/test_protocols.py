"""Test the parameters of the scoring protocols."""

import pytest

from brats_seg.errors import ConfigError
from brats_seg.evaluation import protocols
from brats_seg.evaluation.protocols import ScoredRegion, protocol_named
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
        assert protocol.lesions == protocols.LesionRules(
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
    with pytest.raises(ConfigError, match=r"'lesion' is unknown; there are legacy, .*, brats2026"):
        protocol_named("lesion")
    with pytest.raises(ConfigError, match="no task 'MEN-RT'; there are GLI, SSA, PED, MEN, MET"):
        protocol_named("lesionwise2023", "MEN-RT")
    with pytest.raises(ConfigError, match="brats2025 has no task 'SSA'"):
        protocol_named("brats2025", "SSA")
    with pytest.raises(ConfigError, match=r"legacy has no task 'met:1'; there are GLI, .*, GOAT"):
        protocol_named("legacy", "met:1")


MATCHED = {
    # task: regions and voxel values in the configuration of the program
    "GLI": "wt 123 tc 13 et 3 netc 1 snfh 2 rc 4",
    "MET": "wt 123 tc 13 et 3 rc 4",
    "PED": "wt 1234 tc 123 et 1 netc 2 cc 3 ed 4",
    "MEN": "wt 123 tc 13 et 3",
    "GOAT": "wt 123 tc 13 et 3",
    "MEN-RT": "gtv 1",
}


@pytest.mark.parametrize(("year", "metastases"), [(2025, (20, 0.1)), (2026, (27, 0.2))])
def test_the_tasks_of_2025_have_the_regions_of_the_program(year: int, metastases) -> None:
    for task, regions in MATCHED.items():
        protocol = protocol_named(f"brats{year}", task)
        labels = protocol.labels or BRATS2024
        values = ("".join(map(str, region.values(labels))) for region in protocol.regions)
        pairs = zip([region.name for region in protocol.regions], values, strict=True)
        assert " ".join(f"{name} {those}" for name, those in pairs) == regions
        assert (protocol.penalty_mm, protocol.lesions) == (373, None)
        numbers = metastases if task == "MET" else (0, 0)
        assert protocol.matching == protocols.MatchingRules(
            large_mm3=numbers[0], found_dice=numbers[1]
        )


def test_titles_name_protocol_task_challenge_and_program() -> None:
    assert protocol_named("legacy", "MET").title.startswith("legacy: BraTS 2017 to 2022")
    expected = "brats2025 MET: BraTS 2025 as in brats-evaluation 0.0.10"
    assert protocol_named("brats2025", "met").title == expected
    assert {protocol.name for protocol in protocols.PROTOCOLS} == protocols.PROGRAMS.keys()


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
    for protocol in protocols.PROTOCOLS:
        for region in protocol.regions:
            assert region.values(protocol.labels or BRATS2024), (protocol.task, region.name)
