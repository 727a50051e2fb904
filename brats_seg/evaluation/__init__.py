"""Scores of predictions against references, and the statistics to compare them."""
