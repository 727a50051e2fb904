"""Files that hold scans in a form that is not read, and what to do about them."""

from collections.abc import Collection, Iterable, Iterator, Sequence
from pathlib import Path

from brats_seg.cases.folders import Folder

_ARCHIVES = (".tar", ".tgz", ".zip", ".gz", ".bz2", ".xz", ".7z", ".rar")
_SLICES = (".h5", ".hdf5")
_DICOM = (".dcm", ".ima")
_DICOM_MAGIC = b"DICM"
_DICOM_MAGIC_START = 128


_UNPACK = "unpack them (tar -xf FILE -C FOLDER, or unzip FILE -d FOLDER) and give that folder"
_TAKE_VOLUMES = (
    "they hold 2-D slices, and whole volumes are needed (on Kaggle "
    "awsaf49/brats20-dataset-training-validation instead of awsaf49/brats2020-training-data)"
)
_CONVERT = (
    "convert them (dcm2niix -z y -o FOLDER SCANS), bring the four modalities onto one grid, and "
    "give that folder"
)


def advise(root: Path, folders: Collection[Folder]) -> tuple[str, ...]:
    """Say for each kind of unread file how many there are and what to do; nothing if none."""
    archives = _ending(folders, _ARCHIVES)
    slices = _ending(folders, _SLICES)
    dicom = [path for folder in folders for path in _dicom_files(root, folder)]
    return (
        *describe("archives are not read", archives, _UNPACK),
        *describe("HDF5 files are not read", slices, _TAKE_VOLUMES),
        *describe("DICOM files are not read", dicom, _CONVERT),
        *(
            f"the folder {folder.path.as_posix()} cannot be read ({folder.refused})"
            for folder in folders
            if folder.refused
        ),
    )


def describe(what: str, paths: Sequence[Path], next_step: str) -> Iterator[str]:
    """Say something about files, if there are any, with their number and one of them."""
    if paths:
        yield f"{what}, such as {paths[0].as_posix()} ({len(paths)} in all): {next_step}"


def _ending(folders: Iterable[Folder], suffixes: tuple[str, ...]) -> list[Path]:
    return [
        folder.path / name
        for folder in folders
        for name in folder.others
        if name.lower().endswith(suffixes)
    ]


def _dicom_files(root: Path, folder: Folder) -> list[Path]:
    """Return the DICOM files; scanners leave out the suffix or let numbers follow a dot."""
    named = [n for n in folder.others if n.lower().endswith(_DICOM) or n.upper() == "DICOMDIR"]
    bare = [n for n in folder.others if Path(n).suffix[1:].isdecimal() or not Path(n).suffix]
    bare = [n for n in bare if n not in named]
    # one of a folder stands for all: there are thousands
    if bare and not _is_dicom(root / folder.path / bare[0]):
        bare = []
    return [folder.path / name for name in sorted(named + bare)]


def _is_dicom(path: Path) -> bool:
    try:
        with path.open("rb") as stream:
            stream.seek(_DICOM_MAGIC_START)
            return stream.read(len(_DICOM_MAGIC)) == _DICOM_MAGIC
    except OSError:
        return False
