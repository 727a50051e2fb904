"""Training: the exact optimizer step, the epoch loop, and the files of a run."""
