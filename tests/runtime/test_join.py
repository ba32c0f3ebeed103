"""Ranks with inputs for different numbers of steps. Inside `handle.join()` ranks continue after one has run out of
inputs, as inside torch's `Join`, and all ranks end with the same weights. Without it they fail."""

from __future__ import annotations

import itertools
from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.together import in_turn
from zeroshard.comm.orders import Orders
from zeroshard.ranks.trial import Probe
from zeroshard.testing import expect_same_logs, run_ranks

STEPS = (2, 4, 1)


def plain(rank: int, steps: int, divide_by_initial_world_size: bool) -> tuple[list[float], dict[str, Any]]:
    model = DistributedDataParallel(make(Net))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, foreach=False)
    losses = []
    with model.join(divide_by_initial_world_size=divide_by_initial_world_size):
        for step in range(steps):
            optimizer.zero_grad()
            loss = loss_of_tokens(model, rank, 0, step, 1)
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    return losses, model.module.state_dict()


def joined(
    rank: int,
    steps: int,
    plan: Any,
    *,
    mesh: Any = None,
    micro_batches: int = 1,
    clip: float | None = None,
    weighted: bool = False,
    optimizer_class: Any = torch.optim.AdamW,
    **options: Any,
) -> dict[str, Any]:
    model = make(partial(Net, blocks=2))
    handle = zeroshard.shard(model, plan, units=Block, mesh=mesh)
    defaults = {"lr": 1e-2} if optimizer_class is not torch.optim.AdamW else {"lr": 1e-2, "foreach": False}
    optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, **defaults)
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.7)
    losses, norms = [], []
    with handle.join(**options):
        for step in range(steps):
            optimizer.zero_grad()
            for micro_batch in range(micro_batches):
                with nullcontext() if micro_batch == micro_batches - 1 else handle.no_sync():
                    loss = loss_of_tokens(model, rank, micro_batch, step, micro_batches)
                    optimizer.backward(loss, weight=float(rank + 1) if weighted else None)
            if clip is not None:
                norms.append(float(optimizer.clip_grad_norm_(clip)))
            result = optimizer.step()
            norms.append(result.grad_norm)
            if clip is not None:
                scheduler.step()
            losses.append(loss.item())
    # afterwards training without join works
    loss_of_tokens(model, rank, 0, 9, 1).backward()
    optimizer.step()
    state = optimizer.state_dict()
    weights = handle.full_state_dict()
    return {"losses": losses, "norms": norms, "weights": weights, "state": state, "log": handle.comm_log}


def equal_states(one: Any, other: Any) -> bool:
    pairs = zip(one["state"].values(), other["state"].values(), strict=True)
    return all(torch.equal(a[key], b[key]) for a, b in pairs for key in a if isinstance(a[key], torch.Tensor))


def test_it_trains_as_inside_of_torchs_join() -> None:
    def run(rank: int, divide_by_initial_world_size: bool) -> tuple[Any, list[Any]]:
        expected = plain(rank, STEPS[rank], divide_by_initial_world_size)
        options = {"divide_by_initial_world_size": divide_by_initial_world_size}
        found = []
        for plan in plans_of(divide_by_initial_world_size):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
            losses = []
            with handle.join(**options):
                for step in range(STEPS[rank]):
                    optimizer.zero_grad()
                    loss = loss_of_tokens(model, rank, 0, step, 1)
                    loss.backward()
                    optimizer.step()
                    losses.append(loss.item())
            found.append((losses, handle.full_state_dict()))
        return expected, found

    for by_rank in zip(*run_ranks(in_turn(run, [True, False]), 3), strict=True):
        for (expected_losses, expected), found in by_rank:
            for losses, weights in found:
                torch.testing.assert_close(losses, expected_losses)
                torch.testing.assert_close(weights, expected)
                assert same_bits(weights, by_rank[0][1][0][1])


CASES: dict[str, dict[str, Any]] = {
    "clip and a scheduler": {"clip": 0.1},
    "micro-batches": {"micro_batches": 2},
    "weights of losses": {"weighted": True, "divide_by_initial_world_size": False},
    "whole parameters": {"optimizer_class": torch.optim.Adafactor, "micro_batches": 2},
}


def test_all_plans_agree_and_all_ranks_end_alike() -> None:
    """Under its plans all ranks end with the same weights, also where a rank has no input at all: by default in every
    other case."""
    cases = list(itertools.product(CASES, [(3, 1, 2), (0, 2, 3)]))
    if not EVERYTHING:
        cases = [case for number, case in enumerate(cases) if number % 4 in (0, 3)]

    def run(rank: int) -> list[list[Any]]:
        return [
            [joined(rank, steps[rank], plan, **CASES[case]) for plan in plans_of(index)]
            for index, (case, steps) in enumerate(cases)
        ]

    found = run_ranks(run, 3)
    for index, (case, steps) in enumerate(cases):
        longest, plans = steps.index(max(steps)), plans_of(index)
        for rank, plan in itertools.product(range(3), range(len(plans))):
            outcome, where = found[rank][index][plan], (case, steps, rank, plans[plan])
            assert len(outcome["losses"]) == steps[rank], where
            assert outcome["losses"] == found[rank][index][0]["losses"], where
            assert same_bits(outcome["weights"], found[0][index][0]["weights"]), where
            assert equal_states(outcome["state"], found[0][index][plan]["state"]), where
            assert outcome["norms"] == found[longest][index][0]["norms"][: len(outcome["norms"])], where
        for plan in range(len(plans) if case != "whole parameters" else 0):  # owners send different numbers of bytes
            expect_same_logs([found[rank][index][plan]["log"] for rank in range(3)])


