"""The held-out cases of several runs, as they lie on disk: scans to predict, label maps to score with."""

# DOC crossval/prediction: Out-of-fold predictions: each run segments the cases that it has never seen, into one folder.
# DOC crossval/scoring: The scores of out-of-fold predictions, computed once for the same label maps.
#
# scores.csv     a row per case and region
# scored.json    what they belong to: a key that changes with label maps and protocol
#
# DOC crossval/ensemble: The runs of a cross-validation as one model to hand out.

import hashlib
import json
from collections.abc import Generator, Sequence
from dataclasses import dataclass
from pathlib import Path

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.inputs import CaseInput
from brats_seg.errors import UsageError
from brats_seg.evaluation.evaluate import Evaluation, Pair, Pairing, evaluate_pairs
from brats_seg.evaluation.protocols import Protocol
from brats_seg.evaluation.scores import write_scores
from brats_seg.files import whole_file, whole_folder
from brats_seg.inference.batch import CaseOutcome, CaseWork, local_endings
from brats_seg.inference.export import MODEL_NAME, read_exported, write_exported
from brats_seg.inference.model import fingerprint_of, load_model, read_together
from brats_seg.inference.out_of_fold import HeldOut
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.settings import PredictionSettings
from brats_seg.progress import Track
from brats_seg.runtime.device import Device


@dataclass(frozen=True, kw_only=True, slots=True)
class HeldOutCases:
    """What one run has never seen."""

    run: Path
    inputs: tuple[CaseInput, ...]


def held_out_cases(held_out: Sequence[HeldOut], index: CaseIndex) -> tuple[HeldOutCases, ...]:
    """Find the scans of held-out cases in the index of their data folder."""
    by_id: dict[str, Case] = {case.case_id: case for case in index.cases}
    root = index.root.absolute()
    return tuple(
        HeldOutCases(
            run=own.run,
            inputs=tuple(
                CaseInput(root=root, case=by_id[case_id]) for case_id in own.data.split.validation
            ),
        )
        for own in held_out
    )


def reference_pairs(cases: Sequence[HeldOutCases], predictions: Path) -> Pairing:
    """Pair the label map of every held-out case with its prediction, if there is one."""
    pairs = []
    for one in (one for part in cases for one in part.inputs):
        case_id, label = one.case.case_id, one.case.label
        prediction = predictions / f"{case_id}.nii.gz"
        if label is not None:
            pairs.append(
                Pair(
                    case_id=case_id,
                    reference=one.root / label.path,
                    prediction=prediction if prediction.exists() else None,
                )
            )
    return Pairing(pairs=tuple(sorted(pairs, key=lambda pair: pair.case_id)), without_reference=())


def out_of_fold_endings(
    cases: Sequence[HeldOutCases],
    settings: PredictionSettings,
    output: OutputFolder,
    device: Device,
) -> Generator[CaseOutcome]:
    """Predict the held-out cases of one run after another, yielding how each ended.

    What an earlier start has finished with the same scans, weights and settings is left alone.
    """
    for part in cases:
        model = load_model([part.run], device)
        work = CaseWork(model=model, settings=settings, output=output, earlier=output.records())
        yield from local_endings(part.inputs, work)


SCORES_NAME = "scores.csv"
_KEY_NAME = "scored.json"


def score_predictions(
    pairing: Pairing, protocol: Protocol, folder: Path, *, n_workers: int, track: Track
) -> Evaluation | None:
    """Write the scores of all pairs, or return None if they are there already.

    Raises:
        EnvironmentalError: A process was killed, or the folder cannot be written to.
    """
    key = _key(pairing, protocol)
    if (folder / SCORES_NAME).exists() and _stored_key(folder) == key:
        return None
    evaluation = evaluate_pairs(pairing, protocol, n_workers=n_workers, track=track)
    # without a key in between: killed here, the scores are computed again
    (folder / _KEY_NAME).unlink(missing_ok=True)
    write_scores(evaluation.scores, folder / SCORES_NAME)
    if not evaluation.failures:
        with whole_file(folder / _KEY_NAME) as beside:
            beside.write_text(json.dumps({"key": key}) + "\n")
    return evaluation


def _key(pairing: Pairing, protocol: Protocol) -> str:
    digest = hashlib.sha256(f"{protocol.name} {protocol.task}".encode())
    for pair in pairing.pairs:
        digest.update(f"\n{pair.case_id}".encode())
        for path in (pair.reference, pair.prediction):
            content = path.read_bytes() if path is not None and path.exists() else b""
            digest.update(hashlib.sha256(content).digest())
    return digest.hexdigest()[:32]


def _stored_key(folder: Path) -> str | None:
    try:
        return str(json.loads((folder / _KEY_NAME).read_bytes())["key"])
    except (OSError, ValueError, KeyError, TypeError):
        return None


def export_ensemble(runs: Sequence[Path], folder: Path) -> str:
    """Export runs to a folder, unless they are there already, and return their fingerprint.

    Raises:
        UsageError: The runs do not go together, or the folder holds something else.
        EnvironmentalError: It cannot be written.
    """
    check_free(folder)
    networks = read_together(runs)
    fingerprint = fingerprint_of(networks)
    if not _holds(folder, fingerprint):
        when_full = "Free some space; the same command then goes on."
        with whole_folder(folder, when_full=when_full) as beside:
            write_exported(networks, fingerprint, beside)
    return fingerprint


def check_free(folder: Path) -> None:
    """Raise `UsageError` if a folder is there that is not an exported model."""
    if folder.exists() and not (folder / MODEL_NAME).exists():
        msg = f"{folder} is there and holds no model. Move it away, or choose another --output."
        raise UsageError(msg)


def _holds(folder: Path, fingerprint: str) -> bool:
    try:
        return folder.exists() and read_exported(folder).fingerprint == fingerprint
    except UsageError:
        # damaged, or of another version
        return False
