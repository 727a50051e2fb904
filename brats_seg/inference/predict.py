"""Predict a scan: a label map on the grid of its files, and what speaks against it.

Probabilities are thresholded, regions nested, and components below a volume removed. Probabilities
and masks are `(3, x, y, z)` in the order of `REGIONS`.
"""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import nn

from brats_seg import labels
from brats_seg.cases import releases
from brats_seg.cases.case import Case, LoadedCase, case_of_arrays, load_case
from brats_seg.cases.find import single_input
from brats_seg.config import Section
from brats_seg.data.fold import Seen
from brats_seg.errors import CaseError
from brats_seg.evaluation.scores import SubsetScores, absent_from
from brats_seg.inference.method import Field, Scan
from brats_seg.inference.model import Model, load_model, wrap_network
from brats_seg.inference.probabilities import PredictionFallback, apply_model, entropy
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.memory import peak_memory_mb, reset_peak_memory
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.voxels.box import Triple
from brats_seg.voxels.regions import PartVolume, decode_regions, measure_parts
from brats_seg.wings import NO_JUDGEMENT, PredictedDice, find_wing

log = logging.getLogger(__name__)


class Summary(Section):
    """The prediction of a case in numbers and words."""

    case_id: str
    modalities: tuple[str, ...] = MODALITIES
    """Modalities that the case was predicted from."""
    expected_loss: SubsetScores | None = None
    """Dice that held-out cases lost with these modalities; None with all four, or if not measured."""
    in_training: Seen = "unknown"
    """Whether a network was trained on the patient, by the ids of its training cases."""
    convention: str
    """Label convention of the label map."""
    convention_reason: str = ""
    """Reason for it; empty if it is that of the release of the scan."""
    volumes: tuple[PartVolume, ...]
    warnings: tuple[str, ...] = ()
    """Remarks on the scan, on modes of less memory, and on what speaks against the label map."""
    predicted_dice: tuple[PredictedDice, ...] = ()
    """Dice that is expected of the regions that were found; none if the model has no fit of it."""
    seconds: float
    """Time of computing; in a record, also that of reading."""
    peak_memory_mb: float
    device: str
    remark: str = ""
    """What the networks say of themselves."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Prediction:
    """Prediction of a case, on the grid of its files."""

    label_map: LabelMap
    """(X, Y, Z)"""
    convention: LabelConvention
    """Label convention of the label map."""
    probabilities: Field | None
    """(3, X, Y, Z); None unless the settings ask for them."""
    uncertainty: Field | None
    """(X, Y, Z) in bits; None unless the settings ask for it."""
    summary: Summary


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predictor:
    """A loaded model, which has the settings to predict with.

    Example:
        >>> network = nn.Conv3d(4, 3, kernel_size=1)
        >>> identity = ModelIdentity(conventions=("brats2023",), patch=(8, 8, 8), fingerprint="")
        >>> predictor = Predictor.of_network(network, identity)
        >>> images = np.random.default_rng(0).uniform(1, 2, size=(4, 12, 10, 9))
        >>> predictor.predict_arrays(images, affine=np.eye(4)).label_map.shape
        (12, 10, 9)
    """

    model: Model

    @classmethod
    def load(
        cls, paths: Sequence[Path] = (), settings: PredictionSettings = DEFAULT_SETTINGS
    ) -> Self:
        """Load runs, checkpoints or exported folders, whose probabilities are averaged.

        A model of nnU-Net v2 or a bundle of MONAI is loaded alone. Without a path, it is the network
        that the package carries.

        Raises:
            UsageError: A path holds no model, or one that does not segment, or is damaged; or they
                cannot be averaged.
            ConfigError: A network cannot take the window that the settings ask for.
            EnvironmentalError: The device of the settings is not available.
        """
        model = load_model(paths, choose_device(settings.device, settings.precision), settings)
        for remark in model.remarks:
            log.info("model: %s", remark)
        windows = dict.fromkeys(str(member.window) for member in model.members)
        log.info("windows: %s", "; ".join(windows))
        return cls(model=model)

    @classmethod
    def of_network(
        cls,
        network: nn.Module,
        identity: ModelIdentity,
        settings: PredictionSettings = DEFAULT_SETTINGS,
        *,
        multiple: Triple = (1, 1, 1),
    ) -> Self:
        """Wrap a network of your own whose weights are loaded.

        The identity of a run of that network is `load_trained(path).card.identity`.

        Args:
            network: Turns `(1, C, X, Y, Z)` into logits `(1, R, X, Y, Z)` in evaluation mode.
            identity: Channels and regions of the network, and the data that it was trained on.
            settings: Settings of prediction; windows are as large as the patch where they give none.
            multiple: Numbers that the size of its input must be a multiple of.

        Raises:
            UsageError: It was trained on other modalities, regions or intensities than this package
                prepares.
            ConfigError: The network cannot take the window that the settings ask for.
            EnvironmentalError: The device of the settings is not available.
        """
        return cls(model=wrap_network(network, identity, settings, multiple))

    def predict_files(self, files: Mapping[str, Path], case_id: str | None = None) -> Prediction:
        """Segment a case given as one file for each modality.

        Args:
            files: File of each of `MODALITIES`, also under names such as `flair` or `t1ce`. A model
                trained with `training.modality_dropout` does without some of them.
            case_id: Id of the case; by default the common part of the file names.

        Raises:
            UsageError: A name is that of no modality, two are of the same, or there is no file.
            CaseError: A file is missing or cannot be used, or as `predict_scan`.
        """
        return self.predict_scan(self.prepare(self.read(single_input(case_id, files))))

    def predict_arrays(
        self,
        images: npt.NDArray[Any],
        affine: npt.NDArray[np.float64],
        case_id: str = "case",
        *,
        modalities: Sequence[str] = MODALITIES,
    ) -> Prediction:
        """Segment a case given as arrays.

        Args:
            images: (4, X, Y, Z), in the order of `MODALITIES`, 0 outside the brain.
            affine: (4, 4), from voxel indices to millimetres.
            case_id: Id of the case; the release that it names decides the label convention.
            modalities: Modalities of the images, in that order, if there are fewer than four.

        Raises:
            CaseError: The images cannot be used, or as `predict_scan`.
        """
        loaded = case_of_arrays(case_id, images, affine, modalities)
        self.model.require(case_id, modalities)
        return self.predict_scan(self.prepare(loaded))

    def read(self, case: Case) -> LoadedCase:
        """Load a case of `find_inputs`, whose modalities the model was trained for.

        Raises:
            CaseError: The case cannot be used, or lacks modalities that the model needs.
        """
        self.check(case)
        return load_case(case, with_label=False, modalities=case.modalities)

    def check(self, case: Case) -> None:
        """Raise `CaseError` if the case has problems, or lacks modalities that the model needs."""
        if case.problems:
            raise CaseError(case.case_id, "(all)", "; ".join(case.problems), "", "")
        self.model.require(case.case_id, case.modalities, case.location)

    def prepare(self, loaded: LoadedCase) -> Scan:
        """Prepare a case that has been loaded, as the training of the model did.

        Raises:
            CaseError: The scan cannot be used.
        """
        return self.model.method.prepare(loaded)

    def predict_scan(self, scan: Scan) -> Prediction:
        """Segment a scan that has been prepared.

        Raises:
            CaseError: Memory runs out even in the last mode of the fallback, a network returns
                values that are not finite, or the scan lacks modalities that the model needs.
        """
        model, case = self.model, scan.case
        model.require(case.case_id, case.modalities)
        settings = model.settings
        started_s = time.monotonic()
        reset_peak_memory(model.device.torch_device)
        fallback = PredictionFallback(case.case_id, model.device)
        mean = apply_model(model, model.method.to_network(scan), fallback, tta=settings.tta)
        probabilities = scan.on_scan_spacing(mean)
        trained_on = model.identity.conventions
        convention, reason = convention_to_write(settings.labels, case.release, trained_on)
        regions = decode_regions(probabilities, model.decoding, scan.voxel_mm3)
        volumes = measure_parts(regions, scan.voxel_mm3)
        expected_loss = {s.modalities: s for s in model.subset_scores}.get(case.modalities)
        judgement, checks = NO_JUDGEMENT, find_wing("quality.result")
        if checks is not None:
            judgement = checks.judge_result(
                scan, probabilities, regions, volumes=volumes, notes=model.notes
            )
        return Prediction(
            label_map=scan.on_scan_grid(labels.label_map_of(regions, convention)),
            convention=convention,
            probabilities=np.stack([scan.on_scan_grid(values) for values in probabilities])
            if settings.probabilities
            else None,
            uncertainty=scan.on_scan_grid(scan.on_scan_spacing(entropy(mean)[None])[0])
            if settings.uncertainty
            else None,
            summary=Summary(
                case_id=case.case_id,
                modalities=case.modalities,
                expected_loss=expected_loss,
                in_training=model.seen(case.case_id, case.patient_id),
                convention=convention.name,
                convention_reason=reason,
                volumes=volumes,
                warnings=(
                    *_subset_warnings(case.modalities, expected_loss),
                    *case.remarks,
                    *fallback.warnings,
                    *judgement.remarks,
                ),
                predicted_dice=judgement.predicted_dice,
                seconds=time.monotonic() - started_s,
                peak_memory_mb=round(peak_memory_mb(model.device.torch_device), 1),
                device=str(model.device.torch_device),
                remark=" ".join(model.remarks),
            ),
        )


def _subset_warnings(modalities: Sequence[str], loss: SubsetScores | None) -> tuple[str, ...]:
    """Return a sentence that says which modalities are missing, and what to expect of the result."""
    if not (missing := absent_from(modalities)):
        return ()
    measured = f"expect a lower Dice than with all four modalities: it was {loss}"
    unknown = "the loss of Dice to expect is not known: `brats-seg tune` measures it for a run"
    source = f"no {', '.join(missing)}: predicted from {' and '.join(modalities)} alone"
    return (f"{source}; {measured if loss else unknown}",)


def convention_to_write(
    asked_for: str | None, release: str, trained_on: Sequence[str]
) -> tuple[LabelConvention, str]:
    """Return the label convention to write a case in, and the reason if it is not that of its release.

    Args:
        asked_for: Name of the convention that the user asked for.
        release: Release of the case; where it allows several conventions, that of the training cases
            is written, if they had only one.
        trained_on: Names of the conventions of the training cases.
    """
    of_release, is_ambiguous = releases.resolve_convention(release, ())
    if not is_ambiguous:
        if asked_for in {None, of_release.name}:
            return of_release, ""
        known = f"the release of the scans has {of_release.name}"
    elif release in {releases.UNKNOWN, releases.NNUNET}:
        known = "the names of the scans show no release"
    else:
        known = f"the release {release} exists in several conventions"
    if asked_for is not None:
        return labels.convention_named(asked_for), f"asked for; {known}"
    if len(trained_on) == 1:
        reason = f"{known}, and the model was trained on this convention"
        return labels.convention_named(trained_on[0]), reason
    names = ", ".join(trained_on) or "labels of no known convention"
    return labels.BRATS2023, f"{known}, and the model was trained on {names}"
