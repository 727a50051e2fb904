"""Test that several processes make the same step as one process."""

import json
import os
import re
import socket
import subprocess
import sys
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
from torch import Tensor, distributed, nn

from brats_seg.errors import EnvironmentalError
from brats_seg.training import ranks
from brats_seg.training.ranks import Ranks, joined_ranks
from tests import test_accumulation as steps
from tests.builders import call_in_fork, start


def torchrun(*arguments: str, cwd: Path) -> subprocess.CompletedProcess[str]:
    program = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2"]
    return start([*program, *arguments], cwd)


@pytest.mark.parametrize("n_items", [0, 1, 2, 5, 8])
@pytest.mark.parametrize("n_ranks", [1, 2, 3])
def test_shares_are_consecutive_and_complete(n_items: int, n_ranks: int) -> None:
    items = list(range(n_items))
    shares = [Ranks(rank=rank, n_ranks=n_ranks).share(items) for rank in range(n_ranks)]
    assert [item for share in shares for item in share] == items
    assert max(map(len, shares)) - min(map(len, shares)) <= 1


def test_a_run_that_torchrun_did_not_start_is_alone() -> None:
    with joined_ranks() as ranks:
        assert ranks == Ranks()
        assert ranks.gather("own") == ["own"]
        assert ranks.any(True)


def test_a_number_of_processes_that_torchrun_did_not_set_is_refused(monkeypatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(EnvironmentalError, match=r"RANK expected.* unset W"), joined_ranks("cpu"):
        pass
    for name, value in (("WORLD_SIZE", "two"), ("LOCAL_RANK", "one")):
        monkeypatch.setenv(name, value)
        with pytest.raises(EnvironmentalError, match=r"is two: .* unset W"), joined_ranks():
            pass
    monkeypatch.setenv("WORLD_SIZE", "")
    test_a_run_that_torchrun_did_not_start_is_alone()


@pytest.mark.parametrize(
    ("device", "n_gpus", "backend"),
    [("auto", 2, "cpu:gloo,cuda:nccl"), ("cpu", 2, "gloo"), ("auto", 0, "gloo"), ("auto", 1, None)],
)
def test_processes_take_a_gpu_each_and_gloo_for_the_cpu(monkeypatch, device, n_gpus, backend):
    """NCCL takes no tensors of the CPU; the first process may prepare cases for hours."""
    calls: dict[str, object] = {}
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("LOCAL_RANK", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: n_gpus > 0)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: n_gpus)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: ["sm_90"])
    monkeypatch.setattr(torch.cuda, "set_device", lambda gpu: calls.update(index=gpu.index))
    double = MagicMock(get_rank=lambda: 1)
    monkeypatch.setattr(ranks, "distributed", double)
    if backend is None:
        with pytest.raises(EnvironmentalError, match="cuda:1 is not available"), joined_ranks():
            pass
        return
    with joined_ranks(device) as joined:
        assert joined == Ranks(rank=1, n_ranks=2)
    double.init_process_group.assert_called_once_with(backend, timeout=timedelta(days=1))
    assert calls == ({"index": 1} if "nccl" in backend else {})


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        (RuntimeError("[gloo/pair.cc:553] Connection closed by peer. Advice."), EnvironmentalError),
        (distributed.DistBackendError("NCCL error"), EnvironmentalError),
        (RuntimeError("of the network"), RuntimeError),
    ],
)
def test_a_process_that_ends_is_not_a_fault_of_the_others(monkeypatch, error, raised) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    double = MagicMock(get_rank=lambda: 1, DistError=distributed.DistError)
    monkeypatch.setattr(ranks, "distributed", double)
    message = re.escape(str(error).removesuffix(". Advice."))
    with pytest.raises(raised, match=message) as caught, joined_ranks("cpu"):
        raise error
    assert type(caught.value) is raised
    assert "Advice" not in str(caught.value)
    assert ("another process has ended" in str(caught.value)) == (caught.value is not error)


SHARES = {"equal": (2, 2), "unequal": (3, 1), "one empty": (4, 0)}


def ordinary(network: nn.Module, micro_batches: list, criterion: object, ranks: Ranks) -> Tensor:
    """Compute the gradient as DDP does: the mean over ranks of the gradients of mean losses."""
    network.zero_grad()
    for micro_batch in micro_batches:
        loss = criterion(network(micro_batch.image), micro_batch.target).mean()
        (loss / len(micro_batches)).backward()
    found = (
        steps.gradient(network)
        if micro_batches
        else 0 * torch.cat([p.flatten() for p in network.parameters()])
    )
    return ranks.sum(found.detach()) / ranks.n_ranks


