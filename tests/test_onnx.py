"""Exported ONNX files give the logits of torch."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from brats_seg import export_model, load_model
from brats_seg.errors import EnvironmentalError
from tests.inference_builders import CPU, write_run


def test_without_onnx_the_remedy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    with pytest.raises(EnvironmentalError, match=r'pip install "brats_seg\[onnx'):
        export_model([write_run(tmp_path / "run")], tmp_path / "model", file_format="onnx")


def test_onnxruntime_gives_the_logits_of_torch_for_any_size(tmp_path: Path) -> None:
    pytest.importorskip("onnx")
    onnxruntime = pytest.importorskip("onnxruntime")
    model = tmp_path / "model"
    export_model([write_run(tmp_path / "run")], model, file_format="onnx")
    session = onnxruntime.InferenceSession(model / "member0.onnx")
    (member,) = load_model([model], CPU).members
    for size in ((8, 8, 8), (24, 16, 40)):
        image = torch.randn(1, 4, *size, generator=torch.Generator().manual_seed(0))
        (logits,) = session.run(None, {"image": image.numpy()})
        with torch.inference_mode():
            expected = member.network(image).numpy()
        np.testing.assert_allclose(logits, expected, rtol=0, atol=1e-4)
