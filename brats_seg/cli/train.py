"""Commands `train`, `plan`, `settings`, `certify`, `tune` and `crossval`."""

from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING

from brats_seg.cli import options
from brats_seg.cli.look import print_remarks, print_summaries
from brats_seg.cli.use import print_outcome
from brats_seg.errors import EnvironmentalError, UsageError, counted
from brats_seg.files import check_writable
from brats_seg.progress import tracked
from brats_seg.wings import find_wing

if TYPE_CHECKING:
    from brats_seg.crossval import HeldOutResults
    from brats_seg.inference.tuning import Tuning


def train(
    data: Path | None = None,
    fold: int = 0,
    new_run: Path | None = None,
    session_hours: float | None = None,
    fresh: bool = False,
    prepared: Path | None = None,
) -> int:
    """Train a fold, or resume it.

    Examples:
        brats-seg train --data data --fold 0 --preset kaggle-t4 --session-hours 11.5
        brats-seg train --data data --set optimizer.lr=1e-3 --set loss.batch_dice=true --run runs/batch-dice
    """
    scans, preset = options.data_or_demo(data)
    run_path = new_run or Path(f"runs/fold{fold}")
    check_writable(run_path)
    if fresh or not run_path.exists():
        # before torch is imported; a run that was begun has its own folds
        from brats_seg.cases.folds import check_fold

        given_folds = options.given_settings(default_preset=preset).folds
        check_fold(fold, options.prepared_path(scans, prepared), given_folds)
    config = options.run_settings(run_paths=() if fresh else (run_path,), default_preset=preset)
    with options.importing():
        from brats_seg.training.trainer import train_fold

    outcome = train_fold(
        scans,
        fold,
        config=config,
        run_path=run_path,
        prepared_path=prepared,
        max_hours=session_hours,
        fresh=fresh,
        track=tracked,
    )
    name = outcome.signal and outcome.signal.name
    options.emit(outcome, run=run_path, signal=name, history=list(map(dict, outcome.history)))
    return 128 + outcome.signal if outcome.signal else 0


def plan() -> None:
    """Print which patch, micro-batch, precision and checkpointing fit in memory.

    --device takes a device of this machine, a GPU that it need not have (t4, a100, h200, rtx4060, ...),
    or the memory of one, such as 8GiB. Memory is predicted for the network, loss and optimizer of the
    settings. Exit code 3: nothing fits.

    Examples:
        brats-seg plan
        brats-seg plan --device t4 --precision fp16
        brats-seg plan --device 15GiB --preset full
    """
    with options.importing():
        from brats_seg.runtime.device import gpu_named
        from brats_seg.training.memory_plan import RESERVED_MIB, plan_memory
        from brats_seg.voxels.box import shape_text

    device = options.short_forms().get("training.device")
    gpu = None if device is None else gpu_named(device)
    config = options.run_settings(gpu=gpu)
    result = plan_memory(config, track=tracked, gpu=gpu)
    options.emit(result.rows)
    reserved = f", plus {RESERVED_MIB} MiB for torch itself" if gpu else ""
    device = f"{gpu.name} (predicted)" if gpu else result.device.torch_device
    print(f"{config.model.name} on {device}: {result.memory_mib} MiB{reserved}")
    mode = attrgetter("micro_batch", "precision", "checkpointing", "predicted_mib")
    options.print_table(
        ("patch", "micro-batch", "precision", "checkpointing", "predicted MiB", "fits"),
        [(shape_text(row.patch), *mode(row), "yes" if row.fits else "no") for row in result.rows],
    )
    if (best := result.suggested) is None:
        raise EnvironmentalError(result.what_to_lower())
    print(
        f"largest patch: --patch {','.join(map(str, best.patch))} --micro-batch 1 "
        f"--precision {best.precision}, with checkpointing {best.checkpointing}"
    )


def settings(section: str = "") -> None:
    """List the settings: keys, values, what is allowed, and what they do.

    The values are those that `train` would begin a run on scans with, given the same options.

    Examples:
        brats-seg settings
        brats-seg settings training
        brats-seg settings --preset kaggle-t4
    """
    from brats_seg.config import describe_settings, flat_settings

    if not any(section in key for key in flat_settings(options.given_settings())):
        msg = f"no setting has {section!r} in its key; `brats-seg settings` lists all of them"
        raise UsageError(msg)
    listed = [row for row in describe_settings(options.run_settings()) if section in row.key]
    options.emit(listed)
    columns = ("key", "value", "allowed", "meaning")
    options.print_table(columns, map(attrgetter(*columns), listed), wrapped=("allowed", "meaning"))


def certify(run: Path | None = None, patches: int = 4) -> int:
    """Measure how far accumulated gradients, exact and ordinary, are from that of the whole batch.

    Without --run, the network of the settings is first trained on phantom patches for a few steps. Exit
    code 1: it is not exact.

    Examples:
        brats-seg certify --run runs/fold0
        brats-seg certify --preset demo --set loss.batch_dice=true
    """
    if (run is None) == (not options.has_settings("training.device", "training.precision")):
        msg = "give either --run, or settings such as --preset, --config or --set"
        raise UsageError(msg)
    with options.importing():
        from brats_seg.training.certificate import certify_run, certify_settings

    if run is not None:
        given = options.short_forms()
        device, precision = given.get("training.device"), given.get("training.precision")
        certificate = certify_run(
            run, n_patches=patches, device=device, precision=precision, track=tracked
        )
    else:
        certificate = certify_settings(options.given_settings(), n_patches=patches, track=tracked)
    options.emit(certificate.rows)
    print(f"{certificate.network}, on {certificate.patches}")
    rows = []
    for row in certificate.rows:
        loss = f"{row.loss} (yours)" if row.own else row.loss
        rows.append((loss, row.precision, row.n_patches, row.method, f"{row.relative_error:.1e}"))
    options.print_table(("loss", "precision", "patches", "method", "relative error"), rows)
    exact = "exact: the accumulated gradient is that of the whole batch, to rounding"
    inexact = "NOT exact: the accumulated gradient differs from that of the whole batch"
    print(exact if certificate.exact else inexact)
    return int(not certificate.exact)


