"""Named starting points for the settings; what they leave out is the default of `config`."""

from typing import Any

OF_MODEL: dict[str, dict[str, Any]] = {
    # a brain is encoded whole; what is altered would have to be reconstructed as well
    "autoencoder": {
        "patch": {"size": "whole", "foreground": 0.0, "per_case": 1},
        "optimizer": {"name": "adamw", "lr": 1e-3},
        "schedule": {"watch": "val_loss", "patience": 5},
        "training": {"effective_batch": 2, "augment": "none"},
        "validation": {"watch": "val_loss"},
    },
}
"""What a `model.name` starts from instead, whatever the preset."""
PRESETS: dict[str, dict[str, Any]] = {
    # phantom cases on two CPU cores, in minutes
    "demo": {
        "folds": {"n_folds": 3},
        "patch": {"size": [32, 32, 32], "foreground": 0.5, "per_case": 4},
        "model": {"widths": [12, 24, 48], "deep_supervision": False},
        "optimizer": {"lr": 3e-3},
        "training": {"n_epochs": 20, "effective_batch": 2},
    },
    # one 16 GB GPU without bf16, sessions of 12 hours
    "kaggle-t4": {
        "patch": {"size": [128, 128, 128], "per_case": 2},
        "training": {"n_epochs": 100, "effective_batch": 4, "augment": "light"},
        "validation": {"every": 5},
    },
    # the network and recipe of the Kaggle notebook, on patches instead of whole volumes
    "notebook": {
        "folds": {"n_folds": 7, "scheme": "notebook"},
        "patch": {"size": [128, 128, 128], "foreground": 0.0},
        "model": {"name": "notebook"},
        "optimizer": {"name": "adam", "lr": 5e-4, "weight_decay": 0.0, "clip_norm": None},
        "training": {"n_epochs": 50, "effective_batch": 4, "augment": "none"},
        "validation": {"watch": "val_loss"},
    },
    # the recipe of nnU-Net for those with the time
    "full": {
        "patch": {"size": [128, 128, 128], "per_case": 2},
        "optimizer": {"name": "sgd", "lr": 1e-2, "weight_decay": 3e-5},
        "schedule": {"name": "polynomial"},
        "training": {"n_epochs": 300, "effective_batch": 8, "augment": "full"},
        "validation": {"every": 10},
    },
}
