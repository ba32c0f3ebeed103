"""Plan OPTIMIZER_ONLY: torch's DistributedDataParallel reduces the gradients, this optimizer shards main and state."""

from __future__ import annotations

from contextlib import nullcontext
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

import zeroshard
from tests.kit import VOCAB, Net, State, largest_difference, make, same_bits
from tests.together import on_ranks
from zeroshard.testing import expect_same_logs, run_ranks

ADAMW = {"lr": 1e-2, "foreach": False}


def split(model: nn.Module) -> list[dict[str, Any]]:
    return [
        {"params": [p for p in model.parameters() if p.dim() > 1], "weight_decay": 0.3},
        {"params": [p for p in model.parameters() if p.dim() < 2], "lr": 3e-2},
    ]


def loss(model: nn.Module, rank: int, step: int, micro_batch: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1 + rank + 10 * micro_batch + 100 * step)
    tokens = torch.randint(VOCAB, (3, 6), generator=generator)
    logits = model(tokens[:, :-1]).float()
    return nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def train(
    rank: int, sharded: bool, options: dict[str, Any], *, tied: bool = False, micro_batches: int = 1
) -> tuple[State, Any]:
    """Four steps under torch DDP, with a scheduler; plain or sharded optimizer."""
    ddp = DistributedDataParallel(make(partial(Net, tied=tied)))
    optimizer: Any
    if sharded:
        optimizer = zeroshard.ShardedOptimizer(split(ddp), torch.optim.AdamW, **options)
    else:
        optimizer = torch.optim.AdamW(split(ddp), **options)
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.7)
    for step in range(4):
        optimizer.zero_grad()
        for micro_batch in range(micro_batches):
            with ddp.no_sync() if micro_batch < micro_batches - 1 else nullcontext():
                (loss(ddp, rank, step, micro_batch) / micro_batches).backward()
        optimizer.step()
        schedule.step()
    return {name: value.detach().clone() for name, value in ddp.module.state_dict().items()}, optimizer


@pytest.mark.parametrize("num_ranks", [1, 2, 3])
def test_parity_with_a_plain_optimizer_under_ddp(num_ranks: int) -> None:
    def check(rank: int) -> list[Any]:
        logs = []
        for tied, micro_batches in ((False, 1), (True, 3)):
            plain, reference = train(rank, False, ADAMW, tied=tied, micro_batches=micro_batches)
            found, optimizer = train(rank, True, ADAMW, tied=tied, micro_batches=micro_batches)
            assert same_bits(found, plain)
            state, expected = optimizer.state_dict(), reference.state_dict()
            assert state["param_groups"] == expected["param_groups"]
            assert all(same_bits(state["state"][i], expected["state"][i]) for i in expected["state"])
            logs.append(optimizer.handle.comm_log)
        fused = {"lr": 1e-2, "fused": True}
        assert largest_difference(train(rank, True, fused)[0], train(rank, False, fused)[0]) < 1e-6
        return logs

    for logs in zip(*run_ranks(check, num_ranks), strict=True):
        expect_same_logs(logs)


@on_ranks(2)
def test_another_learning_rate_is_seen(rank: int) -> None:
    plain, _ = train(rank, False, ADAMW)
    other, _ = train(rank, True, {**ADAMW, "lr": 0.0101})
    assert not same_bits(plain, other)


def test_state_is_sharded_and_weights_are_gathered_once_per_step() -> None:
    def check(rank: int) -> Any:
        _, optimizer = train(rank, True, ADAMW)
        handle = optimizer.handle
        memory = handle.memory()
        used = sum(parameter.numel() for unit in handle.engine.units for parameter in unit.parameters)
        numel = sum(unit.layout.numel for unit in handle.engine.units)
        assert memory["weights"] == 4 * numel
        assert memory["grads"] == memory["main"] == memory["ring"] == memory["buckets"] == 0
        assert memory["state"] <= 8 * numel // 3
        gathers = [event for event in handle.comm_log.entries if event.op == "all_gather"]
        assert len(gathers) == 4 * len(handle.engine.units)
        assert sum(event.bytes for event in gathers) == 4 * 4 * numel * 2 // 3
        assert not any(event.op == "reduce_scatter" for event in handle.comm_log.entries)
        return memory["state"], 8 * used

    states = run_ranks(check, 3)
    assert states[0][1] <= sum(state for state, _ in states) < states[0][1] + 8 * 256 * 3 * 3


