"""Numbers about a case, and the days of survival that are learnt from them."""
