"""Cross-validation: every case predicted and scored by the network that never saw it."""
