"""torch: test/distributed/fsdp/test_fsdp_*.py and test_utils.py, what no other test of this folder requires."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import zeroshard
from tests.outside.common import (
    MLP,
    PLANS,
    State,
    Twins,
    average_gradients,
    expect_close,
    expect_same_bits,
    numbers,
    state_of,
    under_all_plans,
)
from tests.patience import HANG
from tests.together import on_ranks
from zeroshard.placement import Plan
from zeroshard.testing import run_ranks

WIDTH = 64
Call = Callable[[zeroshard.Handle, zeroshard.ShardedOptimizer], object]


def norm_of_weights(handle: zeroshard.Handle, optimizer: zeroshard.ShardedOptimizer) -> float:
    with handle.unsharded():
        return sum(float(parameter.detach().square().sum()) for parameter in handle.model.parameters())


def trained_with_a_hook(rank: int, plan: Plan, where: str, call: Call | None) -> tuple[State, list[str]]:
    """Train with a call in a hook of the second backward. Returns the weights, and the call's errors."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH) for _ in range(3)))  # each is a unit
    handle = zeroshard.shard(model, plan, units=nn.Linear)
    optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.Adam, lr=1e-2)
    errors: list[str] = []

    def hook(*args: object) -> None:
        try:
            if call is not None:
                call(handle, optimizer)
        except zeroshard.Error as error:
            errors.append(str(error))

    for step in range(3):
        out = model(numbers(WIDTH, rank, step))
        if step == 1 and where == "output":
            out.register_hook(hook)
        removable = model[1].weight.register_post_accumulate_grad_hook(hook) if (step, where) == (1, "weight") else None
        out.square().sum().backward()
        if removable is not None:
            removable.remove()
        optimizer.step()
    return handle.full_state_dict(), errors


@on_ranks(2)
def test_hooks_in_backward_may_read_weights(rank: int) -> None:
    """test_unshard_params_from_backward_raises. What the last layer's backward needed was gone under ZERO3."""
    for plan in PLANS:
        for where in ("output", "weight"):
            expected, _ = trained_with_a_hook(rank, plan, where, None)
            for call in (norm_of_weights, lambda handle, optimizer: handle.full_state_dict()):
                found, errors = trained_with_a_hook(rank, plan, where, call)
                assert not errors
                expect_same_bits([expected, found])


REFUSED: dict[str, Call] = {
    "optimizer.step": lambda handle, optimizer: optimizer.step(),
    "zero_grad": lambda handle, optimizer: optimizer.zero_grad(),
    "model.zero_grad": lambda handle, optimizer: handle.model.zero_grad(),
    "clip_grad_norm_": lambda handle, optimizer: optimizer.clip_grad_norm_(1.0),
    "clip_grad_value_": lambda handle, optimizer: optimizer.clip_grad_value_(1e-3),
    "park": lambda handle, optimizer: handle.park(),
    "close": lambda handle, optimizer: handle.close(),
}


def test_what_hooks_in_backward_may_not_call() -> None:
    """The same, with calls for which gradients must be complete. They hung, clipped a part, or had no effect."""

    def check(rank: int) -> None:
        for plan in PLANS:
            for where in ("output", "weight"):
                expected, _ = trained_with_a_hook(rank, plan, where, None)
                for call in REFUSED.values():
                    found, errors = trained_with_a_hook(rank, plan, where, call)
                    assert len(errors) == 1 and "inside of a backward" in errors[0]
                    expect_same_bits([expected, found])

    run_ranks(check, 2, collective_timeout=HANG)


@pytest.mark.parametrize("call", ["optimizer.step", "zero_grad", "clip_grad_norm_", "clip_grad_value_"])
def test_what_hooks_in_the_backward_of_torch_ddp_may_not_call(call: str) -> None:
    """The same under OPTIMIZER_ONLY: a step used what was in `p.grad`, in silence. A backward without these gradients
    is no matter, nor is the end of one."""

    def check(rank: int) -> None:
        errors = []
        torch.manual_seed(0)
        model = nn.Sequential(*(nn.Linear(4, 4) for _ in range(3)))
        ddp = nn.parallel.DistributedDataParallel(model)
        optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=1e-2)

        def hook(*args: object) -> None:
            try:
                REFUSED[call](optimizer.handle, optimizer)
            except zeroshard.Error as error:
                errors.append(str(error))

        removable = model[1].weight.register_post_accumulate_grad_hook(hook)
        ddp(numbers(4, rank, 0)).square().sum().backward()
        assert len(errors) == 1 and "inside of a backward" in errors[0]
        removable.remove()
        assert optimizer.step().applied
        x = numbers(4, rank, 1).requires_grad_()
        x.register_hook(hook)
        torch.autograd.grad(model(x).sum(), x)
        end = torch.autograd.Variable._execution_engine.queue_callback
        model[0].weight.register_post_accumulate_grad_hook(lambda parameter: end(hook))
        optimizer.zero_grad()
        model(numbers(4, 0, 2)).square().sum().backward()
        assert len(errors) == 1

    run_ranks(check, 2, collective_timeout=HANG)


