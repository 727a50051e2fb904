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
# # Gradient accumulation in 3D
#
# With a 3D network at full resolution, only one patch fits in memory at a time. *Gradient accumulation*
# processes several patches one after another, adds up their gradients, and updates the weights once. It
# is often said to give "the same" result as a large batch. This notebook shows when it does, when it does
# not, and by how much.
#
# The experiment is that of the articles, in 3D and small enough for two CPU cores: ten patches with one
# tumour each, and an effective batch of four. Ten is not a multiple of four, so the batches of an epoch
# contain 4, 4 and 2 patches.
#
# The package `brats_seg` has to be installed; the first cell of `brats_segmentation.ipynb` does that.
#
# Research use only.

# %%
# %matplotlib inline

# %%
import importlib.util
import json
import tempfile
from copy import deepcopy
from pathlib import Path

import pandas as pd
import torch
from matplotlib.figure import Figure
from monai.networks.nets import UNet
from torch.nn.utils import parameters_to_vector
from torch.profiler import ProfilerActivity, profile

from brats_seg import (
    Accumulator,
    BatchDiceBce,
    DiceBce,
    MicroBatch,
    phantom_patches,
    whole_loss,
)

N_PATCHES = 10
EFFECTIVE_BATCH = 4
SIZE = (24, 24, 24)
N_EPOCHS = 8
LR = 0.03

# %% [markdown]
# Each patch contains a ball of tumour. The network is trained for 100 steps first: with random weights all
# patches have similar gradients, and errors are hard to see. Everything is computed in double precision,
# so that differences are not caused by rounding.

# %%
torch.manual_seed(0)
patches = MicroBatch(*(part.double() for part in phantom_patches(N_PATCHES, SIZE)))
started = UNet(spatial_dims=3, in_channels=4, out_channels=3, channels=(8, 16, 32), strides=(2, 2))
started = started.double()
optimizer = torch.optim.Adam(started.parameters(), lr=0.01)
for step in range(100):
    which = slice(step % N_PATCHES, step % N_PATCHES + 1)
    optimizer.zero_grad()
    whole_loss(DiceBce(), started(patches.image[which]), patches.target[which]).backward()
    optimizer.step()

batches = [
    MicroBatch(image, target)
    for image, target in zip(*(part.split(EFFECTIVE_BATCH) for part in patches), strict=True)
]
print("patches in each batch of an epoch:", [len(batch.image) for batch in batches])


# %%
def begin():
    """Return a copy of the trained network and a new optimizer."""
    network = deepcopy(started)
    return network, torch.optim.SGD(network.parameters(), lr=LR)


def one_by_one(batch):
    """Split a batch into micro-batches of one patch."""
    return [MicroBatch(*pair) for pair in zip(*(part.split(1) for part in batch), strict=True)]


def loss_of_all(network, criterion):
    """Return the loss of all ten patches."""
    with torch.no_grad():
        return float(whole_loss(criterion, network(patches.image), patches.target))


curves, ended = {}, {}

# %% [markdown]
# ## Reference: batches of four

# %%
network, optimizer = begin()
curves["batch of 4"] = [loss_of_all(network, DiceBce())]
for _ in range(N_EPOCHS):
    for batch in batches:
        optimizer.zero_grad()
        DiceBce()(network(batch.image), batch.target).mean().backward()
        optimizer.step()
    curves["batch of 4"].append(loss_of_all(network, DiceBce()))
ended["batch of 4"] = parameters_to_vector(network.parameters()).detach()

# %% [markdown]
# ## One patch at a time, accumulated to four
#
# The accumulator of the package computes one optimizer step from several micro-batches. The loss returns
# one number per patch; the accumulator divides the sum by the number of patches in the batch, which is two
# in the last batch of the epoch.

# %%
network, optimizer = begin()
accumulator = Accumulator(network, DiceBce(), optimizer)
curves["1, accumulated to 4"] = [loss_of_all(network, DiceBce())]
for _ in range(N_EPOCHS):
    for batch in batches:
        accumulator.step(one_by_one(batch))
    curves["1, accumulated to 4"].append(loss_of_all(network, DiceBce()))
ended["1, accumulated to 4"] = parameters_to_vector(network.parameters()).detach()

# %% [markdown]
# ## One patch at a time, with a step after each

