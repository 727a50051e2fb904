"""The scores of out-of-fold predictions, computed once for the same label maps.

scores.csv     a row per case and region
scored.json    what they belong to: a key that changes with label maps and protocol
"""

import hashlib
import json
from pathlib import Path

from brats_seg.evaluation.evaluate import Evaluation, evaluate_pairs
from brats_seg.evaluation.pairs import Pairing
from brats_seg.evaluation.protocols import Protocol
from brats_seg.evaluation.scores import write_scores
from brats_seg.files import whole_file
from brats_seg.progress import Track

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