def test_on_two_axes_and_by_messages(monkeypatch: pytest.MonkeyPatch) -> None:
    def run(rank: int) -> list[Any]:
        mesh = init_device_mesh("cpu", (2, 2))
        plans = PLANS if EVERYTHING else PLANS[2:]
        found = [joined(rank, (1, 2, 0, 3)[rank], plan, mesh=mesh) for plan in plans[::2]]
        monkeypatch.setattr(Probe, "answer", lambda self, cards: False)
        return found + [joined(rank, (1, 2, 0, 3)[rank], plan, mesh=mesh) for plan in plans[1::2]]

    found = run_ranks(run, 4)
    for outcomes in found:
        for outcome in outcomes:
            assert same_bits(outcome["weights"], found[0][0]["weights"])
            assert outcome["losses"] == outcomes[0]["losses"]


def test_equal_inputs_are_as_without_a_join() -> None:
    """With equal inputs results are those without a join, and no order is written. After uneven inputs only the last
    order remains in the store."""

    def run(rank: int) -> tuple[Any, Any, list[str]]:
        given: list[str] = []
        give = Orders.give

        def noted(self: Orders, what: str, *arguments: Any) -> None:
            given.extend([what] * bool(self.followers))
            give(self, what, *arguments)

        Orders.give = noted  # type: ignore[method-assign]
        inside = joined(rank, 3, PLANS[3])
        Orders.give = give  # type: ignore[method-assign]
        model = make(partial(Net, blocks=2))
        handle = zeroshard.shard(model, PLANS[3], units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, foreach=False)
        for step in (0, 1, 2, 9):
            loss_of_tokens(model, rank, 0, step, 1).backward()
            optimizer.step()
        keys = [dist.distributed_c10d._get_default_store().num_keys()]
        for uneven in (0, 4):  # each makes a model, and so groups
            dist.barrier()
            joined(rank, 2 + uneven * rank, PLANS[3])
            dist.barrier()
            keys.append(dist.distributed_c10d._get_default_store().num_keys())
        left = (keys[2] - keys[1]) - (keys[1] - keys[0])
        return inside["weights"], handle.full_state_dict(), [*given, *["left in the store"] * (left > 2)]

    for inside, outside, orders in run_ranks(run, 2):
        assert same_bits(inside, outside) and set(orders) <= {"meet"}


def test_what_cannot_be_followed_is_refused() -> None:
    def run(rank: int) -> None:
        def train(what: Any, plan: str = "zero3", **options: Any) -> None:
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)
            with handle.join(**options):
                for step in range(3 if rank == 0 else 1):
                    loss_of_tokens(model, rank, 0, step, 1).backward()
                    if step:
                        what(model, handle, optimizer)
                    optimizer.step()

        def zeroed_and_again(model: Any, handle: Any, optimizer: Any) -> None:
            model.zero_grad(set_to_none=False)
            loss_of_tokens(model, rank, 0, 1, 1).backward()

        by_active = {"divide_by_initial_world_size": False}
        cases = [
            (lambda m, h, o: h.full_state_dict(), {}, r"inside `with handle.join\(\):`, while rank 1 has run out"),
            (lambda m, h, o: o.state_dict(), {}, r"optimizer.state, .* inside `with handle.join"),
            (lambda m, h, o: o.step(lambda: None), {}, r"join: step\(closure\) cannot be followed"),
            (lambda m, h, o: nn.utils.clip_grad_norm_(m.parameters(), 0.1), {"plan": "ddp"}, "p.grad has been changed"),
            # Ranks without inputs kept these gradients: under DDP the weights of the ranks drifted apart, in silence.
            (zeroed_and_again, {"plan": "ddp"}, "join: p.grad has been changed"),
            (zeroed_and_again, {"plan": "zero2"}, "p.grad has been changed, and a rank"),
            # It is the sum divided by the number of all ranks, and the step divides by that of the others.
            (lambda m, h, o: m.head.weight.grad.norm(), {"plan": "ddp", **by_active}, "or some ranks have run out"),
        ]
        for what, options, message in cases:
            if rank == 0:
                with pytest.raises(RuntimeError, match=message):
                    train(what, **options)
                store.set(f"refused {message}", "1")
            else:
                with pytest.raises(Exception):  # noqa: B017  any error: the other rank has left, or does something else
                    train_until_refused(train, what, options, message)
            dist.barrier()

    def train_until_refused(train: Any, what: Any, options: Any, message: str) -> None:
        original = Orders.take

        def take(self: Orders) -> list[Any]:
            while not self._store.check([self._key(self._next)]):
                if store.check([f"refused {message}"]):
                    raise RuntimeError("the leader has raised")
            return original(self)

        Orders.take = take  # type: ignore[method-assign]
        try:
            train(what, **options)
        finally:
            Orders.take = original  # type: ignore[method-assign]

    store: Any = None

    def with_store(rank: int) -> None:
        nonlocal store
        store = dist.distributed_c10d._get_default_store()
        run(rank)

    run_ranks(with_store, 2)


