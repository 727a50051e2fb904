"""Networks by name, and a network over a volume larger than its patch."""
