"""A package imports only from the floors below it: by the source, and in a fresh interpreter."""

import ast
import re
import subprocess
import sys
from pathlib import Path

import brats_seg.errors

PACKAGE = "brats_seg"
ROOT = Path(brats_seg.errors.__file__).parent
_FLOORS = (
    "errors labels config cpu_threads files presets progress tables wings",
    "voxels",
    "cases",
    "data evaluation",
    "models runtime figures",
    "training inference",
    "quality interop dicom pages survival",
    "crossval doctor cli __main__ __init__",
)
FLOORS = {part: floor for floor, parts in enumerate(_FLOORS) for part in parts.split()}
SHARED_FLOORS = (0, 7)
"""Their modules may import each other."""
HEAVY = {"torch", "monai", "lightning", "lightning_fabric"}
TORCH_FREE = {*_FLOORS[0].split(), "voxels", "cases"}
TORCH_FREE_AT_IMPORT = {*TORCH_FREE, "cli", "figures", "__init__"}
"""May import torch inside a function, so that `--help` is quick."""

FILES = sorted(ROOT.rglob("*.py"))


def part_of(path: Path) -> str:
    return path.relative_to(ROOT).parts[0].removesuffix(".py")


def module_name(path: Path) -> str:
    return ".".join(path.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


def imported_names(source: str) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names |= {f"{node.module}.{alias.name}" for alias in node.names}
    return names


def imported_parts(source: str) -> set[str]:
    names = (f"{name}.".split(".") for name in imported_names(source))
    # a name of the package itself, such as its version, comes from its __init__
    return {name[1] if name[1] in FLOORS else "__init__" for name in names if name[0] == PACKAGE}


def violations(part: str, source: str) -> list[str]:
    """Return what a source of that part imports from its own floor or one above."""
    floor = FLOORS[part]
    return sorted(
        other
        for other in imported_parts(source) - {part}
        if FLOORS[other] > floor or (FLOORS[other] == floor and floor not in SHARED_FLOORS)
    )


def heavy_imports(source: str) -> set[str]:
    return {name.split(".")[0] for name in imported_names(source)} & HEAVY


def test_every_part_has_a_floor_and_imports_point_down() -> None:
    assert {part_of(path) for path in FILES} <= FLOORS.keys()
    wrong = {module_name(path): violations(part_of(path), path.read_text()) for path in FILES}
    assert {name: parts for name, parts in wrong.items() if parts} == {}


def test_the_light_parts_do_not_import_torch() -> None:
    low = [path for path in FILES if part_of(path) in TORCH_FREE]
    light = [module_name(path) for path in FILES if part_of(path) in TORCH_FREE_AT_IMPORT]
    code = f"import sys; import {', '.join(light)}; print(*sorted(set(sys.modules) & {HEAVY}))"
    shown = subprocess.check_output([sys.executable, "-W", "error", "-c", code], text=True)
    assert shown.split() == []
    assert [module_name(path) for path in low if heavy_imports(path.read_text())] == []


def test_only_runtime_asks_torch_for_its_devices() -> None:
    """Then one test double can stand in for a GPU."""
    devices = re.compile(r"torch\.(cuda|mps|xpu|accelerator)\b|get_device_module")

    def asks(source: str) -> bool:
        nodes = (node for node in ast.walk(ast.parse(source)) if isinstance(node, ast.Attribute))
        return any(map(devices.search, map(ast.unparse, nodes)))

    assert {part_of(path) for path in FILES if asks(path.read_text())} == {"runtime"}
    assert [asks(source) for source in ("n = torch.cuda.device_count()", '"torch.cuda"')] == [1, 0]


FORBIDDEN = (
    ("errors", "from brats_seg.cases.case import Case", ["cases"]),
    ("labels", "from brats_seg.errors import LabelError", []),
    ("cases", "from brats_seg.cases.case import Case", []),
    ("cases", "import brats_seg.labels", []),
    ("cases", "def f():\n    import brats_seg.training.trainer", ["training"]),
    ("evaluation", "from brats_seg.data import store", ["data"]),
    ("training", "from brats_seg import inference", ["inference"]),
    ("training", "from brats_seg import Trainer", ["__init__"]),
    ("cli", "from brats_seg import __version__", []),
    ("cli", "from brats_seg.training.trainer import fit", []),
    ("data", "import brats_segmentation", []),
    ("cases", "from brats_seg import wings", []),
    ("cases", "def f():\n    import brats_seg.quality", ["quality"]),
    ("dicom", "from brats_seg.quality import scan", ["quality"]),
)
"""A part, its source, and the parts that it may not import."""


def test_a_forbidden_import_is_seen() -> None:
    for part, source, expected in FORBIDDEN:
        assert violations(part, source) == expected, source
    for source, heavy in (
        ("from torch import nn", {"torch"}),
        ("def f():\n    import monai.networks", {"monai"}),
        ("import torchvision", set()),
    ):
        assert heavy_imports(source) == heavy
