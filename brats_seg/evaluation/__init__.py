"""Scores of predictions against references, and what they prove."""
