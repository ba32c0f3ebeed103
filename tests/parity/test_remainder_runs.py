"""Main as bf16 weight and 16-bit remainder equals fp32 main, bit for bit, and so do whole runs.

With fp32 main, weights round ties to even; with a remainder, away from zero. If gradients do not depend on the weights,
main is the same in both. In a real model results differ after a tie, so whole runs are compared to fp32 main whose
weights are rounded as with a remainder.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

import zeroshard
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.parity.common import expect_equal_logs
from zeroshard.layout.interval import Interval
from zeroshard.placement import Plan
from zeroshard.precision import MixedPrecision
from zeroshard.reference import nearest_bf16_ties_away
from zeroshard.storage.main_weights import MainWeights
from zeroshard.testing import run_ranks

EVERYTHING = bool(os.environ.get("ZEROSHARD_TEST_EVERYTHING"))
STEPS, MOMENT = (200, 20) if EVERYTHING else (12, 6)
OPTIMIZERS: dict[str, tuple[type[torch.optim.Optimizer], dict[str, Any]]] = {
    "adamw": (torch.optim.AdamW, {"lr": 1e-2, "foreach": False, "weight_decay": 0.1}),
    "adamw fused": (torch.optim.AdamW, {"lr": 1e-2, "fused": True}),
    "sgd": (torch.optim.SGD, {"lr": 0.1, "momentum": 0.9}),
    "adagrad": (torch.optim.Adagrad, {"lr": 1e-2}),
}


class Given(torch.nn.Module):
    """A model whose gradient is its input, whatever its weights are."""

    def __init__(self) -> None:
        super().__init__()
        self.matrix = torch.nn.Parameter(torch.randn(37, 29))
        self.vector = torch.nn.Parameter(torch.randn(401))

    def forward(self, a: Tensor, b: Tensor) -> Tensor:
        return (self.matrix * a).sum() + (self.vector * b).sum()


def masters(
    rank: int, plan: Any, name: str, precisions: tuple[Any, ...], steps: int = STEPS
) -> tuple[list[list[dict[str, Tensor]]], list[Any]]:
    """[precision][moment] -> main at some steps of the run."""
    optimizer_class, defaults = OPTIMIZERS[name]
    result, logs = [], []
    for precision in precisions:
        model = make(Given)
        handle = zeroshard.shard(model, plan, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, **defaults)
        moments = []
        for step in range(steps):
            generator = torch.Generator().manual_seed(1000 * step + rank)
            model(torch.randn(37, 29, generator=generator), torch.randn(401, generator=generator)).backward()
            optimizer.step()
            if step % MOMENT == MOMENT - 1:
                moments.append(handle.full_state_dict(main=True))
        result.append(moments)
        logs.append(handle.comm_log)
    return result, logs


BOTH = ("bf16-remainder", "bf16")
BOTH_16 = (MixedPrecision(grad=torch.bfloat16, main="remainder"), MixedPrecision(grad=torch.bfloat16))


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_the_master_is_bit_identical_step_by_step_on_the_same_gradients(name: str) -> None:
    def check(rank: int) -> list[Any]:
        of_rank = []
        first = list(OPTIMIZERS).index(name) % 2
        cases = ((PLANS[first], BOTH), (PLANS[first + 2], BOTH_16))
        for plan, precisions in cases if name in ("adamw", "sgd") else cases[1:]:
            (remainder, master), logs = masters(rank, plan, name, precisions)
            assert len(master) == STEPS // MOMENT
            for a, b in zip(remainder, master, strict=True):
                assert same_bits(a, b) and next(iter(a.values())).dtype == torch.float32
            assert not same_bits(master[0], master[1])
            of_rank += logs
        return of_rank

    for logs in zip(*run_ranks(check, 2), strict=True):
        expect_equal_logs(logs)


def test_a_lost_carry_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with weights truncated instead of rounded, the carry from the remainder is lost."""

    def truncate(master: Tensor, weight: Tensor, remainder: Tensor) -> None:
        bits = master.view(torch.int32)
        remainder.copy_(bits)
        weight.view(torch.int16).copy_(bits >> 16)

    def check(rank: int) -> None:
        (remainder, master), _ = masters(rank, zeroshard.ZERO2, "sgd", BOTH, 2 * MOMENT)
        assert not same_bits(remainder[0], master[0])

    monkeypatch.setattr("zeroshard.storage.main_weights.split_remainder", truncate)
    run_ranks(check, 2)


# A whole run ----------------------------------------------------------------------------------------------------------


def write_ties_away(self: MainWeights, piece: Interval, value: Tensor | None = None, **_: Any) -> None:
    """`MainWeights.write` for fp32 main, with ties rounded away from zero."""
    assert self.extra is not None and self.extra.dtype == torch.float32
    local = piece.relative_to(self.interval.start).slice
    self.weights[local].copy_(nearest_bf16_ties_away(self.extra[local] if value is None else value))


