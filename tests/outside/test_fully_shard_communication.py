"""torch: test/distributed/_composable/fsdp/test_fully_shard_comm.py, test_fully_shard_collectives.py,
test_fully_shard_logging.py: which units are gathered and reduced, when, and how often; and ranges in a profile.
Compiled models: `tests/model/test_modules.py`.

Under ZERO3 the root unit has its own pool buffer, and the last two blocks are still gathered when backward begins
(`docs/design.md`): the gathers of FSDP2's `reshard_after_forward=None`, less two.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.profiler import profile
from torch.utils.checkpoint import checkpoint as recompute

import zeroshard
from tests.outside.common import (
    MLP,
    Block,
    State,
    Transformer,
    Twins,
    in_fp64,
    numbers,
    state_of,
    tokens,
    under_all_plans,
)
from tests.together import in_turn, on_ranks
from zeroshard.model.absent import is_absent
from zeroshard.placement import Plan
from zeroshard.testing import expect_same_logs, run_ranks


def units_in_order(handle: zeroshard.Handle, op: str) -> list[str]:
    return [event.unit for event in handle.comm_log.entries if event.op == op]


def transformer(layers: int = 4, kind: str = "") -> Transformer:
    torch.manual_seed(0)
    model = Transformer(layers)
    if kind:
        for layer in model.layers:
            layer.forward = partial(recompute, layer.forward, use_reentrant=kind == "reentrant")
    return model


@on_ranks(2)
def test_how_often_and_in_which_order(rank: int) -> list[Any]:
    """test_fully_shard_communication_count, test_fully_shard_backward_prefetch,
    test_set_modules_to_forward_prefetch, ..._backward_prefetch: forward gathers in its order, backward in the
    reverse one, each unit is reduced once; the same with recomputation. Units are prefetched in the order of the last
    step."""

    def check(rank: int, kind: str) -> Any:
        model = transformer(kind=kind)
        handle = zeroshard.shard(model, "zero3", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        blocks = [f"layers.{i}" for i in range(4)]
        for step in range(3):
            handle.comm_log.clear()
            loss = model(tokens(rank, step)).sum()
            assert units_in_order(handle, "all_gather") == ["root", *blocks]
            loss.backward()
            gathered = units_in_order(handle, "all_gather")[5:]
            assert gathered == blocks[1::-1]
            assert units_in_order(handle, "reduce_scatter") == [*blocks[::-1], "root"]
            optimizer.step()
        return handle.comm_log

    return in_turn(check, ["", "utils", "reentrant"])(rank)


@on_ranks(2)
def test_units_that_keep_their_weights_are_not_gathered_again(rank: int) -> list[Any]:
    """test_set_reshard_after_forward, test_fully_shard_communication_count with `reshard_after_forward=False`, of
    all units or of some. Parameters are absent between forward and backward in any case."""

    def check(rank: int, kept: Any, again: int) -> Any:
        model = transformer()
        handle = zeroshard.shard(model, "zero3", units=Block, keep_gathered=kept)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
        for step in range(2):
            handle.comm_log.clear()
            loss = model(tokens(rank, step)).sum()
            assert len(units_in_order(handle, "all_gather")) == 5
            assert all(map(is_absent, model.parameters()))
            loss.backward()
            assert len(units_in_order(handle, "all_gather")) == 5 + again
            assert len(units_in_order(handle, "reduce_scatter")) == 5
            optimizer.step()
        return handle.comm_log

    cases = [(True, 0), (["layers.0", "layers.1"], 0), (["layers.1"], 1), ((), 2)]
    return in_turn(check, cases)(rank)


@on_ranks(2)
def test_groups_of_modules_are_gathered_and_reduced_as_one(rank: int) -> Any:
    """test_fully_shard_multi_module_backward_prefetch, test_fuse_backward_prefetch."""
    model = transformer(5)
    units = [
        ("layers.0",),
        ("layers.1", "layers.2"),
        ("layers.3", "layers.4"),
        ("embed", "position"),
        ("norm", "output"),
    ]
    handle = zeroshard.shard(model, "zero3", units=units)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2)
    for step in range(2):
        handle.comm_log.clear()
        model(tokens(rank, step)).sum().backward()
        gathered, reduced = (units_in_order(handle, op) for op in ("all_gather", "reduce_scatter"))
        assert len(reduced) == len(handle.engine.units) == 5
        assert set(gathered) == set(reduced) and len(gathered) <= 5 + 3
        optimizer.step()
    return handle.comm_log


def test_two_forwards_before_one_backward_gather_twice() -> None:
    """test_fully_shard_backward_prefetch, "multi_forward": reduced once."""

    def check(rank: int) -> Any:
        model = transformer()
        handle = zeroshard.shard(model, "zero3", units=Block)
        loss = model(tokens(rank)).sum() + model(tokens(rank, 1)).sum()
        loss.backward()
        assert sorted(units_in_order(handle, "reduce_scatter")) == sorted(unit.name for unit in handle.engine.units)
        return handle.comm_log

    expect_same_logs(run_ranks(check, 3))


@on_ranks(2)
def test_two_backwards_through_a_shared_trunk(rank: int) -> None:
    """test_fully_shard_backward_prefetch, "unused_in_backward": one head's loss, then the other's, from one forward."""

    class Heads(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.trunk, self.lin1, self.lin2 = (nn.Linear(8, 8) for _ in range(3))

        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            x = self.trunk(x)
            return torch.relu(self.lin1(x)), torch.relu(self.lin2(x))

    def train(rank: int, plan: Plan) -> State:
        twins = Twins(Heads(), plan, shard={"units": nn.Linear})
        for step in range(3):
            for model in (twins.model, twins.plain):
                first, second = model(numbers(8, rank, step))
                second.sum().backward(retain_graph=True)
                first.sum().backward()
            twins.expect_equal_gradients()
            twins.step()
        return twins.expect_equal()

    under_all_plans(rank, train)


@on_ranks(2)
def test_an_order_that_differs_from_last_times_is_late_and_right(rank: int) -> None:
    """test_backward_misprefetch, test_unshard_async, test_set_modules_to_backward_prefetch_inside_ac: prefetched units
    are not needed; the results are right."""

    class Either(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.mlps = nn.ModuleList(MLP(8) for _ in range(3))

        def forward(self, x: Tensor, order: tuple[int, ...]) -> Tensor:
            for index in order:
                x = self.mlps[index](x)
            return x

    def train(rank: int, plan: Plan) -> State:
        twins = Twins(Either(), plan, shard={"units": MLP})
        orders = [(0, 1, 2), (2, 1, 0), (1, 1, 0), (2,)]
        return twins.train(lambda model, step: model(numbers(8, rank, step), orders[step]).sum(), steps=4)

    under_all_plans(rank, train)


@on_ranks(2)
def test_a_unit_of_which_a_part_is_not_used(rank: int) -> None:
    """test_fully_shard_multi_module_unused_module."""

    class WithUnused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.unused, self.lin = nn.Linear(1, 1), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(self.lin(x))

    def train(rank: int, plan: Plan) -> State:
        model = nn.Sequential(WithUnused(), WithUnused(), nn.Linear(8, 8))
        twins = Twins(model, plan, torch.optim.AdamW, shard={"units": WithUnused})
        before = twins.handle.full_state_dict()
        weights = twins.train(lambda model, step: model(numbers(8, rank, step)).sum())
        assert torch.equal(before["0.unused.weight"], weights["0.unused.weight"])
        return weights

    under_all_plans(rank, train)


@on_ranks(2)
def test_weights_are_there_before_the_first_forward(rank: int) -> None:
    """test_unshard_without_lazy_init, test_unshard_no_param_group: also of a module without parameters of its own."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Linear(4, 4))
    plain = state_of(model)
    handle = zeroshard.shard(model, "zero3", units=nn.Linear)
    with handle.unsharded():
        assert all(torch.equal(value, plain[name]) for name, value in model.state_dict().items())
    with handle.unsharded("0"):
        assert torch.equal(model[0][0].weight, plain["0.0.weight"])


