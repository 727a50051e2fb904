"""Checks of scans, label maps and results, and the Dice to expect."""
