"""Public names and the modules that define them."""

from brats_seg.cases.case import load_case as load_case
from brats_seg.cases.index import summarise as summarise
from brats_seg.cases.clinical import read_clinical_tables as read_clinical_tables
from brats_seg.cases.find import find_cases as find_cases
from brats_seg.cases.phantom import (
    write_phantom_cases as write_phantom_cases,
    write_phantom_survival as write_phantom_survival,
)
from brats_seg.config import load_config as load_config
from brats_seg.crossval import cross_validate as cross_validate
from brats_seg.data.fold import open_fold as open_fold, open_index as open_index
from brats_seg.doctor import diagnose as diagnose
from brats_seg.errors import BratsError as BratsError
from brats_seg.evaluation.compare import compare_folders as compare_folders
from brats_seg.evaluation.evaluate import score_folders as score_folders
from brats_seg.evaluation.scores import read_scores as read_scores
from brats_seg.figures.cases import (
    montage_figure as montage_figure,
    open_view as open_view,
    reconstruction_figure as reconstruction_figure,
    sample_figure as sample_figure,
    view_figure as view_figure,
    with_prediction as with_prediction,
)
from brats_seg.figures.charts import (
    cohort_figure as cohort_figure,
    score_figure as score_figure,
)
from brats_seg.figures.charts import LiveHistory as LiveHistory
from brats_seg.figures.sections import write_figure as write_figure
from brats_seg.inference.batch import (
    predict_folder as predict_folder,
    watched_scans as watched_scans,
)
from brats_seg.inference.export import export_model as export_model
from brats_seg.inference.fuse import fuse_label_maps as fuse_label_maps
from brats_seg.inference.model import load_model as load_model
from brats_seg.inference.predict import Predictor as Predictor
from brats_seg.inference.reconstruct import (
    Reconstructor as Reconstructor,
    reconstruct_cases as reconstruct_cases,
)
from brats_seg.inference.settings import PredictionSettings as PredictionSettings
from brats_seg.inference.tuning import tune_runs as tune_runs
from brats_seg.models.build import build_model as build_model
from brats_seg.pages.html import PageOptions as PageOptions
from brats_seg.pages.write import write_report as write_report
from brats_seg.survival.features import features_of_folder as features_of_folder
from brats_seg.survival.results import study_survival as study_survival
from brats_seg.training.certificate import (
    certify_run as certify_run,
    certify_settings as certify_settings,
    phantom_patches as phantom_patches,
)
from brats_seg.training.memory_plan import choose_settings as choose_settings
from brats_seg.training.gradient import MicroBatch as MicroBatch
from brats_seg.training.losses import (
    BatchDiceBce as BatchDiceBce,
    DiceBce as DiceBce,
    whole_loss as whole_loss,
)
from brats_seg.training.memory_plan import plan_memory as plan_memory
from brats_seg.training.accumulation import Accumulator as Accumulator
from brats_seg.training.optimisation import Muon as Muon
from brats_seg.training.trainer import Trainer as Trainer, train_fold as train_fold

__version__: str
