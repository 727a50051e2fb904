"""Extract features from cases, and predict survival from them."""
