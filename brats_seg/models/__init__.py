"""Networks by name, and a network over a volume larger than its patch."""

from brats_seg.models.build import build_model as build_model
from brats_seg.models.build import has_batch_statistics as has_batch_statistics
from brats_seg.models.build import size_multiple as size_multiple
from brats_seg.models.output import TrainingOutput as TrainingOutput
from brats_seg.models.output import as_output as as_output
from brats_seg.models.windows import predict_logits as predict_logits
