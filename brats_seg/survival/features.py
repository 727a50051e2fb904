"""Extract features from the cases of a folder: scans in, a row of numbers for each case out.

Features are size, shape and position of the regions, and statistics of the intensities, normalised as for
networks, so that scanners can be compared. Ten of the statistics and the means of slabs are those of the
Kaggle notebook, here without the air around the head.
To each case networks are applied that were not trained on its patient, if there are such; the table says
whether they were. A run lists the cases that it was trained on in its split.
"""

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan, pi, prod
from pathlib import Path
from typing import cast

import numpy as np
import numpy.typing as npt
import torch
from scipy import stats

from brats_seg.cases.case import Case, load_case
from brats_seg.cases.clinical import ClinicalTable, read_clinical_tables, with_clinical
from brats_seg.cases.many import MappedCases, map_cases, write_failures
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.config import load_config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import CASES_NAME, Seen, TrainingCases, open_index, prepared_path_of
from brats_seg.errors import CaseError, UsageError, counted
from brats_seg.files import alone_at
from brats_seg.inference.method import Scan, prepare_scan
from brats_seg.inference.model import Model, load_model, read_together
from brats_seg.inference.predict import Predictor
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, RegionMasks, regions_of
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.progress import Track, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.survival.table import AGE, LABELS_SEEN, LATENT_SEEN, write_features
from brats_seg.voxels.box import Mask, bounding_box, shape_text
from brats_seg.voxels.grids import MM3_PER_ML, Spacing
from brats_seg.voxels.regions import measure_parts
from brats_seg.voxels.shapes import surface_mm2

log = logging.getLogger(__name__)

REFERENCE, PREDICTION = "reference", "prediction"
"""Sources of a label map."""
_USUAL_SPACING_MM = (1.0, 1.0, 1.0)
"""Spacing of every BraTS release."""
N_SLABS = 15
"""Number of slabs of the brain, from right to left, whose means are features; as in the notebook."""
_RATIOS = (("tc", "wt"), ("et", "wt"), ("et", "tc"), ("wt", "brain"))
_PERCENTILES = (5, 50, 95)
_FEWEST_FOR_MOMENTS = 3

Values = npt.NDArray[np.float64]
Row = dict[str, str | float]
"""Cells of the table of features by column."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Networks:
    """Networks behind one table of features, and the tables of their patients.

    The training cases of a network have the ids of all years of their patients.
    """

    clinical: ClinicalTable
    autoencoder: Model | None
    segmentations: tuple[Model, ...]
    spacing_mm: Spacing
    """Spacing of the scans that the networks were trained on; 1 mm without networks."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Tumour:
    """The image and the regions of a case on one grid, cropped to brain and tumour."""

    image: npt.NDArray[np.float32]
    """(4, x, y, z): mean 0 and standard deviation 1 inside the brain, 0 around it."""
    regions: RegionMasks
    """(3, x, y, z) in the order of `REGIONS`."""
    spacing_mm: Spacing

    @property
    def brain(self) -> Mask:
        """Mask (x, y, z) of the brain."""
        return (self.image != 0).any(axis=0)


