"""A new run that loads a checkpoint continues with the same bits as the run that saved it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import zeroshard
from tests.checkpoint.common import FULL, PLANS, PRECISIONS, Awkward, Kind, Run, muon_and_adamw, same_bits, seed_all
from zeroshard.checkpoint import Reader
from zeroshard.optim import Lamb
from zeroshard.testing import expect_same_logs, run_ranks

KINDS = {
    "awkward": Kind(Awkward),
    "muon and adamw": Kind(Awkward, groups=muon_and_adamw),
    "adafactor": Kind(lambda: Awkward(empty=2), torch.optim.Adafactor, {"lr": 1e-2}),
    "lamb": Kind(Awkward, Lamb, {"lr": 1e-2}),
    "momentum": Kind(Awkward, torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "amsgrad": Kind(Awkward, torch.optim.Adam, {"lr": 1e-2, "amsgrad": True}),
    "adagrad": Kind(Awkward, torch.optim.Adagrad, {"lr": 1e-2}),
    "nadam": Kind(Awkward, torch.optim.NAdam, {"lr": 1e-2}),
}


def continued(rank: int, folder: Path, plan: str, precision: Any, kind: Kind, control: bool = True) -> dict[str, bool]:
    """Name of each check -> whether it passed: states that must be equal, and a control that must differ."""
    seed_all(rank)
    first = Run(rank, plan, precision, kind).train(range(2))
    first.save(folder, 2)
    before = first.state()
    first.train(range(2, 3))
    after = first.state()

    seed_all(rank + 50)
    second = Run(rank, plan, precision, kind, seed=9)
    second.load(folder)
    result = {"loaded": same_bits(second.state(), before)}
    second.train(range(2, 3))
    result["continued"] = same_bits(second.state(), after) and second.losses == first.losses[2:]

    if not control:
        return result
    # Without optimizer state and random states the result differs: the check above can fail.
    seed_all(rank + 50)
    third = Run(rank, plan, precision, kind, seed=9)
    zeroshard.load(folder, third.handle)
    third.train(range(2, 3))
    result["another without the optimizer"] = not same_bits(third.state(), after)
    expect_same_logs([first.handle.comm_log])
    return result


RANKS = (1, 2, 3, 4) if FULL else (1, 2, 3)


@pytest.mark.parametrize("num_ranks", RANKS)
def test_every_plan_and_format_of_main_goes_on_bit_for_bit(tmp_path: Path, num_ranks: int) -> None:
    """By default each number of ranks has a third of the cells of the grid, and each cell one of eight optimizers;
    with the full counts all have all."""

    def check(rank: int) -> dict[str, bool]:
        results = {}
        cells = [(plan.name, precision) for plan in PLANS for precision in PRECISIONS]
        for index, (plan, precision) in enumerate(cells):
            if not FULL and (index + index // len(PRECISIONS) + num_ranks) % len(RANKS):
                continue
            names = list(KINDS) if FULL else [list(KINDS)[(index + 3 * num_ranks) % len(KINDS)]]
            for name in names:
                folder = tmp_path / f"{plan} {precision} {name}"
                control = FULL or (plan, precision) in (("zero3", "fp32"), ("zero1", "bf16-remainder"))
                for what, good in continued(rank, folder, plan, precision, KINDS[name], control).items():
                    results[f"{plan}, {precision}, {name}: {what}"] = good
        return results

    results = run_ranks(check, num_ranks, timeout=1200)
    print(f"{num_ranks} ranks: {len(results[0])} checks")
    assert [name for result in results for name, good in result.items() if not good] == []


def test_two_groups_of_replicas_write_once(tmp_path: Path) -> None:
    def check(rank: int) -> bool:
        from torch.distributed.device_mesh import init_device_mesh

        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
        from tests.kit import Block, Net, loss_of_tokens, make

        def started(seed: int) -> tuple[Any, Any, Any]:
            model = make(Net, seed)
            handle = zeroshard.shard(model, "zero3", units=Block, mesh=mesh)
            return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)

        def steps(run: tuple[Any, Any, Any], numbers: range) -> Any:
            model, handle, optimizer = run
            for step in numbers:
                optimizer.zero_grad()
                optimizer.backward(loss_of_tokens(model, rank, 0, step))
                optimizer.step()
            return handle.full_state_dict(main=True)

        first = started(0)
        steps(first, range(2))
        zeroshard.save(tmp_path, first[1], first[2], step=2)
        after = steps(first, range(2, 4))
        second = started(1)
        zeroshard.load(tmp_path, second[1], second[2])
        return same_bits(steps(second, range(2, 4)), after)

    assert all(run_ranks(check, 4))
    with Reader(tmp_path / "step-2") as reader:
        tensors = reader.manifest.tensors
    last_files = {name: max(run.file + run.count - 1 for run in e.runs) for name, e in tensors.items() if e.runs}
    names = {name.split("/")[0] for name, last in last_files.items() if last >= 2}
    assert names == {"rank"}, "the second replica writes its random numbers only"


def test_an_optimizer_without_a_handle(tmp_path: Path) -> None:
    """Plan OPTIMIZER_ONLY: a checkpoint has parameters by number."""

    def check(rank: int) -> bool:
        def started(seed: int) -> tuple[Any, Any]:
            torch.manual_seed(seed)
            model = torch.nn.Linear(7, 5)
            return model, zeroshard.ShardedOptimizer(model.parameters(), torch.optim.AdamW, lr=1e-2, foreach=False)

        def steps(model: Any, optimizer: Any) -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 7)).square().sum().backward()
                optimizer.step()

        model, optimizer = started(0)
        steps(model, optimizer)
        zeroshard.save(tmp_path, optimizer.handle, optimizer, step=0)
        steps(model, optimizer)
        other, its_optimizer = started(1)
        zeroshard.load(tmp_path, its_optimizer.handle, its_optimizer)
        steps(other, its_optimizer)
        return same_bits(model.state_dict(), other.state_dict())

    assert all(run_ranks(check, 2))
