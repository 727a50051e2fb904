"""Train and use brain-tumour segmentation on the hardware people really have.

Everything that the commands of `brats-seg` do is a function here. They take values and return values,
raise errors derived from `BratsError`, and print nothing.

| task | functions |
|---|---|
| find and read scans | `find_cases`, `find_inputs`, `load_case`, `open_index`, `summarise` |
| check this machine | `diagnose` |
| try without scans | `write_phantom_cases`, `write_phantom_survival`, `phantom_patches` |
| prepare and split | `open_fold`, `PatchDataset`, `training_transforms` |
| train | `choose_settings`, `load_config`, `train_fold`, `Trainer`, `plan_memory`, `certify_run`, `certify_settings` |
| own training loop | `Accumulator`, `MicroBatch`, `DiceBce`, `BatchDiceBce`, `Muon`, `build_model` |
| predict | `load_model`, `Predictor`, `predict_folder`, `tune_runs`, `export_model` |
| score | `evaluate_folders`, `score_folders`, `compare_folders`, `cross_validate`, `read_scores` |
| look at results | `write_report`, `ReportSettings`, `write_case_pages`, `PageSettings` |
| autoencoder | `Reconstructor`, `reconstruct_cases` |
| survival | `features_of_folder`, `study_survival` |
| draw | `open_view`, `sample_figure`, `montage_figure`, `uncertainty_figure`, `score_figure`, `write_figure` |

Example:
    >>> from pathlib import Path
    >>> from brats_seg import load_config, open_fold
    >>> config = load_config(values={"folds.n_folds": 3, "patch.size": (16, 16, 16)})
    >>> data = open_fold(Path("data"), fold=0, config=config)
    >>> len(data.split.train), len(data.split.validation)
    (4, 2)

Research use only.
"""

from importlib import import_module
from typing import TYPE_CHECKING

from brats_seg.cpu_threads import choose_threads as _choose_threads

# at import, because torch's OpenMP reads the environment once, when it is loaded
_choose_threads()

