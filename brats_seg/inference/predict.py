"""Predict a scan: a label map on the grid of its files, and what speaks against it."""

import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Self

import numpy as np
import numpy.typing as npt
from torch import nn

from brats_seg.cases.case import Case, CaseFiles, LoadedCase, case_of_arrays, load_case
from brats_seg.cases.inputs import single_input
from brats_seg.cases.layouts import modality_named
from brats_seg.evaluation.subset_scores import SubsetScores
from brats_seg.inference.missing_modalities import (
    accepted,
    check_subset,
    scores_without,
    subset_warnings,
)
from brats_seg.inference.model import Model, load_any_model, wrap_network
from brats_seg.inference.postprocess import PartVolume, decode, measure
from brats_seg.inference.probabilities import (
    Field,
    PredictionFallback,
    completed,
    crop_probabilities,
    entropy,
    foreign_probabilities,
)
from brats_seg.inference.scan import Scan, prepare_scan
from brats_seg.inference.settings import DEFAULT_SETTINGS, PredictionSettings
from brats_seg.labels import MODALITIES, LabelConvention, LabelMap, RegionMasks, regions_of
from brats_seg.quality.expected_dice import mean_probabilities, predicted_dice
from brats_seg.quality.result import Prediction, implausibilities
from brats_seg.quality.scan_check import checked_scan
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.memory import keep_freed_memory, peak_memory_mb, reset_peak_memory
from brats_seg.runtime.weights import ModelIdentity
from brats_seg.voxels.box import Triple
from brats_seg.wings import PredictedDice

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseResult:
    """Prediction of a case, on the grid of its files."""

    case_id: str
    label_map: LabelMap
    """(X, Y, Z)"""
    convention: LabelConvention
    """Label convention of the label map."""
    convention_reason: str
    """Reason for it; empty if it is that of the release of the scan."""
    probabilities: npt.NDArray[np.float32] | None
    """(3, X, Y, Z); None unless the settings ask for them."""
    uncertainty: npt.NDArray[np.float32] | None
    """(X, Y, Z) in bits; None unless the settings ask for it."""
    volumes: tuple[PartVolume, ...]
    warnings: tuple[str, ...]
    """Remarks on the scan, on the way of computing, and on what speaks against the label map."""
    seconds: float
    """Time of prediction and postprocessing, without reading and writing."""
    peak_memory_mb: float
    device: str
    modalities: tuple[str, ...] = MODALITIES
    """Modalities that it was predicted from."""
    expected_loss: SubsetScores | None = None
    """Dice that held-out cases lost with these modalities; None with all four, or if not measured."""
    predicted_dice: tuple[PredictedDice, ...] = ()
    """Dice that is expected of the regions that were found; none if the model has no fit of it."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Predictor:
    """A loaded model and the settings to predict with.

    Example:
        >>> network = nn.Conv3d(4, 3, kernel_size=1)
        >>> identity = ModelIdentity(conventions=("brats2023",), patch=(8, 8, 8), fingerprint="")
        >>> predictor = Predictor.of_network(network, identity)
        >>> images = np.random.default_rng(0).uniform(1, 2, size=(4, 12, 10, 9))
        >>> predictor.predict_arrays(images, affine=np.eye(4)).label_map.shape
        (12, 10, 9)
    """

    model: Model
    settings: PredictionSettings = DEFAULT_SETTINGS

    @classmethod
    def load(cls, paths: Sequence[Path], settings: PredictionSettings = DEFAULT_SETTINGS) -> Self:
        """Load runs, checkpoints or exported folders, whose probabilities are averaged.

        A model of nnU-Net v2 or a bundle of MONAI is loaded alone.

        Raises:
            UsageError: A path holds no model, or one that does not segment, or is damaged; or they
                cannot be averaged.
            EnvironmentalError: The device of the settings is not available.
        """
        device = choose_device(settings.device, settings.precision)
        model = load_any_model(paths, device)
        if model.method and settings.precision == "auto" and device.torch_device.type == "cpu":
            # as the other programs compute on a CPU
            model = replace(model, device=choose_device("cpu", "fp32"))
        if model.method is None and model.profile is None:
            log.warning(
                "the model has no profile of its training scans, because an earlier version trained "
                "it, or on few brains: new scans are not compared with them"
            )
        if model.method is None:
            words = [completed(one, settings).window_words() for one in model.members]
            log.info("windows: %s", "; ".join(dict.fromkeys(words)))
        if device.torch_device.type == "cpu":
            keep_freed_memory()
        return cls(model=model, settings=settings)

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

        The identity of a run of that network is `load_trained(path).identity`.

        Args:
            network: Turns `(1, C, X, Y, Z)` into logits `(1, R, X, Y, Z)` in evaluation mode.
            identity: Channels and regions of the network, and the data that it was trained on.
            settings: Settings of prediction.
            multiple: Numbers that the size of its input must be a multiple of.

        Raises:
            UsageError: It was trained on other modalities, regions or intensities than this package
                prepares.
            EnvironmentalError: The device of the settings is not available.
        """
        device = choose_device(settings.device, settings.precision)
        model = wrap_network(network, identity, device, multiple=multiple)
        return cls(model=model, settings=settings)

    def predict_files(self, files: Mapping[str, Path], case_id: str | None = None) -> CaseResult:
        """Segment a case given as one file for each modality.

        Args:
            files: File of each of `MODALITIES`, also under names such as `flair` or `t1ce`. A model
                trained with `training.modality_dropout` does without some of them.
            case_id: Id of the case; by default the common part of the file names.

        Raises:
            CaseError: A file is missing or cannot be used, or as `predict_scan`.
            ConfigError: As `predict_scan`.
        """
        named = {modality_named(word) or word: path for word, path in files.items()}
        return self.predict_scan(self.prepare(self.read(single_input(case_id, named))))

    def predict_arrays(
        self,
        images: npt.NDArray[Any],
        affine: npt.NDArray[np.float64],
        case_id: str = "case",
        *,
        modalities: Sequence[str] = MODALITIES,
    ) -> CaseResult:
        """Segment a case given as arrays.

        Args:
            images: (4, X, Y, Z), in the order of `MODALITIES`, 0 outside the brain.
            affine: (4, 4), from voxel indices to millimetres.
            case_id: Id of the case; the release that it names decides the label convention.
            modalities: Modalities of the images, in that order, if there are fewer than four.

        Raises:
            CaseError: The images cannot be used, or as `predict_scan`.
            ConfigError: As `predict_scan`.
        """
        loaded = case_of_arrays(case_id, images, affine, modalities)
        return self.predict_scan(self.prepare(loaded))

    def read(self, case: Case, files: CaseFiles | None = None) -> LoadedCase:
        """Load a case of `find_inputs`, whose modalities the model was trained for.

        Args:
            case: The case; `missing_modalities.accepted` names what speaks against it.
            files: Files of the case, if they have been read already.

        Raises:
            CaseError: The case cannot be used, or lacks modalities that the model needs.
        """
        case = accepted(case, self.model)
        return load_case(case, with_label=False, files=files, modalities=case.modalities)

    def prepare(self, loaded: LoadedCase) -> Scan:
        """Prepare a case that has been loaded, as the training of the model did.

        Raises:
            CaseError: The scan cannot be used, or lacks modalities that the model needs.
        """
        check_subset(self.model, loaded.case.case_id, loaded.modalities)
        method = self.model.method
        if method is not None:
            return method.prepare(loaded)
        scan = prepare_scan(loaded, self.spacing_mm)
        return checked_scan(scan, self.model.profile, self.spacing_mm)

    def predict_scan(self, scan: Scan) -> CaseResult:
        """Segment a scan that has been read; see the function `predict_scan`."""
        return predict_scan(self.model, scan, self.settings)

    @property
    def spacing_mm(self) -> tuple[float, float, float]:
        """Voxel size that scans are resampled to."""
        return self.model.identity.spacing_mm


