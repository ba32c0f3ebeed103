"""`optimizer.state` is a view: reading it gathers the state, and writing to it changes the state. (It once was always
empty: `optimizer.state[p]["exp_avg"]` raised KeyError, and `optimizer.state.clear()` did nothing. And a copy of the
optimizer was incomplete.)
"""

from __future__ import annotations

import copy
import itertools
import operator
import pickle
from collections import defaultdict
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.together import in_turn, on_ranks
from zeroshard.optim import Lamb
from zeroshard.testing import expect_same_logs, run_ranks

ADAM = {"lr": 1e-2, "foreach": False}
model_of_two = partial(Net, blocks=2)
"""Each read of a parameter's state is a gather."""


def build(plan: Any, optimizer_class: Any = torch.optim.AdamW, **options: Any) -> tuple[Any, Any]:
    model = make(model_of_two)
    handle = zeroshard.shard(model, plan, units=Block) if plan else None
    params: Any = handle or model.parameters()
    return model, zeroshard.ShardedOptimizer(params, optimizer_class, **(options or ADAM))


def train(model: Any, optimizer: Any, rank: int, steps: range) -> None:
    for step in steps:
        optimizer.zero_grad()
        loss = loss_of_tokens(model, rank, 0, step)
        optimizer.backward(loss)
        if optimizer.handle.plan.external_gradients:
            for parameter in model.parameters():
                torch.distributed.all_reduce(parameter.grad)
                parameter.grad /= torch.distributed.get_world_size()
        optimizer.step()


def _expect_that_writes_raise(optimizer: Any, parameter: Any) -> None:
    """A write to the gathered copy would have no effect."""
    state = optimizer.state[parameter]
    moments, before = state["exp_avg"], state["exp_avg"].clone()
    writes: list[Callable[[], Any]] = [
        moments.zero_,
        lambda: moments.view(-1).mul_(2),
        lambda: moments.data.fill_(1),
        lambda: moments.__setitem__(0, 1.0),
        lambda: operator.iadd(moments, 1),
        lambda: torch._foreach_mul_([moments, moments], 2.0),
        lambda: torch.add(before, 1, out=moments),
        lambda: setattr(moments, "data", before + 1),
    ]
    for write, inference in itertools.product(writes, (False, True)):
        with (
            pytest.raises(zeroshard.errors.InvalidState, match=r"optimizer\.state\[p\]\['exp_avg'\] = values"),
            torch.inference_mode(inference),
        ):
            write()
    copies = [copy.deepcopy(moments), pickle.loads(pickle.dumps(moments)), moments.clone(), moments + 0]
    assert all(type(one) is torch.Tensor for one in copies)
    copies[0].zero_()
    before.add_(moments)
    assert type(before) is torch.Tensor and repr(moments).startswith("tensor(")


CLASSES = [torch.optim.AdamW, Lamb]
"""One is stepped in pieces, the other as a whole."""


@pytest.mark.by_cpu
def test_it_reads_as_the_state_dict_says() -> None:
    def check(rank: int, optimizer_class: Any) -> Any:
        options = ADAM if optimizer_class is torch.optim.AdamW else {"lr": 1e-2}
        logs = []
        for plan in (*plans_of(CLASSES.index(optimizer_class)), None):
            model, optimizer = build(plan, optimizer_class, **options)
            params = list(model.parameters())
            assert not optimizer.state and params[0] not in optimizer.state and dict(optimizer.state[params[0]]) == {}
            train(model, optimizer, rank, range(1))
            expected = optimizer.state_dict()["state"]
            assert len(optimizer.state) == len(params) and set(optimizer.state) == set(params)
            for index, parameter in enumerate(params):
                assert same_bits(dict(optimizer.state[parameter]), expected[index])
            for (parameter, found), index in zip(optimizer.state.items(), expected, strict=True):
                assert parameter is params[index] and same_bits(dict(found), expected[index])
            moments = optimizer.state[params[0]]["exp_avg"]
            assert moments.shape == params[0].shape and (moments * 2).sum().isfinite()
            _expect_that_writes_raise(optimizer, params[0])
            with pytest.raises(KeyError, match="no parameter of this optimizer"):
                optimizer.state[torch.zeros(2)]
            assert "gathered when it is read" in repr(optimizer.state)
            logs.append(optimizer.handle.comm_log)
        return logs

    of_pieces, _of_whole = zip(*run_ranks(in_turn(check, CLASSES), 3), strict=True)
    for logs in zip(*of_pieces, strict=True):  # with Lamb, owners send different numbers of bytes
        expect_same_logs(logs)


