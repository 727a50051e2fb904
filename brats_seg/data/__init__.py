"""Prepared cases on disk, and the patches that training keys from them."""