def predict_scan(model: Model, scan: Scan, settings: PredictionSettings) -> CaseResult:
    """Segment a scan.

    Raises:
        CaseError: Memory runs out even in the last mode of the fallback, a network returns
            values that are not finite, or the scan lacks modalities that the model needs.
        ConfigError: A network cannot take the window that the settings ask for.
    """
    check_subset(model, scan.case_id, scan.modalities)
    started_s = time.monotonic()
    reset_peak_memory(model.device.torch_device)
    fallback = PredictionFallback(scan.case_id, model.device)
    if model.method is None:
        mean = crop_probabilities(model, scan.case_id, scan.image, settings, fallback)
    else:
        mean = foreign_probabilities(model, model.method, scan, settings, fallback)
    probabilities = scan.on_scan_spacing(mean)
    written = model.written_convention(settings, scan.release)
    convention = written.convention
    labels = decode(probabilities, model.decoding(settings), convention, scan.voxel_mm3)
    prediction = _prediction(model, scan, probabilities, labels, convention)
    expected = scores_without(model, scan.modalities)
    return CaseResult(
        case_id=scan.case_id,
        label_map=scan.on_scan_grid(labels),
        convention=convention,
        convention_reason=written.reason,
        probabilities=np.stack([scan.on_scan_grid(part) for part in probabilities])
        if settings.probabilities
        else None,
        uncertainty=scan.on_scan_grid(scan.on_scan_spacing(entropy(mean)[None])[0])
        if settings.uncertainty
        else None,
        volumes=prediction.volumes,
        warnings=(
            *subset_warnings(scan.modalities, expected),
            *scan.warnings,
            *fallback.warnings,
            *implausibilities(prediction),
        ),
        seconds=time.monotonic() - started_s,
        peak_memory_mb=peak_memory_mb(model.device.torch_device),
        device=str(model.device.torch_device),
        modalities=scan.modalities,
        expected_loss=expected,
        predicted_dice=prediction.predicted_dice,
    )


