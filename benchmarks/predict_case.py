"""Time whole programs, from the command line to a label map, that predict with the same weights.

The weights are those of the network of the package. nnU-Net gets them in its own network with plans of its
own, once with torch and once with OpenVINO as in its entry to FLARE 2024 (one process for each task, the
model converted before); MONAI as the bundle that `brats-seg export` writes. Each is a model at 1.5 mm, which
is predicted in windows of the training patch by nnU-Net, and in our windows by MONAI. Every round is a
labelled case. The programs are started anew with their defaults on the CPU, without mirror images. CPU
time contains the start and child processes; memory is that of the largest process.

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

OURS, AS_NNUNET = "brats-seg predict", "brats-seg predict, the model of nnU-Net"
NNUNET = f"nnU-Net {version_of('nnunetv2')}"
OPENVINO = f"{NNUNET} with OpenVINO {version_of('openvino')}"
MONAI = f"MONAI {version_of('monai')}, the exported bundle"
LEAST = {(OURS, NNUNET): 5.0, (AS_NNUNET, NNUNET): 1.9}
"""Goals: our network as it is predicted by default, and a model of nnU-Net in its windows and precision."""
BUNDLE, MODEL = "bundle", "model"
CHECKPOINT, CONVERTED = "checkpoint_final.pth", "model.xml"
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
    peers = [name for name in programs if name not in {OURS, AS_NNUNET}]
    compared = partial(_compared, found=found, references=references, stages=stages)
    comparisons = compared("predict a case", programs=[OURS, *peers])
    if AS_NNUNET in found:
        same = "predict a case with the model of nnU-Net"
        of_nnunet = [name for name in peers if name != MONAI]
        comparisons += compared(same, programs=[AS_NNUNET, *of_nnunet])
    report(comparisons, arguments.json)


def _write_models(index: CaseIndex, folder: Path) -> None:
    """Write the network of the package as a model of each program that is installed."""
    export = [sys.executable, "-m", "brats_seg", "export", SHIPPED, "-o", folder / BUNDLE]
    subprocess.run([*export, "--format", "bundle"], check=True)
    if not nnunet_patches.is_installed():
        return
    nnunet_patches.preprocess(index, folder / "plans", None)
    member = load_model([SHIPPED], choose_device("cpu", "fp32")).members[0]
    plans_path = nnunet_patches.plans_path(folder / "plans")
    network = _write_nnunet(member, plans_path, folder / MODEL)
    if find_spec("openvino"):
        import openvino

        image = torch.zeros(1, 4, *member.identity.patch)
        converted = openvino.convert_model(network.eval(), example_input=image)
        openvino.save_model(converted, folder / MODEL / CONVERTED)


def _programs(folder: Path) -> Mapping[str, Start]:
    """Return how each program is started whose model was written."""
    model = folder / MODEL
    programs: dict[str, Start] = {OURS: partial(_of_ours, SHIPPED)}
    if find_spec("fire") and find_spec("ignite"):
        programs[MONAI] = partial(_of_monai, folder / BUNDLE)
    if model.exists():
        programs |= {AS_NNUNET: partial(_of_ours, model), NNUNET: partial(_of_nnunet, model)}
    if (model / CONVERTED).exists():
        programs[OPENVINO] = partial(_of_openvino, model)
    return programs


def _of_ours(model: Path, case: Case, output: Path) -> list[object]:
    scans = case.path_of(case.images[0]).parent
    predict = [sys.executable, "-m", "brats_seg", "predict", scans, "-o", output]
    return [*predict, "--model", model, "--device", "cpu"]


def _of_monai(bundle: Path, case: Case, output: Path) -> list[object]:
    files = [str(case.path_of(scan)) for scan in case.images]
    run = [sys.executable, "-m", "monai.bundle", "run", "--bundle_root", bundle]
    config = ["--config_file", bundle / "configs/inference.json"]
    return [*run, *config, "--image", repr(files), "--output_dir", output]


def _of_nnunet(model: Path, case: Case, output: Path) -> list[object]:
    script = Path(sys.executable).with_name("nnUNetv2_predict_from_modelfolder")
    options = ["-f", "0", "-device", "cpu", "--disable_tta", "--disable_progress_bar"]
    return [script, "-i", _linked_scans(case, output), "-o", output, "-m", model, *options]


def _of_openvino(model: Path, case: Case, output: Path) -> list[object]:
    again = [sys.executable, __file__, "--openvino", model]
    return [*again, "--data", _linked_scans(case, output), "--output", output]


def _linked_scans(case: Case, output: Path) -> Path:
    """Return a folder with the scans of a case under the names of nnU-Net."""
    folder = output.with_name(f"{output.name}-scans")
    folder.mkdir()
    nnunet_patches.link_scans(case, folder)
    return folder


def _write_nnunet(member: Member, plans_path: Path, folder: Path) -> nn.Module:
    """Write a U-Net of ours as a trained model of nnU-Net, by its plans for other networks; return it."""
    from nnunetv2.utilities.get_network_from_plans import get_network_from_plans

    levels = [level[0].convolution for level in member.network.encoder]
    plans = json.loads(plans_path.read_text())
    plan = plans["configurations"]["3d_fullres"]
    identity = member.identity
    plan |= {"patch_size": identity.patch, "spacing": identity.spacing_mm}
    network = plan["architecture"]
    widths = [level.out_channels for level in levels]
    nnunet_patches.set_network(plan, widths, [level.stride for level in levels])
    names = (network[name] for name in ("network_class_name", "arch_kwargs", "_kw_requires_import"))
    same = get_network_from_plans(*names, 4, 3, deep_supervision=False)
    # our convolutions have no bias, which the norm after them would remove
    for name, value in same.named_parameters():
        if name.endswith("conv.bias"):
            nn.init.zeros_(value)
    # the coarser heads work in training only
    ours = {
        k: v for k, v in member.network.state_dict().items() if not re.match(r"heads\.[1-9]", k)
    }
    named = {_name_of(k, len(levels)): v for k, v in ours.items()}
    if unknown := same.load_state_dict(named, strict=False).unexpected_keys:
        sys.exit(f"nnU-Net's network has no weights {unknown}")
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


def _name_of(name: str, n_levels: int) -> str:
    """Return the name of a weight in nnU-Net, whose decoder counts levels from the lowest."""
    for ours, theirs in NAMES.items():
        name = re.sub(f"^{ours}", theirs, name)
    return re.sub(r"(decoder\.\w+\.)-(\d+)", lambda m: f"{m[1]}{n_levels - 2 - int(m[2])}", name)


class _Compiled(nn.Module):
    """A network in OpenVINO, as nnU-Net calls networks."""

    def __init__(self, path: Path) -> None:
        super().__init__()
        import openvino
        from openvino.properties import hint

        settings = {
            hint.performance_mode: hint.PerformanceMode.LATENCY,
            hint.execution_mode: hint.ExecutionMode.PERFORMANCE,
            hint.enable_cpu_pinning(): True,
        }
        self.network = openvino.Core().compile_model(path, "CPU", settings)

    def forward(self, image: Tensor) -> Tensor:
        return torch.from_numpy(self.network(image)[0])


def _predict_with_openvino(model: Path, scans: Path, output: Path) -> None:
    from nnunetv2.inference.predict_from_raw_data import nnUNetPredictor

    predictor = nnUNetPredictor(use_mirroring=False, device=torch.device("cpu"), allow_tqdm=False)
    predictor.initialize_from_trained_model_folder(str(model), (0,), CHECKPOINT)
    predictor.network = _Compiled(model / CONVERTED)
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
    found: Mapping[str, Sequence[Result]],
    references: Sequence[RegionMasks],
    stages: Mapping[str, str],
    programs: Sequence[str],
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
