"""`python -m brats_seg`, the same as `brats-seg`."""

from brats_seg.cli import main

main()
