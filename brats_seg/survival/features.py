"""Extract features from the cases of a folder: scans in, a row of numbers for each case out.

Networks that were not trained on the patient of a case are applied to it where there are any, and the
table says whether they were. A run lists the cases that it was trained on in its split.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from math import nan
from pathlib import Path
from typing import cast

import numpy as np
import torch

from brats_seg.cases.case import Case, load_case
from brats_seg.cases.clinical import ClinicalTable, read_clinical_tables, with_clinical
from brats_seg.cases.many import MappedCases, map_cases, write_failures
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.config import load_config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import Seen, TrainingCases, open_index, prepared_path_of
from brats_seg.errors import CaseError, UsageError, counted
from brats_seg.files import alone_at
from brats_seg.inference.method import Scan, prepare_scan
from brats_seg.inference.model import Model, load_model, read_together
from brats_seg.inference.predict import Predictor
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.progress import Track, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.survival.radiomics import Tumour, measure_intensity, measure_shape, tumour_of
from brats_seg.survival.table import AGE, LABELS_SEEN, LATENT_SEEN, write_features
from brats_seg.voxels.grids import Spacing

log = logging.getLogger(__name__)

REFERENCE, PREDICTION = "reference", "prediction"
"""Sources of a label map."""
_USUAL_SPACING_MM = (1.0, 1.0, 1.0)
"""Spacing of every BraTS release."""

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


def features_of_folder(  # noqa: PLR0913 - each is a choice of its own
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

    `failures.csv` is written beside the table. Of several runs, those that were not trained on the
    patient are applied to a case.

    Args:
        data: Folder of scans, of any BraTS release.
        output: The table, a CSV file.
        autoencoder: Run of an autoencoder, for latent vectors.
        segmentations: Runs that predict label maps where there is no reference.
        tables: Tables of ages, resections or ids, besides those below `data`.
        labels: Label convention of all cases, if detection is wrong.
        prepared_path: Folder of prepared cases, which holds the index; `prepared_path_of` the data
            folder by default.
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
    cases_path = (prepared_path or prepared_path_of(data)) / "cases.csv"
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
            patches = f"patches of {'x'.join(map(str, size))} voxels"
            msg = f"{autoencoder} was trained on {patches}; expected whole brains: --patch whole"
            raise UsageError(msg)
        encoder = all_years(model, autoencoder)
    if segmentations:
        # raises if the models do not fit each other
        read_together(segmentations)
    segmenters = [all_years(load_model([path], device), path) for path in segmentations]
    networks = [*segmenters, *([encoder] if encoder else [])]
    spacings_mm = {model.identity.spacing_mm for model in networks}
    if len(spacings_mm) > 1:
        msg = f"the runs were trained at different spacings, {sorted(spacings_mm)} mm; expected one"
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
    n_broken = int(np.count_nonzero(~np.isfinite(values)))
    if n_broken:
        problem = f"a latent vector with NaN or infinity in {counted(n_broken, 'value')}"
        raise CaseError(scan.case_id, "(all)", problem, "finite numbers", "Train the model again.")
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
            log.warning("%s does not name all cases that it was trained on", path)
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
        raise CaseError(scan.case_id, "(none)", "no label map", "one, or a network", next_step)
    least = min(model.seen(*ids) for model in networks)
    models = [model for model in networks if model.seen(*ids) == least]
    members = tuple(member for model in models for member in model.members)
    result = Predictor(model=replace(models[0], members=members)).predict_scan(scan)
    labels = Volume(array=result.label_map, geometry=scan.geometry, file="(predicted)")
    return tumour_of(scan, oriented(labels), result.convention), least
