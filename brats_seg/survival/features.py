"""Extract features from the cases of a folder: scans in, a row of numbers for each case out.

Networks that were not trained on the patient of a case are applied to it where there are any, and the
table says whether they were. A run lists the cases that it was trained on in its split.
"""

import logging
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path
from typing import Generic, TypeVar, cast

import numpy as np
import torch

from brats_seg.cases.case import Case, CaseIndex, load_case
from brats_seg.cases.clinical import ClinicalTable, read_clinical_tables, with_clinical
from brats_seg.cases.folds import SPLIT_NAME, read_split
from brats_seg.cases.layouts import parse_case_id
from brats_seg.cases.many import Failure, map_cases, write_failures
from brats_seg.cases.nifti import Volume, oriented
from brats_seg.config_text import load_config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import open_index, prepared_path_of
from brats_seg.errors import CaseError, UsageError, counted
from brats_seg.files import alone_at, write_json
from brats_seg.inference.method import Scan, prepare_scan
from brats_seg.inference.model import Model, load_model, read_together
from brats_seg.inference.predict import predict_scan
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.models.autoencoder import Autoencoder
from brats_seg.progress import Track, untracked
from brats_seg.runtime.device import Device, choose_device
from brats_seg.survival.radiomics import Tumour, measure_intensity, measure_shape, tumour_of
from brats_seg.survival.table import (
    AGE,
    LABELS_SEEN,
    LATENT_SEEN,
    RESECTION,
    SEEN,
    Seen,
    write_features,
)
from brats_seg.voxels.grids import Spacing

log = logging.getLogger(__name__)

REFERENCE, PREDICTION = "reference", "prediction"
"""Sources of a label map."""
_USUAL_SPACING_MM = (1.0, 1.0, 1.0)
"""Spacing of every BraTS release."""

Network = TypeVar("Network")
Row = dict[str, str | float]


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """Features of the cases that could be measured, and the failures of the others."""

    rows: tuple[Row, ...]
    """Cells of the table of features by column."""
    failures: tuple[Failure, ...]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Trained(Generic[Network]):
    """A network and the patients that it was trained on."""

    path: Path
    network: Network
    patients: frozenset[str] | None
    """Ids of the patients, of `patient_ids`; None where the run has no record."""

    def seen(self, ids: frozenset[str]) -> Seen:
        """Return whether the network was trained on the patient with these ids."""
        if self.patients is None:
            return "unknown"
        return "yes" if self.patients & ids else "no"


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Networks:
    """Networks behind one table of features."""

    clinical: ClinicalTable
    autoencoder: Trained[Reconstructor] | None = None
    segmentations: tuple[Trained[Model], ...] = ()

    @property
    def spacings_mm(self) -> list[Spacing]:
        """Spacing of the scans that each network was trained on."""
        spacings = [one.network.identity.spacing_mm for one in self.segmentations]
        return spacings + ([self.autoencoder.network.spacing_mm] if self.autoencoder else [])

    @property
    def spacing_mm(self) -> Spacing:
        """Spacing of the scans that the networks were trained on; 1 mm without networks."""
        return next(iter(self.spacings_mm), _USUAL_SPACING_MM)


