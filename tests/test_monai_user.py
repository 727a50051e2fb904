"""Our cases, transforms and accumulation in the pipeline of somebody who uses MONAI."""

from pathlib import Path

import numpy as np
import torch
from monai.data import DataLoader, Dataset
from monai.losses import DiceLoss
from monai.networks.nets import BasicUNet
from monai.transforms import Compose, LoadImaged, RandFlipd, RandGaussianNoised, ScaleIntensityd

from brats_seg import Accumulator, MicroBatch
from brats_seg.config import PatchConfig
from brats_seg.data.intensities import RandIntensitiesd, add_noise, change_gamma
from brats_seg.data.transforms import ReadPatchd, RegionsOfLabelsd
from brats_seg.labels import BRATS2017, regions_of
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
