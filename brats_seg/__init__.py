"""Segment brain tumours in MRI: train, predict, score, on one 8-16 GB GPU or a CPU.

The commands of `brats-seg`, but `convert`, `settings` and two kinds of `figure`, are functions here. They take
values and return values, raise errors derived from `BratsError`, and print nothing. `__init__.pyi` lists the
public names.

| task | functions |
|---|---|
| find and read scans | `find_cases`, `load_case`, `open_index`, `summarise` |
| check this machine | `diagnose` |
| try without scans | `write_phantom_cases`, `write_phantom_survival`, `phantom_patches` |
| prepare and split | `open_fold` |
| train | `choose_settings`, `load_config`, `train_fold`, `Trainer`, `plan_memory`, `certify_run`, `certify_settings` |
| own training loop | `Accumulator`, `MicroBatch`, `DiceBce`, `BatchDiceBce`, `Muon`, `build_model` |
| predict | `load_model`, `Predictor`, `predict_folder`, `watched_scans`, `tune_runs`, `export_model` |
| score | `fuse_label_maps`, `score_folders`, `compare_folders`, `cross_validate`, `read_scores` |
| look at results | `write_report`, `PageOptions` |
| autoencoder | `Reconstructor`, `reconstruct_cases` |
| survival | `features_of_folder`, `study_survival` |
| draw | `open_view`, `sample_figure`, `montage_figure`, `score_figure`, `write_figure` |

Example:
    >>> from pathlib import Path
    >>> from brats_seg import load_config, open_fold
    >>> config = load_config(values={"folds.n_folds": 3, "patch.size": (16, 16, 16)})
    >>> data = open_fold(Path("data"), fold=0, config=config)
    >>> len(data.split.train), len(data.split.validation)
    (4, 2)

Research use only.
"""

import ast
import os
from functools import cache
from getpass import getuser
from importlib import import_module
from pathlib import Path

from brats_seg.cpu_threads import choose_threads as _choose_threads

# at import, because torch's OpenMP reads the environment once, when it is loaded
_choose_threads()
# a process of a container may belong to a user who has no name, which torch and MONAI ask for at import
try:
    getuser()
except (KeyError, OSError):
    os.environ["LOGNAME"] = f"uid{os.getuid()}"


@cache
def _homes() -> dict[str, str]:
    """Return the module of each public name; they are imported when used, because torch takes seconds."""
    stub = ast.parse(Path(__file__).with_suffix(".pyi").read_text())
    imports = (node for node in stub.body if isinstance(node, ast.ImportFrom))
    return {name.name: str(node.module) for node in imports for name in node.names}


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("brats_seg")
    if name == "__all__":
        return sorted(_homes())
    if name.startswith("__") or name not in _homes():
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_homes()[name]), name)


def __dir__() -> list[str]:
    return [*_homes(), "__version__"]
