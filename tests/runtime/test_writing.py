"""Writing weights inside `handle.unsharded(...)`.

Users of DeepSpeed write on one rank only (`GatheredParameters(..., modifier_rank=0)`). With `unsharded(write=True)`
that once left different weights on the ranks under plans with replicated weights, and a part of the change under ZERO3,
without an error.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Callable
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import DEVICE, PLANS, WIDTH, Block, Net, State, loss_of_tokens, make, plans_of, same_bits, travelling
from tests.together import on_ranks
from zeroshard.checkpoint import Reader
from zeroshard.placement import Plan
from zeroshard.storage.weights import Weights
from zeroshard.testing import run_ranks

CASES: list[tuple[Plan, str | None]] = [(zeroshard.DDP, None), (zeroshard.DDP, "bf16"), (zeroshard.ZERO2, "bf16")]
CASES += [(zeroshard.ZERO3, None), (zeroshard.ZERO3, "bf16-remainder"), (zeroshard.ZERO1, "bf16-remainder")]
HALF, OTHER_HALF = CASES[::2], CASES[1::2]
if EVERYTHING:
    CASES = HALF = OTHER_HALF = list(itertools.product(PLANS, (None, "bf16", "bf16-remainder")))


def start(plan: Any, rank: int, precision: Any = None, lr: float = 1e-2) -> tuple[Any, Any, Any]:
    """A run after one step: where main is separate, it differs from the weights."""
    model = make(lambda: Net(blocks=2))
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=lr, foreach=False)
    step(model, optimizer, rank, 0)
    return model, handle, optimizer


def step(model: nn.Module, optimizer: Any, rank: int, number: int) -> None:
    optimizer.backward(loss_of_tokens(model, rank, 0, number))
    assert optimizer.step().applied


def values(handle: Any) -> State:
    weights, main = handle.full_state_dict(), handle.full_state_dict(main=True)
    return {**weights, **{f"main {name}": value for name, value in main.items()}}


@on_ranks(3)
def test_what_one_rank_writes_alone_is_refused_and_undone(rank: int) -> list[Any]:
    @torch.no_grad()
    def write(model: Any, rank: int) -> None:
        if rank == 0:
            model.blocks[1].up.weight.fill_(0.5)
            model.head.bias.add_(1.0)
        model.norm.weight.mul_(2.0)  # the same on all ranks, but undone, too

    logs = []
    for plan, precision in HALF:
        model, handle, optimizer = start(plan, rank, precision)
        before = values(handle)
        told = r"than on rank 0 in blocks\.1\.up\.weight \(rank 1, 2\), head\.bias \(rank 1, 2\)\..*modifier_rank="
        with pytest.raises(ValueError, match=told), handle.unsharded(write=True):
            write(model, rank)
        assert same_bits(values(handle), before), (plan, precision)
        step(model, optimizer, rank, 1)
        untouched, other, same = start(plan, rank, precision)
        step(untouched, same, rank, 1)
        assert same_bits(values(handle), values(other)), (plan, precision)
        logs.append(handle.comm_log)
    return logs


@on_ranks(3)
def test_the_values_of_one_rank_become_those_of_all(rank: int) -> list[Any]:
    logs = []
    for plan, precision in OTHER_HALF:
        results = []
        for one_alone in (True, False):
            model, handle, optimizer = start(plan, rank, precision)
            parts = ("blocks.1", model.head.bias)
            with handle.unsharded(*parts, write=True, modifier_rank=1 if one_alone else None), torch.no_grad():
                if rank == 1 or not one_alone:
                    model.blocks[1].up.weight.fill_(0.5)
                    model.head.bias.clamp_(-1e-3, 1e-3)
                elif rank == 2:
                    model.head.bias.fill_(9.0)  # this write is lost
            results += [values(handle)]
            step(model, optimizer, rank, 1)
            results += [values(handle)]
        assert same_bits(results[0], results[2]), (plan, precision)
        assert same_bits(results[1], results[3]), (plan, precision)
        assert (results[0]["blocks.1.up.weight"] == 0.5).all()
        logs.append(handle.comm_log)
    return logs


def teach(model: Any, *, in_place: bool) -> None:
    """As teachers follow (BYOL, Dino), with parameters of whole units, a tied one, and one that is turned."""
    up = model.blocks[0].up.weight.data
    new = {"blocks.0.up.weight": up.reshape(up.shape[::-1]).T}
    new |= {name: 0.9 * p.data + 0.25 for name, p in model.named_parameters() if name in TAUGHT}
    for name, parameter in model.named_parameters():
        if name in new and in_place:
            parameter.copy_(new[name].clone())
        elif name in new:
            old, parameter.data = parameter.data, new[name]  # `old`: not kept beyond this call
            assert old.shape == parameter.shape


TAUGHT = ("embed.weight", "blocks.1.down.bias", "norm.weight")


@on_ranks(3)
def test_data_that_are_replaced_are_values_that_are_written(rank: int) -> list[Any]:
    """`p.data = values` raised at the next forward, and only `close()` was left."""
    logs = []
    for plan, precision in HALF:
        results, losses = [], []
        for in_place in (True, False):
            model = make(lambda: Net(tied=True, blocks=2))
            handle = zeroshard.shard(model, plan, units=Block, precision=precision)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            step(model, optimizer, rank, 0)
            with handle.unsharded(write=True), torch.no_grad():
                teach(model, in_place=in_place)
                losses += [loss_of_tokens(model, 0, 0, 1).item()]
            with handle.unsharded("norm", modifier_rank=1), torch.no_grad():
                if rank == 1:
                    of_one = torch.full_like(model.norm.bias.data, 0.75)
                    model.norm.bias.copy_(of_one) if in_place else setattr(model.norm.bias, "data", of_one)
            results += [values(handle)]
            step(model, optimizer, rank, 1)
            results += [values(handle)]
            logs.append(handle.comm_log)
        assert losses[0] == losses[1], (plan, precision)
        assert same_bits(results[0], results[2]), (plan, precision)
        assert same_bits(results[1], results[3]), (plan, precision)
        assert (results[0]["norm.bias"] == 0.75).all()
    return logs


@on_ranks(2)
def test_a_block_around_one_that_writes_shows_what_is_written(rank: int) -> None:
    """Under ZeRO-3 each rank had the old values of its own shard there, in silence."""
    for plan, precision in CASES:
        model, handle, _ = start(plan, rank, precision)
        parameters = [model.norm.weight, model.blocks[0].up.weight]
        for write in (False, True):
            with handle.unsharded(write=write):
                with handle.unsharded(*parameters, write=True), torch.no_grad():
                    parameters[0].fill_(0.5 + write)
                    parameters[1].data = torch.full_like(parameters[1].data, 0.25 + write)
                assert (parameters[0] == 0.5 + write).all() and (parameters[1] == 0.25 + write).all()
            state = values(handle)
            for name in ("norm.weight", "main norm.weight"):
                assert (state[name] == 0.5 + write).all(), (plan, precision)


@on_ranks(2)
def test_data_that_cannot_be_taken_over_are_told_at_the_end_of_the_block(rank: int) -> None:
    kept: list[torch.Tensor] = []

    def other_shape(model: Any) -> None:
        model.norm.weight.data = model.norm.weight.data[:3]  # at the same address

    def other_dtype(model: Any) -> None:
        if rank == 1:
            model.norm.weight.data = model.norm.weight.data.double()

    def memory_of_another(model: Any) -> None:
        model.norm.weight.data = model.norm.bias.data

    def one_for_two(model: Any) -> None:
        model.norm.weight.data = model.norm.bias.data = torch.ones_like(model.norm.bias.data)

    def swapped(model: Any) -> None:
        """As moving averages do for an evaluation: what is kept would get the new values."""
        kept.append(model.norm.weight.data)
        model.norm.weight.data = torch.ones_like(kept[-1])

    def another_parameter(model: Any) -> None:
        model.norm.weight = nn.Parameter(torch.ones(WIDTH, device=DEVICE))

    def error(model: Any) -> None:
        model.norm.weight.data = torch.ones(3)
        raise KeyError("half way")

    ways: dict[Any, str] = {
        other_shape: r"data of norm\.weight.*shape \(3,\).*values\.to\(p\)",
        other_dtype: r"\(on rank 1\): the data of norm\.weight.*float64.*values\.to\(p\)",
        memory_of_another: r"norm\.weight the memory of another parameter.*clone\(\)",
        one_for_two: r"norm\.\w+ the memory of norm\.\w+,.*clone\(\)",
        swapped: r"norm\.weight have been replaced, and a tensor that shares.*p\.data\.clone\(\)",
        another_parameter: r"norm\.weight has come into the model.*p\.data = values",
        error: "half way",
    }
    for plan, precision in OTHER_HALF:
        model, handle, optimizer = start(plan, rank, precision)
        before, weight = values(handle), model.norm.weight
        for way, told in ways.items():
            with pytest.raises((RuntimeError, ValueError, KeyError), match=told), handle.unsharded(write=True):
                way(model)
            kept.clear()
            model.norm.weight = weight
            assert same_bits(values(handle), before), (plan, precision, way)
        for read, told in ((one_for_two, "Pass write=True"), (another_parameter, "has come into"), (error, "half way")):
            with pytest.raises((RuntimeError, KeyError), match=told), handle.unsharded():
                read(model)
            model.norm.weight = weight
            assert same_bits(values(handle), before), (plan, precision, read)
        with handle.unsharded(write=True):  # put back in the same block
            old = model.norm.weight.data
            model.norm.weight.data = torch.ones_like(old)
            model.norm.weight.data = old
        assert same_bits(values(handle), before), (plan, precision)
        step(model, optimizer, rank, 1)


@on_ranks(2)
def test_modifier_rank_alone_means_write(rank: int) -> None:
    """`modifier_rank` implies `write=True`, as in DeepSpeed."""
    model, handle, _ = start("zero3", rank)
    with handle.unsharded("norm", modifier_rank=0), torch.no_grad():
        if rank == 0:
            model.norm.weight.fill_(3.0)
    assert (handle.full_state_dict()["norm.weight"] == 3.0).all()
    for wrong in (-1, 2, True, "0"):
        with pytest.raises(ValueError, match="modifier_rank must be one of the ranks 0,1, found"):
            with handle.unsharded(modifier_rank=wrong):
                pass
    before = values(handle)
    with pytest.raises(ValueError, match="ranks differ in modifier_rank"):
        with handle.unsharded(write=True, modifier_rank=rank):
            pass
    assert same_bits(values(handle), before)


@on_ranks(2)
def test_what_is_not_written_keeps_its_main(rank: int) -> None:
    """Writing one element once replaced fp32 main of the whole model by the rounded weights."""
    for plan, precision in (case for case in CASES if case[1]):
        model, handle, _ = start(plan, rank, precision)
        before = handle.full_state_dict(main=True)
        with handle.unsharded(write=True), torch.no_grad():
            model.blocks[0].up.weight[2, 3] = 0.5
        before["blocks.0.up.weight"][2, 3] = 0.5
        assert same_bits(handle.full_state_dict(main=True), before), (plan, precision)


@on_ranks(2)
def test_an_error_inside_leaves_the_values_as_they_were(rank: int) -> None:
    @torch.no_grad()
    def write(model: Any, rank: int) -> None:
        model.head.bias.add_(1.0 + rank)
        raise KeyError("half way")

    for plan, precision in CASES:
        model, handle, optimizer = start(plan, rank, precision)
        before = values(handle)
        with pytest.raises(KeyError), handle.unsharded(write=True):
            write(model, rank)
        assert same_bits(values(handle), before), (plan, precision)
        step(model, optimizer, rank, 1)


def changes(handle: Any, optimizer: Any, folder: Path) -> list[Callable[[], object]]:
    """Calls that set all values to those of now, except for the last one, a step."""
    zeroshard.save(folder, handle, optimizer, step=1)
    state, parts = handle.full_state_dict(main=True), [part.clone() for part in handle.main_parts()]
    return [
        lambda: zeroshard.load(folder, handle, optimizer),
        lambda: handle.load_full_state_dict(state),
        lambda: handle.set_main_parts(parts),
        optimizer.step,
    ]


@pytest.mark.parametrize(
    ("num_ranks", "transport", "cases"),
    [(2, "shared", OTHER_HALF), (3, "shared", HALF), (2, "pairwise", OTHER_HALF), (2, "native", HALF)],
    ids=["2-shared", "3-shared", "2-pairwise", "2-native"],
)
def test_values_that_are_set_by_a_call_inside(
    num_ranks: int, transport: str, cases: list[tuple[Plan, str | None]], tmp_path: Path
) -> None:
    """Where the block reads, they are seen: under ZeRO-3 the parameters were absent for the rest of the block. Where it
    writes, the call raises: under ZeRO-3 the block failed, and else main was rounded to 16 bits, in silence."""

    def check(rank: int) -> None:
        for plan, precision in cases:
            model, handle, optimizer = start(plan, rank, precision)
            calls = changes(handle, optimizer, tmp_path / f"{plan.name}-{precision}")
            step(model, optimizer, rank, 1)
            optimizer.backward(loss_of_tokens(model, rank, 0, 2))
            with handle.unsharded(write=True), pytest.raises(RuntimeError, match="before or after the block"):
                calls[-1]()
            assert optimizer.step().applied
            for call in calls:
                if call is calls[-1]:
                    optimizer.backward(loss_of_tokens(model, rank, 0, 3))
                else:
                    before = values(handle)
                    with handle.unsharded(write=True), pytest.raises(RuntimeError, match="before or after the block"):
                        call()
                    assert same_bits(values(handle), before), (plan, precision)
                before = handle.full_state_dict()
                with handle.unsharded(), handle.unsharded("head"):
                    call()
                    inside = {name: p.detach().clone() for name, p in model.named_parameters()}
                assert same_bits(inside, handle.full_state_dict()), (plan, precision)
                assert not same_bits(inside, before) or call in calls[1:3], (plan, precision)
            step(model, optimizer, rank, 4)

    with travelling(transport):
        run_ranks(check, num_ranks)


def test_main_is_not_read_while_weights_are_written(tmp_path: Path) -> None:
    """It is the old one until the end of the block, under ZeRO-3: what was saved inside had none of what was written,
    in silence."""

    def check(rank: int) -> None:
        for plan in ("ddp", "zero3"):
            handle = zeroshard.shard(model := nn.Linear(2, 2), plan)
            for read in (lambda: zeroshard.save(tmp_path, handle, step=1), lambda: handle.full_state_dict(main=True)):  # noqa: B023
                with handle.unsharded(write=True), torch.no_grad():
                    model.weight.fill_(7)
                    with pytest.raises(RuntimeError, match="before or after the block"):
                        read()
                    with handle.unsharded():
                        assert handle.full_state_dict()["weight"].eq(7).all()
                read()
            with Reader(tmp_path / "step-1") as reader:
                assert reader.tensor("model/weight").eq(7).all()

    run_ranks(check, 2)


@on_ranks(2)
def test_a_write_that_was_not_announced_is_told(rank: int) -> None:
    """Such a write once was lost under ZERO3; under the other plans it changed the weights of this rank only, and not
    main."""
    for plan in plans_of(1):
        model, handle, _ = start(plan, rank)
        before = values(handle)
        told = "this write is lost" if plan is zeroshard.ZERO3 else "this rank has the new values"
        with pytest.raises(RuntimeError, match=rf"head\.bias.*Pass write=True.*{told}"):
            with handle.unsharded(), torch.no_grad():
                model.head.bias.add_(1.0)
        assert same_bits(values(handle), before) == (plan is zeroshard.ZERO3)
        if plan is zeroshard.ZERO3:
            with pytest.raises(RuntimeError, match=r"blocks\.1\.up\.weight.*Pass write=True"):
                with handle.unsharded():
                    model.blocks[1].up.weight.data.mul_(2.0)  # which leaves the version as it is
            assert same_bits(values(handle), before)
        with handle.unsharded():  # control: reading and training raise nothing
            model.head.bias.sum().item()
            loss_of_tokens(model, rank, 0, 1).backward()


class SetsItself(nn.Module):
    """Sets its weight in the forward of that number, as layers do whose start depends on the data."""

    def __init__(self, forward: int, through_data: bool) -> None:
        super().__init__()
        self.linear, self.forwards = nn.Linear(32, 32), 0  # more elements than a shard
        self.in_forward, self.through_data = forward, through_data

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.forwards += 1
        if self.forwards == self.in_forward:
            with torch.no_grad():
                (self.linear.weight.data if self.through_data else self.linear.weight).fill_(0.5)
        out: torch.Tensor = self.linear(x)
        return out


@pytest.mark.by_cpu
@on_ranks(2)
def test_a_write_in_a_forward_takes_effect_or_raises(rank: int) -> None:
    """A layer of gpytorch that sets its parameters in its first forward trained from other values under ZERO3, in
    silence: the write went to a borrowed buffer."""
    ways = [("shared", plan) for plan in plans_of(1)] + [("messages", zeroshard.ZERO3)]
    for way, plan in ways:
        for forward, through_data in ((1, False), (1, True), (2, False), (0, False)):
            model = make(lambda forward=forward, through=through_data: SetsItself(forward, through))
            with travelling(way):
                handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.0)
            is_lost = plan is zeroshard.ZERO3 and forward > 0
            for number in (1, 2):
                if is_lost and number == forward:
                    told = r"linear\.weight has been written to in a forward or backward"
                    with pytest.raises(RuntimeError, match=told):
                        model(torch.ones(2, 32, device=DEVICE))
                    break
                model(torch.ones(2, 32, device=DEVICE)).sum().backward()
                optimizer.step()
            else:
                weight = handle.full_state_dict()["linear.weight"]
                assert torch.equal(weight.cpu(), torch.full((32, 32), 0.5)) is (forward > 0)


@on_ranks(2)
def test_a_rank_that_writes_after_unpark_does_not_write_what_another_one_reads(rank: int) -> None:
    """Rank 1 reads rank 0's shards late. If what rank 0 writes then were in them, rank 1 would write it twice."""
    arrive = Weights.arrive

    def late(weights: Weights, *, stale: bool = False) -> None:
        time.sleep(0.2)
        arrive(weights, stale=stale)

    for plan in ("ddp", "zero1", "zero2"):
        model, handle, _ = start(plan, rank, "bf16")
        handle.park()
        Weights.arrive = late if rank == 1 else arrive  # type: ignore[method-assign]
        try:
            handle.unpark()
        finally:
            Weights.arrive = arrive  # type: ignore[method-assign]
        for parameter in model.parameters():
            parameter.data.add_(1)
        mine = torch.cat([parameter.detach().reshape(-1).float() for parameter in model.parameters()])
        of_rank0 = mine.clone()
        torch.distributed.broadcast(of_rank0, 0)
        assert torch.equal(mine, of_rank0), plan


