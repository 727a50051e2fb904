"""Networks, by name and by part."""
