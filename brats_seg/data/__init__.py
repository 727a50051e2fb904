"""Prepared cases on disk, and the patches that training draws from them."""
