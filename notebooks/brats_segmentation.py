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
# This notebook goes from a folder of BraTS scans to a 3D U-Net with scores on held-out cases, an
# autoencoder that encodes a brain as 512 numbers, and a survival model with an honest verdict. It follows
# the public notebook "BraTS20 3dUnet 3dAutoEncoder". Every step is one call of the package `brats_seg`; the
# same steps are available as commands (`brats-seg --help`).
#
# On Kaggle the scans are found where they are mounted, for any year of BraTS; `docs/kaggle.md` describes
# the steps. Without scans the notebook creates phantom cases and runs in a few minutes on two CPU cores:
# `notebooks/pages/brats_segmentation.md` shows the result.
#
# **Research use only.**

# %% [markdown]
# ## Installation
#
# If the package is installed, this cell does nothing. Otherwise it installs what `PACKAGE` names or, if
# that is empty, what it finds: a wheel or the source in a data set that is attached on Kaggle, a wheel
# beside the notebook or in `dist`, or the clone that contains the notebook. Wheels of other packages beside
# it are tried before any package index, so that no internet is needed if they are complete. The installed
# torch is kept: pip is told not to change it.

# %%
import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path

PACKAGE = ""  # "git+https://...", a wheel or a folder with the source

if importlib.util.find_spec("brats_seg") is None:
    temporary = Path(tempfile.mkdtemp())
    kept = temporary / "kept.txt"
    kept.write_text(f"torch=={version('torch')}\n" if importlib.util.find_spec("torch") else "")
    attached, here = Path("/kaggle/input"), [Path(), Path("dist"), Path("../dist")]
    wheels = sorted(attached.rglob("brats_seg-*.whl"), reverse=True)
    wheels += [file for folder in here for file in sorted(folder.glob("brats_seg-*.whl"))[-1:]]
    sources = [*(file.parent for file in attached.rglob("pyproject.toml")), Path(), Path("..")]
    sources = [folder for folder in sources if (folder / "brats_seg/__init__.py").is_file()]
    package = PACKAGE or next(map(str, [*wheels, *sources]), "")
    if not package:
        message = (
            f"brats_seg is not installed, and neither {attached} nor the folder of this notebook has "
            "its wheel or source: set PACKAGE to one of them, or to git+https://..."
        )
        raise ModuleNotFoundError(message)
    if Path(package).is_dir() and not os.access(package, os.W_OK):  # pip builds in the folder
        package = shutil.copytree(package, temporary / "source")
    pip = [sys.executable, "-m", "pip", "install", "-qq", "--constraint", kept]
    near = ["--no-index", "--no-build-isolation", "--find-links", Path(package).parent]
    for options in [near, []] if Path(package).exists() else [[]]:
        command = [*map(str, [*pip, *options, package])]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode == 0:
            break
    else:
        message = (
            f"pip could not install {package}:\n{done.stderr}\nWithout internet, wheels of all packages "
            "that are missing have to be beside it; docs/kaggle.md describes how they are made."
        )
        raise RuntimeError(message)

# %%
# %matplotlib inline

# %% [markdown]
# ## Settings
#
# `DATA` is the folder of scans; if it is not set, Kaggle's mounts and `data` are searched for label maps
# (`*seg*.nii*`). The environment variables `BRATS_DATA` and `BRATS_WORK` override both folders. Work that
# was started in `WORK` is resumed; on Kaggle, the work of an earlier session is copied from its output if
# that is attached. Each folder of scans has a folder of its name in `WORK`. A run on scans gets the settings
# that suit the device, and as many epochs as fit into `HOURS`; phantoms need minutes.

# %%
import brats_seg as brats

DATA = os.environ.get("BRATS_DATA")  # or a path: "/kaggle/input/NAME/MICCAI_BraTS2020_TrainingData"
WORK = Path(os.environ.get("BRATS_WORK", "work"))
FOLD = 0  # the fold that is held out
HOURS = 5.0  # for the training of each of the two networks

KAGGLE = Path("/kaggle/input")
earlier = sorted(KAGGLE.glob("**/work/*/runs"))
if earlier and not WORK.exists():  # under another name until it is whole
    copy = WORK.with_name(f"{WORK.name}-copying")
    shutil.copytree(earlier[-1].parents[1], copy, dirs_exist_ok=True).rename(WORK)
folders = [] if DATA else [*sorted(KAGGLE.glob("*/")), Path("../data"), Path("data")]
for folder in folders:  # the first data set with label maps
    labelled = [
        path.parent for path in folder.rglob("*seg*.nii*") if "demo-scans" not in path.parts
    ]
    if labelled:
        DATA = os.path.commonpath(labelled)
        break
DEMO = not DATA
DATA = WORK / "demo/demo-scans" if DEMO else Path(DATA)
WORK = WORK / ("demo" if DEMO else DATA.resolve().name)
if DEMO and not (DATA / "survival_info.csv").exists():
    brats.write_phantom_cases(DATA, n_cases=12, seed=0)
    brats.write_phantom_survival(DATA / "survival_info.csv", n_cases=12, seed=0)

PREPARED, RESULTS = WORK / "prepared", WORK / f"results/fold{FOLD}"
RUN, AUTOENCODER_RUN = WORK / f"runs/fold{FOLD}", WORK / f"runs/autoencoder{FOLD}"
print(f"scans: {DATA}{' (phantoms)' if DEMO else ''}\nresults: {WORK.absolute()}")

# %%
if DEMO:
    config = brats.load_config(preset="demo")
    ae_config = brats.load_config(preset="demo", assignments=["model.name=autoencoder"])
