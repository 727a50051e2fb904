"""Transforms and inferer of an exported MONAI bundle, which needs MONAI but not this package.

`export_bundle` copies this module, and those of the package that it imports, into the bundle. Shapes
are those of MONAI: an image is `(C, X, Y, Z)`, a batch `(N, C, X, Y, Z)`.
"""

from collections.abc import Hashable, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from monai.data import MetaTensor
from monai.inferers import Inferer
from monai.transforms import MapTransform
from monai.utils import convert_to_dst_type
from torch import Tensor, nn

from brats_seg.runtime.windows import Window, predict_logits
from brats_seg.voxels.brain import brain_mask, normalised
from brats_seg.voxels.shapes import nested_regions


class NormalizeBraind(MapTransform):
    """Normalise each modality inside the brain, and set the voxels around it to exactly 0."""

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the data with `(4, X, Y, Z)` images normalised.

        Raises:
            ValueError: There is no brain, or a modality has no contrast inside it.
        """
        changed = dict(data)
        for key in self.key_iterator(data):
            image = changed[key]
            voxels = np.asarray(image)
            # in the order of the voxels of files, as when a case is prepared for training
            mask = brain_mask(list(voxels)).T
            found = np.zeros(voxels.T.shape, dtype=np.float32)
            for place, modality in enumerate(voxels):
                values, _, std = normalised(modality.T[mask])
                if not std > 0:
                    msg = f"modality {place} has no contrast inside the brain; expected a scan"
                    raise ValueError(msg)
                # networks are trained on values in half precision
                found[mask, place] = values.astype(np.float16)
            image.set_array(torch.from_numpy(np.ascontiguousarray(found.T)))
            changed[key] = image
        return changed


class BrainInferer(Inferer):
    """Apply the networks of an ensemble in evenly spaced windows, and average their probabilities."""

    def __init__(self, members: Sequence[Mapping[str, Any]]) -> None:
        """Keep the windows of each network.

        Args:
            members: `window`, or None for the brain in one pass, `overlap`, the share that neighbouring
                windows have in common, `patch` and `multiple` of each.
        """
        super().__init__()
        self.members = tuple(members)

    def __call__(
        self, inputs: Tensor, network: nn.Module, *_args: object, **_kwargs: object
    ) -> Tensor:
        """Return probabilities (N, 3, X, Y, Z), 0 outside the brain, of images (N, 4, X, Y, Z)."""
        images = torch.as_tensor(inputs).as_subclass(Tensor)
        found = torch.stack([self._of_image(image, network) for image in images])
        # with the affine of the images, which the transforms after it need
        like_inputs: Tensor = convert_to_dst_type(found, inputs)[0]
        return like_inputs

    def _of_image(self, image: Tensor, network: Any) -> Tensor:
        total = torch.zeros(())
        for member, described in zip(network.members, self.members, strict=True):
            window = self._window(described, image)
            logits = predict_logits(member, image, window=window, overlap=described["overlap"])
            total = total.to(image.device) + logits.sigmoid_()
        return total / len(self.members) * (image != 0).any(dim=0)

    def _window(self, member: Mapping[str, Any], image: Tensor) -> tuple[int, int, int]:
        size = None if member["window"] is None else tuple(member["window"])
        window = Window(size=size, overlap=member["overlap"])
        shape = (image.shape[1], image.shape[2], image.shape[3])
        return window.fit(shape, tuple(member["patch"]), tuple(member["multiple"]))


class Ensemble(nn.Module):
    """The networks of a bundle."""

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, image: Tensor) -> Tensor:
        """Return the logit of the mean probability, `(N, 4, X, Y, Z)` to `(N, 3, X, Y, Z)`."""
        shares = [member(image).sigmoid() for member in self.members]
        return torch.stack(shares).mean(dim=0).logit(eps=1e-6)


class LabelMapd(MapTransform):
    """Turn probabilities of WT, TC and ET (3, X, Y, Z) into a label map (1, X, Y, Z)."""

    def __init__(
        self,
        keys: str,
        *,
        thresholds: Sequence[float],
        smallest_mm3: Sequence[float],
        smallest_et_mm3: float,
        values: Sequence[int],
    ) -> None:
        """Keep the settings.

        Args:
            keys: Key of the probabilities.
            thresholds: Probability above which a voxel belongs to WT, TC, ET.
            smallest_mm3: Volume below which a component of WT, TC, ET is dropped.
            smallest_et_mm3: Volume of all ET together below which it becomes necrosis.
            values: Value of the label map for oedema, necrosis and ET.
        """
        super().__init__(keys)
        self.thresholds = thresholds
        self.smallest_mm3 = smallest_mm3
        self.smallest_et_mm3 = smallest_et_mm3
        self.values = values

    def __call__(self, data: Mapping[Hashable, Any]) -> dict[Hashable, Any]:
        """Return the data with label maps."""
        changed = dict(data)
        for key in self.key_iterator(data):
            image = changed[key]
            voxel_mm3 = abs(float(np.linalg.det(np.asarray(image.affine)[:3, :3])))
            regions = nested_regions(
                np.asarray(image, dtype=np.float32),
                self.thresholds,
                smallest=[mm3 / voxel_mm3 for mm3 in self.smallest_mm3],
                smallest_et=self.smallest_et_mm3 / voxel_mm3,
            )
            label_map = np.zeros((1, *regions.shape[1:]), dtype=np.uint8)
            for region, value in zip(regions, self.values, strict=True):
                label_map[0, region] = value
            # with the affine and the file name of the image
            changed[key] = MetaTensor(torch.from_numpy(label_map), meta=image.meta)
        return changed
