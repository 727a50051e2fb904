"""Write results to a folder: label maps, pictures, a record of each case, and tables over all cases.

<case>.nii.gz                  label map
probabilities/<case>-wt.nii.gz, -tc, -et
uncertainty/<case>.nii.gz
previews/<case>.png            three planes through the tumour, with the outlines of the regions
reports/<case>.html            page of the case, by `pages.write`
cohort.html                    page of all cases, by `pages.cohort`
manifest.jsonl                 record of each case; the last line of a case counts
volumes.csv, failures.csv
<case>.dcm                     DICOM segmentation, of a case that was converted from DICOM
scans/<case>/                  the scans that were converted from DICOM
labels-brats2017.txt, .ctbl    label values and colours for ITK-SNAP and 3D Slicer

`result_files` names the files, also in the layout of a BIDS derivative.
"""

import hashlib
import os
import threading
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal, Self

import numpy as np
import numpy.typing as npt
from pydantic import Field, ValidationError

from brats_seg.cases.find import OUTPUT_MARKER
from brats_seg.cases.many import Failure, write_failures
from brats_seg.cases.nifti import write_volume
from brats_seg.config import Section
from brats_seg.dicom.convert import DicomSource
from brats_seg.dicom.segmentation import write_segmentation
from brats_seg.errors import UsageError, counted
from brats_seg.evaluation.subset_scores import SubsetScores, absent_from
from brats_seg.files import explained, locked, remove_leftovers, write_json
from brats_seg.inference.decode import PARTS, PartVolume
from brats_seg.inference.method import Scan
from brats_seg.inference.predict import Prediction
from brats_seg.inference.result_files import result_files, write_descriptions
from brats_seg.inference.settings import PredictionSettings, ResultLayout
from brats_seg.labels import MODALITIES, convention_named, regions_of
from brats_seg.quality.expected_dice import PREDICTED_COLUMNS
from brats_seg.tables import BETWEEN_TEXTS, write_table
from brats_seg.voxels.grids import turn_of, turned
from brats_seg.wings import PredictedDice

MANIFEST_NAME = "manifest.jsonl"
VOLUMES_NAME = "volumes.csv"
SCANS_NAME = "scans"
"""Folder of the scans that were converted from DICOM."""
_LOCK_NAME = ".predicting.lock"

_VOLUME_COLUMNS = (
    "case_id",
    "convention",
    "modalities",
    *(f"{part}_{what}" for part in PARTS for what in ("ml", "components")),
    "warnings",
)


class Record(Section):
    """Record of a case: a line of `manifest.jsonl`."""

    case_id: str
    status: Literal["done", "failed"]
    key: str = ""
    """Hash of scans, model and settings; empty if the scans could not be read."""
    inputs: tuple[str, ...] = ()
    """SHA-256 of the file of each modality, and the index of the volume in a 4-D file."""
    files: dict[str, str] = Field(default_factory=dict)
    """File that was read as each modality, with the index of the volume in a 4-D file."""
    modalities: tuple[str, ...] = MODALITIES
    """Modalities that the case was predicted from."""
    expected_loss: SubsetScores | None = None
    """Dice that held-out cases lost with these modalities; None with all four, or if not measured."""
    model: str
    """Fingerprint of the model."""
    settings: PredictionSettings
    outputs: tuple[str, ...] = ()
    """Files, relative to the output folder."""
    convention: str = ""
    """Label convention of the label map."""
    convention_reason: str = ""
    """Reason for it; empty if it is that of the release of the scan."""
    volumes: tuple[PartVolume, ...] = ()
    warnings: tuple[str, ...] = ()
    """Remarks on unusual properties of the case, and on what speaks against its prediction."""
    predicted_dice: tuple[PredictedDice, ...] = ()
    """Dice that is expected of the regions that were found, where the model tells it."""
    error: str = ""
    """Name of the class of the error, if the case failed."""
    message: str = ""
    """Message of the error."""
    seconds: float = 0.0
    """Time of reading and computing; the case is written while the next is computed."""
    peak_memory_mb: float = 0.0
    device: str = ""
    version: str = ""
    """Version of brats_seg."""

    @property
    def failure(self) -> Failure:
        """The error of a case that failed."""
        return Failure(case_id=self.case_id, error=self.error, message=self.message)