def test_it_can_raise_as_soon_as_a_rank_has_run_out() -> None:
    def run(rank: int) -> str:
        model = make(Net)
        handle = zeroshard.shard(model, "zero2", units=Block)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW)

        def train() -> None:
            with handle.join(throw_on_early_termination=True):
                for step in range(3 - rank):
                    loss_of_tokens(model, rank, 0, step, 1).backward()
                    optimizer.step()

        with pytest.raises(RuntimeError, match="rank 1 has run out of inputs") as caught:
            train()
        with handle.join(), pytest.raises(RuntimeError, match="inside of another"), handle.join():
            pass
        return str(caught.value)

    assert len(set(run_ranks(run, 2))) == 1


MICRO_BATCHES = (4, 3)  # for each rank; a step has two


def _micro_batch(rank: int, number: int) -> Tensor:
    return torch.randn(3, 4, generator=torch.Generator().manual_seed(10 * rank + number), dtype=torch.float64)


def _linear() -> nn.Module:
    torch.manual_seed(0)
    return nn.Linear(4, 2).double()


def runs_out_between_micro_batches(rank: int, plan: Any, weighted: bool, keeps: bool) -> Tensor:
    model = _linear()
    handle = zeroshard.shard(model, plan)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    with handle.join(divide_by_initial_world_size=keeps):
        for number in range(MICRO_BATCHES[rank]):
            loss = model(_micro_batch(rank, number)).square().mean()
            optimizer.backward(loss if weighted else loss / 2, weight=1.0 + rank if weighted else None)
            if number % 2:
                optimizer.step()
    return handle.full_state_dict()["weight"]


def test_a_rank_that_runs_out_between_micro_batches_counts_with_what_it_has_given() -> None:
    """Its micro-batch counts with its weight. (The weight once was taken for 0 while the gradient was in the sum, so
    the mean was too large, without an error.)"""
    cases = list(itertools.product(PLANS, (True, False), (True, False)))

    def run(rank: int) -> list[Tensor]:
        return [runs_out_between_micro_batches(rank, *case) for case in cases]

    expected = {weighted: _where_one_runs_out(weighted) for weighted in (True, False)}
    for of_rank in run_ranks(run, 2):
        for (plan, weighted, keeps), found in zip(cases, of_rank, strict=True):
            difference = float((found - expected[weighted]).abs().max())
            assert difference < 1e-12, (plan, weighted, keeps)


def _where_one_runs_out(weighted: bool) -> Tensor:
    """The final weight, computed in one process."""
    model = _linear()
    for step in range(2):
        terms = [(r, 2 * step + k) for r in range(2) for k in range(2) if 2 * step + k < MICRO_BATCHES[r]]
        total = sum(1.0 + rank for rank, _ in terms) if weighted else 4.0
        model.zero_grad()
        for rank, number in terms:
            loss = model(_micro_batch(rank, number)).square().mean()
            (loss * ((1.0 + rank) if weighted else 1.0) / total).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.1 * parameter.grad
    return model.state_dict()["weight"]


def discards(rank: int, plan: Any) -> dict[str, Tensor]:
    """The second step of the rank that goes on begins anew, after a backward."""
    model = _linear()
    handle = zeroshard.shard(model, plan)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
    with handle.join():
        for number in range(2 if rank == 0 else 1):
            model(_micro_batch(rank, number)).square().mean().backward()
            if number:
                model.zero_grad()
                model(_micro_batch(rank, 2)).square().mean().backward()
            optimizer.step()
    return handle.full_state_dict()


def test_gradients_that_the_others_discard_are_discarded_on_a_rank_that_has_run_out() -> None:
    expected = _linear()
    for terms in ([(0, 0), (1, 0)], [(0, 2)]):
        expected.zero_grad()
        for rank, number in terms:
            (expected(_micro_batch(rank, number)).square().mean() / 2).backward()
        torch.optim.SGD(expected.parameters(), lr=0.1).step()
    for of_rank in run_ranks(lambda rank: [discards(rank, plan) for plan in PLANS], 2):
        for found in of_rank:
            torch.testing.assert_close(found, expected.state_dict(), rtol=0, atol=1e-12)
