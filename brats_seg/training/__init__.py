"""One run: the exact step, the epoch loop, and what it writes."""