def convention_remarks(records: Iterable[Record]) -> tuple[str, ...]:
    """Return a sentence for each label convention that was not that of the scans' own release."""
    n_cases = Counter(
        (record.convention, record.convention_reason)
        for record in records
        if record.convention_reason
    )
    return tuple(
        f"label convention written for {counted(n, 'case')}: {convention_named(name)}; {reason}"
        for (name, reason), n in sorted(n_cases.items())
    )


def key_of(
    inputs: Sequence[str],
    model: str,
    settings: PredictionSettings,
    modalities: Sequence[str] = MODALITIES,
) -> str:
    """Return a hash of everything that a result depends on, except the device.

    A page is made from the result, and is no part of it.
    """
    parts = [*inputs, model, settings.result_text]
    # one file may be given as any of the modalities
    parts += modalities if len(modalities) < len(MODALITIES) else ()
    return hashlib.sha256("\n".join(parts).encode()).hexdigest()[:32]


class OutputFolder:
    """Folder with the results of a batch; any process writes cases, one writes the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Lock the folder for this process, and remove temporary files before and after.

        Raises:
            EnvironmentalError: The folder cannot be written to.
            UsageError: Another process predicts into it.
        """
        self._mark(self.path)
        msg = f"another process predicts into {self.path}. Wait for it, or choose another folder."
        with locked(self.path / _LOCK_NAME, when_taken=UsageError(msg)):
            self._tidy_up()
            yield self
            # temporary files of workers that were killed
            self._tidy_up()

    def records(self) -> Mapping[str, Record]:
        """Return the latest record of each case; lines that cannot be read are skipped."""
        found = {}
        path = self.path / MANIFEST_NAME
        lines = (
            path.read_text(encoding="utf-8", errors="replace").splitlines() if path.exists() else []
        )
        for line in lines:
            try:
                record = Record.model_validate_json(line)
            except ValidationError:
                # truncated, or of another version: the case is predicted again
                continue
            found[record.case_id] = record
        return found

    def is_finished(self, record: Record, key: str) -> bool:
        """Tell whether a record has the same scans, model and settings, and its files are there."""
        return (
            record.status == "done"
            and record.key == key
            and all((self.path / name).exists() for name in record.outputs)
        )

    def write_case(
        self, scan: Scan, result: Prediction, settings: PredictionSettings
    ) -> tuple[str, ...]:
        """Write the files of a case, the label map last, and return their names."""
        names = []
        geometry = scan.geometry
        files = result_files(settings.layout, result.summary.case_id, result.convention)
        if result.probabilities is not None:
            if settings.layout == "plain":
                self._mark(self.path / "probabilities")
            for name, values in zip(files.probabilities, result.probabilities, strict=True):
                names.append(name)
                # NIfTI has no half precision, but values of that precision compress as well
                rounded = values.astype(np.float16).astype(np.float32)
                write_volume(self.path / names[-1], rounded, geometry)
        if result.uncertainty is not None:
            if settings.layout == "plain":
                self._mark(self.path / "uncertainty")
            names.append(files.uncertainty)
            rounded = result.uncertainty.astype(np.float16).astype(np.float32)
            write_volume(self.path / names[-1], rounded, geometry)
        if settings.preview:
            names.append(files.preview)
            write_preview(scan, result, self.path / names[-1])
        names.append(files.label_map)
        write_volume(self.path / names[-1], result.label_map, geometry)
        return tuple(names)

    def write_segmentation(
        self, scan: Scan, result: Prediction, layout: ResultLayout, source: DicomSource | None
    ) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """Write the DICOM segmentation of a case that was converted from DICOM.

        Returns:
            The name of the file, and a remark if there is none although there should be.
        """
        if source is None:
            return (), ()
        name = result_files(layout, result.summary.case_id, result.convention).segmentation
        path = self.path / name
        remark = write_segmentation(
            path, result.label_map, scan.geometry, result.convention, source
        )
        return ((), (remark,)) if remark else ((name,), ())

    def append(self, record: Record) -> None:
        """Append a line to the manifest, and sync it to the disk."""
        line = f"{record.model_dump_json()}\n".encode()
        try:
            with self._lock, (self.path / MANIFEST_NAME).open("ab") as file:
                if file.tell() and not self._ends_whole():
                    line = b"\n" + line
                file.write(line)
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise explained(error, self.path / MANIFEST_NAME) from error

    def write_tables(self, failures: Iterable[Record]) -> None:
        """Write the volumes of all cases in the folder, their label values, and the failures."""
        done = sorted(self.records().values(), key=lambda record: record.case_id)
        done = [record for record in done if record.status == "done"]
        volumes = [_volume_row(record) for record in done]
        is_predicted = any(record.predicted_dice for record in done)
        columns = _VOLUME_COLUMNS + PREDICTED_COLUMNS * is_predicted
        write_table(self.path / VOLUMES_NAME, columns, volumes)
        write_failures([record.failure for record in failures], self.path / "failures.csv")
        for layout in sorted({record.settings.layout for record in done}):
            names = sorted({one.convention for one in done if one.settings.layout == layout})
            write_descriptions(self.path, layout, map(convention_named, names))

    def _tidy_up(self) -> None:
        below = filter(Path.is_dir, self.path.iterdir())
        for folder in (self.path, *below, *self.path.glob("sub-*/**/anat")):
            remove_leftovers(folder)

    def _ends_whole(self) -> bool:
        with (self.path / MANIFEST_NAME).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _mark(self, folder: Path) -> None:
        """Mark a folder as results, so that no index reads them as scans."""
        path = folder / OUTPUT_MARKER
        if not path.exists():
            write_json(path, {"holds": "predictions"})


