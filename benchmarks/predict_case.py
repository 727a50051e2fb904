"""Time whole programs, from the command line to a label map, that predict with the same weights.

The weights are those of the network of the package. nnU-Net gets them in its own network with plans of its
own, once with torch and once with OpenVINO as in its entry to FLARE 2024 (one process for each task, the
model converted before); MONAI as the bundle that `brats-seg export` writes. Each is a model at 1.5 mm, which
is predicted in windows of the training patch by nnU-Net, and in our windows by MONAI. Two more models, a
residual network of nnU-Net and a bundle of MONAI's SegResNet, have random weights: they show that ours
gives the label map of the original program, and what that costs. Every round is a labelled case. The
programs are started anew with their defaults on the CPU, without mirror images. CPU time contains the
start and child processes; memory is that of the largest process.

    python benchmarks/predict_case.py --data ../scans --cases 3

Without a folder, here or in BRATS_REAL_DATA, the case is a phantom. Programs that are not installed are left
out (`make bench` installs them).
"""

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from statistics import mean

import nibabel as nib
import nnunet_patches
import numpy as np
import torch
from cases import chosen_cases, data_folder
from comparison import Comparison, compare_with_first, in_a_process, options_of, report
from machine import version_of
from torch import Tensor, nn

from brats_seg.cases.case import Case, CaseIndex
from brats_seg.cases.find import find_cases
from brats_seg.evaluation.metrics import count_regions, dice
from brats_seg.inference.model import Member, load_model
from brats_seg.labels import BRATS2017, BRATS2023, RegionMasks, regions_of
from brats_seg.runtime.device import choose_device
from brats_seg.runtime.weights import SHIPPED

OURS = "brats-seg predict"
AS_NNUNET, AS_RESIDUAL = f"{OURS}, model of nnU-Net", f"{OURS}, residual model of nnU-Net"
AS_MONAI = f"{OURS}, bundle of SegResNet"
NNUNET, MONAI = f"nnU-Net {version_of('nnunetv2')}", f"MONAI {version_of('monai')}"
OPENVINO, RESIDUAL = f"{NNUNET} with OpenVINO {version_of('openvino')}", f"{NNUNET}, residual"
EXPORTED, SEGRESNET = f"{MONAI}, the exported bundle", f"{MONAI}, SegResNet"
TASKS = {
    "predict a case": (OURS, EXPORTED, NNUNET, OPENVINO),
    "predict a case with the model of nnU-Net": (AS_NNUNET, NNUNET, OPENVINO),
    "predict a case with a residual model of nnU-Net": (AS_RESIDUAL, RESIDUAL),
    "predict a case with a bundle of SegResNet": (AS_MONAI, SEGRESNET),
}
"""The programs of each comparison, ours first."""
LEAST = {(OURS, NNUNET): 5.0, (AS_NNUNET, NNUNET): 1.9}
"""Goals: our network as it is predicted by default, and a model of nnU-Net in its windows and precision."""
BUNDLE, RANDOM_BUNDLE, MODEL, RANDOM_MODEL = "bundle", "random_bundle", "model", "random_model"
CHECKPOINT, CONVERTED = "checkpoint_final.pth", f"{MODEL}/model.xml"
CONFIG, WEIGHTS = "configs/inference.json", "models/model.pt"
NAMES = {
    r"encoder\.(\d+)\.(\d+)\.convolution\.": r"encoder.stages.\1.0.convs.\2.conv.",
    r"encoder\.(\d+)\.(\d+)\.norm\.": r"encoder.stages.\1.0.convs.\2.norm.",
    r"decoder\.(\d+)\.upsampling\.": r"decoder.transpconvs.-\1.",
    r"decoder\.(\d+)\.level\.(\d+)\.convolution\.": r"decoder.stages.-\1.convs.\2.conv.",
    r"decoder\.(\d+)\.level\.(\d+)\.norm\.": r"decoder.stages.-\1.convs.\2.norm.",
    r"heads\.0\.": r"decoder.seg_layers.-0.",
}
"""Names of our weights, and of nnU-Net's, whose decoder counts its levels from the lowest: `-0` is the last."""

STAGES = {
    "start": r"_find_and_load",
    "network": r"\bforward \(",
    "files": r"nibabel|nifti|SimpleITK|sitk|deflate",
}
"""Stages of a program, by what stands in a stack of its calls; the first applies."""

