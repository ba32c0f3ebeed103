"""`close` for rank 0 alone, to a named device, and interrupted half way. (In general: `tests/test_handle.py`; how much
memory it takes: `tests/planning/test_whole_model.py`.)"""

from __future__ import annotations

from typing import Any

import pytest
import torch

import zeroshard
from tests.kit import PLANS, Block, Net, loss_of_tokens, make, plans_of, same_bits
from tests.runtime.test_full_state import start
from tests.together import on_ranks
from zeroshard.storage.unit import Unit
from zeroshard.testing import expect_same_logs, run_ranks


@pytest.mark.by_cpu
def test_a_plain_model_on_rank_0_alone() -> None:
    def check(rank: int) -> list[Any]:
        logs = []
        for plan in plans_of(1):
            model, handle, optimizer = start(plan, rank)
            full = handle.full_state_dict(main=True)
            # The frozen embedding is held in bf16.
            expected = {n: value.float() if value.is_floating_point() else value for n, value in full.items()}
            logs.append(handle.comm_log)
            with pytest.raises(ValueError, match="close: the meta device holds no values"):
                handle.close(device="meta")
            handle.close(rank0_only=True, device="cpu")
            handle.close()
            with pytest.raises(RuntimeError, match="this handle is closed"):
                optimizer.step()
            if rank == 0:
                assert same_bits(dict(model.state_dict()), expected), plan
                assert all(p.untyped_storage().nbytes() == p.nbytes for p in model.parameters())
                loss_of_tokens(model, rank, 0, 1).backward()
            else:
                assert all("are lost" in repr(p) for p in model.parameters())
                for name, parameter in model.named_parameters():
                    with pytest.raises(RuntimeError, match=rf"{name} are lost: they were given back on rank 0 alone"):
                        parameter.sum()
                with pytest.raises(RuntimeError, match="given back on rank 0 alone"):
                    loss_of_tokens(model, rank, 0, 1)
        return logs

    for logs in zip(*run_ranks(check, 3), strict=True):
        expect_same_logs(logs)


def test_a_close_that_fails_half_way_abandons_the_handle(monkeypatch: pytest.MonkeyPatch) -> None:
    """Units that were given back stay as they are. The values of all others are lost, and reading them says so."""
    gather = Unit.gather_main

    def fail_at_the_third(unit: Unit, collectives: Any) -> Any:
        if unit.index == 2:
            raise MemoryError("no room")
        return gather(unit, collectives)

    def check(rank: int) -> None:
        model = make(Net)
        handle = zeroshard.shard(model, "zero3", units=Block)
        expected = handle.full_state_dict()
        first = {slot.name for unit in handle.engine.units[:2] for slot in unit.layout.slots}
        with monkeypatch.context() as patch:
            patch.setattr(Unit, "gather_main", fail_at_the_third)
            with pytest.raises(MemoryError):
                handle.close()
        with pytest.raises(RuntimeError, match="this handle was abandoned"):
            handle.full_state_dict()
        for name, parameter in model.named_parameters():
            if name in first:
                assert torch.equal(parameter, expected[name])
            else:
                with pytest.raises(RuntimeError, match="are lost: its handle was abandoned"):
                    parameter.sum()

    run_ranks(check, 2)


@on_ranks(2)
def test_a_closed_model_accumulates_gradients_in_its_own_dtype(rank: int) -> None:
    """While it is sharded, a 16-bit model has gradients in fp32."""
    for plan in PLANS:
        model = make(Net).bfloat16()
        handle = zeroshard.shard(model, plan, units=Block)
        loss_of_tokens(model, rank, 0, 0).backward()
        zeroshard.ShardedOptimizer(handle, torch.optim.SGD, lr=0.1).step()
        handle.close()
        loss_of_tokens(model, rank, 0, 1).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()
        assert {p.grad.dtype for p in model.parameters() if p.grad is not None} == {torch.bfloat16}


@on_ranks(2)
def test_a_graph_from_before_close_has_no_backward_beyond_ddp(rank: int) -> None:
    """Under ZeRO-3 it said "weights cannot be without values"; under ZeRO-1 and 2 gradients were left that no rank
    held."""
    for plan in PLANS:
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        loss = loss_of_tokens(model, rank, 0, 0)
        loss.backward(retain_graph=True)
        expected = {name: handle.gradient(name) for name, _ in model.named_parameters()}
        model.zero_grad()
        handle.close()
        if plan is zeroshard.DDP:
            loss.backward()
            assert same_bits({name: p.grad for name, p in model.named_parameters()}, expected)
            continue
        with pytest.raises(RuntimeError, match=r"backward: unit \S+ .*is not sharded any more.*before handle.close"):
            loss.backward()
        loss_of_tokens(model, rank, 0, 0).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_gradient_that_waits_when_the_handle_is_closed(rank: int) -> None:
    """It named methods of the handle, which is closed, or said nothing but that the handle was gone."""
    for plan in plans_of(1):
        model = make(Net)
        handle = zeroshard.shard(model, plan, units=Block)
        loss_of_tokens(model, rank, 0, 0).backward()
        handle.close()
        if plan is zeroshard.DDP:
            torch.optim.SGD(model.parameters(), lr=0.1).step()
            continue
        for step in (
            lambda model=model: torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0),
            lambda model=model: torch.optim.SGD(model.parameters(), lr=0.1).step(),
            lambda model=model: loss_of_tokens(model, rank, 0, 1).backward(),
        ):
            with pytest.raises(RuntimeError, match=r"this gradient is from before handle.close\(\).*model.zero_grad"):
                step()
        model.zero_grad()
        loss_of_tokens(model, rank, 0, 1).backward()
        torch.optim.SGD(model.parameters(), lr=0.1).step()


@on_ranks(2)
def test_a_close_with_gradients_that_are_wider_than_the_weights(rank: int) -> None:
    """It raised what torch says of `grad_dtype`, when all weights had been given back, and raised so at each call."""
    for plan in PLANS:
        model = torch.nn.Linear(8, 8, dtype=torch.bfloat16)
        handle = zeroshard.shard(model, plan, precision="bf16")
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()
        handle.close()
        for parameter in model.parameters():
            assert parameter.grad is not None and parameter.grad.dtype == parameter.grad_dtype == torch.bfloat16
        if plan.mean.name != "REPLICATED":
            with pytest.raises(RuntimeError, match=r"this gradient is from before handle.close\(\)"):
                model.weight.grad.sum()  # type: ignore[union-attr]
        model.zero_grad()
        model(torch.ones(2, 8, dtype=torch.bfloat16)).sum().backward()


@on_ranks(2)
def test_a_close_leaves_the_methods_that_a_model_has_of_its_own(rank: int) -> None:
    """Those of `register_forward_method` once went, also if the user had set them on the instance."""
    model = torch.nn.Linear(8, 8)
    model.twice = twice = lambda x: model(x) + x @ model.weight  # type: ignore[assignment]
    handle = zeroshard.shard(model, "zero3")
    handle.register_forward_method(model, "twice")
    handle.register_forward_method(model, "twice")
    model.twice(torch.ones(2, 8))
    handle.close()
    assert model.twice is twice
