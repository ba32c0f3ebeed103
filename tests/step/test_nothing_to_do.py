"""A step without any gradient does nothing, as in torch: a loop may skip a bad batch, or call `step()` once for a
scheduler. (It once raised "there are no gradients".) Mistakes still raise.

The result of `step(closure)` works as a number: `float(optimizer.step(closure))`, `total += ...` and comparisons once
raised TypeError.
"""

from __future__ import annotations

import copy
import math
import pickle
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import zeroshard
from tests.kit import Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.together import on_ranks
from zeroshard.testing import run_ranks


@pytest.mark.parametrize("precision", [None, "fp16"])
@on_ranks(3)
def test_a_step_without_gradients_does_nothing_under_every_plan(rank: int, precision: str | None) -> Any:
    logs = []
    for plan in plans_of(precision is None):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block, precision=precision)
        optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.AdamW, lr=1e-2, weight_decay=0.5)
        start, losses = handle.full_state_dict(main=True), []
        for _ in range(2):
            assert optimizer.clip_grad_norm_(1.0).item() == 0.0
            result = optimizer.step()
            assert not result.applied and result.grad_norm == 0.0
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        optimizer.zero_grad()  # the batch is discarded
        assert not optimizer.step(partial(losses.append, 1)).applied
        with handle.no_sync():
            optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        optimizer.zero_grad()
        assert not optimizer.step().applied
        assert same_bits(handle.full_state_dict(main=True), start)
        assert losses == [1] and not optimizer.state_dict()["state"]
        optimizer.backward(loss_of_tokens(model, rank, 0, 0))
        assert optimizer.step().applied
        assert optimizer.state_dict()["state"][0]["step"] == 1
        assert not same_bits(handle.full_state_dict(main=True), start)
        logs.append(handle.comm_log)
    return logs


def test_what_is_a_mistake_still_raises() -> None:
    def check(rank: int) -> None:
        for plan in plans_of(1):
            model = make(Net)
            handle = zeroshard.shard(model, plan, units=Block)
            optimizer = zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1)
            with handle.no_sync():
                loss_of_tokens(model, rank, 0, 0).backward()
            with pytest.raises(RuntimeError, match=r"never reduced. Run the last micro-batch's backward outside"):
                optimizer.step()
            optimizer.zero_grad()
            loss_of_tokens(model, rank, 0, 0).backward()
            optimizer.step()
            for call in (optimizer.step, lambda optimizer=optimizer: optimizer.clip_grad_norm_(1.0)):
                with pytest.raises(RuntimeError, match="the previous step has consumed the gradients"):
                    call()
            optimizer.zero_grad()
            assert not optimizer.step().applied

    run_ranks(check, 2)


@on_ranks(3)
def test_gradients_on_some_ranks_alone_are_a_mistake(rank: int) -> None:
    model = nn.Linear(3, 2)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert not optimizer.step().applied
    if rank == 1:
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(RuntimeError, match="rank 0, 2: no gradients, although other ranks have some"):
        optimizer.step()


@pytest.mark.parametrize("loss", [torch.tensor(2.5), 2.5], ids=["tensor", "number"])
def test_a_result_is_the_loss_where_torchs_callers_want_it(loss: Any) -> None:
    result = zeroshard.StepResult(True, 1.0, loss=loss)
    assert float(result) == 2.5 and int(result) == 2 and round(result, 1) == 2.5
    assert math.isfinite(result) and not math.isnan(result)
    assert f"{result:.2f}" == "2.50" and f"{result}" == str(result)
    assert result < 3 and result <= 2.5 and result > 1 and result >= 2.5 and result == 2.5 and result != 2
    assert min(result, 3.0) is result and max([1.0, result]) is result
    assert sum([result, result]) == 5.0
    assert (result + 1, 1 + result, result - 1, 1 - result) == (3.5, 3.5, 1.5, -1.5)
    assert (result * 2, 2 * result, result / 2, 5 / result, result**2, 2**result) == (5, 5, 1.25, 2, 6.25, 2**2.5)
    assert (-result, +result, abs(-result), result // 2, result % 2, 7 // result) == (-2.5, 2.5, 2.5, 1, 0.5, 2)
    assert result + result == 5.0 and result < zeroshard.StepResult(True, 0.0, loss=3.0)
    assert torch.tensor([1.0]) + result == 3.5
    assert copy.deepcopy(result) == result and pickle.loads(pickle.dumps(result)) == result


def test_a_tensor_stays_one() -> None:
    loss = torch.tensor(2.5)
    result = zeroshard.StepResult(True, 1.0, loss=loss)
    assert result.item() == 2.5 and result.detach().dtype == torch.float32
    assert torch.isnan(result).logical_not() and torch.stack([result, result]).tolist() == [2.5, 2.5]
    assert isinstance(result * 2, torch.Tensor)
    assert result.applied and result.loss is loss


def test_results_whose_losses_have_graphs_are_compared() -> None:
    """It raised: such a loss cannot be copied."""
    loss = torch.ones((), requires_grad=True) * 2
    assert zeroshard.StepResult(True, 1.0, loss=loss) == zeroshard.StepResult(True, 1.0, loss=loss)
    assert zeroshard.StepResult(True, 1.0, loss=loss) != zeroshard.StepResult(True, 1.0, loss=loss + 1)


def test_without_a_closure_there_is_no_loss() -> None:
    result = zeroshard.StepResult(True, 1.0)
    for use in (float, lambda r: r < 1, lambda r: r + 1, lambda r: r.item(), lambda r: f"{r:.1f}"):
        with pytest.raises(TypeError, match=r"no loss: step\(\) was called without a closure"):
            use(result)
    assert result and "applied=True" in f"{result}"
    assert not hasattr(result, "_private") and result == zeroshard.StepResult(True, 1.0) and {result}
