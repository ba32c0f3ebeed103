"""What the ranks of the tests run, each in a process that torchrun has started on its host.

    torchrun ... -m tests.hosts.programs NAME '{"argument": value}'

A rank leaves files named `...-{rank}` in /tmp of its host: `alive`, which it locks as long as it lives; `step`, the
number of steps; `result`.
"""

from __future__ import annotations

import fcntl
import json
import os
import pickle
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.failures.common import wait_until_noted
from tests.hosts.namespaces import SHARED, TMP
from tests.kit import PLANS, Block, Job, Net, State, loss_of_tokens, make, train
from tests.patience import wait_until
from zeroshard.checkpoint import steps

ADAMW = {"lr": 1e-2, "foreach": False}
Result = tuple[list[float], State]
"""Losses of this rank, and full weights."""


def join(timeout: float = 120.0) -> int:
    """Join the group; returns this rank."""
    zeroshard.init(timeout=timeout)
    rank = dist.get_rank()
    alive = os.open(TMP / f"alive-{rank}", os.O_CREAT | os.O_WRONLY, 0o600)  # stays open until the process ends
    fcntl.flock(alive, fcntl.LOCK_EX)
    return rank


def leave(rank: int, result: Any) -> None:
    note(rank, "result", pickle.dumps(result))


def note(rank: int, name: str, data: bytes) -> None:
    temporary = TMP / f"{name}-{rank}.tmp"
    temporary.write_bytes(data)
    temporary.rename(TMP / f"{name}-{rank}")  # nobody reads half of it


# Losses and weights -------------------------------------------------------------------------------------------------


def train_all(rank: int, num_steps: int = 3) -> dict[str, Result]:
    """Train under every plan; with four ranks also on two meshes: ranks 0 and 1 share a host, or hold one shard each
    of two hosts."""
    job = Job(steps=num_steps)
    results = {}
    for plan in PLANS:
        outcome = train(job, plan, rank)
        results[str(plan)] = outcome.losses, outcome.weights
    results["optimizer_only"] = train_optimizer_only(rank, num_steps)
    if dist.get_world_size() == 4:
        for name, ranks in {"shard within": [[0, 1], [2, 3]], "shard across": [[0, 2], [1, 3]]}.items():
            mesh = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard"))
            for plan in (PLANS[1], PLANS[-1]):
                outcome = train(job, plan, rank, mesh)
                results[f"{plan}, {name}"] = outcome.losses, outcome.weights
    return results


def train_optimizer_only(rank: int, num_steps: int) -> Result:
    ddp = DistributedDataParallel(make(Net))
    optimizer = zeroshard.ShardedOptimizer(ddp.parameters(), torch.optim.AdamW, **ADAMW)
    losses = []
    for step in range(num_steps):
        optimizer.zero_grad()
        loss = loss_of_tokens(ddp, rank, 0, step)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses, {name: value.detach().clone() for name, value in ddp.module.state_dict().items()}


def plans() -> None:
    rank = join()
    leave(rank, train_all(rank))


def networks(names: Sequence[str]) -> None:
    """Train again and again: as soon as the file `go-{name}` is on this host, for each name."""
    rank, results = join(), {}
    for number, name in enumerate(names):
        wait_until((TMP / f"go-{name}").exists)
        results[name] = train_all(rank, num_steps=2)
        note(rank, "step", str(number + 1).encode())
    leave(rank, results)


# Failures -----------------------------------------------------------------------------------------------------------


def endless(timeout: float, plan: str = "zero3") -> None:
    """Train until something happens."""
    rank = join(timeout)
    model, _, optimizer = start(plan)
    for step in count(1):
        loss_of_tokens(model, rank, 0, step).backward()
        optimizer.step()
        if step == 3:
            wait_until_noted()
        note(rank, "step", str(step).encode())


def resumable(num_steps: int, stand_still_at: int = -1) -> None:
    """Train, save every second step to the shared folder, and continue from there. In the first attempt rank 1 stands
    still at a step."""
    rank, folder = join(), SHARED / "run"
    leave(rank, train_on(rank, folder, num_steps, stand_still_at))


def train_on(rank: int, folder: Path, num_steps: int, stand_still_at: int = -1) -> tuple[int, State]:
    """Returns the step from which it continued, and the weights."""
    model, handle, optimizer = start("zero3")
    first = zeroshard.load(folder, handle, optimizer).step if steps(folder) else 0
    for step in range(first, num_steps):
        optimizer.zero_grad()
        loss_of_tokens(model, rank, 0, step).backward()
        optimizer.step()
        if step % 2:
            zeroshard.save(folder, handle, optimizer, step=step + 1)
        if step == stand_still_at and first == 0 and rank == 1:
            note(rank, "pid", str(os.getpid()).encode())
            while True:
                time.sleep(0.1)
    return first, handle.full_state_dict()


def start(plan: str) -> tuple[nn.Module, zeroshard.Handle, zeroshard.ShardedOptimizer]:
    model = make(Net)
    handle = zeroshard.shard(model, plan, units=Block)
    return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, **ADAMW)


# Checkpoints --------------------------------------------------------------------------------------------------------


def checkpoints(plan: str) -> None:
    """Save to, and load from, folders that all hosts share, and folders of their own."""
    rank = join()
    model, handle, optimizer = start(plan)

    def step(number: int) -> float:
        optimizer.zero_grad()
        loss = loss_of_tokens(model, rank, 0, number)
        loss.backward()
        optimizer.step()
        return loss.item()

    def refused(call: Callable[[], Any]) -> str:
        try:
            call()
        except Exception as error:
            return f"{type(error).__name__}: {error}"
        return "not refused"

    def save(folder: Path, **options: Any) -> None:
        zeroshard.save(folder, handle, optimizer, step=1, **options).wait()

    def load(folder: Path) -> None:
        zeroshard.load(folder, handle, optimizer)

    step(0)
    own, first_only, others, copies = (TMP / name for name in ("own", "first-only", "others", "copies"))
    found: dict[str, Any] = {"shared": (save(SHARED / "run"), save(SHARED / "other"), load(SHARED / "run"))}
    before = handle.full_state_dict()
    found["save"] = refused(lambda: save(own))
    found["save in the background"] = refused(lambda: save(own, background=True))
    found["left"] = sorted(os.listdir(own)) if own.exists() else []
    found["load what nobody has"] = refused(lambda: load(own))
    if rank == 0:
        shutil.copytree(SHARED / "run", first_only)
    found["load what the first host has"] = refused(lambda: load(first_only))
    shutil.copytree(SHARED / ("run" if rank == 0 else "other"), others)
    found["load what differs"] = refused(lambda: load(others))
    shutil.copytree(SHARED / "run", copies)
    found["load copies"] = refused(lambda: load(copies))
    found["weights"] = before, handle.full_state_dict()
    found["loss"] = step(1)
    leave(rank, found)


if __name__ == "__main__":
    _, name, arguments = sys.argv
    globals()[name](**json.loads(arguments))
