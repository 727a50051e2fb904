"""How arrays become axes: the look that every picture of the package shares."""
