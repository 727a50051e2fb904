import multiprocessing
import os
import signal
from collections import Counter
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import numpy as np
import pytest
import torch
from monai.transforms import (
    CenterSpatialCropd,
    Compose,
    ConvertToMultiChannelBasedOnBratsClassesd,
    MapTransform,
    RandCropByPosNegLabeld,
    RandGaussianNoised,
    RandomizableTransform,
    SelectItemsd,
)
from torch import Tensor

from brats_seg.config import PatchConfig
from brats_seg.data import loader
from brats_seg.data.intensities import Transform
from brats_seg.data.loader import PatchDataset
from brats_seg.data.store import open_case
from brats_seg.data.transforms import training_transforms, transform_named
from brats_seg.errors import CaseError, ConfigError
from brats_seg.labels import BRATS2017, regions_of
from brats_seg.voxels.box import Box, Triple
from tests.prepared import write_prepared

IDS = ("BraTS2021_00000", "BraTS2021_00001", "BraTS2021_00002")
PAIR = IDS[:2]
AUGMENTS = ("none", "light", "full")
DRAW = loader.PatchKey(epoch=3, case_id="a", draw=1)


class DeadlyDataset(PatchDataset):
    """Kills the worker that loads the fourth patch of a case, as the system does if memory runs out."""

    def __getitem__(self, key: loader.PatchKey) -> loader.Sample:
        if key.draw == 3 and multiprocessing.parent_process():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(key)


def make_dataset(folder: Path, *names: str, cls: type[PatchDataset] = PatchDataset) -> PatchDataset:
    patch, extra = PatchConfig(size=(12, 12, 12)), tuple(map(transform_named, names))
    return cls(training_transforms(folder, patch=patch, augment="full", extra=extra), seed=1)


def test_a_seed_never_changes_and_depends_on_every_part() -> None:
    """Otherwise resumed runs would be trained on other patches."""
    assert loader.stable_seed(55, 0, "BraTS2021_00000") == 7657059870038276205
    parts = (1, 2), (2, 1), (1, "2"), ("ab", "c"), ("a", "bc"), (12,)
    assert [0 <= seed < 2**63 for seed in {loader.stable_seed(*one) for one in parts}] == [True] * 6
    changes = ({}, {"epoch": 4}, {"case_id": "b"}, {"draw": 0})
    drawn = [(55, replace(DRAW, **change), "place") for change in changes]
    drawn += [(56, DRAW, "place"), (55, DRAW, "augment")]
    first = [np.random.default_rng(loader.patch_seed(*one)).random() for one in [*drawn, drawn[0]]]
    assert (len({*first}), first[0]) == (6, first[-1])


def test_an_epoch_has_every_case_equally_often_in_an_order_of_its_own() -> None:
    ids = [f"case{number}" for number in range(20)]
    keys = loader.epoch_patches(ids, 2, 3, 55)
    assert Counter(key.case_id for key in keys) == dict.fromkeys(ids, 3)
    assert len(set(keys)) == 60
    assert {key.draw for key in keys} == {0, 1, 2}
    assert list(keys) != sorted(keys, key=lambda patch: (patch.case_id, patch.draw))
    assert keys == loader.epoch_patches(ids[::-1], 2, 3, 55)
    others = (loader.epoch_patches(ids, *given) for given in ((3, 3, 55), (2, 3, 56)))
    assert len({keys[0].case_id for keys in others}) == 2


def test_workers_end_with_the_epoch_also_when_it_is_cut_short(tiny_prepared: Path) -> None:
    keys = loader.epoch_patches(IDS, 0, 20, 1)
    samples = loader.patch_loader(make_dataset(tiny_prepared), keys, 2)
    next(samples)
    assert len(multiprocessing.active_children()) == 2
    samples.close()
    assert multiprocessing.active_children() == []


@pytest.mark.parametrize("n_workers", [0, 2])
def test_a_bad_case_is_named_by_its_own_error(tiny_prepared: Path, n_workers: int) -> None:
    keys = [loader.PatchKey(epoch=0, case_id=case_id, draw=0) for case_id in (IDS[0], "b")]
    samples = loader.patch_loader(make_dataset(tiny_prepared), keys, n_workers)
    assert next(samples).case_id == IDS[0]
    with pytest.raises(CaseError, match=r"case b, .*found no prepared case") as raised:
        next(samples)
    # dask pickles an error with those before it, and must come to an end
    assert not isinstance(raised.value.__context__, RuntimeError)


