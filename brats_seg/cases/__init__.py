"""Scans on disk: volumes with their geometry, case index, checks, folds and demo cases."""
