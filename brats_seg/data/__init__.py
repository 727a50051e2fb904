"""Prepared cases on disk, and the pipelines that read training patches from them."""