def write_preview(scan: Scan, result: Prediction, path: Path) -> None:
    """Draw a case to a PNG file, with the patient's left on the right as radiologists see it."""
    # matplotlib takes long to import
    from brats_seg.figures.cases import SHOWN, planes_figure
    from brats_seg.figures.sections import Grid, write_figure
    from brats_seg.figures.view import shown_of

    turn = turn_of(scan.geometry.affine)
    regions = regions_of(turned(result.label_map, turn), result.convention)
    shown = shown_of(scan.modalities, SHOWN)
    images = {name: _on_grid(scan, MODALITIES.index(name), turn) for name in shown}
    absent = absent_from(result.summary.modalities)
    without = f", predicted without {', '.join(absent)}" if absent else ""
    title = f"{result.summary.case_id}{without}"
    grid = Grid(spacing_mm=scan.spacing_mm)
    write_figure(planes_figure(images, regions, grid, title=title), path)


def _volume_row(record: Record) -> dict[str, str | float]:
    row: dict[str, str | float] = {"case_id": record.case_id, "convention": record.convention}
    row["modalities"] = " ".join(record.modalities)
    for part in record.volumes:
        row[f"{part.name}_ml"] = part.ml
        row[f"{part.name}_components"] = part.n_components
    for one in record.predicted_dice:
        row |= one.columns
    return row | {"warnings": BETWEEN_TEXTS.join(record.warnings)}


def _on_grid(scan: Scan, modality: int, turn: npt.NDArray[np.float64]) -> npt.NDArray[np.float32]:
    """Return a modality (X, Y, Z) on the turned grid of the files."""
    image = scan.on_scan_spacing(scan.image[modality : modality + 1])[0]
    return turned(scan.on_scan_grid(image), turn)
