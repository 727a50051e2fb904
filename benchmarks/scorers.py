"""Score pairs of label maps with nnU-Net, MIST and the organisers' program, as their users do.

Each function returns the scores by case and region, as far as the program computes them for whole
regions, so that they can be held against ours.
"""

import contextlib
import functools
import io
import json
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import Any

REGION_LABELS = {"wt": [1, 2, 3], "tc": [1, 3], "et": [3]}
"""Voxel values of the regions in label maps since BraTS 2023."""

Scores = Mapping[tuple[str, str, str], float]
"""Scores by case, region and name, such as `dice`, `hd95` or `lesionwise_dice`."""

_OF_MIST = {"dice": "dice", "haus95": "hd95", "lesion_wise_dice": "lesionwise_dice"}
"""Names of scores of MIST, and ours."""
_OF_ORGANISERS = {
    "dice": "global_dsc",
    "hd95": "global_hd95",
    "nsd": "global_nsd",
    **{f"lesionwise_{name}": f"lesionwise_{name}_mean" for name in ("hd95", "nsd")},
    "lesionwise_dice": "lesionwise_dsc_mean",
    "f1": "all_instance_f1",
    "n_false_positive": "all_instance_fp",
    "n_false_negative": "all_instance_fn",
}
"""Our names of scores, and those of the organisers."""
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


def score_with_organisers(reference: Path, prediction: Path, folder: Path) -> Scores:
    """Return the scores in the table that the program of the organisers writes of adult gliomas.

    It runs in this process, and its evaluator is loaded once.
    """
    import pandas as pd
    from brats_evaluation import evaluate_single_exam
    from brats_evaluation.metrics_parser import parse_seg_results

    table, summary = folder / "organisers.csv", folder / "organisers.json"
    cases = _cases(reference)
    with contextlib.redirect_stdout(io.StringIO()), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = [
            evaluate_single_exam(str(prediction / path.name), str(path), case, _organisers())
            for case, path in cases.items()
        ]
        summary.write_text(json.dumps({"metrics": found, "missings": []}, default=int))
        parse_seg_results(summary, table)
    rows = pd.read_csv(table).set_index("subject_id")
    regions = {column.rpartition("_")[2] for column in rows}
    return {
        (case, region, ours): float(rows.loc[case, f"{theirs}_{region}"])
        for case in cases
        for region in regions
        for ours, theirs in _OF_ORGANISERS.items()
        if f"{theirs}_{region}" in rows
    }


@functools.cache
def _organisers() -> Any:
    """Return the evaluator of the task; it says which labels several regions share."""
    from brats_evaluation import config_path
    from panoptica import Panoptica_Evaluator
    from panoptica.utils.citation_reminder import disable_citation_reminder

    disable_citation_reminder()
    return Panoptica_Evaluator.load_from_config(str(config_path("gli")))


def _cases(folder: Path) -> dict[str, Path]:
    """Return the label maps of a folder by case."""
    return {path.name.removesuffix(".nii.gz"): path for path in sorted(folder.glob("*.nii.gz"))}