def features_of_folder(  # noqa: PLR0913 - each is a separate choice
    data: Path,
    output: Path,
    *,
    autoencoder: Path | None = None,
    segmentations: Sequence[Path] = (),
    tables: Sequence[Path] = (),
    labels: str | None = None,
    prepared_path: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    track: Track = untracked,
) -> MappedCases[Row]:
    """Extract the features of all cases of a folder and write them as a table.

    `failures.csv` is written next to the table. Of several runs, those that were not trained on the
    patient are applied to a case.

    Args:
        data: Folder of scans, of any BraTS release.
        output: The table, a CSV file.
        autoencoder: Run of an autoencoder, for latent vectors.
        segmentations: Runs that predict label maps where there is no reference.
        tables: Tables of ages, resections or ids, besides those below `data`.
        labels: Label convention of all cases, if detection is wrong.
        prepared_path: Folder of prepared cases, which holds the index; by default that of the data folder.
        device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.
        precision: `auto`, `fp32`, `fp16` or `bf16`.
        track: Shows progress.

    Raises:
        UsageError: A path holds no model, or one for another task; the models do not fit each
            other; or another process is writing the table.
        LayoutError: The folder holds no cases.
        EnvironmentalError: The table cannot be written, or the device is not available.

    Example:
        >>> measured = features_of_folder(Path("data"), Path("features.csv"))
        >>> len(measured.results), len(measured.failures)
        (6, 0)
    """
    config = load_config(values={} if labels is None else {"cases.labels": labels})
    clinical = read_clinical_tables(data, tables)
    cases_path = (prepared_path or prepared_path_of(data)) / CASES_NAME
    index = open_index(data, cases_path, config, n_workers=available_cpus(), track=track)
    cases = with_clinical(index.cases, clinical)
    on_device = choose_device(device, precision)
    networks = load_networks(autoencoder, segmentations, on_device, clinical, cases)
    extract = partial(extract_row, networks=networks)
    with alone_at(output):
        # in this process, which holds the networks on the device
        measured = map_cases(extract, cases, "features", track=track)
        write_failures(measured.failures, output.with_name("failures.csv"))
        write_features(measured.results, output)
    return measured


def load_networks(
    autoencoder: Path | None,
    segmentations: Sequence[Path],
    device: Device,
    clinical: ClinicalTable,
    cases: Sequence[Case],
) -> Networks:
    """Load runs and the lists of cases that they were trained on."""
    all_years = partial(with_patients, clinical=clinical, cases=cases)
    encoder = None
    if autoencoder is not None:
        model = Reconstructor.load(autoencoder, device).model
        if (size := model.members[0].window.size) is not None:
            patches = f"patches of {shape_text(size)} voxels"
            msg = f"{autoencoder} was trained on {patches}; expected whole brains: --patch whole"
            raise UsageError(msg)
        encoder = all_years(model, autoencoder)
    # raises if the models do not fit each other
    read_together(segmentations)
    segmenters = [all_years(load_model([path], device), path) for path in segmentations]
    spacings_mm = {model.identity.spacing_mm for model in (encoder, *segmenters) if model}
    if len(spacings_mm) > 1:
        msg = f"the runs were trained at different spacings, {sorted(spacings_mm)} mm; give runs of one"
        raise UsageError(msg)
    return Networks(
        clinical=clinical,
        autoencoder=encoder,
        segmentations=tuple(segmenters),
        spacing_mm=next(iter(spacings_mm), _USUAL_SPACING_MM),
    )


def extract_row(case: Case, *, networks: Networks) -> Row:
    """Measure one case."""
    loaded = load_case(case)
    scan = prepare_scan(loaded, networks.spacing_mm)
    ids = patient_ids(networks.clinical, case.case_id, case.patient_id)
    labels_seen: Seen | None = None
    if loaded.label is None or loaded.convention is None:
        tumour, labels_seen = _predicted_tumour(scan, networks.segmentations, ids)
    else:
        tumour = tumour_of(scan, loaded.label, loaded.convention)
    patient = networks.clinical.row(case.case_id)
    row: Row = {
        "case_id": case.case_id,
        "patient_id": case.patient_id,
        "labels_from": PREDICTION if labels_seen else REFERENCE,
        LABELS_SEEN: labels_seen or "",
        "resection": patient.resection if patient else "",
    }
    latent: dict[str, float] = {}
    if networks.autoencoder is not None:
        row[LATENT_SEEN] = networks.autoencoder.seen(*ids)
        latent = encode(networks.autoencoder, scan)
    age = nan if case.facts.age_years is None else case.facts.age_years
    return row | {AGE: age} | measure_shape(tumour) | measure_intensity(tumour) | latent