@pytest.mark.parametrize("reason", ["a worker process was killed", "shared memory is too small"])
def test_what_ends_workers_costs_no_patch(tiny_prepared, monkeypatch, caplog, reason):
    keys = loader.epoch_patches(IDS, 0, 5, 1)
    dataset = make_dataset(tiny_prepared, cls=DeadlyDataset)
    if reason.startswith("shared"):
        dataset = make_dataset(tiny_prepared)
        no_space = RuntimeError("unable to allocate shared memory(shm): No space left (simulated)")
        monkeypatch.setattr(torch.Tensor, "share_memory_", Mock(side_effect=no_space))
    samples = loader.patch_loader(dataset, keys, 2)
    for sample, expected in zip(samples, map(dataset.__getitem__, keys), strict=True):
        assert sample.case_id == expected.case_id
        assert torch.equal(sample.image, expected.image)
    assert [message.split(". ")[-1] for message in caplog.messages] == [
        "Going on with 1 worker.",
        "Going on with 0 workers.",
    ]
    advice = "Set training.n_workers lower, or to 0. In a container, /dev/shm"
    assert all(m.startswith(reason) and advice in m for m in caplog.messages)
    assert multiprocessing.active_children() == []


class RandShiftOfTheirs(RandomizableTransform, MapTransform):
    """A transform as a user of MONAI writes it."""

    def __init__(self) -> None:
        MapTransform.__init__(self, "image")
        RandomizableTransform.__init__(self, prob=0.5)

    def __call__(self, data: dict[str, Tensor]) -> dict[str, Tensor]:
        self.randomize(None)
        if not self._do_transform:
            return data
        return {**data, "image": data["image"] + self.R.uniform(1, 2)}


def noise() -> Compose:
    return Compose([RandGaussianNoised("image", prob=1.0)])


NAMED = ("tests.test_loader.RandShiftOfTheirs", "tests.test_loader.noise")


@pytest.mark.parametrize("n_workers", [0, 1, 2])
@pytest.mark.parametrize("names", [(), NAMED], ids=["ours", "of a user"])
def test_workers_draw_alike(tiny_prepared: Path, names: tuple[str, ...], n_workers: int) -> None:
    keys, plain = loader.epoch_patches(IDS, 0, 5, 1), make_dataset(tiny_prepared)
    dataset, alone = (make_dataset(tiny_prepared, *names) for _ in range(2))
    before = torch.get_rng_state()
    samples = list(loader.patch_loader(dataset, keys, n_workers))
    assert len(samples) == 15
    assert torch.equal(torch.get_rng_state(), before)
    for key, sample in reversed(list(zip(keys, samples, strict=True))):
        assert equal(sample, alone[key])
        assert (type(sample.image), sample.image.dtype) == (Tensor, torch.float16)
        assert (type(sample.target), sample.target.dtype) == (Tensor, torch.uint8)
        assert torch.equal(sample.image, plain[key].image) == (not names)


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_package.transform", "No module named 'no_such_package'"),
        ("monai.transforms.NoSuch", "has no attribute 'NoSuch'"),
        ("monai.transforms.RandFlipd", "missing 1 required positional argument: 'keys'"),
        ("monai.transforms.RandFlip", "returned <monai.transforms.spatial.array.RandFlip"),
        ("gc.enable", "returned None"),
    ],
)
def test_a_name_of_no_transform_is_refused(name: str, reason: str) -> None:
    with pytest.raises(ConfigError, match=rf"training.transforms .*{name}.*{reason}.*[Ee]xpected"):
        transform_named(name)


def crop() -> MapTransform:
    return CenterSpatialCropd(("image", "label"), roi_size=(4, 12, 12))


def crop_twice() -> MapTransform:
    return RandCropByPosNegLabeld(("image", "label"), "label", (4, 12, 12), num_samples=2)


def to_regions() -> MapTransform:
    return ConvertToMultiChannelBasedOnBratsClassesd("label")


def drop_label() -> SelectItemsd:
    return SelectItemsd(("image", "convention"))


def return_nothing() -> Transform:
    return lambda data: None


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("crop", r"'image': \(4, 4, 12, 12\), 'label': \(1, 4, 12, 12\)"),
        ("crop_twice", r"'image': \(4, 4, 12, 12\), 'label': \(1, 4, 12, 12\)"),
        ("to_regions", r"'label': \(3, 12, 12, 12\)"),
        ("drop_label", r"\{'image': \(4, 12, 12, 12\), 'convention': \(\)\}"),
        ("return_nothing", r"a NoneType with the shapes \{\}"),
    ],
)
def test_a_transform_that_changes_shapes_is_refused(tiny_prepared, name, found):
    """A smaller patch would be trained on silently, and of other regions the first as the label map."""
    dataset = make_dataset(tiny_prepared, f"tests.test_loader.{name}")
    with pytest.raises(ConfigError, match=rf"training.transforms .*{found}.*; expected .*image"):
        dataset[loader.PatchKey(epoch=0, case_id=IDS[0], draw=0)]


def dataset_of(path: Path, augment: str = "none", size: Triple | str = (16, 24, 8)) -> PatchDataset:
    given = {"patch": PatchConfig(size=size, foreground=0.5), "multiple": (16, 16, 32)}
    return PatchDataset(training_transforms(path, augment=augment, **given), seed=1)


