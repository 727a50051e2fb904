"""The command `figure`: every kind, and what cannot be drawn."""

from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brats_seg.cases.layouts import OUTPUT_MARKER
from brats_seg.evaluation.scores import write_scores
from brats_seg.figures.draw import FIGURES
from tests.builders import SHAPE, Run, make_label_map, write_case, write_nifti
from tests.test_charts import make_scores

CASE = "BraTS2021_00001"
GIVEN = {
    "sample": ("data", "--case", CASE),
    "montage": ("data", "--case", CASE, "--prediction", "p", "--modality", "FLAIR"),
    "preview": ("data", "--case", CASE, "--prediction", f"p/{CASE}.nii.gz"),
    "uncertainty": ("data", "--case", CASE, "--prediction", "p"),
    "scores": ("scores.csv", "--column", "hd95"),
    "distributions": ("data", "--clinical", "survival_data.csv"),
    "history": ("run",),
}


def write_sources(root: Path, scans: Path) -> None:
    (root / "data").symlink_to(scans)
    write_nifti(root / "p" / f"{CASE}.nii.gz", make_label_map())
    write_nifti(root / "p" / "uncertainty" / f"{CASE}.nii.gz", np.full(SHAPE, 0.25, np.float32))
    (root / "p" / "uncertainty" / OUTPUT_MARKER).touch()
    write_scores(make_scores(), root / "scores.csv")
    (root / "survival_data.csv").write_text(f"Brats21ID,Age,Survival_days\n{CASE},60,300\n")
    (root / "run").mkdir()
    (root / "run" / "history.csv").write_text("epoch,train_loss,val_loss\n1,0.5,0.6\n2,0.25,0.4\n")


@pytest.mark.parametrize("kind", FIGURES)
def test_every_kind_is_drawn(run: Run, tmp_path: Path, tiny_scans: Path, kind: str) -> None:
    write_sources(tmp_path, tiny_scans)
    code, said, error = run("figure", kind, *GIVEN[kind], "-o", "a.png")
    assert (code, said) == (0, "wrote a.png. Research use only.\n"), error
    with Image.open(tmp_path / "a.png") as picture:
        assert min(picture.size) > 300
        assert np.ptp(np.asarray(picture.convert("L"))) > 100


@pytest.mark.parametrize(
    ("line", "expected"),
    [
        ("sampel scans -o a.png", "'sampel' is unknown; there are sample, montage, preview"),
        ("sample absent -o a.png", "absent does not exist"),
        ("sample scans -o a.bmp", "a.bmp ends in .bmp"),
        ("montage scans -o a.png", "neither reference nor prediction"),
        ("uncertainty scans -o a.png", "needs --prediction"),
        ("distributions scans -o a.png", "neither age, survival nor label map is known"),
        ("scores scans -o a.png", "scans cannot be read: it is a folder"),
        ("history scans -o a.png", "expected the folder of a run"),
        ("history scans --column dice -o a.png", "history has no option --column; it has none"),
        ("sample scans --modality t1c -o a.png", "no option --modality; it has --case"),
    ],
)
def test_unusable_input_is_refused(run: Run, tmp_path: Path, line: str, expected: str) -> None:
    write_case(tmp_path / "scans", labelled=False)
    code, _, error = run("figure", *line.split())
    assert code in {1, 2}
    assert expected in error
    assert not list(tmp_path.glob("a.*"))