def tune(
    run: list[Path],
    data: Path | None = None,
    prepared: Path | None = None,
    device: str = "auto",
    precision: str = "auto",
) -> None:
    """Fit thresholds, smallest volumes and how sure ET must be on held-out cases, and store them with the model.

    Every case is predicted by the run that it was held out of. A default is replaced only if the gain
    is statistically significant. Give all runs whose predictions are to be averaged together.

    Examples:
        brats-seg tune runs/fold0 runs/fold1 runs/fold2 --data data
    """
    with options.importing():
        from brats_seg.inference.tuning import tune_runs
        from brats_seg.training.ranks import check_one_process

    check_one_process("tune")
    tuning = tune_runs(
        run,
        prepared_path=options.prepared_path(data, prepared),
        device=device,
        precision=precision,
        track=tracked,
    )
    options.emit(tuning)
    _print_tuning(tuning)


def crossval(
    data: Path | None = None,
    folds: str | None = None,
    output: Path = Path("crossval"),
    runs: Path = Path("runs"),
    protocol: str = "legacy",
    task: str = "GLI",
    session_hours: float | None = None,
    prepared: Path | None = None,
) -> int:
    """Train every fold, predict and score its held-out cases, and export the ensemble.

    Runs that `train` has begun or finished are continued or kept. If it is interrupted, the same
    command resumes it. Exit code 1: some cases could not be predicted or scored.

    Examples:
        brats-seg crossval --data data --preset kaggle-t4
        brats-seg crossval --data data --folds 0,1
    """
    numbers = _numbers(folds)
    with options.importing():
        from brats_seg.crossval import cross_validate
        from brats_seg.evaluation.protocols import protocol_named

    scoring = protocol_named(protocol, task)
    scans, preset = options.data_or_demo(data)
    # a run that was set aside is `fold0.1`
    begun = [path for path in sorted(runs.glob("fold*")) if path.name[4:].isdecimal()]
    done = cross_validate(
        scans,
        folds=numbers,
        output=output,
        runs=runs,
        protocol=scoring,
        config=options.run_settings(run_paths=begun, default_preset=preset),
        prepared_path=prepared,
        max_hours=session_hours,
        track=tracked,
        on_case=print_outcome,
    )
    options.emit(done.results, output=output, runs=done.runs, finished=done.results is not None)
    if done.results is None:
        signal = done.trainings[-1].signal
        return 128 + signal if signal else 0
    _print_results(done.results, len(done.runs), output)
    return int(bool(done.results.failures))


def _print_tuning(tuning: "Tuning") -> None:
    """Print the fitted settings with their gain, and the scores before and after."""
    from brats_seg.labels import REGIONS

    cases, runs = counted(tuning.n_cases, "held-out case"), counted(len(tuning.runs), "run")
    print(f"tuned on {cases} of {runs}, for the mean of Dice and lesion-wise Dice of WT, TC and ET")
    rows = []
    for fit in tuning.fits:
        gain = fit.gain
        counts = (f"{gain.mean:+.4f}", gain.n_raised, gain.n_lowered, f"{gain.p_value:.2g}")
        rows.append((fit.setting, fit.default, fit.best, *counts, fit.chosen))
    columns = ("setting", "default", "best", "gain", "better", "worse", "p", "stored")
    options.print_table(columns, rows)
    for name, *sides in zip(("Dice", "lesion-wise Dice"), tuning.before, tuning.after, strict=True):
        means = [", ".join(f"{score:.4f}" for score in scores) for scores in sides]
        print(f"{name} of WT, TC, ET: {means[0]} before, {means[1]} after.")
    if tuning.before != tuning.after:
        print("Fitted and scored on the same cases: expect a smaller gain on new cases.")
    if scores := tuning.subset_scores:
        n_cases = counted(scores[0].n_cases, "held-out case")
        print(f"without some modalities, on {n_cases}: mean Dice (change against all modalities)")
        headings = ("predicted from", *(region.upper() for region in REGIONS))
        options.print_table(headings, [(", ".join(row.modalities), *row.texts()) for row in scores])
    checks = find_wing("quality.result")
    for line in checks.dice_lines([tuning.notes]) if checks else ():
        print(
            f"predicted Dice of {line.region.upper()}: off by {line.mean_error:.3f} on average "
            f"({counted(line.n_cases, 'held-out case')})"
        )
    print(f"Stored with the weights of {', '.join(tuning.runs)}. Research use only.")


def _print_results(results: "HeldOutResults", n_networks: int, output: Path) -> None:
    _print_tuning(results.tuning)
    batch = results.batch
    n_failed = len(batch.failures)
    n_cases = len(batch.predicted) + batch.n_skipped + n_failed
    print(f"{counted(n_cases, 'held-out case')}, {n_failed} failed: {output / 'predictions'}")
    print_remarks(results.evaluation, output / "predictions")
    print_summaries(results.evaluation)
    networks = counted(n_networks, "network")
    print(f"{networks} in {output / 'model'}, fingerprint {results.fingerprint}")
    print(f"scores.csv, summary.json, scores.png: {output}. Research use only.")


def _numbers(folds: str | None) -> tuple[int, ...] | None:
    try:
        return None if folds is None else tuple(map(int, folds.split(",")))
    except ValueError:
        msg = f"--folds is {folds!r}; expected numbers from 0, such as 0,1,2"
        raise UsageError(msg) from None