@on_ranks(2)
def test_clearing_begins_anew(rank: int) -> None:
    def check(rank: int, optimizer_class: Any) -> None:
        options = ADAM if optimizer_class is torch.optim.AdamW else {"lr": 1e-2}
        for plan in (*plans_of(CLASSES.index(optimizer_class)), None):
            model, optimizer = build(plan, optimizer_class, **options)
            params = list(model.parameters())
            train(model, optimizer, rank, range(1))
            first = optimizer.state_dict()["state"]
            for clear in (lambda o: o.state.clear(), lambda o: setattr(o, "state", defaultdict(dict))):
                clear(optimizer)
                assert not optimizer.state and not optimizer.state_dict()["state"]
                train(model, optimizer, rank, range(1, 2))
                assert optimizer.state[params[3]]["step"] == 1
            optimizer.state = dict(zip(params, first.values(), strict=True))
            assert all(same_bits(dict(optimizer.state[p]), first[i]) for i, p in enumerate(params))

    in_turn(check, CLASSES)(rank)


@on_ranks(2)
def test_listing_the_parameters_gathers_no_state(rank: int) -> None:
    """For whole parameters `len(optimizer.state)` gathered all of it, in full on every rank."""
    for plan in plans_of(1):
        model, optimizer = build(plan, Lamb, lr=1e-2)
        train(model, optimizer, rank, range(2))
        expected = [*optimizer.state_dict()["state"]]
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(optimizer.engine.collectives, "broadcast", None)
            listed = [*optimizer.state]
        assert len(listed) == len(expected) > 0
        assert all(any(one is p for p in model.parameters()) for one in listed)


@on_ranks(2)
def test_one_parameters_state_is_set_and_deleted(rank: int) -> None:
    """Training continues with the same bits under every plan."""

    def check(rank: int, optimizer_class: Any) -> None:
        options = ADAM if optimizer_class is torch.optim.AdamW else {"lr": 1e-2}
        found = []
        for plan in plans_of(CLASSES.index(optimizer_class)):
            model, optimizer = build(plan, optimizer_class, **options)
            params = list(model.parameters())
            train(model, optimizer, rank, range(2))
            before = optimizer.state_dict()["state"]
            optimizer.state[params[2]] = {k: v * 0.5 for k, v in before[2].items()}
            optimizer.state[params[4]]["exp_avg"] = torch.ones_like(before[4]["exp_avg"])
            del optimizer.state[params[5]]
            optimizer.state.pop(params[6])
            after = optimizer.state_dict()["state"]
            assert set(after) == set(before) - {5, 6}
            assert torch.equal(after[2]["exp_avg"], before[2]["exp_avg"] * 0.5) and after[2]["step"] == 1
            assert after[4]["exp_avg"].eq(1).all() and torch.equal(after[4]["exp_avg_sq"], before[4]["exp_avg_sq"])
            assert all(same_bits(after[i], before[i]) for i in set(after) - {2, 4})
            if optimizer_class is not Lamb:  # state at an owner may have any shape
                with pytest.raises(ValueError, match=r"state 'exp_avg' of .*: expected .*, found \(3, 3\)"):
                    optimizer.state[params[2]] = {"exp_avg": torch.zeros(3, 3)}
            train(model, optimizer, rank, range(2, 4))
            assert optimizer.state[params[5]]["step"] == 2
            found.append(optimizer.handle.full_state_dict())
        assert all(same_bits(one, found[0]) for one in found)

    in_turn(check, CLASSES)(rank)


@on_ranks(2)
def test_the_state_of_what_is_frozen_waits_until_it_trains(rank: int) -> None:
    """As in torch, state that was loaded for a frozen parameter is used once the parameter requires grad."""
    model, optimizer = build("zero1")
    train(model, optimizer, rank, range(2))
    saved, weights = optimizer.state_dict(), optimizer.handle.full_state_dict()
    train(model, optimizer, rank, range(2, 4))
    for plan in (*plans_of(1), None):
        again = make(model_of_two)
        again.load_state_dict(weights)
        again.blocks[1].requires_grad_(False)
        handle = zeroshard.shard(again, plan, units=Block) if plan else None
        other = zeroshard.ShardedOptimizer(list(again.parameters()), torch.optim.AdamW, **ADAM)
        other.load_state_dict(saved)
        frozen = again.blocks[1].up.weight
        index = next(i for i, p in enumerate(again.parameters()) if p is frozen)
        assert same_bits(dict(other.state[frozen]), saved["state"][index]) and len(other.state) == len(saved["state"])
        assert same_bits(other.state_dict()["state"][index], saved["state"][index])
        again.blocks[1].requires_grad_(True)
        train(again, other, rank, range(2, 4))
        found = handle.full_state_dict() if handle else dict(again.state_dict())
        expected = optimizer.handle.full_state_dict()
        assert max((found[name] - expected[name]).abs().max() for name in expected) < 1e-6
        assert other.state[frozen]["step"] == 4


def test_an_optimizer_is_not_copied() -> None:
    def check(rank: int) -> None:
        _, optimizer = build("zero2")
        for copies in (copy.copy, copy.deepcopy, pickle.dumps):
            with pytest.raises(TypeError, match=r"cannot be copied or pickled: save its state_dict\(\)"):
                copies(optimizer)
        optimizer.handle.close()
        with pytest.raises(RuntimeError, match="this handle is closed"):
            optimizer.state.clear()

    run_ranks(check, 1)
