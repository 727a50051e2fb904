"""Commands `index`, `prepare`, `convert`, `phantom` and `doctor`: scans, and the machine."""

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

import typer

from brats_seg.cli.options import (
    DEFAULT_PATH,
    DEMO_CASES,
    emit,
    given_settings,
    holds_scans,
    importing,
    print_table,
)
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import EnvironmentalError, counted
from brats_seg.progress import tracked

if TYPE_CHECKING:
    from brats_seg.doctor import Diagnosis


def index(scans: Path, output: Path = Path("cases.csv")) -> None:
    """Find cases and their label conventions, and list what is wrong with them.

    Exit code 1: some cases cannot be used.
    """
    with importing():
        from brats_seg.cases.index import summarise
        from brats_seg.data.fold import open_index

    found = open_index(scans, output, given_settings(), n_workers=available_cpus(), track=tracked)
    for line in summarise(found):
        print(line)
    emit(table=output, cases=found.cases)
    print(f"wrote {output}")
    if any(not case.usable for case in found.cases):
        raise typer.Exit(1)


def prepare(
    scans: Path, prepared: Path | None = None, verify: bool = False, repair: bool = False
) -> None:
    """Index the scans, distribute them to folds, and prepare them for training."""
    with importing():
        from brats_seg.data.fold import prepare_data, prepared_path_of

    folder = prepared or prepared_path_of(scans)
    if verify:
        _verify(folder)
        return
    done = prepare_data(
        scans, config=given_settings(), prepared_path=folder, repair=repair, track=tracked
    )
    n_folds = len(done.folds.folds)
    case_ids = sorted(done.case_ids)
    emit(folder=folder, case_ids=case_ids, n_folds=n_folds, folds_table=done.folds_path, damage=[])
    print(f"{counted(len(case_ids), 'case')} prepared, with cases.csv, in {folder}")
    print(f"the table of {n_folds} folds is {done.folds_path.name} there")


def _verify(folder: Path) -> None:
    """Verify prepared cases, and exit with 1 if some are damaged."""
    from brats_seg.data.manifest import prepared_ids, verify_cases

    case_ids = prepared_ids(folder)
    errors = verify_cases(case_ids, folder, track=tracked)
    emit(folder=folder, case_ids=case_ids, damage=list(map(str, errors)))
    for error in errors:
        print(error)
    print(f"{counted(len(case_ids), 'prepared case')} in {folder}, {len(errors)} damaged")
    if errors:
        raise typer.Exit(1)


def convert(
    dicom: Path,
    output: Path = Path("scans"),
    series: list[str] | None = None,
    identifiers: bool = False,
    preprocess: bool = False,
) -> None:
    """Convert DICOM examinations to NIfTI, and say which series is which modality, and why.

    `predict` does the same with a folder of DICOM files. Exit code 1: some cases cannot be predicted.
    """
    from brats_seg.dicom.convert import DicomOptions, convert_studies
    from brats_seg.dicom.modalities import parse_overrides

    overrides = parse_overrides(series or [])
    options = DicomOptions(series=overrides, with_identifiers=identifiers, preprocess=preprocess)
    done = convert_studies(dicom, output, options, track=tracked)
    emit(path=output, cases=done)
    for one in done:
        for problem in one.case.problems:
            print(f"FAILED  {problem}")
    n_usable = sum(one.case.usable for one in done)
    print(f"{n_usable} of {counted(len(done), 'case')} can be predicted: {output}")
    if n_usable < len(done):
        raise typer.Exit(1)


def phantom(folder: Path, number: int = DEMO_CASES, seed: int = 0) -> None:
    """Generate phantom cases in the layout of BraTS 2021, to try the software without scans."""
    from brats_seg.cases.phantom import write_phantom_cases

    write_phantom_cases(folder, n_cases=number, seed=seed)
    emit(path=folder)
    print(f"wrote {counted(number, 'phantom case')} to {folder}")


def doctor(
    scans: Path | None = None, prepared: Path | None = None, runs: Path = Path("runs")
) -> None:
    """Check packages, GPU, memory, disk, scans and runs; print the command that fixes each problem.

    Nothing is changed. Exit code 3: a problem prevents work here.
    """
    from brats_seg.doctor import diagnose

    if scans is None and holds_scans(DEFAULT_PATH):
        scans = DEFAULT_PATH
    diagnosis = diagnose(scans, prepared_path=prepared, runs=runs, config=given_settings())
    emit(diagnosis)
    _print_diagnosis(diagnosis)
    if not diagnosis.can_work:
        raise typer.Exit(EnvironmentalError.exit_code)


def _print_diagnosis(diagnosis: "Diagnosis") -> None:
    print(f"brats_seg {diagnosis.version}")
    columns = ("check", "status", "found")
    print_table(columns, map(attrgetter(*columns), diagnosis.findings), wrapped=("found",))
    wrong = [finding for finding in diagnosis.findings if finding.status != "ok"]
    for finding in wrong:
        # on a line of its own, to be copied
        if finding.remedy:
            print(f"{finding.check}, {finding.status}:\n    {finding.remedy}")
    n_problems = sum(finding.status == "problem" for finding in wrong)
    print(f"{counted(n_problems, 'problem')}, {counted(len(wrong) - n_problems, 'warning')}")
