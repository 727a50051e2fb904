"""How well a prediction agrees with its reference."""
