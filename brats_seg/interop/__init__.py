"""Models of other programs read here, and ours written for them."""