if TYPE_CHECKING:
    from brats_seg.cases.case import Case as Case
    from brats_seg.cases.case import LoadedCase as LoadedCase
    from brats_seg.cases.case import load_case as load_case
    from brats_seg.cases.case_table import summarise as summarise
    from brats_seg.cases.clinical import read_clinical_tables as read_clinical_tables
    from brats_seg.cases.discovery import find_cases as find_cases
    from brats_seg.cases.discovery import find_data as find_data
    from brats_seg.cases.inputs import find_inputs as find_inputs
    from brats_seg.cases.phantom import write_phantom_cases as write_phantom_cases
    from brats_seg.cases.phantom import write_phantom_survival as write_phantom_survival
    from brats_seg.config import Config as Config
    from brats_seg.config_text import load_config as load_config
    from brats_seg.crossval import cross_validate as cross_validate
    from brats_seg.data.fold import FoldData as FoldData
    from brats_seg.data.fold import open_fold as open_fold
    from brats_seg.data.fold import open_index as open_index
    from brats_seg.data.loader import PatchDataset as PatchDataset
    from brats_seg.data.transforms import training_transforms as training_transforms
    from brats_seg.doctor import diagnose as diagnose
    from brats_seg.errors import BratsError as BratsError
    from brats_seg.evaluation.compare import compare_folders as compare_folders
    from brats_seg.evaluation.evaluate import evaluate_folders as evaluate_folders
    from brats_seg.evaluation.evaluate import score_folders as score_folders
    from brats_seg.evaluation.scores import read_scores as read_scores
    from brats_seg.figures.cases import montage_figure as montage_figure
    from brats_seg.figures.cases import reconstruction_figure as reconstruction_figure
    from brats_seg.figures.cases import sample_figure as sample_figure
    from brats_seg.figures.cases import uncertainty_figure as uncertainty_figure
    from brats_seg.figures.cases import view_figure as view_figure
    from brats_seg.figures.charts import bar_figure as bar_figure
    from brats_seg.figures.charts import cohort_figure as cohort_figure
    from brats_seg.figures.charts import score_figure as score_figure
    from brats_seg.figures.history import LiveHistory as LiveHistory
    from brats_seg.figures.sections import write_figure as write_figure
    from brats_seg.figures.surface import models_of as models_of
    from brats_seg.figures.surface import surface_figure as surface_figure
    from brats_seg.figures.surface import write_surface_gif as write_surface_gif
    from brats_seg.figures.view import open_view as open_view
    from brats_seg.figures.view import with_prediction as with_prediction
    from brats_seg.figures.view import with_uncertainty as with_uncertainty
    from brats_seg.files import writable_folder as writable_folder
    from brats_seg.inference.batch import predict_folder as predict_folder
    from brats_seg.inference.export import export_model as export_model
    from brats_seg.inference.model import load_model as load_model
    from brats_seg.inference.predict import Predictor as Predictor
    from brats_seg.inference.reconstruct import Reconstructor as Reconstructor
    from brats_seg.inference.reconstruct import reconstruct_cases as reconstruct_cases
    from brats_seg.inference.settings import PredictionSettings as PredictionSettings
    from brats_seg.inference.tuning import tune_runs as tune_runs
    from brats_seg.models.build import build_model as build_model
    from brats_seg.pages.case_pages import PageSettings as PageSettings
    from brats_seg.pages.case_pages import write_case_pages as write_case_pages
    from brats_seg.pages.report import ReportSettings as ReportSettings
    from brats_seg.pages.report import write_report as write_report
    from brats_seg.survival.features import features_of_folder as features_of_folder
    from brats_seg.survival.results import study_survival as study_survival
    from brats_seg.training.accumulation import Accumulator as Accumulator
    from brats_seg.training.accumulation import StepResult as StepResult
    from brats_seg.training.certificate import certify_run as certify_run
    from brats_seg.training.certificate import certify_settings as certify_settings
    from brats_seg.training.certificate import phantom_patches as phantom_patches
    from brats_seg.training.chosen_settings import choose_settings as choose_settings
    from brats_seg.training.gradient import MicroBatch as MicroBatch
    from brats_seg.training.losses import BatchDiceBce as BatchDiceBce
    from brats_seg.training.losses import DiceBce as DiceBce
    from brats_seg.training.losses import whole_loss as whole_loss
    from brats_seg.training.memory_plan import plan_memory as plan_memory
    from brats_seg.training.muon import Muon as Muon
    from brats_seg.training.time_limits import StopRequest as StopRequest
    from brats_seg.training.trainer import Outcome as Outcome
    from brats_seg.training.trainer import Trainer as Trainer
    from brats_seg.training.trainer import train_fold as train_fold

