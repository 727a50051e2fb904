"""Figures of cases, of scores and of runs."""