def features_of_folder(  # noqa: PLR0913 - each is a choice of its own
    data: Path,
    output: Path,
    *,
    autoencoder: Path | None = None,
    segmentations: Sequence[Path] = (),
    predicted: bool = False,
    tables: Sequence[Path] = (),
    labels: str | None = None,
    prepared_path: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
    track: Track = untracked,
) -> Extraction:
    """Extract the features of all cases of a folder and write them as a table.

    `failures.csv` is written beside the table, and a JSON file of the same name lists its sources. Of
    several runs, those that were not trained on the patient are applied to a case.

    Args:
        data: Folder of scans, of any BraTS release.
        output: The table, a CSV file.
        autoencoder: Run of an autoencoder, for latent vectors.
        segmentations: Runs that predict label maps where there is no reference.
        predicted: Whether label maps of all cases are predicted.
        tables: Tables of ages, resections or ids, besides those below `data`.
        labels: Label convention of all cases, if detection is wrong.
        prepared_path: Folder of prepared cases, which holds the index; `prepared_path_of` the data
            folder by default.
        device: `auto`, `cpu`, `cuda`, `cuda:1` or `mps`.
        precision: `auto`, `fp32`, `fp16` or `bf16`.
        track: Shows progress.

    Raises:
        UsageError: A path holds no model, or one for another task; the models do not fit each
            other; label maps are to be predicted without a run for it; or another process is
            writing the table.
        LayoutError: The folder holds no cases.
        EnvironmentalError: The table cannot be written, or the device is not available.

    Example:
        >>> found = features_of_folder(Path("data"), Path("features.csv"))
        >>> len(found.rows), len(found.failures)
        (6, 0)
    """
    config = load_config(values={} if labels is None else {"cases.labels": labels})
    clinical = read_clinical_tables(data, tables)
    cases_path = (prepared_path or prepared_path_of(data)) / "cases.csv"
    index = open_index(data, cases_path, config, n_workers=available_cpus(), track=track)
    index = replace(index, cases=with_clinical(index.cases, clinical))
    networks = load_networks(
        autoencoder, segmentations, choose_device(device, precision), clinical, index.cases
    )
    with alone_at(output):
        # first, so that a folder that cannot be written to is noticed at once
        write_origin(index, networks, output.with_suffix(".json"))
        extraction = extract_features(index, networks, predicted=predicted, track=track)
        write_failures(extraction.failures, output.with_name("failures.csv"))
        write_features(extraction.rows, output)
    return extraction


def load_networks(
    autoencoder: Path | None,
    segmentations: Sequence[Path],
    device: Device,
    clinical: ClinicalTable,
    cases: Sequence[Case],
) -> Networks:
    """Load runs and the lists of cases that they were trained on.

    Raises:
        UsageError: A path holds no model, or one for another task; or the models do not fit each
            other.
    """
    patients = partial(trained_patients, clinical=clinical, cases=cases)
    encoder = None
    if autoencoder is not None:
        reconstructor = Reconstructor.load(autoencoder, device)
        encoder = Trained(path=autoencoder, network=reconstructor, patients=patients(autoencoder))
        _check_whole(encoder)
    if segmentations:
        # raises if the models do not fit each other
        read_together(segmentations)
    networks = Networks(
        clinical=clinical,
        autoencoder=encoder,
        segmentations=tuple(
            Trained(path=path, network=load_model([path], device), patients=patients(path))
            for path in segmentations
        ),
    )
    if len(set(networks.spacings_mm)) > 1:
        msg = (
            f"the runs were trained on scans of different spacings, {networks.spacings_mm} mm; "
            "expected one. Give runs that were trained on the same data."
        )
        raise UsageError(msg)
    return networks


def extract_features(
    index: CaseIndex, networks: Networks, *, predicted: bool, track: Track = untracked
) -> Extraction:
    """Measure every case of an index; one that cannot be measured does not stop the others.

    Args:
        index: Cases, with ages and resections where they are known.
        networks: Networks for latent vectors and predicted label maps.
        predicted: Whether label maps are predicted even where there is a reference.
        track: Shows progress.

    Raises:
        UsageError: Label maps are to be predicted, and there is no network for it.
    """
    if predicted and not networks.segmentations:
        msg = "predicted label maps were asked for; expected a run to predict them: --model"
        raise UsageError(msg)
    # in this process, which holds the networks on the device
    measured = map_cases(
        partial(extract_row, networks=networks, predicted=predicted),
        index.cases,
        "features",
        track=track,
    )
    return Extraction(rows=measured.results, failures=measured.failures)


def extract_row(case: Case, *, networks: Networks, predicted: bool) -> Row:
    """Measure one case.

    Raises:
        CaseError: The case cannot be read, or has no label map and no network to predict one, or is
            not what the network expects.
    """
    loaded = load_case(case, with_label=not predicted)
    scan = prepare_scan(loaded, networks.spacing_mm)
    ids = patient_ids(networks.clinical, case.case_id, case.patient_id)
    labels_seen: Seen | None = None
    if loaded.label is None or loaded.convention is None:
        tumour, labels_seen = _predicted_tumour(scan, networks, ids)
    else:
        tumour = tumour_of(scan, loaded.label, loaded.convention)
    clinical = networks.clinical.row(case.case_id)
    row: Row = {
        "case_id": case.case_id,
        "patient_id": case.patient_id,
        "labels_from": PREDICTION if labels_seen else REFERENCE,
        LABELS_SEEN: labels_seen or "",
        RESECTION: clinical.resection if clinical else "",
    }
    encoder, latent = networks.autoencoder, {}
    if encoder is not None:
        row[LATENT_SEEN] = encoder.seen(ids)
        latent = encode(encoder.network, scan)
    age = float("nan") if case.facts.age_years is None else case.facts.age_years
    return row | {AGE: age} | measure_shape(tumour) | measure_intensity(tumour) | latent