@on_ranks(2)
def test_an_average_inside_of_the_model_is_evaluated(rank: int) -> None:
    """test_train_ema_eval_flow: the model has a part that trains and its average, which is evaluated."""

    class WithAverage(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = MLP(8)
            self.average = AveragedModel(MLP(8), multi_avg_fn=get_ema_multi_avg_fn(0.5), use_buffers=True)

        def forward(self, x: Tensor) -> Tensor:
            out: Tensor = (self.module if self.training else self.average)(x)
            return out

    def train(rank: int, plan: Plan) -> State:
        model = WithAverage()
        twins = Twins(model, plan, shard={"units": MLP}, groups=lambda one: one.module.parameters())
        for step in range(3):
            twins.backward(lambda one, step=step: one(numbers(8, rank, step)).square().sum())
            average_gradients(twins.plain.module.parameters())
            twins.plain_optimizer.step()
            twins.plain_optimizer.zero_grad()
            twins.optimizer.step()
            outputs = []
            both: tuple[tuple[Any, AbstractContextManager[None]], ...] = (
                (model, twins.handle.unsharded(write=True)),
                (twins.plain, nullcontext()),
            )
            for one, scope in both:
                with scope:
                    one.average.update_parameters(one.module)
                with torch.no_grad():
                    outputs.append(one.eval()(numbers(8, 0)))
                one.train()
            torch.testing.assert_close(*outputs)
        return twins.expect_equal()

    under_all_plans(rank, train)


class OfSequences(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn, self.head = nn.LSTM(4, 6, 2), nn.Linear(6, 1)

    def forward(self, packed: PackedSequence) -> Tensor:
        padded, _ = pad_packed_sequence(self.rnn(packed)[0])
        out: Tensor = self.head(padded)
        return out


@pytest.mark.parametrize("precision", [None, "bf16"])
@on_ranks(2)
def test_packed_sequences(rank: int, precision: str | None) -> None:
    """test_packed_sequence: into a model and out of a unit; in bf16 they are cast, and the lengths are not."""

    def train(rank: int, plan: Plan) -> State:
        model = OfSequences()
        plain = copy.deepcopy(model)
        handle = zeroshard.shard(model, plan, units=nn.LSTM, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=1e-2)
        plain_optimizer = torch.optim.SGD(plain.parameters(), lr=1e-2)
        for step in range(2):
            packed = pack_padded_sequence(
                numbers(4, rank, step, rows=15).view(5, 3, 4), torch.tensor([2, 5, 3]), enforce_sorted=False
            )
            for one in (model, plain):
                one(packed).float().square().sum().backward()
            average_gradients(plain.parameters())
            for one in (optimizer, plain_optimizer):
                one.step()
                one.zero_grad()
        if precision is None:
            expect_close(handle.full_state_dict(), state_of(plain))
        return handle.full_state_dict(main=True)

    under_all_plans(rank, train)


@on_ranks(2)
def test_values_that_the_user_puts_into_the_state(rank: int) -> None:
    """test_state_dict_with_none_tensor_state: numbers and None beside the tensors of an optimizer's state."""
    for plan in PLANS:
        model = nn.Sequential(nn.Linear(5, 5), nn.Linear(5, 5))
        optimizer = zeroshard.ShardedOptimizer(zeroshard.shard(model, plan), torch.optim.Adam, lr=1e-2)
        model(numbers(5, rank)).sum().backward()
        optimizer.step()
        state = optimizer.state_dict()
        for of_parameter in state["state"].values():
            of_parameter.update(value1=2.74, value2=None)
        optimizer.load_state_dict(state)
        model(numbers(5, rank, 1)).sum().backward()
        optimizer.step()
        found = optimizer.state_dict()["state"]
        assert [(one["value1"], one["value2"]) for one in found.values()] == [(2.74, None)] * 4


@on_ranks(2)
def test_an_optimizer_of_ignored_parameters_says_which_they_are(rank: int) -> None:
    """test_ignored_states_auto_wrap: there, one optimizer has all parameters of the model."""
    model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 5))
    zeroshard.shard(model, "zero3", ignored=[model[1].weight])
    with pytest.raises(ValueError, match=r"of the shapes \(5, 4\): a plain optimizer steps those of ignored="):
        zeroshard.ShardedOptimizer(model.parameters(), torch.optim.Adam, lr=0.1)