@torch.inference_mode()
def encode(autoencoder: Model, scan: Scan) -> dict[str, float]:
    """Return the latent vector of a scan.

    It is computed in float32 on every device: one pass costs little, and features must be exact.
    """
    (member,) = autoencoder.members
    network = cast("Autoencoder", member.network)
    image = torch.from_numpy(scan.image)[list(member.channels)][None]
    values = network.encode(image.to(autoencoder.device.torch_device))[0].cpu().numpy()
    if n_broken := int(np.count_nonzero(~np.isfinite(values))):
        problem = f"a latent vector with NaN or infinity in {counted(n_broken, 'value')}"
        case_id, next_step = scan.case.case_id, "Train the model again."
        raise CaseError(case_id, "(all)", problem, "finite numbers", next_step)
    return {f"latent0_{index:03d}": float(value) for index, value in enumerate(values)}


def patient_ids(clinical: ClinicalTable, case_id: str, patient_id: str) -> frozenset[str]:
    """Return the ids of the patient of a case in the releases of all years.

    Two cases of one patient share at least one.
    """
    row = clinical.row(case_id)
    names = {case_id, patient_id, *([row.ids[0]] if row else [])}
    return frozenset(name.lower() for name in names)


def with_patients(
    model: Model, path: Path, clinical: ClinicalTable, cases: Sequence[Case]
) -> Model:
    """Return a model whose training cases have the ids of all years of their patients."""
    patients = {case.case_id: case.patient_id for case in cases}
    training = []
    for known in model.training_cases:
        if not known.is_complete:
            log.warning("%s does not name all cases it was trained on: others are unknown", path)
        pairs = ((case_id, patients.get(case_id, case_id)) for case_id in known.ids)
        ids = {name for pair in pairs for name in patient_ids(clinical, *pair)}
        training.append(TrainingCases(ids=tuple(ids), is_complete=known.is_complete))
    return replace(model, training_cases=tuple(training))


def _predicted_tumour(
    scan: Scan, networks: Sequence[Model], ids: frozenset[str]
) -> tuple[Tumour, Seen]:
    """Predict a label map by the mean of the networks that saw the patient least."""
    if not networks:
        next_step = "Give a run with --model."
        raise CaseError(scan.case.case_id, "(none)", "no label map", "one, or a network", next_step)
    fewest = min(model.seen(*ids) for model in networks)
    models = [model for model in networks if model.seen(*ids) == fewest]
    members = tuple(member for model in models for member in model.members)
    result = Predictor(model=replace(models[0], members=members)).predict_scan(scan)
    labels = Volume(array=result.label_map, geometry=scan.geometry, file="(predicted)")
    return tumour_of(scan, oriented(labels), result.convention), fewest


def tumour_of(scan: Scan, labels: Volume, convention: LabelConvention) -> Tumour:
    """Combine a scan with its label map (X, Y, Z), in the axes of BraTS; labels anywhere are kept."""
    image = scan.on_scan_spacing(scan.image)
    labelled = bounding_box(labels.array > 0)
    joined = scan.scan_box if labelled is None else scan.scan_box.joined(labelled)
    inner = scan.scan_box.seen_from(joined.start)
    return Tumour(
        image=np.stack([inner.placed(volume, joined.shape) for volume in image]),
        regions=regions_of(np.ascontiguousarray(labels.array[joined.slices]), convention),
        spacing_mm=labels.geometry.spacing_mm,
    )


