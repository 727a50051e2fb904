"""The features of many cases: scans in, a row of numbers for each out."""

import json
from dataclasses import dataclass
from functools import partial
from importlib.metadata import version
from pathlib import Path

from brats_seg.cases.case import Case, CaseIndex, ScanFile
from brats_seg.cases.many import Failure, map_cases
from brats_seg.cases.nifti import read_label_map
from brats_seg.errors import CaseError, UnusableCaseError, UsageError
from brats_seg.files import whole_file
from brats_seg.inference.scan import Scan, read_scan
from brats_seg.labels import convention_named
from brats_seg.progress import Track, untracked
from brats_seg.survival.leakage import Leakage
from brats_seg.survival.networks import Networks
from brats_seg.survival.radiomics import (
    Feature,
    Tumour,
    measure_intensity,
    measure_shape,
    tumour_of,
)
from brats_seg.survival.table import AGE, FeatureRow

REFERENCE, PREDICTION = "reference", "prediction"
"""Where a label map came from."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Extraction:
    """What became of the cases of a data folder."""

    rows: tuple[FeatureRow, ...]
    failures: tuple[Failure, ...]


def extract_features(
    index: CaseIndex, networks: Networks, *, predicted: bool, track: Track = untracked
) -> Extraction:
    """Measure every case of an index; one that cannot be measured does not stop the others.

    Args:
        index: The cases, with ages and resections where they are known.
        networks: What latent vectors and predicted label maps come from.
        predicted: Whether label maps are predicted even where there is a reference.
        track: Shows how far the work is.

    Raises:
        UsageError: Label maps are to be predicted, and there is no network for it.
    """
    if predicted and networks.segmenter is None:
        msg = "predicted label maps were asked for; expected a run to predict them: --segmentation"
        raise UsageError(msg)
    extract = partial(extract_row, networks=networks, predicted=predicted)
    # the networks are in this process
    done = map_cases(extract, index.cases, "features", n_workers=0, track=track)
    return Extraction(rows=done.results, failures=done.failures)


def extract_row(case: Case, networks: Networks, *, predicted: bool) -> FeatureRow:
    """Measure one case.

    Raises:
        CaseError: It cannot be read, has no label map and no network to predict one, or is not
            what the network expects.
    """
    if case.problems:
        raise UnusableCaseError(case.case_id, case.problems)
    scan = read_scan(case, networks.spacing_mm)
    keys = networks.people.keys(case.case_id, case.patient_id)
    tumour, seen = (
        _of_prediction(case, scan, networks, keys)
        if predicted or case.label is None
        else (_of_reference(case, case.label, scan), None)
    )
    latent = [
        feature
        for number, encoder in enumerate(networks.encoders)
        for feature in encoder.encode(scan, number)
    ]
    age = float("nan") if case.age_years is None else case.age_years
    clinical = networks.people.clinical.row(case.case_id)
    return FeatureRow(
        case_id=case.case_id,
        patient_id=case.patient_id,
        labels_from=REFERENCE if seen is None else PREDICTION,
        labels_leakage=seen,
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
    """Write down as JSON what a table of features was made from.

    Raises:
        EnvironmentalError: The file cannot be written.
    """
    content = {
        "data": str(index.root),
        "autoencoders": [str(encoder.path) for encoder in networks.encoders],
        "segmentations": [str(p) for p in networks.segmenter.paths] if networks.segmenter else [],
        "version": version("brats_seg"),
    }
    with whole_file(path) as beside:
        beside.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")


def _of_reference(case: Case, label: ScanFile, scan: Scan) -> Tumour:
    labels = read_label_map(case.path_of(label), case_id=case.case_id)
    return tumour_of(scan, labels, convention_named(case.label_convention))


def _of_prediction(
    case: Case, scan: Scan, networks: Networks, keys: frozenset[str]
) -> tuple[Tumour, Leakage]:
    if networks.segmenter is None:
        found, expected = "no label map", "one, or a network to predict it"
        next_step = "Give a run with --segmentation, or leave the case out."
        raise CaseError(case.case_id, "(none)", found, expected, next_step)
    labels, convention, seen = networks.segmenter.segment(scan, keys)
    return tumour_of(scan, labels, convention), seen
