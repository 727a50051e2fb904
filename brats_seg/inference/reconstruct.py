"""Reconstruct scans with an autoencoder, and measure the error."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Self

import numpy as np

from brats_seg.cases.case import Case, load_case
from brats_seg.cases.find import find_inputs
from brats_seg.cases.many import MappedCases, map_cases
from brats_seg.files import alone_at
from brats_seg.inference.method import Field, NetworkInput, Scan
from brats_seg.inference.model import Model, assemble
from brats_seg.inference.probabilities import PredictionFallback, apply_model
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.progress import Track, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.runtime.weights import read_trained, require_task


@dataclass(frozen=True, kw_only=True, slots=True)
class DrawnCase:
    """Error of a case, and the picture of its reconstruction."""

    case_id: str
    rmse: tuple[float, ...]
    """Error of each modality; see `Reconstruction.rmse`."""
    picture: Path
    warnings: tuple[str, ...]
    """Warnings about the scan."""

    @property
    def mean_rmse(self) -> float:
        """Mean error over the modalities."""
        return sum(self.rmse) / len(self.rmse)


def reconstruct_cases(
    inputs: Sequence[Path],
    run: Path,
    output: Path,
    settings: PredictionSettings = DEFAULT_SETTINGS,
    *,
    track: Track = untracked,
) -> MappedCases[DrawnCase]:
    """Reconstruct cases with an autoencoder, and draw each with its reconstruction.

    Args:
        inputs: Folders of scans of any layout, or .csv tables of paths.
        run: Run or checkpoint of model.name `autoencoder`.
        output: Folder for the pictures, `<case>.png`.
        settings: Device, precision and overlap; the others are for segmentation.
        track: Shows the progress.

    Raises:
        LayoutError: A folder holds no cases.
        UsageError: The run or the inputs cannot be used, or another process writes to the folder.
        EnvironmentalError: The device is not available, or the folder cannot be written to.
    """
    reconstructor = Reconstructor.load(run, settings=settings)
    draw = partial(_draw_case, reconstructor=reconstructor, output=output)
    with alone_at(output, is_folder=True):
        return map_cases(draw, find_inputs(inputs), "reconstructing", track=track)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reconstruction:
    """A scan and its reconstruction."""

    case_id: str
    image: Field
    """(4, x, y, z): the brain crop, normalised, 0 outside the brain."""
    reconstruction: Field
    """(4, x, y, z)"""
    warnings: tuple[str, ...]
    """Warnings about the scan."""

    @property
    def rmse(self) -> tuple[float, ...]:
        """Root of the mean square error inside the brain, in the order of `MODALITIES`.

        In units of the normalised intensity, whose standard deviation in the brain is 1: an image
        without any contrast has an error of 1.
        """
        brain = (self.image != 0).any(axis=0)
        differences = (self.reconstruction - self.image)[:, brain]
        # float64, because the sum is over millions of voxels
        return tuple(np.sqrt(np.square(differences).mean(axis=1, dtype=np.float64)).tolist())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reconstructor:
    """A loaded autoencoder."""

    model: Model

    @classmethod
    def load(
        cls,
        path: Path,
        device: Device | None = None,
        settings: PredictionSettings = DEFAULT_SETTINGS,
    ) -> Self:
        """Load a run or a checkpoint; without a device, onto that of the settings.

        Raises:
            UsageError: The path holds no autoencoder, or a damaged one.
        """
        networks = read_trained(path)
        for trained in networks:
            require_task(trained, "reconstruction", path)
        device = device or choose_device(settings.device, settings.precision)
        return cls(model=assemble(networks, device, settings))

    def reconstruct(self, case: Case) -> Reconstruction:
        """Read a case, and encode and decode it.

        Raises:
            CaseError: The case cannot be used, or the reconstruction is not finite.
        """
        return self.reconstruct_scan(self.model.method.prepare(load_case(case, with_label=False)))

    def reconstruct_scan(self, scan: Scan) -> Reconstruction:
        """Encode and decode a scan, whole or in windows as the network was trained.

        Raises:
            CaseError: The reconstruction is not finite.
        """
        given = NetworkInput(image=scan.image, to_volume=lambda decoded: decoded.cpu().numpy())
        fallback = PredictionFallback(scan.case.case_id, self.model.device)
        return Reconstruction(
            case_id=scan.case.case_id,
            image=scan.image,
            reconstruction=apply_model(self.model, given, fallback),
            warnings=(*scan.case.remarks, *fallback.warnings),
        )


def _draw_case(case: Case, reconstructor: Reconstructor, output: Path) -> DrawnCase:
    # matplotlib takes long to import
    from brats_seg.figures.cases import reconstruction_figure
    from brats_seg.figures.sections import write_figure

    made = reconstructor.reconstruct(case)
    picture, identity = output / f"{made.case_id}.png", reconstructor.model.identity
    figure = reconstruction_figure(
        made.image, made.reconstruction, case_id=made.case_id, spacing_mm=identity.spacing_mm
    )
    write_figure(figure, picture)
    return DrawnCase(case_id=made.case_id, rmse=made.rmse, picture=picture, warnings=made.warnings)