# %%
network, optimizer = begin()
curves["1 alone"] = [loss_of_all(network, DiceBce())]
for _ in range(N_EPOCHS):
    for batch in batches:
        for image, target in one_by_one(batch):
            optimizer.zero_grad()
            DiceBce()(network(image), target).mean().backward()
            optimizer.step()
    curves["1 alone"].append(loss_of_all(network, DiceBce()))
ended["1 alone"] = parameters_to_vector(network.parameters()).detach()

# %% [markdown]
# ## Common mistakes
#
# The loop of most tutorials divides each loss by 4 and calls the optimizer after every fourth patch. There
# are three common variants: the gradients of the last, short batch are *dropped*; or its loss is *divided
# by 4* although it contains two patches, so that the step is half as long as it should be; or nothing is
# divided, and every step is four times too long.

# %%
for name, divisor, keeps_tail in (
    ("tail dropped", EFFECTIVE_BATCH, False),
    ("divided by 4 always", EFFECTIVE_BATCH, True),
    ("not divided", 1, True),
):
    network, optimizer = begin()
    curves[name] = [loss_of_all(network, DiceBce())]
    for _ in range(N_EPOCHS):
        for batch in batches:
            for image, target in one_by_one(batch):
                (DiceBce()(network(image), target).mean() / divisor).backward()
            if len(batch.image) == EFFECTIVE_BATCH or keeps_tail:
                optimizer.step()
            optimizer.zero_grad()
        curves[name].append(loss_of_all(network, DiceBce()))
    ended[name] = parameters_to_vector(network.parameters()).detach()

# %% [markdown]
# The figure shows the loss over all patches after each epoch. The second curve coincides with the first;
# the curves of the mistakes do not. A lower curve is not a better method: a step after each patch, or an
# undivided gradient, has the effect of a learning rate four times as high.

# %%
STYLES = {
    "batch of 4": {"linewidth": 6, "color": "#56B4E9"},
    "1, accumulated to 4": {"linewidth": 1.5, "color": "black"},
    "1 alone": {"linestyle": "--", "marker": "o", "color": "#009E73"},
    "tail dropped": {"linestyle": "--", "marker": "v", "color": "#D55E00"},
    "divided by 4 always": {"linestyle": "--", "marker": "s", "color": "#E69F00"},
    "not divided": {"linestyle": "--", "marker": "^", "color": "#CC79A7"},
}
figure = Figure(figsize=(8, 4.5), layout="constrained")
axes = figure.subplots()
for name, losses in curves.items():
    axes.plot(losses, label=name, markersize=4, **STYLES[name])
axes.set(
    xlabel="epoch", ylabel="loss of all patches", title="Dice and cross-entropy, patch by patch"
)
axes.legend()
figure

# %% [markdown]
# The table shows the distance of the final weights from those of the batch of four, relative to the
# distance that those moved. Exact methods differ by rounding only.

# %%
start = parameters_to_vector(started.parameters()).detach()
goal = ended["batch of 4"]
apart = {name: float((end - goal).norm() / (goal - start).norm()) for name, end in ended.items()}
pd.DataFrame(
    {
        "distance": pd.Series(apart).map("{:.1e}".format),
        "loss at the end": {name: f"{losses[-1]:.6f}" for name, losses in curves.items()},
    }
)

# %% [markdown]
# ## A loss that is not a mean: batch Dice
#
# nnU-Net and the winning entries of BraTS compute the Dice over the whole batch: a ratio of sums over all
# its patches. The mean of four ratios is not the ratio of four sums, so dividing by four cannot be exact.
# The accumulator processes such a batch in two passes: the first adds up the sums, the second computes the
# gradient from them.

# %%
batch_dice, batch_ended = BatchDiceBce(), {}
for name in ("batch of 4", "accumulated naively", "accumulated in two passes"):
    network, optimizer = begin()
    accumulator = Accumulator(network, batch_dice, optimizer)
    curves[f"batch Dice: {name}"] = [loss_of_all(network, batch_dice)]
    for _ in range(N_EPOCHS):
        for batch in batches:
            if name == "accumulated in two passes":
                accumulator.step(one_by_one(batch))
                continue
            optimizer.zero_grad()
            parts = [batch] if name == "batch of 4" else one_by_one(batch)
            for image, target in parts:
                (whole_loss(batch_dice, network(image), target) / len(parts)).backward()
            optimizer.step()
        curves[f"batch Dice: {name}"].append(loss_of_all(network, batch_dice))
    batch_ended[name] = parameters_to_vector(network.parameters()).detach()

