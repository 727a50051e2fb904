"""The page of a folder of predictions without a browser."""

import json
import os
import re
from pathlib import Path
from zlib import crc32

import numpy as np
import pandas as pd
import pytest
from PIL import Image

from brats_seg.errors import UsageError
from brats_seg.evaluation.scores import join_scores, read_scores, write_scores
from brats_seg.inference.results import MANIFEST_NAME
from brats_seg.pages.cohort import _link, cohort_scores, write_cohort_page
from brats_seg.pages.html import PageOptions
from tests.builders import touch
from tests.test_pages import write_results


def test_pictures_links_failures_and_means_are_there(tmp_path: Path) -> None:
    results = write_results(tmp_path / "results")
    touch(results, "previews/bad.png", "previews/fair.png")
    Image.new("RGB", (90, 66), "red").save(results / "previews" / "bad.png")
    (results / "previews" / "fair.png").write_bytes(b"\x89PNG\r\n\x1a\n and no more")
    write_cohort_page(results, results / "cohort.html", read_scores(results / "scores.csv"))
    page = (results / "cohort.html").read_text()
    # that of fair is damaged, that of unknown is gone
    assert (page.count('class="thumb"><img'), page.count('href="reports/')) == (1, 1)
    said = "3 predicted, 1 of them with warnings; 1 could not be predicted"
    assert all(text in page for text in (said, "a file is empty", "0.450", "0123"))
    manifest = results / MANIFEST_NAME
    manifest.write_text(manifest.read_text().replace('"t2w","t2f"', '"t2w"'))
    write_cohort_page(results, results / "cohort.html", join_scores(()))
    # the picture of a case without FLAIR has one row
    assert "Axial FLAIR" not in (results / "cohort.html").read_text()


@pytest.mark.parametrize("kind", ["of 60000 x 60000 pixels", "a FIFO"])
def test_a_picture_that_cannot_be_read_is_left_out(kind: str, tmp_path: Path) -> None:
    results = write_results(tmp_path / "results")
    path = touch(results, "previews/bad.png") / "previews/bad.png"
    Image.new("RGB", (90, 66), "red").save(path)
    content = path.read_bytes()
    path.unlink()
    if kind == "a FIFO":
        os.mkfifo(path)
    else:
        header = b"IHDR" + (60000).to_bytes(4, "big") * 2 + content[24:29]
        path.write_bytes(content[:12] + header + crc32(header).to_bytes(4, "big") + content[33:])
    write_cohort_page(results, results / "cohort.html", join_scores(()))
    assert 'class="thumb"><img' not in (results / "cohort.html").read_text()


def test_scores_of_other_protocols_stand_below_their_regions(tmp_path: Path) -> None:
    results, page = write_results(tmp_path / "results"), tmp_path / "a.html"
    table = read_scores(results / "scores.csv")
    # neither side has enhancing tumour, and necrosis is a region of its own
    table.loc[(table["case_id"] == "bad") & (table["region"] == "et"), "dice"] = np.nan
    necrosis = table[table["region"] == "tc"].assign(region="netc", dice=0.1)
    write_scores(pd.concat([necrosis, table]), results / "scores.csv")
    write_cohort_page(results, page, read_scores(results / "scores.csv"))
    text = page.read_text()
    assert re.findall(r'<td class="n">([\d.]+) \[', text) == ["0.450", "0.450", "0.700"]
    # means, and Dice of WT, TC and ET; the case that lacks one is still the worst
    values = re.findall(r'data-value="([^"]*)">(0\.\d{3}|n/a)<', text)
    assert [shown for _, shown in values][:8] == [*["0.200"] * 3, "n/a", *["0.700"] * 4]
    assert {value for value, shown in values if shown == "n/a"} == {""}
    write_scores(necrosis.replace({"bad": "x", "fair": "y"}), results / "scores.csv")
    with pytest.raises(UsageError, match=r"csv scores none of the cases of .*; it has x, y"):
        cohort_scores(results, PageOptions(scores=results / "scores.csv"))


def test_a_link_leads_into_a_folder_whose_name_is_not_utf_8(tmp_path: Path) -> None:
    results = tmp_path / os.fsdecode(b"caf\xe9")
    touch(results, "reports/a.html")
    assert _link(results, "a", tmp_path / "all.html") == "caf%E9/reports/a.html"
    # a page of the same folder was written with it
    touch(tmp_path, "a.html")
    assert _link(results, "a", tmp_path / "all.html") == "a.html"


def test_a_folder_without_predictions_is_refused_and_one_of_failures_has_a_page(tmp_path):
    with pytest.raises(UsageError, match="has no record of predictions"):
        cohort_scores(tmp_path, PageOptions())
    failed = {"case_id": "lost", "error": "CaseError", "message": "empty"}
    (tmp_path / MANIFEST_NAME).write_text(json.dumps(failed) + "\n")
    write_cohort_page(tmp_path, tmp_path / "a.html", join_scores(()))
    assert "empty" in (tmp_path / "a.html").read_text()
