# ---
# jupyter:
#   jupytext:
#     formats: py:percent,ipynb
#     text_representation:
#       extension: .py
#       format_name: percent
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Brain tumours in MRI: segmentation, autoencoder, survival
#
# From a folder of BraTS scans to a 3D U-Net with honest scores, turning pictures of what it finds, an
# autoencoder that puts a brain into 512 numbers, and a model of survival that says how far it can be
# believed. The story is that of the public notebook "BraTS20 3dUnet 3dAutoEncoder"; every step is a call
# of the package `brats_seg`, and the same step as a command is `brats-seg --help`.
#
# On Kaggle the scans are found where they are mounted, whatever the year. Without scans it runs on phantom
# cases, made up here, in a few minutes on two processor cores.
#
# **Research use only.**

# %% [markdown]
# ## Installation
#
# With internet, from the package index. Without, from wheels in an attached data set: put
# `pip wheel brats_seg` there. The torch that is here stays: the package takes a range of versions, and pip
# is told to keep this one.

# %%
import importlib.util
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = "brats_seg"  # or a folder with the source, or git+https://...

if importlib.util.find_spec("brats_seg") is None:
    kept = Path(tempfile.mkdtemp()) / "kept.txt"
    kept.write_text(f"torch=={version('torch')}\n" if importlib.util.find_spec("torch") else "")
    wheels = sorted(Path("/kaggle/input").rglob("brats_seg-*.whl"))
    source = ["--no-index", "--find-links", wheels[-1].parent, wheels[-1]] if wheels else [PACKAGE]
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--constraint", kept, *source]
    subprocess.run([*map(str, command)], check=True)

# %%
# %matplotlib inline

# %% [markdown]
# ## Settings
#
# All there is to choose. `DATA` may name any folder of scans; left alone, it is looked for on Kaggle's mounts
# and in `data`. The environment variables `BRATS_DATA` and `BRATS_WORK` do the same from outside. What was
# begun in `WORK` is gone on with: in a new session on Kaggle, attach the output of the last one, and copy its
# `work` here first.

# %%
import os

from brats_seg.cases.discovery import find_data
from brats_seg.cases.phantom import write_phantom_cases, write_phantom_survival
from brats_seg.files import writable_folder

DATA = os.environ.get("BRATS_DATA")
WORK = os.environ.get("BRATS_WORK", "work")
FOLD = 0  # held out: one number a run, five evenings for all
MAX_HOURS = 5.0  # of each training; run the notebook again and it goes on

WORK = writable_folder(Path(WORK))
DATA = Path(DATA) if DATA else find_data([Path("/kaggle/input"), Path("../data"), Path("data")])
DEMO = DATA is None
if DEMO:
    DATA = WORK / "demo-scans"
    write_phantom_cases(DATA, n_cases=12, seed=0)
    write_phantom_survival(DATA / "survival_info.csv", n_cases=12, seed=0)

PRESET = "demo" if DEMO else "kaggle-t4"
SETTINGS = ["training.n_epochs=12"] if DEMO else []
AUTOENCODER = ["model.name=autoencoder", f"training.n_epochs={6 if DEMO else 30}"]
PREPARED, RUN, AUTOENCODER_RUN = WORK / "prepared", WORK / f"runs/fold{FOLD}", WORK / "runs/ae"
print(f"scans: {DATA}{' (phantoms)' if DEMO else ''}\nresults: {WORK.absolute()}")

# %% [markdown]
# ## Look at the data
#
# The release is told from names, geometry and label values; what is wrong with a case is said. Nobody has
# to know whether enhancing tumour is 3 or 4 this year.

# %%
from brats_seg.cases.case_table import summarise
from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.config import load_config
from brats_seg.data.fold import open_fold, open_index
from brats_seg.progress import untracked

config = load_config(preset=PRESET, assignments=SETTINGS)
n_cores = os.cpu_count() or 1
index = open_index(DATA, PREPARED / "cases.csv", config, n_workers=n_cores, track=untracked)
print(*summarise(index), sep="\n")

# %% [markdown]
# A case: four modalities, and the label map with what each colour is.

# %%
from brats_seg.report.case_figures import sample_figure
from brats_seg.report.case_view import open_view

view = open_view(DATA, index.trainable[0].case_id)
sample_figure(view)

# %%
from brats_seg.report.case_figures import view_figure

view_figure(view)

# %% [markdown]
# Age, survival and size of the tumour, and of how many cases they are known. Who was alive when last heard
# of has a colour of their own: those days are no survival.

# %%
from brats_seg.report.charts import cohort_figure

clinical = read_clinical_tables(DATA)
cohort_figure(with_clinical(index.cases, clinical), clinical)

# %% [markdown]
# ## Folds
#
# Patients are shared out once, with grade and age in every fold alike, and written to a table. Cases are
# then prepared: turned to one orientation, cut to the brain, normalised inside it.

# %%
import pandas as pd

data = open_fold(DATA, fold=FOLD, config=config, prepared_path=PREPARED)
print(
    f"fold {FOLD}: {len(data.split.train)} cases to train on, {len(data.split.validation)} held out"
)
pd.read_csv(PREPARED / "folds.csv").groupby("fold").agg(
    cases=("case_id", "size"), patients=("patient_id", "nunique")
)

