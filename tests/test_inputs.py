"""What is to be predicted: folders, tables, single cases, and what is wrong with them."""

import gzip
import json
from pathlib import Path

import pytest

from brats_seg.cases.case import Case
from brats_seg.cases.find import find_inputs, single_input
from brats_seg.errors import LayoutError, UsageError
from brats_seg.labels import MODALITIES
from tests.builders import write_case


def ids(inputs: tuple[Case, ...]) -> list[str]:
    return [one.case_id for one in inputs]


def paths_of(folder: Path) -> dict[str, Path]:
    case_id = folder.name
    names = ("t1", "t1ce", "t2", "flair")
    return {
        modality: folder / f"{case_id}_{name}.nii.gz"
        for modality, name in zip(MODALITIES, names, strict=True)
    }


def test_folders_are_searched_as_for_training(brats_root: Path, tmp_path: Path) -> None:
    write_case(tmp_path / "more", "BraTS-GLI-00003-000")

    inputs = find_inputs([brats_root, tmp_path / "more"])

    assert ids(inputs) == ["BraTS-GLI-00003-000", *(f"BraTS2021_{n:05d}" for n in range(6))]
    assert inputs[0].release == "brats2023-gli"
    assert all((one.root / scan.path).is_file() for one in inputs for scan in one.images)


def test_one_case_folder_is_enough(tmp_path: Path) -> None:
    folder = write_case(tmp_path, labelled=False)

    assert ids(find_inputs([folder])) == ["BraTS2021_00000"]


def test_label_maps_of_scans_to_predict_do_not_matter(tmp_path: Path) -> None:
    folder = write_case(tmp_path / "scans", "smith")
    for name in ("labels", "masks"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "smith.nii.gz").touch()
    (folder / "smith_seg.nii.gz").unlink()

    (found,) = find_inputs([tmp_path])

    assert found.usable
    assert found.label is None


@pytest.mark.parametrize("separator", [",", ";"])
def test_a_csv_table_names_files_relative_to_itself(tmp_path: Path, separator: str) -> None:
    folder = write_case(tmp_path / "scans")
    files = {modality: path.relative_to(tmp_path) for modality, path in paths_of(folder).items()}
    header = separator.join(["case_id", "t1", "t1ce", "t2", "FLAIR", "comment"])
    row = separator.join(["me", *map(str, files.values()), "new"])
    # spreadsheets put a mark before the first letter
    (tmp_path / "cases.csv").write_text(f"{header}\n{row}\n", encoding="utf-8-sig")

    (found,) = find_inputs([tmp_path / "cases.csv"])

    assert found.case_id == "me"
    assert [found.root / scan.path for scan in found.images] == [*paths_of(folder).values()]
    assert found.problems == ()


def test_a_json_table_may_name_volumes_of_a_4d_file(tmp_path: Path) -> None:
    row = {modality: f"all.nii.gz#{place}" for place, modality in enumerate(MODALITIES)}
    (tmp_path / "cases.json").write_text(json.dumps([{"case_id": "me", **row}]))

    (found,) = find_inputs([tmp_path / "cases.json"])

    assert [scan.volume for scan in found.images] == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cases.csv", "id,t1n\na,b\n"),
        ("cases.csv", b"\xff\xfe\x00"),
        ("cases.json", "{"),
        ("cases.json", '{"case_id": "a"}'),
        ("cases.json", "[1]"),
    ],
)
def test_a_table_that_cannot_be_read_says_what_it_should_be(
    tmp_path: Path, name: str, content: str | bytes
) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(UsageError, match=rf"{name} cannot be read .*Expected case_id, t1n, t1c"):
        find_inputs([path])


@pytest.mark.parametrize("name", ["../a", "/etc/a", "a/b", "..", "a\\b", ".hidden", "c:a"])
def test_a_name_that_leaves_the_output_folder_is_a_problem(tmp_path: Path, name: str) -> None:
    row = {modality: f"{modality}.nii.gz" for modality in MODALITIES}
    (tmp_path / "cases.json").write_text(json.dumps([{"case_id": name, **row}]))

    (found,) = find_inputs([tmp_path / "cases.json"])

    assert (
        "cannot be the name of a file; expected a file name without special characters"
        in found.problems[0]
    )


def test_two_cases_of_one_id_are_both_refused(tmp_path: Path) -> None:
    """One of the results would overwrite the other."""
    for place in ("a", "b"):
        write_case(tmp_path / place)

    inputs = find_inputs([tmp_path / "a", tmp_path / "b"])

    assert ["found 2 cases of this id; expected one" in one.problems[0] for one in inputs] == [
        True,
        True,
    ]


def test_a_folder_without_cases_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="holds no cases"):
        find_inputs([tmp_path])


def test_a_single_scan_file_is_refused_with_the_way_to_give_it(tmp_path: Path) -> None:
    path = tmp_path / "t1.nii.gz"
    path.touch()

    with pytest.raises(UsageError, match="For one case give --t1n, --t1c"):
        find_inputs([path])


def test_four_files_are_called_by_what_their_names_share(tmp_path: Path) -> None:
    found = single_input(None, paths_of(tmp_path / "BraTS2021_00007"))

    assert found.case_id == "BraTS2021_00007"
    assert found.release == "brats2021"


def test_four_files_without_a_name_in_common_are_called_by_their_folder(tmp_path: Path) -> None:
    files = {modality: tmp_path / "Smith" / f"{modality}.nii" for modality in MODALITIES}

    assert single_input(None, files).case_id == "Smith"
    assert single_input("me", files).case_id == "me"


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("cases.csv", "case_id,t1n,t1c,t2w,t2f\n"),
        ("cases.csv", ""),
        ("cases.json", "[]"),
        ("cases.json", "[" * 100_000),
        ("cases.json", '[{"case_id": ' + "9" * 5000 + "}]"),
        ("cases.csv", bytes(range(256)) * 9),
        ("cases.csv", gzip.compress(b"case_id,t1n", mtime=0)),
        ("cases.json", bytes(range(256))),
    ],
)
def test_a_table_without_cases_is_refused(tmp_path: Path, name: str, content: str | bytes) -> None:
    path = tmp_path / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(UsageError, match=rf"{name} (cannot be read|lists no cases)"):
        find_inputs([path])


def test_a_path_that_is_too_long_is_refused(tmp_path: Path) -> None:
    with pytest.raises(LayoutError, match="does not exist"):
        find_inputs([tmp_path / ("n" * 300)])


def test_a_long_id_in_a_table_is_a_problem_of_its_case(tmp_path: Path) -> None:
    row = {modality: f"{modality}.nii.gz" for modality in MODALITIES}
    rows = [
        {"case_id": "x" * 300, **row},
        {"case_id": "a\nb\0\ud800", **row},
        {"case_id": "c", **row},
    ]
    (tmp_path / "cases.json").write_text(json.dumps(rows))

    escaped, good, long = find_inputs([tmp_path / "cases.json"])

    assert good.problems == ()
    assert "found an id of 300 bytes" in long.problems[0]
    assert escaped.case_id == r"a\nb\x00\ud800"
    assert "cannot be the name of a file" in escaped.problems[0]
