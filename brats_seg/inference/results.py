"""Write results to a folder: label maps, pictures, a record of each case, and tables over all cases.

manifest.jsonl                 record of each case, or its failure; the last line of a case counts
volumes.csv, failures.csv
labels-brats2017.txt, .ctbl    label values and colours for ITK-SNAP and 3D Slicer

`result_files` names the files of a case. Layout `bids` is a BIDS derivative.
"""

import json
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any, Self

import numpy as np
from jinja2 import Environment, PackageLoader, StrictUndefined
from pydantic import TypeAdapter

from brats_seg.cases.case import Case
from brats_seg.cases.layouts import OUTPUT_MARKER, bids_letters, bids_name
from brats_seg.cases.many import Failure, write_failures
from brats_seg.cases.nifti import write_volume
from brats_seg.errors import UsageError, counted, printable
from brats_seg.evaluation.scores import IN_TRAINING, VOLUMES_NAME, absent_from
from brats_seg.files import explained_writing, locked, remove_leftovers, whole_file, write_json
from brats_seg.inference.method import Field, Scan
from brats_seg.inference.predict import Prediction, Summary
from brats_seg.inference.settings import PredictionSettings, ResultLayout
from brats_seg.labels import MODALITIES, REGIONS, LabelConvention, convention_named, regions_of
from brats_seg.tables import BETWEEN_TEXTS, write_table
from brats_seg.voxels.grids import find_orientation, reorient
from brats_seg.voxels.regions import PARTS
from brats_seg.wings import PredictedDice, find_wing

MANIFEST_NAME = "manifest.jsonl"
SCANS_NAME = "scans"
"""Folder of scans that were converted from DICOM, and of those that were prepared."""
NATIVE_NAME = "native"
"""Folder of label maps on the grids of the scanner."""
_LOCK_NAME = ".predicting.lock"
_VOLUME_COLUMNS = (
    *("case_id", "convention", "modalities", IN_TRAINING),
    *(f"{part}_{what}" for part in PARTS for what in ("ml", "components")),
    "warnings",
)
_DICE_COLUMNS = tuple(
    name
    for region in REGIONS
    for name in PredictedDice(region=region, dice=0, low=0, high=0).columns
)
# nothing is escaped in Markdown: `printable` keeps names and ids on their lines
TEMPLATES = Environment(
    loader=PackageLoader("brats_seg.inference"),
    undefined=StrictUndefined,
    trim_blocks=True,
    lstrip_blocks=True,
    keep_trailing_newline=True,
)
TEMPLATES.filters["printable"] = printable


class Record(Summary):
    """Record of a case: a line of `manifest.jsonl`."""

    key: str
    """Hash of scans, model and settings."""
    inputs: tuple[str, ...]
    """SHA-256 of the file of each modality, and the index of the volume in a 4-D file."""
    files: dict[str, str]
    """File that was read as each modality, with the index of the volume in a 4-D file."""
    model: str
    """Fingerprint of the model."""
    settings: PredictionSettings
    outputs: tuple[str, ...]
    """Files, relative to the output folder."""
    version: str
    """Version of brats_seg."""


_LINE: TypeAdapter[Record | Failure] = TypeAdapter(Record | Failure)


@dataclass(frozen=True, kw_only=True, slots=True)
class ResultFiles:
    """Names of the files of a case, relative to the folder of the results."""

    label_map: str
    probabilities: tuple[str, ...]
    """One for each region."""
    uncertainty: str
    preview: str
    page: str
    dicom: tuple[str, ...]
    """Segmentation, report and structure set of a case that was converted from DICOM."""