# %% [markdown]
# ## Train a 3D U-Net
#
# One patch goes through the network at a time; the step is that of the whole effective batch, to rounding
# (see `gradient_accumulation.ipynb`). The picture is renewed after every epoch. A session that ends in the
# middle costs minutes: the same cell goes on.

# %%
from brats_seg.report.history import LiveHistory
from brats_seg.training.trainer import StopRequest, Trainer

live = LiveHistory(run_path=RUN)
trainer = Trainer(data=data, config=config, run_path=RUN)
outcome = trainer.run(stop=StopRequest(MAX_HOURS), track=live)
live.show()
print(
    f"{len(outcome.history)} epochs, best {config.validation.watch} {outcome.best}: {outcome.reason}"
)

# %% [markdown]
# ## Scores of the held-out cases
#
# Thresholds are fitted to them, they are predicted as new scans are, and scored as the challenge does:
# sigmoid and threshold everywhere, region by region. A region that is empty on both sides scores 1, on one
# side 0.

# %%
from brats_seg.cli.crossval import crossval

crossval(
    data=DATA,
    folds=str(FOLD),
    output=WORK / "crossval",
    runs=RUN.parent,
    preset=PRESET,
    settings=SETTINGS,
    prepared=PREPARED,
    max_hours=MAX_HOURS,
)

# %%
from brats_seg.evaluation.scores import read_scores
from brats_seg.report.charts import bar_figure, score_figure

scores = read_scores(WORK / "crossval/scores.csv")
score_figure(scores)

# %%
bar_figure(scores)

# %% [markdown]
# ## Look at a prediction
#
# Of a case that the network has never seen, beside its reference.

# %%
from brats_seg.report.case_figures import montage_figure
from brats_seg.report.case_view import with_prediction

held_out = open_view(DATA, data.split.validation[0])
held_out = with_prediction(held_out, WORK / "crossval/predictions")
montage_figure(held_out)

# %%
from base64 import b64encode

from IPython.display import HTML

from brats_seg.report.surface import models_of, write_surface_gif

write_surface_gif(models_of(held_out), WORK / "surface.gif")
gif = b64encode((WORK / "surface.gif").read_bytes()).decode()
HTML(f'<img alt="reference and prediction, turning" src="data:image/gif;base64,{gif}">')

# %% [markdown]
# ## An autoencoder
#
# It puts a brain into 512 numbers, and keys a brain from them: nothing else passes between its two halves.
# The same trainer, folds and checkpoints, another thing to learn.

# %%
ae_config = load_config(preset=PRESET, assignments=AUTOENCODER)
live = LiveHistory(run_path=AUTOENCODER_RUN)
trainer = Trainer(data=data, config=ae_config, run_path=AUTOENCODER_RUN)
outcome = trainer.run(stop=StopRequest(MAX_HOURS), track=live)
live.show()

# %% [markdown]
# A case that it has never seen, and what is left of it.

# %%
from brats_seg.cases.inputs import find_inputs
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.inference.scan import read_scan
from brats_seg.report.case_figures import reconstruction_figure
from brats_seg.runtime.device import choose_device

(unseen,) = [one for one in find_inputs([DATA]) if one.case.case_id == held_out.case_id]
reconstructor = Reconstructor.load(AUTOENCODER_RUN, choose_device("auto", "auto"))
made = reconstructor.reconstruct(read_scan(unseen, reconstructor.spacing_mm))
reconstruction_figure(made.image, made.reconstruction, case_id=made.case_id)

# %% [markdown]
# ## Features
#
# Per case: the latent vector; volumes, shape and place of each region; intensities by modality and region;
# age and resection. What a network says of a case that it learnt on is marked.

# %%
from brats_seg.cli.survival import features

features(DATA, output=WORK / "features.csv", autoencoder=[AUTOENCODER_RUN], prepared=PREPARED)
pd.read_csv(WORK / "features.csv").iloc[:5, :12]

# %% [markdown]
# ## Survival
#
# Days from the scan to death, learnt with everything inside the folds: scaling, choice of features, choice of
# the model. Patients who were alive when last heard of are not taken for dead. Age alone is the rival to
# beat, and with few cases the verdict is that nothing is shown. Of the phantoms nothing else can be true:
# their days are drawn by lot.

# %%
from IPython.display import Image, display

from brats_seg.cli.survival import survival

tables = sorted(DATA.glob("**/survival_[!e]*.csv"))
if tables:
    survival(
        WORK / "features.csv",
        table=tables[0],
        output=WORK / "survival",
        folds=PREPARED / "folds.csv",
    )
    display(Image(filename=WORK / "survival/survival.png"))
else:
    print(f"{DATA} holds no survival_*.csv: BraTS 2017 to 2020 come with one")

# %% [markdown]
# ## What next
#
# - Other folds: set `FOLD` and run again; `brats-seg crossval` scores them together and exports the ensemble.
# - New scans: `brats-seg predict FOLDER -o OUT --model work/crossval/model`.
# - All that was written here lies in the folder `WORK`.
