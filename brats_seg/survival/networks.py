"""Load the networks that features are made with, and apply those that were not trained on a case."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast

import numpy as np
import torch

from brats_seg.cases.case import Case
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.errors import CaseError, UsageError, counted
from brats_seg.inference.method import Scan
from brats_seg.inference.model import Model, load_model, read_together
from brats_seg.inference.predict import predict_scan
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.labels import LabelConvention
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.runtime.device import Device
from brats_seg.survival.leakage import Leakage, People, TrainingCases, least_leakage
from brats_seg.survival.radiomics import Feature

_USUAL_SPACING_MM = (1.0, 1.0, 1.0)
"""Spacing of every BraTS release."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoder:
    """An autoencoder and the patients that it was trained on."""

    path: Path
    autoencoder: Reconstructor
    training: TrainingCases

    @torch.inference_mode()
    def encode(self, scan: Scan, number: int) -> tuple[Feature, ...]:
        """Return the latent vector of a scan, named after the number of the autoencoder.

        It is computed in float32 on every device: one pass costs little, and features must be exact.

        Raises:
            CaseError: The vector is not finite.
        """
        (member,), device = self.autoencoder.model.members, self.autoencoder.model.device
        network = cast("Autoencoder", member.network)
        image = torch.from_numpy(scan.image)[list(member.channels)][None]
        values = network.encode(image.to(device.torch_device))[0].cpu().numpy()
        if not np.isfinite(values).all():
            n_broken = int(np.count_nonzero(~np.isfinite(values)))
            found = f"a latent vector with NaN or infinity in {counted(n_broken, 'value')}"
            next_step = "The model is broken: train it again."
            raise CaseError(scan.case_id, "(all)", found, "finite numbers", next_step)
        return tuple(
            Feature(name=f"latent{number}_{place:03d}", value=float(value))
            for place, value in enumerate(values)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segmenter:
    """Segmentation runs and the patients that they were trained on."""

    paths: tuple[Path, ...]
    models: tuple[Model, ...]
    """One model for each path."""
    trainings: tuple[TrainingCases, ...]

    def segment(self, scan: Scan, keys: frozenset[str]) -> tuple[Volume, LabelConvention, Leakage]:
        """Predict a label map by the mean of the networks with the least leakage.

        Args:
            scan: Scan to segment.
            keys: Ids of its patient.

        Returns:
            Label map (X, Y, Z) in the axes of BraTS, its convention, and the leakage.

        Raises:
            CaseError: As `predict_scan`.
        """
        places, leakage = least_leakage([training.leakage(keys) for training in self.trainings])
        members = tuple(m for place in places for m in self.models[place].members)
        model = replace(self.models[places[0]], members=members)
        result = predict_scan(model, scan)
        labels = Volume(array=result.label_map, geometry=scan.geometry, file="(predicted)")
        return oriented(labels), result.convention, leakage


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Networks:
    """Networks behind one table of features."""

    people: People
    encoders: tuple[Encoder, ...] = ()
    segmenter: Segmenter | None = None

    @classmethod
    def load(
        cls,
        autoencoders: Sequence[Path],
        segmentations: Sequence[Path],
        device: Device,
        people: People,
        cases: Sequence[Case],
    ) -> Self:
        """Load runs and the lists of cases that they were trained on.

        Raises:
            UsageError: A path holds no model, or one for another task; or the models do
                not fit each other.
        """
        networks = cls(
            people=people,
            encoders=tuple(_encoder(path, device, people, cases) for path in autoencoders),
            segmenter=_segmenter(segmentations, device, people, cases) if segmentations else None,
        )
        spacings = networks.spacings_mm
        if len(set(spacings)) > 1:
            msg = (
                f"the runs were trained on scans of different spacings, {spacings} mm; expected one. "
                "Give runs that were trained on the same data."
            )
            raise UsageError(msg)
        return networks

    @property
    def spacings_mm(self) -> tuple[tuple[float, float, float], ...]:
        """Spacing of the scans that each network was trained on."""
        models = self.segmenter.models if self.segmenter else ()
        return (
            *(encoder.autoencoder.spacing_mm for encoder in self.encoders),
            *(model.identity.spacing_mm for model in models),
        )

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Spacing of the scans that the networks were trained on; 1 mm without networks."""
        return next(iter(self.spacings_mm), _USUAL_SPACING_MM)


def _encoder(path: Path, device: Device, people: People, cases: Sequence[Case]) -> Encoder:
    autoencoder = Reconstructor.load(path, device)
    window = autoencoder.model.members[0].window
    if window.size is not None:
        size = "x".join(map(str, window.size))
        msg = (
            f"{path} was trained on patches of {size} voxels; expected an autoencoder of whole "
            "brains, whose latent vector describes one. Train it with --patch whole."
        )
        raise UsageError(msg)
    training = TrainingCases.of_run(path, people, cases)
    return Encoder(path=path, autoencoder=autoencoder, training=training)


def _segmenter(
    paths: Sequence[Path], device: Device, people: People, cases: Sequence[Case]
) -> Segmenter:
    # raises if the models do not fit each other
    read_together(paths)
    return Segmenter(
        paths=tuple(paths),
        models=tuple(load_model([path], device) for path in paths),
        trainings=tuple(TrainingCases.of_run(path, people, cases) for path in paths),
    )
