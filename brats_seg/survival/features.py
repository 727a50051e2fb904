"""Extract features from the cases of a folder: scans in, a row of numbers for each case out."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import version
from pathlib import Path

from brats_seg.cases.case import Case, CaseIndex, load_case
from brats_seg.cases.clinical import read_clinical_tables, with_clinical
from brats_seg.cases.many import Failure, map_cases, write_failures
from brats_seg.config_text import load_config
from brats_seg.cpu_threads import available_cpus
from brats_seg.data.fold import open_index, prepared_path_of
from brats_seg.errors import CaseError, UsageError
from brats_seg.files import alone_at, write_json
from brats_seg.inference.method import Scan, prepare_scan
from brats_seg.progress import Track, untracked
from brats_seg.runtime.device import choose_device
from brats_seg.survival.leakage import Leakage, People
from brats_seg.survival.networks import Networks
from brats_seg.survival.radiomics import (
    Feature,
    Tumour,
    measure_intensity,
    measure_shape,
    tumour_of,
)
from brats_seg.survival.table import AGE, FeatureRow, write_features

REFERENCE, PREDICTION = "reference", "prediction"
"""Sources of a label map."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """Features of the cases that could be measured, and the failures of the others."""

    rows: tuple[FeatureRow, ...]
    failures: tuple[Failure, ...]


def features_of_folder(  # noqa: PLR0913 - each is a choice of its own
    data: Path,
    output: Path,
    *,
    autoencoders: Sequence[Path] = (),
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
        autoencoders: Runs of autoencoders, for latent vectors.
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
    networks = Networks.load(
        autoencoders,
        segmentations,
        choose_device(device, precision),
        People(clinical=clinical),
        index.cases,
    )
    with alone_at(output):
        # first, so that a folder that cannot be written to is noticed at once
        write_origin(index, networks, output.with_suffix(".json"))
        extraction = extract_features(index, networks, predicted=predicted, track=track)
        write_failures(extraction.failures, output.with_name("failures.csv"))
        write_features(extraction.rows, output)
    return extraction


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
    if predicted and networks.segmenter is None:
        msg = "predicted label maps were asked for; expected a run to predict them: --model"
        raise UsageError(msg)
    # in this process, which holds the networks on the device
    found = map_cases(
        partial(extract_row, networks=networks, predicted=predicted),
        index.cases,
        "features",
        track=track,
    )
    return Extraction(rows=found.results, failures=found.failures)


def extract_row(case: Case, *, networks: Networks, predicted: bool) -> FeatureRow:
    """Measure one case.

    Raises:
        CaseError: The case cannot be read, or has no label map and no network to predict one, or is
            not what the network expects.
    """
    loaded = load_case(case, with_label=not predicted)
    scan = prepare_scan(loaded, networks.spacing_mm)
    keys = networks.people.keys(case.case_id, case.patient_id)
    if loaded.label is None or loaded.convention is None:
        tumour, leakage = _of_prediction(scan, networks, keys)
    else:
        tumour, leakage = tumour_of(scan, loaded.label, loaded.convention), None
    latent = [
        feature
        for number, encoder in enumerate(networks.encoders)
        for feature in encoder.encode(scan, number)
    ]
    age = float("nan") if case.facts.age_years is None else case.facts.age_years
    clinical = networks.people.clinical.row(case.case_id)
    return FeatureRow(
        case_id=case.case_id,
        patient_id=case.patient_id,
        labels_from=REFERENCE if leakage is None else PREDICTION,
        labels_leakage=leakage,
        latent_leakage=tuple(encoder.training.leakage(keys) for encoder in networks.encoders),
        resection=clinical.resection if clinical else "",
        features=(
            Feature(name=AGE, value=age),
            *measure_shape(tumour),
            *measure_intensity(tumour),
            *latent,
        ),
    )


def write_origin(index: CaseIndex, networks: Networks, path: Path) -> None:
    """Write the sources of a table of features as JSON."""
    content = {
        "data": str(index.root),
        "autoencoders": [str(encoder.path) for encoder in networks.encoders],
        "segmentations": [str(p) for p in networks.segmenter.paths] if networks.segmenter else [],
        "version": version("brats_seg"),
    }
    write_json(path, content)


def _of_prediction(
    scan: Scan, networks: Networks, keys: frozenset[str]
) -> tuple[Tumour, Leakage | None]:
    if networks.segmenter is None:
        found, expected = "no label map", "one, or a network to predict it"
        next_step = "Give a run with --model, or leave the case out."
        raise CaseError(scan.case_id, "(none)", found, expected, next_step)
    labels, convention, leakage = networks.segmenter.segment(scan, keys)
    return tumour_of(scan, labels, convention), leakage