def compare(rank: int, port: int, output: Path) -> None:
    """Write the errors of one rank's steps, as rank 0."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    values = (rank, rank, 2, 2, "localhost", port)
    os.environ.update(zip(names, map(str, values), strict=True))
    rows = []
    with joined_ranks("cpu") as ranks:
        calls: list[int] = []
        all_reduce = distributed.all_reduce

        def counted(tensor: torch.Tensor) -> None:
            calls.append(tensor.numel())
            all_reduce(tensor)

        distributed.all_reduce = counted
        for name in (*steps.CRITERIA, *steps.LEARNT):
            for share, (n_first, _) in SHARES.items():
                network, batch = steps.trained(torch.float64), steps.patches(4, torch.float64)
                criterion = (
                    steps.CRITERIA[name] if name in steps.CRITERIA else steps.LEARNT[name](network)
                )
                if isinstance(criterion, nn.Module):
                    criterion.double()
                micro_batches = steps.cut(batch, [1] * 4)
                whole = steps.accumulator_of(network, criterion).step(micro_batches)
                modules = steps.modules_of(network, criterion)
                expected = [steps.gradient(module).clone() for module in modules]
                own = micro_batches[:n_first] if ranks.is_first else micro_batches[n_first:]
                calls.clear()
                result = steps.accumulator_of(network, criterion, ranks=ranks).step(own)
                n_parameters = sum(p.numel() for p in network.parameters())
                found = [steps.gradient(module) for module in modules]
                rows.append(
                    {
                        "criterion": name,
                        "share": share,
                        "error": max(map(steps.relative_error, found, expected)),
                        "loss_error": abs(result.loss - whole.loss) / abs(whole.loss),
                        "n_patches": result.n_patches,
                        "gradient_exchanges": sum(n >= n_parameters for n in calls),
                    }
                )
                if name == "patch Dice":
                    rows[-1]["ordinary_error"] = steps.relative_error(
                        ordinary(network, own, criterion, ranks), expected[0]
                    )
    if ranks.is_first:
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        found = {"rows": rows, "threads_afterwards": threads}
        output.write_text(json.dumps(found))


def run_ranks(output: Path) -> int:
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    ranks = [context.Process(target=compare, args=(rank, port, output)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    return max(abs(process.exitcode or 0) for process in ranks)


def test_two_ranks_make_the_step_of_one(tmp_path: Path) -> None:
    for _ in range(3):
        done = call_in_fork(run_ranks, tmp_path / "rows.json")
        # another program may take the free port first
        if "EADDRINUSE" not in done.out:
            break
    assert done.code == 0, done.out
    found = json.loads((tmp_path / "rows.json").read_text())
    # a thread of the group that outlives it aborts the process now and then, as Python ends
    assert not [name for name in found["threads_afterwards"] if "gloo" in name]
    rows = found["rows"]
    assert len(rows) == 3 * (len(steps.CRITERIA) + len(steps.LEARNT))
    for row in rows:
        assert row["error"] <= 1e-12, row
        assert row["loss_error"] <= 1e-12, row
        assert row["n_patches"] == 4
        assert row["gradient_exchanges"] == 1
    # the negative control: averaging over ranks, as DDP does, is wrong for unequal shares
    ordinary = {row["share"]: row["ordinary_error"] for row in rows if "ordinary_error" in row}
    assert ordinary["equal"] <= 1e-12
    assert ordinary["unequal"] > 0.1


@pytest.mark.slow
def test_a_fold_is_trained_by_two_ranks_as_by_one(tiny_scans: Path, tmp_path: Path) -> None:
    (tmp_path / "scans").symlink_to(tiny_scans)
    settings = "folds.n_folds=3 patch.per_case=2 model.widths=4,8 optimizer.name=sgd"
    settings += " loss.batch_dice=true validation.every=1"
    words = "-m brats_seg train --data scans --epochs 2 --patch 8,8,8 --precision fp32"
    arguments = [*words.split(), "--effective-batch", "3"]
    arguments += [part for setting in settings.split() for part in ("--set", setting)]
    subprocess.run([sys.executable, *arguments, "--run", "one"], cwd=tmp_path, check=True)
    stopped = torchrun(*arguments, "-r", "two", "--session-hours", "0", cwd=tmp_path)
    done = torchrun(*arguments, "-r", "two", cwd=tmp_path)
    assert stopped.returncode == 0, stopped.stderr
    assert done.returncode == 0, done.stderr
    one, two = (torch.load(tmp_path / run / "last.pt", weights_only=True) for run in ("one", "two"))
    for key, expected in one["model"].items():
        assert torch.allclose(two["model"][key], expected, rtol=1e-4, atol=1e-5)
    for before, after in zip(one["progress"]["history"], two["progress"]["history"], strict=True):
        assert after["train_loss"] == pytest.approx(before["train_loss"], rel=1e-4)
        assert after["val_dice"] == pytest.approx(before["val_dice"], abs=1e-3)
    assert done.stdout.count("finished after 2 epochs") == 1