def result_files(layout: ResultLayout, case_id: str, convention: str) -> ResultFiles:
    """Return the names of the files of a case, in the label convention of that name.

    Example:
        >>> result_files("bids", "BraTS-GLI-00001-000", "brats2023").label_map
        'sub-BraTSGLI00001000/anat/sub-BraTSGLI00001000_desc-brats2023_dseg.nii.gz'
    """
    if layout == "bids":
        name = bids_name(case_id)
        start = f"{name.replace('_', '/')}/anat/{name}"
        labels = f"{start}_desc-{bids_letters(convention)}_dseg"
        regions = [f"{start}_label-{region.upper()}_probseg" for region in REGIONS]
        entropy = f"{start}_desc-entropy_probseg"
    else:
        labels, entropy = case_id, f"uncertainty/{case_id}"
        regions = [f"probabilities/{case_id}-{region}" for region in REGIONS]
    return ResultFiles(
        label_map=f"{labels}.nii.gz",
        probabilities=tuple(f"{region}.nii.gz" for region in regions),
        uncertainty=f"{entropy}.nii.gz",
        preview=f"previews/{case_id}.png",
        page=f"reports/{case_id}.html",
        dicom=tuple(f"{labels}{end}.dcm" for end in ("", "-report", "-structures")),
    )


def with_names_checked(
    cases: Sequence[Case], layout: ResultLayout, records: Mapping[str, Record]
) -> tuple[Case, ...]:
    """Return cases with a problem if in BIDS they have no name, or that of an earlier one or of earlier results."""
    if layout == "plain":
        return tuple(cases)
    in_bids = (name for name, record in records.items() if record.settings.layout == layout)
    owners, checked = {"sub-": "no case", **{bids_name(name): name for name in in_bids}}, []
    for case in cases:
        name = bids_name(case.case_id)
        if (owner := owners.setdefault(name, case.case_id)) != case.case_id:
            problem = (
                f"the name {name} in BIDS, which has letters and digits only: it is that of {owner}"
            )
            next_step = "Rename it, or write it with --layout plain."
            case = case.with_problem(problem, "a name of its own", next_step)
        checked.append(case)
    return tuple(checked)


def convention_remarks(records: Iterable[Record]) -> tuple[str, ...]:
    """Return a sentence for each label convention that was not that of the scans' own release."""
    pairs = ((r.convention, r.convention_reason) for r in records if r.convention_reason)
    return tuple(
        f"label convention written for {counted(n, 'case')}: {convention_named(name)}; {reason}"
        for (name, reason), n in sorted(Counter(pairs).items())
    )


def mark_as_results(folder: Path) -> None:
    """Mark a folder as results, so that nothing below it is read as scans."""
    path = folder / OUTPUT_MARKER
    if not path.exists():
        write_json(path, {"holds": "predictions"})