Start = Callable[[Case, Path], Sequence[object]]
"""Returns the command that predicts a case and writes its label map to a folder."""


@dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Result:
    """What a program has cost for a case, and what it found."""

    cpu_s: float
    memory_mb: float
    """Of the largest of its processes."""
    regions: RegionMasks


def main() -> None:
    """Print how the programs compare with ours, by CPU time, memory, Dice and voxels."""
    arguments = options_of(__doc__, data=Path, cases=3, openvino=Path, output=Path)
    if arguments.openvino:
        _predict_with_openvino(arguments.openvino, arguments.data, arguments.output)
        return
    with data_folder(arguments.data) as root, tempfile.TemporaryDirectory() as name:
        index = chosen_cases(find_cases(root).cases, root, arguments.cases)
        # the memory of this process counts as that of those that it starts
        in_a_process(_write_models, index, Path(name))
        programs = _programs(Path(name))
        found: dict[str, list[Result]] = {program: [] for program in programs}
        references = [_regions(case.path_of(case.label)) for case in index.cases if case.label]
        for case in index.cases:
            for number, (program, start) in enumerate(programs.items()):
                output = Path(name) / f"{case.case_id}-{number}"
                found[program].append(_run(start(case, output), output))
        stages = {
            program: _stages(start, index.cases[0], Path(name) / f"stages-{number}")
            for number, (program, start) in enumerate(programs.items())
        }
    compared = partial(_compared, found=found, references=references, stages=stages)
    tasks = {task: [name for name in names if name in found] for task, names in TASKS.items()}
    rows = [row for task, names in tasks.items() if names for row in compared(task, names)]
    report(rows, arguments.json)


def _write_models(index: CaseIndex, folder: Path) -> None:
    """Write the models of each program that is installed."""
    if find_spec("fire") and find_spec("ignite"):
        export = [sys.executable, "-m", "brats_seg", "export", SHIPPED, "-o", folder / BUNDLE]
        subprocess.run([*export, "--format", "bundle"], check=True)
        _write_segresnet(folder / BUNDLE, folder / RANDOM_BUNDLE)
    if not nnunet_patches.is_installed():
        return
    nnunet_patches.preprocess(index, folder / "plans", None)
    plans_path = nnunet_patches.plans_path(folder / "plans")
    member = load_model([SHIPPED], choose_device("cpu", "fp32")).members[0]
    _write_nnunet(member, plans_path, folder / RANDOM_MODEL, is_residual=True)
    network = _write_nnunet(member, plans_path, folder / MODEL, is_residual=False)
    if find_spec("openvino"):
        import openvino

        image = torch.zeros(1, 4, *member.identity.patch)
        converted = openvino.convert_model(network.eval(), example_input=image)
        openvino.save_model(converted, folder / CONVERTED)


def _programs(folder: Path) -> Mapping[str, Start]:
    """Return how each program is started whose model was written."""
    starts = {
        EXPORTED: (_of_monai, BUNDLE),
        NNUNET: (_of_nnunet, MODEL),
        OPENVINO: (_of_openvino, CONVERTED),
        AS_NNUNET: (_of_ours, MODEL),
        AS_RESIDUAL: (_of_ours, RANDOM_MODEL),
        RESIDUAL: (_of_nnunet, RANDOM_MODEL),
        AS_MONAI: (_of_ours, RANDOM_BUNDLE),
        SEGRESNET: (_of_monai, RANDOM_BUNDLE),
    }
    found = {n: partial(run, folder / m) for n, (run, m) in starts.items() if (folder / m).exists()}
    return {OURS: partial(_of_ours, SHIPPED), **found}


def _of_ours(model: Path, case: Case, output: Path) -> list[object]:
    scans = case.path_of(case.images[0]).parent
    predict = [sys.executable, "-m", "brats_seg", "predict", scans, "-o", output]
    return [*predict, "--model", model, "--device", "cpu"]


def _of_monai(bundle: Path, case: Case, output: Path) -> list[object]:
    files = [str(case.path_of(scan)) for scan in case.images]
    run = [sys.executable, "-m", "monai.bundle", "run", "--bundle_root", bundle]
    config = ["--config_file", bundle / CONFIG]
    return [*run, *config, "--image", repr(files), "--output_dir", output]


def _of_nnunet(model: Path, case: Case, output: Path) -> list[object]:
    script = Path(sys.executable).with_name("nnUNetv2_predict_from_modelfolder")
    options = ["-f", "0", "-device", "cpu", "--disable_tta", "--disable_progress_bar"]
    return [script, "-i", _linked_scans(case, output), "-o", output, "-m", model, *options]