else:
    hours, autoencoder = f"training.hours={HOURS}", "model.name=autoencoder"
    chosen = brats.choose_settings(assignments=[hours], run_paths=[RUN])
    print(chosen.reason)
    config = chosen.config
    ae_config = brats.choose_settings(
        assignments=[hours, autoencoder], run_paths=[AUTOENCODER_RUN]
    ).config

# %% [markdown]
# ## The data
#
# The release is detected from names, geometry and label values, and problems of single cases are listed.
# It does not matter whether enhancing tumour has the value 3 or 4.

# %%
index = brats.open_index(DATA, PREPARED / "cases.csv", config)
print(*brats.summarise(index), sep="\n")

# %% [markdown]
# One case: its four modalities, and its label map with a legend.

# %%
view = brats.open_view(DATA, index.trainable[0].case_id)
brats.sample_figure(view)

# %%
brats.view_figure(view)

# %% [markdown]
# Age, survival and tumour volume, and the number of cases for which each is known. Patients who were alive
# at the last contact have their own colour: their survival is not known.

# %%
clinical = brats.read_clinical_tables(DATA)
brats.cohort_figure(index.cases, clinical)

# %% [markdown]
# ## Folds
#
# Patients are assigned to folds once, balanced by grade and age, and the assignment is written to a table.
# The cases are then prepared: reoriented, cropped to the brain, and normalised inside it.

# %%
import pandas as pd

data = brats.open_fold(DATA, fold=FOLD, config=config, prepared_path=PREPARED)
print(
    f"fold {FOLD}: {len(data.split.train)} cases to train on, {len(data.split.validation)} held out"
)
pd.read_csv(data.folds_path).groupby("fold").agg(
    cases=("case_id", "size"), patients=("patient_id", "nunique")
)

# %% [markdown]
# ## Training a 3D U-Net
#
# Each forward pass processes one patch; the optimizer step is that of the whole effective batch, to
# rounding (see `gradient_accumulation.ipynb`). The figure is updated after every epoch. If the session ends
# in the middle or the kernel is interrupted, run the cell again to resume.

# %%
live = brats.LiveHistory(run_path=RUN)
outcome = brats.train_fold(
    DATA, FOLD, config=config, run_path=RUN, prepared_path=PREPARED, track=live
)
live.show()
print(f"{len(outcome.history)} epochs: {outcome.reason}")
if not outcome.finished:
    message = "run this cell again to resume, with more HOURS if these are used up"
    raise KeyboardInterrupt(message)
print(f"best {config.validation.watch}: {outcome.best:.3f}")

# %% [markdown]
# ## Scores of the held-out cases
#
# Thresholds and smallest volumes are fitted to the held-out cases if these are enough to show a gain. The cases are then
# predicted like new scans and scored as in the challenge, region by region. A region that is empty in
# reference and prediction scores 1; a region that is empty in one of them scores 0.

# %%
result = brats.cross_validate(
    DATA,
    folds=[FOLD],
    output=RESULTS,
    runs=RUN.parent,
    config=config,
    prepared_path=PREPARED,
)
brats.score_figure(result.scores)

# %% [markdown]
# ## A prediction
#
# A held-out case: prediction and reference.

# %%
held_out = brats.open_view(DATA, data.split.validation[0])
held_out = brats.with_prediction(held_out, RESULTS / "predictions")
brats.montage_figure(held_out)

# %% [markdown]
# ## An autoencoder
#
# The encoder turns a brain into 512 numbers, and the decoder turns them back into a brain; nothing else
# passes between the two. Trainer, folds and checkpoints are the same.

# %%
live = brats.LiveHistory(run_path=AUTOENCODER_RUN)
outcome = brats.train_fold(
    DATA, FOLD, config=ae_config, run_path=AUTOENCODER_RUN, prepared_path=PREPARED, track=live
)
live.show()
if not outcome.finished:
    message = "run this cell again to resume, with more HOURS if these are used up"
    raise KeyboardInterrupt(message)

# %% [markdown]
# A held-out case and its reconstruction.

# %%
reconstructor = brats.Reconstructor.load(AUTOENCODER_RUN)
(case,) = [case for case in index.cases if case.case_id == held_out.case_id]
made = reconstructor.reconstruct(case)
brats.reconstruction_figure(made.image, made.reconstruction, case_id=made.case_id)

# %% [markdown]
# ## Features
#
# For each case: the latent vector; volume, shape and position of each region; intensities by modality and
# region; age and resection. Features from a network that was trained on the patient are marked.

# %%
brats.features_of_folder(
    DATA, RESULTS / "features.csv", autoencoder=AUTOENCODER_RUN, prepared_path=PREPARED
)
pd.read_csv(RESULTS / "features.csv").iloc[:5, :12]

# %% [markdown]
# ## Survival
#
# Days from the scan to death, predicted by nested cross-validation: scaling, selection of features and
# selection of the model happen inside the folds. Patients who were alive at the last contact are treated as
# censored. The baseline is a model of age alone. With few cases the verdict is that nothing has been shown;
# this is always so for phantoms, whose survival is random.

# %%
from IPython.display import Image, display

tables = sorted(DATA.glob("**/survival_[!e]*.csv"))
if tables:
    study = brats.study_survival(
        RESULTS / "features.csv", tables[:1], RESULTS / "survival", folds=data.folds_path
    )
    print(study.verdict)
    display(Image(filename=RESULTS / "survival/survival.png"))
else:
    print(f"{DATA} has no survival_*.csv; BraTS 2017 to 2020 include one")

# %% [markdown]
# ## Next steps
#
# - Other folds: set `FOLD` and run again; `brats-seg crossval` scores all folds and exports the ensemble.
# - New scans: `brats-seg predict SCANS -o OUT --model MODEL`, where `MODEL` is the folder `model` in `RESULTS`.
# - The runs, the results of each fold and the prepared cases are in the folder `WORK`.