def keys_of(n: int) -> list[loader.PatchKey]:
    return [loader.PatchKey(epoch=0, case_id=PAIR[number % 2], draw=number) for number in range(n)]


def equal(one: loader.Sample, other: loader.Sample) -> bool:
    pairs = (one.image, other.image), (one.target, other.target)
    return one.case_id == other.case_id and all(torch.equal(*pair) for pair in pairs)


@pytest.mark.parametrize("augment", AUGMENTS)
def test_a_patch_is_an_image_and_a_target_of_one_size(cubes: Path, augment: str) -> None:
    dataset, plain = dataset_of(cubes, augment), dataset_of(cubes)
    held = [dataset[key] for key in keys_of(20)]
    copies = [(sample.image.clone(), sample.target.clone()) for sample in held]
    for key in keys_of(8):
        dataset[key].image.fill_(9)
    for key, sample, (image, target) in zip(keys_of(20), held, copies, strict=True):
        assert sample.case_id == key.case_id
        assert (sample.image.shape, sample.image.dtype) == ((4, 16, 24, 8), torch.float16)
        assert (sample.target.shape, sample.target.dtype) == ((3, 16, 24, 8), torch.uint8)
        assert sample.image.isfinite().all()
        wt, tc, et = sample.target
        assert ((et <= tc) & (tc <= wt)).all()
        assert torch.equal(sample.image, image)
        assert torch.equal(sample.target, target)
        # a mirrored patch is at the same place
        assert augment == "full" or int(wt.sum()) == int(plain[key].target[0].sum())


@pytest.mark.parametrize("size", [(60, 60, 60), "whole", None])
def test_without_augmentation_a_sample_is_a_box_of_the_case(cubes: Path, size) -> None:
    case, key = open_case(cubes, PAIR[0]), keys_of(1)[0]
    sample = dataset_of(cubes, size=size)[key] if size else loader.whole_case(cubes, PAIR[0])
    box = Box.at((0, 0, 0), (48, 48, 64) if size else case.shape)
    if size not in {"whole", None}:
        box = Box.at(tuple((n - 60) // 2 for n in case.shape), size)
    assert (sample.case_id, sample.image.dtype) == (PAIR[0], torch.float16)
    np.testing.assert_array_equal(sample.image, box.read(case.image))
    np.testing.assert_array_equal(sample.target, regions_of(box.read(case.labels), BRATS2017))


@pytest.mark.parametrize("augment", AUGMENTS)
def test_threads_change_no_bit(cubes: Path, augment: str, request: pytest.FixtureRequest) -> None:
    dataset = dataset_of(cubes, augment, size=(48, 48, 48))
    alone = [dataset[key] for key in keys_of(12)]
    request.addfinalizer(partial(torch.set_num_threads, torch.get_num_threads()))
    torch.set_num_threads(3)
    together = [dataset[key] for key in reversed(keys_of(12))][::-1]
    assert torch.get_num_threads() == 3
    assert all(map(equal, alone, together))


def test_a_case_without_label_map_is_named(tmp_path: Path) -> None:
    unlabelled, key = write_prepared(tmp_path, labelled=False), keys_of(1)[0]
    for read in (
        lambda: loader.whole_case(unlabelled, PAIR[0]),
        *(partial(dataset_of(unlabelled, augment).__getitem__, key) for augment in AUGMENTS),
    ):
        with pytest.raises(CaseError, match=f"case {PAIR[0]}, .*found no label map"):
            read()


def make_sample(value: int) -> loader.Sample:
    """A sample whose tensors are not contiguous."""
    image = torch.full((4, 4, 4, 4), value, dtype=torch.float16)
    target = torch.full((3, 4, 4, 4), value % 2, dtype=torch.uint8)
    image[0, 0], target[0, :, 0] = 7, 3
    return loader.Sample(image=image.transpose(1, 2), target=target.transpose(1, 3), case_id="case")


def test_memory_is_left_alone_while_a_view_of_a_sample_exists() -> None:
    """Both ends are in one process here."""
    samples: Any = [make_sample(number) for number in range(5)]
    send, blocks = loader._Sender(samples).send, {}
    loader._receive(send(0), blocks)  # a block that was free before is marked too
    kept = []
    for number in range(5):
        sample = loader._receive(send(number), blocks)
        kept.append((sample.image[1:3, 2].permute(1, 2, 0), sample.target[1][None]))
        del sample
    del blocks
    for number, (image, target) in enumerate(kept):
        assert (image.unique().tolist(), target.unique().tolist()) == ([number], [number % 2])
    kept.clear()
    assert send(0).memory is None
    samples.append(loader.Sample(image=torch.ones(5000), target=torch.ones(1), case_id="larger"))
    assert send(5).block[1] < 5  # in place of a free one, which is too small
