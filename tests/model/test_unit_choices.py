"""Several modules as one unit, and units that keep their weights from forward to backward.

FSDP2 has both: `fully_shard([norm, head])`, `reshard_after_forward=False`.
"""

from __future__ import annotations

from collections import Counter, UserList
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.grids import EVERYTHING, at, grid
from tests.kit import (
    Block,
    Job,
    Net,
    State,
    loss_of_tokens,
    make,
    plans_of,
    same_bits,
    train_reference,
    transport_of,
    travelling,
)
from tests.together import on_ranks
from zeroshard.planner import plan_memory
from zeroshard.planning import Configuration

THREE = partial(Net, blocks=3)
UNTIED = Job(model=THREE, precision="bf16", steps=3, units=None)


def train(rank: int, plan: Any, units: Any, **options: Any) -> tuple[State, Any, Any, Any]:
    model = make(THREE)
    units = units(model) if callable(units) and not isinstance(units, type) else units
    handle = zeroshard.shard(model, plan, units=units, precision="bf16", **options)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
    for step in range(3):
        if step == 2:
            handle.comm_log.clear()
        loss_of_tokens(model, rank, 0, step).backward()
        optimizer.step()
    return handle.full_state_dict(), handle, optimizer, model


def gathered(handle: Any) -> list[str]:
    return [event.unit for event in handle.comm_log.entries if event.op == "all_gather" and event.phase != "unshard"]


@pytest.mark.by_cpu
@on_ranks(2)
def test_modules_named_together_are_one_unit(rank: int) -> list[Any]:
    def ways(model: Any) -> Any:
        return [Block, (model.norm, model.head)]

    expected, logs = train_reference(UNTIED, 2)[0].weights, []
    for plan in plans_of(1):
        others = [ways, [("blocks.0", "blocks.2"), ["embed", "head"]]] if plan is zeroshard.ZERO3 else []
        for units in ([Block, ("norm", "head")], *others):
            state, handle, optimizer, _ = train(rank, plan, units)
            assert same_bits(state, expected), (plan, units)
            names = {unit.name: {slot.name for slot in unit.layout.slots} for unit in handle.engine.units}
            if isinstance(units, list) and Block not in units:
                assert set(names) == {"blocks.0 + blocks.2", "embed + head", "root"}
                assert {"blocks.0.up.bias", "blocks.2.up.bias"} <= names["blocks.0 + blocks.2"]
            else:
                assert names["norm + head"] == {"norm.weight", "norm.bias", "head.weight", "head.bias"}
            fresh = make(THREE)
            chosen = units if isinstance(units, list) else units(fresh)
            transport = transport_of(handle)
            options = {"units": chosen, "precision": "bf16", "transport": transport}
            assert handle.memory() == plan_memory(fresh, plan, 2, rank=rank, **options), (plan, units)
            logs.append(handle.comm_log)
            del optimizer
    return logs


GROUPS = (
    [("blocks.0", "blocks.2"), ("embed", "head")],
    [("embed", "head"), ("blocks.0", "blocks.1"), Block],
    [("blocks.0", "blocks.2"), ("blocks.1", "head"), ("embed", "norm")],
    [("embed", "blocks.1"), Block],
)


WAYS = ("shared", "pairwise", "native")
GROUP_CASES = grid((zeroshard.ZERO2, zeroshard.ZERO3), GROUPS, WAYS)


@pytest.mark.by_gloo
@pytest.mark.parametrize("way", WAYS)
@on_ranks(2)
def test_groups_that_lie_around_each_other_take_what_is_planned(rank: int, way: str) -> None:
    """Their gradients are accumulated at the same time, so each has a bucket of its own."""

    def counted(events: Any) -> Counter[Any]:
        result = Counter[Any]()
        for event, times in events.items():
            result[event[:2]] += times
        return result

    for plan, units in at(GROUP_CASES, way):
        with travelling(way):
            _, handle, optimizer, _ = train(rank, plan, units)
        options = {"units": units, "precision": "bf16", "transport": transport_of(handle), "rank": rank}
        assert options["transport"] == way
        for peak in (False, True):
            planned = plan_memory(make(THREE), plan, 2, peak=peak, **options)
            assert handle.memory(peak=peak) == planned, (plan, units, peak)
        with torch.device("meta"):
            configured = Configuration(plan=plan, ranks=2, units=units, precision="bf16", device="cpu", transport=way)
            events = zeroshard.plan(make(THREE), configured).events
        sent = Counter(event[:2] for event in handle.comm_log.entries if event.phase != "unshard")
        assert sent == counted(events), (plan, units)
        del optimizer