_NAMES = {
    "cases.case": (
        "Case",
        "LoadedCase",
        "load_case",
    ),
    "cases.case_table": ("summarise",),
    "cases.clinical": ("read_clinical_tables",),
    "cases.discovery": (
        "find_cases",
        "find_data",
    ),
    "cases.inputs": ("find_inputs",),
    "cases.phantom": (
        "write_phantom_cases",
        "write_phantom_survival",
    ),
    "config": ("Config",),
    "config_text": ("load_config",),
    "crossval": ("cross_validate",),
    "data.fold": (
        "FoldData",
        "open_fold",
        "open_index",
    ),
    "data.loader": ("PatchDataset",),
    "data.transforms": ("training_transforms",),
    "doctor": ("diagnose",),
    "errors": ("BratsError",),
    "evaluation.compare": ("compare_folders",),
    "evaluation.evaluate": (
        "evaluate_folders",
        "score_folders",
    ),
    "evaluation.scores": ("read_scores",),
    "files": ("writable_folder",),
    "inference.batch": ("predict_folder",),
    "pages.case_pages": (
        "PageSettings",
        "write_case_pages",
    ),
    "inference.export": ("export_model",),
    "inference.model": ("load_model",),
    "inference.predict": ("Predictor",),
    "inference.reconstruct": (
        "Reconstructor",
        "reconstruct_cases",
    ),
    "inference.settings": ("PredictionSettings",),
    "inference.tuning": ("tune_runs",),
    "models.build": ("build_model",),
    "pages.report": (
        "ReportSettings",
        "write_report",
    ),
    "figures.cases": (
        "montage_figure",
        "reconstruction_figure",
        "sample_figure",
        "uncertainty_figure",
        "view_figure",
    ),
    "figures.view": (
        "open_view",
        "with_prediction",
        "with_uncertainty",
    ),
    "figures.charts": (
        "bar_figure",
        "cohort_figure",
        "score_figure",
    ),
    "figures.history": ("LiveHistory",),
    "figures.sections": ("write_figure",),
    "figures.surface": (
        "models_of",
        "surface_figure",
        "write_surface_gif",
    ),
    "survival.features": ("features_of_folder",),
    "survival.results": ("study_survival",),
    "training.accumulation": (
        "Accumulator",
        "StepResult",
    ),
    "training.certificate": (
        "certify_run",
        "certify_settings",
        "phantom_patches",
    ),
    "training.chosen_settings": ("choose_settings",),
    "training.gradient": ("MicroBatch",),
    "training.losses": (
        "BatchDiceBce",
        "DiceBce",
        "whole_loss",
    ),
    "training.memory_plan": ("plan_memory",),
    "training.muon": ("Muon",),
    "training.time_limits": ("StopRequest",),
    "training.trainer": (
        "Outcome",
        "Trainer",
        "train_fold",
    ),
}
"""Public names by the module that defines them."""

# importing torch and MONAI takes seconds: a name is imported when it is first used, so that the
# command line shows its help at once
_HOMES = {name: f"brats_seg.{module}" for module, names in _NAMES.items() for name in names}

__all__ = [
    "Accumulator",
    "BatchDiceBce",
    "BratsError",
    "Case",
    "Config",
    "DiceBce",
    "FoldData",
    "LiveHistory",
    "LoadedCase",
    "MicroBatch",
    "Muon",
    "Outcome",
    "PageSettings",
    "PatchDataset",
    "PredictionSettings",
    "Predictor",
    "Reconstructor",
    "ReportSettings",
    "StepResult",
    "StopRequest",
    "Trainer",
    "bar_figure",
    "build_model",
    "certify_run",
    "certify_settings",
    "choose_settings",
    "cohort_figure",
    "compare_folders",
    "cross_validate",
    "diagnose",
    "evaluate_folders",
    "export_model",
    "features_of_folder",
    "find_cases",
    "find_data",
    "find_inputs",
    "load_case",
    "load_config",
    "load_model",
    "models_of",
    "montage_figure",
    "open_fold",
    "open_index",
    "open_view",
    "phantom_patches",
    "plan_memory",
    "predict_folder",
    "read_clinical_tables",
    "read_scores",
    "reconstruct_cases",
    "reconstruction_figure",
    "sample_figure",
    "score_figure",
    "score_folders",
    "study_survival",
    "summarise",
    "surface_figure",
    "train_fold",
    "training_transforms",
    "tune_runs",
    "uncertainty_figure",
    "view_figure",
    "whole_loss",
    "with_prediction",
    "with_uncertainty",
    "writable_folder",
    "write_case_pages",
    "write_figure",
    "write_phantom_cases",
    "write_phantom_survival",
    "write_report",
    "write_surface_gif",
]


def __getattr__(name: str) -> object:
    if name == "__version__":
        from importlib.metadata import version

        return version("brats_seg")
    if name not in _HOMES:
        msg = f"module {__name__!r} has no attribute {name!r}"
        raise AttributeError(msg)
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
