"""What an autoencoder makes of a scan, and how far from it that is."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from brats_seg.config import OVERLAP
from brats_seg.errors import CaseError, UsageError
from brats_seg.inference.model import Member, build_single
from brats_seg.inference.scan import Scan
from brats_seg.runtime.device import Device
from brats_seg.runtime.sliding_window import predict_logits
from brats_seg.runtime.weights import read_trained, require_task

Image = npt.NDArray[np.float32]


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reconstruction:
    """A scan, and what became of it."""

    case_id: str
    image: Image
    """(4, x, y, z): the brain crop, normalised, 0 outside the brain."""
    reconstruction: Image
    """(4, x, y, z)"""
    warnings: tuple[str, ...]
    """What was unusual about the scan."""

    @property
    def rmse(self) -> tuple[float, ...]:
        """Root of the mean square error inside the brain, in the order of `MODALITIES`.

        In units of the normalised intensity, whose standard deviation in the brain is 1: an image
        without any contrast has an error of 1.
        """
        brain = (self.image != 0).any(axis=0)
        differences = (self.reconstruction - self.image)[:, brain]
        # a sum over millions of voxels
        return tuple(np.sqrt(np.square(differences).mean(axis=1, dtype=np.float64)).tolist())


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Reconstructor:
    """An autoencoder that is ready."""

    member: Member
    device: Device
    spacing_mm: tuple[float, float, float]
    """Voxel size of the training cases."""
    overlap: float = OVERLAP
    """Share that neighbouring windows have in common."""

    @classmethod
    def load(cls, path: Path, device: Device) -> Self:
        """Load a run or a checkpoint.

        Raises:
            UsageError: The path holds no autoencoder, several, or a damaged one.
        """
        read = read_trained(path)
        for trained in read:
            require_task(trained, "reconstruction", path)
        if len(read) > 1:
            msg = f"{path} holds {len(read)} autoencoders; expected one"
            raise UsageError(msg)
        (member,) = build_single(read[0], device).members
        return cls(member=member, device=device, spacing_mm=read[0].identity.spacing_mm)

    def reconstruct(self, scan: Scan) -> Reconstruction:
        """Encode a scan and decode it again, as the network learnt: whole, or window by window.

        Raises:
            CaseError: What comes out is no number.
        """
        order = list(self.member.channels)
        x, y, z = scan.image.shape[1:]
        decoded = predict_logits(
            self._of_window,
            torch.from_numpy(scan.image)[order].to(self.device.torch_device),
            window=self.member.window or (x, y, z),
            overlap=self.overlap,
        )
        reconstruction = np.empty_like(scan.image)
        reconstruction[order] = decoded.cpu().numpy()
        if not np.isfinite(reconstruction).all():
            n_broken = int((~np.isfinite(reconstruction)).sum())
            found = f"a reconstruction with {n_broken} voxels that are no numbers"
            next_step = "Try --precision fp32; if that does not help, the model is broken."
            raise CaseError(scan.case_id, "(all)", found, "numbers", next_step)
        return Reconstruction(
            case_id=scan.case_id,
            image=scan.image,
            reconstruction=reconstruction,
            warnings=scan.warnings,
        )

    @torch.inference_mode()
    def _of_window(self, window: Tensor) -> Tensor:
        with self.device.autocast():
            decoded: Tensor = self.member.network(window)
        return decoded
