"""Measure on held-out cases how much Dice a model loses without some of its modalities.

Every case is predicted by the run that it was held out of: from all modalities, and from each subset
that the run was trained for, with the window and the decoding that were fitted to the run. Where no
overlap was fitted, windows overlap as in its validation, so that a run for a few processors does not
take days here.
"""

from collections.abc import Sequence
from math import prod

import numpy as np
import numpy.typing as npt

from brats_seg.cases.many import evenly_spread
from brats_seg.data.loader import whole_case
from brats_seg.data.store import open_case
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.evaluation.subset_scores import SubsetScores
from brats_seg.inference.model import Model, build_single
from brats_seg.inference.out_of_fold import HeldOut
from brats_seg.inference.postprocess import decode_regions
from brats_seg.inference.probabilities import PredictionFallback, crop_probabilities
from brats_seg.inference.settings import PredictionSettings
from brats_seg.labels import MODALITIES
from brats_seg.progress import Track
from brats_seg.runtime.device import Device
from brats_seg.runtime.weights import store_fitted

MOST_CASES = 20
"""Held-out cases of a run that are predicted from every subset. Their mean loss is known to a quarter
of its standard deviation, and five folds have a hundred of them."""


def subset_scores_of(held_out: HeldOut, device: Device, track: Track) -> tuple[SubsetScores, ...]:
    """Return the scores of a run without some modalities; measure and store them if they are not there.

    A run that was trained without modality dropout has none.

    Raises:
        CaseError: A case cannot be predicted.
        EnvironmentalError: The checkpoint cannot be written.
    """
    trained = held_out.trained
    if trained.subset_scores or not trained.identity.subsets:
        return trained.subset_scores
    model = build_single(trained, device)
    subsets = (MODALITIES, *trained.identity.subsets)
    cases = evenly_spread(held_out.data.split.validation, MOST_CASES)
    work = track(cases, what=f"{held_out.run.name}, subsets of modalities", total=len(cases))
    rows = np.stack([_dice_of(held_out, model, case_id, subsets) for case_id in work])
    scores = tuple(
        SubsetScores.of_cases(subset, rows[:, place], rows[:, 0])
        for place, subset in enumerate(subsets)
        if place > 0
    )
    store_fitted(held_out.checkpoint_path, trained.fitted, scores)
    return scores


def _dice_of(
    held_out: HeldOut, model: Model, case_id: str, subsets: Sequence[Sequence[str]]
) -> npt.NDArray[np.float64]:
    """Return the Dice (subsets, 3) of a case."""
    sample = whole_case(held_out.data.folder, case_id)
    reference = sample.target.numpy().astype(np.bool_)
    voxel_mm3 = prod(open_case(held_out.data.folder, case_id).geometry.spacing_mm)
    trained = held_out.trained
    is_fitted = trained.fitted.overlap is not None
    settings = PredictionSettings(overlap=None if is_fitted else trained.config.validation.overlap)
    decoding = model.decoding(settings)
    rows = []
    for subset in subsets:
        image = sample.image.float().numpy()
        for modality, channel in zip(MODALITIES, image, strict=True):
            if modality not in subset:
                channel[...] = 0
        fallback = PredictionFallback(case_id, model.device)
        mean = crop_probabilities(model, case_id, image, settings, fallback)
        regions = decode_regions(mean, decoding, voxel_mm3)
        rows.append(dice(count_regions(regions, reference, case_id)))
    return np.stack(rows)