def _of_openvino(model: Path, case: Case, output: Path) -> list[object]:
    again = [sys.executable, __file__, "--openvino", model.parent]
    return [*again, "--data", _linked_scans(case, output), "--output", output]


def _linked_scans(case: Case, output: Path) -> Path:
    """Return a folder with the scans of a case under the names of nnU-Net."""
    folder = output.with_name(f"{output.name}-scans")
    folder.mkdir()
    nnunet_patches.link_scans(case, folder)
    return folder


def _write_segresnet(bundle: Path, folder: Path) -> None:
    """Write a bundle of the parts of that of BraTS in MONAI's model zoo, with random weights."""
    from monai.networks.nets import SegResNet

    shutil.copytree(bundle / "configs", folder / "configs")
    config = json.loads((bundle / CONFIG).read_text())
    before, after = (config[f"{when}processing"]["transforms"] for when in ("pre", "post"))
    invert, *painting = [step for step in after if "_disabled_" not in step]
    sizes = {"in_channels": 4, "out_channels": 3, "init_filters": 8}
    normalise = {"_target_": "NormalizeIntensityd", "nonzero": True, "channel_wise": True}
    sigmoid = {"_target_": "Activationsd", "keys": "pred", "sigmoid": True}
    threshold = {"_target_": "AsDiscreted", "keys": "pred", "threshold": 0.5}
    before[3:], after[:] = [{**normalise, "keys": "image"}], [sigmoid, invert, threshold, *painting]
    config |= {
        "network_def": {"_target_": "SegResNet", **sizes},
        "network0": "$@network_def.to(@device)",
        "inferer": {"_target_": "SlidingWindowInferer", "roi_size": [96] * 3, "overlap": 0.5},
        "thresholds": [0.5] * 3,
        "surest_et": 0,
    }
    (folder / CONFIG).write_text(json.dumps(config))
    (folder / WEIGHTS).parent.mkdir()
    torch.manual_seed(0)
    torch.save(SegResNet(**sizes).state_dict(), folder / WEIGHTS)


def _write_nnunet(
    member: Member, plans_path: Path, folder: Path, *, is_residual: bool
) -> nn.Module:
    """Write a trained model of nnU-Net, by its plans for other networks, and return the network.

    It is a U-Net of ours, or one with residual blocks and random weights.
    """
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    levels = [level[0].convolution for level in member.network.encoder]
    plans = json.loads(plans_path.read_text())
    plan = plans["configurations"]["3d_fullres"]
    plan |= {"patch_size": member.identity.patch, "spacing": member.identity.spacing_mm}
    network = plan["architecture"]
    widths = [level.out_channels for level in levels]
    nnunet_patches.set_network(plan, widths, [level.stride for level in levels])
    if is_residual:
        arguments, name = network["arch_kwargs"], network["network_class_name"]
        arguments["n_blocks_per_stage"] = arguments.pop("n_conv_per_stage")
        network["network_class_name"] = name.replace("PlainConvUNet", "ResidualEncoderUNet")
    names = (network[name] for name in ("network_class_name", "arch_kwargs", "_kw_requires_import"))
    torch.manual_seed(0)
    same = get_network_from_plans(*names, 4, 3, deep_supervision=False)
    if not is_residual:
        _load(same, member.network)
    (folder / "fold_0").mkdir(parents=True)
    (folder / "plans.json").write_text(json.dumps(plans))
    shutil.copy(plans_path.with_name("dataset.json"), folder)
    checkpoint = {
        "network_weights": same.state_dict(),
        "trainer_name": "nnUNetTrainer",
        "init_args": {"configuration": "3d_fullres"},
        "inference_allowed_mirroring_axes": None,
    }
    torch.save(checkpoint, folder / "fold_0" / CHECKPOINT)
    return same


def _load(same: nn.Module, network: nn.Module) -> None:
    """Load the weights of our U-Net into that of nnU-Net."""
    # our convolutions have no bias, which the norm after them would remove
    for name, value in same.named_parameters():
        if name.endswith("conv.bias"):
            nn.init.zeros_(value)
    # the coarser heads work in training only
    ours = {k: v for k, v in network.state_dict().items() if not re.match(r"heads\.[1-9]", k)}
    named = {_name_of(k, len(network.encoder)): v for k, v in ours.items()}
    if unknown := same.load_state_dict(named, strict=False).unexpected_keys:
        sys.exit(f"nnU-Net's network has no weights {unknown}")


