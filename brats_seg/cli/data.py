"""Commands `index`, `prepare`, `convert`, `phantom` and `doctor`: scans, and the machine."""

from operator import attrgetter
from pathlib import Path

from brats_seg.cli import options
from brats_seg.cpu_threads import available_cpus
from brats_seg.errors import EnvironmentalError, counted
from brats_seg.progress import tracked


def index(data: Path, output: Path = Path("cases.csv")) -> int:
    """Find cases and their label conventions, and list what is wrong with them.

    Exit code 1: some cases cannot be used.

    Examples:
        brats-seg index data
        brats-seg index data -o cases.csv --convention brats2017
    """
    with options.importing():
        from brats_seg.cases.index import summarise
        from brats_seg.data.fold import open_index

    case_index = open_index(
        data, output, options.given_settings(), n_workers=available_cpus(), track=tracked
    )
    print(*summarise(case_index), sep="\n")
    options.emit(table=output, cases=case_index.cases)
    print(f"wrote {output}")
    return int(not all(case.usable for case in case_index.cases))


def prepare(
    data: Path, prepared: Path | None = None, verify: bool = False, repair: bool = False
) -> int:
    """Index the scans, distribute them to folds, and prepare them for training.

    Examples:
        brats-seg prepare data
        brats-seg prepare data --preset kaggle-t4 --skip-bad
    """
    with options.importing():
        from brats_seg.data.fold import prepare_data, prepared_path_of

    folder = prepared or prepared_path_of(data)
    if verify and not repair:
        return _verify(folder)
    done = prepare_data(
        data, config=options.given_settings(), prepared_path=folder, repair=repair, track=tracked
    )
    n_folds = len(done.folds.folds)
    case_ids = sorted(done.case_ids)
    options.emit(
        folder=folder, case_ids=case_ids, n_folds=n_folds, folds_table=done.folds_path, damage=[]
    )
    print(f"{counted(len(case_ids), 'case')} prepared, with cases.csv, in {folder}")
    print(f"fold table with {n_folds} folds: {done.folds_path}")
    return 0


def _verify(folder: Path) -> int:
    """Verify prepared cases, and return 1 if some are damaged."""
    from brats_seg.data.store import prepared_ids, verify_cases

    case_ids = prepared_ids(folder)
    errors = verify_cases(case_ids, folder, track=tracked)
    options.emit(folder=folder, case_ids=case_ids, damage=list(map(str, errors)))
    print(*errors, sep="\n", end="\n" if errors else "")
    print(f"{counted(len(case_ids), 'prepared case')} in {folder}, {len(errors)} damaged")
    return int(bool(errors))


def convert(
    dicom: Path,
    output: Path = Path("scans"),
    series: list[str] | None = None,
    identifiers: bool = False,
) -> int:
    """Convert DICOM examinations to NIfTI, and say which series is which modality, and why.

    `predict` does the same with a folder of DICOM files. Exit code 1: some cases cannot be predicted.

    Examples:
        brats-seg convert dicom -o scans
        brats-seg convert dicom -o scans --series t1c=5 --series t2f=FLAIR
    """
    from brats_seg.dicom import ScanOptions, convert_studies
    from brats_seg.dicom.modalities import parse_overrides

    choices = ScanOptions(series=parse_overrides(series or []), with_identifiers=identifiers)
    done = convert_studies(dicom, output, choices, track=tracked)
    options.emit(path=output, cases=done)
    options.print_failures([problem for result in done for problem in result.case.problems])
    n_usable = sum(result.case.usable for result in done)
    print(f"{n_usable} of {counted(len(done), 'case')} can be predicted: {output}")
    return int(n_usable < len(done))


def phantom(folder: Path, number: int = options.DEMO_CASES, seed: int = 0) -> None:
    """Generate phantom cases in the layout of BraTS 2021, to try the software without scans.

    Examples:
        brats-seg phantom scans --number 6
    """
    from brats_seg.cases.phantom import write_phantom_cases

    write_phantom_cases(folder, n_cases=number, seed=seed)
    options.emit(path=folder)
    print(f"wrote {counted(number, 'phantom case')} to {folder}")


def doctor(
    data: Path | None = None, prepared: Path | None = None, runs: Path = Path("runs")
) -> int:
    """Check packages, GPU, memory, disk, scans and runs; print the command that fixes each problem.

    Nothing is changed. Exit code 3: a problem prevents work here.

    Examples:
        brats-seg doctor
        brats-seg doctor data --json
    """
    from brats_seg.doctor import diagnose

    if data is None and options.holds_scans(options.DEFAULT_PATH):
        data = options.DEFAULT_PATH
    diagnosis = diagnose(data, prepared_path=prepared, runs=runs, config=options.given_settings())
    options.emit(diagnosis)
    print(f"brats_seg {diagnosis.version}")
    columns = ("check", "status", "found")
    options.print_table(columns, map(attrgetter(*columns), diagnosis.findings), wrapped=("found",))
    wrong = [finding for finding in diagnosis.findings if finding.status != "ok"]
    for finding in wrong:
        # on a line of its own, to be copied
        if finding.remedy:
            print(f"{finding.check}, {finding.status}:\n    {finding.remedy}")
    n_problems = sum(finding.status == "problem" for finding in wrong)
    print(f"{counted(n_problems, 'problem')}, {counted(len(wrong) - n_problems, 'warning')}")
    return 0 if diagnosis.can_work else EnvironmentalError.exit_code
