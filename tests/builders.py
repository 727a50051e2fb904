"""Small cases for tests: plain functions with a default for everything."""

import json
import os
import resource
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import chdir, contextmanager, redirect_stderr, redirect_stdout
from functools import cache
from importlib.metadata import distribution
from io import StringIO
from multiprocessing import get_context
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any, NamedTuple, get_type_hints
from unittest.mock import patch

import jsonschema
import nibabel as nib
import numpy as np
import numpy.typing as npt
import pytest

from brats_seg.cases.case import Case, CaseFacts
from brats_seg.cli import main
from brats_seg.labels import BRATS2017, MODALITIES, MSD, LabelConvention, label_map_of

PRELOADED = [
    *("torch", "monai.losses", "monai.networks.nets", "monai.transforms", "matplotlib.figure"),
    *("matplotlib.backends.backend_agg", "lifelines", "sklearn.linear_model", "yaml", "pytest"),
    # torch imports them when it first loads weights, makes an optimizer or computes a gradient twice
    *("torch.utils.serialization", "torch.fx.experimental.symbolic_shapes", "torch._dynamo"),
    *("brats_seg", "brats_seg.cli", "brats_seg.crossval", "brats_seg.training.trainer"),
    *("brats_seg.inference.batch", "brats_seg.inference.export", "brats_seg.inference.tuning"),
    *("brats_seg.inference.reconstruct", "brats_seg.survival.features", "brats_seg.cases.phantom"),
    *("brats_seg.survival.results", "brats_seg.figures.draw", "brats_seg.training.certificate"),
]
FORKS = get_context("forkserver")
"""Makes processes that are forked from one that has imported torch, MONAI and the package."""
FORKS.set_forkserver_preload(PRELOADED)


class Done(NamedTuple):
    code: int | None
    out: str
    err: str


Run = Callable[..., Done]
"""Runs the program with arguments."""


def call(folder: Path, *arguments: str | Path) -> Done:
    """Run the program in this process and in a folder."""
    out, err = StringIO(), StringIO()
    argv = patch.object(sys, "argv", ["brats-seg", *map(str, arguments)])
    ended = pytest.raises(SystemExit)
    with chdir(folder), redirect_stdout(out), redirect_stderr(err), argv, ended as end:
        main()
    return Done(code=int(end.value.code or 0), out=out.getvalue(), err=err.getvalue())


def plain_environment(*prefixes: str) -> dict[str, str]:
    """Return the variables of a shell that make did not start; those that begin so are left out."""
    dropped = ("MAKE", "MFLAGS", "ARGS", *prefixes)
    return {name: value for name, value in os.environ.items() if not name.startswith(dropped)}


def run_make(*arguments: str) -> list[str]:
    command, environment = ["make", *arguments], plain_environment()
    return subprocess.check_output(command, cwd=ROOT, env=environment, text=True).splitlines()


