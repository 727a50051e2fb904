"""Figures of cases, scores, cohorts and runs: values in, a matplotlib figure out."""
