"""The folder of results: what lies where, what is finished, and the tables over all cases.

<case>.nii.gz                  the label map
probabilities/<case>-wt.nii.gz, -tc, -et
uncertainty/<case>.nii.gz
previews/<case>.png
manifest.jsonl                 a line for each case, the last of a case counts
volumes.csv, failures.csv
"""

import csv
import io
import json
import os
import threading
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Self

import numpy as np
from filelock import FileLock, Timeout
from pydantic import ValidationError

from brats_seg.cases.folders import OUTPUT_MARKER
from brats_seg.cases.nifti import write_volume
from brats_seg.errors import UsageError
from brats_seg.files import explained, whole_file
from brats_seg.inference.predict import CaseResult
from brats_seg.inference.preview import write_preview
from brats_seg.inference.record import Record
from brats_seg.inference.scan import Scan
from brats_seg.inference.settings import InferenceConfig
from brats_seg.inference.volumes import PARTS
from brats_seg.labels import REGIONS

MANIFEST_NAME = "manifest.jsonl"
_LOCK_NAME = ".predicting.lock"
_LEFTOVERS = ".[0-9]*-*"
"""What `whole_file` leaves behind when its process is killed."""


class OutputFolder:
    """The results of a batch; several processes may write cases, one keeps the tables."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._lock = threading.Lock()

    @contextmanager
    def opened(self) -> Iterator[Self]:
        """Have the folder for this process alone, and tidy it up before and after.

        Raises:
            EnvironmentalError: It cannot be written to.
            UsageError: Another process predicts into it.
        """
        self._mark(self.path)
        lock = FileLock(self.path / _LOCK_NAME)
        try:
            lock.acquire(timeout=0)
        except Timeout:
            msg = f"another process is predicting into {self.path}. Wait for it, or choose another."
            raise UsageError(msg) from None
        except OSError as error:
            raise explained(error, self.path) from error
        try:
            self._tidy_up()
            yield self
            # a worker that was killed leaves something too
            self._tidy_up()
        finally:
            lock.release()

    def records(self) -> Mapping[str, Record]:
        """Return the latest record of each case; a line that was cut off does not count."""
        found = {}
        path = self.path / MANIFEST_NAME
        lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
        for line in lines:
            try:
                record = Record.model_validate_json(line)
            except ValidationError:
                # cut off, or of another version: the case is predicted again
                continue
            found[record.case_id] = record
        return found

    def is_finished(self, record: Record | None, key: str) -> bool:
        """Tell whether a record is of the same scans, model and settings, and its files are there."""
        return (
            record is not None
            and record.status == "done"
            and record.key == key
            and all((self.path / name).exists() for name in record.outputs)
        )

    def write_case(
        self, scan: Scan, result: CaseResult, settings: InferenceConfig
    ) -> tuple[str, ...]:
        """Write the files of a case, the label map last, and return their names."""
        names = []
        geometry, case_id = scan.geometry, result.case_id
        if result.probabilities is not None:
            self._mark(self.path / "probabilities")
            for region, values in zip(REGIONS, result.probabilities, strict=True):
                names.append(f"probabilities/{case_id}-{region}.nii.gz")
                # NIfTI knows no half precision, but what has no more of it packs as small
                rounded = values.astype(np.float16).astype(np.float32)
                write_volume(self.path / names[-1], rounded, geometry)
        if result.uncertainty is not None:
            self._mark(self.path / "uncertainty")
            names.append(f"uncertainty/{case_id}.nii.gz")
            rounded = result.uncertainty.astype(np.float16).astype(np.float32)
            write_volume(self.path / names[-1], rounded, geometry)
        if settings.preview:
            names.append(f"previews/{case_id}.png")
            with whole_file(self.path / names[-1]) as beside:
                write_preview(scan, result, beside)
        names.append(f"{case_id}.nii.gz")
        write_volume(self.path / names[-1], result.label_map, geometry)
        return tuple(names)

    def append(self, record: Record) -> None:
        """Write a line of the manifest, and wait until the disk has it."""
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
        """Write the volumes of all cases in the folder, and the failures of this batch."""
        done = sorted(self.records().values(), key=lambda record: record.case_id)
        volumes = [_volume_row(record) for record in done if record.status == "done"]
        _write_csv(self.path / "volumes.csv", _VOLUME_COLUMNS, volumes)
        rows = [
            {"case_id": one.case_id, "error": one.error, "message": one.message} for one in failures
        ]
        _write_csv(self.path / "failures.csv", ("case_id", "error", "message"), rows)

    def _tidy_up(self) -> None:
        for leftover in (*self.path.glob(_LEFTOVERS), *self.path.glob(f"*/{_LEFTOVERS}")):
            leftover.unlink()

    def _ends_whole(self) -> bool:
        with (self.path / MANIFEST_NAME).open("rb") as file:
            file.seek(-1, os.SEEK_END)
            return file.read() == b"\n"

    def _mark(self, folder: Path) -> None:
        """Mark a folder as results, so that no index takes them for scans."""
        path = folder / OUTPUT_MARKER
        if not path.exists():
            with whole_file(path) as beside:
                beside.write_text(json.dumps({"holds": "predictions"}) + "\n")


_VOLUME_COLUMNS = (
    "case_id",
    "convention",
    *(f"{part}_{what}" for part in PARTS for what in ("ml", "components")),
)


def _volume_row(record: Record) -> dict[str, str | float]:
    row: dict[str, str | float] = {"case_id": record.case_id, "convention": record.convention}
    for part in record.volumes:
        row[f"{part.name}_ml"] = part.ml
        row[f"{part.name}_components"] = part.n_components
    return row


def _write_csv(
    path: Path, columns: tuple[str, ...], rows: Iterable[Mapping[str, str | float]]
) -> None:
    text = io.StringIO(newline="")
    writer = csv.DictWriter(text, columns, lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    with whole_file(path) as beside:
        beside.write_bytes(text.getvalue().encode())
