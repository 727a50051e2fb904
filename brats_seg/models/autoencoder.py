"""An autoencoder: encode a brain as one vector of numbers, and decode the image from it.

Features are `(N, C, X, Y, Z)`. An image of any size is first resampled to one grid, and the result
back to its size: brains of all sizes fill the same grid, so that a number of the vector means the
same place in each, and the cost does not grow with the image. Only the vector, and the size of the
image, go from the encoder to the decoder. The vector encodes the difference to the mean image,
which is a parameter of its own.
"""

from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.nn import functional

from brats_seg.models.interface import ActivationCheckpointing, run_level
from brats_seg.models.unet import Block, initialise
from brats_seg.voxels.box import Triple, triple

CELLS: Triple = (4, 4, 4)
"""Cells along X, Y and Z that the numbers of the vector belong to.

The weights are shared by all cells: a matrix from all features to all numbers overfits to a few
hundred brains.
"""
GRID: Triple = (64, 64, 64)
"""Size of the grid, in voxels of 2 to 3 mm: a few hundred numbers encode nothing finer."""
_WIDTHS = (16, 32, 64, 128)
"""Channels of each level; the finest has half the voxels of the grid along each axis."""
_MEAN_SPEED = 30.0
"""Factor by which the mean image changes faster than weights, to reach the range of intensities."""


class Autoencoder(nn.Module):
    """Encode an image as `latent` numbers, a multiple of the number of cells, and decode it."""

    def __init__(self, *, n_channels: int, latent: int) -> None:
        super().__init__()
        lowest, per_cell = _WIDTHS[-1], latent // (CELLS[0] * CELLS[1] * CELLS[2])
        above = (n_channels, *_WIDTHS[:-1])
        pairs = zip(above, _WIDTHS, strict=True)
        self.encoder = nn.ModuleList(Block(*pair, (2, 2, 2)) for pair in pairs)
        self.to_cells = nn.Sequential(
            Block(lowest, lowest), nn.Conv3d(lowest, per_cell, 1), nn.AdaptiveAvgPool3d(CELLS)
        )
        self.from_cells = nn.Conv3d(per_cell, lowest, 1, bias=False)
        # distinguishes the cells
        self.places = nn.Parameter(torch.empty(lowest, *CELLS))
        below = (*_WIDTHS[1:], lowest)
        self.decoder = nn.ModuleList(map(_ascent, below, _WIDTHS, range(1, len(below) + 1)))
        self.head = nn.Conv3d(_WIDTHS[0], n_channels, 1)
        self.mean_image = nn.Parameter(torch.zeros(n_channels, *(n // 2 for n in GRID)))
        self.checkpointing = ActivationCheckpointing.NONE
        self.apply(initialise)
        nn.init.normal_(self.places)
        nn.init.zeros_(self.head.weight)  # training starts at the mean image

    def encode(self, image: Tensor) -> Tensor:
        """Encode images `(N, C, X, Y, Z)` of any size as `(N, latent)`."""
        features = functional.adaptive_avg_pool3d(image, GRID)
        for level, encode in enumerate(self.encoder):
            features = run_level(self.checkpointing, level, encode, features)
        return run_level(self.checkpointing, len(self.encoder), self.to_cells, features).flatten(1)

    def decode(self, latent: Tensor, size: Iterable[int]) -> Tensor:
        """Decode `(N, latent)` into images `(N, C, X, Y, Z)` of the given size."""
        features = self.from_cells(latent.unflatten(1, (-1, *CELLS))) + self.places
        for level in reversed(range(len(self.decoder))):
            features = run_level(self.checkpointing, level, self.decoder[level], features)
        image = self.head(features) + _MEAN_SPEED * self.mean_image
        return functional.interpolate(image, size=tuple(size), mode="trilinear")

    def forward(self, image: Tensor) -> Tensor:
        """Return the reconstruction of an image `(N, C, X, Y, Z)`, of the same shape."""
        return self.decode(self.encode(image), image.shape[2:])


def _ascent(n_below: int, n_here: int, level: int) -> nn.Sequential:
    size = triple(n // 2**level for n in GRID)
    return nn.Sequential(nn.Upsample(size, mode="trilinear"), Block(n_below, n_here))
