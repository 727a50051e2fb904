"""Scans on disk: volumes, cases and their checks, label conventions, the index, and folds."""