def measure_shape(tumour: Tumour) -> dict[str, float]:
    """Measure size, shape and position of the regions of a tumour; NaN where a region is missing.

    Sphericity and its cube, the compactness, are 1 for a ball and less for any other shape. Steps of
    voxels enlarge the surface, so that a ball of cubic voxels has a sphericity of 0.92. Of a few voxels
    the surface is too small, because it cuts their corners: they count as balls.
    """
    brain, spacing_mm = tumour.brain, tumour.spacing_mm
    voxel_mm3 = prod(spacing_mm)
    parts = measure_parts(tumour.regions, voxel_mm3)
    ml = {part.name: part.ml for part in parts}
    ml["brain"] = np.count_nonzero(brain) * voxel_mm3 / MM3_PER_ML
    features: dict[str, float] = {f"{name}_ml": value for name, value in ml.items()}
    features |= {f"{part.name}_components": part.n_components for part in parts}
    features |= {f"{a}_{b}_ratio": ml[a] / ml[b] if ml[b] else nan for a, b in _RATIOS}
    centre_mm = _centroid_mm(brain, spacing_mm)
    for name, region in zip(REGIONS, tumour.regions, strict=True):
        surface = surface_mm2(region, spacing_mm)
        sphericity = distance = nan
        if surface:
            sphericity = min(1.0, pi ** (1 / 3) * (6 * ml[name] * MM3_PER_ML) ** (2 / 3) / surface)
            distance = float(np.linalg.norm(_centroid_mm(region, spacing_mm) - centre_mm))
        features |= {
            f"{name}_surface_mm2": surface,
            f"{name}_sphericity": sphericity,
            f"{name}_compactness": sphericity**3,
            f"{name}_centre_distance_mm": distance,
        }
    return features


def measure_intensity(tumour: Tumour) -> dict[str, float]:
    """Measure the intensities of every modality in the brain, in WT, TC and ET, and in slabs.

    All features of a missing region are NaN.
    """
    brain = tumour.brain
    masks = {"brain": brain} | dict(zip(REGIONS, tumour.regions & brain, strict=True))
    features: dict[str, float] = {}
    for modality, image in zip(MODALITIES, tumour.image, strict=True):
        for name, mask in masks.items():
            statistics = _statistics(image, mask)
            if name == "brain":
                # they are 0 and 1 by the normalisation
                del statistics["mean"], statistics["std"]
            features |= {f"{modality}_{name}_{key}": value for key, value in statistics.items()}
        slabs = zip(np.array_split(image, N_SLABS), np.array_split(brain, N_SLABS), strict=True)
        for number, (slab, mask) in enumerate(slabs):
            mean = float(slab[mask].mean(dtype=np.float64)) if mask.any() else nan
            features[f"{modality}_slab{number:02d}_mean"] = mean
    return features


def _centroid_mm(mask: Mask, spacing_mm: Spacing) -> Values:
    """Return the mean position (3,) of the voxels of a mask."""
    return np.argwhere(mask).mean(axis=0) * spacing_mm


def _statistics(image: npt.NDArray[np.float32], mask: Mask) -> dict[str, float]:
    values = image[mask].astype(np.float64)
    n = len(values) or nan
    mean, std = (float(values.mean()), float(values.std())) if len(values) else (nan, nan)
    above, below = values[values > mean], values[values < mean]
    skew, skew_above, skew_below = (_moment(stats.skew, part) for part in (values, above, below))
    # between neighbours along the third axis
    both = mask[:, :, 1:] & mask[:, :, :-1]
    differences = (image[:, :, 1:][both] - image[:, :, :-1][both]).astype(np.float64)
    levels = np.percentile(values, _PERCENTILES) if len(values) else np.full(3, nan)
    return {
        "skew": skew,
        "kurtosis": _moment(stats.kurtosis, values),
        "diff_skew": _moment(stats.skew, differences),
        "intensive_share": len(above) / n,
        "intensive_skew": skew_above,
        "non_intensive_share": len(below) / n,
        "non_intensive_skew": skew_below,
        "intensive_skew_difference": skew - skew_above,
        "non_intensive_skew_difference": skew - skew_below,
        "more_intensive_share": np.count_nonzero(values > mean + std) / n,
        "mean": mean,
        "std": std,
        **{f"p{p:02d}": float(level) for p, level in zip(_PERCENTILES, levels, strict=True)},
    }


def _moment(moment: Callable[[Values], float], values: Values) -> float:
    """Return skewness or kurtosis; NaN for fewer than three values, or equal ones."""
    is_degenerate = len(values) < _FEWEST_FOR_MOMENTS or values.min() == values.max()
    return nan if is_degenerate else float(moment(values))
