"""Write the page of a folder of predictions: a table of its cases, with pictures, scores and warnings.

The table is sorted and filtered in the page by a script of its own. Cases with a reference come
first, those with the lowest mean Dice at the top; then those with most warnings.
"""

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from io import BytesIO
from pathlib import Path
from urllib.parse import quote

import numpy as np
import pandas as pd
from matplotlib.figure import Figure
from PIL import Image

from brats_seg.cases.many import Failure
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import UsageError, some_of
from brats_seg.evaluation.evaluate import evaluate_pairs, find_pairs
from brats_seg.evaluation.protocols import protocol_named
from brats_seg.evaluation.scores import join_scores, read_scores, summarise_scores
from brats_seg.figures.cases import SHOWN
from brats_seg.figures.charts import dice_figure, volume_figure
from brats_seg.files import check_regular
from brats_seg.inference.results import MANIFEST_NAME, OutputFolder, Record, result_files
from brats_seg.labels import REGIONS
from brats_seg.pages import html
from brats_seg.progress import Track, untracked

COHORT_PAGE = "cohort.html"
"""Page of a folder of predictions, in that folder."""

_AXIAL_FLAIR = (0.02, 0.51, 0.32, 0.9)
"""Part of a preview that is shown: left, top, right and bottom as shares of its size."""
_PICTURE_WIDTH = 160


def write_cohort_page(
    results: Path,
    page: Path,
    scored: pd.DataFrame,
    remarks: Sequence[str] = (),
    *,
    track: Track = untracked,
) -> None:
    """Write the page of a folder of predictions, with links to the pages of cases that are there.

    `scored` and `remarks` are a result of `cohort_scores`.
    """
    entries = OutputFolder(results).entries
    records = [entry for entry in entries.values() if isinstance(entry, Record)]
    of_networks = {record.remark: None for record in records if record.remark}
    dice = dice_by_case(scored)
    means = {case_id: float(np.nanmean(values)) for case_id, values in dice.items()}
    # the cases that need a look come first
    records.sort(key=lambda entry: (means.get(entry.case_id, np.inf), -len(entry.warnings)))
    trained_on = [record.case_id for record in records if record.in_training == "yes"]
    held_out = scored[~scored["case_id"].isin(trained_on)]
    tables = [held_out, scored] if len(held_out) < len(scored) else [scored]
    summaries = [summarise_scores(table, np.random.default_rng(0)) for table in tables]
    html.write_page(
        page,
        "cohort.html",
        title=f"Predictions in {results.resolve().name}",
        records=records,
        dice=dice,
        means=means,
        links={entry.case_id: _link(results, entry.case_id, page) for entry in records},
        pictures=_pictures(results, records, track),
        failures=[entry for entry in entries.values() if isinstance(entry, Failure)],
        remarks=(*of_networks, *remarks),
        facts=tuple(_facts(records)),
        regions=REGIONS,
        summaries=list(filter(None, summaries)),
        charts=[(caption, html.inline_svg(figure)) for caption, figure in _charts(records, dice)],
    )


def cohort_scores(
    results: Path, options: html.PageOptions, n_workers: int = 0, track: Track = untracked
) -> tuple[pd.DataFrame, tuple[str, ...]]:
    """Return the scores of predicted cases, none without a table of them or references, and remarks.

    The predictions are scored with the references of the options, unless these have a table of scores.
    """
    predictions = OutputFolder(results)
    if not predictions.entries:
        msg = f"{results} has no record of predictions; expected {MANIFEST_NAME}, as predict writes it"
        raise UsageError(msg)
    case_ids = predictions.records().keys()
    scored, remarks = join_scores(()), tuple[str, ...]()
    if options.scores is not None:
        scored = read_scores(options.scores)
        if case_ids and not scored["case_id"].isin(case_ids).any():
            msg = f"{options.scores} scores none of the cases of {results}; it has {some_of(scored['case_id'].unique()) or 'none'}"
            raise UsageError(msg)
    elif options.reference is not None:
        pairing, rules = find_pairs(options.reference, results), protocol_named("legacy")
        evaluation = evaluate_pairs(pairing.only(case_ids), rules, n_workers=n_workers, track=track)
        lost = (f"{name} has no label map, and the worst scores" for name in evaluation.missing)
        unscored = (f"not scored: {failure.message}" for failure in evaluation.failures)
        scored, remarks = evaluation.scores, (*evaluation.remarks, *lost, *unscored)
    return scored[scored["case_id"].isin(case_ids)], remarks


