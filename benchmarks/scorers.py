"""Score pairs of label maps with nnU-Net, MIST and panoptica, as their users do.

Each function returns the scores by case and region, as far as the program computes them for whole
regions, so that they can be held against ours.
"""

import contextlib
import functools
import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REGION_LABELS = {"wt": [1, 2, 4], "tc": [1, 4], "et": [4]}
"""Voxel values of the regions in label maps of BraTS 2017 to 2022."""

Scores = Mapping[tuple[str, str, str], float]
"""Scores by case, region and name, which is `dice`, `hd95` or `lesionwise_dice`."""

_OF_MIST = {"dice": "dice", "haus95": "hd95", "lesion_wise_dice": "lesionwise_dice"}
"""Names of scores of MIST, and ours."""
_LIKE_2023 = {"min_lesion_volume": 50, "dilation_iters": 3, "gt_consolidation_iters": 3}
"""Settings of MIST for the rules by which BraTS 2023 scored lesions of gliomas."""


def score_with_nnunet(reference: Path, prediction: Path) -> Scores:
    """Return the Dice of nnU-Net, computed in this process, where it would start others."""
    from nnunetv2.evaluation.evaluate_predictions import compute_metrics
    from nnunetv2.imageio.simpleitk_reader_writer import SimpleITKIO

    regions = [tuple(labels) for labels in REGION_LABELS.values()]
    scores = {}
    for case_id, path in _cases(reference).items():
        found = compute_metrics(str(path), str(prediction / path.name), SimpleITKIO(), regions)
        for name, labels in zip(REGION_LABELS, regions, strict=True):
            scores[case_id, name, "dice"] = float(found["metrics"][labels]["Dice"])
    return scores


def score_with_mist(reference: Path, prediction: Path, output: Path, *, lesions: bool) -> Scores:
    """Return Dice and HD95 of MIST, of whole regions or by lesions, from the table that it writes."""
    import pandas as pd
    from mist.evaluation.evaluator import Evaluator

    cases = _cases(reference)
    table = pd.DataFrame(
        [
            {"id": case_id, "mask": str(path), "prediction": str(prediction / path.name)}
            for case_id, path in cases.items()
        ]
    )
    metrics: dict[str, dict[str, int]] = {"dice": {}, "haus95": {}}
    if lesions:
        metrics = {f"lesion_wise_{name}": _LIKE_2023 for name in metrics}
    config = {
        name: {"labels": labels, "metrics": metrics} for name, labels in REGION_LABELS.items()
    }
    with contextlib.redirect_stdout(io.StringIO()):
        Evaluator(table, config, output).run(max_workers=1)
    rows = pd.read_csv(output).set_index("id")
    return {
        (case_id, region, _OF_MIST[metric]): float(rows.loc[case_id, f"{region}_{metric}"])
        for case_id in cases
        for region in REGION_LABELS
        for metric in metrics
        if metric in _OF_MIST
    }


def score_with_panoptica(reference: Path, prediction: Path) -> Scores:
    """Return Dice and HD95 of panoptica; it computes them of whole regions and of matched lesions."""
    evaluator = _panoptica()
    scores = {}
    for case_id, path in _cases(reference).items():
        found = evaluator.evaluate(str(prediction / path.name), str(path))
        for region in REGION_LABELS:
            scores[case_id, region, "dice"] = float(found[region].global_bin_dsc)
            scores[case_id, region, "hd95"] = float(found[region].global_bin_hd95)
    return scores


@functools.cache
def _panoptica() -> Any:
    """Return the evaluator of all regions; it says that they overlap when it is made."""
    from panoptica import (
        ConnectedComponentsInstanceApproximator,
        InputType,
        NaiveThresholdMatching,
        Panoptica_Evaluator,
    )
    from panoptica.metrics import Metric
    from panoptica.utils import EdgeCaseHandler, EdgePrediction
    from panoptica.utils.citation_reminder import disable_citation_reminder
    from panoptica.utils.edge_case_handling import MetricZeroTPEdgeCaseHandling
    from panoptica.utils.label_group import LabelMergeGroup
    from panoptica.utils.segmentation_class import SegmentationClassGroups

    disable_citation_reminder()
    metrics = [Metric.DSC, Metric.HD95]
    # it has no default for HD95 where no lesion is matched
    unmatched = {
        metric: MetricZeroTPEdgeCaseHandling(default_result=worst)
        for metric, worst in zip(metrics, (EdgePrediction.ZERO, EdgePrediction.INF), strict=True)
    }
    return Panoptica_Evaluator(
        expected_input=InputType.SEMANTIC,
        instance_approximator=ConnectedComponentsInstanceApproximator(),
        instance_matcher=NaiveThresholdMatching(),
        edge_case_handler=EdgeCaseHandler(unmatched),
        segmentation_class_groups=SegmentationClassGroups(
            {name: LabelMergeGroup(labels) for name, labels in REGION_LABELS.items()}
        ),
        instance_metrics=metrics,
        global_metrics=metrics,
    )


def _cases(folder: Path) -> dict[str, Path]:
    """Return the label maps of a folder by case."""
    return {path.name.removesuffix(".nii.gz"): path for path in sorted(folder.glob("*.nii.gz"))}