def _name_of(name: str, n_levels: int) -> str:
    """Return the name of a weight in nnU-Net, whose decoder counts levels from the lowest."""
    for ours, theirs in NAMES.items():
        name = re.sub(f"^{ours}", theirs, name)
    return re.sub(r"(decoder\.\w+\.)-(\d+)", lambda m: f"{m[1]}{n_levels - 2 - int(m[2])}", name)


class _Compiled(nn.Module):
    """A network in OpenVINO, as nnU-Net calls networks; its defaults are the settings of that entry."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        import openvino

        self.network = openvino.Core().compile_model(path, "CPU")

    def forward(self, image: Tensor) -> Tensor:
        return torch.from_numpy(self.network(image)[0])


def _predict_with_openvino(model: Path, scans: Path, output: Path) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=False, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), (0,), CHECKPOINT)
    predictor.network = _Compiled(model / Path(CONVERTED).name)
    predictor.list_of_parameters = [{}]
    one_process = {"num_processes_preprocessing": 1, "num_processes_segmentation_export": 1}
    predictor.predict_from_files(str(scans), str(output), **one_process)


def _run(command: Sequence[object], output: Path) -> Result:
    """Run a program until it ends, and read the label map that it wrote."""
    log = output.with_suffix(".log")
    with log.open("wb") as file:
        process = subprocess.Popen(list(map(str, command)), stdout=file, stderr=subprocess.STDOUT)
        _, status, used = os.wait4(process.pid, 0)
    if status:
        sys.exit(f"{command[0]} failed:\n{log.read_text()}")
    regions = _regions(next(output.rglob("*.nii.gz")))
    return Result(
        cpu_s=used.ru_utime + used.ru_stime, memory_mb=used.ru_maxrss / 1024, regions=regions
    )


def _stages(start: Start, case: Case, output: Path) -> str:
    """Return the shares of the stages of a program in its work, in percent."""
    samples, spy = output.with_suffix(".txt"), Path(sys.executable).with_name("py-spy")
    record = [spy, "record", "--subprocesses", "--format", "raw", "--output", samples, "--"]
    _run([*record, *start(case, output)], output)
    counts = Counter[str]()
    for line in samples.read_text().splitlines():
        stack, _, n_samples = line.rpartition(" ")
        stack = stack.partition(";")[2]  # before it is the command
        stage = next((name for name, text in STAGES.items() if re.search(text, stack)), "rest")
        counts[stage] += int(n_samples)
    return " ".join(f"{s} {100 * counts[s] / counts.total():.0f} %" for s in (*STAGES, "rest"))


def _regions(path: Path) -> RegionMasks:
    """Return the regions of a label map in the convention of 2017, whose ET is 4, or of 2023."""
    labels = np.asarray(nib.load(path).dataobj).astype(np.uint8)
    return regions_of(labels, BRATS2017 if (labels == BRATS2017.regions[-1]).any() else BRATS2023)


def _compared(
    task: str,
    programs: Sequence[str],
    found: Mapping[str, Sequence[Result]],
    references: Sequence[RegionMasks],
    stages: Mapping[str, str],
) -> list[Comparison]:
    """Compare the first of some programs, which is ours, with the others."""
    ours, memory, scores = programs[0], {}, {}
    for name in programs:
        memory[name] = mean(result.memory_mb for result in found[name])
        pairs = zip(found[name], references, strict=True)
        scores[name] = mean(dice(count_regions(r.regions, y, "")).mean() for r, y in pairs)

    def agreement(peer: str) -> str:
        pairs = zip(found[ours], found[peer], strict=True)
        share = mean((a.regions != b.regions).any(0).mean() for a, b in pairs)
        sizes = f"{memory[ours]:.0f} MB against {memory[peer]:.0f}"
        means = f"Dice {scores[ours]:.3f} against {scores[peer]:.3f}"
        shares = f"{stages[ours]} against {stages[peer]}"
        return f"{sizes}, {means}, {1e6 * share:.0f} voxels of a million differ; {shares}"

    seconds = {name: [result.cpu_s for result in found[name]] for name in programs}
    goals = {peer: LEAST[ours, peer] for peer in programs if (ours, peer) in LEAST}
    return compare_with_first(task, seconds, goals, agreement)


if __name__ == "__main__":
    main()