@pytest.mark.by_cpu
@on_ranks(1)
def test_units_in_a_sequence_that_is_no_list(rank: int) -> None:
    """Configurations come in lists of other classes (omegaconf, ml_collections). `shard` refused them, and the message
    showed what looked like a list of names."""
    for given, equal in (
        (["Block"], [Block]),
        (["Block", UserList(["norm", "head"])], [Block, ("norm", "head")]),
        ([Block, UserList(["norm", "head"])], [Block, ("norm", "head")]),
    ):
        names = [
            [unit.name for unit in zeroshard.shard(make(THREE), "zero3", units=units).engine.units]
            for units in (UserList(given), equal)
        ]
        assert names[0] == names[1] and len(names[0]) > 2, names


@on_ranks(1)
def test_bad_groups(rank: int) -> None:
    for wrong, told in (
        ([Block, ("norm", "tail")], "'tail' in a group is no module inside Net"),
        ([("norm", nn.Linear(1, 1))], "a Linear in a group is no module inside Net"),
        ([Block, ()], "a group without modules"),
        ([("norm", "head"), ("head", "embed")], "head is in two groups"),
        ([Block, "norm"], r"no module of a class 'norm'.* To name a module, and not its class: units=\[\('norm',\)\]"),
    ):
        with pytest.raises(ValueError, match=told):
            zeroshard.shard(make(THREE), "zero3", units=wrong)
    with pytest.raises(ValueError, match=r"To name a module"):  # it was taken for a number of bytes
        zeroshard.shard(nn.Sequential(nn.Linear(1, 1), nn.Linear(1, 1)), "zero3", units=["1"])
    for keep, told in (
        (["blocks.7"], r"'blocks\.7' matches no unit; units are"),
        ([nn.LayerNorm], "matches no unit"),
    ):
        with pytest.raises(ValueError, match=told):
            zeroshard.shard(make(THREE), "zero3", units=Block, keep_gathered=keep)
    other: Any
    for other in (8, nn.Linear(1, 1), [nn.Linear(1, 1)]):  # a number is the size of a smaller mesh in FSDP
        with pytest.raises(ValueError, match="keep_gathered takes classes and names"):
            zeroshard.shard(make(THREE), "zero3", units=Block, keep_gathered=other)


@pytest.mark.by_cpu
@on_ranks(2)
def test_units_that_stay_are_gathered_once(rank: int) -> list[Any]:
    """The results are the same as without kept units, and memory is as planned."""
    logs = []
    for plan in (zeroshard.ZERO1, zeroshard.ZERO3):
        usual = train(rank, plan, Block)
        cases: list[tuple[Any, set[str]]] = [
            ((), {"blocks.0"}),  # three blocks, two pool buffers: two blocks stay anyway
            (["blocks.0"], set()),
            ([Block], set()),
            (True, set()),
            (["blocks.2"], set()),  # the other two blocks have a pool buffer each
        ]
        for keep, twice in cases if EVERYTHING or plan is zeroshard.ZERO3 else cases[1:2]:
            state, handle, optimizer, _ = train(rank, plan, Block, keep_gathered=keep)
            assert same_bits(state, usual[0]), (plan, keep)
            if plan is zeroshard.ZERO3:
                found = gathered(handle)
                assert {name for name in found if found.count(name) == 2} == twice, keep
            options = {
                "units": Block,
                "precision": "bf16",
                "keep_gathered": keep,
                "transport": transport_of(handle),
            }
            planned = plan_memory(make(THREE), plan, 2, rank=rank, **options)
            assert handle.memory() == planned, (plan, keep)
            logs.append(handle.comm_log)
            del optimizer
        needed = sum(plan_memory(make(THREE), plan, 2, units=Block, keep_gathered=True)[k] for k in ("ring", "scratch"))
        if plan is zeroshard.ZERO3:
            with pytest.raises(ValueError, match="max_transient_bytes"):
                zeroshard.shard(make(THREE), plan, units=Block, keep_gathered=True, max_transient_bytes=needed // 2)
    return logs
