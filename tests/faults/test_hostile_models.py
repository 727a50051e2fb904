"""Models and checkpoints that are broken, or made to break the program, are refused, and run no code."""

import inspect
import json
import shutil
import struct
import sys
import zipfile
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import reduce
from pathlib import Path
from typing import Any, TypeAlias

import monai.networks.nets
import pytest
import torch

from brats_seg.config import ModelConfig
from brats_seg.errors import BratsError, ConfigError, UsageError
from brats_seg.inference.export import export_model
from brats_seg.inference.held_out import open_held_out
from brats_seg.inference.model import load_model, read_together
from brats_seg.inference.reconstruct import Reconstructor
from brats_seg.inference.tuning import tune_runs
from brats_seg.models.build import build_model
from brats_seg.pages.html import PageOptions
from brats_seg.pages.run import write_run_page
from brats_seg.presets import MONAI_NETWORKS, is_plain, trusting
from brats_seg.training.certificate import certify_run
from brats_seg.training.memory_plan import choose_settings
from brats_seg.training.state import read_source
from tests.builders import call
from tests.faults.campaign import OWNED, Campaign
from tests.faults.stages import COMMANDS
from tests.faults.test_hostile_inputs import UNREADABLE
from tests.inference_builders import CASES, CPU, write_fold

Break: TypeAlias = Callable[[Path], object]
"""Makes something hostile of a file, or of the folder of a model."""


def _change(content: Any, name: str, value: Any) -> None:
    *above, last = name.split(".")
    reduce(lambda entry, part: entry.setdefault(part, {}), above, content)[last] = value


def _replaced(make: Break) -> Break:
    def change(path: Path) -> None:
        path.unlink()
        make(path)

    return change


HUGE = 10**9
NAN = float("nan")


class Owned:
    def __reduce__(self) -> tuple[Callable[..., object], tuple[object, ...]]:
        return Path.touch, (Path(OWNED),)


def _saved(name: str, value: Any) -> Break:
    def change(path: Path) -> None:
        content = torch.load(path, weights_only=True)
        _change(content, name, value)
        torch.save(content, path)

    return change


