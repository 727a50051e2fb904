"""What a case is: ids, release and the file of each modality."""

from dataclasses import dataclass
from pathlib import Path
from typing import Self

from brats_seg.labels import MODALITIES


@dataclass(frozen=True, kw_only=True, slots=True)
class ScanFile:
    """The place of one volume: a file, or one volume of a 4-D file."""

    path: Path
    """Relative to the data folder."""
    volume: int | None = None
    """Index along the fourth axis, for releases that keep all modalities in one file."""

    def __str__(self) -> str:
        """Return the form of `cases.csv`: `a/b.nii.gz`, or `a/b.nii.gz#2` for a volume of a 4-D file."""
        name = self.path.as_posix()
        return name if self.volume is None else f"{name}#{self.volume}"

    @classmethod
    def parse(cls, text: str) -> Self:
        """Read what `str` wrote."""
        name, hash_sign, volume = text.rpartition("#")
        if hash_sign and volume.isdigit():
            return cls(path=Path(name), volume=int(volume))
        return cls(path=Path(text))


@dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One imaging time point."""

    case_id: str
    patient_id: str
    timepoint: str = ""
    """Part of the case id, where the release has time points."""
    release: str
    """For example `brats2021`, `brats2024-gli`, `msd`, or `unknown`."""
    label_convention: str = ""
    """Name of the convention, confirmed from the voxels; empty without a label map."""
    t1n: ScanFile | None = None
    t1c: ScanFile | None = None
    t2w: ScanFile | None = None
    t2f: ScanFile | None = None
    label: ScanFile | None = None
    problems: tuple[str, ...] = ()
    """Why the case cannot be used; empty when it can."""
    remarks: tuple[str, ...] = ()
    """What was unusual and could be dealt with, such as a label file with a foreign name."""
    label_values: tuple[int, ...] = ()
    """Voxel values that occur in the label map."""
    grade: str = ""
    """`HGG` or `LGG` where the release says so."""
    age_years: float | None = None
    tumour_ml: float | None = None
    """Volume of the whole tumour in the label map."""
    voxel_hash: str = ""
    """Hash of the voxels of the first modality: equal for one scan under two ids."""
    files_key: str = ""
    """Changes when a file of the case is replaced: names, sizes and times of change."""

    @property
    def images(self) -> tuple[ScanFile, ...]:
        """The files of the modalities there are, in the order of `MODALITIES`."""
        found = (getattr(self, modality) for modality in MODALITIES)
        return tuple(scan for scan in found if scan is not None)

    @property
    def usable(self) -> bool:
        """Whether the case has no problem."""
        return not self.problems


@dataclass(frozen=True, kw_only=True, slots=True)
class CaseIndex:
    """The cases of a data folder, sorted by id."""

    root: Path
    """The folder that file names are relative to."""
    cases: tuple[Case, ...]

    @property
    def usable(self) -> tuple[Case, ...]:
        """The cases without problems."""
        return tuple(case for case in self.cases if case.usable)

    @property
    def trainable(self) -> tuple[Case, ...]:
        """The cases without problems that have a label map."""
        return tuple(case for case in self.usable if case.label is not None)
