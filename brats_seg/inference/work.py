"""What is done with one case of a batch, in three stages, and what is recorded of it.

Every stage answers with what the next one needs, or with how the case ended. What is wrong with a
case ends that case; what is wrong with the machine or the command ends the batch.
"""

import logging
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.metadata import version
from typing import TypeVar

from brats_seg.data.manifest import contents_of
from brats_seg.errors import CaseError, EnvironmentalError, UsageError
from brats_seg.inference.inputs import CaseInput
from brats_seg.inference.model import Model
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.predict import CaseResult, predict_scan
from brats_seg.inference.record import Record, key_of
from brats_seg.inference.scan import Scan, read_scan
from brats_seg.inference.settings import InferenceConfig

log = logging.getLogger(__name__)

Result = TypeVar("Result")


@dataclass(frozen=True, kw_only=True, slots=True)
class Ending:
    """How one case of a batch ended."""

    record: Record
    is_new: bool = True
    """False for a case that an earlier batch had finished."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class ReadCase:
    """A case that the network can be given."""

    scan: Scan
    inputs: tuple[str, ...]
    """SHA-256 of the files."""
    key: str
    seconds: float
    """Of reading."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class PredictedCase:
    """A case whose result is to be written."""

    read: ReadCase
    result: CaseResult


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class CaseWork:
    """Reads, predicts and writes cases of one batch."""

    model: Model
    settings: InferenceConfig
    output: OutputFolder
    earlier: Mapping[str, Record]
    """What earlier batches recorded, by case id."""

    def run(self, case_input: CaseInput) -> Ending:
        """Do all three stages."""
        read = self.read(case_input)
        if isinstance(read, Ending):
            return read
        predicted = self.predict(read)
        return predicted if isinstance(predicted, Ending) else self.write(predicted)

    def read(self, case_input: CaseInput) -> ReadCase | Ending:
        """Read and check a case, unless it is finished."""
        return self._attempt(case_input.case.case_id, lambda: self._read(case_input))

    def predict(self, read: ReadCase) -> PredictedCase | Ending:
        """Have the networks segment a case."""
        return self._attempt(
            read.scan.case_id,
            lambda: PredictedCase(
                read=read, result=predict_scan(self.model, read.scan, self.settings)
            ),
        )

    def write(self, predicted: PredictedCase) -> Ending:
        """Write the files of a case."""
        return self._attempt(predicted.result.case_id, lambda: self._write(predicted))

    def _read(self, case_input: CaseInput) -> ReadCase | Ending:
        started_s = time.monotonic()
        case = case_input.case
        if case.problems:
            return self._failed(case.case_id, "CaseError", "; ".join(case.problems))
        try:
            inputs = contents_of(case_input.root, case.images)
        except OSError as error:
            found = f"that it cannot be read ({error.strerror})"
            next_step = "Check its name, its rights and the disk."
            raise CaseError(
                case.case_id, str(error.filename), found, "a scan", next_step
            ) from error
        key = key_of(inputs, self.model.fingerprint, self.settings)
        earlier = self.earlier.get(case.case_id)
        if earlier is not None and self.output.is_finished(earlier, key):
            return Ending(record=earlier, is_new=False)
        scan = read_scan(case_input, self.model.identity.spacing_mm)
        return ReadCase(scan=scan, inputs=inputs, key=key, seconds=time.monotonic() - started_s)

    def _write(self, predicted: PredictedCase) -> Ending:
        read, result = predicted.read, predicted.result
        record = Record(
            case_id=result.case_id,
            status="done",
            key=read.key,
            inputs=read.inputs,
            model=self.model.fingerprint,
            settings=self.settings,
            outputs=self.output.write_case(read.scan, result, self.settings),
            convention=result.convention.name,
            volumes=result.volumes,
            warnings=result.warnings,
            seconds=round(read.seconds + result.seconds, 3),
            peak_memory_mb=round(result.peak_memory_mb, 1),
            device=result.device,
            version=version("brats_seg"),
        )
        return Ending(record=record)

    def _attempt(self, case_id: str, stage: Callable[[], Result]) -> Result | Ending:
        try:
            return stage()
        except (EnvironmentalError, UsageError):
            raise
        except CaseError as error:
            return self._failed(case_id, type(error).__name__, str(error))
        except Exception as error:
            # whatever a scan brings about, the night goes on; the trace tells where it was
            log.exception("case %s", case_id)
            message = (
                f"case {case_id}: {error}. This is a mistake of the program: please report it."
            )
            return self._failed(case_id, type(error).__name__, message)

    def _failed(self, case_id: str, error: str, message: str) -> Ending:
        return Ending(
            record=failure(case_id, error, message, self.model.fingerprint, self.settings)
        )


def failure(
    case_id: str, error: str, message: str, model: str, settings: InferenceConfig
) -> Record:
    """Return the record of a case that could not be predicted."""
    return Record(
        case_id=case_id,
        status="failed",
        model=model,
        settings=settings,
        error=error,
        message=message,
        version=version("brats_seg"),
    )