def _prediction(
    model: Model, scan: Scan, probabilities: Field, labels: LabelMap, convention: LabelConvention
) -> Prediction:
    """Return what a prediction is judged by."""
    regions = regions_of(labels, convention)
    # both are known of all four modalities alone
    is_whole = scan.modalities == MODALITIES
    return Prediction(
        regions=regions,
        probabilities=probabilities,
        brain=_brain_of(scan),
        volumes=measure(labels, convention, scan.voxel_mm3),
        spacing_mm=scan.spacing_mm,
        predicted_dice=_predicted_dice(model, probabilities, regions) if is_whole else (),
        uptake=_uptake(scan) if is_whole and not model.method else None,
        is_unusual=bool(scan.warnings),
    )


def _brain_of(scan: Scan) -> npt.NDArray[np.bool_]:
    """Return the voxels of the brain at the spacing of the files."""
    brain = (scan.image != 0).any(axis=0)
    return scan.on_scan_spacing(brain[None].astype(np.float32))[0] > 0.5


def _uptake(scan: Scan) -> Field | None:
    """Return t1c minus t1n (x, y, z) at the spacing of the files; None if one of them is missing."""
    t1n, t1c = (scan.image[MODALITIES.index(name)] for name in ("t1n", "t1c"))
    return scan.on_scan_spacing((t1c - t1n)[None])[0] if t1n.any() and t1c.any() else None


def _predicted_dice(
    model: Model, probabilities: Field, regions: RegionMasks
) -> tuple[PredictedDice, ...]:
    lines = model.dice_lines
    return predicted_dice(lines, mean_probabilities(probabilities, regions)) if lines else ()
