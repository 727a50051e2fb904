"""Train a network: losses, the accumulated gradient, the epoch loop and the files of a run."""