def _flipped(path: Path) -> None:
    """Flip a bit in the middle of the largest entry, not in the padding between entries."""
    content = bytearray(path.read_bytes())
    with zipfile.ZipFile(path) as archive:
        entry = max(archive.infolist(), key=lambda one: one.file_size)
    lengths = content[entry.header_offset + 26 : entry.header_offset + 30]
    n_name, n_extra = struct.unpack("<HH", lengths)
    content[entry.header_offset + 30 + n_name + n_extra + entry.file_size // 2] ^= 16
    path.write_bytes(content)


def _nan_weights(path: Path) -> None:
    content = torch.load(path, weights_only=True)
    weights = content["model"].items()
    content["model"] = {name: torch.full_like(value, NAN) for name, value in weights}
    torch.save(content, path)


CHECKPOINTS: Mapping[str, Break] = {
    "a pickle that runs code": lambda path: torch.save({"model": Owned()}, path),
    "an old pickle that runs code": lambda path: torch.save(
        Owned(), path, _use_new_zipfile_serialization=False
    ),
    "empty": lambda path: path.write_bytes(b""),
    "binary": lambda path: path.write_bytes(bytes(range(256)) * 40),
    "cut off": lambda path: path.write_bytes(path.read_bytes()[:-200]),
    "with a flipped bit": _flipped,
    **{
        what: _replaced(UNREADABLE[what])
        for what in ("a folder", "a FIFO", "a device", "a link to itself")
    },
    "a list": lambda path: torch.save([1, 2], path),
    "without entries": lambda path: torch.save({"schema_version": 3}, path),
    "without a model": _saved("model", {}),
    "with weights of another shape": _saved("model", {"weight": torch.zeros(3)}),
    "with a model that is a number": _saved("model", 7),
    "with an identity that is a number": _saved("card.identity", 7),
    "with unknown settings": _saved("card.config", {"a": {"b": 1}}),
    "with 10^9 channels": _saved("card.config.model.widths", [HUGE, HUGE]),
    "with a network to import": _saved("card.config.model.name", "antigravity.x"),
    "with a spacing of NaN": _saved("card.identity.spacing_mm", (NAN,) * 3),
    "with NaN as weights": _nan_weights,
}
OF_TRAINING = {
    "a position that is a text": _saved("progress.epoch", "x"),
    "a position beyond the end": _saved("progress", {"epoch": -3, "n_batches": HUGE, "n_steps": 0}),
    "an optimizer that is a list": _saved("optimizer", [1]),
    "sums that are a text": _saved("progress.sums", "x"),
    "a history of texts": _saved("progress.history", ("x",)),
}
"""What only training reads."""
PREDICT = "predict scans -o out --model runs/fold0 --set preview=false"
USES = {
    "predict": ("best.pt", PREDICT, CHECKPOINTS),
    "train": ("last.pt", COMMANDS["train"].words, {**CHECKPOINTS, **OF_TRAINING}),
    "tune": ("best.pt", COMMANDS["tune"].words, CHECKPOINTS),
    "certify": ("last.pt", COMMANDS["certify"].words, CHECKPOINTS),
}
HARMLESS = {
    # a link to itself counts as no file: the run begins anew, and one that has finished computes
    # nothing with its weights
    "train": {"a link to itself", "with NaN as weights"},
    # reads best.pt where last.pt is missing, and of last.pt the averaged weights
    "certify": {
        *("a link to itself", "with NaN as weights"),
        *("without a model", "with weights of another shape"),
    },
}
"""Changes of a checkpoint that a command need not refuse."""


@pytest.mark.parametrize(
    ("name", "changes"),
    [
        *(pytest.param(name, USES[name][2], marks=pytest.mark.slow) for name in USES),
        ("predict", {what: CHECKPOINTS[what] for what in ("a pickle that runs code", "a FIFO")}),
    ],
)
def test_no_checkpoint_breaks(name: str, changes: Mapping[str, Break], campaign: Campaign) -> None:
    file, words, _ = USES[name]
    for number, (what, change) in enumerate(changes.items()):
        folder = campaign.start("trained", f"checkpoint{number}")
        change(folder / "runs" / "fold0" / file)
        codes = (0, 2) if what in HARMLESS.get(name, ()) else (1, 2, 3)
        campaign.attack(f"{name}: {what}", words, folder, *codes)


_CODE = f"open({OWNED!r}, 'w').close()\ndef forward(self): pass\n"
GADGETS: Mapping[str, dict[str, Any]] = {
    "torch.fx.graph_module.reduce_graph_module": {"body": {"_code": _CODE}, "import_block": ""},
    "torch.hub.load": {"repo_or_dir": ".", "model": "x", "source": "local"},
    "builtins.eval": {"source": _CODE},
    "builtins.exec": {"source": _CODE},
    "builtins.open": {"file": OWNED, "mode": "w"},
    "subprocess.run": {"args": ["touch", OWNED]},
    "os.system": {"command": f"touch {OWNED}"},
    "numpy.load": {"file": "x.npy", "allow_pickle": True},
    "monai.bundle.load": {"name": "x", "bundle_dir": "."},
    "torch.jit.load": {"f": "x.pt"},
    "importlib.import_module": {"name": "owning"},
    "owning.Network": {},
    f"{__name__}.Opening": {"path": OWNED},
    "monai.networks.nets.DenseNet121": {"spatial_dims": 2, "pretrained": True},
    "monai.networks.nets.UNet": {"act": "https://example.org/x"},
    "monai.networks.nets.VNet": {"act": ["relu", {"pretrained": True}]},
}
"""Names that run code, read a file or fetch one, with their arguments."""


class Opening(torch.nn.Module):
    def __init__(self, path: str) -> None:
        super().__init__()
        Path(path).touch()


WAYS: Mapping[str, Callable[[Path, Path], object]] = {
    "predict": lambda run, _: load_model([run], CPU),
    "predict, best.pt": lambda run, _: load_model([run / "best.pt"], CPU),
    "predict, exported": lambda run, _: load_model([run.with_name("model")], CPU),
    "predict, ensemble": lambda run, _: load_model([run.with_name("good"), run], CPU),
    "export": lambda run, _: export_model([run], Path("new"), file_format="safetensors"),
    "export, bundle": lambda run, _: export_model([run], Path("new"), file_format="bundle"),
    "export, ONNX": lambda run, _: export_model([run], Path("new"), file_format="onnx"),
    "tune": lambda run, prepared: tune_runs([run], prepared_path=prepared),
    "certify": lambda run, _: certify_run(run, n_patches=2),
    "report": lambda run, p: write_run_page(run, Path("a"), PageOptions(prepared=p, device="cpu")),
    "reconstruct": lambda run, _: Reconstructor.load(run, CPU),
    "start from": lambda run, _: read_source(run),
    "held-out pages and crossval": open_held_out,
    "features": lambda run, _: read_together([run]),
    "train again": lambda run, _: choose_settings(run_paths=[run]),
}
"""Every way from a file to a network."""


@pytest.fixture
def given_run(tiny_prepared: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run, with a good copy and an exported model beside it, and a module that writes a file."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    Path("owning.py").write_text(f"open({OWNED!r}, 'w').close()\n")
    Path("hubconf.py").write_text(f"open({OWNED!r}, 'w').close()\ndef x(): pass\n")
    run_path = write_fold(tmp_path / "run", tiny_prepared, CASES[:2])
    shutil.copytree(run_path, tmp_path / "good")
    shutil.copy(run_path / "best.pt", run_path / "last.pt")
    (run_path / "history.csv").write_text("epoch,train_loss,val_loss,val_dice\n1,1,1,0\n")
    export_model([run_path], tmp_path / "model")
    return run_path


def _ask_for(run_path: Path, section: str, name: str, arguments: Mapping[str, Any]) -> None:
    value = {"name": name, "arguments": dict(arguments)}
    for file in ("best.pt", "last.pt"):
        _saved(f"card.config.{section}", value)(run_path / file)
    description = run_path.with_name("model") / "model.json"
    content = json.loads(description.read_text())
    _change(content["members"][0], f"card.config.{section}", value)
    description.write_text(json.dumps(content))
    (run_path / "config.yaml").write_text(json.dumps({section: value}))


@pytest.mark.parametrize("way", WAYS)
def test_no_file_names_code(way, given_run, tiny_prepared, campaign):
    for name, arguments in GADGETS.items():
        _ask_for(given_run, "model", name, arguments)
        with pytest.raises(BratsError) as error:
            WAYS[way](given_run, tiny_prepared)
        refusal = f"asks for code to be run: {name} "
        message = "" if refusal in f"{error.value}" else f"{error.value}"
        owned = Path(OWNED).exists() or "owning" in sys.modules
        campaign.note(f"{way}: {name}", message, "it ran" if owned else "")


@pytest.mark.parametrize("way", ["certify", "train again"])
def test_no_file_names_the_loss_that_is_run(way: str, given_run: Path, tiny_prepared: Path) -> None:
    _ask_for(given_run, "loss", f"{__name__}.Opening", {"path": OWNED})
    with pytest.raises(BratsError, match="asks for code to be run"):
        WAYS[way](given_run, tiny_prepared)
    assert not Path(OWNED).exists()


@pytest.mark.slow
def test_what_a_person_types_is_called(given_run: Path, tiny_scans: Path) -> None:
    """The negative control: gadgets that are not refused run, and a network that is trusted is read."""
    name = "torch.fx.graph_module.reduce_graph_module"
    with suppress(ConfigError):
        build_model(ModelConfig(name=name, arguments=GADGETS[name]), (8, 8, 8))
    assert Path(OWNED).exists()
    name, arguments = "torch.nn.Conv3d", {"in_channels": 4, "out_channels": 3, "kernel_size": 1}
    _ask_for(given_run, "model", name, arguments)
    weights = torch.nn.Conv3d(4, 3, 1).state_dict()
    entries = {f"network.{key}": value for key, value in weights.items()}
    _saved("model", entries)(given_run / "best.pt")
    with pytest.raises(UsageError, match=r"best\.pt asks for code.*--trust-code torch\.nn\.Conv3d"):
        load_model([given_run], CPU)
    with trusting(name):
        assert load_model([given_run], CPU).members[0].name == name
    words = ["predict", tiny_scans / CASES[0], "-o", "out", "--model", given_run]
    words += ["--set", "preview=false"]
    assert "asks for code" in call(given_run.parent, *words)[2]
    ended = call(given_run.parent, "--trust-code", name, *words)
    assert ended.code == 0, ended.err
    words[3] = "by-workers"
    ended = call(given_run.parent, "--trust-code", name, *words, "--workers", "1")
    assert (ended.code, "0 failed" in ended.out) == (0, True), ended.err
    again = choose_settings(run_paths=[given_run], assignments=[f"model.name={name}"])
    assert again.config.model.arguments == arguments
    known = {"spatial_dims": 3, "in_channels": 4, "out_channels": 3}
    known["norm"] = ["batch", {"affine": True}]
    _ask_for(given_run, "model", "monai.networks.nets.BasicUNet", known)
    choose_settings(run_paths=[given_run])
    assert read_source(given_run).weights


def test_no_known_network_takes_an_address() -> None:
    assert not is_plain(json.loads("[" * 900 + "]" * 900))
    for name in MONAI_NETWORKS:
        names = inspect.signature(getattr(monai.networks.nets, name)).parameters
        assert is_plain(dict.fromkeys(names, 1)), name
        assert not any(parameter.kind == parameter.VAR_KEYWORD for parameter in names.values())
