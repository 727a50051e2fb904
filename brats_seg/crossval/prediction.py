"""Out-of-fold predictions: each run segments the cases that it has never seen, into one folder."""

from collections.abc import Generator, Sequence

from brats_seg.crossval.cases import HeldOutCases
from brats_seg.inference.batch import local_endings
from brats_seg.inference.model import load_model
from brats_seg.inference.output import OutputFolder
from brats_seg.inference.settings import InferenceConfig
from brats_seg.inference.work import CaseWork, Ending
from brats_seg.models.device import Device


def out_of_fold_endings(
    cases: Sequence[HeldOutCases],
    settings: InferenceConfig,
    output: OutputFolder,
    device: Device,
) -> Generator[Ending]:
    """Predict the held-out cases of one run after another, yielding how each ended.

    What an earlier start has finished with the same scans, weights and settings is left alone.
    """
    for part in cases:
        model = load_model([part.run], device)
        work = CaseWork(model=model, settings=settings, output=output, earlier=output.records())
        yield from local_endings(part.inputs, work)
