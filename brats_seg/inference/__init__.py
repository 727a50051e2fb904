"""Prediction: from new scans to label maps on their own grids."""