def page_path(results: Path, case_id: str) -> Path:
    """Return the file of the page of a case in a folder of predictions."""
    return results / result_files("plain", case_id, "").page


def dice_by_case(scores: pd.DataFrame) -> dict[str, tuple[float, ...]]:
    """Return the Dice of each of `REGIONS` by case, NaN where it has none; cases without any are left out."""
    by_case = scores.pivot(index="case_id", columns="region", values="dice")
    known = by_case.reindex(columns=list(REGIONS)).dropna(how="all")
    return dict(zip(known.index, map(tuple, known.to_numpy().tolist()), strict=True))


def _pictures(results: Path, records: Sequence[Record], track: Track) -> dict[str, str]:
    """Return the URI of the picture of each case; empty for those without one."""
    with ThreadPoolExecutor(available_cpus()) as pool:
        thumbnails = pool.map(partial(_thumbnail, results), records)
        shown = track(thumbnails, what="reading pictures", total=len(records))
        return {record.case_id: uri for record, uri in zip(records, shown, strict=True)}


def _thumbnail(results: Path, record: Record) -> str:
    """Return the axial FLAIR of the preview of a case as a URI; empty without one that can be read."""
    preview = result_files(record.settings.layout, record.case_id, record.convention).preview
    # the axial FLAIR is below T1c
    if preview not in record.outputs or not {*SHOWN} <= {*record.modalities}:
        return ""
    small = BytesIO()
    try:
        check_regular(results / preview)
        with Image.open(results / preview) as image:
            left, top, right, bottom = np.multiply(_AXIAL_FLAIR, image.size * 2).tolist()
            part = image.crop((left, top, right, bottom)).convert("RGB")
    except Exception:  # noqa: BLE001 - Pillow raises errors of many kinds for a damaged picture
        # it was removed, or is damaged or too large: the case is shown without it
        return ""
    size = (_PICTURE_WIDTH, round(_PICTURE_WIDTH * part.height / part.width))
    part.resize(size, reducing_gap=2.0).save(small, format="WEBP", quality=60)
    return html.data_uri(small.getvalue(), "image/webp")


def _link(results: Path, case_id: str, page: Path) -> str:
    """Return the link from the page of a cohort to that of a case; empty if there is none."""
    in_same_folder = page.parent / f"{case_id}{html.PAGE_SUFFIX}"
    for target in (in_same_folder, page_path(results, case_id)):
        if target.is_file():
            relative = os.path.relpath(target.absolute(), page.absolute().parent)
            # file names need not be UTF-8
            return quote(os.fsencode(relative))
    return ""


def _charts(
    records: Sequence[Record], dice: dict[str, tuple[float, ...]]
) -> Iterator[tuple[str, Figure]]:
    """Yield the distributions over the cases, each with its words for those who cannot see it."""
    if len(dice) > 1:
        yield "Dice of every case by region", dice_figure([*dice.values()])
    if records:
        parts = [part for record in records for part in record.volumes]
        ml = {name: [part.ml for part in parts if part.name == name] for name in REGIONS}
        yield "Predicted volume of every case by region", volume_figure(ml)


def _facts(records: Sequence[Record]) -> Iterator[html.Fact]:
    """Yield what the predictions were made with; several values with their numbers of cases."""
    values = {
        "Model": [record.model for record in records],
        "Version of brats_seg": [record.version for record in records],
        "Device": [record.device for record in records],
        "Label convention": [record.convention for record in records],
        "Settings": [record.settings.changed_text() for record in records],
    }
    for name, texts in values.items():
        yield html.Fact(name, some_of([*dict.fromkeys(texts)]))
