"""Prepared cases on disk, and the patches that networks are trained on."""