class OutputFolder:
    """Folder with the results of a batch; any process writes cases, one writes the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()
        self.entries = self._read_entries()
        """The latest record or failure of each case."""

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Lock the folder for this process, and remove temporary files before and after."""
        is_known = bool(self.entries) or (self.path / OUTPUT_MARKER).exists()
        if not is_known and any(self.path.glob("[!.]*.nii*")):
            # label maps may be called as results are
            msg = f"{self.path} holds NIfTI files that are no results: give another folder with --output"
            raise UsageError(msg)
        mark_as_results(self.path)
        msg = f"another process writes to {self.path}. Wait for it, or choose another folder."
        with locked(self.path / _LOCK_NAME, when_taken=UsageError(msg)):
            self._tidy_up()
            self.entries = self._read_entries()
            yield self
            # temporary files of workers that were killed
            self._tidy_up()

    def _read_entries(self) -> dict[str, Record | Failure]:
        path, entries = self.path / MANIFEST_NAME, dict[str, Record | Failure]()
        text = path.read_text(encoding="utf-8", errors="replace") if path.is_file() else ""
        for line in text.splitlines():
            # of one that is truncated, damaged or of another version, the case is predicted again
            with suppress(ValueError, RecursionError):
                entry = _LINE.validate_python(json.loads(line))
                entries[entry.case_id] = entry
        return entries

    def records(self) -> dict[str, Record]:
        """Return the record of each case that was predicted last time."""
        return {name: entry for name, entry in self.entries.items() if isinstance(entry, Record)}

    def is_finished(self, record: Record, key: str) -> bool:
        """Return whether a record has the same scans, model and settings, and its files are there."""
        is_recorded = record.key == key and not self._mark_of_writing(record.case_id).exists()
        return is_recorded and all((self.path / name).exists() for name in record.outputs)

    def write_case(
        self, scan: Scan, prediction: Prediction, settings: PredictionSettings, source: Any = None
    ) -> tuple[tuple[str, ...], str]:
        """Write the files of a case, the label map last, in place of those of an earlier prediction.

        Returns the names of the files, and the reason if those in DICOM could not be written. `source` is
        what the scan was made from, see `dicom.preprocess.ScanSource`.
        """
        if scan.case.case_id in self.entries:
            # until the case is recorded again, its files are not those of the earlier record
            with whole_file(self._mark_of_writing(scan.case.case_id)) as mark:
                mark.touch()
        names = result_files(settings.layout, scan.case.case_id, prediction.convention.name)
        pictures = names.uncertainty, names.preview, names.page
        for old in map(self.path.joinpath, (*names.probabilities, *pictures, *names.dicom)):
            with explained_writing(old):
                old.unlink(missing_ok=True)
        written, remark = self._write_for_scanner(scan, prediction, names, source)
        fields: dict[str, Field] = {}
        if prediction.probabilities is not None:
            fields.update(zip(names.probabilities, prediction.probabilities, strict=True))
        if prediction.uncertainty is not None:
            fields[names.uncertainty] = prediction.uncertainty
        for name, values in fields.items():
            if settings.layout == "plain":
                mark_as_results((self.path / name).parent)
            # NIfTI has no half precision, but values of that precision compress as well
            rounded = values.astype(np.float16).astype(np.float32)
            write_volume(self.path / name, rounded, scan.geometry)
        written += fields
        if settings.preview:
            write_preview(scan, prediction, self.path / names.preview)
            written.append(names.preview)
        write_volume(self.path / names.label_map, prediction.label_map, scan.geometry)
        return (*written, names.label_map), remark

    def _write_for_scanner(
        self, scan: Scan, prediction: Prediction, names: ResultFiles, source: Any
    ) -> tuple[list[str], str]:
        """Write the label map on the grids of the files that a scan was made from, and in DICOM."""
        written, remark, wing = list[str](), "", find_wing("dicom")
        if wing is None or source is None:
            return written, remark
        case_id, label_map, grid = scan.case.case_id, prediction.label_map, scan.geometry
        for modality, *native in source.on_native_grids(case_id, label_map, grid):
            written.append(f"{NATIVE_NAME}/{case_id}_{modality}.nii.gz")
            write_volume(self.path / written[-1], *native)
            if modality == "t1c":
                label_map, grid = native
        if source.series:
            paths, about = [self.path / name for name in names.dicom], prediction.summary.remark
            remark = wing.write_segmentation(
                paths, label_map, grid, prediction.convention, source, about
            )
            written += () if remark else names.dicom
        return written, remark

    def append(self, entry: Record | Failure, *, is_new: bool = True) -> None:
        """Record a case in the table of volumes and the manifest, unless the same is recorded already.

        Files that an earlier prediction of the case has left are removed; after a failure, all of them,
        unless it says nothing new of the case.
        """
        path = self.path / MANIFEST_NAME
        with explained_writing(path), self._lock:
            earlier, mark = self.entries.get(entry.case_id), self._mark_of_writing(entry.case_id)
            is_kept = isinstance(entry, Failure) and isinstance(earlier, Record) and not is_new
            # a case that was written again may have taken as many milliseconds as before
            if is_kept or (entry == earlier and not mark.exists()):
                return
            if isinstance(earlier, Record):
                page = result_files("plain", entry.case_id, "").page
                kept = (*entry.outputs, page) if isinstance(entry, Record) else ()
                for old in map(self.path.joinpath, {*earlier.outputs, page}.difference(kept)):
                    # a record may come from elsewhere
                    is_below = old.parent.resolve().is_relative_to(self.path.resolve())
                    if is_below and not old.is_dir():
                        old.unlink(missing_ok=True)
            self.entries[entry.case_id] = entry
            self._write_volumes()
            # ASCII alone, because file names need not be UTF-8, and may hold separators of lines
            line = json.dumps(_LINE.dump_python(entry, mode="json")).encode() + b"\n"
            with path.open("a+b") as file:
                if file.tell():
                    # the last line may be of a process that was killed
                    file.seek(-1, os.SEEK_END)
                    line = line if file.read() == b"\n" else b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
            mark.unlink(missing_ok=True)

    def write_tables(self, failures: Iterable[Failure]) -> None:
        """Write the volumes of all cases in the folder, their label values, and the failures."""
        done = self._write_volumes()
        write_failures(sorted(failures, key=lambda one: one.case_id), self.path / "failures.csv")
        for layout, name in sorted({(r.settings.layout, r.convention) for r in done}):
            for file_name, text in label_tables(layout, convention_named(name)).items():
                with whole_file(self.path / file_name) as new_file:
                    new_file.write_text(text)

    def _write_volumes(self) -> list[Record]:
        done = [record for _, record in sorted(self.records().items())]
        columns = _VOLUME_COLUMNS + _DICE_COLUMNS * any(record.predicted_dice for record in done)
        write_table(self.path / VOLUMES_NAME, columns, map(_volume_row, done))
        return done

    def _mark_of_writing(self, case_id: str) -> Path:
        # a name has at most 255 bytes; a case with so long an id fails before its files are written
        return self.path / f".{os.fsdecode(os.fsencode(case_id)[:200])}.writing"

    def _tidy_up(self) -> None:
        below = ("*/", "sub-*/**/anat", f"{SCANS_NAME}/**/")
        for folder in (self.path, *(path for name in below for path in self.path.glob(name))):
            remove_leftovers(folder)


