"""The step of a GPU, forced on a CPU: few calls of the optimizer and few operations, whatever the sizes.

Pieces once had at most 2^18 elements on every device: 3,830 pieces for 8 billion parameters on 8 ranks, each with
operations of its own, and a GPU waited for the host.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

import zeroshard
from tests.grids import EVERYTHING
from tests.kit import PLANS, WIDTH, Block, Net, loss_of_tokens, make, plans_of, same_bits, transport_of
from zeroshard.layout import cuts
from zeroshard.layout.cuts import SIZES, Sizes
from zeroshard.planner import plan_memory
from zeroshard.reference import Reference
from zeroshard.step.flat_step import FlatStep
from zeroshard.storage import marks
from zeroshard.testing import run_ranks

PRECISIONS = ("fp32", "bf16", "bf16-remainder")
MOST = {"fp32": 11, "bf16": 20, "bf16-remainder": 24}
"""The most operations for one more unit, with the numbers of AdamW's step counts (two for each piece)."""
TINY = Sizes(piece=256, batch=256, at_once=256, in_place=256)
"""For controls."""


@pytest.fixture
def as_on_cuda(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(SIZES, "cpu", SIZES["cuda"])
    monkeypatch.setattr(marks, "mark_of", lambda values: None)  # as of values that are not on a CPU


class Operations(TorchDispatchMode):
    """Counts the operations that compute. Views launch nothing."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not func.is_view:
            self.counts[str(func)] += 1
        return func(*args, **(kwargs or {}))

    @property
    def number(self) -> int:
        return self.counts.total()


class Calls(torch.optim.AdamW):
    """AdamW that counts its steps."""

    number = 0

    def step(self, closure: Any = None) -> Any:
        Calls.number += 1
        return super().step(closure)


def in_two_groups(model: nn.Module, biases: Callable[[str], bool] = lambda name: name.endswith("bias")) -> Any:
    """With weight decay, and without: the groups take turns in each unit."""
    named = list(model.named_parameters())
    decayed = [parameter for name, parameter in named if not biases(name)]
    plain = [parameter for name, parameter in named if biases(name)]
    return [{"params": decayed, "weight_decay": 0.1}, {"params": plain, "weight_decay": 0.0}]


def cost_of_update(plan: Any, precision: str, width: int, blocks: int) -> tuple[int, int]:
    """Calls of the class, and operations, in one update of main after the first."""
    model = make(lambda: nn.Sequential(*(Block(width, 2 * width) for _ in range(blocks))))
    handle = zeroshard.shard(model, plan, units=Block, precision=precision)
    optimizer = zeroshard.ShardedOptimizer(in_two_groups(model), Calls, lr=1e-2, foreach=True)
    for _ in range(2):
        optimizer.backward(model(torch.ones(2, width, dtype=next(model.parameters()).dtype)).sum())
        control, Calls.number, operations = optimizer.agree(), 0, Operations()
        active, update = optimizer.agreement.active(control), optimizer.agreement.clipping.update(0.5)
        with operations, torch.no_grad():
            (stepper,) = optimizer.steppers
            stepper.step(optimizer.param_groups, active, update, lambda unit: None, {})
        optimizer.zero_grad()
    handle.close()
    return Calls.number, operations.number


@pytest.mark.by_cpu
def test_calls_and_operations_do_not_grow_with_the_sizes(monkeypatch: pytest.MonkeyPatch, as_on_cuda: None) -> None:
    def check(rank: int) -> None:
        for number, precision in enumerate(PRECISIONS):
            for plan in PLANS[1::2] if EVERYTHING else [PLANS[1 + 2 * (number % 2)]]:
                costs = {(w, n): cost_of_update(plan, precision, w, n) for w in (128, 256) for n in (2, 4)}
                assert all(calls == 1 for calls, _ in costs.values()), (precision, plan, costs)
                # Of 2^18 elements: one more, and a piece of the CPU would end.
                assert all(costs[256, n][1] <= costs[128, n][1] for n in (2, 4)), (precision, plan, costs)
                of_a_unit = (costs[256, 4][1] - costs[256, 2][1]) / 2
                assert of_a_unit <= MOST[precision], (precision, plan, of_a_unit, costs)
        monkeypatch.setitem(SIZES, "cpu", TINY)
        calls, operations = cost_of_update(PLANS[1], "bf16", 128, 2)
        assert calls > 100 and operations > 1000, "control"

    run_ranks(check, 1)


@pytest.mark.by_cpu
def test_plans_have_the_same_bits_and_the_planned_bytes(as_on_cuda: None) -> None:
    def check(rank: int) -> dict[str, Any]:
        found = {}
        for number, precision in enumerate(PRECISIONS):
            norms: list[float] = []
            for plan in plans_of(number):
                model = make(Net)
                handle = zeroshard.shard(model, plan, units=Block, precision=precision)
                optimizer = zeroshard.ShardedOptimizer(in_two_groups(model), torch.optim.AdamW, lr=1e-2, foreach=True)
                for step in range(2):
                    optimizer.backward(loss_of_tokens(model, rank, 0, step))
                    norms.append(optimizer.step().grad_norm)
                    optimizer.zero_grad()
                planned = plan_memory(
                    make(Net),
                    plan,
                    3,
                    units=Block,
                    precision=precision,
                    group_of=lambda name: name.endswith("bias"),
                    rank=rank,
                    transport=transport_of(handle),
                )
                assert handle.memory() == planned, (precision, plan)
                main = handle.full_state_dict(main=True)
                assert same_bits(main, found.setdefault(precision, main)), (precision, plan)
            assert norms == norms[:2] * len(plans_of(number)), precision
        return found

    def by_reference(rank: int) -> list[dict[str, torch.Tensor]]:
        results = []
        for precision in PRECISIONS:
            model = make(Net)
            reference = Reference(
                model,
                torch.optim.AdamW,
                num_ranks=3,
                precision=precision,
                params=in_two_groups(model),
                lr=1e-2,
                foreach=True,
            )
            for step in range(2):
                reference.step(lambda model, rank, micro, step=step: loss_of_tokens(model, rank, micro, step))
            parameters = model.state_dict(keep_vars=True)
            results.append({name: reference.main[parameter].detach() for name, parameter in parameters.items()})
        return results

    of_ranks = run_ranks(check, 3)
    # In a rank as well: so it has as many threads as the others.
    for precision, main in zip(PRECISIONS, run_ranks(by_reference, 1)[0], strict=True):
        assert all(same_bits(found[precision], main) for found in of_ranks), precision


@pytest.mark.by_cpu
def test_small_operations_have_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    """The operations around the optimizer work on parts of `at_once` elements, wherever the pieces end."""

    def weights_of(sizes: Sizes, precision: str) -> dict[str, torch.Tensor]:
        monkeypatch.setitem(SIZES, "cpu", sizes)
        model = make(Net)
        handle = zeroshard.shard(model, "zero1", units=Block, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(in_two_groups(model), torch.optim.AdamW, lr=1e-2)
        for step in range(3):
            optimizer.backward(loss_of_tokens(model, 0, 0, step))
            optimizer.clip_grad_value_(0.01)  # not by the norm, which depends on where pieces end
            optimizer.step()
            optimizer.zero_grad()
            with torch.no_grad():
                model.blocks[1].up.weight[:, ::3] = 0.25  # main follows
        held = handle.memory()
        names = {"units": Block, "precision": precision, "group_of": lambda name: name.endswith("bias")}
        assert held == plan_memory(make(Net), "zero1", 1, **names), (sizes, precision)
        found = handle.full_state_dict(main=True)
        handle.close()
        return found

    def check(rank: int) -> None:
        for precision in PRECISIONS:
            expected = weights_of(SIZES["cuda"], precision)
            others = (
                Sizes(1 << 18, 1 << 20, 256, 1 << 20),
                Sizes(512, 2048, 256, 4096),
                Sizes(512, 1 << 20, 1 << 18, 2048),
                TINY,
            )
            for sizes in others:
                assert same_bits(weights_of(sizes, precision), expected), (sizes, precision)
        assert abs(float(expected["blocks.1.up.weight"][0, 0]) - 0.25) < 1e-3

    assert WIDTH > 3 and cuts.sizes_for("xpu") is SIZES["cuda"]
    run_ranks(check, 1)


@pytest.mark.by_cpu
def test_batches_are_larger_where_nothing_is_cast_and_nothing_is_gathered_after_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each batch is one call of the class."""

    def check(rank: int, num_ranks: int) -> None:
        monkeypatch.setitem(SIZES, "cpu", Sizes(piece=256, batch=512, at_once=256, in_place=2048))
        for plan, precision in itertools.product(("ddp", "zero1", "zero3"), PRECISIONS):
            handle = zeroshard.shard(make(Net), plan, units=Block, precision=precision)
            (stepper,) = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW).steppers
            assert isinstance(stepper, FlatStep)
            sizes = [sum(piece.world.numel for piece in batch.pieces) for batch in stepper._batches]
            is_whole = num_ranks == 1 or plan == "ddp"
            limit = 2048 if is_whole and precision != "bf16-remainder" else 512
            assert limit / 2 < max(sizes) <= limit, (plan, precision, sizes)
            handle.close()

    for num_ranks in (1, 2):
        run_ranks(check, num_ranks, num_ranks)
