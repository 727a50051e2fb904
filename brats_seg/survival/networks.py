"""The networks that features are made with, and for each case those that have not seen it."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Self, cast

import numpy as np
import torch

from brats_seg.cases.case import Case
from brats_seg.cases.nifti import Volume
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.model import Model, load_model
from brats_seg.inference.predict import predict_scan
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.inference.scan import Scan
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import LabelConvention
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.runtime.device import Device
from brats_seg.survival.leakage import Leakage, People, TrainingCases, least_leakage
from brats_seg.survival.radiomics import Feature


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Encoder:
    """One autoencoder."""

    path: Path
    autoencoder: Reconstructor
    training: TrainingCases

    @torch.inference_mode()
    def encode(self, scan: Scan, number: int) -> tuple[Feature, ...]:
        """Return the latent vector of a scan, named after the number of the autoencoder.

        In float32 whatever the device computes fastest in: a feature is to be told from its
        neighbour, and one pass costs little.

        Raises:
            CaseError: It is not all numbers.
        """
        member, device = self.autoencoder.member, self.autoencoder.device.torch_device
        network = cast("Autoencoder", member.network)
        image = torch.from_numpy(scan.image)[list(member.channels)][None]
        values = network.encode(image.to(device))[0].cpu().numpy()
        if not np.isfinite(values).all():
            found = f"a latent vector with {np.count_nonzero(~np.isfinite(values))} broken numbers"
            next_step = "The model is broken: train it again."
            raise CaseError(scan.case_id, "(all)", found, "finite numbers", next_step)
        return tuple(
            Feature(name=f"latent{number}_{place:03d}", value=float(value))
            for place, value in enumerate(values)
        )


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Segmenter:
    """One segmentation run or several."""

    paths: tuple[Path, ...]
    models: tuple[Model, ...]
    """One for each path."""
    trainings: tuple[TrainingCases, ...]
    settings: PredictionSettings

    def segment(self, scan: Scan, keys: frozenset[str]) -> tuple[Volume, LabelConvention, Leakage]:
        """Predict a label map with the networks that know the patient least, averaged.

        Args:
            scan: What to segment.
            keys: Of its patient.

        Raises:
            CaseError: As `predict_scan`.
        """
        places, seen = least_leakage([training.leakage(keys) for training in self.trainings])
        members = tuple(m for place in places for m in self.models[place].members)
        model = replace(self.models[places[0]], members=members)
        result = predict_scan(model, scan, self.settings)
        volume = Volume(array=result.label_map, geometry=scan.geometry, file="(predicted)")
        return volume, result.convention, seen


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Networks:
    """All networks of one table of features."""

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
        """Load runs and what they were trained on.

        Raises:
            UsageError: A path holds no model, or one for another task; or the models do not go
                together.
        """
        networks = cls(
            people=people,
            encoders=tuple(_encoder(path, device, people, cases) for path in autoencoders),
            segmenter=_segmenter(segmentations, device, people, cases) if segmentations else None,
        )
        spacings = networks.spacings_mm
        if len(set(spacings)) > 1:
            msg = (
                f"the runs learnt on scans of different voxels, {spacings} mm; expected one size. "
                "Give runs that were trained on the same data."
            )
            raise UsageError(msg)
        return networks

    @property
    def spacings_mm(self) -> tuple[tuple[float, float, float], ...]:
        """Of the scans that each network learnt on."""
        models = self.segmenter.models if self.segmenter else ()
        return (
            *(encoder.autoencoder.spacing_mm for encoder in self.encoders),
            *(model.identity.spacing_mm for model in models),
        )

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Of the scans that the networks learnt on, and without networks what is usual."""
        return next(iter(self.spacings_mm), _USUAL_SPACING_MM)


_USUAL_SPACING_MM = (1.0, 1.0, 1.0)
"""Of every BraTS release."""


def _encoder(path: Path, device: Device, people: People, cases: Sequence[Case]) -> Encoder:
    autoencoder = Reconstructor.load(path, device)
    if autoencoder.member.window is not None:
        size = "x".join(map(str, autoencoder.member.window))
        msg = (
            f"{path} learnt on patches of {size} voxels; expected an autoencoder of whole brains, "
            "whose numbers tell of one. Train it with --patch whole."
        )
        raise UsageError(msg)
    training = TrainingCases.of_run(path, people, cases)
    return Encoder(path=path, autoencoder=autoencoder, training=training)


def _segmenter(
    paths: Sequence[Path], device: Device, people: People, cases: Sequence[Case]
) -> Segmenter:
    # refuses what does not go together
    load_model(paths, device)
    return Segmenter(
        paths=tuple(paths),
        models=tuple(load_model([path], device) for path in paths),
        trainings=tuple(TrainingCases.of_run(path, people, cases) for path in paths),
        settings=PredictionSettings(),
    )
