"""Our cases, transforms and accumulation in the pipeline of somebody who uses MONAI."""

from pathlib import Path

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import BasicUNet
from monai.transforms import (
    Compose,
    Lambdad,
    LoadImaged,
    RandFlipd,
    RandGaussianNoised,
    ScaleIntensityd,
)

from brats_seg.cases.folds import Split
from brats_seg.config import PatchConfig, load_config
from brats_seg.data.fold import open_split
from brats_seg.data.intensities import RandIntensitiesd, add_noise, change_gamma
from brats_seg.data.loader import PatchKey
from brats_seg.data.transforms import ReadPatchd, RegionsOfLabelsd
from brats_seg.labels import BRATS2017, regions_of
from brats_seg.training.gradient import MicroBatch
from brats_seg.training.optimisation import Accumulator
from brats_seg.training.run_plan import held_out_patches, plan_run, read_batches
from tests.builders import make_label_map, make_volumes, write_nifti

PATCH = PatchConfig(size=(32, 32, 32), foreground=1.0)


ITEMS = [{"case_id": f"BraTS2021_0000{number}"} for number in range(2)]


def test_ten_lines_train_a_network_of_monai(five_prepared: Path) -> None:
    torch.manual_seed(0)
    transforms = [
        ReadPatchd(folder=five_prepared, patch=PATCH),
        RegionsOfLabelsd(),
        RandFlipd(("image", "label"), prob=0.5, spatial_axis=0),
        RandGaussianNoised("image", prob=1.0),
    ]
    patches = DataLoader(Dataset(ITEMS, Compose(transforms)), batch_size=1)
    network = BasicUNet(spatial_dims=3, in_channels=4, out_channels=3, features=(4,) * 6)
    optimizer = torch.optim.SGD(network.parameters(), lr=0.1)
    accumulator = Accumulator(network, DiceLoss(sigmoid=True), optimizer)
    before = [parameter.detach().clone() for parameter in network.parameters()]
    result = accumulator.step([MicroBatch(patch["image"], patch["label"]) for patch in patches])
    assert result.n_patches == 2
    assert not result.skipped
    assert 0 < result.loss < 1
    after = network.parameters()
    assert any(not torch.equal(old, new) for old, new in zip(before, after, strict=True))


def test_our_transforms_work_on_files_that_monai_reads(tmp_path: Path) -> None:
    image = np.moveaxis(make_volumes(), 0, -1).astype(np.float32)
    write_nifti(tmp_path / "image.nii.gz", image)
    write_nifti(tmp_path / "label.nii.gz", make_label_map())
    transforms = Compose(
        [
            LoadImaged(("image", "label"), ensure_channel_first=True),
            ScaleIntensityd("image"),
            RandIntensitiesd("image", [(add_noise, 1.0), (change_gamma, 1.0)]),
            RegionsOfLabelsd("label", convention="brats2017"),
        ]
    )
    files = {name: str(tmp_path / f"{name}.nii.gz") for name in ("image", "label")}
    found = transforms.set_random_state(seed=0)(files)
    background = (make_volumes() == 0).all(axis=0)
    assert not found["image"].numpy()[:, background].any()
    np.testing.assert_array_equal(found["label"], regions_of(make_label_map(), BRATS2017))


def brighter() -> Lambdad:
    return Lambdad("image", lambda image: image + 1)


def test_the_settings_name_a_transform_for_training_alone(five_prepared: Path) -> None:
    first, second = (item["case_id"] for item in ITEMS)
    data = open_split(five_prepared, Split(train=(first,), validation=(second,)))
    values = {"training.device": "cpu", "training.augment": "none", "patch.size": (32, 32, 32)}
    plain = plan_run(load_config(preset="demo", values=values), data)
    named = {**values, "training.transforms": ["tests.test_monai_user.brighter"]}
    changed = plan_run(load_config(preset="demo", values=named), data)
    batches = plain.keys(0)
    [before, *_] = read_batches(plain, batches)
    [after, *_] = read_batches(changed, batches)
    for one, other in zip(before.samples, after.samples, strict=True):
        torch.testing.assert_close(other.image, (one.image.float() + 1).half())
        assert torch.equal(one.target, other.target)
    keys = [PatchKey(epoch=0, case_id=second, draw=0)]
    for one, other in zip(
        held_out_patches(plain, keys), held_out_patches(changed, keys), strict=True
    ):
        assert torch.equal(one.image, other.image)
