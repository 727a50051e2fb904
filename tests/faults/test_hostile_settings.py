"""Settings that are broken, or made to break the program, are refused, and run no code."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from tests.faults.campaign import NewCampaign
from tests.faults.hostile import OWNED, attack, harmless
from tests.faults.stages import COMMANDS, Stages

PROMISE = "hostile settings: named error, no code run"
_BOMB = "\n".join(
    ["a0: &a0 [x, x, x, x, x, x, x, x, x]"]
    + [f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 12)]
)
YAMLS: Mapping[str, bytes] = {
    "a value that holds itself": b"model: &a {name: unet, arguments: *a}",
    "a list that holds itself": b"training: &a [*a]",
    "aliases of aliases": _BOMB.encode(),
    "aliases of aliases as a setting": (_BOMB + "\nmodel: {arguments: {x: *a11}}").encode(),
    "100,000 brackets": b"a: " + b"[" * 100_000,
    "100,000 braces": b"{a: " * 100_000,
    "an object of Python": f"!!python/object/apply:os.system ['touch {OWNED}']".encode(),
    "a tag": b"training: !!python/name:os.system",
    "a list": b"- 1\n- 2\n",
    "a number": b"7",
    "binary": bytes(range(256)),
    "not UTF-8": b"model: {name: \xff\xfe}",
    "NUL": b"model: {name: un\0et}",
    "a number of 5000 digits": b"training: {n_epochs: " + b"9" * 5000 + b"}",
    "NaN": b"optimizer: {lr: .nan}",
    "infinity": b"optimizer: {lr: .inf}",
    "keys that are lists": b"? [a, b]\n: 1",
    "keys that are numbers": b"1: 2\ntrue: 3",
    "sections that are lists": b"model: [1]\ntraining: null",
    "a date": b"training: {seed: 2020-01-01}",
    "a merge key": b"a: &a {b: *a}\n<<: *a",
    "a module to import": b"loss: {name: antigravity.x}",
    "a function of the system": f"loss: {{name: os.system, arguments: {{command: 'touch {OWNED}'}}}}".encode(),
    "a patch of 10^9 voxels": b"patch: {size: [1000000000, 1000000000, 1000000000]}",
    "10^9 channels": b"model: {widths: [1000000000, 1000000000]}",
    "10^12 epochs of 10^12 patches": b"training: {n_epochs: 1000000000000, effective_batch: 1000000000000}",
}


USED_LATER = {
    "a module to import",
    "a function of the system",
    "a patch of 10^9 voxels",
    "10^9 channels",
    "10^12 epochs of 10^12 patches",
}
"""Settings that only training uses."""


@pytest.mark.slow
def test_no_settings_break_prepare(stages: Stages, place: Path, campaign: NewCampaign) -> None:
    """`prepare` reads all settings, and uses few of them."""
    folder = stages.start("prepared", place / "here")
    with campaign(PROMISE) as tries:
        for what, content in YAMLS.items():
            (folder / "settings.yaml").write_bytes(content)
            ended = attack(f"{COMMANDS['prepare'].words} --config settings.yaml", folder)
            codes = (0, 2) if what in USED_LATER else (2,)
            tries.note(f"prepare: {what}", *harmless(ended, folder, *codes))


@pytest.mark.slow
@pytest.mark.parametrize("what", sorted(USED_LATER - {"10^12 epochs of 10^12 patches"}))
def test_no_settings_break_train(
    what: str, stages: Stages, place: Path, campaign: NewCampaign
) -> None:
    folder = stages.start("prepared", place / "here")
    (folder / "settings.yaml").write_bytes(YAMLS[what])
    words = "train --data scans --prepared prepared --set folds.n_folds=2 --config settings.yaml"
    with campaign(PROMISE) as tries:
        ended = attack(words, folder)
        tries.note(f"train: {what}", *harmless(ended, folder, 2, 3))