def write_preview(scan: Scan, prediction: Prediction, path: Path) -> None:
    """Draw a case to a PNG file, with the patient's left on the right as radiologists see it."""
    # matplotlib takes long to import
    from brats_seg.figures.cases import planes_figure, select_shown
    from brats_seg.figures.sections import Grid, write_figure

    orientation = find_orientation(scan.geometry.affine)
    regions = regions_of(reorient(prediction.label_map, orientation), prediction.convention)
    images = {}
    for name in select_shown(scan.case.modalities):
        index = MODALITIES.index(name)
        image = scan.on_scan_spacing(scan.image[index : index + 1])[0]
        images[name] = reorient(scan.on_scan_grid(image), orientation)
    absent = absent_from(scan.case.modalities)
    without = f", predicted without {', '.join(absent)}" if absent else ""
    grid = Grid(spacing_mm=scan.spacing_mm)
    write_figure(planes_figure(images, regions, grid, title=f"{scan.case.case_id}{without}"), path)


def label_tables(layout: ResultLayout, convention: LabelConvention) -> dict[str, str]:
    """Return the texts, by file name, that other programs need to show label maps, or to read BIDS."""
    # matplotlib takes long to import
    from brats_seg.figures.cases import tissue_colours

    # for ITK-SNAP and 3D Slicer
    names = {f"labels-{convention.name}{end}": f"labels{end}" for end in (".txt", ".ctbl")}
    if layout == "bids":
        names[f"desc-{bids_letters(convention.name)}_dseg.tsv"] = "labels.tsv"
        names["dataset_description.json"] = "dataset_description.json"
        # files that BIDS does not know, for its validator
        names[".bidsignore"] = "bidsignore.txt"
    colours = tissue_colours(convention)
    rows = [
        (value, tissue, *bytes.fromhex(colours[value].removeprefix("#")))
        for value, tissue in convention.meanings
    ]
    values = {"rows": rows, "convention": convention.name, "version": version("brats_seg")}
    return {n: TEMPLATES.get_template(template).render(values) for n, template in names.items()}


def _volume_row(record: Record) -> dict[str, str | float]:
    row: dict[str, str | float] = {"case_id": record.case_id, "convention": record.convention}
    row["modalities"] = " ".join(record.modalities)
    row[IN_TRAINING] = record.in_training.replace("unknown", "")
    for part in record.volumes:
        row |= {f"{part.name}_ml": part.ml, f"{part.name}_components": part.n_components}
    for expected in record.predicted_dice:
        row |= expected.columns
    return row | {"warnings": BETWEEN_TEXTS.join(record.warnings)}