@on_ranks(2)
def test_what_a_block_has_returned_has_the_new_weights_in_the_next_one(rank: int) -> None:
    """Averages of weights that look for the model's tensors once (`ModelEMA` of ultralytics) had those of the first
    block for ever under ZeRO-3, in silence."""
    for plan, precision in CASES:
        for write in (False, True):
            model, handle, optimizer = start(plan, rank, precision)
            kept: dict[str, torch.Tensor] = {}
            for index in range(3):
                with handle.unsharded(write=write):
                    kept = kept or model.state_dict()
                    found = {name: value.clone() for name, value in kept.items()}
                assert same_bits(found, handle.full_state_dict()), (plan, precision, index)
                step(model, optimizer, rank, index)


class Statistics(nn.Module):
    """Keeps a running mean in a frozen parameter, as batch norm of Keras does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(4, 4)
        self.mean = nn.Parameter(torch.zeros(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.mean.lerp_(x.mean(0), 0.1)
        out: torch.Tensor = self.layer(x - self.mean)
        return out


@on_ranks(2)
def test_statistics_that_are_parameters_are_told_of_ignored(rank: int) -> None:
    for plan, ignored in itertools.product(("zero2", "zero3"), ((), ("mean",))):
        model = make(Statistics)
        handle = zeroshard.shard(model, plan, ignored=ignored)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)

        def train(model: nn.Module = model, optimizer: Any = optimizer) -> None:
            for _ in range(3):
                optimizer.zero_grad()
                model(torch.ones(2, 4, device=DEVICE) * (rank + 1)).sum().backward()
                optimizer.step()

        if ignored:
            train()
            assert model.get_parameter("mean")[0].item() == pytest.approx((rank + 1) * (1 - 0.9**3))
        else:
            with pytest.raises(RuntimeError, match=r"Keras.*ignored="):
                train()


@on_ranks(2)
def test_blocks_inside_of_a_block_that_has_written(rank: int) -> None:
    """Under ZeRO-3 a block to read said that its own code had written, on the rank alone that has the weight in its
    shard: the other one waited. A block to write took the replaced data for a view of the weight that somebody keeps,
    and the block around then ended with an AssertionError."""
    for plan, how in itertools.product(("zero1", "zero3"), ("fill", "data")):
        model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
        handle = zeroshard.shard(model, plan, units=nn.Linear)
        with handle.unsharded(write=True), torch.no_grad():
            if how == "data":
                model[0].weight.data = torch.full((4, 4), 5.0)
            else:
                model[0].weight.fill_(5.0)
            with handle.unsharded():
                model(torch.ones(2, 4))
            with handle.unsharded(write=True):
                model[1].weight.fill_(3.0)
            assert bool((model[0].weight == 5.0).all())
        state = handle.full_state_dict(main=True)
        assert bool((state["0.weight"] == 5.0).all()) and bool((state["1.weight"] == 3.0).all()), (plan, how)
        with pytest.raises(KeyError, match="inside"), handle.unsharded(write=True), handle.unsharded(write=True):
            raise KeyError("inside")
        model(torch.ones(2, 4)).sum().backward()


@on_ranks(2)
def test_rows_that_each_rank_shortens_by_itself(rank: int) -> None:
    """`max_norm` writes to the rows of a batch in each forward. Under torch's DDP the weights then drift apart."""
    for plan in PLANS:
        for rows in ([0, 1], [rank, 2 + rank]):
            model = nn.Sequential(nn.Embedding(8, 4, max_norm=0.1), nn.Linear(4, 1))
            handle = zeroshard.shard(model, plan)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            told = "the write is lost" if plan is zeroshard.ZERO3 else "the ranks have diverged"
            is_refused = plan is zeroshard.ZERO3 or rows != [0, 1]
            with pytest.raises(RuntimeError, match=told) if is_refused else nullcontext():
                for _ in range(3):
                    model(torch.tensor(rows)).sum().backward()
                    optimizer.step()
            handle.abandon()
