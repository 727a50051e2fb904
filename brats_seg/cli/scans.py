"""Commands `index`, `prepare`, `convert` and `phantom`: find, prepare, convert and generate scans."""

from pathlib import Path
from typing import Annotated

import typer

from brats_seg.cli.options import (
    DEMO_CASES,
    ConfigOption,
    IdentifiersOption,
    JsonOption,
    LabelFilesOption,
    LabelsOption,
    PreparedOption,
    PreprocessOption,
    PresetOption,
    SeriesOption,
    SetOption,
    SkipBadOption,
    importing,
    print_json,
    settings_of,
)
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import counted
from brats_seg.progress import tracked

DataArgument = Annotated[
    Path,
    typer.Argument(help="Folder of scans of any layout, or a .csv or .json table of their paths."),
]


def index(
    data: DataArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Table of cases to write.")] = Path(
        "cases.csv"
    ),
    labels: LabelsOption = None,
    label_files: LabelFilesOption = None,
    as_json: JsonOption = False,
) -> None:
    """Find cases and their label conventions, and list what is wrong with them."""
    with importing():
        from brats_seg.cases.index import summarise
        from brats_seg.data.fold import open_index

    flags = {"cases.labels": labels, "cases.label_files": label_files}
    config = settings_of(None, None, None, flags)
    found = open_index(data, output, config, n_workers=available_cpus(), track=tracked)
    for line in summarise(found):
        print(line)
    if as_json:
        from brats_seg.json_results import indexed_folder

        print_json(indexed_folder(found, output))
    print(f"wrote {output}")
    if any(not case.usable for case in found.cases):
        raise typer.Exit(1)


def prepare(
    data: DataArgument,
    prepared: PreparedOption = None,
    preset: PresetOption = None,
    config: ConfigOption = None,
    settings: SetOption = None,
    labels: LabelsOption = None,
    label_files: LabelFilesOption = None,
    skip_bad: SkipBadOption = False,
    verify: Annotated[
        bool,
        typer.Option("--verify", help="Only compare prepared cases with their check sums."),
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also prepare cases again that are damaged.")
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Index the scans, distribute them to folds, and prepare them for training."""
    with importing():
        from brats_seg.data.fold import prepare_data, prepared_path_of

    if verify:
        _verify(prepared or prepared_path_of(data), as_json=as_json)
        return

    flags = {
        "cases.labels": labels,
        "cases.label_files": label_files,
        "cases.skip_bad": skip_bad or None,
    }
    chosen = settings_of(preset, config, settings, flags)
    folder = prepared or prepared_path_of(data)
    done = prepare_data(data, config=chosen, prepared_path=folder, repair=repair, track=tracked)
    n_folds = len(done.folds.folds)
    if as_json:
        from brats_seg.json_results import PreparedFolder

        print_json(
            PreparedFolder(
                folder=folder,
                case_ids=tuple(sorted(done.case_ids)),
                n_folds=n_folds,
                folds_table=done.folds_path,
            )
        )
    print(f"{counted(len(done.case_ids), 'case')} prepared, with cases.csv, in {folder}")
    print(f"the table of {n_folds} folds is {done.folds_path.name} there")


def convert(
    dicom: Annotated[Path, typer.Argument(help="Folder with DICOM files of MR examinations.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write the scans to.")
    ] = Path("scans"),
    series: SeriesOption = None,
    identifiers: IdentifiersOption = False,
    preprocess: PreprocessOption = False,
    as_json: JsonOption = False,
) -> None:
    """Convert DICOM examinations to NIfTI, and say which series is which modality, and why.

    `predict` does the same with a folder of DICOM files. Exit code 1: some cases cannot be predicted.
    """
    from brats_seg.dicom.convert import DicomOptions, convert_studies
    from brats_seg.dicom.modalities import parse_overrides

    options = DicomOptions(
        series=parse_overrides(series or []),
        with_identifiers=identifiers,
        preprocess=preprocess,
    )
    done = convert_studies(dicom, output, options, track=tracked)
    if as_json:
        from brats_seg.json_results import converted_folder

        print_json(converted_folder(done, output))
    for one in done:
        for problem in one.case.problems:
            print(f"FAILED  {problem}")
    n_usable = sum(one.case.usable for one in done)
    print(f"{n_usable} of {counted(len(done), 'case')} can be predicted: {output}")
    if n_usable < len(done):
        raise typer.Exit(1)


def phantom(
    output: Annotated[Path, typer.Argument(help="Folder to write to.")],
    cases: Annotated[int, typer.Option(min=1, help="Number of cases.")] = DEMO_CASES,
    seed: Annotated[int, typer.Option(help="The same seed gives the same cases.")] = 0,
    as_json: JsonOption = False,
) -> None:
    """Generate phantom cases in the layout of BraTS 2021, to try the software without scans."""
    from brats_seg.cases.phantom import write_phantom_cases

    write_phantom_cases(output, n_cases=cases, seed=seed)
    if as_json:
        from brats_seg.json_results import WrittenFile

        print_json(WrittenFile(path=output))
    print(f"wrote {counted(cases, 'phantom case')} to {output}")


def _verify(folder: Path, *, as_json: bool) -> None:
    """Verify prepared cases, and exit with 1 if some are damaged."""
    from brats_seg.data.verify import prepared_ids, verify_cases

    case_ids = prepared_ids(folder)
    errors = verify_cases(case_ids, folder, track=tracked)
    if as_json:
        from brats_seg.json_results import PreparedFolder

        damage = tuple(map(str, errors))
        print_json(PreparedFolder(folder=folder, case_ids=tuple(case_ids), damage=damage))
    for error in errors:
        print(error)
    print(f"{counted(len(case_ids), 'prepared case')} in {folder}, {len(errors)} damaged")
    if errors:
        raise typer.Exit(1)
