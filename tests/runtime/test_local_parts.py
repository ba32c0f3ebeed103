"""`no_sync` and `set_requires_gradient_sync` for some modules: their gradients are accumulated without a reduction.

FSDP2 has this for each module.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import Counting, loss_of_integers, make, plans_of, same_bits
from tests.together import on_ranks
from zeroshard.testing import expect_same_logs, run_ranks


def start(plan: Any) -> tuple[Any, Any, Any]:
    model: Any = make(Counting)
    handle = zeroshard.shard(model, plan, units=(nn.Linear, nn.Embedding))
    return model, handle, zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=2**-6)


def reduced(handle: Any) -> list[str]:
    names = [event.unit for event in handle.comm_log.entries if event.op == "reduce_scatter"]
    handle.comm_log.clear()
    return names


def test_a_part_is_reduced_when_it_is_asked_for() -> None:
    """Sums of integers are exact, so the weights equal those of a run that reduces everything each time."""

    def usual(plan: Any, rank: int) -> Any:
        model, handle, optimizer = start(plan)
        for step in range(2):
            for micro_batch in range(3):
                loss_of_integers(model, rank, micro_batch, step).backward()
            optimizer.step()
        return handle.full_state_dict()

    def check(rank: int) -> list[Any]:
        logs = []
        for plan in plans_of(0):
            model, handle, optimizer = start(plan)
            for step in range(2):
                handle.comm_log.clear()
                with handle.no_sync("left", model.table):
                    loss_of_integers(model, rank, 0, step).backward()
                assert reduced(handle) == ["right"], plan
                handle.set_requires_gradient_sync(False, "right")
                loss_of_integers(model, rank, 1, step).backward()
                assert reduced(handle) == ["left", "table"], plan
                handle.set_requires_gradient_sync(True)
                with handle.no_sync("table"), handle.no_sync("left"):
                    pass
                loss_of_integers(model, rank, 2, step).backward()
                assert reduced(handle) == ["right", "left", "table"], plan
                optimizer.step()
            assert same_bits(handle.full_state_dict(), usual(plan, rank)), plan
            logs.append(handle.comm_log)
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


@on_ranks(2)
def test_a_step_needs_all_of_them(rank: int) -> None:
    for plan in plans_of(1):
        model, handle, optimizer = start(plan)
        with handle.no_sync("left"):
            loss_of_integers(model, rank, 0, 0).backward()
        with pytest.raises(RuntimeError, match=r"accumulated under no_sync\(\) and never reduced"):
            optimizer.step()
        with pytest.raises(ValueError, match=r"set_requires_gradient_sync: .* no module of the name 'middle'"):
            handle.set_requires_gradient_sync(False, "middle")
        with pytest.raises(ValueError, match=r"^no_sync: .* no module of the name 'middle'"), handle.no_sync("middle"):
            pass
        parts: Any = ["left"]
        with pytest.raises(TypeError, match=r"^no_sync: a part is a module"), handle.no_sync(parts):
            pass


@on_ranks(2)
def test_what_is_let_go_inside_no_sync_is_accumulated_too(rank: int) -> None:
    """A parameter that was frozen at `shard` may be unfrozen inside the scope; this once ended the scope."""
    for plan in plans_of(0):
        model: Any = make(Counting)
        model.left.requires_grad_(False)
        handle = zeroshard.shard(model, plan, units=(nn.Linear, nn.Embedding))
        with handle.no_sync():
            model.left.requires_grad_(True)
            loss_of_integers(model, rank, 0, 0).backward()
        assert reduced(handle) == []
        loss_of_integers(model, rank, 1, 0).backward()
        assert reduced(handle) == ["right", "left", "table"]


def test_a_part_has_all_of_its_names() -> None:
    """Only the first name of a tied weight or of a shared module was known, and in compiled modules none of those that
    messages and full state dicts have."""

    def check(rank: int) -> None:
        model = nn.ModuleDict({"embed": nn.Embedding(6, 4), "head": nn.Linear(4, 6, bias=False)})
        model["head"].weight = model["embed"].weight
        model["again"], model["block"] = model["embed"], torch.compile(nn.Sequential(nn.Linear(4, 4)), backend="eager")
        handle = zeroshard.shard(model, "zero3", units=[nn.Embedding, nn.Linear])
        shared = model["embed"].weight
        tied, other = sorted(handle.engine.units, key=lambda unit: all(p is not shared for p in unit.parameters))
        names = {tied: ("embed", "again", "embed.weight", "head.weight", "again.weight")}
        names[other] = ("block", "block.0", "block.0.weight", "block._orig_mod.0.weight")
        for unit, of_unit in names.items():
            for name in of_unit:
                with handle.unsharded(name):
                    assert [one.weights.scopes for one in (tied, other)] == [unit is tied, unit is other], name
                with handle.no_sync(name):
                    assert handle.engine.reducer.local == {unit}, name

    run_ranks(check, 2)
