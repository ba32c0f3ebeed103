"""Time and bytes of saving and loading a checkpoint, compared to torch.distributed.checkpoint on the same state.

    python benchmarks/checkpoint.py --ranks 2 --megabytes 256

The state is that of a model under ZERO3 with AdamW, and of the same model under torch's FSDP2 with torch's AdamW: fp32
weights and two moments each, after one step. Both are saved and loaded in turns, in the same ranks, on the same disk;
the time is that of the slowest rank. zeroshard's time includes digests and fsync. `--no-sync` leaves out the fsyncs of
both writers. The page cache is warm for both. Printed are ratios of medians, with the range of the single rounds.
"""

from __future__ import annotations

import argparse
import os
import shutil
import statistics
import tempfile
import time
import warnings
from collections.abc import Callable
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.fsdp import fully_shard

import zeroshard
from zeroshard.checkpoint import files
from zeroshard.testing import run_ranks

WIDTH = 512


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--megabytes", type=int, default=192, help="of the whole state")
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--no-sync", action="store_true")
    parser.add_argument("--folder", default=None, help="where to write; the default is a temporary one")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        results = run_ranks(
            measure, args.ranks, Path(folder), args.megabytes, args.rounds, not args.no_sync, timeout=3000.0
        )
    report(results[0], args.ranks)


def measure(rank: int, folder: Path, megabytes: int, rounds: int, sync: bool) -> dict[str, list[float]]:
    warnings.simplefilter("ignore")
    if not sync:
        files.sync = lambda file: None
    layers = max(1, megabytes * 1_000_000 // (12 * WIDTH * WIDTH))
    ours, theirs = build(layers), build(layers)
    handle = zeroshard.shard(ours, "zero3", units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-3)
    mesh = dist.device_mesh.init_device_mesh("cpu", (dist.get_world_size(),))
    for layer in theirs:
        fully_shard(layer, mesh=mesh)
    fully_shard(theirs, mesh=mesh)
    their_optimizer = torch.optim.AdamW(theirs.parameters(), lr=1e-3)
    for model, one in ((ours, optimizer), (theirs, their_optimizer)):
        model(torch.ones(2, WIDTH)).square().sum().backward()
        one.step()

    def save_theirs() -> None:
        shutil.rmtree(folder / "theirs", ignore_errors=True) if rank == 0 else None
        dist.barrier()
        start = time.perf_counter()
        weights, state = get_state_dict(theirs, their_optimizer)
        writer = dcp.FileSystemWriter(folder / "theirs", sync_files=sync)
        dcp.save({"model": weights, "optimizer": state}, storage_writer=writer)
        times["save theirs"].append(slowest(start))

    def load_theirs() -> None:
        weights, state = get_state_dict(theirs, their_optimizer)
        loaded = {"model": weights, "optimizer": state}
        dcp.load(loaded, checkpoint_id=folder / "theirs")
        set_state_dict(theirs, their_optimizer, model_state_dict=weights, optim_state_dict=state)

    def save_ours() -> None:
        shutil.rmtree(folder / "ours", ignore_errors=True) if rank == 0 else None
        dist.barrier()
        start = time.perf_counter()
        zeroshard.save(folder / "ours", handle, optimizer, step=1)
        times["save ours"].append(slowest(start))

    def timed(name: str, work: Callable[[], object]) -> None:
        dist.barrier()
        start = time.perf_counter()
        work()
        times[name].append(slowest(start))

    times: dict[str, list[float]] = {f"{verb} {whose}": [] for verb in ("save", "load") for whose in ("ours", "theirs")}
    for number in range(rounds + 1):
        for save in (save_ours, save_theirs) if number % 2 else (save_theirs, save_ours):
            save()
        turns = [
            ("load ours", lambda: zeroshard.load(folder / "ours", handle, optimizer)),
            ("load theirs", load_theirs),
        ]
        for name, work in turns if number % 2 else turns[::-1]:
            timed(name, work)
    bytes_of = {whose: [float(size(folder / whose))] for whose in ("ours", "theirs")}
    return {name: values[1:] for name, values in times.items()} | bytes_of  # the first round warms up


def build(layers: int) -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(layers)])


def slowest(start: float) -> float:
    seconds = torch.tensor(time.perf_counter() - start)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def size(folder: Path) -> int:
    return sum(os.path.getsize(Path(parent) / name) for parent, _, names in os.walk(folder) for name in names)


def report(times: dict[str, list[float]], ranks: int) -> None:
    print(
        f"{ranks} ranks; bytes on disk: {times['ours'][0]:.0f}, torch.distributed.checkpoint {times['theirs'][0]:.0f}"
    )
    for verb in ("save", "load"):
        ours, theirs = times[f"{verb} ours"], times[f"{verb} theirs"]
        ratios = [a / b for a, b in zip(ours, theirs, strict=True)]
        ratio = statistics.median(ours) / statistics.median(theirs)
        rate = times["ours"][0] / statistics.median(ours) / 1e6
        print(
            f"{verb}: ours / torch.distributed.checkpoint {ratio:.2f} ({min(ratios):.2f} to {max(ratios):.2f} "
            f"in {len(ratios)} rounds); ours {rate:.0f} MB/s"
        )


if __name__ == "__main__":
    main()
