"""Compare the steps of two processes, which have the variables of torchrun, with that of one process."""

import json
import os
import socket
import sys
from multiprocessing import get_context
from pathlib import Path

import torch
from torch import distributed, nn

from brats_seg.training.ranks import Ranks, joined_ranks
from tests.test_optimisation import (
    CRITERIA,
    LEARNT,
    accumulator_of,
    cut,
    gradient,
    modules_of,
    patches,
    relative_error,
    trained,
)

SHARES = {"equal": (2, 2), "unequal": (3, 1), "one empty": (4, 0)}


def ordinary(
    network: nn.Module, micro_batches: list, criterion: object, ranks: Ranks
) -> torch.Tensor:
    """Compute the gradient as DDP does: the mean over ranks of the gradients of mean losses."""
    network.zero_grad()
    for micro_batch in micro_batches:
        loss = criterion(network(micro_batch.image), micro_batch.target).mean()
        (loss / len(micro_batches)).backward()
    found = (
        gradient(network)
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
        for name in (*CRITERIA, *LEARNT):
            for share, (n_first, _) in SHARES.items():
                network, batch = trained(torch.float64), patches(4, torch.float64)
                criterion = CRITERIA[name] if name in CRITERIA else LEARNT[name](network)
                if isinstance(criterion, nn.Module):
                    criterion.double()
                micro_batches = cut(batch, [1] * 4)
                whole = accumulator_of(network, criterion).step(micro_batches)
                modules = modules_of(network, criterion)
                expected = [gradient(module).clone() for module in modules]
                own = micro_batches[:n_first] if ranks.is_first else micro_batches[n_first:]
                calls.clear()
                result = accumulator_of(network, criterion, ranks=ranks).step(own)
                n_parameters = sum(p.numel() for p in network.parameters())
                found = [gradient(module) for module in modules]
                rows.append(
                    {
                        "criterion": name,
                        "share": share,
                        "error": max(map(relative_error, found, expected)),
                        "loss_error": abs(result.loss - whole.loss) / abs(whole.loss),
                        "n_patches": result.n_patches,
                        "gradient_exchanges": sum(n >= n_parameters for n in calls),
                    }
                )
                if name == "patch Dice":
                    rows[-1]["ordinary_error"] = relative_error(
                        ordinary(network, own, criterion, ranks), expected[0]
                    )
    if ranks.is_first:
        threads = [path.read_text().strip() for path in Path("/proc/self/task").glob("*/comm")]
        found = {"rows": rows, "threads_afterwards": threads}
        output.write_text(json.dumps(found))


def main(output: Path) -> None:
    """Start both ranks as forks: what takes seconds to import is imported once."""
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    context = get_context("fork")
    ranks = [context.Process(target=compare, args=(rank, port, output)) for rank in range(2)]
    for process in ranks:
        process.start()
    for process in ranks:
        process.join()
    sys.exit(max(abs(process.exitcode or 0) for process in ranks))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