@on_ranks(3)
def test_a_16_bit_model_gets_an_fp32_master(rank: int) -> None:
    """With updates that bf16 without fp32 main would lose: 2^-9 of a weight and less."""
    model = nn.Linear(5, 3, bias=False).bfloat16()
    nn.init.ones_(model.weight)
    ddp = DistributedDataParallel(model)
    optimizer = zeroshard.ShardedOptimizer(ddp.parameters(), torch.optim.SGD, lr=2.0**-10)
    for _ in range(8):
        optimizer.zero_grad()
        ddp(torch.full((1, 5), rank * 1.0, dtype=torch.bfloat16)).sum().backward()
        optimizer.step()
    assert model.weight.dtype == torch.bfloat16
    assert model.weight.eq(1 - 8 * 2.0**-10).all()  # the mean over ranks 0, 1, 2 of the gradient is 1


@on_ranks(3)
def test_state_goes_back_and_forth(rank: int) -> None:
    weights, plain = train(rank, False, ADAMW)
    model = make(Net, 1)
    model.load_state_dict(weights)
    ddp = DistributedDataParallel(model)
    sharded = zeroshard.ShardedOptimizer(split(ddp), torch.optim.AdamW, **ADAMW)
    sharded.load_state_dict(plain.state_dict())
    loss(ddp, rank, 9).backward()
    sharded.step()

    other = make(Net, 2)
    other.load_state_dict(weights)
    twin = DistributedDataParallel(other)
    optimizer = torch.optim.AdamW(split(twin), **ADAMW)
    optimizer.load_state_dict(plain.state_dict())
    loss(twin, rank, 9).backward()
    optimizer.step()
    assert same_bits(dict(model.state_dict()), dict(other.state_dict()))
    optimizer.load_state_dict(sharded.state_dict())
    assert all(value.shape == p.shape for p, s in optimizer.state.items() for value in s.values() if value.dim())


@on_ranks(3)
def test_what_is_wrong_is_said_on_every_rank(rank: int) -> None:
    model = make(Net)
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    assert not optimizer.step().applied
    with pytest.raises(ValueError, match=r"param.* is sharded already|belongs to another ShardedOptimizer"):
        zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with pytest.raises(ValueError, match=r"built before shard\(\): call shard\(\) first"):
        zeroshard.shard(model, "zero1")
    for p in model.parameters():
        assert torch.isfinite(p).all()
    frozen = nn.Linear(2, 2).requires_grad_(False)
    assert not zeroshard.ShardedOptimizer(frozen.parameters(), torch.optim.SGD).step().applied
    different = nn.Linear(2, 3 if rank == 1 else 2)
    before = different.weight.data_ptr()
    with pytest.raises(ValueError, match="the ranks have different"):
        zeroshard.ShardedOptimizer(different.parameters(), torch.optim.SGD)
    assert different.weight.data_ptr() == before
    loss(model, rank, 0).backward()
    for p in model.parameters():
        torch.distributed.all_reduce(p.grad)
    optimizer.step()


@on_ranks(2)
def test_data_that_have_been_replaced_are_told_in_the_words_of_an_optimizer(rank: int) -> None:
    """There is no shard, no handle and no precision here; values that are written in place are taken."""
    model = nn.Sequential(nn.Linear(6, 8), nn.Linear(8, 3))
    optimizer = zeroshard.ShardedOptimizer(model.parameters(), torch.optim.SGD, lr=0.1)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.zeros_like(parameter))
    nn.utils.vector_to_parameters(torch.zeros(83), model.parameters())
    model(torch.ones(2, 6)).sum().backward()
    with pytest.raises(zeroshard.errors.InvalidState, match=r"ShardedOptimizer: .*replaced.*copy_\(values") as error:
        optimizer.step()
    assert not any(word in str(error.value) for word in ("shard()", "handle", "MixedPrecision"))
