"""Commands `index`, `prepare`, `convert`, `phantom` and `doctor`: scans, and the machine."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from brats_seg.cli.options import (
    DEFAULT_PATH,
    DEMO_CASES,
    DataArgument,
    IdentifiersOption,
    PreparedOption,
    PreprocessOption,
    SeriesOption,
    emit,
    holds_scans,
    importing,
    print_table,
    settings,
)
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import EnvironmentalError, counted
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.doctor import Diagnosis


def index(
    data: DataArgument,
    output: Annotated[Path, typer.Option("-o", "--output", help="Table of cases to write.")] = Path(
        "cases.csv"
    ),
) -> None:
    """Find cases and their label conventions, and list what is wrong with them.

    Exit code 1: some cases cannot be used.
    """
    with importing():
        from brats_seg.cases.case_table import summarise
        from brats_seg.data.fold import open_index

    found = open_index(data, output, settings(), n_workers=available_cpus(), track=tracked)
    for line in summarise(found):
        print(line)
    emit(table=output, cases=found.cases)
    print(f"wrote {output}")
    if any(not case.usable for case in found.cases):
        raise typer.Exit(1)


def prepare(
    data: DataArgument,
    prepared: PreparedOption = None,
    verify: Annotated[
        bool, typer.Option("--verify", help="Only compare prepared cases with their check sums.")
    ] = False,
    repair: Annotated[
        bool, typer.Option("--repair", help="Also prepare cases again that are damaged.")
    ] = False,
) -> None:
    """Index the scans, distribute them to folds, and prepare them for training."""
    with importing():
        from brats_seg.data.fold import prepare_data, prepared_path_of

    folder = prepared or prepared_path_of(data)
    if verify:
        _verify(folder)
        return
    done = prepare_data(data, config=settings(), prepared_path=folder, repair=repair, track=tracked)
    n_folds = len(done.folds.folds)
    case_ids = sorted(done.case_ids)
    emit(folder=folder, case_ids=case_ids, n_folds=n_folds, folds_table=done.folds_path, damage=[])
    print(f"{counted(len(case_ids), 'case')} prepared, with cases.csv, in {folder}")
    print(f"the table of {n_folds} folds is {done.folds_path.name} there")


def _verify(folder: Path) -> None:
    """Verify prepared cases, and exit with 1 if some are damaged."""
    from brats_seg.data.verify import prepared_ids, verify_cases

    case_ids = prepared_ids(folder)
    errors = verify_cases(case_ids, folder, track=tracked)
    emit(folder=folder, case_ids=case_ids, damage=list(map(str, errors)))
    for error in errors:
        print(error)
    print(f"{counted(len(case_ids), 'prepared case')} in {folder}, {len(errors)} damaged")
    if errors:
        raise typer.Exit(1)


def convert(
    dicom: Annotated[Path, typer.Argument(help="Folder with DICOM files of MR examinations.")],
    output: Annotated[
        Path, typer.Option("-o", "--output", help="Folder to write the scans to.")
    ] = Path("scans"),
    series: SeriesOption = None,
    identifiers: IdentifiersOption = False,
    preprocess: PreprocessOption = False,
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
    cases = [
        {
            "case_id": one.case.case_id,
            "folder": one.found.study.folder,
            "series": [
                {
                    "number": series.series.number,
                    "description": series.series.description,
                    "modality": series.modality,
                    "reason": series.reason,
                }
                for series in one.found.series
            ],
            "problems": one.case.problems,
        }
        for one in done
    ]
    emit(path=output, cases=cases)
    for one in done:
        for problem in one.case.problems:
            print(f"FAILED  {problem}")
    n_usable = sum(one.case.usable for one in done)
    print(f"{n_usable} of {counted(len(done), 'case')} can be predicted: {output}")
    if n_usable < len(done):
        raise typer.Exit(1)


def phantom(
    output: Annotated[Path, typer.Argument(help="Folder to write to.")],
    number: Annotated[int, typer.Option(min=1, help="Number of cases.")] = DEMO_CASES,
    seed: Annotated[int, typer.Option(help="The same seed gives the same cases.")] = 0,
) -> None:
    """Generate phantom cases in the layout of BraTS 2021, to try the software without scans."""
    from brats_seg.cases.phantom import write_phantom_cases

    write_phantom_cases(output, n_cases=number, seed=seed)
    emit(path=output)
    print(f"wrote {counted(number, 'phantom case')} to {output}")


def doctor(
    data: Annotated[
        Path | None,
        typer.Argument(help="Folder of scans, or a table of their paths. (default: data/)"),
    ] = None,
    prepared: PreparedOption = None,
    runs: Annotated[Path, typer.Option(help="Folder of the runs.")] = Path("runs"),
) -> None:
    """Check packages, GPU, memory, disk, scans and runs; print the command that fixes each problem.

    Nothing is changed. Exit code 3: a problem prevents work here.
    """
    from brats_seg.doctor import diagnose

    if data is None and holds_scans(DEFAULT_PATH):
        data = DEFAULT_PATH
    diagnosis = diagnose(data, prepared_path=prepared, runs=runs, config=settings())
    emit(diagnosis)
    _print_diagnosis(diagnosis)
    if not diagnosis.can_work:
        raise typer.Exit(EnvironmentalError.exit_code)


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    print(f"brats_seg {diagnosis.version}")
    print_table(
        ("check", "status", "found"),
        [(finding.check, finding.status, finding.found) for finding in diagnosis.findings],
        wrapped=("found",),
    )
    wrong = [finding for finding in diagnosis.findings if finding.status != "ok"]
    for finding in wrong:
        # on a line of its own, to be copied
        if finding.remedy:
            print(f"{finding.check}, {finding.status}:\n    {finding.remedy}")
    n_problems = sum(finding.status == "problem" for finding in wrong)
    print(f"{counted(n_problems, 'problem')}, {counted(len(wrong) - n_problems, 'warning')}")