@torch.inference_mode()
def encode(autoencoder: Reconstructor, scan: Scan) -> dict[str, float]:
    """Return the latent vector of a scan.

    It is computed in float32 on every device: one pass costs little, and features must be exact.

    Raises:
        CaseError: The vector is not finite.
    """
    (member,), device = autoencoder.model.members, autoencoder.model.device
    network = cast("Autoencoder", member.network)
    image = torch.from_numpy(scan.image)[list(member.channels)][None]
    values = network.encode(image.to(device.torch_device))[0].cpu().numpy()
    n_broken = int(np.count_nonzero(~np.isfinite(values)))
    if n_broken:
        found = f"a latent vector with NaN or infinity in {counted(n_broken, 'value')}"
        next_step = "The model is broken: train it again."
        raise CaseError(scan.case_id, "(all)", found, "finite numbers", next_step)
    return {f"latent0_{index:03d}": float(value) for index, value in enumerate(values)}


def patient_ids(clinical: ClinicalTable, case_id: str, patient_id: str) -> frozenset[str]:
    """Return the ids of the patient of a case in the releases of all years.

    Two cases of one patient share at least one.
    """
    row = clinical.row(case_id)
    names = {case_id, patient_id, *([row.ids[0]] if row else [])}
    return frozenset(name.lower() for name in names)


def trained_patients(
    path: Path, clinical: ClinicalTable, cases: Sequence[Case]
) -> frozenset[str] | None:
    """Return the ids of the patients that a run was trained on; None where it has no record.

    `path` is its folder or a checkpoint in it.

    Raises:
        FoldError: The split of the run cannot be read.
    """
    split_path = (path if path.is_dir() else path.parent) / SPLIT_NAME
    if not split_path.exists():
        log.warning("%s has no %s: whether it was trained on a case is unknown", path, SPLIT_NAME)
        return None
    patients = {case.case_id: case.patient_id for case in cases}
    ids: set[str] = set()
    for case_id in read_split(split_path).train:
        patient = patients.get(case_id) or parse_case_id(case_id)[1]
        ids |= patient_ids(clinical, case_id, patient)
    return frozenset(ids)


def write_origin(index: CaseIndex, networks: Networks, path: Path) -> None:
    """Write the sources of a table of features as JSON."""
    encoder = networks.autoencoder
    content = {
        "data": str(index.root),
        "autoencoders": [str(encoder.path)] if encoder else [],
        "segmentations": [str(one.path) for one in networks.segmentations],
        "version": version("brats_seg"),
    }
    write_json(path, content)


def _predicted_tumour(scan: Scan, networks: Networks, ids: frozenset[str]) -> tuple[Tumour, Seen]:
    """Predict a label map by the mean of the networks that saw the patient least."""
    if not networks.segmentations:
        found, expected = "no label map", "one, or a network to predict it"
        next_step = "Give a run with --model, or leave the case out."
        raise CaseError(scan.case_id, "(none)", found, expected, next_step)
    least = min((one.seen(ids) for one in networks.segmentations), key=SEEN.index)
    models = [one.network for one in networks.segmentations if one.seen(ids) == least]
    members = tuple(member for model in models for member in model.members)
    result = predict_scan(replace(models[0], members=members), scan)
    labels = Volume(array=result.label_map, geometry=scan.geometry, file="(predicted)")
    return tumour_of(scan, oriented(labels), result.convention), least


def _check_whole(encoder: Trained[Reconstructor]) -> None:
    """Refuse an autoencoder of patches, whose latent vector does not describe a brain."""
    window = encoder.network.model.members[0].window
    if window.size is not None:
        size = "x".join(map(str, window.size))
        msg = (
            f"{encoder.path} was trained on patches of {size} voxels; expected an autoencoder of whole "
            "brains, whose latent vector describes one. Train it with --patch whole."
        )
        raise UsageError(msg)
