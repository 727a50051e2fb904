"""Test the command `figure`: files and error messages."""

import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from brats_seg.cases.folders import OUTPUT_MARKER
from brats_seg.cli import main
from brats_seg.evaluation.scores import write_scores
from tests.builders import SHAPE, make_label_map, write_case, write_nifti
from tests.test_charts import make_scores

Run = Callable[..., tuple[int, str]]


@pytest.fixture
def figure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Run:
    """Run the command in this process; return its exit code and output."""

    def run_here(*arguments: str | Path) -> tuple[int, str]:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", ["brats-seg", "figure", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        shown = capsys.readouterr()
        return ended.value.code or 0, shown.out + shown.err

    return run_here


@pytest.mark.parametrize("kind", ["sample", "montage", "preview", "surface", "distributions"])
def test_a_case_is_drawn(figure: Run, brats_root: Path, tmp_path: Path, kind: str) -> None:
    code, said = figure(kind, brats_root, "-o", "a.png")

    assert (code, said) == (0, "wrote a.png. Research use only.\n"), said
    with Image.open(tmp_path / "a.png") as picture:
        assert min(picture.size) > 300


@pytest.mark.parametrize("kind", ["montage", "preview"])
def test_a_prediction_is_drawn(figure: Run, brats_root: Path, tmp_path: Path, kind: str) -> None:
    write_nifti(tmp_path / "p" / "BraTS2021_00001.nii.gz", make_label_map())

    code, said = figure(
        kind, brats_root, "--case", "BraTS2021_00001", "--prediction", "p", "-o", "a.png"
    )

    assert code == 0, said
    assert (tmp_path / "a.png").exists()


def test_a_surface_turns_in_a_gif(
    figure: Run, brats_root: Path, tmp_path: Path, monkeypatch
) -> None:
    monkeypatch.setattr(
        "brats_seg.figures.surface.write_surface_gif.__kwdefaults__", {"n_frames": 2}
    )

    code, said = figure("surface", brats_root, "-o", "a.gif")

    assert code == 0, said
    with Image.open(tmp_path / "a.gif") as gif:
        assert gif.n_frames == 2


def test_the_uncertainty_of_a_prediction_is_drawn(
    figure: Run, brats_root: Path, tmp_path: Path
) -> None:
    write_nifti(tmp_path / "p" / "BraTS2021_00001.nii.gz", make_label_map())
    entropy = np.full(SHAPE, 0.25, np.float32)
    write_nifti(tmp_path / "p" / "uncertainty" / "BraTS2021_00001.nii.gz", entropy)
    (tmp_path / "p" / "uncertainty" / OUTPUT_MARKER).touch()

    code, said = figure(
        "uncertainty", brats_root, "--case", "BraTS2021_00001", "--prediction", "p", "-o", "a.png"
    )

    assert (code, said) == (0, "wrote a.png. Research use only.\n")


def test_a_modality_may_be_named_as_files_name_it(figure: Run, brats_root: Path) -> None:
    code, said = figure("montage", brats_root, "--modality", "FLAIR", "-o", "a.png")

    assert code == 0, said


@pytest.mark.parametrize("arguments", [["scores", "--column", "hd95"], ["scores"], ["bars"]])
def test_scores_are_drawn(figure: Run, tmp_path: Path, arguments: list[str]) -> None:
    write_scores(make_scores(), tmp_path / "scores.csv")

    code, said = figure(*arguments, "scores.csv", "-o", "a.svg")

    assert (code, said) == (0, "wrote a.svg. Research use only.\n")


def test_the_history_of_a_run_is_drawn(figure: Run, tmp_path: Path) -> None:
    from brats_seg.training.history import write_history

    (tmp_path / "run").mkdir()
    write_history([{"epoch": n, "train_loss": 1 / n} for n in (1, 2)], tmp_path / "run")

    code, said = figure("history", "run", "-o", "a.png")

    assert code == 0, said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            ["sampel", "scans", "-o", "a.png"],
            "no kind of figure 'sampel'; there are sample, montage, preview, uncertainty,",
        ),
        (
            ["sample", "absent", "-o", "a.png"],
            "absent does not exist; expected the folder of scans",
        ),
        (["sample", "absent", "-o", "a.bmp"], "a.bmp ends in .bmp; expected a name that ends in"),
        (["surface", "absent", "-o", "a.mp4"], "a.mp4 ends in .mp4; expected a name that ends in"),
        (["sample", "scans", "--case", "X", "-o", "a.png"], "holds no case X; it has BraTS2021_0"),
        (["montage", "scans", "-o", "a.png"], "found neither reference nor prediction"),
        (["preview", "scans", "-o", "a.png"], "found neither reference nor prediction"),
        (["surface", "scans", "-o", "a.gif"], "found neither reference nor prediction"),
        (["distributions", "scans", "-o", "a.png"], "neither age, survival nor label map is known"),
        (["scores", "absent.csv", "-o", "a.png"], "absent.csv does not exist"),
        (["bars", "scans", "-o", "a.png"], "scans cannot be read: it is a folder"),
        (["history", "scans", "-o", "a.png"], "expected the folder of a run"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_what_cannot_be_drawn_is_said(
    figure: Run, tmp_path: Path, arguments: list[str], expected: str
) -> None:
    write_case(tmp_path / "scans", labelled=False)

    code, said = figure(*arguments)

    assert code in {1, 2}
    assert expected in said
    assert not list(tmp_path.glob("a.*"))