# %%
figure = Figure(figsize=(8, 4), layout="constrained")
axes = figure.subplots()
for name, style in (
    ("batch of 4", {"linewidth": 6, "color": "#56B4E9"}),
    ("accumulated in two passes", {"linewidth": 1.5, "color": "black"}),
    ("accumulated naively", {"linestyle": "--", "marker": "v", "color": "#D55E00"}),
):
    axes.plot(curves[f"batch Dice: {name}"], label=name, markersize=4, **style)
axes.set(xlabel="epoch", ylabel="loss of all patches", title="Dice of the batch as a whole")
axes.legend()
figure

# %%
goal = batch_ended["batch of 4"]
pd.Series(
    {
        name: f"{float((end - goal).norm() / (goal - start).norm()):.1e}"
        for name, end in batch_ended.items()
    },
    name="distance",
).to_frame()

# %% [markdown]
# ## Memory
#
# Measured with the PyTorch profiler: the peak of the memory allocated during one step, beyond what was
# allocated before it (weights and patches). The gradients take the same memory for any batch size;
# accumulation saves the memory of the activations.

# %%
held_mb = {}
for name, parts in (
    ("batch of 4", [batches[0]]),
    ("1, accumulated to 4", one_by_one(batches[0])),
    ("1, accumulated to 4, batch Dice in two passes", one_by_one(batches[0])),
    ("1 alone", one_by_one(batches[0])[:1]),
):
    network, optimizer = begin()
    criterion = BatchDiceBce() if "Dice" in name else DiceBce()
    accumulator = Accumulator(network, criterion, optimizer)
    accumulator.step(parts)  # one-time allocations are not counted
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        accumulator.step(parts)
    with tempfile.TemporaryDirectory() as folder:
        profiler.export_chrome_trace(f"{folder}/trace.json")
        events = json.loads(Path(f"{folder}/trace.json").read_text())["traceEvents"]
    counted = [event["args"] for event in events if event["name"] == "[memory]"]
    before = counted[0]["Total Allocated"] - counted[0]["Bytes"]
    held_mb[name] = (max(now["Total Allocated"] for now in counted) - before) / 1e6
pd.Series(held_mb, name="MB at the peak of a step").round(1).to_frame()

# %% [markdown]
# Accumulation saves memory, not time: four passes of one patch take about as long as one pass of four. It
# does not help in prediction, where there is no gradient. Layers that compute statistics over the batch,
# such as batch normalisation, see one patch instead of four: the accumulator refuses them, whereas a loop
# written by hand computes a different result without a warning.

# %% [markdown]
# ## Comparison with Lightning
#
# `accumulate_grad_batches=4` accumulates in Lightning. It divides by four in every batch, also in the short
# one, so its weights are those of "divided by 4 always". The cell runs if Lightning is installed; this
# package does not need it.

# %%
if importlib.util.find_spec("lightning") is None:
    print("Lightning is not installed: `pip install lightning` to run this cell.")
else:
    import logging
    import warnings

    import lightning

    warnings.simplefilter("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

    class Segmentation(lightning.LightningModule):
        """The network of this notebook with its loss and optimizer."""

        def __init__(self):
            super().__init__()
            self.network, self.optimizer = begin()

        def training_step(self, batch):
            image, target = batch
            return DiceBce()(self.network(image), target).mean()

        def configure_optimizers(self):
            return self.optimizer

    module = Segmentation()
    trainer = lightning.Trainer(
        accelerator="cpu",
        max_epochs=N_EPOCHS,
        accumulate_grad_batches=EFFECTIVE_BATCH,
        barebones=True,
    )
    trainer.fit(module, torch.utils.data.DataLoader(list(zip(*patches, strict=True))))
    end = parameters_to_vector(module.network.parameters()).detach()
    goal = ended["batch of 4"]
    print(f"Lightning {lightning.__version__}, distance from the batch of 4:", end=" ")
    print(f"{float((end - goal).norm() / (goal - start).norm()):.1e};", end=" ")
    goal = ended["divided by 4 always"]
    print(f"from 'divided by 4 always': {float((end - goal).norm() / (goal - start).norm()):.1e}")