@on_ranks(1)
def test_one_rank_reduces_with_nobody(rank: int) -> None:
    """TestFullyShardReduceOpWorldSize1: the gradient is not divided, and nothing is sent."""

    @in_fp64
    def check(rank: int) -> None:
        for plan in ("ddp", "zero1", "zero2", "zero3"):
            model = nn.Linear(8, 4, bias=False)
            handle = zeroshard.shard(model, plan)
            model(torch.ones(3, 8)).sum().backward()
            assert handle.gradient("weight").eq(3).all()
            assert handle.comm_log.total_bytes == 0

    check(rank)


@on_ranks(2)
def test_the_divisor_of_the_gradient_is_the_ranks_or_the_weights(rank: int) -> None:
    """test_set_reduce_scatter_divide_factor, test_explicit_sync_divide_factor: there a factor is set; here the loss is
    scaled, or has a weight: with weights 1 and 3 the gradient is (g0 + 3 g1) / 4."""
    for plan in ("ddp", "zero1", "zero2", "zero3"):
        model = nn.Linear(1, 2, bias=False)
        handle = zeroshard.shard(model, plan)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1.0)
        before = handle.full_state_dict()["weight"]
        (model(torch.full((1, 1), 3.0 + rank)).sum() / 2).backward()
        optimizer.step()
        after = handle.full_state_dict()["weight"]
        torch.testing.assert_close(before - after, torch.full((2, 1), 1.75))
        optimizer.backward(model(torch.full((1, 1), 3.0 + rank)).sum(), weight=1.0 + 2 * rank)
        optimizer.step()
        torch.testing.assert_close(after - handle.full_state_dict()["weight"], torch.full((2, 1), (3 + 3 * 4) / 4))


@on_ranks(2)
def test_a_profile_names_phases_and_what_is_gathered_and_reduced(rank: int) -> None:
    """LoggingTests.test_fsdp_logging: a log of hooks there; here profiler ranges of the phases, and of the collectives
    by unit. The negative control: calls after the profiler has stopped leave no range."""
    model = transformer(2)
    handle = zeroshard.shard(model, "zero3", units=Block)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    with profile(acc_events=True) as found:  # without it, torch 2.11 warns
        model(tokens(rank)).sum().backward()
        optimizer.step()
        optimizer.state_dict()
    handle.full_state_dict()
    names = {event.name.removeprefix("zeroshard::") for event in found.events() if "zeroshard::" in event.name}
    for unit in ("root", "layers.0", "layers.1"):
        of_unit = {"gather", "all_gather", "reduce", "reduce_scatter", "wait: reduce_scatter", "step: updated"}
        assert {f"{what}({unit})" for what in of_unit} <= names
    assert {"before forward", "begin of backward", "end of backward", "step: agree", "step: update"} <= names
    assert "state_dict" in names and "full state" not in names