def start(
    command: Sequence[str | Path], folder: Path, environment: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": 500}
    return subprocess.run(command, cwd=folder, env=environment, check=False, **options)


def call_in_fork(function: Callable[..., int | None], *arguments: object) -> Done:
    """Call a function in a process of `FORKS`, which exits with what it returns."""
    with NamedTemporaryFile("w+") as shown:
        process = FORKS.Process(target=_call_shown, args=(shown.name, function, arguments))
        process.start()
        process.join(500)
        return Done(code=process.exitcode, out=shown.read(), err="")


def _call_shown(path: str, function: Callable[..., int | None], arguments: tuple[Any, ...]) -> None:
    with Path(path).open("w") as sys.stdout, redirect_stderr(sys.stdout):
        code = function(*arguments)
    sys.exit(code)


def shell(lines: str, folder: Path, environment: Mapping[str, str]) -> str:
    """Run lines in a shell in which each must succeed, and return what they print."""
    done = start(["bash", "-e", "-c", lines], folder, environment)
    assert done.returncode == 0, f"{lines}\n{done.stdout}\n{done.stderr}"
    return done.stdout


ROOT = Path(__file__).parent.parent
SHAPE = (24, 24, 16)
"""Voxels of a small case."""

BRATS_AFFINE = np.array(
    [[-1.0, 0.0, 0.0, 0.0], [0.0, -1.0, 0.0, 239.0], [0.0, 0.0, 1.0, 0.0], [0.0, 0.0, 0.0, 1.0]]
)
"""The geometry of every BraTS volume of 2017 to 2023: 1 mm, left and posterior first."""


def make_case(case_id: str = "case_1", **values: Any) -> Case:
    facts = {name: values.pop(name) for name in get_type_hints(CaseFacts) if name in values}
    plain = {"patient_id": case_id, "release": "brats2020", **values}
    return Case(case_id=case_id, facts=CaseFacts(**facts), **plain)


@contextmanager
def limited_files(n_bytes: int) -> Iterator[None]:
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (n_bytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


_LEGACY_SUFFIXES = ("_t1", "_t1ce", "_t2", "_flair", "_seg")
_SUFFIXES = ("-t1n", "-t1c", "-t2w", "-t2f", "-seg")

# rows: brain, oedema, necrosis, enhancing tumour; columns: t1n, t1c, t2w, t2f
_INTENSITIES = np.array(
    [[500, 450, 300, 350], [400, 400, 600, 800], [300, 250, 700, 400], [420, 900, 500, 600]]
)


def make_label_map(
    shape: tuple[int, int, int] = SHAPE,
    convention: LabelConvention = BRATS2017,
    seed: int = 0,
    *,
    with_et: bool = True,
) -> npt.NDArray[np.uint8]:
    """Return a label map (X, Y, Z): oedema around a ring of enhancement around necrosis."""
    return label_map_of(_make_regions(shape, seed, with_et=with_et), convention)


def make_volumes(
    shape: tuple[int, int, int] = SHAPE, seed: int = 0, *, with_et: bool = True
) -> npt.NDArray[np.int16]:
    rng = np.random.default_rng([seed, 1])
    wt, tc, et = _make_regions(shape, seed, with_et=with_et)
    tissue = wt.astype(int) + tc + et
    brain = _inside(shape, np.array(shape) / 2, 0.47) | wt
    images = _INTENSITIES[tissue].transpose(3, 0, 1, 2) + rng.normal(0, 20, (4, *shape))
    return np.where(brain, images.clip(min=1), 0).astype(np.int16)


def write_case(
    root: Path,
    case_id: str = "BraTS2021_00000",
    *,
    shape: tuple[int, int, int] = SHAPE,
    convention: LabelConvention = BRATS2017,
    seed: int = 0,
    labelled: bool = True,
    with_et: bool = True,
    suffix: str = ".nii.gz",
    spacing_mm: float = 1,
) -> Path:
    """Write a case folder below `root`, with the file names that its id calls for, and return it."""
    folder = root / case_id
    folder.mkdir(parents=True)
    affine = BRATS_AFFINE @ np.diag([spacing_mm, spacing_mm, spacing_mm, 1])
    suffixes = _SUFFIXES if case_id.startswith("BraTS-") else _LEGACY_SUFFIXES
    images = make_volumes(shape, seed, with_et=with_et)
    for ending, image in zip(suffixes[: len(MODALITIES)], images, strict=True):
        write_nifti(folder / f"{case_id}{ending}{suffix}", image, affine)
    if labelled:
        label_map = make_label_map(shape, convention, seed, with_et=with_et)
        write_nifti(folder / f"{case_id}{suffixes[-1]}{suffix}", label_map, affine)
    return folder


def write_arrays(
    folder: Path,
    arrays: Iterable[npt.NDArray[np.generic]],
    affine: npt.NDArray[np.float64] = BRATS_AFFINE,
) -> Path:
    """Write the four images of a case, and its label map if there is a fifth array."""
    for suffix, array in zip(_LEGACY_SUFFIXES, arrays, strict=False):
        write_nifti(folder / f"{folder.name}{suffix}.nii.gz", array, affine)
    return folder


def write_decathlon_case(root: Path) -> None:
    """Write a case as the decathlon stores it: FLAIR, T1w, T1gd and T2w in one file."""
    t1n, t1c, t2w, t2f = make_volumes().astype(np.float32)
    write_nifti(root / "imagesTr" / "BRATS_001.nii.gz", np.stack([t2f, t1n, t1c, t2w], axis=-1))
    write_nifti(root / "labelsTr" / "BRATS_001.nii.gz", make_label_map(convention=MSD))
    (root / "dataset.json").write_text(
        '{"modality": {"0": "FLAIR", "1": "T1w", "2": "t1gd", "3": "T2w"}, '
        '"labels": {"0": "background", "1": "edema", "2": "non-enhancing tumor", '
        '"3": "enhancing tumour"}}'
    )


def write_nifti(
    path: Path, array: npt.NDArray[np.generic], affine: npt.NDArray[np.float64] = BRATS_AFFINE
) -> Path:
    image = nib.Nifti1Image(array, affine)
    image.set_qform(affine, code=1)
    image.set_sform(affine, code=1)
    path.parent.mkdir(parents=True, exist_ok=True)
    nib.save(image, path)
    return path


def _make_regions(
    shape: tuple[int, int, int], seed: int, *, with_et: bool
) -> npt.NDArray[np.bool_]:
    """Return nested region masks (3, X, Y, Z): ellipsoids around one centre inside the brain."""
    rng = np.random.default_rng([seed, 0])
    centre = np.array(shape) * rng.uniform(0.4, 0.6, size=3)
    wt, tc, necrosis = (_inside(shape, centre, share) for share in (0.27, 0.19, 0.1))
    return np.stack([wt, tc, tc & ~necrosis & with_et])


def _inside(
    shape: tuple[int, int, int], centre: npt.NDArray[np.float64], share: float
) -> npt.NDArray[np.bool_]:
    """Return the ellipsoid whose half axes are that share of the shape."""
    offsets = (np.indices(shape).T - centre) / (share * np.array(shape))
    return (offsets**2).sum(axis=-1).T < 1


def touch(root: Path, *names: str) -> Path:
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()
    return root


def check_json(command: str, text: str) -> list[Any]:
    """Check what a command has printed with `--json` against its schema, and return the values."""
    from brats_seg.cli.json_output import LINES

    # of several cases there is a line each
    values = [json.loads(line) for line in (text.splitlines() if command in LINES else [text])]
    every = checked_schema()
    schema = {**every["properties"][command], "$defs": every["$defs"]}
    assert values
    for value in values:
        jsonschema.Draft202012Validator(schema).validate(value)
    return values


@cache
def checked_schema() -> dict[str, Any]:
    from brats_seg.cli.json_output import output_schema

    schema = output_schema()
    jsonschema.Draft202012Validator.check_schema(schema)
    return schema


def variables_of_installation(folder: Path) -> dict[str, str]:
    """Return variables in which pip installs this package alone, and finds the others here.

    Neither torch nor anything else is downloaded, and the source is not on the path.
    """
    others = folder / "others"
    others.mkdir()
    for path in distribution("pip").locate_file("").iterdir():
        if "brats_seg" not in path.name:
            (others / path.name).symlink_to(path)
    return {
        **plain_environment("PIP_", "VIRTUAL_ENV"),
        "PYTHONPATH": str(others),
        "PIP_NO_DEPS": "1",
        "PIP_NO_INDEX": "1",
        # "off" for a switch whose name begins with NO
        "PIP_NO_BUILD_ISOLATION": "off",
    }