def set_ties_away(self: MainWeights, piece: Interval, value: Tensor, *, spare: bool = False) -> None:
    local = piece.relative_to(self.interval.start).slice
    assert self.extra is not None
    self.extra[local].copy_(value)
    self.weights[local].copy_(nearest_bf16_ties_away(self.extra[local]))


def run(
    rank: int, plan: Any, precision: str, name: str, steps: int = 40 if EVERYTHING else 8
) -> tuple[list[float], Any, Any, Any]:
    optimizer_class, defaults = OPTIMIZERS[name]
    model = make(on_a_grid)
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(handle, optimizer_class, **defaults)
    losses = []
    for step in range(steps):
        loss = loss_of_tokens(model, rank, 0, step)
        losses.append(loss.item())
        loss.backward()
        optimizer.clip_grad_norm_(1.0)
        optimizer.step()
    return losses, handle.full_state_dict(), handle.full_state_dict(main=True), handle.comm_log


def on_a_grid() -> Net:
    """All weights are ties (bf16 numbers plus exactly half a step), so that the rounding of ties matters."""
    model = Net(blocks=1)
    with torch.no_grad():
        for parameter in model.parameters():
            bits = parameter.view(torch.int32)
            bits.bitwise_and_(-0x10000).bitwise_or_(0x8000)
    return model


def with_rounding(
    monkeypatch: pytest.MonkeyPatch, write: Callable[..., None] | None, name: str, plans: Sequence[Plan]
) -> list[list[tuple[list[float], Any, Any, Any]]]:
    def check(rank: int) -> list[tuple[list[float], Any, Any, Any]]:
        return [run(rank, plan, "bf16", name) for plan in plans]

    with monkeypatch.context() as patch:
        if write is not None:
            patch.setattr(MainWeights, "write", write)
            patch.setattr(MainWeights, "set", set_ties_away)
            patch.setattr(MainWeights, "follow", lambda self, piece, held=None: None)  # it rounds ties to even
            patch.setattr(
                MainWeights, "round_into", lambda self, view, value: view.copy_(nearest_bf16_ties_away(value))
            )
        return run_ranks(check, 2)


@pytest.mark.parametrize(("name", "plans"), [("adamw", plans_of(0)), ("sgd", plans_of(1))])
def test_a_whole_run_is_that_of_a_master_with_the_same_rounding(
    name: str, plans: Sequence[Plan], monkeypatch: pytest.MonkeyPatch
) -> None:
    remainder = run_ranks(lambda rank: [run(rank, plan, "bf16-remainder", name) for plan in plans], 2)
    away = with_rounding(monkeypatch, write_ties_away, name, plans)
    even = with_rounding(monkeypatch, None, name, plans[:1])
    for rank in range(2):
        for plan in range(len(plans)):
            assert remainder[rank][plan][0] == away[rank][plan][0]
            assert same_bits(remainder[rank][plan][1], away[rank][plan][1])
            assert same_bits(remainder[rank][plan][2], away[rank][plan][2])
        assert remainder[rank][0][0][1:] != even[rank][0][0][1:]  # the negative control: ties to even
        assert not same_bits(remainder[rank][0][2], even[rank][0][2])
    for plan in range(len(plans)):
        expect_equal_logs([remainder[rank][plan][3] for rank in range(2)])


def test_first_weights_on_a_tie_are_the_masters_in_every_plan() -> None:
    """Initial weights once were rounded with ties to even while main was split with ties away from zero. Then main on a
    tie began one bf16 step off, and a tie next to zero (a bias of 2^-134, say) as NaN."""

    def check(rank: int) -> None:
        expected = make(on_a_grid).state_dict()
        assert not torch.equal(nearest_bf16_ties_away(expected["head.weight"]), expected["head.weight"].bfloat16())
        for plan in plans_of(1):
            model = make(on_a_grid)
            handle = zeroshard.shard(model, plan, units=Block, precision="bf16-remainder")
            for _ in range(2):
                weights, main = handle.full_state_dict(), handle.full_state_dict(main=True)
                assert same_bits(main, expected)
                assert same_bits(weights, {name: nearest_bf16_ties_away(value) for name, value in expected.items()})
                handle.load_full_state_dict(expected)

    run_ranks(check, 2)


def test_the_remainder_is_where_it_should_be() -> None:
    """Remainders take 2 bytes for each weight of the own shard, and there is no fp32 copy between steps."""

    def check(rank: int) -> None:
        for plan in plans_of(1):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block, precision="bf16-remainder")
            for unit in handle.engine.units:
                assert unit.main.extra is not None
                assert unit.main.extra.dtype == torch.int16
                assert unit.main.extra.numel() == unit.main.interval.numel

    run_ranks(check, 3)
